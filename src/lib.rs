//! A Kafka consumer that loses nothing.
