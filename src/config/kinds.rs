//! The kinds of value that a key can have: how each is read, shown and described.
//!
//! A kind reads text only, since the environment and the command line have nothing else. Its error is the sentence
//! that the operator sees, and says what to write.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use super::unknown::nearest;
use crate::config::units::{ByteSize, UnitError, parse_duration, show_duration};

pub(super) trait Kind {
    type Value;

    fn parse(&self, text: &str) -> Result<Self::Value, String>;
    /// The exact text: it reads back as the same value.
    fn show(&self, value: &Self::Value) -> String;
    /// The allowed text, for error messages and documentation.
    fn accepts(&self) -> String;

    /// Whether a file must quote the value: `0123` or `1e3` without quotes would reach us changed.
    fn needs_quotes(&self) -> bool {
        false
    }
}

/// A size or a whole number, both ends included.
pub(super) struct Between<T>(pub(super) T, pub(super) T);

/// A number that [`Between`] can limit.
pub(super) trait Number: FromStr + Display + PartialOrd {
    const NOUN: &'static str;
    fn explain(text: &str, error: Self::Err) -> String;
}

impl Number for ByteSize {
    const NOUN: &'static str = "a size";

    fn explain(_: &str, error: UnitError) -> String {
        error.to_string()
    }
}

impl Number for u32 {
    const NOUN: &'static str = "a whole number";

    fn explain(text: &str, _: Self::Err) -> String {
        format!("{text:?} is not a whole number that fits")
    }
}

impl<T: Number> Kind for Between<T> {
    type Value = T;

    fn parse(&self, text: &str) -> Result<T, String> {
        let value = text.trim().parse().map_err(|error| {
            let why = T::explain(text, error);
            format!("{why}; allowed is {}", self.accepts())
        })?;
        in_range(text, value, &self.0, &self.1, || self.accepts())
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }

    fn accepts(&self) -> String {
        format!("{} from {} to {}", T::NOUN, self.0, self.1)
    }
}

/// A duration, both ends included.
pub(super) struct Time {
    pub(super) min_ms: u64,
    pub(super) max_ms: u64,
}

impl Time {
    fn limits(&self) -> (Duration, Duration) {
        (
            Duration::from_millis(self.min_ms),
            Duration::from_millis(self.max_ms),
        )
    }
}

impl Kind for Time {
    type Value = Duration;

    fn parse(&self, text: &str) -> Result<Duration, String> {
        let value =
            parse_duration(text).map_err(|error| format!("{error}; allowed is {}", self.accepts()))?;
        let (min, max) = self.limits();
        in_range(text, value, &min, &max, || self.accepts())
    }

    fn show(&self, value: &Duration) -> String {
        show_duration(*value)
    }

    fn accepts(&self) -> String {
        let (min, max) = self.limits();
        format!("a duration from {} to {}", show_duration(min), show_duration(max))
    }
}

fn in_range<T: PartialOrd>(
    text: &str,
    value: T,
    min: &T,
    max: &T,
    accepts: impl FnOnce() -> String,
) -> Result<T, String> {
    let fault = if value < *min {
        "small"
    } else if value > *max {
        "large"
    } else {
        return Ok(value);
    };
    Err(format!("{text:?} is too {fault}; allowed is {}", accepts()))
}

/// true or false.
pub(super) struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn parse(&self, text: &str) -> Result<bool, String> {
        text.parse()
            .map_err(|_| format!("{text:?} is neither true nor false"))
    }

    fn show(&self, value: &bool) -> String {
        value.to_string()
    }

    fn accepts(&self) -> String {
        "true or false".to_owned()
    }
}

/// One of the words of a `crate::protocol::choice`.
pub(super) struct OneOf<T: 'static>(pub(super) &'static [(&'static str, T)]);

impl<T: Copy + Display> Kind for OneOf<T> {
    type Value = T;

    fn parse(&self, text: &str) -> Result<T, String> {
        if let Some((_, choice)) = self.0.iter().find(|(word, _)| *word == text) {
            return Ok(*choice);
        }
        let hint = nearest(text, self.0.iter().map(|(word, _)| *word))
            .map_or_else(String::new, |word| format!("; did you mean {word:?}?"));
        Err(format!("{text:?} is not {}{hint}", self.accepts()))
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }

    fn accepts(&self) -> String {
        let words: Vec<&str> = self.0.iter().map(|(word, _)| *word).collect();
        format!("one of {}", words.join(", "))
    }
}

/// Text that follows a rule, or a path.
pub(super) struct Text<T> {
    pub(super) accepts: &'static str,
    /// Checks the text; may return a cleaner spelling.
    pub(super) check: fn(&str) -> Result<T, String>,
    pub(super) show: fn(&T) -> String,
}

impl<T> Kind for Text<T> {
    type Value = T;

    fn parse(&self, text: &str) -> Result<T, String> {
        (self.check)(text).map_err(|fault| format!("{fault}; write {}", self.accepts))
    }

    fn show(&self, value: &T) -> String {
        (self.show)(value)
    }

    fn accepts(&self) -> String {
        self.accepts.to_owned()
    }

    fn needs_quotes(&self) -> bool {
        true
    }
}

/// A key that may be left out: empty text means not set, so that a later source can unset the value of an earlier
/// one.
pub(super) struct Optional<K>(pub(super) K);

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn parse(&self, text: &str) -> Result<Self::Value, String> {
        if text.is_empty() {
            Ok(None)
        } else {
            self.0.parse(text).map(Some)
        }
    }

    fn show(&self, value: &Self::Value) -> String {
        value
            .as_ref()
            .map_or_else(String::new, |value| self.0.show(value))
    }

    fn accepts(&self) -> String {
        format!("{}, or empty for none", self.0.accepts())
    }

    fn needs_quotes(&self) -> bool {
        self.0.needs_quotes()
    }
}
