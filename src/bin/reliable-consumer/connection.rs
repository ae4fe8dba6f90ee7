//! Where connection settings come from.

use std::{env, ffi::OsString, fs};

use reliable_consumer::operate::Cluster;

use crate::{
    arguments::{Connection, Property},
    failure::Failure,
};

const VARIABLES: &str = "KAFKA_PROPERTY_";

impl Connection {
    /// Speaks for this group, and joins nothing.
    pub fn cluster(&self, group: &str) -> Result<Cluster, Failure> {
        let properties = self.properties(env::vars_os())?;
        let servers = ["bootstrap.servers", "metadata.broker.list"];
        if !properties
            .iter()
            .any(|(name, _)| servers.contains(&&**name))
        {
            let message = "which cluster? Name some brokers with --brokers, with KAFKA_BROKERS, or as \
                           bootstrap.servers in a file (--config)";
            return Err(Failure::Usage(message.into()));
        }
        if wants_tokens_of_ours(&properties) {
            let message = "sasl.mechanism=OAUTHBEARER needs somebody who gives tokens: set \
                           sasl.oauthbearer.method=oidc with sasl.oauthbearer.token.endpoint.url, \
                           sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret, and librdkafka fetches \
                           them, if this program was built with the features ssl and curl";
            return Err(Failure::Usage(message.into()));
        }
        Ok(Cluster::new(properties, group, self.timeout)?)
    }

    /// All that are set, the stronger ones behind the weaker.
    pub fn properties(
        &self,
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<(String, String)>, Failure> {
        let mut properties = Vec::new();
        if let Some(path) = &self.config {
            let text = fs::read_to_string(path).map_err(|error| Failure::File {
                path: path.clone(),
                error,
            })?;
            let read = read(&text).map_err(|line| {
                // The line is not quoted: it may have a password.
                Failure::Usage(format!(
                    "{}, line {line}: expected name=value",
                    path.display()
                ))
            })?;
            properties.extend(read);
        }
        for (name, value) in variables {
            let name = name.to_string_lossy();
            let Some(name) = name.strip_prefix(VARIABLES) else {
                continue;
            };
            let value = value.into_string().map_err(|_| {
                Failure::Usage(format!("the variable {VARIABLES}{name} is not UTF-8"))
            })?;
            properties.push((name.to_lowercase().replace('_', "."), value));
        }
        for Property { name, value } in &self.property {
            let value = value.clone().ok_or_else(|| {
                Failure::Usage("--property: expected NAME=VALUE, and there is no =".into())
            })?;
            properties.push((name.clone(), value));
        }
        if let Some(brokers) = &self.brokers {
            properties.push(("bootstrap.servers".into(), brokers.clone()));
        }
        Ok(properties)
    }
}

/// Whether the client would ask for tokens, which a library has a provider for and this program has not.
fn wants_tokens_of_ours(properties: &[(String, String)]) -> bool {
    let value = |names: &[&str]| {
        let mut set = properties.iter().rev();
        let found = set.find(|(name, _)| names.contains(&&**name));
        found.map_or_else(String::new, |(_, value)| value.to_lowercase())
    };
    value(&["security.protocol"]).starts_with("sasl")
        && value(&["sasl.mechanism", "sasl.mechanisms"]) == "oauthbearer"
        && value(&["sasl.oauthbearer.method"]) != "oidc"
}

/// Lines of `name=value`. An error is the number of a line that is none.
fn read(text: &str) -> Result<Vec<(String, String)>, usize> {
    let lines = text
        .lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| {
            let (name, value) = line.split_once('=').ok_or(number)?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use super::*;

    #[test]
    fn what_stands_nearer_to_the_command_wins() {
        let path = env::temp_dir().join(format!("nearer-{}.properties", std::process::id()));
        let lines: String = ["a", "b", "c", "bootstrap.servers"]
            .map(|name| format!("{name}=file\n"))
            .concat();
        fs::write(&path, lines).unwrap();
        let connection = Connection {
            brokers: Some("flag".into()),
            config: Some(path.clone()),
            property: ["c=option", "bootstrap.servers=option"]
                .map(|it| Property::from(it.to_owned()))
                .into(),
            timeout: Duration::from_secs(1),
        };
        let variables = ["B", "C", "BOOTSTRAP_SERVERS"]
            .map(|name| (format!("{VARIABLES}{name}").into(), "variable".into()));
        let others = [("HOME".into(), "nowhere".into())];
        let set = connection.properties(variables.into_iter().chain(others));
        fs::remove_file(path).unwrap();
        // As `Cluster::new` does.
        let last: BTreeMap<_, _> = set.unwrap().into_iter().collect();
        let last: Vec<_> = last
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let expected = [
            ("a", "file"),
            ("b", "variable"),
            ("bootstrap.servers", "flag"),
            ("c", "option"),
        ];
        assert_eq!(last, expected);
    }

    #[test]
    fn a_file_has_a_property_a_line() {
        let text = "# a comment\n\nbootstrap.servers = a:1,b:2\r\nsasl.password=x=y # no comment\n";
        let expected = [
            ("bootstrap.servers", "a:1,b:2"),
            ("sasl.password", "x=y # no comment"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(read(text), Ok(expected.to_vec()));
        assert_eq!(read("a=b\nhunter2"), Err(2));
    }
}
