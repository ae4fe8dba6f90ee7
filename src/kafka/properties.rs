//! librdkafka's properties: what is set for users, what they may set, and what they may not.

use std::collections::BTreeMap;
use std::fmt;

use rdkafka::ClientConfig;
use rdkafka::client::{Client, DefaultClientContext};
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::types::{RDKafkaConfRes, RDKafkaType};

/// Properties by name, as somebody set them. `Debug` shows no secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Properties(BTreeMap<String, String>);

impl Properties {
    pub(crate) fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), value.into());
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    fn refuse(&self, refused: &[Refusal]) -> Result<(), PropertyError> {
        let hit = refused
            .iter()
            .find(|refusal| self.0.contains_key(refusal.name));
        hit.map_or(
            Ok(()),
            |&Refusal {
                 name,
                 reason,
                 instead,
             }| {
                Err(PropertyError::Refused {
                    name,
                    reason,
                    instead,
                })
            },
        )
    }
}

impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, value)| (name, shown(name, value))))
            .finish()
    }
}

/// Paths to secrets are none, and help when something is wrong with them.
fn is_secret(name: &str) -> bool {
    const MARKS: [&str; 8] = [
        "password",
        "passphrase",
        "secret",
        "token",
        "private.key",
        ".pem",
        "oauthbearer.config",
        "jaas",
    ];
    !name.ends_with(".url") && MARKS.iter().any(|mark| name.contains(mark))
}

fn shown<'a>(name: &str, value: &'a str) -> &'a str {
    if is_secret(name) { "[redacted]" } else { value }
}

/// Why a librdkafka property, or all of them together, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PropertyError {
    /// The property would break what this library promises.
    #[error("property `{name}` cannot be set: {reason}; {instead}")]
    #[non_exhaustive]
    Refused {
        /// The property.
        name: &'static str,
        /// What it would break.
        reason: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// librdkafka has no property of that name.
    #[error("there is no librdkafka property `{name}`{}", did_you_mean(.suggestion.as_deref()))]
    #[non_exhaustive]
    Unknown {
        /// The name as it was set.
        name: String,
        /// A property whose name is close to it.
        suggestion: Option<String>,
    },
    /// librdkafka does not take that value, or was built without what it needs.
    #[error("property `{name}` cannot be `{value}`: {reason}; {}", remedy(.reason))]
    #[non_exhaustive]
    Invalid {
        /// The property.
        name: String,
        /// The value, or `[redacted]` for a secret.
        value: String,
        /// librdkafka's reason.
        reason: String,
    },
    /// Each property is fine, but librdkafka does not accept them together.
    #[error(
        "librdkafka does not accept these properties together: {reason}; change one of those it names"
    )]
    #[non_exhaustive]
    Conflict {
        /// librdkafka's reason.
        reason: String,
    },
}

fn did_you_mean(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(
        || "; see librdkafka's CONFIGURATION.md".into(),
        |name| format!("; did you mean `{name}`?"),
    )
}

fn remedy(reason: &str) -> &'static str {
    // "… not available at build time", "… not supported in this build".
    match reason.contains("build") {
        true => "enable the cargo feature it needs, such as `ssl`",
        false => "correct the value",
    }
}

struct Refusal {
    name: &'static str,
    reason: &'static str,
    instead: &'static str,
}

const fn refusal(name: &'static str, reason: &'static str, instead: &'static str) -> Refusal {
    Refusal {
        name,
        reason,
        instead,
    }
}

/// Whoever comes from Java has it, with a password in the middle of its value.
const JAAS: Refusal = refusal(
    "sasl.jaas.config",
    "it is for Java",
    "set sasl.mechanisms, sasl.username and sasl.password",
);
const COMMITS_EARLY: &str = "librdkafka would commit offsets of records that are not finished";
const COMMITS_ITSELF: &str = "remove it: the consumer commits by itself what is finished";

const REFUSED_FOR_CONSUMERS: &[Refusal] = &[
    refusal("enable.auto.commit", COMMITS_EARLY, COMMITS_ITSELF),
    refusal("auto.commit.enable", COMMITS_EARLY, COMMITS_ITSELF),
    refusal("enable.auto.offset.store", COMMITS_EARLY, COMMITS_ITSELF),
    refusal(
        "auto.commit.interval.ms",
        "librdkafka's own commits are off, so it would do nothing",
        "set the commit interval on the builder",
    ),
    refusal(
        "auto.offset.reset",
        "it skips or repeats records without a word when an offset is out of range",
        "choose where a new group starts, and what to do about lost data, on the builder",
    ),
    refusal(
        "offset.store.method",
        "offsets live in the group's commits only",
        "remove it",
    ),
    refusal(
        "enable.partition.eof",
        "end-of-partition events would move the position past unread records",
        "read the lag from the consumer's status",
    ),
    JAAS,
];

const UNACKNOWLEDGED: &str =
    "a dead letter counts only once all in-sync replicas have it, exactly once per attempt";
const ALWAYS_ON: &str = "remove it: it is always on";

const REFUSED_FOR_PRODUCERS: &[Refusal] = &[
    refusal("acks", UNACKNOWLEDGED, ALWAYS_ON),
    refusal("request.required.acks", UNACKNOWLEDGED, ALWAYS_ON),
    refusal("enable.idempotence", UNACKNOWLEDGED, ALWAYS_ON),
    refusal(
        "delivery.report.only.error",
        "a send ends with its acknowledgement, which would never come",
        "remove it",
    ),
    refusal(
        "transactional.id",
        "nothing here begins or commits a transaction",
        "remove it",
    ),
    JAAS,
];

/// Connection properties that consumer and producer share: these by name, and those that start like one below.
const SHARED: &[&str] = &[
    "bootstrap.servers",
    "metadata.broker.list",
    "client.id",
    "client.dns.lookup",
    "debug",
];
const SHARED_PREFIXES: &[&str] = &[
    "security.",
    "sasl.",
    "enable.sasl.",
    "ssl.",
    "enable.ssl.",
    "https.",
    "socket.",
    "broker.address.",
    "broker.version.",
    "api.version.",
    "connections.",
    "reconnect.",
    "retry.backoff.",
    "log",
    "plugin.",
];

/// The consumer's configuration: the user's properties over our defaults over librdkafka's.
///
/// `prefetch_kbytes` bounds what librdkafka reads ahead *per partition*; the property itself, if set, wins.
pub(crate) fn consumer_config(
    properties: &Properties,
    prefetch_kbytes: u32,
) -> Result<ClientConfig, PropertyError> {
    properties.refuse(REFUSED_FOR_CONSUMERS)?;
    let mut config = ClientConfig::new();
    config
        // A partition that was full is fetched again this soon after it has room. librdkafka's default of a second
        // leaves a fast consumer idle between two fetches.
        .set("fetch.queue.backoff.ms", "10")
        // A fetch covers the partitions that had room when it was sent, and a broker answers one at a time: behind a
        // long poll of quiet partitions, one that has just been drained or assigned would wait for all of the default
        // 500 ms. New records do not wait for it; it costs idle clients ten requests a second and broker.
        .set("fetch.wait.max.ms", "100")
        // Librdkafka does not look by default: a batch that was damaged on a disk would be handled as whatever it has become,
        // or passed over.
        .set("check.crcs", "true")
        .set(
            "queued.max.messages.kbytes",
            prefetch_kbytes.clamp(1, 2_097_151).to_string(),
        );
    if properties.get("group.protocol") != Some("consumer") {
        // Only what moves stops in a rebalance. KIP-848 groups assign on the broker, which refuses the property.
        config.set("partition.assignment.strategy", "cooperative-sticky");
    }
    config.extend(properties.0.clone());
    config
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        // An offset that is out of range is data loss: it comes as an error, and a policy decides.
        .set("auto.offset.reset", "error");
    validated(config, RDKafkaType::RD_KAFKA_CONSUMER)
}

/// A producer's configuration: its own properties over the consumer's connection settings over our defaults.
pub(crate) fn producer_config(
    consumer: &Properties,
    own: &Properties,
) -> Result<ClientConfig, PropertyError> {
    own.refuse(REFUSED_FOR_PRODUCERS)?;
    let mut config = ClientConfig::new();
    config
        // As Java's producers do, so that a key's dead letters are where a Java tool looks for them.
        .set("partitioner", "murmur2_random")
        // A leader election fits in. What is not acknowledged by then is sent again by whoever waits for it, so this
        // only bounds how long one try can hang.
        .set("message.timeout.ms", "60000")
        // Whatever could be consumed (`receive.message.max.bytes`) can be sent: the broker's limit decides, not ours.
        .set("message.max.bytes", "100000000")
        // Has to have room for the largest message. Default 1 GiB: too much for what should be rare.
        .set("queue.buffering.max.kbytes", "131072");
    let shared = |name: &str| {
        SHARED.contains(&name)
            || SHARED_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix))
    };
    config.extend(
        consumer
            .0
            .iter()
            .filter(|(name, _)| shared(name))
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    config.extend(own.0.clone());
    config.set("acks", "all").set("enable.idempotence", "true");
    validated(config, RDKafkaType::RD_KAFKA_PRODUCER)
}

/// Every property by itself, then all of them together in a client that connects to nothing.
fn validated(mut config: ClientConfig, client: RDKafkaType) -> Result<ClientConfig, PropertyError> {
    if let Some(servers) = config.get("bootstrap.servers") {
        let protocol = config.get("security.protocol").unwrap_or("plaintext");
        if let Some(reason) = flaw_of_servers(servers, protocol) {
            return Err(PropertyError::Invalid {
                name: "bootstrap.servers".into(),
                value: servers.into(),
                reason,
            });
        }
    }
    // Otherwise the binding would drop what is below the level of the `log` crate, which nobody here sets up.
    let debug = config
        .get("debug")
        .is_some_and(|contexts| !contexts.is_empty());
    config.set_log_level(if debug {
        RDKafkaLogLevel::Debug
    } else {
        RDKafkaLogLevel::Info
    });

    config.create_native_config().map_err(rejected)?;
    let mut offline = config.clone();
    for name in [
        "bootstrap.servers",
        "metadata.broker.list",
        "group.id",
        "test.mock.num.brokers",
        "debug",
    ] {
        offline.remove(name);
    }
    offline.set("log_level", "0");
    let native = offline.create_native_config().map_err(rejected)?;
    Client::new(&offline, native, client, DefaultClientContext).map_err(rejected)?;
    Ok(config)
}

/// What is wrong with a list of brokers. librdkafka takes any, says so in its log at most, and waits for ever for a broker
/// that there cannot be.
fn flaw_of_servers(servers: &str, protocol: &str) -> Option<String> {
    const FORM: &str = "write host:port, several with commas between them";
    let mut any = false;
    for server in servers.split(',').map(str::trim) {
        if server.is_empty() {
            continue;
        }
        any = true;
        let place = match server.split_once("://") {
            None => server,
            Some((scheme, place)) => {
                let known = ["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"];
                if !known.contains(&&*scheme.to_ascii_lowercase()) {
                    return Some(format!(
                        "brokers do not speak {scheme}: {FORM}, without `{scheme}://`"
                    ));
                }
                if !scheme.eq_ignore_ascii_case(protocol) {
                    return Some(format!(
                        "`{server}` is not reached with security.protocol={protocol}: set that to {}, and {FORM}",
                        scheme.to_ascii_lowercase()
                    ));
                }
                place
            }
        };
        let (host, port) = match place
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
        {
            Some((host, "")) => (host, None),
            Some((host, rest)) => (host, Some(rest.strip_prefix(':').unwrap_or(rest))),
            // An address of IP version 6 without a port.
            None if place.parse::<std::net::Ipv6Addr>().is_ok() => (place, None),
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        if host.is_empty() {
            return Some(format!("`{server}` has no host: {FORM}"));
        }
        let in_brackets = place.starts_with('[');
        let strange = |c: char| {
            let usual = c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
            let of_an_address = in_brackets && matches!(c, ':' | '%');
            !usual && !of_an_address
        };
        let is_address = place.parse::<std::net::Ipv6Addr>().is_ok();
        if let Some(strange) = host.chars().find(|c| strange(*c)).filter(|_| !is_address) {
            return Some(format!("`{server}` has {strange:?} in its host: {FORM}"));
        }
        if let Some(port) = port
            && !(port.bytes().all(|digit| digit.is_ascii_digit())
                && port.parse::<u16>().is_ok_and(|port| port > 0))
        {
            return Some(format!(
                "`{server}` has no port from 1 to 65535 after its host: {FORM}"
            ));
        }
    }
    (!any).then(|| format!("it names no broker: {FORM}"))
}

fn rejected(error: KafkaError) -> PropertyError {
    match error {
        KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, _, name, _) => {
            PropertyError::Unknown {
                suggestion: suggestion(&name),
                name,
            }
        }
        KafkaError::ClientConfig(_, reason, name, value) => {
            // librdkafka's reason quotes the value, but where it takes none.
            let takes_none = reason.contains("not supported in this build");
            let reason = if is_secret(&name) && !takes_none {
                "librdkafka does not accept it".into()
            } else {
                // Some of its reasons end a line in the middle.
                reason.split_whitespace().collect::<Vec<_>>().join(" ")
            };
            PropertyError::Invalid {
                value: shown(&name, &value).into(),
                reason,
                name,
            }
        }
        KafkaError::ClientCreation(reason) => PropertyError::Conflict { reason },
        other => PropertyError::Conflict {
            reason: other.to_string(),
        },
    }
}

/// A property one slip away from `name`. librdkafka tells no list of its properties but knows whether one exists.
fn suggestion(name: &str) -> Option<String> {
    // What has no value by default cannot be read, so each is set: to what is wrong for some, and known all the same.
    let exists = |candidate: &String| {
        let set = ClientConfig::new()
            .set(candidate, "")
            .create_native_config();
        !matches!(
            set,
            Err(KafkaError::Nul(_)
                | KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, ..))
        )
    };
    let name = name.trim().to_lowercase().replace(['_', '-'], ".");
    let cuts = || {
        name.char_indices()
            .map(|(at, _)| name.split_at(at))
            .chain([(name.as_str(), "")])
    };
    let skip = |text: &str, count: usize| text.chars().skip(count).collect::<String>();
    let letters = || ('a'..='z').chain(['.']);

    let same = std::iter::once(name.clone());
    let unit = [".ms", ".bytes", ".kbytes", ".sec"]
        .into_iter()
        .map(|unit| format!("{name}{unit}"));
    let removed = cuts().map(|(head, tail)| head.to_owned() + &skip(tail, 1));
    let swapped = cuts().filter_map(|(head, tail)| {
        let mut letters = tail.chars();
        let (first, second) = (letters.next()?, letters.next()?);
        Some(format!("{head}{second}{first}{}", letters.as_str()))
    });
    let inserted = cuts()
        .flat_map(|(head, tail)| letters().map(move |letter| format!("{head}{letter}{tail}")));
    let replaced = cuts().flat_map(|(head, tail)| {
        letters().map(move |letter| format!("{head}{letter}{}", skip(tail, 1)))
    });
    same.chain(unit)
        .chain(removed)
        .chain(swapped)
        .chain(inserted)
        .chain(replaced)
        .find(exists)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(pairs: &[(&str, &str)]) -> Properties {
        let mut properties = Properties::default();
        for (name, value) in pairs {
            properties.set(*name, *value);
        }
        properties
    }

    fn consumer(pairs: &[(&str, &str)]) -> Result<ClientConfig, PropertyError> {
        consumer_config(&properties(pairs), 1_024)
    }

    fn producer(pairs: &[(&str, &str)]) -> Result<ClientConfig, PropertyError> {
        producer_config(&Properties::default(), &properties(pairs))
    }

    #[test]
    fn properties_that_break_the_promise_are_refused_by_name_with_what_to_do_instead() {
        for refused in REFUSED_FOR_CONSUMERS {
            let error = consumer(&[(refused.name, "true")]).unwrap_err().to_string();
            assert!(
                error.contains(refused.name) && error.ends_with(refused.instead),
                "{error}"
            );
        }
        for refused in REFUSED_FOR_PRODUCERS {
            let error = producer(&[(refused.name, "1")]).unwrap_err().to_string();
            assert!(
                error.contains(refused.name) && error.ends_with(refused.instead),
                "{error}"
            );
        }
        assert_eq!(
            consumer(&[("auto.commit.interval.ms", "10")])
                .unwrap_err()
                .to_string(),
            "property `auto.commit.interval.ms` cannot be set: librdkafka's own commits are off, so it would do \
             nothing; set the commit interval on the builder"
        );
    }

    #[test]
    fn a_misspelt_property_is_an_error_that_names_the_one_that_was_meant() {
        let slips = [
            ("fetch.min.byte", "fetch.min.bytes"),
            ("fetch.mni.bytes", "fetch.min.bytes"),
            ("fetch.min.bytess", "fetch.min.bytes"),
            ("fetch.nin.bytes", "fetch.min.bytes"),
            ("FETCH_MIN_BYTES", "fetch.min.bytes"),
            ("max.poll.interval", "max.poll.interval.ms"),
            ("auto.offset.resets", "auto.offset.reset"),
            ("statistics.interval.mss", "statistics.interval.ms"),
            // These have no value by default.
            ("sasl.pasword", "sasl.password"),
            ("sasl.passwort", "sasl.password"),
            ("sasl.usernane", "sasl.username"),
            ("ssl.ca.locatoin", "ssl.ca.location"),
            ("bootstrap.server", "bootstrap.servers"),
            ("group.ids", "group.id"),
        ];
        for (slip, meant) in slips {
            let error = consumer(&[(slip, "1")]).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("there is no librdkafka property `{slip}`; did you mean `{meant}`?")
            );
        }
        let error = consumer(&[("max.poll.records", "1")])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "there is no librdkafka property `max.poll.records`; see librdkafka's CONFIGURATION.md"
        );
        consumer(&[("nul\0byte", "1")]).unwrap_err();
    }

    #[test]
    fn bad_values_and_bad_combinations_are_errors_at_build() {
        let error = consumer(&[("fetch.min.bytes", "many")]).unwrap_err();
        assert!(
            matches!(&error, PropertyError::Invalid { name, .. } if name == "fetch.min.bytes"),
            "{error}"
        );
        let error = consumer(&[("session.timeout.ms", "0")]).unwrap_err();
        let error = error.to_string();
        assert!(!error.contains('\n'), "{error}");
        assert!(error.ends_with("; correct the value"), "{error}");
        let error = consumer(&[
            ("group.protocol", "consumer"),
            ("session.timeout.ms", "6000"),
        ])
        .unwrap_err();
        assert!(matches!(error, PropertyError::Conflict { .. }), "{error}");
        let error = producer(&[("max.in.flight", "100")]).unwrap_err();
        assert!(matches!(error, PropertyError::Conflict { .. }), "{error}");
        assert!(error.to_string().contains("max.in.flight"), "{error}");
    }

    #[test]
    fn a_list_of_brokers_that_no_broker_can_be_found_by_is_an_error_that_says_what_to_write() {
        for (servers, said) in [
            ("http://kafka:9092", "without `http://`"),
            ("kafka:9092,https://other:9092", "without `https://`"),
            ("ssl://kafka:9093", "security.protocol=plaintext"),
            (":9092", "no host"),
            ("kafka:", "no port"),
            ("kafka:0", "no port"),
            ("kafka:65536", "no port"),
            ("kafka:+1", "no port"),
            ("kafka:9092/topic", "no port"),
            ("kafka:9092 other:9092", "no port"),
            ("kafka:9092:9093", "no port"),
            ("[::1]9092x", "no port"),
            ("kaf ka:9092", "' ' in its host"),
            ("user@kafka:9092", "'@' in its host"),
            ("kafka/9092", "'/' in its host"),
            (" , ", "names no broker"),
        ] {
            let error = consumer(&[("bootstrap.servers", servers)]).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(said), "{servers}: {error}");
        }
        for servers in [
            "kafka",
            "kafka-1.example.com:9092, kafka_2:9093,",
            "PLAINTEXT://kafka:9092",
            "10.0.0.1:65535",
            "[::1]:9092",
            "[fe80::1%eth0]:9092,::1",
            "køb.example:9092",
        ] {
            let pairs = [("bootstrap.servers", servers)];
            consumer(&pairs).unwrap_or_else(|error| panic!("{servers}: {error}"));
        }
    }

    #[test]
    fn secrets_show_neither_in_debug_nor_in_errors() {
        let secret = properties(&[
            ("sasl.password", "hunter2"),
            ("ssl.key.pem", "hunter2"),
            ("ssl.key.password", "hunter2"),
            ("ssl.keystore.password", "hunter2"),
            ("sasl.oauthbearer.client.secret", "hunter2"),
            (
                "sasl.oauthbearer.assertion.private.key.passphrase",
                "hunter2",
            ),
            ("sasl.oauthbearer.config", "hunter2"),
            ("sasl.username", "alice"),
            ("ssl.key.location", "/etc/key"),
        ]);
        let debug = format!("{secret:?}");
        assert!(!debug.contains("hunter2"), "{debug}");
        assert!(
            debug.contains("alice") && debug.contains("/etc/key"),
            "{debug}"
        );
        let jaas = ("sasl.jaas.config", r#"... required password="hunter2";"#);
        let debug = format!("{:?}", properties(&[jaas]));
        assert!(!debug.contains("hunter2"), "{debug}");
        for error in [
            consumer(&[jaas]).unwrap_err(),
            producer(&[jaas]).unwrap_err(),
        ] {
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
            assert!(error.to_string().ends_with("and sasl.password"), "{error}");
        }
        let error = rejected(KafkaError::ClientConfig(
            RDKafkaConfRes::RD_KAFKA_CONF_INVALID,
            "hunter2 is bad".into(),
            "sasl.password".into(),
            "hunter2".into(),
        ));
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }

    #[test]
    fn users_override_defaults_but_not_what_the_promise_rests_on() {
        let config = consumer(&[
            ("fetch.queue.backoff.ms", "5"),
            ("queued.max.messages.kbytes", "77"),
        ])
        .unwrap();
        assert_eq!(config.get("fetch.queue.backoff.ms"), Some("5"));
        assert_eq!(config.get("queued.max.messages.kbytes"), Some("77"));
        assert_eq!(
            config.get("partition.assignment.strategy"),
            Some("cooperative-sticky")
        );
        assert_eq!(config.get("enable.auto.commit"), Some("false"));
        assert_eq!(config.get("auto.offset.reset"), Some("error"));
        let config = consumer(&[("group.protocol", "consumer")]).unwrap();
        assert_eq!(config.get("partition.assignment.strategy"), None);
    }

    #[test]
    fn a_producer_takes_over_the_connection_and_nothing_else() {
        let consumer = properties(&[
            ("bootstrap.servers", "kafka:9092"),
            ("client.id", "shipping-7"),
            ("security.protocol", "plaintext"),
            ("sasl.username", "alice"),
            ("socket.timeout.ms", "5000"),
            ("broker.address.family", "v4"),
            ("group.id", "shipping"),
            ("fetch.min.bytes", "10"),
            ("max.poll.interval.ms", "60000"),
        ]);
        let config = producer_config(
            &consumer,
            &properties(&[("client.id", "dead-letters"), ("linger.ms", "0")]),
        )
        .unwrap();
        for (name, value) in [
            ("bootstrap.servers", "kafka:9092"),
            ("client.id", "dead-letters"),
            ("sasl.username", "alice"),
            ("socket.timeout.ms", "5000"),
            ("broker.address.family", "v4"),
            ("linger.ms", "0"),
            ("acks", "all"),
            ("enable.idempotence", "true"),
            ("partitioner", "murmur2_random"),
        ] {
            assert_eq!(config.get(name), Some(value), "{name}");
        }
        for name in ["group.id", "fetch.min.bytes", "max.poll.interval.ms"] {
            assert_eq!(config.get(name), None, "{name}");
        }
    }
}
