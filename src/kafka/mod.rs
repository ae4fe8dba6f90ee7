//! Everything that talks to librdkafka: no other part of the crate names it, but for the builder's checked settings.

mod assignment;
mod client;
mod errors;
mod ffi;
mod intake;
pub(crate) mod log;
pub(crate) mod producer;
pub(crate) mod properties;
mod pump;

pub use self::{
    client::{OAuthToken, OAuthTokenProvider},
    properties::PropertyError,
};
pub(crate) use self::{
    properties::{Properties, consumer_config, producer_config},
    pump::{Control, Controls, Lookup, Selection, Start, control_channel, start},
};

type BaseConsumer = rdkafka::consumer::BaseConsumer<client::Shell>;
