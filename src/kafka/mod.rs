//! Everything that talks to librdkafka: no other part of the crate names it.

mod ffi;
mod log;
pub(crate) mod producer;
pub(crate) mod properties;
