//! The readable form of a space, `space.json`, as it is found in a bucket.

use super::Inventory;
use crate::format::{Space, SpaceError, SpaceKey};
use crate::s3::object::{ErrorKind, ObjectError};

/// The largest possible space: 4096 planes and 64 extras of twice 512 bytes, with room for escapes.
const SPACE_JSON_BYTES_MAX: usize = 2 << 20;

/// The object at a space's `space.json`.
#[derive(Debug, Clone)]
pub enum SpaceJson {
    Good(Space),
    Missing,
    /// Its text is no space, or another one than its key says; with the reason.
    Damaged(String),
    /// Its format is unknown to this kvgate; with the reason.
    Unreadable(String),
}

impl SpaceJson {
    /// Stable word for the kind.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Good(_) => "ok",
            Self::Missing => "space_json_missing",
            Self::Damaged(_) => "space_json_damaged",
            Self::Unreadable(_) => "space_json_unreadable",
        }
    }

    fn read(key: SpaceKey, text: &[u8]) -> Self {
        let Ok(text) = std::str::from_utf8(text) else {
            return Self::Damaged("it is not UTF-8".into());
        };
        match Space::from_json(text) {
            Ok(space) if space.key() == key => Self::Good(space),
            Ok(space) => Self::Damaged(format!("it describes space {}", space.id())),
            Err(error @ SpaceError::Newer(_)) => Self::Unreadable(error.to_string()),
            Err(error) => Self::Damaged(error.to_string()),
        }
    }
}

impl Inventory {
    /// Reads a space's readable form and checks that it is that space.
    pub async fn read_space(&self, key: SpaceKey) -> Result<SpaceJson, ObjectError> {
        let name = self.keys.space_json(key);
        match self
            .store
            .read(&name, SPACE_JSON_BYTES_MAX, self.deadline())
            .await
        {
            Ok(text) => Ok(SpaceJson::read(key, &text)),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(SpaceJson::Missing),
            Err(error) => Err(error),
        }
    }
}
