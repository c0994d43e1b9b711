//! A space from a configuration or from a bucket: nothing panics, and the canonical form is one: it reads as the same
//! space and is written as itself.
#![no_main]

use kvgate::format::Space;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|json: &str| {
    let Ok(space) = Space::from_json(json) else { return };
    let again = Space::from_json(space.canonical_json()).expect("the canonical form is a space");
    assert_eq!(again.id(), space.id());
    assert_eq!(again.canonical_json(), space.canonical_json());
    let layout = space.layout();
    assert_eq!(layout.planes(), space.planes().len());
    assert_eq!(layout.object_len(), layout.header_len() + layout.payload_len());
    assert_eq!(
        layout.payload_len() as u64,
        space.row_bytes() * u64::from(space.chunk_rows())
    );
});
