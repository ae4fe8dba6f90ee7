//! Real brokers and services for the tests of `reliable-consumer`.
