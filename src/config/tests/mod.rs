//! Tests of the whole path: sources in, configuration or list of problems out.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod refused;
mod renamed;
mod valid;

use super::*;
use crate::config::units::{ByteSize, MIB};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/config")
        .join(name)
}

fn env(pairs: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
    let pairs: Vec<_> = pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    pairs.into_iter()
}

fn flag(path: &'static str, value: &str, flag: &'static str) -> Override {
    Override {
        path,
        value: value.to_owned(),
        flag,
    }
}

fn load_file(name: &str) -> Result<LoadedConfig, ConfigError> {
    load(Some(&fixture(name)), env(&[]), &[])
}

fn load_env(pairs: &[(&str, &str)]) -> Result<LoadedConfig, ConfigError> {
    load(None, env(pairs), &[])
}

fn load_text(text: &str) -> Result<LoadedConfig, ConfigError> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    load(Some(file.path()), env(&[]), &[])
}

/// Expects exactly these problems: each line begins with the path and contains the snippet.
fn assert_problems(result: Result<LoadedConfig, ConfigError>, expected: &[(&str, &str)]) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.problems().len(), expected.len(), "{text}");
    assert_eq!(text.lines().count(), expected.len() + 1, "{text}");
    for (path, snippet) in expected {
        let told = |problem: &&ConfigProblem| problem.path.as_deref().unwrap_or("") == *path;
        let found = error
            .problems()
            .iter()
            .filter(told)
            .any(|problem| problem.message.contains(snippet));
        assert!(found, "no {path:?} with {snippet:?} in\n{text}");
    }
}
