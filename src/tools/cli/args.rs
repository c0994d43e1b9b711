//! Groups of flags that several commands share.

use std::path::{Path, PathBuf};

use clap::Args;

use super::error::CliError;
use super::input;
use super::output::tell;
use crate::config::units::{ByteSize, MIB};
use crate::config::{self, LoadedConfig, Override};
use crate::format::{Space, SpaceId, SpaceKey};
use crate::inventory::Select;
use crate::tools::model::Preset;

/// Where the configuration comes from: file, then environment, then these flags.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Bucket and configuration")]
pub struct ConnectArgs {
    /// Configuration file: .toml, .yaml or .json.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// URL of the S3 server ([s3] endpoint); not set: AWS.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Bucket that holds the chunks ([s3] bucket).
    #[arg(long, value_name = "NAME")]
    pub bucket: Option<String>,
    /// The start of all object keys ([s3] prefix).
    #[arg(long, value_name = "PREFIX")]
    pub prefix: Option<String>,
    /// Region that requests are signed for ([s3] region).
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
}

impl ConnectArgs {
    /// The configuration with these flags and `more` on top; warns of old names. Fails with the list of all its problems.
    pub fn load(&self, more: Vec<Override>) -> Result<LoadedConfig, CliError> {
        let flags = [
            ("s3.endpoint", "--endpoint", &self.endpoint),
            ("s3.bucket", "--bucket", &self.bucket),
            ("s3.prefix", "--prefix", &self.prefix),
            ("s3.region", "--region", &self.region),
        ];
        let given = flags.into_iter().filter_map(|(path, flag, value)| {
            let value = value.clone()?;
            Some(Override { path, value, flag })
        });
        let overrides: Vec<Override> = given.chain(more).collect();
        let loaded = config::load(self.config.as_deref(), config::process_env(), &overrides)?;
        for warning in &loaded.warnings {
            // Not by the log, whose level and format are in there.
            tell(format_args!("warning: {warning}"));
        }
        Ok(loaded)
    }
}

/// Which spaces of the bucket are meant: those that have all of it.
#[derive(Debug, Clone, Default, Args)]
pub struct SelectArgs {
    /// Only the model that this space is of, with all its kinds of KV (64 hex digits, or the first 32).
    #[arg(long, value_name = "ID", value_parser = space_key)]
    space: Option<SpaceKey>,
    /// Only this model, by the name that `kvgate ls` shows.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Only this revision of the weights.
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Only this tenant; '' for chunks without one.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
}

impl From<SelectArgs> for Select {
    fn from(args: SelectArgs) -> Self {
        Self {
            space: args.space,
            model: args.model,
            revision: args.revision,
            tenant: args.tenant,
        }
    }
}

fn space_key(text: &str) -> Result<SpaceKey, String> {
    let whole = text.parse::<SpaceId>().ok().map(SpaceKey::from);
    whole
        .or_else(|| SpaceKey::from_hex(text))
        .ok_or_else(|| "it is not 32 or 64 hex digits; `kvgate ls` lists the ids".into())
}

/// Which space is meant.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Space")]
pub struct SpaceArgs {
    /// JSON file that describes the space, or the id of one in the bucket (64 hex digits, or its first 32).
    #[arg(long, value_name = "FILE|ID", conflicts_with = "model")]
    pub space: Option<String>,
    /// A known model; `kvgate size` lists them.
    #[arg(long, value_name = "PRESET")]
    pub model: Option<String>,
    /// Commit or digest of the model's weights.
    #[arg(long, value_name = "REVISION", requires = "model")]
    pub revision: Option<String>,
    /// Tokens in a chunk [default: 256].
    #[arg(long, value_name = "TOKENS", requires = "model")]
    pub chunk_tokens: Option<u32>,
}

pub const CHUNK_TOKENS: u32 = 256;

/// A space as given.
#[derive(Debug, Clone)]
pub enum SpaceRef {
    Known(Space),
    /// Only its id; the bucket describes the space. The second is there if the id was given in full.
    Id(SpaceKey, Option<SpaceId>),
}

impl SpaceRef {
    pub fn key(&self) -> SpaceKey {
        match self {
            Self::Known(space) => space.key(),
            Self::Id(key, _) => *key,
        }
    }
}

impl SpaceArgs {
    /// The space; fails if none was given.
    pub fn required(&self) -> Result<SpaceRef, CliError> {
        self.given()?.ok_or_else(|| {
            CliError::usage(
                "which space? Give --space FILE or --space ID (`kvgate ls` lists the ids), or --model PRESET \
                 --revision REVISION",
            )
        })
    }

    /// The space, if one was given.
    pub fn given(&self) -> Result<Option<SpaceRef>, CliError> {
        // clap does not check these flags' requirement where --space is given, which excludes --model.
        if self.space.is_some() && (self.revision.is_some() || self.chunk_tokens.is_some()) {
            return Err(CliError::usage(
                "--revision and --chunk-tokens are for --model: a --space has its own; leave them out",
            ));
        }
        match (&self.space, &self.model) {
            (Some(text), _) => space_of(text).map(Some),
            (None, Some(model)) => self.preset(model).map(|space| Some(SpaceRef::Known(space))),
            (None, None) => Ok(None),
        }
    }

    fn preset(&self, model: &str) -> Result<Space, CliError> {
        let preset = find_preset(model)?;
        let revision = self.revision.as_deref().ok_or_else(|| {
            CliError::usage(format!(
                "--model {} needs --revision REVISION: the same tokens give other KV with other weights, so the commit \
                 (or a digest of the weight files) is part of every key",
                preset.name
            ))
        })?;
        let spaces = preset.spaces(revision, self.chunk_tokens.unwrap_or(CHUNK_TOKENS))?;
        one_space(preset, spaces)
    }
}

/// The space of a model with one kind of KV.
pub fn one_space(preset: &Preset, spaces: Vec<Space>) -> Result<Space, CliError> {
    let kinds: Vec<String> = spaces.iter().map(|space| space.kind().to_string()).collect();
    match <[Space; 1]>::try_from(spaces) {
        Ok([space]) => Ok(space),
        Err(_) => Err(CliError::usage(format!(
            "{} keeps several kinds of KV ({}), and this command takes one: give --space FILE, or --space ID of one that \
             is in the bucket (`kvgate ls` lists them)",
            preset.name,
            kinds.join(", ")
        ))),
    }
}

pub fn find_preset(name: &str) -> Result<&'static Preset, CliError> {
    Preset::find(name).ok_or_else(|| {
        CliError::usage(format!(
            "no preset is called {name:?}. There are {}; describe any other model in a JSON file and give --space FILE",
            Preset::names().join(", ")
        ))
    })
}

/// A file wins over an id of the same name.
fn space_of(text: &str) -> Result<SpaceRef, CliError> {
    if !Path::new(text).is_file() {
        if let Ok(id) = text.parse::<SpaceId>() {
            return Ok(SpaceRef::Id(id.into(), Some(id)));
        }
        if let Some(key) = SpaceKey::from_hex(text) {
            return Ok(SpaceRef::Id(key, None));
        }
        if !Path::new(text).exists() {
            return Err(CliError::usage(format!(
                "--space {text:?} is neither a file nor a space id (32 or 64 hex digits). `kvgate ls` lists the ids"
            )));
        }
    }
    let json = input::read(text, ByteSize(MIB))?;
    let space =
        Space::from_json(&json).map_err(|error| CliError::usage(format!("--space {text:?}: {error}")))?;
    Ok(SpaceRef::Known(space))
}
