//! The flags of the demo, and the defaults that fit its run into little memory.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;

use super::error::DemoError;
use super::plan::{Shape, kept_chunks, stored_chunks, turns};
use crate::format::Space;
use crate::tools::model::{PRESETS, Preset};

/// Approximate unique KV that a run with the default flags stores.
const UNIQUE_BYTES: usize = 704 << 20;
const CHUNK_TOKENS: u32 = 256;

/// Flags of `kvgate demo`; where the objects go is in the configuration.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Model whose KV geometry is used
    #[arg(long, value_name = "PRESET", default_value = PRESETS[0].name.as_str(),
          value_parser = PossibleValuesParser::new(Preset::names()))]
    pub model: String,
    /// Tokens of each conversation, the shared system prompt included [default: so that about 700 MiB are stored]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pub tokens: Option<u32>,
    /// Conversations that share the system prompt
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub conversations: u32,
    /// Leave the objects where they are
    #[arg(long)]
    pub keep: bool,
    /// Write the conversations' tokens: a JSON list for each; `kvgate lookup --tokens` takes one
    #[arg(long, value_name = "FILE")]
    pub save_tokens: Option<PathBuf>,
    /// Report as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Makes tokens, KV and keys; the same seed finds what an earlier run kept [default: random]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl DemoArgs {
    /// The spaces of the model's kinds of KV, and the shape of the conversations.
    pub(super) fn shape(&self) -> Result<(Vec<Space>, Shape), DemoError> {
        let preset = Preset::find(&self.model).ok_or_else(|| DemoError::Model {
            name: self.model.clone(),
            known: Preset::names().join(", "),
        })?;
        // 32 bits are enough to keep runs apart, and short enough to type.
        let seed = self.seed.unwrap_or_else(|| u64::from(fastrand::u32(..)));
        // The seed stands for the weights of real KV: each seed has a space of its own.
        let spaces = preset.spaces(&format!("kvgate-demo-{seed:x}"), CHUNK_TOKENS)?;
        let conversations = self.conversations as usize;
        let tokens = self.tokens.map_or_else(
            || default_chunks(&spaces, conversations) * CHUNK_TOKENS as usize,
            |tokens| tokens as usize,
        );
        let shape = Shape {
            conversations,
            tokens,
            seed,
        };
        Ok((spaces, shape))
    }
}

/// Chunks of each conversation, so that all together have about [`UNIQUE_BYTES`].
fn default_chunks(spaces: &[Space], conversations: usize) -> usize {
    let fits = |chunks: &usize| unique_bytes(spaces, conversations, *chunks) <= UNIQUE_BYTES;
    (2..=UNIQUE_BYTES).take_while(fits).last().unwrap_or(2)
}

/// Bytes that conversations of so many chunks store: what they share is stored once.
fn unique_bytes(spaces: &[Space], conversations: usize, chunks: usize) -> usize {
    let shared = Shape::shared_chunks(chunks);
    let of_kind = |space: &Space| {
        let kept = kept_chunks(space, shared, &turns(shared, chunks));
        stored_chunks(&kept, shared, conversations) * space.layout().payload_len()
    };
    spaces.iter().map(of_kind).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        demo: DemoArgs,
    }

    #[test]
    fn defaults_store_about_the_same_for_every_preset() {
        for preset in PRESETS.iter() {
            let args = Command::parse_from(["demo", "--model", &preset.name]).demo;
            let (spaces, shape) = args.shape().unwrap();
            let mib = unique_bytes(&spaces, 4, shape.tokens / 256) >> 20;
            assert!((380..=704).contains(&mib), "{}: {mib} MiB", preset.name);
        }
    }

    #[test]
    fn unknown_models_and_other_seeds() {
        assert!(Command::try_parse_from(["demo", "--model", "gpt-9"]).is_err());
        let space = |seed| {
            Command::parse_from(["demo", "--seed", seed])
                .demo
                .shape()
                .unwrap()
                .0
        };
        assert_eq!(space("7"), space("7"));
        assert_ne!(space("7"), space("8"));
    }
}
