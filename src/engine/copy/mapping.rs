//! The places of a chunk's tokens in an engine's memory: a block table or token slots, checked and turned into
//! spans.

use std::ops::Range;

use super::cache::PagedCache;
use super::error::MappingError;
use crate::protocol::TokenShare;

/// The places of a chunk's tokens in an engine's memory.
#[derive(Debug, Clone, Copy)]
pub enum SlotMapping<'a> {
    /// The sequence's block table, and the chunk's first token in it: chunks need not begin where blocks do. Where the
    /// cache has a share of the tokens, these alone fill the blocks.
    Blocks { table: &'a [u32], first_token: u64 },
    /// For each copied token `block * block_tokens + token in the block`; negative: nowhere, which only a load may
    /// have.
    Slots(&'a [i64]),
}

/// Tokens of a chunk that are side by side in a block. Read by the kernel (`struct Span`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First token, in the chunk.
    pub token: u32,
    pub tokens: u32,
    pub block: u32,
    /// First token, in the block.
    pub offset: u32,
}

/// The places of a chunk's tokens in a cache: inside it, and no two at one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spans {
    spans: Vec<Span>,
    tokens: u32,
    of: Geometry,
}

/// The limits that spans are checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub chunk_tokens: u32,
    pub blocks: u32,
    pub block_tokens: u32,
    pub tokens: TokenShare,
}

impl Spans {
    pub fn as_slice(&self) -> &[Span] {
        &self.spans
    }

    /// Number of the chunk's tokens that have a place.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.of
    }

    /// Those of them that are in this share of the chunk's tokens, for a cache with [`only`](PagedCache::only) the share.
    #[must_use]
    pub fn only(&self, tokens: TokenShare) -> Self {
        let within = |span: &Span| {
            let span = *span;
            let runs = tokens.runs(span.token..span.token + span.tokens);
            runs.map(move |run| Span {
                token: run.start,
                tokens: run.end - run.start,
                block: span.block,
                offset: span.offset + (run.start - span.token),
            })
        };
        let spans: Vec<Span> = self.spans.iter().flat_map(within).collect();
        Self {
            tokens: spans.iter().map(|span| span.tokens).sum(),
            spans,
            of: Geometry { tokens, ..self.of },
        }
    }

    fn check_distinct(&self) -> Result<(), MappingError> {
        let mut sorted: Vec<&Span> = self.spans.iter().collect();
        sorted.sort_unstable_by_key(|span| (span.block, span.offset));
        let twice = sorted
            .windows(2)
            .find(|pair| pair[0].block == pair[1].block && pair[1].offset < pair[0].offset + pair[0].tokens);
        match twice {
            None => Ok(()),
            Some(pair) => Err(MappingError::Twice {
                block: pair[1].block,
                offset: pair[1].offset,
            }),
        }
    }
}

impl PagedCache {
    /// The spans of `tokens` of a chunk, half-open.
    pub fn spans(&self, mapping: SlotMapping, tokens: Range<u32>) -> Result<Spans, MappingError> {
        let of = self.geometry();
        if tokens.start > tokens.end || tokens.end > of.chunk_tokens {
            return Err(MappingError::Tokens {
                first: tokens.start,
                end: tokens.end,
                chunk_tokens: of.chunk_tokens,
            });
        }
        let spans = match mapping {
            SlotMapping::Blocks { table, first_token } => self.spans_of_blocks(table, first_token, tokens)?,
            SlotMapping::Slots(slots) => self.spans_of_slots(slots, tokens)?,
        };
        let tokens = spans.iter().map(|span| span.tokens).sum();
        let spans = Spans { spans, tokens, of };
        spans.check_distinct()?;
        Ok(spans)
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            chunk_tokens: self.space().chunk_rows(),
            blocks: self.blocks(),
            block_tokens: self.block_tokens(),
            tokens: self.tokens(),
        }
    }

    fn spans_of_blocks(
        &self,
        table: &[u32],
        first_token: u64,
        tokens: Range<u32>,
    ) -> Result<Vec<Span>, MappingError> {
        let share = self.tokens();
        if !share.is_all() && !first_token.is_multiple_of(share.round()) {
            return Err(MappingError::FirstToken {
                token: first_token,
                round: share.round(),
            });
        }
        let mut spans = Vec::new();
        for run in share.runs(tokens) {
            self.add_spans_of_run(table, first_token, run, &mut spans)?;
        }
        Ok(spans)
    }

    /// The spans of neighbours that are all in the cache.
    fn add_spans_of_run(
        &self,
        table: &[u32],
        first_token: u64,
        run: Range<u32>,
        spans: &mut Vec<Span>,
    ) -> Result<(), MappingError> {
        let (block_tokens, share) = (self.block_tokens(), self.tokens());
        let mut token = run.start;
        while token < run.end {
            let at = share.before(first_token.saturating_add(token.into()));
            let index = usize::try_from(at / u64::from(block_tokens)).ok();
            let block = index.and_then(|index| table.get(index)).copied();
            let block = block.ok_or(MappingError::TableTooShort {
                blocks: table.len(),
                block_tokens,
                token: at,
            })?;
            // The offset is less than `block_tokens`.
            let offset = (at % u64::from(block_tokens)) as u32;
            let span = Span {
                token,
                tokens: (block_tokens - offset).min(run.end - token),
                block: self.check_block(block.into())?,
                offset,
            };
            token += span.tokens;
            spans.push(span);
        }
        Ok(())
    }

    fn spans_of_slots(&self, slots: &[i64], tokens: Range<u32>) -> Result<Vec<Span>, MappingError> {
        if slots.len() != tokens.len() {
            return Err(MappingError::Slots {
                tokens: tokens.len(),
                slots: slots.len(),
            });
        }
        let block_tokens = u64::from(self.block_tokens());
        let mut spans = Vec::<Span>::new();
        for (token, &slot) in tokens.zip(slots) {
            let Ok(slot) = u64::try_from(slot) else {
                continue;
            };
            let block = self.check_block(slot / block_tokens)?;
            let offset = (slot % block_tokens) as u32;
            match spans.last_mut() {
                Some(last)
                    if last.block == block
                        && last.offset + last.tokens == offset
                        && last.token + last.tokens == token =>
                {
                    last.tokens += 1;
                }
                _ => spans.push(Span {
                    token,
                    tokens: 1,
                    block,
                    offset,
                }),
            }
        }
        Ok(spans)
    }

    fn check_block(&self, block: u64) -> Result<u32, MappingError> {
        let known = u32::try_from(block).ok().filter(|&block| block < self.blocks());
        known.ok_or(MappingError::Block {
            block,
            blocks: self.blocks(),
        })
    }
}
