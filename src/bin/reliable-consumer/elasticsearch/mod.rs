//! Dead letters as documents of an Elasticsearch-compatible server.

mod bulk;
mod document;
mod server;

pub use self::{
    bulk::{Batch, Document},
    document::{IndexName, document, id},
    server::{Patience, Put, Server},
};
