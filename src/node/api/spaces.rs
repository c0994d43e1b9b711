//! `PUT /v1/spaces`, and how a call names a space.

use std::sync::Arc;

use hyper::Request;
use hyper::body::Incoming;

use super::body::{Reply, json};
use super::problem::ApiProblem;
use super::{Api, body};
use crate::format::{Space, SpaceId, SpaceKey};
use crate::protocol::{PlaneInfo, SpaceInfo};

/// `PUT /v1/spaces`.
pub async fn declare(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let text = std::str::from_utf8(&text).map_err(|_| ApiProblem::bad("the body is not UTF-8"))?;
    let space = Space::from_json(text).map_err(|error| ApiProblem::bad(error.to_string()))?;
    Ok(json(&info(&api.node.declare(space)?)))
}

fn info(space: &Space) -> SpaceInfo {
    let layout = space.layout();
    let planes = space.planes().iter().enumerate().map(|(index, plane)| {
        let bytes = layout.plane(index);
        PlaneInfo {
            plane: plane.clone(),
            offset: bytes.start - layout.header_len(),
            bytes: bytes.len(),
        }
    });
    SpaceInfo {
        space_id: space.id(),
        model_id: space.model_id(),
        kind: space.kind(),
        draft: space.draft().to_owned(),
        chunk_tokens: space.chunk_tokens(),
        chunk_bytes: layout.payload_len(),
        object_bytes: layout.object_len(),
        header_bytes: layout.header_len(),
        planes: planes.collect(),
    }
}

/// The space that a call names: by its id, or the id's first half. It may be served.
pub fn named(api: &Api, name: &str) -> Result<Space, ApiProblem> {
    let space = declared(api, name)?;
    Ok(api.node.space(space.key())?)
}

/// The same, also where keys don't let it be served.
pub fn declared(api: &Api, name: &str) -> Result<Space, ApiProblem> {
    let id = name.parse::<SpaceId>().ok();
    let key = id.map(SpaceKey::from).or_else(|| SpaceKey::from_hex(name));
    let key = key.ok_or_else(|| {
        let name: String = name.chars().take(80).collect();
        ApiProblem::bad(format!(
            "{name:?} is not a space id: 64 hex digits, or its first 32"
        ))
    })?;
    let space = api.node.declared(key)?;
    match id {
        Some(id) if id != space.id() => {
            Err(ApiProblem::not_found(format!("space {id} was not declared here")))
        }
        _ => Ok(space),
    }
}
