//! Real broker: TLS, SASL and missing permissions.
#![cfg(feature = "ssl")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::{
    error::Error,
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use common::{PATIENCE, Running, Seen, all_committed, committed, consumer, millis, until};
use reliable_consumer::{
    Builder, DeadLetter, HandlerResult, Message, OAuthToken, ReliableConsumer, RunError,
    RunErrorKind, Text, permanent,
};
use reliable_consumer_testing::{Cluster, Record, secure_cluster, unique};

/// One for all tests. It ends with this process.
fn cluster() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER.get_or_init(secure_cluster).as_ref()
}

/// A consumer that comes through TLS, without logging in.
fn over_tls(cluster: &Cluster, group: &str) -> Builder {
    consumer(cluster, group)
        .bootstrap_servers(cluster.tls())
        .property("security.protocol", "SSL")
        .property("ssl.ca.location", cluster.certificate_authority())
}

/// A consumer that logs in over TLS.
fn over_sasl(cluster: &Cluster, group: &str, mechanism: &str) -> Builder {
    over_tls(cluster, group)
        .bootstrap_servers(cluster.sasl())
        .property("security.protocol", "SASL_SSL")
        .property("sasl.mechanisms", mechanism)
}

fn logged_in(cluster: &Cluster, group: &str, mechanism: &str, user: &str) -> Builder {
    over_sasl(cluster, group, mechanism)
        .property("sasl.username", user)
        .property("sasl.password", format!("{user}-secret"))
}

/// A topic with these values, one after another.
fn topic_with(cluster: &Cluster, values: &[&str]) -> String {
    let topic = cluster.create_topic("secured", 1, &[]);
    cluster.produce(&topic, values.iter().map(|value| Record::value(*value)));
    topic
}

async fn consumes(cluster: &Cluster, group: &str, topic: &str, builder: Builder) {
    let seen = Seen::default();
    let run = Running::start(builder.topic(topic), seen.noting());
    tokio::task::block_in_place(|| all_committed(cluster, group, topic));
    run.stop().await;
    assert_eq!(seen.all(), [0, 1]);
}

/// How the run of a consumer ends that can do nothing.
async fn refused(builder: Builder) -> RunError {
    let seen = Seen::default();
    let error = Running::start(builder, seen.noting()).ended().await;
    assert_eq!(seen.len(), 0);
    error.expect_err("the run ends with an error")
}

fn tells(error: &RunError, all: &[&str]) {
    for part in all {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_come_over_tls() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (topic_with(cluster, &["a", "b"]), unique("group"));
    consumes(cluster, &group, &topic, over_tls(cluster, &group)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_whose_certificate_is_not_trusted_ends_the_run_and_names_the_setting() {
    let Some(cluster) = cluster() else { return };
    // Without `ssl.ca.location` the system's authorities are trusted, and none of them knows this cluster.
    let builder = consumer(cluster, &unique("group"))
        .bootstrap_servers(cluster.tls())
        .topic("any")
        .property("security.protocol", "SSL");
    let error = refused(builder).await;
    assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
    tells(
        &error,
        &["certificate verify failed", "check ssl.ca.location"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn records_come_after_a_login_with_a_password() {
    let Some(cluster) = cluster() else { return };
    for mechanism in ["PLAIN", "SCRAM-SHA-512"] {
        let (topic, group) = (topic_with(cluster, &["a", "b"]), unique("group"));
        let builder = logged_in(cluster, &group, mechanism, "admin");
        consumes(cluster, &group, &topic, builder).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_ends_the_run_and_says_what_to_check() {
    let Some(cluster) = cluster() else { return };
    for mechanism in ["PLAIN", "SCRAM-SHA-512"] {
        let group = unique("group");
        let builder = logged_in(cluster, &group, mechanism, "admin")
            .property("sasl.password", "not-the-password")
            .topic("any");
        let error = refused(builder).await;
        assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
        tells(
            &error,
            &[
                &group,
                "Authentication failed",
                "check sasl.mechanisms and the credentials",
            ],
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_error_no_debug_output_and_no_log_line() {
    let Some(cluster) = cluster() else { return };
    let log = captured_log();
    let mut told = String::new();
    for (mechanism, password) in [
        ("PLAIN", "hunter-2"),
        ("SCRAM-SHA-512", "hunter-2"),
        // Accepted: what is said on the way of a login that works.
        ("PLAIN", "admin-secret"),
        ("SCRAM-SHA-512", "admin-secret"),
    ] {
        let topic = topic_with(cluster, &["a", "b"]);
        let group = unique("group");
        let builder = logged_in(cluster, &group, mechanism, "admin")
            .property("sasl.password", password)
            // All that librdkafka can say.
            .property("debug", "all")
            .topic(&topic);
        told += &format!("{builder:?}");
        let consumer = builder.build().unwrap();
        told += &format!("{consumer:?} {:?}", consumer.handle());
        let seen = Seen::default();
        let handle = consumer.handle();
        let run = consumer.run(seen.noting());
        told += &format!("{run:?}");
        let run = tokio::spawn(run.into_future());
        if password == "hunter-2" {
            let error = tokio::time::timeout(PATIENCE, run).await.unwrap().unwrap();
            let error = error.unwrap_err();
            told += &format!("{error} {error:?} {error:#?} {:?}", error.report());
        } else {
            until("both records", || seen.len() == 2).await;
            told += &format!("{:?}", handle.status().await.unwrap());
            handle.shutdown().unwrap();
            told += &format!("{:?}", run.await.unwrap());
        }
    }
    let log = String::from_utf8_lossy(&log.lock().unwrap()).into_owned();
    assert!(
        log.contains("SASL") && log.contains("sasl.username"),
        "the log has what librdkafka said"
    );
    for password in ["hunter-2", "admin-secret"] {
        assert!(!told.contains(password), "{told}");
        let line = log.lines().find(|line| line.contains(password));
        assert_eq!(line, None);
    }
}

type Given = Result<OAuthToken, Box<dyn Error + Send + Sync>>;

/// A token that nobody has signed, which the test's broker takes.
fn token(expires: SystemTime) -> OAuthToken {
    let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = format!(
        r#"{{"sub":"admin","iat":{},"exp":{}}}"#,
        seconds(SystemTime::now()),
        seconds(expires)
    );
    OAuthToken {
        token: format!("{}.{}.", base64(r#"{"alg":"none"}"#), base64(&claims)),
        principal: "admin".into(),
        expires,
    }
}

/// For URLs, without padding.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digits = |three: &[u8]| {
        let bits = three
            .iter()
            .fold(0, |bits, byte| bits << 8 | usize::from(*byte))
            << (8 * (3 - three.len()));
        (0..=three.len())
            .map(|digit| char::from(DIGITS[bits >> (18 - 6 * digit) & 63]))
            .collect::<String>()
    };
    text.as_bytes().chunks(3).map(digits).collect()
}

/// The broker ends a connection whose token has run out, so that work beyond that shows that a new one was given.
#[tokio::test(flavor = "multi_thread")]
async fn work_and_dead_letters_go_on_when_tokens_run_out() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (topic_with(cluster, &["bad"]), unique("group"));
    let letters = cluster.create_topic("letters", 1, &[]);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let provider = {
        let asked = Arc::clone(&asked);
        move || -> Given {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            asked.lock().unwrap().push(name);
            Ok(token(SystemTime::now() + Duration::from_secs(5)))
        }
    };
    let seen = Seen::default();
    let noted = seen.clone();
    let handler = async move |message: &Message<Text>| -> HandlerResult {
        noted.note(message.offset());
        if &**message.payload() == "bad" {
            return Err(permanent("no"));
        }
        Ok(())
    };
    let builder = over_sasl(cluster, &group, "OAUTHBEARER")
        .oauth_token_provider(provider)
        .dead_letter(DeadLetter::topic(&letters))
        .topic(&topic);
    let run = Running::start(builder, handler);
    tokio::task::block_in_place(|| all_committed(cluster, &group, &topic));
    // Past the end of two tokens.
    let until = Instant::now() + Duration::from_secs(11);
    let mut sent = 1;
    while Instant::now() < until {
        tokio::time::sleep(millis(500)).await;
        tokio::task::block_in_place(|| cluster.produce(&topic, [Record::value("good")]));
        sent += 1;
    }
    tokio::task::block_in_place(|| {
        cluster.produce(&topic, [Record::value("bad")]);
        all_committed(cluster, &group, &topic);
    });
    run.stop().await;
    let offsets: Vec<_> = (0..=sent).collect();
    assert_eq!(seen.all(), offsets, "each once");
    assert_eq!(cluster.read_all(&letters).len(), 2);
    let asked = asked.lock().unwrap();
    let by_producer = asked
        .iter()
        .filter(|name| *name == "kafka-producer")
        .count();
    assert!(
        by_producer >= 3,
        "a token is asked for when the last one is about to end: {asked:?}"
    );
    assert!(asked.len() - by_producer >= 3, "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_is_refused_while_at_work_is_tried_again() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (topic_with(cluster, &["a"]), unique("group"));
    let calls = Arc::new(AtomicUsize::new(0));
    let provider = {
        let calls = Arc::clone(&calls);
        move || -> Given {
            let soon = SystemTime::now() + Duration::from_secs(4);
            Ok(match calls.fetch_add(1, SeqCst) {
                0 => token(soon),
                1 => OAuthToken {
                    token: token(UNIX_EPOCH).token,
                    ..token(soon)
                },
                _ => token(soon + Duration::from_secs(600)),
            })
        }
    };
    let seen = Seen::default();
    let builder = over_sasl(cluster, &group, "OAUTHBEARER")
        .oauth_token_provider(provider)
        // The group has to wait for the next login.
        .property("session.timeout.ms", "45000")
        .topic(&topic);
    let run = Running::start(builder, seen.noting());
    until("the token after the refused one", || {
        calls.load(SeqCst) == 3
    })
    .await;
    tokio::task::block_in_place(|| {
        cluster.produce(&topic, [Record::value("b")]);
        all_committed(cluster, &group, &topic);
    });
    run.stop().await;
    assert_eq!(seen.all(), [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_has_no_token_yet_is_asked_again() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (topic_with(cluster, &["a", "b"]), unique("group"));
    let calls = AtomicUsize::new(0);
    let provider = move || -> Given {
        if calls.fetch_add(1, SeqCst) == 0 {
            return Err("the issuer is away".into());
        }
        Ok(token(SystemTime::now() + Duration::from_secs(60)))
    };
    let builder = over_sasl(cluster, &group, "OAUTHBEARER").oauth_token_provider(provider);
    consumes(cluster, &group, &topic, builder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_by_token_without_a_provider_ends_the_run_and_names_the_call() {
    let Some(cluster) = cluster() else { return };
    let error = refused(over_sasl(cluster, &unique("group"), "OAUTHBEARER").topic("any")).await;
    assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
    tells(&error, &["oauth_token_provider"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_read_permission_ends_the_run_and_is_named() {
    let Some(cluster) = cluster() else { return };
    let topic = topic_with(cluster, &["a", "b"]);
    cluster.allow_guest(&["--operation", "Read", "--topic", &topic]);
    // One that may see the group is refused later, by other requests.
    let may_see = [
        "--group",
        "described",
        "--resource-pattern-type",
        "prefixed",
    ];
    cluster.allow_guest(&[&["--operation", "Describe"], &may_see[..]].concat());
    for (protocol, group) in [
        ("classic", "forbidden"),
        ("classic", "described"),
        ("consumer", "forbidden"),
        ("consumer", "described"),
    ] {
        let group = unique(group);
        let mut builder = ReliableConsumer::builder()
            .bootstrap_servers(cluster.sasl())
            .group_id(&group)
            .topic(&topic)
            .property("group.protocol", protocol);
        for (name, value) in [
            ("security.protocol", "SASL_SSL"),
            ("ssl.ca.location", cluster.certificate_authority()),
            ("sasl.mechanisms", "PLAIN"),
            ("sasl.username", "guest"),
            ("sasl.password", "guest-secret"),
        ] {
            builder = builder.property(name, value);
        }
        let error = refused(builder).await;
        assert_eq!(
            error.kind(),
            RunErrorKind::Authorization,
            "{protocol}: {error}"
        );
        tells(&error, &[&group, "READ on the consumer group"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_without_read_permission_ends_the_run_and_is_named() {
    let Some(cluster) = cluster() else { return };
    let (topic, group) = (topic_with(cluster, &["a", "b"]), unique("group"));
    cluster.allow_guest(&["--operation", "Read", "--group", &group]);
    let error = refused(logged_in(cluster, &group, "PLAIN", "guest").topic(&topic)).await;
    assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
    tells(&error, &[&topic, "READ and DESCRIBE on the topic"]);
    // Found, but not to be read.
    cluster.allow_guest(&["--operation", "Describe", "--topic", &topic]);
    let error = refused(logged_in(cluster, &group, "PLAIN", "guest").topic(&topic)).await;
    assert_eq!(error.kind(), RunErrorKind::Authorization, "{error}");
    tells(&error, &[&topic, "READ and DESCRIBE on the topic"]);
}

// D5
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_topic_without_write_permission_is_waited_for_visibly() {
    let Some(cluster) = cluster() else { return };
    // First as one who may write nowhere, which is fatal to an idempotent producer; then as one who may not see the topic.
    for granted in [Some("Describe"), None] {
        let (topic, group) = (topic_with(cluster, &["a", "b"]), unique("group"));
        let letters = cluster.create_topic("letters", 1, &[]);
        cluster.allow_guest(&["--operation", "Read", "--topic", &topic, "--group", &group]);
        if let Some(operation) = granted {
            cluster.allow_guest(&["--operation", operation, "--topic", &letters]);
        }
        let builder = logged_in(cluster, &group, "PLAIN", "guest")
            .dead_letter(DeadLetter::topic(&letters))
            .topic(&topic);
        let handler = async |_: &Message<Text>| -> HandlerResult { Err(permanent("no")) };
        let run = Running::start(builder, handler);
        let started = Instant::now();
        let stalled = loop {
            assert!(started.elapsed() < PATIENCE, "no stall shows");
            let status = run.handle.status().await.unwrap();
            if let Some(stalled) = status.stalled_dead_letters.first() {
                break stalled.clone();
            }
            tokio::time::sleep(millis(50)).await;
        };
        assert_eq!((&stalled.topic, stalled.records), (&letters, 2));
        assert!(stalled.error.contains("`Write`"), "{stalled:?}");
        let committed = committed(cluster, &group, &topic);
        assert!(committed[0] <= 0, "nothing is finished: {committed:?}");

        cluster.allow_guest(&["--operation", "Write", "--topic", &letters]);
        tokio::task::block_in_place(|| all_committed(cluster, &group, &topic));
        run.stop().await;
        let found = cluster.read_all(&letters).len();
        assert_eq!(found, 2, "neither lost nor twice");
    }
}

/// Everything that this process logs from here on, at every level.
fn captured_log() -> Arc<Mutex<Vec<u8>>> {
    #[derive(Clone)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = Log(Arc::default());
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    log.0
}
