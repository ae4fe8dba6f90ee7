//! What the program `reliable-consumer` needs and the API does not have. Not part of it: it changes without notice.

pub use crate::kafka::{
    Administrator, Cluster, Committed, Courier, InspectError, Member, Next, Note, Planned, Remark,
};
