//! `kvgate usage`: what a bucket holds, by space, model, tenant and age, and how fast it grows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use serde_json::json;

use super::args::ConnectArgs;
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::{Out, bytes, count, time};
use super::picture::{bar, spark};
use super::progress::Progress;
use crate::format::SpaceKey;
use crate::inventory::{AGES, Count, SpaceJson, SpaceUsage, Usage, UsageError};
use crate::s3::object::ObjectError;

/// Counts what the bucket holds, by space, model, tenant and age.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate usage --endpoint http://rgw:8000 --bucket kv
  kvgate usage --bucket kv --resume usage.json      killed? run it again, and it goes on
  kvgate usage --bucket kv --json

It lists the bucket once: a request for 1000 objects. Age is the time since a chunk was stored, or refreshed because it
was in use ([refresh]). With the same file a second run also tells how the bucket has grown since the first.")]
pub struct UsageArgs {
    /// File with the counts so far: an interrupted run goes on from there.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Most spaces, models and tenants to show, the largest first.
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    limit: usize,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Reads of `space.json` at a time.
const READS: usize = 16;
/// Signs of a bar.
const WIDTH: usize = 40;

impl From<UsageError> for CliError {
    fn from(error: UsageError) -> Self {
        match error {
            UsageError::Object(error) => error.into(),
            UsageError::File { .. } | UsageError::OtherPlace { .. } => Self::Usage(error.to_string()),
        }
    }
}

/// A row of the report: a space, or all spaces of a model or a tenant.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    chunks: u64,
    bytes: u64,
    /// Ranged GETs that a load of all of it takes.
    gets: u64,
    /// Of the oldest and the newest chunk, seconds since 1970.
    oldest: i64,
    newest: i64,
}

impl Row {
    fn add(&mut self, space: &SpaceUsage) {
        if space.count.chunks == 0 {
            return;
        }
        self.oldest = match self.chunks {
            0 => space.oldest,
            _ => self.oldest.min(space.oldest),
        };
        self.newest = self.newest.max(space.newest);
        self.chunks += space.count.chunks;
        self.bytes += space.count.bytes;
        self.gets += space.gets;
    }

    fn cells(&self) -> [String; 5] {
        let at = |seconds| match self.chunks {
            0 => String::new(),
            _ => time(seconds),
        };
        [
            self.chunks.to_string(),
            bytes(self.bytes),
            self.gets.to_string(),
            at(self.oldest),
            at(self.newest),
        ]
    }
}

/// What a space's readable form says of it.
struct Named {
    key: String,
    model: String,
    revision: String,
    tenant: String,
    /// Empty: not known.
    protection: String,
    kind: String,
    row: Row,
}

impl Named {
    fn new(key: String, json: &SpaceJson, usage: &SpaceUsage) -> Self {
        let mut row = Row::default();
        row.add(usage);
        let mut named = Self {
            key,
            model: String::new(),
            revision: String::new(),
            tenant: String::new(),
            protection: String::new(),
            kind: String::new(),
            row,
        };
        match json {
            SpaceJson::Good(space) => {
                space.model().clone_into(&mut named.model);
                space.revision().clone_into(&mut named.revision);
                space.tenant().clone_into(&mut named.tenant);
                named.protection = space.protection().to_string();
                named.kind = space.kind().to_string();
            }
            other => named.model = format!("({})", other.code()),
        }
        named
    }

    fn is_a_tenants(&self) -> bool {
        !self.tenant.is_empty() || !matches!(self.protection.as_str(), "" | "none")
    }
}

pub async fn run(args: UsageArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    let part_bytes = config.s3.part_size.bytes();
    let bucket = OpenBucket::open(config).await?;
    let progress = Progress::spinner("listing");
    let seen = |usage: &Usage| {
        let total = usage.total();
        progress.seen("listing", total.chunks, total.bytes);
    };
    let usage = bucket
        .inventory
        .usage(&bucket.place(), part_bytes, args.resume.as_deref(), seen)
        .await?;
    let spaces = named(&bucket, &usage).await?;
    drop(progress);
    let by = |key: &dyn Fn(&Named) -> String| {
        let mut rows: BTreeMap<String, Row> = BTreeMap::new();
        for (space, usage) in spaces.iter().zip(usage.spaces.values()) {
            rows.entry(key(space)).or_default().add(usage);
        }
        largest(rows.into_iter().collect(), |(_, row)| row.bytes)
    };
    let report = Report {
        models: by(&|space| format!("{}\0{}", space.model, space.revision)),
        tenants: by(&|space| space.tenant.clone()),
        lists: usage.lists,
        reads: usage.spaces.len() as u64,
        usage: &usage,
        spaces: largest(spaces, |space| space.row.bytes),
        limit: args.limit,
    };
    match args.json {
        true => report.json(out),
        false => report.text(out),
    }
}

/// In the order of the counts.
async fn named(bucket: &OpenBucket, usage: &Usage) -> Result<Vec<Named>, CliError> {
    let read = |(text, usage): (&String, &SpaceUsage)| {
        let (text, usage) = (text.clone(), usage.clone());
        async move {
            let json = match SpaceKey::from_hex(&text) {
                Some(key) => bucket.inventory.read_space(key).await?,
                None => SpaceJson::Missing,
            };
            Ok::<_, ObjectError>(Named::new(text, &json, &usage))
        }
    };
    let reads: Vec<_> = usage.spaces.iter().map(read).collect();
    Ok(stream::iter(reads).buffered(READS).try_collect().await?)
}

fn largest<T>(mut rows: Vec<T>, bytes: impl Fn(&T) -> u64) -> Vec<T> {
    rows.sort_by_key(|row| std::cmp::Reverse(bytes(row)));
    rows
}

struct Report<'a> {
    usage: &'a Usage,
    spaces: Vec<Named>,
    /// By model, zero byte, revision.
    models: Vec<(String, Row)>,
    tenants: Vec<(String, Row)>,
    /// Requests that this report took.
    lists: u64,
    reads: u64,
    limit: usize,
}

impl Report<'_> {
    fn json(&self, out: &mut Out) -> Result<(), CliError> {
        let total = self.usage.total();
        let with = |names: &[(&str, &str)], row: &Row| {
            let mut value = json!(row);
            for (name, text) in names {
                value[*name] = json!(text);
            }
            value
        };
        let model = |(name, row): &(String, Row)| {
            let (model, revision) = name.split_once('\0').unwrap_or_default();
            with(&[("model", model), ("revision", revision)], row)
        };
        let space = |space: &Named| {
            let names = [
                ("space", space.key.as_str()),
                ("model", &space.model),
                ("revision", &space.revision),
                ("tenant", &space.tenant),
                ("protection", &space.protection),
                ("kind", &space.kind),
            ];
            with(&names, &space.row)
        };
        let ages = AGES.iter().zip(&self.usage.ages);
        let age = |((name, end), count): (&(&str, i64), &Count)| {
            json!({ "age": name, "below_seconds": (*end < i64::MAX).then_some(end),
                "chunks": count.chunks, "bytes": count.bytes })
        };
        out.json(&json!({
            "at": self.usage.began,
            "chunks": total.chunks,
            "bytes": total.bytes,
            "spaces": self.spaces.iter().map(space).collect::<Vec<_>>(),
            "models": self.models.iter().map(model).collect::<Vec<_>>(),
            "tenants": self.tenants.iter().map(|(name, row)| with(&[("tenant", name)], row)).collect::<Vec<_>>(),
            "ages": ages.map(age).collect::<Vec<_>>(),
            "days": self.usage.days,
            "growth_bytes_a_day": self.usage.growth(),
            "net_growth_bytes_a_day": self.usage.net_growth(),
            "since": self.usage.before.map(|(at, _)| at),
            "foreign": { "objects": self.usage.foreign.chunks, "bytes": self.usage.foreign.bytes },
            "requests": { "list": self.lists, "get": self.reads },
        }))
    }

    fn text(&self, out: &mut Out) -> Result<(), CliError> {
        let (usage, total) = (self.usage, self.usage.total());
        let spaces = count(usage.spaces.len() as u64, "space");
        let chunks = count(total.chunks, "chunk");
        out.line(format_args!("{spaces}, {chunks}, {}", bytes(total.bytes)))?;
        if usage.foreign.chunks > 0 {
            let others = count(usage.foreign.chunks, "other object");
            out.line(format_args!(
                "{others}, {} that are no chunks under this prefix",
                bytes(usage.foreign.bytes)
            ))?;
        }
        let days: Vec<Option<f64>> = usage
            .days
            .iter()
            .rev()
            .map(|day| Some(day.bytes as f64))
            .collect();
        let picture = spark(&days, days.len());
        out.line(format_args!(
            "growth       {} a day  {picture}  {} days",
            bytes(usage.growth()),
            days.len()
        ))?;
        if let (Some(net), Some((at, _))) = (usage.net_growth(), usage.before) {
            let (sign, since) = (if net < 0.0 { "-" } else { "+" }, time(at));
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "not negative"
            )]
            let net = net.abs() as u64;
            out.line(format_args!(
                "in all       {sign}{} a day since {since}",
                bytes(net)
            ))?;
        }
        let requests = count(self.lists, "LIST");
        out.line(format_args!(
            "this took    {requests}, {}",
            count(self.reads, "GET")
        ))?;

        let most = usage.ages.iter().map(|age| age.bytes).max().unwrap_or(0);
        let row = |((name, _), count): (&(&str, i64), &Count)| {
            vec![
                (*name).to_owned(),
                count.chunks.to_string(),
                bytes(count.bytes),
                bar(count.bytes, most, WIDTH),
            ]
        };
        let ages: Vec<_> = AGES.iter().zip(&usage.ages).map(row).collect();
        out.line("")?;
        out.table(&["age", ">chunks", ">bytes", ""], &ages)?;

        let figures = [">chunks", ">bytes", ">GETs", "oldest", "last stored or used"];
        let with = |names: Vec<String>, row: &Row| [names, row.cells().to_vec()].concat();
        let models = self.models.iter().map(|(name, row)| {
            let (model, revision) = name.split_once('\0').unwrap_or_default();
            with(vec![model.to_owned(), revision.to_owned()], row)
        });
        self.table(out, &["model", "revision"], &figures, models)?;
        let tenant = |(name, row): &(String, Row)| {
            let name = if name.is_empty() { "(none)" } else { name };
            with(vec![name.to_owned()], row)
        };
        self.table(out, &["tenant"], &figures, self.tenants.iter().map(tenant))?;
        // Spaces of one model differ by tenant and protection.
        let is_shared = self.spaces.iter().any(Named::is_a_tenants);
        let spaces = self.spaces.iter().map(|space| {
            let mut names = vec![space.key.clone(), space.model.clone()];
            if is_shared {
                names.extend([space.tenant.clone(), space.protection.clone()]);
            }
            names.push(space.kind.clone());
            with(names, &space.row)
        });
        let owner: &[_] = if is_shared { &["tenant", "protection"] } else { &[] };
        let headings = [&["space", "model"], owner, &["kind"]].concat();
        self.table(out, &headings, &figures, spaces)
    }

    fn table(
        &self,
        out: &mut Out,
        names: &[&str],
        figures: &[&str],
        rows: impl ExactSizeIterator<Item = Vec<String>>,
    ) -> Result<(), CliError> {
        let more = rows.len().saturating_sub(self.limit);
        let rows: Vec<_> = rows.take(self.limit).collect();
        out.line("")?;
        out.table(&[names, figures].concat(), &rows)?;
        match more {
            0 => Ok(()),
            _ => out.line(format_args!("and {more} more (--limit, --json)")),
        }
    }
}
