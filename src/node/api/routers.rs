//! What routers ask: `POST /v1/prefix`, `POST /query` (the conductor's convention) and `POST /check_blocks` (Dynamo's
//! hook for a shared cache).
//!
//! There is no index. A prompt's keys are computed from its tokens, and looked up as `/v1/lookup` does: same tiers, same
//! deadline. A router names a model instead of a space, so all kinds of KV that the model keeps are looked up together.
//! Hashes of a router's blocks can't be turned back into tokens. They are known here ([`BoundBlocks`]) once a call has
//! told tokens and block size; others count as absent, which costs a hit and never gives a wrong one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::body::{Reply, json as reply};
use super::bound_blocks::LocalHasher;
use super::lookup::{KINDS_MAX, ModelKinds, chunks, limited};
use super::problem::ApiProblem;
use super::{Api, body, spaces};
use crate::cache::gateway::Boundary;
use crate::format::{ChunkHash, ModelId, Space};
use crate::protocol::{LookupRequest, Tier};

/// A router's question. Fields that are not listed are ignored: routers send more than kvgate needs.
#[derive(Debug, Default, Deserialize)]
struct RouterRequest {
    /// Names the model exactly, where its name alone does not.
    space: Option<String>,
    /// The conductor's spelling.
    model: Option<String>,
    /// Dynamo's spelling.
    model_name: Option<String>,
    tenant_id: Option<String>,
    instance_id: Option<Value>,
    #[serde(alias = "tokens")]
    token_ids: Option<Vec<u32>>,
    /// Dynamo's local hashes: one for each block, of its tokens alone.
    block_hashes: Option<Vec<u64>>,
    /// Tokens of a router's block.
    block_size: Option<usize>,
    #[serde(alias = "salt")]
    cache_salt: Option<String>,
    lora_name: Option<String>,
    /// The adapter in the chunk hashes, where that is another word than `lora_name`.
    adapter: Option<String>,
    deadline_ms: Option<u64>,
}

/// `POST /v1/prefix`: tokens in, tokens of the prefix by tier out.
pub async fn prefix(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let request = read(api, request).await?;
    let found = Found::of_tokens(api, &request).await?;
    let tokens = found.tokens();
    Ok(reply(&json!({
        "space": found.kinds.first().id(),
        "chunk_tokens": found.chunk_tokens(),
        "prefix": tokens.all,
        "memory": tokens.memory,
        "disk": tokens.disk - tokens.memory,
        "s3": tokens.all - tokens.disk,
        "open": found.found.is_open,
    })))
}

/// `POST /query`: the answer is spelt as the question: `model` is the conductor's, `model_name` is Dynamo's.
pub async fn query(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let request = read(api, request).await?;
    if request.model.is_none() && request.model_name.is_none() {
        return Err(ApiProblem::bad(
            "name the model: `model` for the conductor's answer, `model_name` for Dynamo's",
        ));
    }
    let found = Found::of_tokens(api, &request).await?;
    let tokens = found.tokens().in_blocks(request.block_size);
    let instances = instances(api, &found.kinds, request.instance_id.as_ref());
    if request.model.is_none() {
        let scores: BTreeMap<&String, BTreeMap<&String, usize>> = instances
            .iter()
            .map(|(name, ranks)| (name, ranks.iter().map(|rank| (rank, tokens.all)).collect()))
            .collect();
        let of = |name| {
            let counts = json!({"longest_matched": tokens.all, "gpu": 0, "dp": {}, "cpu": tokens.memory, "disk": tokens.all});
            (name, counts)
        };
        let instances: BTreeMap<_, _> = instances.keys().map(of).collect();
        return Ok(reply(
            &json!({"scores": scores, "frequencies": [], "instances": instances}),
        ));
    }
    // Not cumulative there: a medium that adds nothing has 0.
    let disk = if tokens.all > tokens.memory { tokens.all } else { 0 };
    let of = |name| {
        let counts =
            json!({"longest_matched": tokens.all, "GPU": 0, "DP": {}, "CPU": tokens.memory, "DISK": disk});
        (name, counts)
    };
    let instances: BTreeMap<_, _> = instances.keys().map(of).collect();
    let tenant = request.tenant_id.unwrap_or_else(|| DEFAULT_TENANT.to_owned());
    Ok(reply(&BTreeMap::from([(tenant, instances)])))
}

/// `POST /check_blocks`: which of a prompt's blocks exist, as half-open ranges of their positions.
pub async fn check_blocks(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let request = read(api, request).await?;
    let (found, blocks, chunk_blocks) = match (&request.block_hashes, &request.token_ids) {
        (Some(hashes), None) => {
            api.check_count(hashes.len())?;
            let kinds = kinds(api, &request)?;
            let model = kinds.first().model_id();
            let (chunks, chunk_blocks) = {
                let mut bound = api.bound.lock().unwrap_or_else(PoisonError::into_inner);
                bound.chunks(model, hashes)
            };
            if chunks.is_empty() {
                return Ok(reply(&json!({"ranges": []})));
            }
            let found = Found::new(api, kinds, &chunks, &request).await?;
            (found, hashes.len(), (chunk_blocks, 1))
        }
        (None, Some(tokens)) => {
            let size = request.block_size.filter(|size| *size > 0);
            let size =
                size.ok_or_else(|| ApiProblem::bad("with `token_ids`, give `block_size` in tokens"))?;
            let found = Found::of_tokens(api, &request).await?;
            let blocks = tokens.len() / size;
            let chunk_tokens = found.chunk_tokens();
            (found, blocks, (chunk_tokens, size))
        }
        _ => return Err(ApiProblem::bad("give either `block_hashes` or `token_ids`")),
    };
    Ok(reply(
        &json!({"ranges": ranges(&found.present(), blocks, chunk_blocks)}),
    ))
}

async fn read(api: &Api, request: Request<Incoming>) -> Result<RouterRequest, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    body::parse(&text)
}

/// Blocks that chunks cover wholly, as half-open ranges. A chunk has `chunk.0 / chunk.1` blocks.
fn ranges(present: &[bool], blocks: usize, chunk: (usize, usize)) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    let mut first = 0;
    for run in present.chunk_by(|one, other| one == other) {
        let end = first + run.len();
        let from = (first * chunk.0).div_ceil(chunk.1);
        let to = (end * chunk.0 / chunk.1).min(blocks);
        if run[0] && from < to {
            ranges.push((from, to));
        }
        first = end;
    }
    ranges
}

const DEFAULT_TENANT: &str = "default";

/// The kinds of KV of the model that a router names, but drafts.
fn kinds(api: &Api, request: &RouterRequest) -> Result<ModelKinds, ApiProblem> {
    let named = request
        .space
        .as_ref()
        .map(|name| spaces::named(api, name))
        .transpose()?;
    let tenant = request.tenant_id.as_deref();
    let tenant = tenant
        .filter(|tenant| *tenant != DEFAULT_TENANT)
        .unwrap_or_default();
    let names = [&request.model, &request.model_name];
    let is_meant = |space: &Space| {
        if let Some(named) = &named {
            return named.model_id() == space.model_id();
        }
        let of_tenant = space.tenant() == tenant || (tenant.is_empty() && space.tenant() == DEFAULT_TENANT);
        of_tenant && names.into_iter().flatten().all(|name| name == space.model())
    };
    let mut meant = api.node.spaces();
    meant.retain(is_meant);
    let mut of_models = of_models(api, &meant, named.as_ref());
    let several = of_models.len();
    let mut spaces = of_models.pop().unwrap_or_default();
    spaces.retain(|space| space.draft().is_empty());
    if several > 1 {
        return Err(ApiProblem::new(
            StatusCode::CONFLICT,
            "ambiguous_model",
            format!(
                "{several} models fit (revisions, dtypes): give `space`, the id of a space of the one that is meant"
            ),
        ));
    }
    if spaces.is_empty() {
        return Err(ApiProblem::new(
            StatusCode::NOT_FOUND,
            "unknown_space",
            "no engine of this node has declared a space of that model and tenant: see `spaces` in /v1/status",
        ));
    }
    if spaces.len() > KINDS_MAX {
        return Err(ApiProblem::bad(format!(
            "a lookup is about at most {KINDS_MAX} spaces"
        )));
    }
    spaces.sort_by_key(|space| (!space.kind().is_full(), space.id()));
    Ok(ModelKinds::whole(spaces))
}

/// The spaces of each model apart: those that attached engines use together. A model's name says nothing of its dtype, and
/// the spaces of an engine's earlier set-up stay declared. So what no attached engine uses counts only where that is all.
fn of_models(api: &Api, spaces: &[Space], named: Option<&Space>) -> Vec<Vec<Space>> {
    let mut models: Vec<Vec<Space>> = Vec::new();
    let mut rest = spaces.to_vec();
    for used in api.node.engines().into_values() {
        for mut together in by_model(spaces.iter().filter(|space| used.contains(&space.key()))) {
            rest.retain(|space| !together.contains(space));
            // Another engine, or rank, of the same set-up.
            models.retain(|other| {
                let is_apart = !other.iter().any(|space| together.contains(space));
                if !is_apart {
                    let more: Vec<Space> = other
                        .iter()
                        .filter(|space| !together.contains(space))
                        .cloned()
                        .collect();
                    together.extend(more);
                }
                is_apart
            });
            models.push(together);
        }
    }
    models.retain(|model| named.is_none_or(|named| model.contains(named)));
    match models.is_empty() {
        true => by_model(rest.iter()),
        false => models,
    }
}

fn by_model<'a>(spaces: impl Iterator<Item = &'a Space>) -> Vec<Vec<Space>> {
    let mut models = HashMap::<ModelId, Vec<Space>>::new();
    spaces.for_each(|space| models.entry(space.model_id()).or_default().push(space.clone()));
    models.into_values().collect()
}

/// What was found of a prompt.
struct Found {
    kinds: ModelKinds,
    found: Boundary,
}

/// Leading tokens: those in memory, in memory or on disk, anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PrefixTokens {
    memory: usize,
    disk: usize,
    all: usize,
}

impl PrefixTokens {
    /// Complete blocks only.
    fn in_blocks(self, size: Option<usize>) -> Self {
        let size = size.unwrap_or(1).max(1);
        let whole = |tokens: usize| tokens / size * size;
        Self {
            memory: whole(self.memory),
            disk: whole(self.disk),
            all: whole(self.all),
        }
    }
}

impl Found {
    /// By tokens. If the request says the size of blocks, their hashes are known from then on. Not with `lora_name` alone:
    /// an engine may have bound the same blocks to chunks whose hashes have another word for the adapter.
    async fn of_tokens(api: &Arc<Api>, request: &RouterRequest) -> Result<Self, ApiProblem> {
        let tokens = request.token_ids.clone();
        let tokens = tokens.ok_or_else(|| ApiProblem::bad("give the prompt's `token_ids`"))?;
        let kinds = kinds(api, request)?;
        let space = kinds.first().clone();
        let asked = LookupRequest {
            tokens: Some(tokens),
            salt: request.cache_salt.clone(),
            adapter: request.adapter.clone().or_else(|| request.lora_name.clone()),
            ..LookupRequest::default()
        };
        let hashes = chunks(api, &space, &asked)?;
        let chunk_tokens = space.chunk_tokens() as usize;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        if let Some(size) = request.block_size
            && size > 0
            && chunk_tokens.is_multiple_of(size)
            && (request.adapter.is_some() || text(&request.lora_name).is_empty())
        {
            let hasher = LocalHasher::new(&text(&request.lora_name), &text(&request.cache_salt));
            let whole = hashes.len() * chunk_tokens;
            let tokens = asked.tokens.as_deref().unwrap_or_default();
            let local = hasher.blocks(&tokens[..whole], size);
            let mut bound = api.bound.lock().unwrap_or_else(PoisonError::into_inner);
            bound.bind(space.model_id(), None, &local, &hashes);
        }
        Self::new(api, kinds, &hashes, request).await
    }

    async fn new(
        api: &Api,
        kinds: ModelKinds,
        hashes: &[ChunkHash],
        request: &RouterRequest,
    ) -> Result<Self, ApiProblem> {
        api.check_count(hashes.len().saturating_mul(kinds.count()))?;
        let deadline = Instant::now() + limited(request.deadline_ms, api.options.lookup_deadline);
        let found = kinds.lookup(api, hashes, api.options.strategy, deadline).await;
        Ok(Self { kinds, found })
    }

    fn chunk_tokens(&self) -> usize {
        self.kinds.first().chunk_tokens() as usize
    }

    /// Whether each chunk can be used. With several kinds only the prefix up to the boundary can.
    fn present(&self) -> Vec<bool> {
        let first = &self.found.first;
        if self.kinds.count() == 1 && self.kinds.first().kind().is_full() {
            return (0..first.chunks).map(|i| first.mask.get(i)).collect();
        }
        vec![true; self.found.chunks]
    }

    /// A chunk is as far away as the farthest of what its kinds need of it.
    fn tokens(&self) -> PrefixTokens {
        let mut tiers = vec![Tier::Memory; self.found.chunks];
        for run in self.found.needed.iter().flat_map(|needed| &needed.tiers) {
            for tier in tiers.iter_mut().skip(run.from).take(run.count) {
                *tier = match (*tier, run.tier) {
                    (Tier::Memory, other) => other,
                    (Tier::Disk, Tier::S3) => Tier::S3,
                    (known, _) => known,
                };
            }
        }
        let memory = tiers.iter().take_while(|tier| **tier == Tier::Memory).count();
        let disk = tiers.iter().take_while(|tier| **tier != Tier::S3).count();
        let chunk = self.chunk_tokens();
        PrefixTokens {
            memory: memory * chunk,
            disk: disk * chunk,
            all: tiers.len() * chunk,
        }
    }
}

/// The instances that an answer is for, each with its data-parallel ranks: the one that was asked about, else the engines of
/// the model.
fn instances(api: &Api, kinds: &ModelKinds, asked: Option<&Value>) -> BTreeMap<String, BTreeSet<String>> {
    let mut instances = BTreeMap::<String, BTreeSet<String>>::new();
    for (engine, used) in api.node.engines() {
        if kinds.has_one_of(&used) {
            let (name, rank) = name_and_rank(&engine);
            let ranks = instances.entry(name.to_owned()).or_default();
            ranks.insert(rank.to_owned());
        }
    }
    let name = match asked {
        Some(Value::String(name)) => name.clone(),
        Some(Value::Null) | None => return instances,
        Some(other) => other.to_string(),
    };
    let ranks = instances.remove(&name);
    let ranks = ranks.unwrap_or_else(|| BTreeSet::from(["0".to_owned()]));
    BTreeMap::from([(name, ranks)])
}

/// vLLM appends a data-parallel rank to the name of the engine.
fn name_and_rank(engine: &str) -> (&str, &str) {
    let is_rank = |rank: &str| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit());
    match engine.rsplit_once("_dp") {
        Some((name, rank)) if is_rank(rank) => (name, rank),
        _ => (engine, "0"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_the_blocks_that_are_there_as_a_whole() {
        // Chunks of four blocks, the last one cut short by the prompt.
        assert_eq!(ranges(&[true, false, true, true], 15, (4, 1)), [(0, 4), (8, 15)]);
        // Blocks of three tokens, chunks of four.
        assert_eq!(ranges(&[true, true, false, true], 5, (4, 3)), [(0, 2), (4, 5)]);
        // Blocks of several chunks.
        assert_eq!(ranges(&[true, true, true, false], 2, (4, 8)), [(0, 1)]);
        assert!(ranges(&[], 0, (4, 1)).is_empty());
    }
}
