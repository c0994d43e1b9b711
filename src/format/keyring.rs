//! The keys of tenants, and what is made of them: chunk hashes that nobody else can compute, and headers and digests
//! that nobody else can make. `docs/FORMAT.md` section 8.
//!
//! A key is known by its id, which is a digest of it. So a wrong key is never taken for a forged object: its id is
//! another one. The first key of a tenant writes; all of them read.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::hkdf;
use ring::rand::{SecureRandom, SystemRandom};

use super::digest::{DigestKind, PlaneDigest};
use super::hash::{ChunkHash, SpaceId, TenantSecret};
use super::header::{Header, HeaderError};
use super::hex;
use super::protection::Protection;
use super::space::Space;

const ID_CONTEXT: &str = "kvgate key id v1";
const HEADER_CONTEXT: &str = "kvgate header key v1";
const PLANE_CONTEXT: &str = "kvgate plane key v1";
const ENCRYPTION_CONTEXT: &[u8] = b"kvgate encryption key v1";
pub(super) const SALT_LEN: usize = 24;

/// Names a key in headers and messages. Says nothing about the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub [u8; 16]);

impl KeyId {
    pub fn of(key: &TenantSecret) -> Self {
        let digest = blake3::derive_key(ID_CONTEXT, key.as_bytes());
        Self(*digest.first_chunk().expect("16 of 32 bytes"))
    }

    /// From the 32 hex digits in messages.
    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode("a key's id", text).ok().map(Self)
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
pub struct Keyring(Arc<Ring>);

#[derive(Debug, Default)]
struct Ring {
    tenants: RwLock<Arc<Tenants>>,
    /// How often they were replaced.
    changes: AtomicU64,
}

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
    #[error("the system has no random numbers")]
    Random,
}

impl Keyring {
    pub fn new(tenants: HashMap<String, TenantKeys>) -> Self {
        Self(Arc::new(Ring {
            tenants: RwLock::new(Arc::new(tenants)),
            changes: AtomicU64::new(0),
        }))
    }

    /// Takes over another ring's keys, for all clones of this one. Returns the tenants that lost a key.
    pub fn replace(&self, other: &Self) -> Vec<String> {
        let after = other.tenants();
        let before = {
            let mut tenants = self.0.tenants.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *tenants, Arc::clone(&after))
        };
        self.0.changes.fetch_add(1, Ordering::SeqCst);
        let ids = |of: &TenantKeys| of.keys.iter().map(KeyId::of).collect::<Vec<_>>();
        let has_lost = |(name, of): &(&String, &TenantKeys)| {
            let now = after.get(*name).map(ids).unwrap_or_default();
            ids(of).iter().any(|id| !now.contains(id))
        };
        before
            .iter()
            .filter(has_lost)
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// How often the keys were replaced.
    pub fn changes(&self) -> u64 {
        self.0.changes.load(Ordering::SeqCst)
    }

    fn tenants(&self) -> Arc<Tenants> {
        Arc::clone(&self.0.tenants.read().unwrap_or_else(PoisonError::into_inner))
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
        self.permits(space)?;
        match space.protection().is_none() {
            true => Ok(()),
            false => self.newest(space).map(drop),
        }
    }

    /// Whether the tenant's spaces may have this one's protection.
    fn permits(&self, space: &Space) -> Result<(), KeyError> {
        let tenants = self.tenants();
        let demanded = tenants.get(space.tenant()).and_then(|tenant| tenant.protection);
        match demanded {
            Some(demanded) if demanded != space.protection() => Err(KeyError::Protection {
                tenant: space.tenant().to_owned(),
                demanded,
                given: space.protection(),
            }),
            _ => Ok(()),
        }
    }

    /// How new objects of a space are digested: with `open` where it is not protected, and in memory where it is
    /// encrypted.
    pub fn writes(&self, space: &Space, open: DigestKind) -> Result<PlaneDigest, KeyError> {
        self.permits(space)?;
        match space.protection() {
            Protection::None => Ok(PlaneDigest::open(open)),
            Protection::Signed => {
                let key = self.newest(space)?;
                Ok(PlaneDigest::Signed(SigningKey::new(&key, space.id())))
            }
            Protection::Encrypted => self.newest(space).map(|_| PlaneDigest::open(open)),
        }
    }

    /// What encrypts a new object of this chunk, with that key or else the newest; None where the space is not
    /// encrypted. What was signed before its key was taken away still goes out as it is.
    pub fn encrypts(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        key: Option<KeyId>,
    ) -> Result<Option<PlaneCipher>, KeyError> {
        self.permits(space)?;
        if space.protection() != Protection::Encrypted {
            return Ok(None);
        }
        let mut salt = [0; SALT_LEN];
        SystemRandom::new()
            .fill(&mut salt)
            .map_err(|_| KeyError::Random)?;
        let key = match key {
            Some(id) => self.key(space.tenant(), id).ok_or_else(|| no_key(space))?,
            None => self.newest(space)?,
        };
        Ok(Some(PlaneCipher::new(&key, space, chunk, salt)))
    }

    /// How the planes of an object with this header are checked, once its header is known to be made with a key of the
    /// space's tenant, where the space demands one.
    pub fn reads(&self, space: &Space, header: &Header) -> Result<PlaneCheck, HeaderError> {
        let demanded = space.protection();
        let (seal, kind) = (header.seal.as_ref(), header.digest_kind);
        if demanded != kind.protection() || demanded.is_none() != seal.is_none() {
            return Err(HeaderError::Protection {
                demanded,
                actual: kind.protection(),
            });
        }
        let Some(seal) = seal else {
            return Ok(PlaneCheck::Digest(PlaneDigest::open(kind)));
        };
        let key = self.key(space.tenant(), seal.key_id);
        let key = &key.ok_or_else(|| HeaderError::NoKey {
            key: seal.key_id,
            tenant: space.tenant().to_owned(),
        })?;
        let signing = SigningKey::new(key, space.id());
        if header.tag(&signing) != seal.tag {
            return Err(HeaderError::Forged(seal.key_id));
        }
        Ok(match demanded {
            Protection::Encrypted => PlaneCheck::Open(PlaneCipher::new(key, space, &header.chunk, seal.salt)),
            _ => PlaneCheck::Digest(PlaneDigest::Signed(signing)),
        })
    }

    /// Whether the key is here by now that a header named.
    pub fn has(&self, error: &HeaderError) -> bool {
        match error {
            HeaderError::NoKey { key, tenant } => self.key(tenant, *key).is_some(),
            _ => true,
        }
    }

    /// Whether the tenant of a space has this key here.
    pub fn has_key(&self, space: &Space, id: KeyId) -> bool {
        self.key(space.tenant(), id).is_some()
    }

    fn key(&self, tenant: &str, id: KeyId) -> Option<TenantSecret> {
        let tenants = self.tenants();
        let mut keys = tenants.get(tenant)?.keys.iter();
        keys.find(|key| KeyId::of(key) == id).cloned()
    }

    /// Whether the key of an object is the one that writes in its space now. In a space without protection none is.
    pub fn is_newest(&self, space: &Space, key: Option<KeyId>) -> bool {
        let newest = || self.newest(space).ok().map(|newest| KeyId::of(&newest));
        space.protection().is_none() || key.is_some() && key == newest()
    }

    fn newest(&self, space: &Space) -> Result<TenantSecret, KeyError> {
        let tenants = self.tenants();
        let key = tenants.get(space.tenant()).and_then(|tenant| tenant.keys.first());
        key.cloned().ok_or_else(|| no_key(space))
    }
}

fn no_key(space: &Space) -> KeyError {
    KeyError::NoKey {
        tenant: space.tenant().to_owned(),
        protection: space.protection(),
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

/// How the planes of an object are checked.
#[derive(Debug, Clone, PartialEq)]
pub enum PlaneCheck {
    /// By their digests.
    Digest(PlaneDigest),
    /// By decrypting them.
    Open(PlaneCipher),
}

impl PlaneCheck {
    /// The digest to compute while bytes arrive.
    pub fn digest(&self) -> Option<&PlaneDigest> {
        match self {
            Self::Digest(digest) => Some(digest),
            Self::Open(_) => None,
        }
    }
}

/// What encrypts and decrypts the planes of one object. Each object has a key of its own, made of the tenant's key, the
/// space, the chunk and a random salt; the nonce is the number of the plane. So no key sees a nonce twice.
#[derive(Clone)]
pub struct PlaneCipher {
    key: SigningKey,
    salt: [u8; SALT_LEN],
    cipher: Arc<LessSafeKey>,
}

impl PlaneCipher {
    fn new(key: &TenantSecret, space: &Space, chunk: &ChunkHash, salt: [u8; SALT_LEN]) -> Self {
        let of_tenant = hkdf::Salt::new(hkdf::HKDF_SHA256, &salt).extract(key.as_bytes());
        let (space_id, info) = (space.id(), ENCRYPTION_CONTEXT);
        let info = [info, space_id.as_bytes(), chunk.as_bytes()];
        let of_object = of_tenant
            .expand(&info, &AES_256_GCM)
            .expect("32 bytes are few for HKDF");
        Self {
            key: SigningKey::new(key, space_id),
            salt,
            cipher: Arc::new(LessSafeKey::new(UnboundKey::from(of_object))),
        }
    }

    pub fn key_id(&self) -> KeyId {
        self.key.id()
    }

    /// Encrypts a plane in place; returns its tag, at the left of 32 bytes.
    pub fn seal(&self, plane: usize, bytes: &mut [u8]) -> [u8; 32] {
        let tag = self
            .cipher
            .seal_in_place_separate_tag(nonce(plane), Aad::empty(), bytes);
        let tag = tag.expect("a plane has less than 64 GiB");
        let mut digest = [0; 32];
        digest[..16].copy_from_slice(tag.as_ref());
        digest
    }

    /// Decrypts a plane in place. False if it is not what was encrypted: its bytes are of no use then.
    pub fn open(&self, plane: usize, bytes: &mut [u8], digest: &[u8; 32]) -> bool {
        let tag = *digest.first_chunk::<16>().expect("16 of 32 bytes");
        let tag = Tag::from(tag);
        self.cipher
            .open_in_place_separate_tag(nonce(plane), Aad::empty(), tag, bytes, 0..)
            .is_ok()
    }

    /// The header of the encrypted object.
    pub fn sealed(&self, header: Header) -> Header {
        header.sealed(&self.key, self.salt)
    }
}

fn nonce(plane: usize) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&(plane as u64).to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl fmt::Debug for PlaneCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PlaneCipher({})", self.key.id)
    }
}

impl PartialEq for PlaneCipher {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.salt == other.salt
    }
}
