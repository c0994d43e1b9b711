//! The spaces of two nodes compared: why what one stores is no hit on the other.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value};

use super::Finding;
use crate::config::Config;
use crate::engine::client::{Client, DaemonAddress};
use crate::format::Space;

const CHECK: &str = "spaces";
/// A file of this length holds thousands of spaces.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// They follow from the others.
const DERIVED: [&str; 3] = ["space_id", "model_id", "object_bytes"];
/// Fields that a side may lack, with the value that they have then.
const ABSENT: &str = "(not told)";

/// The spaces of a node, each by its fields.
struct Node {
    name: String,
    spaces: Vec<Map<String, Value>>,
}

/// `sources`: one is compared with this node's, two with each other.
pub async fn check(config: &Config, sources: &[String], limit: Duration) -> Vec<Finding> {
    let own = config.api.socket.display().to_string();
    let sources: Vec<String> = match sources {
        [one] => vec![own, one.clone()],
        more => more.to_vec(),
    };
    let mut nodes = Vec::new();
    for source in &sources {
        match read(config, source, limit).await {
            Ok(node) => nodes.push(node),
            Err(why) => {
                let advice = "Give --compare http://HOST:PORT of its [api] listen, its socket, or a file with its GET /v1/status";
                return vec![Finding::failed(CHECK, format!("{source}: {why}"), advice)];
            }
        }
    }
    let (first, others) = nodes.split_at(1);
    first
        .iter()
        .flat_map(|first| others.iter().flat_map(|other| compare(first, other)))
        .collect()
}

async fn read(config: &Config, source: &str, limit: Duration) -> Result<Node, String> {
    let client = |target| {
        Client::new(target)
            .trusting(config.api.socket_owner)
            .with_patience(limit)
    };
    let status = if let Some(place) = source.strip_prefix("http://") {
        let authority = place.split('/').next().unwrap_or(place);
        let found = tokio::net::lookup_host(authority)
            .await
            .map_err(|error| error.to_string())?;
        let address = found.into_iter().next().ok_or("its name gives no address")?;
        client(DaemonAddress::Tcp(address))
            .status()
            .await
            .map_err(|error| error.to_string())?
    } else {
        let path = Path::new(source.strip_prefix("unix:").unwrap_or(source));
        let file = std::fs::metadata(path).map_err(|error| error.to_string())?;
        if file.is_file() && file.len() <= FILE_BYTES_MAX {
            let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
            serde_json::from_str(&text).map_err(|error| format!("it is not JSON: {error}"))?
        } else {
            let target = DaemonAddress::Unix(path.to_owned());
            client(target).status().await.map_err(|error| error.to_string())?
        }
    };
    let spaces = spaces_of(&status)?;
    Ok(Node {
        name: source.to_owned(),
        spaces,
    })
}

/// Of a status, of a space.json, or of a list of these.
fn spaces_of(json: &Value) -> Result<Vec<Map<String, Value>>, String> {
    let list = json.get("spaces").or(Some(json)).and_then(Value::as_array);
    let list = list.cloned().unwrap_or_else(|| vec![json.clone()]);
    list.into_iter()
        .map(|space| match space {
            Value::Object(fields) if fields.contains_key("space_id") => Ok(fields),
            other => {
                let space = Space::from_json(&other.to_string()).map_err(|error| error.to_string())?;
                Ok(fields_of(&space))
            }
        })
        .collect()
}

/// As a status has them.
fn fields_of(space: &Space) -> Map<String, Value> {
    let fields = serde_json::json!({
        "space_id": space.id().to_string(),
        "model": space.model(),
        "revision": space.revision(),
        "tenant": space.tenant(),
        "protection": space.protection(),
        "kind": space.kind(),
        "draft": space.draft(),
        "chunk_tokens": space.chunk_tokens(),
        "dtype": space.dtype().name(),
        "hash": space.hash(),
        "planes": space.planes_in_words(),
        "shard": space.shard(),
        "extra": space.extra(),
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn compare(one: &Node, other: &Node) -> Vec<Finding> {
    let ids = |node: &Node| -> BTreeSet<String> {
        let ids = node
            .spaces
            .iter()
            .filter_map(|space| space["space_id"].as_str().map(str::to_owned));
        ids.collect()
    };
    for node in [one, other] {
        if node.spaces.is_empty() {
            let seen = format!("no engine has declared a space at {}", node.name);
            let advice = "Send that node's engine a prompt of some thousand tokens, and compare again";
            return vec![Finding::warning(CHECK, seen, advice)];
        }
    }
    let (of_one, of_other) = (ids(one), ids(other));
    let both = of_one.intersection(&of_other).count();
    let mut found = Vec::new();
    if both > 0 {
        let seen = format!("{both} spaces are the same at {} and {}", one.name, other.name);
        found.push(Finding::ok(CHECK, seen));
    }
    let missing = |space: &&Map<String, Value>, there: &BTreeSet<String>| {
        !space["space_id"].as_str().is_some_and(|id| there.contains(id))
    };
    let left: Vec<_> = other
        .spaces
        .iter()
        .filter(|space| missing(space, &of_one))
        .collect();
    for space in one.spaces.iter().filter(|space| missing(space, &of_other)) {
        let nearest = left.iter().min_by_key(|other| differences(space, other).len());
        let Some(nearest) = nearest else { continue };
        let differ = differences(space, nearest);
        let model = space["model"].as_str().unwrap_or_default();
        let fields: Vec<String> = differ
            .iter()
            .map(|(field, here, there)| {
                format!("{field} is {here} at {} and {there} at {}", one.name, other.name)
            })
            .collect();
        let advice: BTreeSet<&str> = differ.iter().map(|(field, ..)| advice(field)).collect();
        let seen = format!(
            "{model}: the spaces differ, so neither hits what the other stores: {}",
            fields.join("; ")
        );
        found.push(Finding::failed(
            CHECK,
            seen,
            advice.into_iter().collect::<Vec<_>>().join(". "),
        ));
    }
    if found.iter().all(|finding| finding.verdict == super::Verdict::Ok) {
        let seen = "what one stores is a hit on the other, if both use the same bucket and [s3] prefix";
        found.push(Finding::ok(CHECK, seen));
    }
    found
}

/// Field, and its value on both sides.
fn differences(one: &Map<String, Value>, other: &Map<String, Value>) -> Vec<(String, String, String)> {
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let mut found = Vec::new();
    for name in names.into_iter().filter(|name| !DERIVED.contains(&name.as_str())) {
        let (here, there) = (one.get(name), other.get(name));
        match (here, there) {
            (Some(Value::Object(here)), Some(Value::Object(there))) if name == "extra" => {
                let keys: BTreeSet<&String> = here.keys().chain(there.keys()).collect();
                for key in keys.into_iter().filter(|key| here.get(*key) != there.get(*key)) {
                    let text =
                        |side: &Map<String, Value>| side.get(key).map_or(ABSENT.into(), Value::to_string);
                    found.push((format!("extra {key}"), text(here), text(there)));
                }
            }
            (Some(here), Some(there)) if here != there => {
                found.push((name.clone(), here.to_string(), there.to_string()));
            }
            // Equal; or an older version, which does not tell it.
            _ => {}
        }
    }
    found
}

fn advice(field: &str) -> &'static str {
    match field {
        "model" => {
            "Serve both by the same model name (`kvgate_model` of the connector, or --served-model-name)"
        }
        "revision" => "Use the same commit or files of the weights on both nodes",
        "dtype" => "Give both engines the same KV cache dtype (--kv-cache-dtype) and model dtype (--dtype)",
        "chunk_tokens" => "Give both the same chunk_tokens in kv_connector_extra_config",
        "tenant" => "Give both the same tenant in kv_connector_extra_config",
        "protection" => {
            "Give both the same protection in kv_connector_extra_config, the one that the tenant's keys demand"
        }
        "hash" => "vLLM names chunks by tokens, SGLang by its own page hashes: neither finds the other's",
        "kind" | "planes" => {
            "Both must keep the same layers: compare model, quantisation, drafts and windows of both engines"
        }
        "draft" => "Give both engines the same draft model",
        "shard" => {
            "Split the model in the same way on both: pipeline stages, and tensor parallelism across nodes"
        }
        _ => "Make that setting of the engines the same on both nodes: docs/VLLM.md has what must be equal",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn node(name: &str, change: impl Fn(&mut Value)) -> Node {
        let mut json = serde_json::json!({
            "model": "m", "revision": "abc", "mha": {"layers": 2, "heads": 2, "head_dim": 8}, "extra": {"rope": "1"},
        });
        change(&mut json);
        Node {
            name: name.into(),
            spaces: spaces_of(&json).unwrap(),
        }
    }

    #[test]
    fn each_field_that_differs_is_named_with_both_values() {
        let one = node("a", |_| {});
        let same = compare(&one, &node("b", |_| {}));
        assert!(
            same.iter().all(|finding| finding.verdict == Verdict::Ok),
            "{same:?}"
        );
        for (field, value, words) in [
            ("revision", "def".into(), ["revision", "\"abc\"", "\"def\""]),
            ("chunk_tokens", 128.into(), ["chunk_tokens", "256", "128"]),
            ("tenant", "t".into(), ["tenant", "\"\"", "\"t\""]),
            ("dtype", "float16".into(), ["dtype", "bfloat16", "float16"]),
            (
                "extra",
                serde_json::json!({"rope": "2"}),
                ["extra rope", "\"1\"", "\"2\""],
            ),
            (
                "mha",
                serde_json::json!({"layers": 3, "heads": 2, "head_dim": 8}),
                ["planes", "2 x", "3 x"],
            ),
        ] {
            let other = node("b", |json| json[field] = Value::clone(&value));
            let found = compare(&one, &other);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].verdict, Verdict::Failed);
            for word in words {
                assert!(found[0].seen.contains(word), "{word}: {found:?}");
            }
        }
    }
}
