//! The problems of a configuration: a list, since all are reported at once.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

/// The place where a value was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", content = "name", rename_all = "snake_case")]
pub enum SettingOrigin {
    Default,
    #[serde(serialize_with = "path_as_text")]
    File(PathBuf),
    /// The name of the environment variable.
    Env(String),
    /// The command line flag, with its dashes.
    Flag(&'static str),
}

/// One mistake, or one thing to change before the next release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfigProblem {
    /// The key as written, such as `s3.part_size`; absent where the whole file is meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    pub origin: SettingOrigin,
    /// The problem, and the text to write instead.
    pub message: String,
}

/// All problems, never empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ConfigError(Vec<ConfigProblem>);

impl ConfigError {
    pub(super) fn new(problems: Vec<ConfigProblem>) -> Self {
        Self(problems)
    }

    #[must_use]
    pub fn problems(&self) -> &[ConfigProblem] {
        &self.0
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.0.len() == 1 { "problem" } else { "problems" };
        write!(f, "{} {noun} in the configuration", self.0.len())?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            // A file's key may hold any text; escaped, it stays on its line.
            Some(path) => write!(f, "{} ({}): {}", path.escape_debug(), self.origin, self.message),
            None => write!(f, "{}: {}", self.origin, self.message),
        }
    }
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Env(name) => write!(f, "environment {}", name.escape_debug()),
            Self::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// serde refuses a path that is not Unicode; a report must not fail for that.
fn path_as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}
