//! Everything that talks to librdkafka: no other part of the crate names it, but for the builder's checked settings.

mod administer;
mod agreement;
mod assignment;
mod breaker;
mod claims;
mod client;
mod cluster;
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
mod membership;
mod outage;
mod partition_errors;
mod prefetch;
mod producer;
mod properties;
mod pump;
mod reading;
mod reread;
mod spooled;
mod standing;
mod starts;
mod status;
mod surprises;
mod topics;
mod watch;

pub(crate) use self::client::generate_token;
pub use self::{
    administer::Administrator,
    client::{OAuthToken, OAuthTokenProvider},
    cluster::{Cluster, InspectError},
    properties::PropertyError,
    reading::Next,
    standing::Committed,
};
#[cfg(feature = "cli")]
pub use self::{
    administer::Planned,
    ffi::Member,
    inspect::Courier,
    standing::{Note, Remark},
};
pub(crate) use self::{
    cluster::{PREFETCH, Patience},
    ffi::lock_file,
    log::Throttle,
    producer::{AckedProducer, Outgoing, ProduceError, ProduceErrorKind, RawHeader, TokenSource},
    properties::{Properties, consumer_config, producer_config},
    pump::{Control, Controls, Lookup, Selection, Start, control_channel, start},
};

type BaseConsumer = rdkafka::consumer::BaseConsumer<client::Shell>;
