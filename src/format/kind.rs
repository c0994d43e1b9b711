//! The kinds of KV that a model's layers keep, and what each needs of a prefix.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What a space's layers keep of a prompt. One space has one kind; a model with several has a space for each. In JSON:
/// `"full"`, `{"window": W}`, `{"chunked": C}` or `"state"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", try_from = "WrittenKind")]
pub enum Kind {
    /// Attention to all tokens before.
    #[default]
    Full,
    /// Attention to the token itself and the W - 1 tokens before it.
    Window(u32),
    /// Attention within chunks of this many tokens (Llama 4), which are not the cache's chunks.
    Chunked(u32),
    /// A recurrent state: a chunk has one snapshot, taken after its last token.
    State,
}

/// A kind in JSON. The word is a string: as a variant serde would also take `{"state": null}`.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a kind is \"full\", {\"window\": W}, {\"chunked\": C} or \"state\""
)]
enum WrittenKind {
    Word(String),
    Span(Span),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Span {
    Window(u32),
    Chunked(u32),
}

impl TryFrom<WrittenKind> for Kind {
    type Error = String;

    fn try_from(written: WrittenKind) -> Result<Self, String> {
        match written {
            WrittenKind::Span(Span::Window(tokens)) => Ok(Self::Window(tokens)),
            WrittenKind::Span(Span::Chunked(tokens)) => Ok(Self::Chunked(tokens)),
            WrittenKind::Word(word) if word == "full" => Ok(Self::Full),
            WrittenKind::Word(word) if word == "state" => Ok(Self::State),
            WrittenKind::Word(word) => Err(format!(
                "a kind is \"full\", {{\"window\": W}}, {{\"chunked\": C}} or \"state\", not {word:?}"
            )),
        }
    }
}

/// Tokens that a window or an attention chunk may have.
const KIND_TOKENS_MAX: u32 = 1 << 30;

impl Kind {
    /// The chunks that an engine must have to go on after the first `boundary` chunks of `chunk_tokens` tokens.
    pub fn needed(self, boundary: usize, chunk_tokens: u32) -> Range<usize> {
        let chunk_tokens = u64::from(chunk_tokens);
        let tokens = boundary as u64 * chunk_tokens;
        let first = match self {
            Self::Full => 0,
            Self::Window(window) => tokens.saturating_sub(u64::from(window.max(1)) - 1),
            Self::Chunked(size) => tokens - tokens % u64::from(size.max(1)),
            Self::State => tokens.saturating_sub(1),
        };
        // Never above the boundary.
        let first = usize::try_from(first / chunk_tokens.max(1)).unwrap_or(boundary);
        first..boundary
    }

    /// Whether every chunk of a prefix is needed to go on after it.
    pub fn is_full(self) -> bool {
        self == Self::Full
    }

    /// The code and the number in a header.
    pub(super) fn code(self) -> (u32, u32) {
        match self {
            Self::Full => (1, 0),
            Self::Window(tokens) => (2, tokens),
            Self::Chunked(tokens) => (3, tokens),
            Self::State => (4, 0),
        }
    }

    pub(super) fn from_code(code: (u32, u32)) -> Option<Self> {
        match code {
            (1, 0) => Some(Self::Full),
            (2, tokens) => Some(Self::Window(tokens)),
            (3, tokens) => Some(Self::Chunked(tokens)),
            (4, 0) => Some(Self::State),
            _ => None,
        }
    }

    pub(super) fn check(self) -> Result<(), String> {
        match self {
            Self::Window(tokens) | Self::Chunked(tokens) if !(1..=KIND_TOKENS_MAX).contains(&tokens) => {
                Err(format!(
                    "`kind`: a window or an attention chunk has 1 to {KIND_TOKENS_MAX} tokens, not {tokens}"
                ))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Window(tokens) => write!(f, "window {tokens}"),
            Self::Chunked(tokens) => write!(f, "chunked {tokens}"),
            Self::State => f.write_str("state"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn kinds_are_written_as_documented() {
        for (kind, json) in [
            (Kind::Full, r#""full""#),
            (Kind::Window(128), r#"{"window":128}"#),
            (Kind::Chunked(8192), r#"{"chunked":8192}"#),
            (Kind::State, r#""state""#),
        ] {
            assert_eq!(serde_json::to_string(&kind).unwrap(), json);
            assert_eq!(serde_json::from_str::<Kind>(json).unwrap(), kind);
        }
        for bad in [
            r#""window""#,
            r#"{"window": -1}"#,
            r#"{"window": 1, "chunked": 1}"#,
            r#"{"full": 1}"#,
            r#"{"full": null}"#,
            r#"{"state": null}"#,
            r#""State""#,
            "null",
        ] {
            assert!(serde_json::from_str::<Kind>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn each_kind_needs_what_its_attention_reads() {
        let needed = |kind: Kind, boundary| kind.needed(boundary, 256);
        assert_eq!(needed(Kind::Full, 5), 0..5);
        assert_eq!(needed(Kind::State, 5), 4..5);
        assert_eq!(needed(Kind::State, 0), 0..0);
        // Tokens 1,153 to 1,279.
        assert_eq!(needed(Kind::Window(128), 5), 4..5);
        assert_eq!(needed(Kind::Window(257), 5), 4..5);
        assert_eq!(needed(Kind::Window(258), 5), 3..5);
        assert_eq!(needed(Kind::Window(1), 5), 5..5);
        assert_eq!(needed(Kind::Window(8192), 5), 0..5);
        assert_eq!(needed(Kind::Chunked(1024), 5), 4..5);
        assert_eq!(needed(Kind::Chunked(1024), 4), 4..4);
        assert_eq!(needed(Kind::Chunked(8192), 5), 0..5);
    }

    proptest! {
        #[test]
        fn no_token_that_is_attended_to_is_left_out(
            boundary in 0_usize..60, chunk_tokens in 1_u32..40, span in 1_u32..400,
        ) {
            let next = boundary as u64 * u64::from(chunk_tokens);
            let is_needed = |kind: Kind, token: u64| match kind {
                Kind::Full => true,
                Kind::Window(window) => token + u64::from(window) > next,
                Kind::Chunked(size) => token / u64::from(size) == next / u64::from(size),
                Kind::State => token + 1 == next,
            };
            for kind in [Kind::Full, Kind::Window(span), Kind::Chunked(span), Kind::State] {
                let needed: Vec<usize> = (0..boundary)
                    .filter(|&chunk| {
                        let first = chunk as u64 * u64::from(chunk_tokens);
                        (first..first + u64::from(chunk_tokens)).any(|token| is_needed(kind, token))
                    })
                    .collect();
                let told: Vec<usize> = kind.needed(boundary, chunk_tokens).collect();
                prop_assert_eq!(told, needed, "{}", kind);
            }
        }
    }
}
