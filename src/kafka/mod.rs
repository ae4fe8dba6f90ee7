//! Everything that talks to librdkafka: no other part of the crate names it.

mod ffi;
