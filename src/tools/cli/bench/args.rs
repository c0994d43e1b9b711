//! The flags of `kvgate bench`, and the settings that they give.

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::config::Config;
use crate::config::units::{ByteSize, MIB, parse_duration};
use crate::protocol::Order;
use crate::tools::bench::{BenchPhase, BenchPrompt, BenchSettings};
use crate::tools::cli::args::{ConnectArgs, SpaceArgs, SpaceRef};
use crate::tools::cli::error::CliError;

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
  kvgate bench write --bucket kv-cache --rate 200MiB --time-limit 1m

First done: when the first worker ran out of work. Last done: when the last worker had finished.
Ctrl-C ends the phase under way, with its requests; a second Ctrl-C ends at once.
Exit status: 1 if any request failed or any byte was wrong."
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub struct BenchArgs {
    /// Phases to measure, in this order [default: all]. write: PUT objects; read: GET them in parts; head: HEAD them;
    /// lookup: look up chunks that are not there; delete: DELETE the objects.
    #[arg(value_name = "PHASE", value_parser = phase_parser())]
    phases: Vec<BenchPhase>,
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
    pub part_size: Option<ByteSize>,
    /// Requests in flight: connections and windows ([endpoints] window) are raised to have room for them, and shrink only
    /// where the server is overloaded. A prompt's load has the bytes of that many parts in flight.
    #[arg(short = 't', long, visible_alias = "threads", value_name = "NUMBER", default_value_t = 16, value_parser = whole::<1, 4096>)]
    concurrency: u64,
    /// Times that a phase goes over all objects [default: 1, with --time-limit as often as there is time]. Delete goes
    /// once, and so does the write of a prompt.
    #[arg(long, value_name = "NUMBER", value_parser = whole::<1, { u64::MAX }>)]
    rounds: Option<u64>,
    /// Time after which a phase makes no more requests, such as 10s; those under way end. Delete always goes to its end.
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    time_limit: Option<Duration>,
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
    /// Do everything once, untimed, before each phase but delete: connections are there then, and signatures quick. The
    /// write of a prompt is not done twice: there it only connects.
    #[arg(long)]
    warm_up: bool,
    /// Leave the objects where they are, for a later run with the same --prefix, which gives its phases. They are also
    /// left when phases are given and delete is none of them. Where they are not left, a run without phases has objects of
    /// its own; one that deletes after it wrote does so after a failure, Ctrl-C and SIGTERM, too, once the PUTs under way have
    /// ended (the second time at once, so that some may be left).
    #[arg(long)]
    keep: bool,
    /// The start of the objects' names, after the prefix; a prompt's chunks are those of this name [default: bench; a name
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
    pub output: OutputArgs,
    #[command(flatten)]
    pub connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

/// The flags that ask for a prompt.
const PROMPT: [&str; 2] = ["space", "model"];
const PROMPT_TOKENS: u32 = 4096;
/// The model's weights do not matter here.
const ANY_REVISION: &str = "kvgate-bench";

#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Report as JSON.
    #[arg(long)]
    pub json: bool,
    /// Add a line for each phase to a CSV file, with a header if it is new, and one for each address where the server has
    /// several; `-` writes them instead of the table. A file with other columns is refused. Histograms are in the table and
    /// in --json.
    #[arg(long, value_name = "FILE|-")]
    pub csv: Option<String>,
}

impl BenchArgs {
    pub fn prompt(&self, name: &str) -> Result<Option<BenchPrompt>, CliError> {
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
                Ok(Some(BenchPrompt::new(space, name, tokens, order)?))
            }
            Some(SpaceRef::Id(..)) => Err(CliError::usage(
                "a space's id does not say what its chunks are: give --space FILE or --model PRESET",
            )),
        }
    }

    pub fn settings(
        &self,
        config: &Config,
        name: String,
        prompt: Option<&BenchPrompt>,
    ) -> Result<BenchSettings, CliError> {
        let ours = config.s3.endpoint.is_none() && config.s3.bucket.is_none();
        if self.keep && ours {
            return Err(CliError::usage(
                "--keep needs --bucket NAME (and --endpoint URL): the server in this process ends with it",
            ));
        }
        if self.keep && self.phases.contains(&BenchPhase::Delete) {
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
        let settings = BenchSettings {
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
            bytes_per_second: self.rate.map(ByteSize::bytes),
            requests_per_second: self.rate_iops,
            verify: !self.no_verify,
            warm_up: self.warm_up,
            prompt: prompt.map(BenchPrompt::settings),
        };
        settings.check()?;
        Ok(settings)
    }

    pub fn phases(&self) -> Vec<BenchPhase> {
        if !self.phases.is_empty() {
            return self.phases.clone();
        }
        let kept = |phase: &BenchPhase| !self.keep || *phase != BenchPhase::Delete;
        BenchPhase::ALL.into_iter().filter(kept).collect()
    }

    /// Objects of a single run have a name of their own: the default name may be in use by another run.
    pub fn name(&self) -> String {
        match &self.name {
            Some(name) => name.clone(),
            None if self.phases.is_empty() && !self.keep => format!("bench-{:08x}", fastrand::u32(..)),
            None => "bench".into(),
        }
    }
}

fn phase_parser() -> impl TypedValueParser<Value = BenchPhase> {
    let names = PossibleValuesParser::new(BenchPhase::ALL.map(BenchPhase::name));
    names.try_map(|name| BenchPhase::from_name(&name).ok_or("no such phase"))
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
