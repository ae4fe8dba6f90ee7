//! What the program `reliable-consumer` needs and the API does not have. Not part of it: it changes without notice.

pub use crate::kafka::{
    Administrator, Cluster, Committed, Courier, InspectError, Next, Note, Planned, Remark,
};

/// The kind of failure with this name in the header `errorKind`.
pub fn failure_kind(name: &str) -> Option<crate::FailureKind> {
    crate::FailureKind::from_name(name)
}
