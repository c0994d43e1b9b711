//! `kvgate replay`: a recorded trace through the eviction policies, in simulation. It needs no server.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::config::Config;
use crate::config::units::{ByteSize, parse_duration, show_duration};
use crate::protocol::{EvictionPolicy, Strategy};
use crate::tools::cli::error::CliError;
use crate::tools::cli::input;
use crate::tools::cli::output::{Out, bytes};
use crate::tools::replay::{
    Cost, CostSettings, Curve, LookupPlan, Lookups, Prompt, S3Plan, Trace, best, cost, infinite, lookups,
    simulate, svg,
};

/// Simulates how much of a recorded trace each eviction policy would hit, and what lookups would ask; asks no server.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate replay conversation_trace.jsonl
  kvgate replay qwen_traceA_blksz_16.jsonl --blocks 10k,100k --policy reuse,lru
  kvgate replay trace.jsonl --token-bytes 320KiB --svg hits.svg
  kvgate replay trace.jsonl --nodes 1,16 --admit all,50%,200MiB
  kvgate replay trace.jsonl --json

Each line is a prompt, as Mooncake's traces have them (timestamp in ms, input_length,
output_length, hash_ids; blocks of 512 tokens) or Qwen-Bailian's (chat_id as well;
seconds; blocks of 16 tokens).")]
pub struct ReplayArgs {
    /// The trace, or - for the standard input.
    #[arg(value_name = "TRACE")]
    trace: String,
    /// Sizes of the memory in blocks, such as 2000 or 10k.
    #[arg(long, value_name = "BLOCKS,..", value_delimiter = ',', value_parser = blocks, default_value = "2k,5k,10k,20k,50k")]
    blocks: Vec<usize>,
    /// Policies; all of them if not given.
    #[arg(long, value_name = "POLICY,..", value_delimiter = ',', value_parser = policy)]
    policy: Vec<EvictionPolicy>,
    /// Tokens in a block, if not those of the trace's format.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    block_tokens: Option<u64>,
    /// KV of one token, for bytes and money; kvgate size tells it.
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = size)]
    token_bytes: ByteSize,
    /// Blocks in the memory of all nodes together, for requests and money.
    #[arg(long, value_name = "BLOCKS", value_parser = blocks, default_value = "10k")]
    cost_blocks: usize,
    /// Nodes that the prompts go to at random, each number some lines of the costs and of the lookups.
    #[arg(long, value_name = "NODES,..", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024), default_value = "1")]
    nodes: Vec<u16>,
    /// What S3 is given, each a line of the costs: all, or a budget of all nodes together as bytes a second, or as a
    /// share of the new bytes that the trace has a second on average.
    #[arg(long, value_name = "BUDGET,..", value_delimiter = ',', value_parser = budget, default_value = "all,75%,50%,25%")]
    admit: Vec<Budget>,
    /// How long a node counts a chunk that it saw as there, for the lookups, if not the default of [lookup] present_ttl.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    present_ttl: Option<Duration>,
    /// Dollars for a thousand PUTs.
    #[arg(long, value_name = "DOLLARS", value_parser = dollars, default_value = "0.005")]
    price_put: f64,
    /// Dollars for a thousand GETs or HEADs.
    #[arg(long, value_name = "DOLLARS", value_parser = dollars, default_value = "0.0004")]
    price_get: f64,
    /// Dollars for a GiB that is read.
    #[arg(long, value_name = "DOLLARS", value_parser = dollars, default_value = "0")]
    price_read: f64,
    /// Where the prices are from, and of which day; it is only printed.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "AWS S3 Standard, us-east-1, noted 2026-11-25; check them"
    )]
    prices_of: String,
    /// Also writes a plot of the hits.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
}

/// Bytes of a trace at most.
const TRACE_MAX: ByteSize = ByteSize(4 << 30);

fn blocks(text: &str) -> Result<usize, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, factor) = match lower.strip_suffix('k') {
        Some(digits) => (digits, 1000),
        None => match lower.strip_suffix('m') {
            Some(digits) => (digits, 1_000_000),
            None => (lower.as_str(), 1),
        },
    };
    let number = digits
        .parse::<usize>()
        .ok()
        .and_then(|number| number.checked_mul(factor));
    number
        .filter(|number| (1..=1_000_000_000).contains(number))
        .ok_or_else(|| "give a number of blocks from 1 to 1000m, such as 2000 or 10k".to_owned())
}

fn policy(text: &str) -> Result<EvictionPolicy, String> {
    let known = EvictionPolicy::WORDS.iter().find(|(word, _)| *word == text);
    known.map(|(_, policy)| *policy).ok_or_else(|| {
        let words: Vec<&str> = EvictionPolicy::WORDS.iter().map(|(word, _)| *word).collect();
        format!("give one of {}", words.join(", "))
    })
}

fn size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    match size.bytes() {
        1..=0x4000_0000 => Ok(size),
        _ => Err("give a size from 1B to 1GiB, such as 64KiB".to_owned()),
    }
}

/// What S3 is given.
#[derive(Debug, Clone, Copy)]
enum Budget {
    All,
    Bytes(u64),
    Percent(f64),
}

fn budget(text: &str) -> Result<Budget, String> {
    let percent = |text: &str| text.parse().ok().filter(|share| (0.01..=1000.0).contains(share));
    let budget = match (text, text.strip_suffix('%')) {
        ("all", _) => Some(Budget::All),
        (_, Some(share)) => percent(share).map(Budget::Percent),
        (size, None) => {
            let size = size.parse::<ByteSize>().ok().map(ByteSize::bytes);
            size.filter(|bytes| *bytes > 0).map(Budget::Bytes)
        }
    };
    budget.ok_or_else(|| "give all, bytes a second such as 100MiB, or a share such as 50%".to_owned())
}

fn dollars(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok();
    price
        .filter(|price| (0.0..1e6).contains(price))
        .ok_or_else(|| "give a price in dollars, such as 0.005".to_owned())
}

/// The hits at one size, by name, in a hundred.
struct AtSize {
    blocks: usize,
    percents: Vec<(&'static str, f64)>,
}

pub fn run(args: &ReplayArgs, out: &mut Out) -> Result<(), CliError> {
    let text = input::read(&args.trace, TRACE_MAX)?;
    let trace = Trace::parse(&text, args.block_tokens)
        .map_err(|error| CliError::usage(format!("{}: {error}", args.trace)))?;
    let everything = infinite(&trace.prompts).percent();
    let sizes: Vec<AtSize> = args
        .blocks
        .iter()
        .map(|&blocks| args.at_size(&trace, blocks))
        .collect();
    let costs = args.costs(&trace);
    let looked_up = args.lookups(&trace);
    if let Some(path) = &args.svg {
        let title = format!("hits in % of {} blocks, by policy and size", trace.blocks());
        std::fs::write(path, svg(&title, &curves(&sizes, everything)))
            .map_err(|error| CliError::usage(format!("can't write {}: {error}", path.display())))?;
    }
    if args.json {
        return out.json(&args.report(&trace, everything, &sizes, &costs, &looked_up));
    }
    out.line(format_args!(
        "{} prompts, {} full blocks of {} tokens ({}). Hits are blocks of leading runs, in % of all.\n",
        trace.prompts.len(),
        trace.blocks(),
        trace.block_tokens,
        trace.format
    ))?;
    show_sizes(out, &sizes, everything)?;
    args.show_costs(out, &trace, &costs)?;
    args.show_lookups(out, &trace, &looked_up)
}

fn show_sizes(out: &mut Out, sizes: &[AtSize], everything: f64) -> Result<(), CliError> {
    let columns: Vec<String> = sizes.iter().map(|size| format!(">{}", size.blocks)).collect();
    let headings: Vec<&str> = ["policy \\ blocks"]
        .into_iter()
        .chain(columns.iter().map(String::as_str))
        .collect();
    let names = sizes
        .iter()
        .take(1)
        .flat_map(|size| size.percents.iter().map(|(name, _)| *name));
    let rows: Vec<Vec<String>> = names
        .enumerate()
        .map(|(row, name)| {
            let cells = sizes.iter().map(|size| format!("{:.2}", size.percents[row].1));
            std::iter::once(name.to_owned()).chain(cells).collect()
        })
        .collect();
    out.table(&headings, &rows)?;
    out.line(format_args!(
        "\ninfinite: {everything:.2}. greedy: the future is known. bound: the same, blocks behind a gap counted too;\n\
         no policy can have more.\n"
    ))
}

fn curves(sizes: &[AtSize], everything: f64) -> Vec<Curve> {
    let names = sizes
        .iter()
        .take(1)
        .flat_map(|size| size.percents.iter().map(|(name, _)| *name));
    let of_row = |(row, name): (usize, &'static str)| Curve {
        name: name.to_owned(),
        points: sizes
            .iter()
            .map(|size| (size.blocks, size.percents[row].1))
            .collect(),
    };
    let mut curves: Vec<Curve> = names.enumerate().map(of_row).collect();
    curves.push(Curve {
        name: "infinite".to_owned(),
        points: sizes.iter().map(|size| (size.blocks, everything)).collect(),
    });
    curves
}

/// The budget of all nodes together. None: there is none.
fn bytes_per_s(budget: Budget, trace: &Trace, block_bytes: u64) -> Option<u64> {
    let share = match budget {
        Budget::All => return None,
        Budget::Bytes(bytes) => return Some(bytes),
        Budget::Percent(percent) => percent / 100.0,
    };
    let ms = |prompt: Option<&Prompt>| prompt.map_or(0, |prompt| prompt.at_ms);
    let seconds = (ms(trace.prompts.last()) - ms(trace.prompts.first())).max(1) as f64 / 1000.0;
    let new = trace.blocks() - infinite(&trace.prompts).leading;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is not below 0"
    )]
    Some((share * (new * block_bytes) as f64 / seconds) as u64)
}

impl ReplayArgs {
    fn at_size(&self, trace: &Trace, blocks: usize) -> AtSize {
        let all = || EvictionPolicy::WORDS.iter().map(|(_, policy)| *policy).collect();
        let policies: Vec<EvictionPolicy> = if self.policy.is_empty() {
            all()
        } else {
            self.policy.clone()
        };
        let of = |policy: EvictionPolicy| (policy.word(), simulate(&trace.prompts, policy, blocks).percent());
        let mut percents: Vec<(&'static str, f64)> = policies.into_iter().map(of).collect();
        let best = best(&trace.prompts, blocks);
        percents.push(("greedy", best.greedy.percent()));
        percents.push(("bound", best.bound.percent()));
        AtSize { blocks, percents }
    }

    fn costs(&self, trace: &Trace) -> Vec<Cost> {
        let settings = CostSettings {
            block_bytes: self.token_bytes.bytes().saturating_mul(trace.block_tokens),
            put: self.price_put,
            get: self.price_get,
            read_gib: self.price_read,
            probes: Config::default().lookup.probes as usize,
        };
        let plan = |strategy, nodes: u16, memory_blocks: usize, budget| S3Plan {
            strategy,
            nodes: usize::from(nodes),
            memory_blocks: memory_blocks / usize::from(nodes),
            admit_bytes: bytes_per_s(budget, trace, settings.block_bytes),
        };
        let mut plans = vec![
            plan(Strategy::Exact, 1, 0, Budget::All),
            plan(Strategy::Prefix, 1, 0, Budget::All),
            plan(Strategy::Exact, 1, self.cost_blocks, Budget::All),
        ];
        for &nodes in &self.nodes {
            let budgets = self.admit.iter();
            plans.extend(budgets.map(|budget| plan(Strategy::Prefix, nodes, self.cost_blocks, *budget)));
        }
        plans
            .into_iter()
            .map(|plan| cost(trace, plan, &settings))
            .collect()
    }

    fn present_ttl(&self) -> Duration {
        self.present_ttl.unwrap_or(Config::default().lookup.present_ttl)
    }

    fn lookups(&self, trace: &Trace) -> Vec<Lookups> {
        let defaults = Config::default().lookup;
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ways = [
            (Strategy::Exact, false),
            (Strategy::Prefix, false),
            (Strategy::Prefix, true),
        ];
        let of_nodes = |&nodes: &u16| {
            ways.map(|(strategy, hints)| LookupPlan {
                strategy,
                nodes: usize::from(nodes),
                hints,
                present_ttl_ms: ms(self.present_ttl()),
                absent_ttl_ms: ms(defaults.absent_ttl),
                probes: defaults.probes as usize,
            })
        };
        let plans = self.nodes.iter().flat_map(of_nodes);
        plans.map(|plan| lookups(trace, plan)).collect()
    }

    fn show_lookups(&self, out: &mut Out, trace: &Trace, lookups: &[Lookups]) -> Result<(), CliError> {
        let prompts = trace.prompts.len() as f64;
        let row = |of: &Lookups| {
            vec![
                of.plan.strategy.to_string(),
                of.plan.nodes.to_string(),
                if of.plan.hints { "yes" } else { "no" }.to_owned(),
                format!("{:.2}", of.heads as f64 / prompts),
                format!("{:.3}", of.rounds as f64 / prompts),
                of.rounds_p99.to_string(),
                of.rounds_max.to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = lookups.iter().map(row).collect();
        out.line(format!(
            "\nQuestions of a lookup. Each node remembers for {} what it saw; no block is in its memory:\n",
            show_duration(self.present_ttl()),
        ))?;
        let headings = ["lookup", ">nodes", "hints", ">HEAD", ">rounds", ">p99", ">most"];
        out.table(&headings, &rows)
    }

    fn show_costs(&self, out: &mut Out, trace: &Trace, costs: &[Cost]) -> Result<(), CliError> {
        let (prompts, asked) = (trace.prompts.len() as f64, trace.blocks().max(1) as f64);
        let row = |cost: &Cost| {
            let plan = cost.plan;
            vec![
                plan.strategy.to_string(),
                plan.nodes.to_string(),
                plan.memory_blocks.to_string(),
                match plan.admit_bytes {
                    Some(rate) => bytes(rate),
                    None => "all".to_owned(),
                },
                format!("{:.2}", cost.heads as f64 / prompts),
                format!("{:.2}", cost.gets as f64 / prompts),
                format!("{:.2}", cost.puts as f64 / prompts),
                bytes(cost.read_bytes),
                bytes(cost.written_bytes),
                format!("{:.2}", 100.0 * cost.hits as f64 / asked),
                format!("{:.4}", 1000.0 * cost.dollars / prompts),
            ]
        };
        let rows: Vec<Vec<String>> = costs.iter().map(row).collect();
        let headings = [
            "lookup",
            ">nodes",
            ">memory",
            ">admit / s",
            ">HEAD",
            ">GET",
            ">PUT",
            ">read",
            ">written",
            ">hits %",
            ">$ / 1000 prompts",
        ];
        out.line("S3 requests a prompt, nothing remembered of what exists; bytes of the whole trace:\n")?;
        out.table(&headings, &rows)?;
        out.line(format_args!(
            "\nPrices: {}. PUT ${} and GET ${} a thousand, ${} a GiB read; {} a token.",
            self.prices_of, self.price_put, self.price_get, self.price_read, self.token_bytes
        ))
    }

    fn report(
        &self,
        trace: &Trace,
        everything: f64,
        sizes: &[AtSize],
        costs: &[Cost],
        lookups: &[Lookups],
    ) -> serde_json::Value {
        let size = |size: &AtSize| {
            let percents: serde_json::Map<String, serde_json::Value> = size
                .percents
                .iter()
                .map(|(name, percent)| ((*name).to_owned(), json!(percent)))
                .collect();
            json!({ "blocks": size.blocks, "hits_percent": percents })
        };
        let sizes: Vec<serde_json::Value> = sizes.iter().map(size).collect();
        json!({
            "trace": self.trace,
            "format": trace.format,
            "prompts": trace.prompts.len(),
            "blocks": trace.blocks(),
            "block_tokens": trace.block_tokens,
            "infinite_hits_percent": everything,
            "sizes": sizes,
            "token_bytes": self.token_bytes.bytes(),
            "prices_of": self.prices_of,
            "costs": costs,
            "lookups": lookups,
        })
    }
}
