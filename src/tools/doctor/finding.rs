//! The result of one check.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    /// It works, and something is not as it should be.
    Warning,
    /// Something will not work.
    Failed,
    /// Something that it needs is not there, or the person asked to leave it out.
    NotChecked,
}

impl Verdict {
    /// For people.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "FAILED",
            Self::NotChecked => "not checked",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// Stable name of the check.
    pub check: &'static str,
    pub verdict: Verdict,
    /// What was seen, with the thing that it was seen at.
    pub seen: String,
    /// What to type or set next. Always there with a warning and a failure.
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    pub fn ok(check: &'static str, seen: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Ok,
            seen: seen.into(),
            advice: None,
        }
    }

    pub fn warning(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Warning,
            advice: Some(advice.into()),
            ..Self::ok(check, seen)
        }
    }

    pub fn failed(check: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Failed,
            ..Self::warning(check, seen, advice)
        }
    }

    /// `because`: the rest of the sentence.
    pub fn not_checked(check: &'static str, because: &str) -> Self {
        Self {
            verdict: Verdict::NotChecked,
            ..Self::ok(check, format!("because {because}"))
        }
    }

    /// A sentence whose last part, after a semicolon, says what to do.
    pub fn failed_with(check: &'static str, sentence: &str) -> Self {
        let (seen, advice) = sentence
            .rsplit_once("; ")
            .unwrap_or((sentence, "See the message"));
        Self::failed(check, seen, capitalised(advice))
    }
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
