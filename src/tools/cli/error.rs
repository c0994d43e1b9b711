//! Errors of all commands, with the exit status: 1 failed, 2 usage or configuration.

use std::io;

use crate::cache::gateway::OpenError;
use crate::config::ConfigError;
use crate::format::{HashError, SpaceError};
use crate::s3::object::ObjectError;

/// Why a command ends with another status than 0.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A flag, a setting or an input can't be used; the message says what to type.
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Failed(String),
    /// The report has the problem already.
    #[error("reported")]
    Reported,
    /// The report has the problem already, and it is a matter of configuration.
    #[error("reported")]
    ReportedUsage,
    #[error("can't write the output: {0}")]
    Output(#[from] io::Error),
}

impl CliError {
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// Writes the error, and returns the exit status.
    pub fn report(&self) -> u8 {
        match self {
            // The reader, such as `head`, has seen enough.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
            Self::Reported | Self::ReportedUsage => {}
            _ => super::output::tell(format_args!("error: {self}")),
        }
        match self {
            Self::Usage(_) | Self::Config(_) | Self::ReportedUsage => 2,
            Self::Failed(_) | Self::Reported | Self::Output(_) => 1,
        }
    }
}

impl From<ObjectError> for CliError {
    fn from(error: ObjectError) -> Self {
        (&error).into()
    }
}

impl From<&ObjectError> for CliError {
    fn from(error: &ObjectError) -> Self {
        match error.kind {
            kind if kind.is_setup() => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<OpenError> for CliError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Object(error) => error.into(),
            OpenError::NoBucket | OpenError::Client(_) | OpenError::Arena(_) | OpenError::Keys(_) => {
                Self::Usage(error.to_string())
            }
        }
    }
}

impl From<SpaceError> for CliError {
    fn from(error: SpaceError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<HashError> for CliError {
    fn from(error: HashError) -> Self {
        match error {
            HashError::Scheme => Self::Usage(format!("{error}, with --hashes FILE")),
            _ => Self::Usage(error.to_string()),
        }
    }
}
