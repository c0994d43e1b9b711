//! Spaces.

use std::ffi::c_char;

use kvgate::format::TenantSecret;

use crate::borrow::{result, slice, text};
use crate::status::{Failed, Status, call};

/// `kvgate_space`.
pub struct Space {
    pub of: kvgate::format::Space,
    /// Chunk hashes are keyed by it.
    pub secret: Option<TenantSecret>,
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_new(json: *const c_char, space: *mut *mut Space) -> Status {
    // SAFETY: as the caller says.
    call(|| unsafe { make(json, None, space) })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_with_secret(
    json: *const c_char,
    secret: *const u8,
    secret_len: usize,
    space: *mut *mut Space,
) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let secret = unsafe { slice("secret", secret, secret_len)? };
        let secret = secret.try_into().map_err(|_| {
            Failed::argument(format!(
                "a tenant's secret has 32 bytes, and secret_len is {secret_len}"
            ))
        })?;
        // SAFETY: as the caller says.
        unsafe { make(json, Some(TenantSecret::new(secret)), space) }
    })
}

/// # Safety
/// The pointers are NULL, or valid as the header says.
unsafe fn make(
    json: *const c_char,
    secret: Option<TenantSecret>,
    space: *mut *mut Space,
) -> Result<(), Failed> {
    // SAFETY: as the caller says.
    let (json, space) = unsafe { (text("json", json)?, result("space", space)?) };
    let json = json.ok_or_else(|| Failed::argument("json is NULL"))?;
    let of = kvgate::format::Space::from_json(json).map_err(Failed::argument)?;
    space.write(Box::into_raw(Box::new(Space { of, secret })));
    Ok(())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_chunk_tokens(space: *const Space) -> u32 {
    // SAFETY: as the caller says.
    unsafe { space.as_ref() }.map_or(0, |space| space.of.chunk_tokens())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_free(space: *mut Space) {
    if !space.is_null() {
        // SAFETY: it was made by a call above, and nothing uses it any more.
        drop(unsafe { Box::from_raw(space) });
    }
}
