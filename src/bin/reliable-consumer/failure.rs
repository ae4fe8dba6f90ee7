//! Why a command ends early, and the exit codes for it.

use std::{io, path::PathBuf, process::ExitCode};

use reliable_consumer::operate::InspectError;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Kafka(#[from] InspectError),
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    NotFound(String),
    #[error("not confirmed: {0}. Nothing was changed")]
    NotConfirmed(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    InPart(String),
    #[error("{0}")]
    BehindTime(String),
    #[error("{path}: {error}", path = .path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            // Whoever read the output has had enough of it, such as `head`.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::Kafka(InspectError::UnknownTopic(_)) | Self::NotFound(_) => 3,
            Self::Kafka(InspectError::Property(_)) | Self::Usage(_) => 2,
            Self::Kafka(_) | Self::Refused(_) | Self::File { .. } | Self::Output(_) => 1,
            Self::NotConfirmed(_) => 4,
            Self::InPart(_) => 5,
            Self::BehindTime(_) => 6,
        })
    }

    pub fn is_silent(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}
