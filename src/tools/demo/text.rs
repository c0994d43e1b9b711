//! The report for people.

use std::fmt::Write;
use std::path::Path;

use super::paged::BLOCK_TOKENS;
use super::report::{DemoPhase, DemoReport};

const GIB: f64 = (1_u64 << 30) as f64;
const MIB: f64 = (1_u64 << 20) as f64;
/// Misses in the report; `--json` has all.
const MISSED_SHOWN: usize = 3;

impl DemoReport {
    /// Announces the run.
    pub(super) fn header(&self) -> String {
        format!(
            "kvgate demo: {model}, synthetic KV (seed {seed})\n\
             geometry   {layers} layers x {heads} KV heads x {row} bytes a token = {token:.1} KiB a token\n\
             chunk      {chunk_tokens} tokens, {chunk:.1} MiB, one object; paged cache in blocks of {BLOCK_TOKENS} tokens, shuffled\n\
             prompts    {conversations} conversations of {tokens} tokens: {chunks} chunks, of which {unique} are different\n\
             {empty:11}({shared} of each are a system prompt that all share): {total:.2} GiB to store\n\
             where      {place}, space {space}\n\n",
            model = self.model,
            seed = self.seed,
            layers = self.layers,
            heads = self.heads,
            row = self.row_bytes,
            token = self.token_bytes as f64 / 1024.0,
            chunk_tokens = self.chunk_tokens,
            chunk = self.chunk_bytes as f64 / MIB,
            conversations = self.conversations,
            tokens = thousands(self.tokens as u64),
            chunks = self.chunks,
            unique = self.unique_chunks,
            empty = "",
            shared = self.shared_chunks,
            total = (self.unique_chunks * self.chunk_bytes) as f64 / GIB,
            place = self.place,
            space = self.space,
        )
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
            self.chunks,
        );
        if let Some(first) = &self.first_difference {
            let at = &first.position;
            let _ = writeln!(
                text,
                "           the first in conversation {}, chunk {}: layer {}, head {}, token {}, byte {} of the row",
                first.conversation, first.chunk, first.layer, at.head, at.token, at.row_byte
            );
        }
        for missed in self.missed.iter().take(MISSED_SHOWN) {
            let (conversation, chunk) = (missed.conversation, missed.chunk);
            let _ = writeln!(
                text,
                "           conversation {conversation}, chunk {chunk}: {}",
                missed.reason
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
            "kvgate demo --model llama-3-70b --tokens 4096    with more and larger chunks"
        };
        let _ = writeln!(text, "try next   {next}");
        text
    }
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
