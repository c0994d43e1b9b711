//! Spaces.

use std::ffi::c_char;

use crate::borrow::{result, text};
use crate::status::{Failed, Status, call};

/// `kvgate_space`.
pub struct Space(pub kvgate::format::Space);

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_new(json: *const c_char, space: *mut *mut Space) -> Status {
    call(|| {
        // SAFETY: as the caller says.
        let (json, space) = unsafe { (text("json", json)?, result("space", space)?) };
        let json = json.ok_or_else(|| Failed::argument("json is NULL"))?;
        let made = kvgate::format::Space::from_json(json).map_err(Failed::argument)?;
        space.write(Box::into_raw(Box::new(Space(made))));
        Ok(())
    })
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_chunk_tokens(space: *const Space) -> u32 {
    // SAFETY: as the caller says.
    unsafe { space.as_ref() }.map_or(0, |space| space.0.chunk_tokens())
}

/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvgate_space_free(space: *mut Space) {
    if !space.is_null() {
        // SAFETY: it was made by `kvgate_space_new`, and nothing uses it any more.
        drop(unsafe { Box::from_raw(space) });
    }
}
