//! What removes chunks from the bucket: rules of the bucket, `[gc]`, or nobody.

use std::time::Duration;

use super::Finding;
use crate::config::Config;
use crate::config::units::show_duration;
use crate::format::KeyPrefix;
use crate::s3::object::{AgeRule, ErrorKind, Result};

const BOUND: &str =
    "Bound the bucket by size with `kvgate gc` or [gc], or by age with `kvgate lifecycle apply`";

pub fn lifecycle(rules: Result<Vec<AgeRule>>, config: &Config) -> Finding {
    const CHECK: &str = "lifecycle";
    let bounded = match by_gc(config) {
        Some(limits) => format!("[gc] removes chunks: {limits}"),
        None => BOUND.to_owned(),
    };
    let rules = match rules {
        Ok(rules) => rules,
        Err(error) if error.kind == ErrorKind::Denied => {
            return Finding::not_checked(
                CHECK,
                "this user may not read the rules (s3:GetLifecycleConfiguration)",
            );
        }
        Err(error) if is_unknown(error.kind) => {
            return Finding::ok(CHECK, format!("the server has no lifecycle rules. {bounded}"));
        }
        Err(error) => return Finding::warning(CHECK, error.to_string(), BOUND),
    };
    let keys = KeyPrefix::new(&config.s3.prefix);
    let prefix = keys.as_str();
    let ours: Vec<&AgeRule> = rules
        .iter()
        .filter(|rule| prefix.starts_with(&rule.prefix) || rule.prefix.starts_with(prefix))
        .collect();
    if let Some(rule) = ours.iter().find(|rule| rule.moves_after.is_some()) {
        let seen = format!(
            "a rule moves objects under {:?} to another storage class",
            rule.prefix
        );
        let advice = "Leave the prefix out of it: chunks in an archive can't be loaded, and each read of a cold class costs";
        return Finding::warning(CHECK, seen, advice);
    }
    match ours.iter().filter_map(|rule| rule.days).min() {
        Some(days) => by_age(days, config.refresh.after),
        None => Finding::ok(
            CHECK,
            format!("no rule removes objects under the prefix by age. {bounded}"),
        ),
    }
}

/// `after`: of `[refresh]`, which makes chunks in use young again.
fn by_age(days: i32, after: Option<Duration>) -> Finding {
    const CHECK: &str = "lifecycle";
    let age = Duration::from_secs(u64::try_from(days).unwrap_or(0) * 86_400);
    let seen = format!("a rule removes objects under the prefix after {days} days");
    let half = show_duration(age / 2);
    match after {
        None => Finding::ok(
            CHECK,
            format!("{seen}, in use or not: [refresh] after = \"{half}\" keeps those in use"),
        ),
        Some(after) if after < age => Finding::ok(CHECK, format!("{seen}, and [refresh] keeps those in use")),
        Some(after) => Finding::warning(
            CHECK,
            format!(
                "{seen}, and [refresh] after is {}: those in use go before they are refreshed",
                show_duration(after)
            ),
            format!(
                "Set [refresh] after to less than the rule's days, such as \"{half}\", on every node; or give the rule more days"
            ),
        ),
    }
}

fn is_unknown(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Unsupported | ErrorKind::Refused | ErrorKind::Unavailable
    )
}

/// The limits of `[gc]`, if it has one.
fn by_gc(config: &Config) -> Option<String> {
    let gc = &config.gc;
    let limits = [
        gc.size.map(|size| format!("size {size}")),
        gc.tenant_size.map(|size| format!("tenant_size {size}")),
        gc.unused.map(|time| format!("unused {}", show_duration(time))),
    ];
    let limits: Vec<String> = limits.into_iter().flatten().collect();
    (!limits.is_empty()).then(|| limits.join(", "))
}

pub fn versions(keeps: &Result<bool>) -> Option<Finding> {
    let seen = "the bucket keeps versions: what is removed or replaced stays, and counts";
    let advice = "Suspend versioning of this bucket, or add a rule that expires noncurrent versions";
    matches!(keeps, Ok(true)).then(|| Finding::warning("versioning", seen, advice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Override, load};
    use crate::tools::doctor::Verdict;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let set = |&(path, value): &(&'static str, &str)| Override {
            path,
            value: value.to_owned(),
            flag: "--test",
        };
        let flags: Vec<Override> = settings.iter().map(set).collect();
        load(None, std::iter::empty(), &flags).unwrap().config
    }

    #[test]
    fn a_bucket_without_rules_is_bounded_by_gc_or_the_advice_names_what_does() {
        let said = format!("{:?}", lifecycle(Ok(Vec::new()), &config(&[])));
        for words in ["kvgate gc", "[gc]", "kvgate lifecycle apply"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        let settings = [("gc.size", "100TiB"), ("gc.tenant_size", "10TiB")];
        let said = format!("{:?}", lifecycle(Ok(Vec::new()), &config(&settings)));
        assert!(said.contains("size 100TiB, tenant_size 10TiB"), "{said}");
        assert!(!said.contains("Bound the bucket"), "{said}");
    }

    #[test]
    fn a_rule_that_is_faster_than_refresh_is_a_warning() {
        let rule = |prefix: &str, days| AgeRule {
            prefix: prefix.to_owned(),
            days: Some(days),
            moves_after: None,
        };
        let judged = |settings: &[(&'static str, &str)]| {
            let rules = vec![rule("kv/", 30), rule("", 10), rule("other/", 1)];
            let settings = [&[("s3.prefix", "kv")][..], settings].concat();
            lifecycle(Ok(rules), &config(&settings))
        };
        for (after, verdict, words) in [
            (None, Verdict::Ok, "[refresh] after = \"5d\" keeps"),
            (Some("9d"), Verdict::Ok, "keeps those in use"),
            (Some("10d"), Verdict::Warning, "[refresh] after is 10d"),
            (Some("15d"), Verdict::Warning, "such as \"5d\""),
        ] {
            let settings: Vec<_> = after.map(|after| ("refresh.after", after)).into_iter().collect();
            let found = judged(&settings);
            assert_eq!(found.verdict, verdict, "{after:?}: {found:?}");
            let said = format!("{} {}", found.seen, found.advice.unwrap_or_default());
            assert!(said.contains("after 10 days") && said.contains(words), "{said}");
        }
    }
}
