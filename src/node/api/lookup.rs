//! `POST /v1/lookup`, as JSON or as bytes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use hyper::{Request, StatusCode};
use percent_encoding::percent_decode_str;
use tokio::time::Instant;

use super::body::{OCTETS, Reply, content_type, json};
use super::problem::ApiProblem;
use super::{Api, body, spaces};
use crate::cache::gateway::{Boundary, Kinds, NeededRun};
use crate::format::{ChunkHash, ChunkHasher, Mask, Space, SpaceId, SpaceKey};
use crate::metrics::trace::{self, CallTrace};
use crate::protocol::{LookupAnswer, LookupRequest, Needed, Strategy, Tier};

pub async fn lookup(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let sampled = api.sample("lookup", request.headers());
    let is_binary = content_type(request.headers(), &CONTENT_TYPE, &[OCTETS]);
    let wants_binary = content_type(request.headers(), &ACCEPT, &[OCTETS]);
    let query = request.uri().query().unwrap_or_default().to_owned();
    let mut wants_tiers = false;
    let body = body::read(request, api.options.body_max, api.options.timeout).await?;
    let (request, hashes) = if is_binary {
        let Query { request, what, tiers } = from_query(&query)?;
        wants_tiers = tiers;
        match what {
            Items::Hashes => (request, Some(hashes_of(&body)?)),
            Items::Tokens => {
                let tokens = Some(tokens_of(&body)?);
                (LookupRequest { tokens, ..request }, None)
            }
        }
    } else {
        (body::parse::<LookupRequest>(&body)?, None)
    };
    let space = spaces::named(api, &request.space)?;
    let hashes = match hashes {
        Some(hashes) => hashes,
        None => chunks(api, &space, &request)?,
    };
    api.check_count(hashes.len())?;
    let options = &api.options;
    let deadline = Instant::now() + limited(request.deadline_ms, options.lookup_deadline);
    let strategy = request.strategy.map_or(options.strategy, Into::into);
    let kinds = ModelKinds::named(api, space, &request)?;
    // Each hash is asked for in each space.
    api.check_count(hashes.len().saturating_mul(kinds.count()))?;
    let found = kinds.lookup(api, &hashes, strategy, deadline);
    let trace = sampled.map(|sampled| {
        let about = vec![
            ("model", kinds.first().model().to_owned()),
            ("chunks", hashes.len().to_string()),
        ];
        CallTrace::new(options.spans_max, Some(sampled.export(about)))
    });
    let found = trace::part_of(trace.clone(), api.figures.lookup.of(found)).await;
    api.figures.looked_up(&found.first);
    if let Some(trace) = trace {
        trace.end(vec![
            ("prefix", found.first.mask.prefix().to_string()),
            ("boundary", found.chunks.to_string()),
            ("unknown", found.first.unknown.count().to_string()),
        ]);
    }
    if let Some(ms) = request.pin_ms {
        let until = Instant::now() + Duration::from_millis(ms).min(api.node.options().pin_max);
        kinds.pin(api, &hashes, &found, until);
    }
    if request.prefetch {
        let until = Instant::now() + options.load_deadline;
        kinds.prefetch(api, &hashes, &found, until);
    }
    Ok(match wants_binary {
        true => binary(&found, wants_tiers),
        false => json(&kinds.answer(found)),
    })
}

/// The kinds of KV that a lookup is about: one space, or several of one model.
pub(super) struct ModelKinds {
    spaces: Vec<Space>,
    drafts: Vec<Space>,
    state_every: usize,
    lookahead: usize,
}

/// Spaces of a lookup, at most: models have a handful of kinds.
pub(super) const KINDS_MAX: usize = 16;

impl ModelKinds {
    fn named(api: &Api, space: Space, request: &LookupRequest) -> Result<Self, ApiProblem> {
        if request.with.len() + request.drafts.len() >= KINDS_MAX {
            return Err(ApiProblem::bad(format!(
                "a lookup is about at most {KINDS_MAX} spaces"
            )));
        }
        let model = space.model_id();
        let named = |names: &[String]| {
            let spaces = names.iter().map(|name| {
                let other = spaces::named(api, name)?;
                match other.model_id() == model {
                    true => Ok(other),
                    false => Err(ApiProblem::bad(format!(
                        "space {name} is of another model ({}): its chunks have other hashes",
                        other.model()
                    ))),
                }
            });
            spaces.collect::<Result<Vec<Space>, ApiProblem>>()
        };
        let (mut spaces, drafts) = (named(&request.with)?, named(&request.drafts)?);
        spaces.insert(0, space);
        let distinct: HashSet<SpaceId> = spaces.iter().chain(&drafts).map(Space::id).collect();
        if distinct.len() < spaces.len() + drafts.len() {
            return Err(ApiProblem::bad("a lookup names each space once"));
        }
        Ok(Self {
            spaces,
            drafts,
            state_every: request.state_every.unwrap_or_default(),
            lookahead: request.lookahead.unwrap_or_default(),
        })
    }

    /// All spaces of a model. One at least.
    pub fn whole(spaces: Vec<Space>) -> Self {
        Self {
            spaces,
            drafts: Vec::new(),
            state_every: 0,
            lookahead: 0,
        }
    }

    /// The space that an answer's masks are about.
    pub fn first(&self) -> &Space {
        &self.spaces[0]
    }

    /// Whether an engine that uses these spaces is of this model.
    pub fn has_one_of(&self, used: &HashSet<SpaceKey>) -> bool {
        self.spaces.iter().any(|space| used.contains(&space.key()))
    }

    pub fn count(&self) -> usize {
        self.spaces.len() + self.drafts.len()
    }

    pub async fn lookup(
        &self,
        api: &Api,
        hashes: &[ChunkHash],
        strategy: Strategy,
        deadline: Instant,
    ) -> Boundary {
        let kinds = Kinds {
            spaces: &self.spaces,
            drafts: &self.drafts,
            state_every: self.state_every,
            lookahead: self.lookahead,
        };
        api.node
            .gateway()
            .boundary(kinds, hashes, strategy, deadline)
            .await
    }

    /// Spaces, each with the chunks that an engine needs of it, as far as they are there.
    fn needed<'a>(&'a self, found: &'a Boundary) -> impl Iterator<Item = (&'a Space, &'a NeededRun)> {
        let drafts = self.drafts.iter().zip(&found.drafts);
        self.spaces.iter().zip(&found.needed).chain(drafts)
    }

    fn pin(&self, api: &Api, hashes: &[ChunkHash], found: &Boundary, until: Instant) {
        let gateway = api.node.gateway();
        if let ([space], []) = (&self.spaces[..], &self.drafts[..])
            && space.kind().is_full()
        {
            // Also what is there behind a gap.
            gateway.pin(space, &present(hashes, &found.first.mask), until);
            return;
        }
        for (space, run) in self.needed(found) {
            gateway.pin(space, &hashes[run.chunks.clone()], until);
        }
    }

    fn prefetch(&self, api: &Api, hashes: &[ChunkHash], found: &Boundary, until: Instant) {
        for (space, NeededRun { chunks, .. }) in self.needed(found) {
            if !chunks.is_empty() {
                api.node
                    .prefetch(space.clone(), hashes[chunks.clone()].to_vec(), until);
            }
        }
    }

    fn answer(&self, found: Boundary) -> LookupAnswer {
        let needed = self
            .needed(&found)
            .enumerate()
            .map(|(index, (space, run))| Needed {
                space: space.id(),
                kind: space.kind(),
                chunks: (run.chunks.start, run.chunks.end),
                tiers: run.tiers.clone(),
                inferred: run.inferred.iter().map(|run| (run.start, run.end)).collect(),
                draft: index >= self.spaces.len(),
            });
        let needed = needed.collect();
        let first = found.first;
        LookupAnswer {
            chunks: first.chunks,
            mask: first.mask.to_hex(),
            unknown: first.unknown.to_hex(),
            inferred: first.inferred.to_hex(),
            prefix: first.prefix,
            tiers: first.tiers,
            boundary: found.chunks,
            full: found.full,
            open: found.is_open,
            needed,
            error: found.error.as_ref().map(ToString::to_string),
        }
    }
}

fn present(hashes: &[ChunkHash], mask: &Mask) -> Vec<ChunkHash> {
    let of = hashes.iter().enumerate().filter(|(i, _)| mask.get(*i));
    of.map(|(_, hash)| *hash).collect()
}

/// An answer as bytes: the masks present, unknown and inferred one after the other; with `tiers` also those in
/// memory and those on disk. Headers have the numbers.
fn binary(of_kinds: &Boundary, tiers: bool) -> Reply {
    let found = &of_kinds.first;
    let masks = [&found.mask, &found.unknown, &found.inferred];
    let mut bytes: Vec<u8> = masks.iter().flat_map(|mask| mask.as_bytes()).copied().collect();
    if tiers {
        bytes.extend_from_slice(found.within(Tier::Memory).as_bytes());
        bytes.extend_from_slice(found.within(Tier::Disk).as_bytes());
    }
    let mut answer = body::bytes(StatusCode::OK, OCTETS, Bytes::from(bytes));
    let numbers = |numbers: Vec<usize>| {
        let digits: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        HeaderValue::from_str(&digits.join(",")).expect("digits and commas")
    };
    let drafts = of_kinds.drafts.iter().map(|run| run.chunks.len()).collect();
    let runs = of_kinds.needed.iter().chain(&of_kinds.drafts);
    let inferred = runs
        .map(|run| run.inferred.iter().map(ExactSizeIterator::len).sum())
        .collect();
    let headers = [
        ("x-kvgate-prefix", HeaderValue::from(found.prefix)),
        ("x-kvgate-chunks", HeaderValue::from(found.chunks)),
        ("x-kvgate-boundary", HeaderValue::from(of_kinds.chunks)),
        ("x-kvgate-full", HeaderValue::from(of_kinds.full)),
        ("x-kvgate-open", HeaderValue::from(u16::from(of_kinds.is_open))),
        ("x-kvgate-drafts", numbers(drafts)),
        ("x-kvgate-inferred", numbers(inferred)),
    ];
    for (name, value) in headers {
        answer.headers_mut().insert(name, value);
    }
    answer
}

/// The requested time, within the limit.
pub fn limited(ms: Option<u64>, most: Duration) -> Duration {
    ms.map_or(most, |ms| Duration::from_millis(ms).min(most))
}

enum Items {
    Hashes,
    Tokens,
}

struct Query {
    request: LookupRequest,
    /// Whether the body has hashes or tokens.
    what: Items,
    /// Whether the answer has the tiers.
    tiers: bool,
}

fn from_query(query: &str) -> Result<Query, ApiProblem> {
    let mut request = LookupRequest::default();
    let mut items = Items::Hashes;
    let mut tiers = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = value.replace('+', " ");
        let value = percent_decode_str(&value)
            .decode_utf8()
            .map_err(|_| ApiProblem::bad(format!("the query's {name} is not UTF-8")))?
            .into_owned();
        let number = || {
            let bad = |_| ApiProblem::bad(format!("the query's {name}={value} is not a number"));
            value.parse::<u64>().map_err(bad)
        };
        match name {
            "space" => request.space = value,
            "with" => request.with.push(value),
            "drafts" => request.drafts.push(value),
            "state_every" => request.state_every = Some(chunks_of(number()?)),
            "lookahead" => request.lookahead = Some(chunks_of(number()?)),
            "salt" => request.salt = Some(value),
            "adapter" => request.adapter = Some(value),
            "strategy" => {
                request.strategy = Some(match value.as_str() {
                    "exact" => Strategy::Exact,
                    "prefix" => Strategy::Prefix,
                    _ => return Err(ApiProblem::bad("the query's strategy is exact or prefix")),
                });
            }
            "deadline_ms" => request.deadline_ms = Some(number()?),
            "pin_ms" => request.pin_ms = Some(number()?),
            "prefetch" => request.prefetch = value == "true" || value == "1",
            "tiers" => tiers = value == "true" || value == "1",
            "items" => match value.as_str() {
                "hashes" => items = Items::Hashes,
                "tokens" => items = Items::Tokens,
                _ => return Err(ApiProblem::bad("the query's items is hashes or tokens")),
            },
            _ => {
                let name: String = name.chars().take(40).collect();
                return Err(ApiProblem::bad(format!(
                    "the query's {name:?} is not known: there are space, with, drafts, state_every, lookahead, items, salt, adapter, strategy, deadline_ms, pin_ms, prefetch, tiers"
                )));
            }
        }
    }
    Ok(Query {
        request,
        what: items,
        tiers,
    })
}

/// More chunks than a prompt can have are as good as that.
fn chunks_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn hashes_of(body: &[u8]) -> Result<Vec<ChunkHash>, ApiProblem> {
    let (hashes, rest) = body.as_chunks::<32>();
    match rest.is_empty() {
        true => Ok(hashes.iter().map(|hash| ChunkHash(*hash)).collect()),
        false => Err(ApiProblem::bad(format!(
            "hashes have 32 bytes each, and the body has {}",
            body.len()
        ))),
    }
}

fn tokens_of(body: &[u8]) -> Result<Vec<u32>, ApiProblem> {
    let (tokens, rest) = body.as_chunks::<4>();
    match rest.is_empty() {
        true => Ok(tokens.iter().map(|token| u32::from_le_bytes(*token)).collect()),
        false => Err(ApiProblem::bad(format!(
            "tokens are u32 little-endian, 4 bytes each, and the body has {}",
            body.len()
        ))),
    }
}

pub(super) fn chunks(
    api: &Api,
    space: &Space,
    request: &LookupRequest,
) -> Result<Vec<ChunkHash>, ApiProblem> {
    match (&request.hashes, &request.tokens) {
        (Some(hashes), None) if request.salt.is_none() && request.adapter.is_none() => Ok(hashes.clone()),
        (Some(_), None) => Err(ApiProblem::bad(
            "`salt` and `adapter` are in the hashes already: give them with tokens only",
        )),
        (None, Some(tokens)) => {
            // Checks the count before the work of hashing.
            api.check_count(tokens.len() / space.chunk_tokens() as usize)?;
            let bad = |error: crate::format::HashError| ApiProblem::bad(error.to_string());
            let secret = api.node.gateway().keyring().secret(space);
            let hasher = ChunkHasher::new(space, secret.as_ref()).map_err(bad)?;
            let text = |text: &Option<String>| text.clone().unwrap_or_default().into_bytes();
            let root = hasher
                .root(&text(&request.salt), &text(&request.adapter))
                .map_err(bad)?;
            hasher.chain(&root, tokens, &[]).map_err(bad)
        }
        _ => Err(ApiProblem::bad("give either `hashes` or `tokens`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_is_described_for_machines() {
        let doc: serde_json::Value =
            serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
        let parameters = doc["paths"]["/v1/lookup"]["post"]["parameters"]
            .as_array()
            .unwrap();
        let mut described: Vec<&str> = parameters
            .iter()
            .filter(|parameter| parameter["in"] == "query")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        let refused = from_query("other=1").map(drop).unwrap_err();
        let (_, known) = refused.detail.split_once("there are ").unwrap();
        let mut known: Vec<&str> = known.split(", ").collect();
        described.sort_unstable();
        known.sort_unstable();
        assert_eq!(described, known);
        for name in known {
            if let Err(refused) = from_query(&format!("{name}=1")) {
                let detail = refused.detail;
                assert!(!detail.contains("is not known"), "{detail}");
            }
        }
    }
}
