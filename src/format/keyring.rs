//! The keys of tenants, and what is made of them: chunk hashes that nobody else can compute, and headers and digests
//! that nobody else can make. `docs/FORMAT.md` section 8.
//!
//! A key is known by its id, which is a digest of it. So a wrong key is never taken for a forged object: its id is
//! another one. The first key of a tenant writes; all of them read.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::digest::{DigestKind, PlaneDigest};
use super::hash::{SpaceId, TenantSecret};
use super::header::{Header, HeaderError};
use super::hex;
use super::protection::Protection;
use super::space::Space;

const ID_CONTEXT: &str = "kvgate key id v1";
const HEADER_CONTEXT: &str = "kvgate header key v1";
const PLANE_CONTEXT: &str = "kvgate plane key v1";

/// Names a key in headers and messages. Says nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub [u8; 16]);

impl KeyId {
    pub fn of(key: &TenantSecret) -> Self {
        let digest = blake3::derive_key(ID_CONTEXT, key.as_bytes());
        Self(*digest.first_chunk().expect("16 of 32 bytes"))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

/// What one tenant has.
#[derive(Debug, Clone, Default)]
pub struct TenantKeys {
    /// What the tenant's spaces must be; None: each as it says.
    pub protection: Option<Protection>,
    /// Chunk hashes are keyed by it. It never changes: other hashes are other chunks.
    pub secret: Option<TenantSecret>,
    /// The first writes, all read.
    pub keys: Vec<TenantSecret>,
}

/// The keys of all tenants. Cheap to clone; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Keyring(Arc<RwLock<Arc<Tenants>>>);

type Tenants = HashMap<String, TenantKeys>;

/// A space that can't be served here, with what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error(
        "the space is {protection}, and there is no key of tenant {tenant:?} here: name one in the file of [keys] file"
    )]
    NoKey { tenant: String, protection: Protection },
    #[error(
        "spaces of tenant {tenant:?} must have the protection {demanded:?} here, not {given:?}, as the file of [keys] file \
         says: declare the space with it (vLLM and SGLang: the setting `protection`)",
        demanded = .demanded.to_string(), given = .given.to_string()
    )]
    Protection {
        tenant: String,
        demanded: Protection,
        given: Protection,
    },
}

impl Keyring {
    pub fn new(tenants: HashMap<String, TenantKeys>) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(tenants))))
    }

    /// Takes over another ring's keys, for all clones of this one.
    pub fn replace(&self, other: &Self) {
        let tenants = other.tenants();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = tenants;
    }

    fn tenants(&self) -> Arc<Tenants> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// One key, of the tenant without a name.
    pub fn of_one(protection: Protection, key: TenantSecret) -> Self {
        let tenant = TenantKeys {
            protection: Some(protection),
            secret: None,
            keys: vec![key],
        };
        Self::new(HashMap::from([(String::new(), tenant)]))
    }

    /// The secret that the chunk hashes of a space are keyed by.
    pub fn secret(&self, space: &Space) -> Option<TenantSecret> {
        self.tenants().get(space.tenant())?.secret.clone()
    }

    /// Whether the space may be served here.
    pub fn check(&self, space: &Space) -> Result<(), KeyError> {
        let tenants = self.tenants();
        let demanded = tenants.get(space.tenant()).and_then(|tenant| tenant.protection);
        match demanded {
            Some(demanded) if demanded != space.protection() => Err(KeyError::Protection {
                tenant: space.tenant().to_owned(),
                demanded,
                given: space.protection(),
            }),
            _ if space.protection().is_none() => Ok(()),
            _ => self.newest(space).map(drop),
        }
    }

    /// How new objects of a space are digested: with `open` where it is not protected.
    pub fn writes(&self, space: &Space, open: DigestKind) -> Result<PlaneDigest, KeyError> {
        match space.protection() {
            Protection::None => Ok(PlaneDigest::open(open)),
            Protection::Signed => {
                let key = self.newest(space)?;
                Ok(PlaneDigest::Signed(SigningKey::new(&key, space.id())))
            }
        }
    }

    /// How the planes of an object with this header are checked, once its header is known to be made with a key of the
    /// space's tenant, where the space demands one.
    pub fn reads(&self, space: &Space, header: &Header) -> Result<PlaneDigest, HeaderError> {
        let demanded = space.protection();
        let (seal, kind) = (header.seal.as_ref(), header.digest_kind);
        if demanded != kind.protection() || demanded.is_none() != seal.is_none() {
            return Err(HeaderError::Protection {
                demanded,
                actual: kind.protection(),
            });
        }
        let Some(seal) = seal else {
            return Ok(PlaneDigest::open(kind));
        };
        let tenants = self.tenants();
        let mut keys = tenants
            .get(space.tenant())
            .map_or(&[][..], |tenant| &tenant.keys)
            .iter();
        let key = keys.find(|key| KeyId::of(key) == seal.key_id);
        let key = key.ok_or_else(|| HeaderError::NoKey {
            key: seal.key_id,
            tenant: space.tenant().to_owned(),
        })?;
        let key = SigningKey::new(key, space.id());
        match header.tag(&key) == seal.tag {
            true => Ok(PlaneDigest::Signed(key)),
            false => Err(HeaderError::Forged(seal.key_id)),
        }
    }

    fn newest(&self, space: &Space) -> Result<TenantSecret, KeyError> {
        let tenants = self.tenants();
        let key = tenants.get(space.tenant()).and_then(|tenant| tenant.keys.first());
        key.cloned().ok_or_else(|| KeyError::NoKey {
            tenant: space.tenant().to_owned(),
            protection: space.protection(),
        })
    }
}

/// What a tenant's key makes for one space. Never printed.
#[derive(Clone)]
pub struct SigningKey {
    id: KeyId,
    header: TenantSecret,
    planes: TenantSecret,
}

impl SigningKey {
    fn new(key: &TenantSecret, space: SpaceId) -> Self {
        let material = zeroize::Zeroizing::new([*key.as_bytes(), space.0].concat());
        let derived = |context| TenantSecret::new(blake3::derive_key(context, &material));
        Self {
            id: KeyId::of(key),
            header: derived(HEADER_CONTEXT),
            planes: derived(PLANE_CONTEXT),
        }
    }

    pub fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn header(&self) -> &[u8; 32] {
        self.header.as_bytes()
    }

    pub(super) fn planes(&self) -> &[u8; 32] {
        self.planes.as_bytes()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.id)
    }
}

impl PartialEq for SigningKey {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}
