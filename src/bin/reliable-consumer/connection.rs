//! Where connection settings come from.

use std::{env, ffi::OsString, fs, path::Path};

use reliable_consumer::operate::Cluster;

use crate::{
    arguments::{Connection, Property},
    failure::Failure,
};

const VARIABLES: &str = "KAFKA_PROPERTY_";
const SERVERS: &str = "bootstrap.servers";
const NAME: &str = "with a name of a-z, 0-9, `.` and `_`, and `=` behind it, not `:`";

impl Connection {
    /// Speaks for this group, and joins nothing.
    pub fn cluster(&self, group: &str) -> Result<Cluster, Failure> {
        let properties = self.properties(env::vars_os())?;
        if !properties.iter().any(|(name, _)| name == SERVERS) {
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

    /// All that are set, the stronger ones behind the weaker: what a command names itself wins over what the shell has
    /// from somebody else.
    pub fn properties(
        &self,
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<(String, String)>, Failure> {
        let mut properties = Vec::new();
        let mut brokers = None;
        for (name, value) in variables.filter(|(_, value)| !value.is_empty()) {
            let name = name.to_string_lossy();
            if name == "RELIABLE_CONSUMER_CONFIG" {
                if self.config.is_none() {
                    // Variables that name a property win over those in it, wherever they come.
                    properties.splice(0..0, read(Path::new(&value))?);
                }
                continue;
            }
            let property = name.strip_prefix(VARIABLES);
            if property.is_none() && name != "KAFKA_BROKERS" {
                continue;
            }
            let value = value
                .into_string()
                .map_err(|_| Failure::Usage(format!("the variable {name} is not UTF-8")))?;
            match property {
                Some(property) => {
                    properties.push((property.to_lowercase().replace('_', "."), value));
                }
                None => brokers = Some(value),
            }
        }
        properties.extend(brokers.map(|brokers| (SERVERS.into(), brokers)));
        if let Some(path) = &self.config {
            properties.extend(read(path)?);
        }
        for Property { name, value } in &self.property {
            let value = value.clone().filter(|_| is_name(name)).ok_or_else(|| {
                Failure::Usage(format!("--property: expected NAME=VALUE, {NAME}"))
            })?;
            properties.push((name.clone(), value));
        }
        if let Some(brokers) = &self.brokers {
            properties.push((SERVERS.into(), brokers.clone()));
        }
        for (name, _) in &mut properties {
            // Its other name. With both set, which of them librdkafka takes is anybody's guess.
            if name == "metadata.broker.list" {
                *name = SERVERS.into();
            }
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

fn read(path: &Path) -> Result<Vec<(String, String)>, Failure> {
    let text = fs::read_to_string(path).map_err(|error| Failure::File {
        path: path.to_owned(),
        error,
    })?;
    lines(&text).map_err(|(number, wrong)| {
        Failure::Usage(format!("{}, line {number}: {wrong}", path.display()))
    })
}

/// What stands before `=` where it is no name may be the half of a password, and is not shown.
fn is_name(text: &str) -> bool {
    let fits =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._".contains(&byte);
    !text.is_empty() && text.bytes().all(fits)
}

/// Lines of `name=value`. An error is the number of a line that is none, and what is wrong with it without a word of it.
fn lines(text: &str) -> Result<Vec<(String, String)>, (usize, String)> {
    let lines = text
        .lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| {
            let wrong = |wrong: String| (number, wrong);
            if line.ends_with('\\') {
                return Err(wrong(
                    "a property stands on one line, without a backslash at its end; a value that has one there goes \
                     into a variable KAFKA_PROPERTY_…"
                        .into(),
                ));
            }
            let (name, value) = line
                .split_once('=')
                .map(|(name, value)| (name.trim(), value.trim()))
                .filter(|(name, _)| is_name(name))
                .ok_or_else(|| {
                    wrong(format!("expected name=value, {NAME}; comments begin with #, not with !"))
                })?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::PathBuf, time::Duration};

    use super::*;

    /// What each is in the end, as `Cluster::new` takes it, by name.
    fn set(connection: &Connection, variables: &[(&str, &str)]) -> Vec<(String, String)> {
        let variables = variables.iter();
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let all = connection.properties(variables).unwrap();
        all.into_iter()
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect()
    }

    fn written(name: &str, text: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("{name}-{}.properties", std::process::id()));
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn what_the_command_itself_names_wins_over_what_the_shell_has() {
        let path = written(
            "named",
            "b=file\nc=file\nd=file\nmetadata.broker.list=file\n",
        );
        let other = written(
            "other",
            "a=other\nb=other\nf=other\nbootstrap.servers=other\n",
        );
        let mut connection = Connection {
            brokers: Some("flag".into()),
            config: Some(path.clone()),
            property: ["c=option", "d=option", "bootstrap.servers=option"]
                .map(|it| Property::from(it.to_owned()))
                .into(),
            timeout: Duration::from_secs(1),
        };
        let variables = [
            ("KAFKA_BROKERS", "brokers"),
            ("KAFKA_PROPERTY_A", "variable"),
            ("KAFKA_PROPERTY_B", "variable"),
            ("KAFKA_PROPERTY_BOOTSTRAP_SERVERS", "variable"),
            ("KAFKA_PROPERTY_EMPTY", ""),
            ("RELIABLE_CONSUMER_CONFIG", other.to_str().unwrap()),
            ("HOME", "nowhere"),
        ];
        let expected = |pairs: &[(&str, &str)]| -> Vec<_> {
            let pairs = pairs.iter();
            pairs
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect()
        };
        let mut named = [
            ("a", "variable"),
            ("b", "file"),
            ("bootstrap.servers", "flag"),
            ("c", "option"),
            ("d", "option"),
        ];
        assert_eq!(set(&connection, &variables), expected(&named));
        connection.brokers = None;
        named[2].1 = "option";
        assert_eq!(set(&connection, &variables), expected(&named));
        connection.property.truncate(1);
        named[2].1 = "file";
        named[4].1 = "file";
        assert_eq!(set(&connection, &variables), expected(&named));
        connection.config = None;
        connection.property.clear();
        let by_shell = [
            ("a", "variable"),
            ("b", "variable"),
            ("bootstrap.servers", "brokers"),
            ("f", "other"),
        ];
        assert_eq!(set(&connection, &variables), expected(&by_shell));
        fs::remove_file(path).unwrap();
        fs::remove_file(other).unwrap();
    }

    #[test]
    fn a_file_has_a_property_a_line() {
        let text = "# a comment\n\nbootstrap.servers = a:1,b:2\r\nsasl.password=x=y # no comment\n";
        let expected = [
            ("bootstrap.servers", "a:1,b:2"),
            ("sasl.password", "x=y # no comment"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(lines(text), Ok(expected.to_vec()));
    }

    #[test]
    fn of_a_line_that_is_no_property_only_its_number_is_told() {
        for (line, told) in [
            ("hunter2", "name=value"),
            ("sasl.password: hunter=2", "not `:`"),
            ("sasl.password hunter2=", "name of a-z"),
            ("sasl.password=hunter\\\nter2==", "backslash"),
            ("SHVudGVyMg==", "name of a-z"),
            ("=hunter2", "name of a-z"),
            ("! a=comment", "not with !"),
        ] {
            let (number, wrong) = lines(&format!("a=b\n{line}")).unwrap_err();
            assert_eq!(number, 2);
            assert!(wrong.contains(told) && !wrong.contains("hunter"), "{wrong}");
        }
        let connection = Connection {
            brokers: None,
            config: None,
            property: vec![Property::from("sasl.password:hunter=2".to_owned())],
            timeout: Duration::from_secs(1),
        };
        let error = connection
            .properties(std::iter::empty())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("NAME=VALUE") && !error.contains("hunter"),
            "{error}"
        );
    }
}
