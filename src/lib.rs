//! A Kafka consumer that loses nothing.

mod kafka;
