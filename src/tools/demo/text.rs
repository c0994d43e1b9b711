//! The report for people.

use std::fmt::Write;
use std::path::Path;

use super::report::{DemoKind, DemoPhase, DemoReport};
use crate::format::Kind;

const GIB: f64 = (1_u64 << 30) as f64;
const MIB: f64 = (1_u64 << 20) as f64;
/// Misses in the report; `--json` has all.
const MISSED_SHOWN: usize = 3;

impl DemoReport {
    /// Announces the run.
    pub(super) fn header(&self) -> String {
        let mut text = format!(
            "kvgate demo: {}, synthetic KV (seed {}), chunks of {} tokens\n",
            self.model, self.seed, self.chunk_tokens
        );
        for kind in &self.kinds {
            text.push_str(&announced(kind));
        }
        let _ = write!(
            text,
            "prompts    {conversations} conversations of {tokens} tokens: {chunks} chunks, of which {unique} are different\n\
             {empty:11}({shared} of each are a system prompt that all share): {total:.2} GiB to store\n\
             where      {place}\n\n",
            conversations = self.conversations,
            tokens = thousands(self.tokens as u64),
            chunks = self.chunks,
            unique = self.unique_chunks,
            empty = "",
            shared = self.shared_chunks,
            total = self.unique_bytes() as f64 / GIB,
            place = self.place,
        );
        text
    }

    /// The table and the verdict.
    pub(super) fn summary(&self) -> String {
        let mut text = format!(
            "{:<17}{:>9}{:>8}{:>8}{:>8}{:>6}  S3 requests\n",
            "phase", "seconds", "GiB", "GiB/s", "chunks", "hits"
        );
        for phase in &self.phases {
            text.push_str(&row(phase));
        }
        let lookup = self.phases.iter().find(|phase| phase.name == DemoPhase::LOOKUP);
        if let Some((hits, chunks)) = lookup.and_then(|phase| Some((phase.hits?, phase.chunks))) {
            let _ = writeln!(
                text,
                "\nreuse      {hits} of the {chunks} chunks that the prompts of all turns had were there: not computed again"
            );
        }
        let _ = writeln!(
            text,
            "copies     {:.2} s of store is gathering pages into slots, {:.2} s of load scattering slots into pages\n\
             memory     {:.2} GiB paged cache, {:.2} GiB of the arena at most",
            self.gather_seconds,
            self.scatter_seconds,
            self.cache_bytes as f64 / GIB,
            self.arena_bytes_peak as f64 / GIB,
        );
        text.push_str(&self.verdict());
        text
    }

    fn verdict(&self) -> String {
        let mut text = String::from("result     ");
        let compared = thousands(self.compared_bytes);
        if self.equal {
            let _ = writeln!(text, "all {compared} bytes equal");
            return text;
        }
        let _ = writeln!(
            text,
            "NOT EQUAL: {} of {compared} compared bytes differ, {} of {} chunks did not come back",
            thousands(self.different_bytes + self.stray_bytes),
            self.missed.len(),
            self.kinds.iter().map(|kind| kind.needed).sum::<usize>(),
        );
        if let Some(first) = &self.first_difference {
            let at = &first.position;
            let _ = writeln!(
                text,
                "           the first in conversation {}, chunk {} ({}): layer {}, head {}, row {}, byte {} of it",
                first.conversation, first.chunk, first.kind, first.layer, at.head, at.row, at.row_byte
            );
        }
        for missed in self.missed.iter().take(MISSED_SHOWN) {
            let (conversation, chunk) = (missed.conversation, missed.chunk);
            let _ = writeln!(
                text,
                "           conversation {conversation}, chunk {chunk} ({}): {}",
                missed.kind, missed.reason
            );
        }
        text
    }

    /// Suggests the next commands.
    pub(super) fn advice(&self, embedded: bool, kept: bool, folder: Option<&Path>) -> String {
        let mut text = String::new();
        if let Some(folder) = folder {
            let _ = writeln!(text, "kept       in {}", folder.display());
        } else if kept {
            let _ = writeln!(
                text,
                "kept       run it again with --seed {}, here or elsewhere: everything will be a hit",
                self.seed
            );
        }
        let next = if embedded {
            "kvgate demo --endpoint http://HOST:PORT --bucket NAME    the same on your S3 server"
        } else {
            "kvgate demo --model gpt-oss-20b    a model with windows"
        };
        let _ = writeln!(text, "try next   {next}");
        text
    }
}

/// One line about a kind.
fn announced(kind: &DemoKind) -> String {
    let row = match kind.kind {
        Kind::State => format!(
            "{:.1} KiB a snapshot",
            kind.chunk_bytes as f64 / kind.layers.max(1) as f64 / 1024.0
        ),
        _ => format!("{} KV heads x {} bytes a token", kind.heads, kind.row_bytes),
    };
    format!(
        "{:<15} {} layers x {row}; {:.1} MiB a chunk, one object\n{:16}space {}\n",
        kind.kind.to_string(),
        kind.layers,
        kind.chunk_bytes as f64 / MIB,
        "",
        kind.space
    )
}

fn row(phase: &DemoPhase) -> String {
    let number = |shown: bool, text: String| if shown { text } else { "-".to_owned() };
    let gib = phase.bytes as f64 / GIB;
    format!(
        "{:<17}{:>9.3}{:>8}{:>8}{:>8}{:>6}  {}\n",
        phase.name.replace('_', " "),
        phase.seconds,
        number(phase.bytes > 0, format!("{gib:.2}")),
        number(phase.bytes > 0, format!("{:.2}", gib / phase.seconds.max(1e-9))),
        number(phase.chunks > 0, phase.chunks.to_string()),
        phase.hits.map_or("-".to_owned(), |hits| hits.to_string()),
        phase.requests_text(),
    )
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let shown = [0, 12, 999, 1000, 123_456, 2_147_483_648].map(thousands);
        assert_eq!(shown, ["0", "12", "999", "1,000", "123,456", "2,147,483,648"]);
    }
}
