//! Configuration: the defaults, then a file, then the environment, then the command line.
//!
//! `schema` declares every key once: its type, default, limits and one line of documentation.
//! `sources` merges the written values and remembers the source of each; `reader` turns the merged text into typed
//! values. Neither stops at the first mistake: [`load`] returns either a whole configuration or the list of all its
//! problems, because an operator should not have to restart a daemon once per typing error.
//!
//! Not for credentials: those of S3 come only from the AWS chain, and those of tenants from the places that the file of
//! `[keys] file` names (`keys`). So nothing here needs hiding when it is shown.

mod checks;
mod declare;
mod error;
mod file;
mod keys;
mod kinds;
mod names;
mod reader;
mod renames;
mod schema;
mod sources;
#[cfg(test)]
mod tests;
pub mod units;
mod unknown;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

pub use error::{ConfigError, ConfigProblem, SettingOrigin};
pub use keys::{KeysError, read_keys, read_secret};
pub use schema::{
    Admit, Api, Arena, Config, Copies, Disk, Keys, Load, Log, LogFormat, LogLevel, Lookup, Lower, Memory,
    PeerName, S3, Store,
};
pub use sources::process_env;

use reader::SettingsReader;
use renames::{RENAMES, Rename};

/// A value from the command line, which wins over every other source.
#[derive(Debug, Clone)]
pub struct Override {
    /// The key, such as `s3.endpoint`.
    pub path: &'static str,
    pub value: String,
    /// The flag that gave it, such as `--endpoint`.
    pub flag: &'static str,
}

/// A valid configuration, and the source of each of its values.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    pub config: Config,
    /// The origin of every key, by path such as `s3.endpoint`.
    pub origins: BTreeMap<String, SettingOrigin>,
    /// Values that were given by a key's old name: each with its new name.
    pub warnings: Vec<ConfigProblem>,
    /// The old names of these keys, by path.
    written_as: BTreeMap<String, &'static str>,
    renames: &'static [Rename],
}

/// One key, for `config show` and the documentation.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    pub path: &'static str,
    /// The effective value, in text that reads back the same; empty where an optional key is not set.
    pub value: String,
    pub default: &'static str,
    pub origin: SettingOrigin,
    /// The key's old name, where that is written there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written_as: Option<&'static str>,
    /// The names that it had in the release before, which are taken too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub old_names: Vec<&'static str>,
    /// The allowed text, such as "a size from 1MiB to 5GiB".
    pub accepts: String,
    pub doc: &'static str,
}

/// Reads and checks the configuration. `env` is a parameter (see [`process_env`]) so that tests need not touch the
/// process.
///
/// # Errors
///
/// All problems, at once.
pub fn load(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &[Override],
) -> Result<LoadedConfig, ConfigError> {
    load_renamed(file, env, overrides, RENAMES)
}

fn load_renamed(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &[Override],
    renames: &'static [Rename],
) -> Result<LoadedConfig, ConfigError> {
    let mut reader = SettingsReader::new(sources::merge(file, env, overrides, renames));
    let config = Config::read(&mut reader);
    reader.finish(config)
}

impl LoadedConfig {
    /// Every key in the order of declaration.
    #[must_use]
    pub fn show(&self) -> Vec<Shown> {
        let mut keys = self.config.show(&self.origins);
        for key in &mut keys {
            let of_key = self.renames.iter().filter(|rename| rename.new == key.path);
            key.old_names = of_key.map(|rename| rename.old).collect();
            key.written_as = self.written_as.get(key.path).copied();
        }
        keys
    }
}

impl Default for Config {
    fn default() -> Self {
        let loaded = load(None, std::iter::empty(), &[]);
        loaded
            .expect("the defaults are valid: a unit test loads them")
            .config
    }
}
