//! Keys and flags that have another name than in the release before. For one release the old name is taken too, with
//! a warning that names the new one. CONTRIBUTING.md says how to rename one.

use ::config::{Map, Value, ValueKind};

use super::error::{ConfigProblem, SettingOrigin};
use super::sources::{Table, env_name};

/// A key such as `s3.endpoint`, or a flag such as `--endpoint`, that had another name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rename {
    pub(super) old: &'static str,
    pub(super) new: &'static str,
    /// The release without the old name, such as `0.3.0`. A test fails there until the entry is gone.
    pub(super) refused_in: &'static str,
}

/// Where a whole section is renamed, each of its keys has an entry.
pub(super) const RENAMES: &[Rename] = &[];

/// The names by which values were given, of those that are in a table of renames.
pub(super) struct Names {
    pub(super) renames: &'static [Rename],
    given: Vec<(String, SettingOrigin)>,
}

impl Names {
    pub(super) fn new(renames: &'static [Rename]) -> Self {
        Self {
            renames,
            given: Vec::new(),
        }
    }

    pub(super) fn given(&mut self, name: &str, origin: SettingOrigin) {
        if self
            .renames
            .iter()
            .any(|rename| name == rename.old || name == rename.new)
        {
            self.given.push((name.to_owned(), origin));
        }
    }

    /// The rename of a key whose old name this is.
    pub(super) fn of_old(&self, path: &str) -> Option<Rename> {
        self.renames.iter().copied().find(|rename| rename.old == path)
    }

    /// A warning for each old name, and a problem where the new one is given too.
    pub(super) fn told(&self) -> (Vec<ConfigProblem>, Vec<ConfigProblem>) {
        let (mut warnings, mut problems) = (Vec::new(), Vec::new());
        for rename in self.renames {
            let by = |wanted: &'static str| {
                let named = self.given.iter().filter(move |(name, _)| name == wanted);
                named.map(|(_, origin)| origin)
            };
            for origin in by(rename.old) {
                let (told, message) = match by(rename.new).next() {
                    Some(new) => (
                        &mut problems,
                        format!(
                            "is the old name of `{}`, which is given too ({new}): remove the old one",
                            spelled(rename.new, new)
                        ),
                    ),
                    None => (
                        &mut warnings,
                        format!(
                            "is called `{}` now: write that, since kvgate {} refuses the old name",
                            spelled(rename.new, origin),
                            rename.refused_in
                        ),
                    ),
                };
                told.push(ConfigProblem {
                    path: Some(rename.old.to_owned()),
                    origin: origin.clone(),
                    message,
                });
            }
        }
        (warnings, problems)
    }
}

/// The name as that source writes it.
fn spelled(name: &str, origin: &SettingOrigin) -> String {
    match (origin, name.split_once('.')) {
        (SettingOrigin::Env(_), Some((section, key))) => env_name(section, key),
        _ => name.to_owned(),
    }
}

pub(super) fn is_written(sections: &Table, path: &str) -> bool {
    let Some((section, key)) = path.split_once('.') else {
        return false;
    };
    match sections.get(section).map(|section| &section.kind) {
        Some(ValueKind::Table(keys)) => keys.contains_key(key),
        _ => false,
    }
}

/// Gives the value of a file's old name the new name. False: the old name is not written.
pub(super) fn move_key(sections: &mut Table, rename: Rename) -> bool {
    let Some(value) = take(sections, rename.old) else {
        return false;
    };
    if let Some((section, key)) = rename.new.split_once('.') {
        let section = sections
            .entry(section.to_owned())
            .or_insert_with(|| Value::new(None, ValueKind::Nil));
        // A section whose keys are all commented out.
        if matches!(section.kind, ValueKind::Nil) {
            section.kind = ValueKind::Table(Map::new());
        }
        if let ValueKind::Table(keys) = &mut section.kind {
            keys.entry(key.to_owned()).or_insert(value);
        }
    }
    true
}

/// Takes the section away with its last key: it may be one that is no more.
fn take(sections: &mut Table, path: &str) -> Option<Value> {
    let (section, key) = path.split_once('.')?;
    let ValueKind::Table(keys) = &mut sections.get_mut(section)?.kind else {
        return None;
    };
    let value = keys.remove(key)?;
    if keys.is_empty() {
        sections.remove(section);
    }
    Some(value)
}
