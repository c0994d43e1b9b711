//! Turns the merged text into typed values, and collects every problem.

use std::collections::BTreeMap;

use ::config::{Value, ValueKind};

use super::error::{ConfigError, ConfigProblem, SettingOrigin};
use super::kinds::Kind;
use super::schema::{Config, SECTIONS};
use super::sources::Merged;
use super::{LoadedConfig, checks};

pub(super) struct SettingsReader(Merged);

impl SettingsReader {
    pub(super) fn new(merged: Merged) -> Self {
        Self(merged)
    }

    /// The value of a key, or `None` after noting why there is none.
    pub(super) fn read<K: Kind>(
        &mut self,
        section: &str,
        key: &str,
        default: &str,
        kind: &K,
    ) -> Option<K::Value> {
        let written = match self.0.tree.get(section).map(|section| &section.kind) {
            Some(ValueKind::Table(keys)) => keys.get(key),
            _ => None,
        };
        let parsed = match written {
            Some(value) => text_of(value, kind).and_then(|text| kind.parse(&text)),
            None => kind.parse(default),
        };
        parsed
            .map_err(|message| self.problem(format!("{section}.{key}"), message))
            .ok()
    }

    pub(super) fn finish(mut self, config: Option<Config>) -> Result<LoadedConfig, ConfigError> {
        let Some(config) = config.filter(|_| self.0.problems.is_empty()) else {
            self.0.problems.sort_by_key(order);
            return Err(ConfigError::new(self.0.problems));
        };
        for (path, message) in checks::check(&config) {
            self.problem(path.to_owned(), message);
        }
        if !self.0.problems.is_empty() {
            return Err(ConfigError::new(self.0.problems));
        }
        let mut warnings = std::mem::take(&mut self.0.warnings);
        warnings.sort_by_key(order);
        Ok(LoadedConfig {
            config,
            warnings,
            written_as: std::mem::take(&mut self.0.written_as),
            renames: self.0.names.renames,
            origins: self.all_origins(),
        })
    }

    fn problem(&mut self, path: String, message: String) {
        let origin = self
            .0
            .origins
            .get(&path)
            .cloned()
            .unwrap_or(SettingOrigin::Default);
        let written = self.0.written_as.get(&path).map(|old| (*old).to_owned());
        self.0.problems.push(ConfigProblem {
            path: Some(written.unwrap_or(path)),
            origin,
            message,
        });
    }

    fn all_origins(self) -> BTreeMap<String, SettingOrigin> {
        let paths = SECTIONS
            .iter()
            .flat_map(|(section, keys)| keys.iter().map(move |key| format!("{section}.{key}")));
        let mut origins: BTreeMap<_, _> = paths.map(|path| (path, SettingOrigin::Default)).collect();
        origins.extend(self.0.origins);
        origins
    }
}

/// A key that sorts problems the same way each time, although hash maps come before: file before environment before
/// flags, then by key.
fn order(problem: &ConfigProblem) -> (u8, Option<String>) {
    let source = match problem.origin {
        SettingOrigin::Default => 0,
        SettingOrigin::File(_) => 1,
        SettingOrigin::Env(_) => 2,
        SettingOrigin::Flag(_) => 3,
    };
    (source, problem.path.clone())
}

fn text_of(value: &Value, kind: &impl Kind) -> Result<String, String> {
    let found = match &value.kind {
        ValueKind::String(text) => return Ok(text.clone()),
        // No value is empty text: unset where that is allowed, refused as empty elsewhere.
        ValueKind::Nil => return Ok(String::new()),
        ValueKind::Table(_) => "a table".to_owned(),
        ValueKind::Array(_) => "a list".to_owned(),
        // The value is not repeated: YAML may have changed it already.
        _ if kind.needs_quotes() => {
            return Err(format!("must be text, in quotes: {}", kind.accepts()));
        }
        scalar => return Ok(scalar.to_string()),
    };
    Err(format!("is {found}; write {}", kind.accepts()))
}
