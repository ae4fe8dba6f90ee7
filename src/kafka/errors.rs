//! What Kafka's error codes mean for us: which pass, which end the consumer.

use rdkafka::types::RDKafkaErrorCode as Code;

use crate::{consumer::RunErrorKind, engine::CommitResult};

/// What the broker's answer to a commit means, see [`CommitResult`].
pub(super) fn commit_result(error: Option<Code>) -> CommitResult {
    match error {
        None => CommitResult::Accepted,
        // The second: all partitions of one commit together are more than the broker writes in one batch.
        Some(Code::OffsetMetadataTooLarge | Code::InvalidCommitOffsetSize) => CommitResult::Shrink,
        Some(
            Code::IllegalGeneration
            | Code::UnknownMemberId
            | Code::RebalanceInProgress
            | Code::StaleMemberEpoch
            | Code::FencedMemberEpoch,
        ) => CommitResult::Rejoining,
        Some(Code::FencedInstanceId | Code::GroupAuthorizationFailed | Code::Fatal) => {
            CommitResult::Fatal
        }
        Some(_) => CommitResult::Unavailable,
    }
}

/// Errors that waiting does not mend. Everything else is a broker that is away, and librdkafka goes on trying.
pub(super) fn is_terminal(code: Code) -> bool {
    matches!(
        code,
        Code::Fatal
            | Code::FencedInstanceId
            | Code::GroupAuthorizationFailed
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::UnsupportedSASLMechanism
            | Code::SaslAuthenticationFailed
            | Code::InvalidGroupId
            | Code::InconsistentGroupProtocol
            | Code::GroupMaxSizeReached
            | Code::UnreleasedInstanceId
            | Code::UnsupportedAssignor
    )
}

/// Whether one side does not accept who the other one is. Librdkafka goes on trying.
pub(super) fn is_login_failure(code: Code) -> bool {
    matches!(code, Code::Authentication | Code::SSL)
}

/// What kind of trouble a terminal error is.
pub(super) fn kind(code: Code) -> RunErrorKind {
    match code {
        Code::GroupAuthorizationFailed
        | Code::TopicAuthorizationFailed
        | Code::ClusterAuthorizationFailed
        | Code::UnsupportedSASLMechanism
        | Code::SaslAuthenticationFailed
        | Code::Authentication
        | Code::SSL => RunErrorKind::Authorization,
        Code::FencedInstanceId | Code::UnreleasedInstanceId => RunErrorKind::Fenced,
        _ => RunErrorKind::Client,
    }
}

/// What somebody who reads this error can do about it.
pub(super) fn advice(code: Code) -> &'static str {
    match code {
        Code::GroupAuthorizationFailed => "grant this principal READ on the consumer group",
        Code::TopicAuthorizationFailed => "grant this principal READ and DESCRIBE on the topic",
        Code::ClusterAuthorizationFailed => "grant this principal what the cluster asks for",
        Code::FencedInstanceId | Code::UnreleasedInstanceId => {
            "another process runs with the same group.instance.id: give each its own"
        }
        Code::UnsupportedSASLMechanism | Code::SaslAuthenticationFailed | Code::Authentication => {
            "check sasl.mechanisms and the credentials"
        }
        Code::SSL => {
            "check ssl.ca.location, the broker's certificate and, where the brokers ask for one, the client's"
        }
        Code::InconsistentGroupProtocol => {
            "the members of the group use other assignors: set partition.assignment.strategy to theirs"
        }
        Code::InvalidGroupId => "choose a group id that is not empty",
        Code::GroupMaxSizeReached => "raise group.max.size on the brokers or run fewer members",
        Code::UnsupportedAssignor => "the brokers do not know this group.remote.assignor",
        _ => "see the log for what led to it, and start the consumer again",
    }
}
