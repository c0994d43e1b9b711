//! Headers from a bucket: no bytes make the parser panic, and a header that it accepts is written back the same.
#![no_main]

use kvgate::format::{DigestKind, Header, HeaderError, header_len};
use libfuzzer_sys::fuzz_target;

const DIGEST_LEN: usize = 32;

fuzz_target!(|data: &[u8]| {
    let _ = check(data);
    if let &[planes, kind, ref fields @ ..] = data {
        // A right digest is not to be guessed: without it only the first checks would ever run.
        let refused = check(&sealed(planes.into(), kind.into(), fields)).err();
        assert!(!matches!(
            refused,
            Some(
                HeaderError::Magic
                    | HeaderError::Version(_)
                    | HeaderError::Short { .. }
                    | HeaderError::HeaderLen { .. }
                    | HeaderError::Digest
            )
        ));
    }
});

fn check(bytes: &[u8]) -> Result<(), HeaderError> {
    let header = Header::parse(bytes)?;
    let mut written = vec![0xee; header_len(header.digests.len())];
    header.write(&mut written);
    assert_eq!(written, bytes[..written.len()]);
    Ok(())
}

/// `fields` as the header of a chunk of so many planes, with a right magic, version, lengths, own digest and, where
/// `kind` is one, digest kind.
fn sealed(planes: u32, kind: u32, fields: &[u8]) -> Vec<u8> {
    let len = header_len(planes as usize);
    let mut bytes = fields.to_vec();
    bytes.resize(len, 0);
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"KVGATE\r\n");
    put(12, &u32::try_from(len).unwrap().to_le_bytes());
    put(116, &planes.to_le_bytes());
    let kind = DigestKind::from_code(kind);
    let protection = kind.unwrap_or_default().protection();
    put(8, &protection.format_version().to_le_bytes());
    if let Some(kind) = kind {
        put(128, &kind.code().to_le_bytes());
        put(132, &u32::try_from(kind.width()).unwrap().to_le_bytes());
    }
    // A kind of KV that mostly is one, and whether it is a draft's.
    bytes[176] %= 6;
    bytes[184] %= 3;
    bytes[177..180].fill(0);
    bytes[185..188].fill(0);
    let digest = blake3::hash(&bytes[..len - DIGEST_LEN]);
    bytes[len - DIGEST_LEN..].copy_from_slice(digest.as_bytes());
    bytes
}
