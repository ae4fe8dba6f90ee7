//! A running Kafka cluster: found through the environment or started for one test, its topics,
//! offsets and failures.

use std::{
    env,
    process::{self, Command},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{
        AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
        TopicReplication,
    },
    client::DefaultClientContext,
    consumer::{BaseConsumer, CommitMode, Consumer},
    error::{KafkaError, KafkaResult},
    types::RDKafkaErrorCode,
};

use crate::{eventually, unique};

/// How long a call waits for the brokers before it panics.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/kafka");

/// The cluster that `KAFKA_BROKERS` names, shared with every other test.
///
/// `None`, with a line that says so, when there is none: the test is skipped. With
/// `RELIABLE_CONSUMER_REQUIRE_BROKER=1` (`scripts/test` sets it) that is a failure instead.
pub fn cluster() -> Option<Cluster> {
    if let Some(brokers) = env::var("KAFKA_BROKERS").ok().filter(|it| !it.is_empty()) {
        return Some(Cluster::new(brokers, None));
    }
    assert!(
        !is_set("RELIABLE_CONSUMER_REQUIRE_BROKER"),
        "RELIABLE_CONSUMER_REQUIRE_BROKER=1 but KAFKA_BROKERS is not set: run scripts/test"
    );
    println!("skipped: set KAFKA_BROKERS or run scripts/test");
    None
}

/// A cluster of this test's own, whose brokers it may kill.
///
/// Starting one takes seconds and needs Java and Maven, so it is done only where
/// `RELIABLE_CONSUMER_OWN_CLUSTERS=1` says so (`scripts/test` sets it); else the test is skipped.
pub fn own_cluster(brokers: usize) -> Option<Cluster> {
    own(|| Cluster::start(brokers))
}

/// One broker of the test's own with these properties. Skipped where [`own_cluster`] is.
pub fn own_cluster_with(properties: &[(&str, &str)]) -> Option<Cluster> {
    own(|| Cluster::start_with(1, properties))
}

/// A broker of the test's own with TLS, SASL and access control, as `scripts/kafka start --secure`
/// describes it. Skipped where [`own_cluster`] is.
pub fn secure_cluster() -> Option<Cluster> {
    own(Cluster::start_secure)
}

fn own(start: impl FnOnce() -> Cluster) -> Option<Cluster> {
    if is_set("RELIABLE_CONSUMER_OWN_CLUSTERS") {
        return Some(start());
    }
    println!("skipped: set RELIABLE_CONSUMER_OWN_CLUSTERS=1 or run scripts/test");
    None
}

pub(crate) fn is_set(variable: &str) -> bool {
    env::var(variable).is_ok_and(|value| value == "1")
}

/// A running cluster. Dropping it stops the brokers if they were started here, and otherwise
/// deletes the topics that were made through it (unless the test is failing: then they may tell why).
pub struct Cluster {
    brokers: String,
    /// The name under which `scripts/kafka` knows it: only of a cluster of our own.
    name: Option<String>,
    secure: Option<Secure>,
    admin: AdminClient<DefaultClientContext>,
    topics: Mutex<Vec<String>>,
}

/// How a secure cluster is reached; everything else of a test's goes past TLS and SASL.
struct Secure {
    tls: String,
    sasl: String,
    authority: String,
}

/// What a group has committed on one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub partition: i32,
    /// `None` where nothing was committed.
    pub offset: Option<i64>,
    pub metadata: String,
}

impl Cluster {
    /// Starts one broker, or three with replication factor 3.
    pub fn start(brokers: usize) -> Self {
        Self::start_with(brokers, &[])
    }

    /// As [`Cluster::start`], with broker properties of the test's own.
    pub fn start_with(brokers: usize, properties: &[(&str, &str)]) -> Self {
        let mut options = vec!["--brokers".to_owned(), brokers.to_string()];
        for (key, value) in properties {
            options.extend(["--set".to_owned(), format!("{key}={value}")]);
        }
        Self::launch(&options, |_| None)
    }

    fn start_secure() -> Self {
        Self::launch(&["--secure".to_owned()], |printed| {
            Some(Secure {
                tls: printed("KAFKA_TLS"),
                sasl: printed("KAFKA_SASL"),
                authority: printed("KAFKA_CA"),
            })
        })
    }

    fn launch(
        options: &[String],
        secure: impl FnOnce(&dyn Fn(&str) -> String) -> Option<Secure>,
    ) -> Self {
        let name = unique("test");
        let mut command = Command::new(SCRIPT);
        // With an owner the brokers end with this process, however it ends.
        command
            .args(["start", "--name", &name])
            .args(["--owner", &process::id().to_string()])
            .args(options);
        let output = run(&mut command);
        let printed = |what: &str| {
            let mut lines = output.lines().filter_map(|line| line.split_once('='));
            lines
                .find(|(name, _)| *name == what)
                .map(|(_, value)| value.to_owned())
                .unwrap_or_else(|| panic!("scripts/kafka start printed no {what}: {output}"))
        };
        let mut cluster = Self::new(printed("KAFKA_BROKERS"), Some(name));
        cluster.secure = secure(&printed);
        cluster
    }

    fn new(brokers: String, name: Option<String>) -> Self {
        let admin = ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .create()
            .expect("bootstrap.servers is all that an admin client needs");
        Self {
            brokers,
            name,
            secure: None,
            admin,
            topics: Mutex::default(),
        }
    }

    /// `host:port,…`, as `bootstrap.servers` takes it.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// The listeners for TLS.
    pub fn tls(&self) -> &str {
        &self.secure().tls
    }

    /// The listeners for SASL over TLS.
    pub fn sasl(&self) -> &str {
        &self.secure().sasl
    }

    /// The file that says whom to trust, for `ssl.ca.location`.
    pub fn certificate_authority(&self) -> &str {
        &self.secure().authority
    }

    /// Grants the user `guest` an operation, in the words of `kafka-acls`: `["--operation", "Read", …]`.
    pub fn allow_guest(&self, acl: &[&str]) {
        let name = self.name.as_ref().expect("a secure cluster has a name");
        run(Command::new(SCRIPT)
            .args(["acls", "--add", "--allow-principal", "User:guest"])
            .args(acl)
            .args(["--name", name]));
    }

    fn secure(&self) -> &Secure {
        let secure = self.secure.as_ref();
        secure.expect("only a cluster from secure_cluster() has TLS and SASL")
    }

    /// Makes a topic with a unique name that begins with `prefix`, replicated as the brokers do by
    /// default, and returns the name once every partition has a leader and all its replicas.
    ///
    /// Records older than 7 days are deleted within seconds unless `retention.ms` is set to `-1`.
    pub fn create_topic(&self, prefix: &str, partitions: i32, configs: &[(&str, &str)]) -> String {
        let name = unique(prefix);
        self.create_topic_named(&name, partitions, configs);
        name
    }

    /// As [`Cluster::create_topic`], for a name that must be exactly this one.
    pub fn create_topic_named(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) {
        self.make_topic(name, partitions, TopicReplication::Fixed(-1), configs);
    }

    /// Makes a topic with one partition on these brokers, of which the first is its leader.
    pub fn create_topic_on(
        &self,
        prefix: &str,
        brokers: &[i32],
        configs: &[(&str, &str)],
    ) -> String {
        let name = unique(prefix);
        self.make_topic(&name, 1, TopicReplication::Variable(&[brokers]), configs);
        name
    }

    fn make_topic(
        &self,
        name: &str,
        partitions: i32,
        replication: TopicReplication<'_>,
        configs: &[(&str, &str)],
    ) {
        let mut topic = NewTopic::new(name, partitions, replication);
        for (key, value) in configs {
            topic = topic.set(key, value);
        }
        let made = block_on(self.admin.create_topics([&topic], &patient()));
        for result in made.unwrap_or_else(|error| panic!("create topic {name}: {error}")) {
            result.unwrap_or_else(|(topic, code)| panic!("create topic {topic}: {code}"));
        }
        self.topics
            .lock()
            .expect("nothing panics while it holds the list")
            .push(name.to_owned());
        self.wait_in_sync(name);
    }

    /// Waits until every partition of the topic has a leader and all its replicas are in sync, as
    /// after [`Cluster::restart`].
    pub fn wait_in_sync(&self, topic: &str) {
        self.wait_for_partitions(topic, 1);
    }

    /// The same once it has so many partitions at least: brokers hear of new ones a moment after they were made.
    fn wait_for_partitions(&self, topic: &str, least: usize) {
        eventually(&format!("{topic} to be in sync"), PATIENCE, || {
            let Ok(metadata) = self.admin.inner().fetch_metadata(Some(topic), PATIENCE) else {
                return false;
            };
            let partitions = metadata.topics()[0].partitions();
            partitions.len() >= least
                && partitions.iter().all(|partition| {
                    partition.leader() >= 0 && partition.isr().len() == partition.replicas().len()
                })
        });
    }

    /// Adds partitions to a topic until it has so many.
    pub fn add_partitions(&self, topic: &str, partitions: usize) {
        let wanted = NewPartitions::new(topic, partitions);
        let added = block_on(self.admin.create_partitions([&wanted], &patient()));
        for result in added.unwrap_or_else(|error| panic!("add partitions to {topic}: {error}")) {
            result.unwrap_or_else(|(topic, code)| panic!("add partitions to {topic}: {code}"));
        }
        self.wait_for_partitions(topic, partitions);
    }

    /// Changes one setting of a topic, and leaves the others to their defaults.
    pub fn set_topic(&self, topic: &str, setting: &str, value: &str) {
        let change = AlterConfig::new(ResourceSpecifier::Topic(topic)).set(setting, value);
        let changed = block_on(self.admin.alter_configs([&change], &patient()));
        for changed in changed.unwrap_or_else(|error| panic!("change topic {topic}: {error}")) {
            changed.unwrap_or_else(|(topic, code)| panic!("change {topic:?}: {code}"));
        }
    }

    pub fn delete_topic(&self, topic: &str) {
        let deleted = block_on(self.admin.delete_topics(&[topic], &patient()));
        for result in deleted.unwrap_or_else(|error| panic!("delete topic {topic}: {error}")) {
            result.unwrap_or_else(|(topic, code)| panic!("delete topic {topic}: {code}"));
        }
    }

    /// Deletes the records of one partition below the offset `before`, as retention would.
    pub fn delete_records(&self, topic: &str, partition: i32, before: i64) {
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition_offset(topic, partition, Offset::Offset(before))
            .expect("an offset is not negative");
        let deleted = block_on(self.admin.delete_records(&offsets, &patient()))
            .unwrap_or_else(|error| panic!("delete records of {topic}/{partition}: {error}"));
        for element in deleted.elements() {
            element
                .error()
                .unwrap_or_else(|error| panic!("delete records of {topic}/{partition}: {error}"));
        }
    }

    /// The offset behind the last record, by partition.
    pub fn end_offsets(&self, topic: &str) -> Vec<i64> {
        self.partitions(topic)
            .into_iter()
            .map(|partition| self.bounds(topic, partition).1)
            .collect()
    }

    /// The first offset, and that behind the last record.
    pub(crate) fn bounds(&self, topic: &str, partition: i32) -> (i64, i64) {
        let client = self.admin.inner();
        ask(&format!("ends of {topic}/{partition}"), || {
            client.fetch_watermarks(topic, partition, PATIENCE)
        })
    }

    /// What the group has committed, by partition.
    pub fn committed(&self, group: &str, topic: &str) -> Vec<Committed> {
        let mut asked = TopicPartitionList::new();
        for partition in self.partitions(topic) {
            asked.add_partition(topic, partition);
        }
        let member = self.group_member(group);
        let answer = ask(&format!("committed offsets of {group} on {topic}"), || {
            member.committed_offsets(asked.clone(), PATIENCE)
        });
        let mut committed: Vec<_> = answer
            .elements()
            .iter()
            .map(|element| Committed {
                partition: element.partition(),
                offset: match element.offset() {
                    Offset::Offset(offset) => Some(offset),
                    _ => None,
                },
                metadata: element.metadata().to_owned(),
            })
            .collect();
        committed.sort_by_key(|committed| committed.partition);
        committed
    }

    /// Commits for a group that has no members, as an operator or another tool would.
    pub fn commit(&self, group: &str, topic: &str, partition: i32, offset: i64, metadata: &str) {
        let mut offsets = TopicPartitionList::new();
        offsets
            .add_partition_offset(topic, partition, Offset::Offset(offset))
            .expect("an offset is not negative");
        offsets
            .find_partition(topic, partition)
            .expect("it was just added")
            .set_metadata(metadata);
        self.group_member(group)
            .commit(&offsets, CommitMode::Sync)
            .unwrap_or_else(|error| panic!("commit {topic}/{partition} for {group}: {error}"));
    }

    /// Deletes a group that has no members, with all that it has committed.
    pub fn delete_group(&self, group: &str) {
        let deleted = block_on(self.admin.delete_groups(&[group], &patient()));
        for result in deleted.unwrap_or_else(|error| panic!("delete group {group}: {error}")) {
            result.unwrap_or_else(|(group, code)| panic!("delete group {group}: {code}"));
        }
    }

    /// How many members the group has.
    pub fn members(&self, group: &str) -> usize {
        let listed = self
            .admin
            .inner()
            .fetch_group_list(Some(group), PATIENCE)
            .unwrap_or_else(|error| panic!("members of {group}: {error}"));
        let known = listed.groups().iter().find(|known| known.name() == group);
        known.map_or(0, |known| known.members().len())
    }

    /// A consumer that may speak for the group without joining it.
    fn group_member(&self, group: &str) -> BaseConsumer {
        self.client_config()
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .create()
            .expect("these properties exist")
    }

    /// Kills brokers of a cluster of the test's own with SIGKILL; they are numbered from 1.
    pub fn kill(&self, brokers: impl IntoIterator<Item = usize>) {
        self.signal("kill", brokers);
    }

    /// Starts brokers again, at the same ports and on the same data, and waits until they answer.
    /// When most of three are down they come up only together.
    pub fn restart(&self, brokers: impl IntoIterator<Item = usize>) {
        self.signal("restart", brokers);
    }

    fn signal(&self, verb: &str, brokers: impl IntoIterator<Item = usize>) {
        let name = self
            .name
            .as_ref()
            .unwrap_or_else(|| panic!("cannot {verb} brokers that others use: take own_cluster()"));
        let brokers = brokers.into_iter().map(|broker| broker.to_string());
        run(Command::new(SCRIPT)
            .arg(verb)
            .args(brokers)
            .args(["--name", name]));
    }

    pub(crate) fn client_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.brokers);
        config
    }

    pub(crate) fn partitions(&self, topic: &str) -> Vec<i32> {
        let metadata = self
            .admin
            .inner()
            .fetch_metadata(Some(topic), PATIENCE)
            .unwrap_or_else(|error| panic!("partitions of {topic}: {error}"));
        let mut partitions: Vec<_> = metadata.topics()[0]
            .partitions()
            .iter()
            .map(|partition| partition.id())
            .collect();
        assert!(!partitions.is_empty(), "topic {topic} does not exist");
        partitions.sort_unstable();
        partitions
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        match &self.name {
            Some(name) => {
                // A failure here would hide the test's own.
                let _ = Command::new(SCRIPT).args(["stop", "--name", name]).status();
            }
            None if thread::panicking() => {}
            None => {
                let topics = self
                    .topics
                    .get_mut()
                    .expect("nothing panics while it holds the list");
                let mut topics: Vec<_> = topics.iter().map(String::as_str).collect();
                topics.sort_unstable();
                // A topic made twice. The binding reads past the answers if a name is given twice.
                topics.dedup();
                if !topics.is_empty() {
                    let _ = block_on(self.admin.delete_topics(&topics, &patient()));
                }
            }
        }
    }
}

fn patient() -> AdminOptions {
    AdminOptions::new()
        .request_timeout(Some(PATIENCE))
        .operation_timeout(Some(PATIENCE))
}

pub(crate) fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// On a thread of its own, since the caller's may already belong to a runtime.
fn block_on<F: Future<Output: Send> + Send>(future: F) -> F::Output {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime can be built")
                    .block_on(future)
            })
            .join()
            .expect("the admin client does not panic")
    })
}

/// Asks until there is an answer: a broker that has just started is still taking over the groups, and the leader of a topic
/// that was just made may not know of it yet.
fn ask<T>(what: &str, mut question: impl FnMut() -> KafkaResult<T>) -> T {
    let start = Instant::now();
    loop {
        match question() {
            Ok(answer) => return answer,
            Err(error) => assert!(
                is_passing(&error) && start.elapsed() < PATIENCE,
                "{what}: {error}"
            ),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn is_passing(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::NotCoordinator
                | RDKafkaErrorCode::NotLeaderForPartition
                | RDKafkaErrorCode::LeaderNotAvailable
                | RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::OffsetNotAvailable
                | RDKafkaErrorCode::CoordinatorNotAvailable
                | RDKafkaErrorCode::CoordinatorLoadInProgress
        )
    )
}
