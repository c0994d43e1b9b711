mod csv;
mod endpoints;
mod live;
mod table;

use std::io;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use super::args::{ConnectArgs, SpaceArgs, SpaceRef};
use super::error::CliError;
use super::logging;
use super::output::{self, Out};
use crate::bench::{Bench, BenchError, Interrupts, Phase, PhaseReport, Prompt, Report, Settings};
use crate::config::Config;
use crate::gateway::Order;
use crate::host::{Host, HostError};
use crate::units::{ByteSize, MIB, parse_duration};
use csv::Csv;
use live::LiveLine;

/// Measures how fast an S3 server is, through kvgate's own request path: MiB/s, requests, CPU time and latencies.
///
/// Needs nothing: without --endpoint and --bucket it starts an S3 server inside the process, whose objects are in a
/// folder below TMPDIR until it ends. Every byte that is read is verified.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  kvgate bench
  kvgate bench --endpoint http://rgw:8000 --bucket kv-cache --objects 1000 --object-size 64MiB -t 32
  kvgate bench write --keep --bucket kv-cache; kvgate bench read --bucket kv-cache --time-limit 30s --warm-up --json
  kvgate bench write head lookup delete --bucket kv-cache --objects 4096 --object-size 4KiB -t 64
  kvgate bench --bucket kv-cache --model qwen3-32b --tokens 32768 --rounds 3
  kvgate bench write --bucket kv-cache --mix 70 --rate 200MiB --time-limit 1m

First done is when the first of the tasks found nothing left to do, last done when all had.
Ctrl-C ends the phase under way, with the requests that are; the second one ends at once.
Exit status: 1 if any request failed or any byte was wrong."
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub struct BenchArgs {
    /// What to measure, in this order [default: all]. write: PUT objects; read: GET them in parts; head: HEAD them;
    /// lookup: look up chunks that are not there; delete: DELETE the objects.
    #[arg(value_name = "PHASE", value_parser = phase_parser())]
    phases: Vec<Phase>,
    /// Objects, and chunks of a lookup.
    #[arg(long, value_name = "NUMBER", default_value_t = 64, conflicts_with_all = PROMPT, value_parser = whole::<1, 10_000_000>)]
    objects: u64,
    /// Bytes of an object.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(16 * MIB), conflicts_with_all = PROMPT,
          value_parser = some_bytes)]
    object_size: ByteSize,
    /// Bytes that one GET asks for [default: [s3] part_size, or the whole object if that is smaller; with --layers-first
    /// [load] layer_part_size]. A prompt's parts end where planes do, or layers: what is reported is the largest.
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    part_size: Option<ByteSize>,
    /// Requests in flight: connections and windows ([endpoints] window) are raised to have room for them, and shrink only
    /// where the server is overloaded. Of a prompt that is loaded, the bytes of so many parts.
    #[arg(short = 't', long, visible_alias = "threads", value_name = "NUMBER", default_value_t = 16, value_parser = whole::<1, 4096>)]
    concurrency: u64,
    /// Times that a phase goes over all objects [default: 1, with --time-limit as often as there is time]. Delete goes
    /// once, and so does the write of a prompt.
    #[arg(long, value_name = "NUMBER", value_parser = whole::<1, { u64::MAX }>)]
    rounds: Option<u64>,
    /// Time after which a phase makes no more requests, such as 10s; those under way end. Delete always goes to its end.
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    time_limit: Option<Duration>,
    /// Of the write phase's requests, those that read objects already written, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, conflicts_with_all = PROMPT, value_parser = whole::<0, 99>)]
    mix: u64,
    /// Most bytes to write and to read in a second, such as 100MiB. Each object that is written, part that is read and prompt
    /// that is loaded goes at full speed, and the next one waits for it.
    #[arg(long, value_name = "SIZE", value_parser = some_rate)]
    rate: Option<ByteSize>,
    /// Most requests to make in a second, without those that are made again; where prompts are loaded, most prompts.
    #[arg(long, value_name = "NUMBER", value_parser = whole::<1, { u64::MAX }>)]
    rate_iops: Option<u64>,
    /// Don't check what is read.
    #[arg(long, conflicts_with_all = PROMPT)]
    no_verify: bool,
    /// Do everything once, untimed, before each phase but delete: connections are there then, and signatures quick. What a
    /// prompt's write stores is not stored again, so there it only connects.
    #[arg(long)]
    warm_up: bool,
    /// Leave the objects where they are, for a later run with the same --prefix, which gives its phases. They are also
    /// left when phases are given and delete is none of them. Where they are not left, a run without phases has objects of
    /// its own; one that deletes after it wrote does so after a failure, Ctrl-C and SIGTERM, too, once the PUTs under way have
    /// ended (the second time at once, so that some may be left).
    #[arg(long)]
    keep: bool,
    /// What the objects' names begin with, after the prefix; a prompt's chunks are those of this name [default: bench; a name
    /// of its own for a run without phases that does not --keep them].
    #[arg(long, value_name = "NAME", value_parser = some_name)]
    name: Option<String>,
    /// Tokens of a synthetic prompt of --space or --model, whose chunks are the objects then: write stores them, read
    /// looks up and loads the whole prompt [default: 4096].
    #[arg(long, value_name = "NUMBER", value_parser = whole::<1, 16_777_216>)]
    tokens: Option<u64>,
    /// Load the prompt layer by layer instead of chunk by chunk: the first layers of all chunks come first. Takes twice the
    /// prompt's bytes of memory.
    #[arg(long)]
    layers_first: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

/// The flags that ask for a prompt.
const PROMPT: [&str; 2] = ["space", "model"];
const PROMPT_TOKENS: u32 = 4096;
/// A model's weights do not matter here.
const ANY_REVISION: &str = "kvgate-bench";

#[derive(Debug, Args)]
struct OutputArgs {
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    /// Add a line for each phase to a CSV file, with a header if it is new, and one for each address where the server has
    /// several; `-` writes them instead of the table. A file with other columns is refused. Histograms are in the table and
    /// in --json.
    #[arg(long, value_name = "FILE|-")]
    csv: Option<String>,
    /// Don't show what goes on, on a terminal either.
    #[arg(long)]
    no_live: bool,
}

fn phase_parser() -> impl TypedValueParser<Value = Phase> {
    let names = PossibleValuesParser::new(Phase::ALL.map(Phase::name));
    names.try_map(|name| Phase::from_name(&name).ok_or("no such phase"))
}

fn whole<const LEAST: u64, const MOST: u64>(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(number) if (LEAST..=MOST).contains(&number) => Ok(number),
        _ if MOST == u64::MAX => Err(format!("write a whole number from {LEAST}, such as 1000")),
        _ => Err(format!("write a whole number from {LEAST} to {MOST}")),
    }
}

fn some_rate(text: &str) -> Result<ByteSize, String> {
    some_bytes(text.strip_suffix("/s").unwrap_or(text))
}

/// A part of a key.
fn some_name(text: &str) -> Result<String, String> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=64).contains(&text.len()) && text.bytes().all(good) {
        true => Ok(text.to_owned()),
        false => Err("give up to 64 letters, digits, - _ and .".into()),
    }
}

fn some_bytes(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("must be more than nothing; write a size such as 16MiB".into()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

fn some_time(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(Duration::ZERO) => Err("must be more than nothing; write a duration such as 10s".into()),
        Ok(time) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

pub async fn run(args: BenchArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let mut config = args.connect.load(Vec::new())?.config;
    if let Some(size) = args.part_size {
        (config.s3.part_size, config.load.layer_part_size) = (size, size);
    }
    logging::init(&config.log, verbose);
    let name = args.name();
    let prompt = args.prompt(&name)?;
    let settings = args.settings(&config, name, prompt.as_ref())?;
    make_room(&mut config, &settings);
    // Before anything is measured that could then not be told.
    let csv = args.output.csv.as_deref().map(Csv::open).transpose()?;
    let mut interrupts =
        interrupts().map_err(|error| CliError::Failed(format!("can't wait for signals: {error}")))?;
    let host = Host::start(&config, "kvgate-bench", false).await?;
    let bench = tokio::select! {
        bench = args.bench(&host, config, settings, prompt, interrupts.clone()) => bench,
        _ = interrupts.changed() => Err(CliError::Failed("interrupted".into())),
    };
    let result = match bench {
        Ok(bench) => args.run_on(&host, bench, csv, out).await,
        Err(error) => Err(error),
    };
    host.stop().await;
    result
}

/// As many requests in flight as were asked for, on one endpoint too: the configuration may have fewer connections, and
/// windows for fewer bytes.
fn make_room(config: &mut Config, settings: &Settings) {
    let largest = settings.object_bytes.max(settings.part_bytes);
    let window = ByteSize(largest.saturating_mul(settings.concurrency as u64));
    let (s3, endpoints) = (&mut config.s3, &mut config.endpoints);
    s3.connections = s3
        .connections
        .max(u32::try_from(settings.concurrency).unwrap_or(u32::MAX));
    endpoints.window = endpoints.window.max(window);
    endpoints.window_max = endpoints.window_max.max(window);
}

impl BenchArgs {
    fn prompt(&self, name: &str) -> Result<Option<Prompt>, CliError> {
        let model = self.space.model.as_ref();
        let given = SpaceArgs {
            revision: self
                .space
                .revision
                .clone()
                .or(model.map(|_| ANY_REVISION.to_owned())),
            ..self.space.clone()
        };
        match given.given()? {
            None if self.tokens.is_some() => Err(CliError::usage(
                "--tokens of what model? Give --model PRESET or --space FILE, too",
            )),
            None if self.layers_first => Err(CliError::usage(
                "--layers-first is for prompts: give --model PRESET or --space FILE, too",
            )),
            None => Ok(None),
            Some(SpaceRef::Known(space)) => {
                let tokens = self
                    .tokens
                    .and_then(|tokens| u32::try_from(tokens).ok())
                    .unwrap_or(PROMPT_TOKENS);
                let order = match self.layers_first {
                    true => Order::Layer,
                    false => Order::Chunk,
                };
                Ok(Some(Prompt::new(space, name, tokens, order)?))
            }
            Some(SpaceRef::Id(..)) => Err(CliError::usage(
                "a space's id does not say what its chunks are: give --space FILE or --model PRESET",
            )),
        }
    }

    fn settings(&self, config: &Config, name: String, prompt: Option<&Prompt>) -> Result<Settings, CliError> {
        let ours = config.s3.endpoint.is_none() && config.s3.bucket.is_none();
        if self.keep && ours {
            return Err(CliError::usage(
                "--keep needs --bucket NAME (and --endpoint URL): the server in this process ends with it",
            ));
        }
        if self.keep && self.phases.contains(&Phase::Delete) {
            return Err(CliError::usage("--keep or delete? Leave one of them out"));
        }
        if self.output.json && self.output.csv.as_deref() == Some("-") {
            return Err(CliError::usage(
                "--json and --csv - both write to the standard output",
            ));
        }
        let (objects, object_bytes) = match prompt {
            Some(prompt) => (prompt.len(), prompt.object_bytes()),
            None => (self.objects, self.object_size.bytes()),
        };
        let part_bytes = match (prompt, self.part_size) {
            (Some(prompt), _) => prompt.part_bytes(config),
            (None, Some(size)) => size.bytes(),
            (None, None) => config.s3.part_size.bytes().min(object_bytes),
        };
        let settings = Settings {
            endpoint: config.s3.endpoint.clone(),
            bucket: config.s3.bucket.clone().unwrap_or_default(),
            prefix: config.s3.prefix.clone(),
            name,
            embedded: ours,
            objects,
            object_bytes,
            part_bytes,
            concurrency: usize::try_from(self.concurrency).unwrap_or(usize::MAX),
            rounds: self.rounds.or(self.time_limit.is_none().then_some(1)),
            time_limit: self.time_limit,
            mix_percent: self.mix,
            bytes_per_second: self.rate.map(ByteSize::bytes),
            requests_per_second: self.rate_iops,
            verify: !self.no_verify,
            warm_up: self.warm_up,
            prompt: prompt.map(Prompt::settings),
        };
        settings.check()?;
        Ok(settings)
    }

    fn phases(&self) -> Vec<Phase> {
        if !self.phases.is_empty() {
            return self.phases.clone();
        }
        let kept = |phase: &Phase| !self.keep || *phase != Phase::Delete;
        Phase::ALL.into_iter().filter(kept).collect()
    }

    /// Objects that nobody is to find later have names of their own: somebody else's may be there.
    fn name(&self) -> String {
        match &self.name {
            Some(name) => name.clone(),
            None if self.phases.is_empty() && !self.keep => format!("bench-{:08x}", fastrand::u32(..)),
            None => "bench".into(),
        }
    }

    /// On a server that has the bucket, and room.
    async fn bench(
        &self,
        host: &Host,
        config: Config,
        mut settings: Settings,
        prompt: Option<Prompt>,
        interrupts: Interrupts,
    ) -> Result<Bench, CliError> {
        settings.endpoint.clone_from(&host.endpoint);
        settings.bucket.clone_from(&host.bucket);
        let soon = Instant::now() + 2 * config.s3.request_timeout;
        match host.is_embedded() {
            true => host.store.create_bucket(soon).await?,
            false => host.store.check_bucket(soon).await?,
        }
        let bytes = settings.objects.saturating_mul(settings.object_bytes);
        if let Some((folder, free)) = host.room()
            && self.phases().contains(&Phase::Write)
            && bytes > free
        {
            return Err(CliError::usage(format!(
                "the objects take {}, and {} has room for {}: lower --objects or --object-size, or set TMPDIR to another \
                 folder",
                output::bytes(bytes),
                folder.display(),
                output::bytes(free)
            )));
        }
        let bench = Bench::new(host.store.clone(), config, settings, prompt, interrupts)?;
        bench.check(&self.phases())?;
        Ok(bench)
    }

    async fn run_on(
        &self,
        host: &Host,
        bench: Bench,
        mut csv: Option<Csv>,
        out: &mut Out,
    ) -> Result<(), CliError> {
        let table = !self.output.json && !csv.as_ref().is_some_and(Csv::is_stdout);
        let mut report = Report {
            version: env!("CARGO_PKG_VERSION"),
            settings: bench.settings().clone(),
            phases: Vec::new(),
            interrupted: false,
        };
        if table {
            table::header(&report.settings, &host.place, out)?;
        }
        let outcome = self
            .run_phases(bench, &mut report, |phase, settings| {
                if table {
                    table::row(phase, out)?;
                }
                match &mut csv {
                    Some(csv) => csv.add(settings, phase, out),
                    None => Ok(()),
                }
            })
            .await;
        if self.output.json {
            out.json(&report)?;
        }
        outcome.and_then(|()| verdict(&report))
    }

    /// What was measured before a failure is in the report, too.
    async fn run_phases(
        &self,
        mut bench: Bench,
        report: &mut Report,
        mut tell: impl FnMut(&PhaseReport, &Settings) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let live = LiveLine::start(!self.output.no_live, bench.under_way());
        let mut outcome = Ok(());
        let mut wrote = false;
        // Objects that this run wrote and was to remove.
        let mut left = false;
        for phase in self.phases() {
            // After a failure, and after an interruption, only what was written is removed, if it was to be.
            if outcome.is_err() || report.interrupted {
                if !(wrote && phase == Phase::Delete) {
                    continue;
                }
                bench.forget_interrupts();
            }
            wrote |= phase == Phase::Write;
            let result = bench.run(phase).await;
            if phase == Phase::Delete {
                left = wrote && !matches!(&result, Ok(done) if done.ops == done.objects);
            }
            match result {
                Ok(done) => {
                    report.interrupted |= done.interrupted;
                    let told = live.pause(|| tell(&done, &report.settings));
                    let fatal = done.fatal.as_deref().map_or(Ok(()), |error| Err(error.into()));
                    report.phases.push(done);
                    outcome = outcome.and(fatal).and(told);
                }
                Err(BenchError::Interrupted) => report.interrupted = true,
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        if left && !report.settings.embedded {
            let Settings {
                name,
                objects,
                prompt,
                ..
            } = &report.settings;
            let shape = match prompt {
                Some(prompt) => format!("--tokens {} and the same --model or --space", prompt.tokens),
                None => format!("--objects {objects}"),
            };
            tracing::warn!(
                "objects may be left; this removes them: kvgate bench delete --name {name} {shape}, with the same \
                 --endpoint, --bucket and --prefix"
            );
        }
        outcome
    }
}

/// Fails where a request did, or somebody ended it early.
fn verdict(report: &Report) -> Result<(), CliError> {
    let failed = |phase: &PhaseReport| {
        let (count, first) = (phase.errors.count, phase.errors.first.as_ref()?);
        let tried = phase.ops + count;
        let end = match phase.errors.gave_up {
            true => "; the phase ended with so many",
            false => "",
        };
        Some(format!(
            "{}: {count} of {tried} requests failed{end}, the first: {first}",
            phase.phase.name()
        ))
    };
    let mut failures: Vec<String> = report.phases.iter().filter_map(failed).collect();
    if report.interrupted {
        failures.push("interrupted".into());
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(CliError::Failed(failures.join("\n"))),
    }
}

/// Counts Ctrl-C and SIGTERM: each ends the phase under way.
fn interrupts() -> io::Result<Interrupts> {
    let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (sender, receiver) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                Some(()) = int.recv() => {}
                Some(()) = term.recv() => {}
            }
            if *sender.borrow() == 0 {
                tracing::warn!("interrupted: requests under way end first; the second time they don't");
            }
            sender.send_modify(|count| *count += 1);
        }
    });
    Ok(receiver)
}

impl From<BenchError> for CliError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Object(error) => error.into(),
            _ => Self::Usage(error.to_string()),
        }
    }
}

impl From<HostError> for CliError {
    fn from(error: HostError) -> Self {
        match error.is_usage() {
            true => Self::Usage(error.to_string()),
            false => Self::Failed(error.to_string()),
        }
    }
}
