//! A model's KV by what is published of the model: its kinds, each as a space.
//!
//! `hf_config` reads a `config.json` as Hugging Face has it. `preset` has names for well-known models, each with the
//! part of its `config.json` that says what its layers keep (`presets.json`): there is one way from a model to its
//! spaces.

mod hf_config;
mod preset;

pub use hf_config::HfModel;
pub use preset::{PRESETS, Preset};
