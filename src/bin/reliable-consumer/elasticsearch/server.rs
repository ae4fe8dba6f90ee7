//! The server: reaching it, its template, and sending until each document is taken or refused.

use std::{
    env, fs,
    io::{self, ErrorKind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use ureq::{
    Agent,
    http::{HeaderValue, Request, Uri, header},
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::{
    bulk::{self, Batch, Document, Verdict},
    document::IndexName,
};
use crate::{arguments::Elasticsearch, failure::Failure, place::Place, text, time};

const CONNECT: Duration = Duration::from_secs(10);
/// For a whole request: a node that is busy takes its time for a thousand documents.
const ANSWER: Duration = Duration::from_secs(120);
const LARGEST_ANSWER: u64 = 16 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// While waiting, that is said so often.
const REMINDER: Duration = Duration::from_secs(30);
/// Characters of what a server says that are shown.
const SHOWN: usize = 400;

pub struct Server {
    agent: Agent,
    base: String,
    authorization: Option<HeaderValue>,
    index: IndexName,
}

/// When the template is put.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Put {
    Never,
    WhereMissing,
    Always,
}

/// Why an answer is none that was wanted.
enum Trouble {
    /// It may be better a little later.
    Passing(String),
    Lasting(String),
    TooLarge,
}

type Answer<T> = Result<T, Trouble>;

/// What became of a batch; those that are in neither were not sent when somebody ended it.
#[derive(Debug, Default)]
pub struct Sent {
    pub taken: u64,
    pub refused: Vec<(Place, String)>,
    pub all: bool,
}

impl Server {
    pub fn new(url: &str, options: &Elasticsearch) -> Result<Self, Failure> {
        let base = base_of(url).map_err(Failure::Usage)?;
        let authorization = credentials(options)?;
        let mut tls = TlsConfig::builder();
        if let Some(path) = &options.ca {
            let at = |error| Failure::File {
                path: path.clone(),
                error,
            };
            let pem = fs::read(path).map_err(at)?;
            let certificates: Vec<Certificate<'static>> = parse_pem(&pem)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            if certificates.is_empty() {
                return Err(at(io::Error::new(
                    ErrorKind::InvalidData,
                    "there is no certificate in it (PEM)",
                )));
            }
            tls = tls.root_certs(RootCerts::new_with_certs(&certificates));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A password goes to whom it was meant for, and to nobody that is named there.
            .max_redirects(0)
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER))
            .user_agent(concat!("reliable-consumer/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls.build())
            .build();
        Ok(Self {
            agent: config.into(),
            base,
            authorization,
            index: options.index.clone(),
        })
    }

    pub fn index(&self) -> &str {
        self.index.as_str()
    }

    /// Puts the template where that is wanted. Whether the index exists.
    ///
    /// `None`: it was ended before that was clear.
    pub fn prepare(
        &self,
        put: Put,
        patience: &mut Patience,
        say: &dyn Fn(&str),
    ) -> Result<Option<bool>, Failure> {
        let prepare = || {
            let exists = self.exists(self.index())?;
            let template = format!("_index_template/reliable-consumer.{}", self.index());
            // One that is there may have been changed by whoever runs the server.
            let missing = || Ok(!exists && !self.exists(&template)?);
            if put == Put::Always || put == Put::WhereMissing && missing()? {
                let body = self.index.template().to_string();
                self.asked(
                    "PUT",
                    &template,
                    Some(("application/json", body.as_bytes())),
                )?;
            }
            Ok(exists)
        };
        loop {
            match prepare() {
                Ok(exists) => {
                    patience.ends(say);
                    return Ok(Some(exists));
                }
                Err(trouble) => {
                    if !patience.wait_for(&self.base, &self.passing(trouble)?, say)? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Sends until each is taken or refused, or somebody ends it.
    pub fn send(
        &self,
        batch: Batch,
        patience: &mut Patience,
        say: &dyn Fn(&str),
    ) -> Result<Sent, Failure> {
        let mut sent = Sent::default();
        let mut parts = vec![batch.documents];
        while let Some(mut documents) = parts.pop() {
            if documents.is_empty() {
                continue;
            }
            let trouble = match self.post(&documents) {
                Err(Trouble::TooLarge) if documents.len() > 1 => {
                    let second = documents.split_off(documents.len() / 2);
                    parts.extend([second, documents]);
                    continue;
                }
                Err(Trouble::TooLarge) => {
                    let reason = "the server takes no request of this size".to_owned();
                    sent.refused.push((documents[0].place, reason));
                    continue;
                }
                Err(trouble) => Some(self.passing(trouble)?),
                Ok(verdicts) => {
                    let mut later = None;
                    let before = documents.len();
                    let mut open = Vec::new();
                    for (document, verdict) in documents.into_iter().zip(verdicts) {
                        match verdict {
                            Verdict::Taken => sent.taken += 1,
                            Verdict::Refused(reason) => {
                                sent.refused.push((document.place, reason));
                            }
                            Verdict::Later(reason) => {
                                later = Some(reason);
                                open.push(document);
                            }
                            Verdict::Stop(reason) => {
                                return Err(self.lasting(&format!(
                                    "it does not take letter {}: {reason}; nothing was passed over",
                                    document.place
                                )));
                            }
                        }
                    }
                    documents = open;
                    if documents.len() < before {
                        patience.ends(say);
                    }
                    later
                }
            };
            if let Some(trouble) = trouble {
                if !patience.wait_for(&self.base, &trouble, say)? {
                    return Ok(sent);
                }
                parts.push(documents);
            }
        }
        sent.all = true;
        Ok(sent)
    }

    fn post(&self, documents: &[Document]) -> Answer<Vec<Verdict>> {
        let body: String = documents.iter().map(|it| &*it.lines).collect();
        let body = ("application/x-ndjson", body.as_bytes());
        let answer = self.asked("POST", bulk::PATH, Some(body))?;
        bulk::verdicts(&answer, documents.len()).ok_or_else(|| {
            Trouble::Lasting("what it answers is no answer of _bulk; is it Elasticsearch?".into())
        })
    }

    fn exists(&self, path: &str) -> Answer<bool> {
        match self.ask("HEAD", path, None)? {
            (404, _) => Ok(false),
            (status, answer) => self.judge(status, answer).map(|_| true),
        }
    }

    fn asked(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Answer<Vec<u8>> {
        let (status, answer) = self.ask(method, path, body)?;
        self.judge(status, answer)
    }

    fn judge(&self, status: u16, answer: Vec<u8>) -> Answer<Vec<u8>> {
        let told = || {
            let answer: Option<Value> = serde_json::from_slice(&answer).ok();
            let error = answer.as_ref().and_then(|it| it.get("error"));
            match error {
                Some(error) => format!("it answers {status}: {}", bulk::reason(Some(error))),
                None => format!("it answers {status}"),
            }
        };
        match status {
            200..=299 => Ok(answer),
            413 => Err(Trouble::TooLarge),
            408 | 429 | 500.. => Err(Trouble::Passing(told())),
            300..=399 => Err(Trouble::Lasting(format!(
                "{}: it sends us elsewhere; name the right address",
                told()
            ))),
            401 => Err(Trouble::Lasting(format!(
                "{}; check the user and password, or the API key",
                told()
            ))),
            403 => Err(Trouble::Lasting(format!(
                "{}; grant this user view_index_metadata, create_index and write on index {}, and manage_index_templates unless the index is made beforehand",
                told(),
                self.index()
            ))),
            _ => Err(Trouble::Lasting(told())),
        }
    }

    fn ask(&self, method: &str, path: &str, body: Option<(&str, &[u8])>) -> Answer<(u16, Vec<u8>)> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}/{path}", self.base));
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        if let Some((kind, _)) = body {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        let whom = |error: String| {
            format!(
                "{error}; if an authority of your own has signed its certificate, name it with --ca"
            )
        };
        let passing = |error: ureq::Error| match error {
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) => {
                Trouble::Lasting(whom(error.to_string()))
            }
            // So TLS says that it does not believe the server.
            ureq::Error::Io(error) if error.kind() == ErrorKind::InvalidData => {
                Trouble::Lasting(whom(error.to_string()))
            }
            ureq::Error::Io(error) => Trouble::Passing(error.to_string()),
            error @ (ureq::Error::BodyExceedsLimit(_)
            | ureq::Error::LargeResponseHeader(..)
            | ureq::Error::BadUri(_)) => Trouble::Lasting(error.to_string()),
            other => Trouble::Passing(other.to_string()),
        };
        let malformed = |error: ureq::http::Error| Trouble::Lasting(error.to_string());
        let answer = match body {
            Some((_, body)) => self.agent.run(request.body(body).map_err(malformed)?),
            None => self.agent.run(request.body(()).map_err(malformed)?),
        };
        let mut answer = answer.map_err(passing)?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().with_config().limit(LARGEST_ANSWER);
        Ok((status, body.read_to_vec().map_err(passing)?))
    }

    /// What is worth waiting for.
    fn passing(&self, trouble: Trouble) -> Result<String, Failure> {
        match trouble {
            Trouble::Passing(reason) => Ok(reason),
            Trouble::Lasting(reason) => Err(self.lasting(&reason)),
            Trouble::TooLarge => Err(self.lasting("it answers 413 to a small request")),
        }
    }

    fn lasting(&self, reason: &str) -> Failure {
        Failure::Refused(format!("{}: {}", self.base, shown(reason)))
    }
}

/// Servers quote what they were sent.
fn shown(reason: &str) -> String {
    text::line(reason.as_bytes(), SHOWN)
}

/// Waiting for somebody who is away, up to a time, and saying so.
pub struct Patience {
    limit: Option<Duration>,
    stop: Arc<AtomicBool>,
    away: Option<Away>,
}

struct Away {
    whom: String,
    since: Instant,
    told: Instant,
    pause: Duration,
}

impl Patience {
    pub fn new(limit: Option<Duration>, stop: Arc<AtomicBool>) -> Self {
        Self {
            limit,
            stop,
            away: None,
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// `false`: somebody ends it.
    pub fn wait_for(
        &mut self,
        whom: &str,
        reason: &str,
        say: &dyn Fn(&str),
    ) -> Result<bool, Failure> {
        let now = Instant::now();
        let reason = shown(reason);
        // Whoever is waited for now was reached after the one before.
        self.away.take_if(|away| away.whom != whom);
        let away = self.away.get_or_insert_with(|| {
            say(&format!("waiting for {whom}: {reason}"));
            Away {
                whom: whom.to_owned(),
                since: now,
                told: now,
                pause: FIRST_PAUSE,
            }
        });
        let waited = now - away.since;
        let age = |duration: Duration| time::age(i64::try_from(duration.as_millis()).unwrap_or(0));
        if self.limit.is_some_and(|limit| waited >= limit) {
            return Err(Failure::Refused(format!(
                "waited {} in vain for {whom}: {reason}; what is written is noted, run it again to go on",
                age(waited)
            )));
        }
        if away.told.elapsed() >= REMINDER {
            away.told = now;
            say(&format!(
                "still waiting for {whom}, for {}: {reason}",
                age(waited)
            ));
        }
        let left = self.limit.map_or(Duration::MAX, |limit| limit - waited);
        let until = now + away.pause.min(left);
        away.pause = (away.pause * 2).min(LONGEST_PAUSE);
        Ok(self.sleep_until(until))
    }

    /// What was waited for has come.
    pub fn ends(&mut self, say: &dyn Fn(&str)) {
        if let Some(Away { whom, since, .. }) = self.away.take() {
            let waited = i64::try_from(since.elapsed().as_millis()).unwrap_or(0);
            say(&format!("{whom} is back after {}", time::age(waited)));
        }
    }

    /// `false`: somebody ends it.
    pub fn sleep_until(&self, until: Instant) -> bool {
        while !self.is_stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(Duration::from_millis(50)));
        }
        false
    }
}

/// Without a slash at the end. What is wrong is not quoted: there may be a password in it.
fn base_of(url: &str) -> Result<String, String> {
    let wrong =
        |what| format!("--elasticsearch: {what}; expected an address such as https://search:9200");
    let uri: Uri = url
        .parse()
        .map_err(|_| wrong("this is no address".to_owned()))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(wrong("it begins with neither http:// nor https://".into()));
    }
    if uri.authority().is_none_or(|it| it.as_str().contains('@')) {
        return Err(wrong(
            "others can see what stands on a command line, write users and passwords into a file (--credentials) or variables".into(),
        ));
    }
    if uri.query().is_some() {
        return Err(wrong("there is a question mark in it".into()));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

fn credentials(options: &Elasticsearch) -> Result<Option<HeaderValue>, Failure> {
    let (mut key, mut user, mut password) = (None, None, None);
    if let Some(path) = &options.credentials {
        let read = fs::read_to_string(path).map_err(|error| Failure::File {
            path: path.clone(),
            error,
        })?;
        let lines = read.lines().map(str::trim).zip(1..);
        for (line, number) in lines.filter(|(it, _)| !it.is_empty() && !it.starts_with('#')) {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            let value = Some(value.trim().to_owned());
            match name.trim() {
                "api-key" => key = value,
                "user" => user = value,
                "password" => password = value,
                // The line is not quoted: it may be the password.
                _ => {
                    return Err(Failure::Usage(format!(
                        "{}, line {number}: expected api-key=…, user=… or password=…",
                        path.display()
                    )));
                }
            }
        }
    } else {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        key = variable("ELASTICSEARCH_API_KEY");
        user = variable("ELASTICSEARCH_USER");
        password = variable("ELASTICSEARCH_PASSWORD");
    }
    let value = match (key, user, password) {
        (Some(key), _, _) => format!("ApiKey {key}"),
        (None, Some(user), Some(password)) => {
            let both = text::base64(format!("{user}:{password}").as_bytes());
            format!("Basic {both}")
        }
        (None, None, None) => return Ok(None),
        (None, ..) => {
            return Err(Failure::Usage(
                "a user needs a password, and a password a user; or an API key".into(),
            ));
        }
    };
    let mut value = HeaderValue::try_from(value)
        .map_err(|_| Failure::Usage("no API key has such characters".into()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_no_password_and_what_is_wrong_with_it_is_not_quoted() {
        let base = base_of("https://search:9200/es/");
        assert_eq!(base.as_deref(), Ok("https://search:9200/es"));
        for wrong in [
            "https://eve:hunter2@search",
            "hunter2",
            "ftp://hunter2",
            "http://search?hunter2",
            "http://hunter2 x",
            "",
        ] {
            let error = base_of(wrong).unwrap_err();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
