//! Asking how topics are set, and creating them.

use std::collections::BTreeMap;

use rdkafka::{
    admin::{AdminClient, AdminOptions, ResourceSpecifier},
    types::RDKafkaErrorCode as Code,
};

use super::cluster::{Cluster, InspectError, Outside};

/// Creates topics, and tells how they are set.
pub struct Administrator {
    client: AdminClient<Outside>,
    options: AdminOptions,
}

impl std::fmt::Debug for Administrator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Administrator").finish_non_exhaustive()
    }
}

/// A topic to be made.
#[cfg(feature = "cli")]
#[derive(Debug, Clone)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// How many.
    pub partitions: i32,
    /// Copies of each record.
    pub replication: i32,
    /// What differs from the brokers' defaults.
    pub settings: BTreeMap<String, String>,
}

impl Cluster {
    /// Somebody who may create topics.
    ///
    /// # Errors
    ///
    /// Properties that cannot be.
    pub fn administrator(&self) -> Result<Administrator, InspectError> {
        let client = self.producer.create_with_context(self.context());
        Ok(Administrator {
            client: client.map_err(|error| InspectError::Client(error.to_string()))?,
            options: AdminOptions::new()
                .request_timeout(Some(self.patience.answer))
                .operation_timeout(Some(self.patience.answer)),
        })
    }
}

impl Administrator {
    /// How a topic is set: all that the brokers tell.
    ///
    /// # Errors
    ///
    /// If they don't.
    pub async fn settings(&self, topic: &str) -> Result<BTreeMap<String, String>, InspectError> {
        let what = || format!("settings of topic `{topic}`");
        let asked = [ResourceSpecifier::Topic(topic)];
        let answer = self.client.describe_configs(&asked, &self.options).await;
        let mut answer = answer.map_err(|error| InspectError::Refused {
            what: what(),
            code: error.rdkafka_error_code().unwrap_or(Code::Fail),
        })?;
        let described = answer
            .pop()
            .unwrap_or(Err(Code::BadMessage))
            .map_err(|code| InspectError::Refused { what: what(), code })?;
        let entries = described.entries.into_iter();
        Ok(entries
            .filter_map(|entry| Some((entry.name, entry.value?)))
            .collect())
    }

    /// Makes the topic; with `dry`, the brokers only say whether they would. Whether it is new: `false` if there is one of
    /// that name, which somebody else may have made just now.
    ///
    /// # Errors
    ///
    /// If they refuse.
    #[cfg(feature = "cli")]
    pub async fn create(&self, topic: &Planned, dry: bool) -> Result<bool, InspectError> {
        let Planned {
            name,
            partitions,
            replication,
            settings,
        } = topic;
        use rdkafka::admin::{NewTopic, TopicReplication};
        let mut new = NewTopic::new(name, *partitions, TopicReplication::Fixed(*replication));
        for (setting, value) in settings {
            new = new.set(setting, value);
        }
        let refused = |code| InspectError::Refused {
            what: format!("creating topic `{name}`"),
            code,
        };
        let options = AdminOptions::new()
            .request_timeout(Some(std::time::Duration::from_secs(30)))
            .operation_timeout(Some(std::time::Duration::from_secs(30)))
            .validate_only(dry);
        let answer = self.client.create_topics([&new], &options).await;
        let mut answer =
            answer.map_err(|error| refused(error.rdkafka_error_code().unwrap_or(Code::Fail)))?;
        match answer.pop() {
            Some(Ok(_)) => Ok(true),
            Some(Err((_, Code::TopicAlreadyExists))) => Ok(false),
            Some(Err((_, code))) => Err(refused(code)),
            None => Err(refused(Code::BadMessage)),
        }
    }
}
