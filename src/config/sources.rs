//! The sources of values: file, environment, command line, merged in that order by the `config` crate.
//!
//! Unknown keys are taken out of each source before the merge, because only there the source is known; after the
//! merge every value has a known path, and [`Merged::origins`] has its source. (The crate would also read
//! `s3[99999999]` in a name as an index and allocate room for it.)
//!
//! A value that is given by a key's old name (`renames`) goes on under the new one from here.
//!
//! A file that can't be used is one problem and counts as empty, so that mistakes elsewhere are reported too.

use std::collections::BTreeMap;
use std::path::Path;

use ::config::{Map, Source, Value, ValueKind};

use super::Override;
use super::error::{ConfigProblem, SettingOrigin};
use super::file::read_file;
use super::renames::{Names, Rename, is_written, move_key};
use super::schema::SECTIONS;
use super::unknown::{key_advice, keys_of, section_advice};

const ENV_PREFIX: &str = "KVGATE__";

pub(super) type Table = Map<String, Value>;

pub(super) struct Merged {
    /// Section, then key.
    pub(super) tree: Table,
    /// Only of written keys.
    pub(super) origins: BTreeMap<String, SettingOrigin>,
    /// The old names by which values were given, by the new ones.
    pub(super) written_as: BTreeMap<String, &'static str>,
    pub(super) problems: Vec<ConfigProblem>,
    pub(super) warnings: Vec<ConfigProblem>,
    pub(super) names: Names,
}

/// The environment of this process. Unlike [`std::env::vars`] it does not panic at a name or value that is not
/// Unicode: invalid parts show as U+FFFD.
pub fn process_env() -> impl Iterator<Item = (String, String)> {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

pub(super) fn merge(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &[Override],
    renames: &'static [Rename],
) -> Merged {
    let mut merged = Merged {
        tree: Table::new(),
        origins: BTreeMap::new(),
        written_as: BTreeMap::new(),
        problems: Vec::new(),
        warnings: Vec::new(),
        names: Names::new(renames),
    };
    let written = file.map_or_else(Table::new, |path| merged.keep_file(path));
    let named = merged.keep_env(env);
    let flagged = merged.keep_flags(overrides);
    let environment = ::config::Environment::with_prefix("KVGATE")
        .separator("__")
        .source(Some(named));
    let tree = ::config::Config::builder()
        .add_source(Checked(written))
        .add_source(environment)
        .add_source(Checked(flagged))
        .build()
        .and_then(|config| config.collect());
    match tree {
        Ok(tree) => merged.tree = tree,
        Err(error) => merged.problem(None, SettingOrigin::Default, error.to_string()),
    }
    let (warnings, problems) = merged.names.told();
    merged.warnings.extend(warnings);
    merged.problems.extend(problems);
    merged
}

impl Merged {
    fn problem(&mut self, path: Option<String>, origin: SettingOrigin, message: String) {
        self.problems.push(ConfigProblem {
            path,
            origin,
            message,
        });
    }

    fn keep_file(&mut self, path: &Path) -> Table {
        let origin = || SettingOrigin::File(path.to_owned());
        match read_file(path) {
            Ok(mut sections) => {
                self.rename_keys(&mut sections, &origin());
                sections.retain(|section, value| self.keep_section(section, value, &origin()));
                sections
            }
            Err(message) => {
                self.problem(None, origin(), message);
                Table::new()
            }
        }
    }

    fn rename_keys(&mut self, sections: &mut Table, origin: &SettingOrigin) {
        for rename in self.names.renames {
            if is_written(sections, rename.new) {
                self.names.given(rename.new, origin.clone());
            }
            if move_key(sections, *rename) {
                self.names.given(rename.old, origin.clone());
                self.written_as.insert(rename.new.to_owned(), rename.old);
            }
        }
    }

    fn keep_section(&mut self, section: &str, value: &mut Value, origin: &SettingOrigin) -> bool {
        let known = keys_of(section);
        let path = Some(section.to_owned());
        match (&mut value.kind, known) {
            (ValueKind::Table(keys), Some(known)) => {
                keys.retain(|key, _| self.keep_key(section, key, known, origin));
                return true;
            }
            // A section whose keys are all commented out.
            (ValueKind::Nil, Some(_)) => {}
            (_, Some(known)) => {
                let message = format!("is a section, not a value; its keys are {}", known.join(", "));
                self.problem(path, origin.clone(), message);
            }
            (ValueKind::Table(_), None) => {
                self.problem(path, origin.clone(), section_advice(section));
            }
            (_, None) => {
                // Perhaps `s3.bucket` in quotes.
                let key = section.rsplit('.').next().unwrap_or(section);
                let message = key_advice("", key, |home, key| format!("`{key}` in section `{home}`"));
                self.problem(path, origin.clone(), message);
            }
        }
        false
    }

    fn keep_key(&mut self, section: &str, key: &str, known: &[&str], origin: &SettingOrigin) -> bool {
        let path = format!("{section}.{key}");
        if known.contains(&key) {
            self.origins.insert(path, origin.clone());
            return true;
        }
        let message = key_advice(section, key, |home, key| {
            if home == section {
                format!("`{key}`")
            } else {
                format!("`{key}` in section `{home}`")
            }
        });
        self.problem(Some(path), origin.clone(), message);
        false
    }

    fn keep_env(&mut self, env: impl Iterator<Item = (String, String)>) -> Map<String, String> {
        let mut kept = Map::new();
        for (name, value) in env {
            // In any case, so that `kvgate__s3__bucket` is reported and not ignored.
            let Some(rest) = strip_prefix_ignoring_case(&name, ENV_PREFIX) else {
                // `KVGATE_S3_BUCKET`. Other names may be anybody's.
                if let Some((section, key)) = strip_prefix_ignoring_case(&name, "KVGATE_").and_then(flat) {
                    let message = format!("unknown key; did you mean `{}`?", env_name(section, key));
                    self.problem(
                        Some(format!("{section}.{key}")),
                        SettingOrigin::Env(name),
                        message,
                    );
                }
                continue;
            };
            let path = rest.to_lowercase().replace("__", ".");
            let (section, key) = path.split_once('.').unwrap_or(("", &path));
            let origin = SettingOrigin::Env(name.clone());
            let is_spelled = name == env_name(section, key);
            let renamed = self.names.of_old(&path);
            if let Some(rename) = renamed.filter(|_| is_spelled) {
                self.names.given(rename.old, origin.clone());
                self.origins.insert(rename.new.to_owned(), origin);
                self.written_as.insert(rename.new.to_owned(), rename.old);
                let (section, key) = rename.new.split_once('.').unwrap_or(("", rename.new));
                kept.insert(env_name(section, key), value);
            } else if keys_of(section).is_some_and(|keys| keys.contains(&key)) && is_spelled {
                self.names.given(&path, origin.clone());
                self.written_as.remove(&path);
                self.origins.insert(path, origin);
                kept.insert(name, value);
            } else {
                let spell = |section: &str, key: &str| format!("`{}`", env_name(section, key));
                let known = renamed.and_then(|rename| rename.new.split_once('.'));
                let message = match known.or_else(|| flat(rest)) {
                    Some((section, key)) => format!("unknown key; did you mean {}?", spell(section, key)),
                    None => key_advice(section, key, spell),
                };
                self.problem(Some(path), origin, message);
            }
        }
        kept
    }

    fn keep_flags(&mut self, overrides: &[Override]) -> Table {
        let mut kept = Table::new();
        for Override { path, value, flag } in overrides {
            // A flag names no key, so that a renamed key is no news to its caller. The flag itself may be renamed.
            self.names.given(flag, SettingOrigin::Flag(flag));
            let path = self.names.of_old(path).map_or(*path, |rename| rename.new);
            let (section, key) = path.split_once('.').unwrap_or(("", path));
            if keys_of(section).is_some_and(|keys| keys.contains(&key)) {
                self.written_as.remove(path);
                self.origins.insert(path.to_owned(), SettingOrigin::Flag(flag));
                kept.insert(path.to_owned(), Value::new(None, value.clone()));
            } else {
                let message = key_advice(section, key, |section, key| format!("`{section}.{key}`"));
                self.problem(Some(path.to_owned()), SettingOrigin::Flag(flag), message);
            }
        }
        kept
    }
}

/// The key that is written with one underscore after its section.
fn flat(name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.to_lowercase().replace("__", "_");
    SECTIONS.iter().find_map(|(section, keys)| {
        let key = name.strip_prefix(section)?.strip_prefix('_')?;
        let known = keys.iter().find(|known| **known == key);
        known.map(|known| (*section, *known))
    })
}

pub(super) fn env_name(section: &str, key: &str) -> String {
    format!("{ENV_PREFIX}{section}__{key}").to_uppercase()
}

fn strip_prefix_ignoring_case<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, rest) = name.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

/// A source whose keys are all known.
#[derive(Debug, Clone)]
struct Checked(Table);

impl Source for Checked {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Table, ::config::ConfigError> {
        Ok(self.0.clone())
    }
}
