//! The prompt that a command names: tokens or chunk hashes, from a file or the standard input.

use std::path::PathBuf;

use clap::Args;

use super::args::SpaceRef;
use super::error::CliError;
use super::input;
use crate::config::read_secret;
use crate::config::units::{ByteSize, MIB};
use crate::format::{ChunkHash, ChunkHasher, Space, TenantSecret};

const TOKENS_BYTES_MAX: ByteSize = ByteSize(256 * MIB);

/// The prompt that is meant.
#[derive(Debug, Args)]
pub struct PromptArgs {
    /// Token ids: numbers with spaces, commas or line ends between, or a JSON array; `-` is the standard input.
    #[arg(long, value_name = "FILE|-", default_value = "-", conflicts_with = "hashes")]
    tokens: String,
    /// Chunk hashes in hex instead of tokens.
    #[arg(long, value_name = "FILE|-")]
    hashes: Option<String>,
    /// Salt that the prompt's hashes were made with.
    #[arg(long, value_name = "TEXT", default_value = "", conflicts_with = "hashes")]
    salt: String,
    /// Adapter (LoRA) that the prompt's hashes were made with.
    #[arg(long, value_name = "TEXT", default_value = "", conflicts_with = "hashes")]
    adapter: String,
    /// File with the tenant's secret, 64 hex digits. Nobody else may read it.
    #[arg(long, value_name = "FILE", conflicts_with = "hashes")]
    tenant_secret_file: Option<PathBuf>,
}

/// The given prompt, before its space is known.
pub enum PromptInput {
    Tokens {
        tokens: Vec<u32>,
        salt: String,
        adapter: String,
        secret: Option<TenantSecret>,
    },
    Hashes(Vec<ChunkHash>),
}

impl PromptArgs {
    pub fn read(&self) -> Result<PromptInput, CliError> {
        if let Some(file) = &self.hashes {
            let text = input::read(file, TOKENS_BYTES_MAX)?;
            return Ok(PromptInput::Hashes(input::hashes(&text)?));
        }
        let secret = self.tenant_secret_file.as_deref().map(read_secret).transpose();
        Ok(PromptInput::Tokens {
            tokens: input::tokens(&input::read(&self.tokens, TOKENS_BYTES_MAX)?)?,
            salt: self.salt.clone(),
            adapter: self.adapter.clone(),
            secret: secret.map_err(CliError::usage)?,
        })
    }
}

impl PromptInput {
    /// The number of tokens, if tokens were given.
    pub fn tokens(&self) -> Option<u64> {
        match self {
            Self::Tokens { tokens, .. } => Some(tokens.len() as u64),
            Self::Hashes(_) => None,
        }
    }

    /// The hashes of its full chunks.
    pub fn hashes(self, space: &Space) -> Result<Vec<ChunkHash>, CliError> {
        match self {
            Self::Hashes(hashes) => Ok(hashes),
            Self::Tokens {
                tokens,
                salt,
                adapter,
                secret,
            } => {
                let hasher = ChunkHasher::new(space, secret.as_ref())?;
                let root = hasher.root(salt.as_bytes(), adapter.as_bytes())?;
                Ok(hasher.chain(&root, &tokens, &[])?)
            }
        }
    }

    /// The same where no bucket can resolve an id to its space.
    pub fn hashes_in(self, space: &SpaceRef) -> Result<Vec<ChunkHash>, CliError> {
        match (self, space) {
            (Self::Hashes(hashes), _) => Ok(hashes),
            (prompt, SpaceRef::Known(space)) => prompt.hashes(space),
            _ => Err(CliError::usage(
                "tokens need the space itself: give --space FILE or --model PRESET, or --hashes FILE",
            )),
        }
    }
}
