//! Everything that talks to librdkafka: no other part of the crate names it, but for the builder's checked settings.

#[cfg(feature = "cli")]
mod administer;
mod assignment;
mod breaker;
mod client;
mod commits;
mod drain;
mod epochs;
mod errors;
mod ffi;
mod giving_up;
#[cfg(feature = "cli")]
mod inspect;
mod intake;
mod log;
mod prefetch;
mod producer;
mod properties;
mod pump;
mod spooled;
mod status;
mod surprises;
mod survey;
mod topics;
mod watch;

pub(crate) use self::client::generate_token;
#[cfg(feature = "cli")]
pub use self::{
    administer::{Administrator, Planned},
    inspect::{Cluster, Committed, Courier, InspectError, Next, Note, Remark},
};
pub use self::{
    client::{OAuthToken, OAuthTokenProvider},
    properties::PropertyError,
};
pub(crate) use self::{
    ffi::lock_file,
    log::Throttle,
    producer::{AckedProducer, Outgoing, ProduceError, ProduceErrorKind, RawHeader, TokenSource},
    properties::{Properties, consumer_config, producer_config},
    pump::{Control, Controls, Lookup, Selection, Start, control_channel, start},
    survey::{Finished, Survey, SurveyError, TopicLimits},
};

type BaseConsumer = rdkafka::consumer::BaseConsumer<client::Shell>;
