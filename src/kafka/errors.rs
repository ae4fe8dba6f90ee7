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

/// What an error of the client means for the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    /// Part of a group's life: librdkafka does what is to be done, and nobody needs to know.
    Pass,
    /// It may pass, and librdkafka goes on trying. It is told as the cause if we do not become a member for long.
    Wait,
    /// Another has our instance id, by a session that may be one of a dead process: until it has ended we wait.
    WaitForSession,
    /// Waiting does not help.
    End,
}

/// What is done about an error. Of the codes that can be answered to FindCoordinator, JoinGroup, SyncGroup, Heartbeat and
/// ConsumerGroupHeartbeat none is missing.
pub(super) fn course(code: Code) -> Course {
    match code {
        Code::CoordinatorLoadInProgress
        | Code::NotCoordinator
        | Code::RebalanceInProgress
        | Code::IllegalGeneration
        | Code::UnknownMemberId
        | Code::MemberIdRequired
        | Code::FencedMemberEpoch
        | Code::StaleMemberEpoch => Course::Pass,
        Code::UnreleasedInstanceId => Course::WaitForSession,
        // `session.timeout.ms`, assignors, the group's id and its size do not change while we wait. The last of the
        // classic group's: somebody would have to lower the number of members.
        Code::InvalidSessionTimeout
        | Code::InconsistentGroupProtocol
        | Code::InvalidGroupId
        | Code::GroupMaxSizeReached
        | Code::UnsupportedAssignor
        | Code::FencedInstanceId
        // What librdkafka makes of any other error that it calls fatal.
        | Code::Fatal
        | Code::GroupAuthorizationFailed
        | Code::TopicAuthorizationFailed
        | Code::ClusterAuthorizationFailed
        | Code::UnsupportedSASLMechanism
        | Code::SaslAuthenticationFailed => Course::End,
        // `CoordinatorNotAvailable`, `Unknown` (a coordinator in trouble), `GroupIdNotFound` (a group of the other
        // protocol that the brokers may not convert while it has members) and brokers that are away. `InvalidRequest`,
        // `UnsupportedVersion` and `UnsupportedFeature` end the run where they are the answer to joining: librdkafka
        // calls them fatal there.
        _ => Course::Wait,
    }
}

/// Errors that waiting does not mend. Everything else is a broker that is away, and librdkafka goes on trying.
pub(super) fn is_terminal(code: Code) -> bool {
    matches!(course(code), Course::End | Course::WaitForSession)
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
        Code::InvalidSessionTimeout
        | Code::InconsistentGroupProtocol
        | Code::InvalidGroupId
        | Code::GroupMaxSizeReached
        | Code::UnsupportedAssignor
        | Code::UnsupportedVersion
        | Code::UnsupportedFeature
        | Code::InvalidRequest => RunErrorKind::CannotJoin,
        _ => RunErrorKind::Client,
    }
}

/// What somebody who reads this error can do about it.
pub(super) fn advice(code: Code) -> &'static str {
    match code {
        Code::GroupAuthorizationFailed => "grant this principal READ on the consumer group",
        Code::TopicAuthorizationFailed => "grant this principal READ and DESCRIBE on the topic",
        Code::ClusterAuthorizationFailed => "grant this principal what the cluster asks for",
        Code::FencedInstanceId => {
            "another process runs with the same group.instance.id: give each its own"
        }
        Code::UnreleasedInstanceId => {
            "another process runs with the same group.instance.id: give each its own; or one that had it has died, and \
             the brokers keep it for longer than was waited for (group.consumer.session.timeout.ms): raise \
             `instance_id_timeout` above that"
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
        Code::InvalidSessionTimeout => {
            "set session.timeout.ms to what the brokers accept: from their group.min.session.timeout.ms to their \
             group.max.session.timeout.ms"
        }
        Code::UnsupportedVersion | Code::UnsupportedFeature => {
            "the brokers do not speak this group.protocol, being older than Kafka 4.0 or by their \
             group.coordinator.rebalance.protocols: set group.protocol=classic, or change them"
        }
        Code::InvalidRequest => {
            "the brokers refuse how this member describes itself: compare its max.poll.interval.ms, group.instance.id, \
             client.rack and topics with what their log says"
        }
        Code::InvalidGroupId => "choose a group id that is not empty",
        Code::GroupMaxSizeReached => "raise group.max.size on the brokers or run fewer members",
        Code::UnsupportedAssignor => "the brokers do not know this group.remote.assignor",
        _ => "see the log for what led to it, and start the consumer again",
    }
}
