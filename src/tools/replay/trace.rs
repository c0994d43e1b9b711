//! Traces: a JSON object on each line, in the format of Mooncake or of Qwen-Bailian.
//!
//! Both say for each prompt when it came, how long it was, and an id for each of its blocks; equal ids mean that all
//! tokens up to there are equal. Mooncake's blocks have 512 tokens and its times are milliseconds; Qwen-Bailian's have
//! 16 tokens, and its times are seconds.

use serde::Deserialize;

/// A prompt of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    pub at_ms: u64,
    /// The ids of its full blocks. A last block that is not full is left out, as kvgate leaves it out.
    pub blocks: Vec<u64>,
    pub output_tokens: u64,
}

/// A trace, in the order of time.
#[derive(Debug, Clone)]
pub struct Trace {
    pub format: &'static str,
    pub block_tokens: u64,
    pub prompts: Vec<Prompt>,
}

/// The reason why a trace can't be used. Lines count from 1.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace has no prompts: give a file with one JSON object on each line")]
    Empty,
    #[error("line {line} is no prompt of a trace: {problem}. Remove the line, or fetch the trace again")]
    Line { line: usize, problem: String },
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    /// Only Qwen-Bailian's has it.
    chat_id: Option<serde_json::Value>,
}

impl Trace {
    /// Reads a trace. `block_tokens`: instead of the format's own.
    pub fn parse(text: &str, block_tokens: Option<u64>) -> Result<Self, TraceError> {
        let mut trace = Self {
            format: "",
            block_tokens: 0,
            prompts: Vec::new(),
        };
        let lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        for (index, line) in lines {
            let damaged = |problem: String| TraceError::Line {
                line: index + 1,
                problem,
            };
            let line: Line = serde_json::from_str(line).map_err(|error| damaged(without_place(&error)))?;
            let (format, tokens, unit_ms) = match line.chat_id.is_some() {
                true => ("qwen-bailian", 16, 1000.0),
                false => ("mooncake", 512, 1.0),
            };
            if trace.format.is_empty() {
                (trace.format, trace.block_tokens) = (format, block_tokens.unwrap_or(tokens));
            } else if trace.format != format {
                return Err(damaged(format!(
                    "it is of format {format}, those before are of {}",
                    trace.format
                )));
            }
            let at_ms = line.timestamp * unit_ms;
            if !(0.0..1e15).contains(&at_ms) {
                return Err(damaged(format!(
                    "timestamp {} is no time since the start",
                    line.timestamp
                )));
            }
            let full = line.input_length / trace.block_tokens;
            let ids = line.hash_ids.len() as u64;
            if ids < full {
                return Err(damaged(format!(
                    "input_length {} has {full} full blocks of {} tokens, and hash_ids only has {ids}",
                    line.input_length, trace.block_tokens
                )));
            }
            let mut blocks = line.hash_ids;
            blocks.truncate(usize::try_from(full).unwrap_or(usize::MAX));
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "it was checked"
            )]
            trace.prompts.push(Prompt {
                at_ms: at_ms as u64,
                blocks,
                output_tokens: line.output_length,
            });
        }
        if trace.prompts.is_empty() {
            return Err(TraceError::Empty);
        }
        trace.prompts.sort_by_key(|prompt| prompt.at_ms);
        Ok(trace)
    }

    /// Full blocks of all prompts.
    pub fn blocks(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.blocks.len() as u64).sum()
    }
}

/// The parser counts lines within the one line that it was given.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}
