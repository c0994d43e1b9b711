//! Which spaces of a bucket a command is about.

use super::{Inventory, SpaceJson};
use crate::format::{ModelId, Space, SpaceKey};
use crate::s3::object::ObjectError;

/// All spaces that have all that is given. A space without a readable form only by its own key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Select {
    /// The model that this space is of, with all its kinds of KV.
    pub space: Option<SpaceKey>,
    pub model: Option<String>,
    pub revision: Option<String>,
    pub tenant: Option<String>,
}

impl Select {
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it takes a space. `wanted`: the model of the space that is given.
    pub(super) fn takes(&self, key: SpaceKey, space: Option<&Space>, wanted: Option<ModelId>) -> bool {
        let same = |wanted: &Option<String>, is: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| is == Some(wanted))
        };
        let by_space = match (self.space, space) {
            // It may be a part of any model and tenant.
            (None, None) => false,
            (None, Some(_)) => true,
            (Some(given), _) => {
                given == key || wanted.is_some_and(|model| space.map(Space::model_id) == Some(model))
            }
        };
        by_space
            && same(&self.model, space.map(Space::model))
            && same(&self.revision, space.map(Space::revision))
            && same(&self.tenant, space.map(Space::tenant))
    }
}

impl Inventory {
    /// The model of the space that is given.
    pub(super) async fn model_of(&self, select: &Select) -> Result<Option<ModelId>, ObjectError> {
        Ok(match select.space {
            None => None,
            Some(key) => match self.read_space(key).await? {
                SpaceJson::Good(space) => Some(space.model_id()),
                _ => None,
            },
        })
    }
}
