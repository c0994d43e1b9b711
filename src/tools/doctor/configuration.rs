//! The configuration: whether it can be read, where it comes from, and what must fit together in it.

use std::collections::BTreeSet;

use super::Finding;
use crate::config::{ConfigError, LoadedConfig, SettingOrigin};
use crate::node::daemon::has_room;

const CHECK: &str = "configuration";

pub fn check(loaded: &Result<LoadedConfig, ConfigError>) -> Vec<Finding> {
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let advice =
                "Correct it; `kvgate config check` shows the same, docs/CONFIGURATION.md has every key";
            let problem =
                |problem: &crate::config::ConfigProblem| Finding::failed(CHECK, problem.to_string(), advice);
            return error.problems().iter().map(problem).collect();
        }
    };
    let origins: BTreeSet<String> = loaded
        .origins
        .values()
        .filter(|origin| **origin != SettingOrigin::Default)
        .map(|origin| match origin {
            SettingOrigin::Env(_) => "the environment".to_owned(),
            SettingOrigin::Flag(_) => "flags".to_owned(),
            origin => origin.to_string(),
        })
        .collect();
    let seen = match origins.is_empty() {
        true => "all defaults".to_owned(),
        false => format!("from {}", origins.into_iter().collect::<Vec<_>>().join(", ")),
    };
    let mut found = vec![Finding::ok(CHECK, seen)];
    found.extend(loaded.warnings.iter().map(|warning| {
        let advice = "Write the new name; `kvgate config show --toml` writes all of the configuration with the new names";
        Finding::warning(CHECK, warning.to_string(), advice)
    }));
    if let Err(sentence) = has_room(&loaded.config) {
        let advice = "Raise [arena] size, or lower the other two: `kvgate serve` does not start like this";
        found.push(Finding::failed(CHECK, sentence, advice));
    }
    found
}
