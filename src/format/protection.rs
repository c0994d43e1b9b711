//! How a space is protected against whoever can write to its bucket. It is part of the space, so of its id: a reader
//! demands what the space says, and no object can ask for less.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The demand on every object of a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protection {
    /// Digests find damage, not forgery.
    #[default]
    None,
    /// Header and planes have digests that only the tenant's key can make.
    Signed,
    /// Planes are encrypted, and nobody without the tenant's key can make any.
    Encrypted,
}

impl Protection {
    pub const WORDS: &'static [(&'static str, Self)] = &[
        ("none", Self::None),
        ("signed", Self::Signed),
        ("encrypted", Self::Encrypted),
    ];

    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Of spaces with this protection, and of the headers in them.
    pub fn format_version(self) -> u32 {
        if self.is_none() { 1 } else { 2 }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::WORDS.iter().find(|(_, one)| one == self);
        f.write_str(word.map_or("none", |(word, _)| word))
    }
}
