//! `kvgate lifecycle`: the age rule of the bucket that removes chunks, beside the rules of others.

use clap::{Args, Subcommand};
use serde_json::json;

use super::args::ConnectArgs;
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::{Out, printable};
use crate::inventory::{LifecycleError, LifecycleRule};

/// Shows, sets or removes the age rule that takes chunks out of the bucket.
#[derive(Debug, Subcommand)]
pub enum LifecycleCommand {
    Show(ShowArgs),
    Apply(ApplyArgs),
    Remove(RemoveArgs),
}

/// Shows all lifecycle rules of the bucket.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  kvgate lifecycle show --endpoint http://rgw:8000 --bucket kv")]
pub struct ShowArgs {
    #[command(flatten)]
    common: CommonArgs,
}

/// Sets kvgate's rule: chunks go so many days after they were stored or refreshed.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  kvgate lifecycle apply --bucket kv --prefix kv --days 30
  kvgate lifecycle apply --bucket kv --prefix kv --days 30 --dry-run

Rules that others made stay as they are. Set [refresh] after on every node to less than these days, or prompts that are
still in use lose their first chunks.")]
pub struct ApplyArgs {
    /// Days after which a chunk goes.
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Set the rule without a prefix, where it takes everything in the bucket, other programs' objects as well.
    #[arg(long)]
    whole_bucket: bool,
    /// Say what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// Removes kvgate's rule. Rules that others made stay as they are.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    /// Say what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Debug, Args)]
struct CommonArgs {
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

impl From<LifecycleError> for CliError {
    fn from(error: LifecycleError) -> Self {
        match error {
            LifecycleError::Object(error) => error.into(),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// What becomes of kvgate's rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    No,
    Remove,
    Days(u32),
}

impl Change {
    /// The days of the rule afterwards, which `had` some.
    fn days(self, had: Option<u32>) -> Option<u32> {
        match self {
            Self::No => had,
            Self::Remove => None,
            Self::Days(days) => Some(days),
        }
    }
}

pub async fn run(command: LifecycleCommand, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let may_take_all = matches!(&command, LifecycleCommand::Apply(args) if args.whole_bucket);
    let (common, change, dry_run) = match command {
        LifecycleCommand::Show(args) => (args.common, Change::No, false),
        LifecycleCommand::Apply(args) => (args.common, Change::Days(args.days), args.dry_run),
        LifecycleCommand::Remove(args) => (args.common, Change::Remove, args.dry_run),
    };
    let config = common.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    if config.s3.prefix.is_empty() && matches!(change, Change::Days(_)) && !may_take_all {
        return Err(CliError::usage(
            "without a prefix the rule takes everything in the bucket, other programs' objects as well: give --prefix PREFIX \
             ([s3] prefix), or --whole-bucket if that is meant",
        ));
    }
    let bucket = OpenBucket::open(config).await?;
    let before = bucket.inventory.lifecycle().await?;
    let after = match change {
        Change::No => before.clone(),
        _ if dry_run => before.clone(),
        Change::Remove => bucket.inventory.set_lifecycle(&before, None).await?,
        Change::Days(days) => bucket.inventory.set_lifecycle(&before, Some(days)).await?,
    };
    let (seen, rules) = (before.rules()?, after.rules()?);
    let had = days_of(&seen, true).map(|(days, _)| days);
    // Before a change, and after it: the rules of others stay.
    let theirs = days_of(&seen, false);
    let days = change.days(had);
    let first = [days, theirs.map(|(days, _)| days)].into_iter().flatten().min();
    if common.json {
        return out.json(&json!({
            "rules": rules,
            "before_days": had,
            "days": days,
            "takes_chunks_after_days": first,
            "changed": changes(change, had, &seen) && !dry_run,
            "dry_run": dry_run,
        }));
    }
    if !rules.is_empty() {
        let rows: Vec<_> = rules.iter().map(row).collect();
        out.table(&["rule", "prefix", "state", ">days", "takes chunks"], &rows)?;
    }
    for line in said(change, had, &seen, dry_run) {
        out.line(printable(line))?;
    }
    let after = bucket.config.refresh.after.map(|after| after.as_secs() / 86_400);
    if matches!(change, Change::Days(_))
        && changes(change, had, &seen)
        && first.is_some_and(|first| after.is_none_or(|after| after >= u64::from(first)))
    {
        return out.line(
            "chunks in use go as well, unless the nodes refresh them before: set [refresh] after to less, such as half of it",
        );
    }
    Ok(())
}

/// What the rules of `seen` mean once the change is made. `had`: days of kvgate's rule.
fn said(change: Change, had: Option<u32>, seen: &[LifecycleRule], dry_run: bool) -> Vec<String> {
    let would = if dry_run { "would be " } else { "" };
    let go = |days: u32| format!("chunks go {days} days after they were stored or refreshed");
    let days = change.days(had);
    let theirs = days_of(seen, false).filter(|(theirs, _)| days.is_none_or(|days| *theirs < days));
    let mut lines = vec![match (change, had) {
        (Change::No, None) => {
            "no rule of kvgate's: `kvgate lifecycle apply --days DAYS` makes one".to_owned()
        }
        (Change::No, Some(had)) if theirs.is_some() => format!("kvgate's rule has {had} days"),
        (Change::No, Some(had)) => go(had),
        (_, _) if !changes(change, had, seen) => "nothing to change".to_owned(),
        (Change::Days(wanted), _) if theirs.is_some() => format!("the rule {would}set: {wanted} days"),
        (Change::Days(wanted), _) => format!("the rule {would}set: {}", go(wanted)),
        (Change::Remove, _) if theirs.is_some() => format!("the rule {would}removed"),
        (Change::Remove, _) => format!("the rule {would}removed: chunks stay"),
    }];
    if let Some((days, id)) = theirs {
        lines.push(format!(
            "but rule {id} takes chunks after {days} days: change it with the server's own tools, or chunks go that early"
        ));
    }
    if had.is_none() {
        let elsewhere = seen.iter().filter(|rule| rule.ours_elsewhere);
        lines.extend(elsewhere.map(|rule| {
            format!(
                "kvgate's rule {} is for the prefix {:?}: was --prefix ([s3] prefix) another then?",
                rule.id, rule.prefix
            )
        }));
    }
    lines
}

/// A rule of kvgate's that is off, say, is written anew, or goes.
fn changes(change: Change, had: Option<u32>, seen: &[LifecycleRule]) -> bool {
    let has_idle = seen.iter().any(|rule| rule.ours && !rule.takes_chunks);
    change != Change::No && (change.days(had) != had || has_idle)
}

/// The fewest days after which kvgate's rules, or those of others, take chunks, and which rule it is.
fn days_of(rules: &[LifecycleRule], ours: bool) -> Option<(u32, &str)> {
    let take = rules.iter().filter(|rule| rule.takes_chunks && rule.ours == ours);
    take.filter_map(|rule| Some((rule.days?, rule.id.as_str()))).min()
}

fn row(rule: &LifecycleRule) -> Vec<String> {
    vec![
        rule.id.clone(),
        rule.prefix.clone(),
        if rule.enabled { "on" } else { "off" }.to_owned(),
        rule.days.map(|days| days.to_string()).unwrap_or_default(),
        if rule.takes_chunks { "yes" } else { "no" }.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(id: &str, days: u32, ours: bool) -> LifecycleRule {
        LifecycleRule {
            id: id.to_owned(),
            prefix: String::new(),
            enabled: true,
            days: Some(days),
            ours,
            ours_elsewhere: false,
            takes_chunks: true,
        }
    }

    fn text(change: Change, had: Option<u32>, seen: &[LifecycleRule]) -> String {
        said(change, had, seen, false).join("\n")
    }

    #[test]
    fn the_rule_that_takes_chunks_first_has_the_last_word() {
        let theirs = [rule("theirs-all", 5, false), rule("theirs-late", 400, false)];
        let takes = "but rule theirs-all takes chunks after 5 days";
        for (change, had) in [
            (Change::No, None),
            (Change::No, Some(30)),
            (Change::Days(30), Some(30)),
            (Change::Days(90), Some(30)),
            (Change::Remove, Some(30)),
            (Change::Remove, None),
        ] {
            let said = text(change, had, &theirs);
            assert!(said.contains(takes), "{said}");
            assert!(
                !said.contains("chunks stay")
                    && !said.contains("chunks go 30")
                    && !said.contains("chunks go 90"),
                "{said}"
            );
        }
        let off = LifecycleRule {
            takes_chunks: false,
            ..rule("kvgate-age kv/", 30, true)
        };
        assert!(text(Change::Remove, None, &[off]).starts_with("the rule removed"));
        // kvgate's own is the first.
        assert!(text(Change::No, Some(4), &theirs).starts_with("chunks go 4 days"));
        assert!(!text(Change::Days(4), None, &theirs).contains("theirs"));
        assert!(text(Change::Remove, Some(4), &[]).ends_with("chunks stay"));
        let off = LifecycleRule {
            takes_chunks: false,
            ..rule("off", 1, false)
        };
        assert!(text(Change::Remove, Some(4), &[off]).ends_with("chunks stay"));
    }

    #[test]
    fn kvgates_rule_for_another_prefix_is_named() {
        let elsewhere = LifecycleRule {
            prefix: "kv/".to_owned(),
            ours_elsewhere: true,
            takes_chunks: false,
            ..rule("kvgate-age kv/", 30, false)
        };
        let said = text(Change::No, None, std::slice::from_ref(&elsewhere));
        assert!(said.contains("kvgate-age kv/ is for the prefix"), "{said}");
        assert!(!text(Change::No, Some(30), &[elsewhere]).contains("another then"));
    }
}
