//! `kvgate lifecycle`: the age rule of the bucket that removes chunks, beside the rules of others.

use clap::{Args, Subcommand};
use serde_json::json;

use super::args::ConnectArgs;
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::Out;
use crate::inventory::{Lifecycle, LifecycleError, LifecycleRule};

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

pub async fn run(command: LifecycleCommand, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let may_take_all = matches!(&command, LifecycleCommand::Apply(args) if args.whole_bucket);
    let (common, change, dry_run) = match command {
        LifecycleCommand::Show(args) => (args.common, None, false),
        LifecycleCommand::Apply(args) => (args.common, Some(Some(args.days)), args.dry_run),
        LifecycleCommand::Remove(args) => (args.common, Some(None), args.dry_run),
    };
    let config = common.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    if config.s3.prefix.is_empty() && matches!(change, Some(Some(_))) && !may_take_all {
        return Err(CliError::usage(
            "without a prefix the rule takes everything in the bucket, other programs' objects as well: give --prefix PREFIX \
             ([s3] prefix), or --whole-bucket if that is meant",
        ));
    }
    let bucket = OpenBucket::open(config).await?;
    let before = bucket.inventory.lifecycle().await?;
    let after = match change.filter(|_| !dry_run) {
        Some(days) => bucket.inventory.set_lifecycle(&before, days).await?,
        None => before.clone(),
    };
    let had = ours(&before)?.and_then(|rule| rule.days);
    if common.json {
        return out.json(&json!({
            "rules": after.rules()?,
            "before_days": had,
            "days": change.unwrap_or(had),
            "changed": change.is_some_and(|days| days != had) && !dry_run,
            "dry_run": dry_run,
        }));
    }
    let rules = after.rules()?;
    if !rules.is_empty() {
        let rows: Vec<_> = rules.iter().map(row).collect();
        out.table(&["rule", "prefix", "state", ">days", "takes chunks"], &rows)?;
    }
    let would = if dry_run { "would be " } else { "" };
    let days = |days: u32| format!("chunks go {days} days after they were stored or refreshed");
    match (change, had) {
        (None, None) => out.line("no rule of kvgate's: `kvgate lifecycle apply --days DAYS` makes one"),
        (None, Some(had)) => out.line(days(had)),
        (Some(wanted), had) if wanted == had => out.line("nothing to change"),
        (Some(Some(wanted)), _) => {
            let after = bucket.config.refresh.after;
            out.line(format_args!("the rule {would}set: {}", days(wanted)))?;
            match after {
                Some(after) if after.as_secs() / 86_400 < u64::from(wanted) => Ok(()),
                _ => out.line(
                    "chunks in use go as well, unless the nodes refresh them before: set [refresh] after to less, such as \
                     half of it",
                ),
            }
        }
        (Some(None), _) => out.line(format_args!("the rule {would}removed: chunks stay")),
    }
}

fn ours(rules: &Lifecycle) -> Result<Option<LifecycleRule>, CliError> {
    Ok(rules.rules()?.into_iter().find(|rule| rule.ours))
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
