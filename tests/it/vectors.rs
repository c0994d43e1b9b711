//! The documented format: `tests/data/vectors.json` was made by the Python implementation in `tests/reference`.

use kvgate::format::{
    ChunkHash, ChunkHasher, DigestKind, Extra, Header, KeyPrefix, Keyring, Kind, Mask, PlaneCheck,
    PlaneDigest, Run, Space, SpaceId, TenantKeys, TenantSecret,
};
use serde_json::Value;

fn vectors() -> Value {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/vectors.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn cases(vectors: &Value, name: &str) -> Vec<Value> {
    let cases = vectors[name].as_array().unwrap().clone();
    assert!(!cases.is_empty(), "{name}");
    cases
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from_digit(digit.into(), 16).unwrap())
        .collect()
}

fn bytes_from_0(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 131 + (i >> 8) * 17 + 7) as u8).collect()
}

fn tokens(value: &Value) -> Vec<u32> {
    if let Some(list) = value.as_array() {
        return list
            .iter()
            .map(|token| u32::try_from(number(token)).unwrap())
            .collect();
    }
    let [a, b, m, n] = ["a", "b", "m", "n"].map(|name| value[name].as_u64().unwrap());
    (0..n).map(|i| u32::try_from((a * i + b) % m).unwrap()).collect()
}

fn space_named(vectors: &Value, name: &Value) -> Space {
    let spaces = cases(vectors, "spaces");
    let case = spaces.iter().find(|case| case["name"] == *name).unwrap();
    Space::from_json(&case["input"].to_string()).unwrap()
}

#[test]
fn spaces() {
    for case in cases(&vectors(), "spaces") {
        let name = &case["name"];
        let space =
            Space::from_json(&case["input"].to_string()).unwrap_or_else(|error| panic!("{name}: {error}"));
        if let Some(canonical) = case["canonical"].as_str() {
            assert_eq!(space.canonical_json(), canonical, "{name}");
        }
        assert_eq!(
            blake3::hash(space.canonical_json().as_bytes()).to_string(),
            case["canonical_blake3"],
            "{name}"
        );
        assert_eq!(space.id().to_string(), case["space_id"], "{name}");
        assert_eq!(space.model_id().to_string(), case["model_id"], "{name}");
        assert_eq!(space.chunk_rows() as usize, number(&case["chunk_rows"]), "{name}");
        let layout = space.layout();
        assert_eq!(layout.planes(), number(&case["planes"]), "{name}");
        assert_eq!(layout.payload_len(), number(&case["chunk_bytes"]), "{name}");
        assert_eq!(layout.header_len(), number(&case["header_len"]), "{name}");
        assert_eq!(layout.object_len(), number(&case["object_len"]), "{name}");
        let offset = |plane: usize| layout.plane(plane).start - layout.header_len();
        let offsets = (0..layout.planes()).flat_map(|plane| (offset(plane) as u64).to_le_bytes());
        let digest = blake3::hash(&offsets.collect::<Vec<_>>()).to_string();
        assert_eq!(digest, case["plane_offsets_blake3"], "{name}");
        let again = Space::from_json(space.canonical_json()).unwrap();
        assert_eq!(
            again.canonical_json(),
            space.canonical_json(),
            "{name}: the canonical form is a fixed point"
        );
    }
}

#[test]
fn invalid_spaces() {
    for case in cases(&vectors(), "invalid_spaces") {
        let result = Space::from_json(&case["input"].to_string());
        assert!(
            result.is_err(),
            "accepted although {}: {}",
            case["reason"],
            case["input"]
        );
    }
}

#[test]
fn needed_chunks() {
    for case in cases(&vectors(), "needed") {
        let kind: Kind = serde_json::from_value(case["kind"].clone()).unwrap();
        let chunk_tokens = u32::try_from(number(&case["chunk_tokens"])).unwrap();
        let needed = kind.needed(number(&case["boundary"]), chunk_tokens);
        assert_eq!(
            [needed.start, needed.end],
            [number(&case["chunks"][0]), number(&case["chunks"][1])],
            "{case}"
        );
    }
}

#[test]
fn chains() {
    let vectors = vectors();
    for case in cases(&vectors, "chains") {
        let name = &case["name"];
        let space = space_named(&vectors, &case["space"]);
        let secret = case["tenant_secret"]
            .as_str()
            .map(|hex| TenantSecret::from_hex(hex).unwrap());
        let hasher = ChunkHasher::new(&space, secret.as_ref()).unwrap();
        let bytes = |value: &Value| value.as_str().map(unhex).unwrap_or_default();
        let root = hasher
            .root(&bytes(&case["salt"]), &bytes(&case["adapter"]))
            .unwrap();
        assert_eq!(root.to_string(), case["root"], "{name}");
        let chunk_tokens = space.chunk_tokens();
        let extra = |value: &Value| Extra {
            offset: u32::try_from(number(&value["chunk"]) * chunk_tokens as usize + number(&value["offset"]))
                .unwrap(),
            bytes: unhex(text(&value["hex"])),
        };
        let extras: Vec<Extra> = case["extras"].as_array().unwrap().iter().map(extra).collect();
        let tokens = tokens(&case["tokens"]);
        let chain = hasher.chain(&root, &tokens, &extras).unwrap();
        let expected: Vec<&str> = case["chunks"].as_array().unwrap().iter().map(text).collect();
        assert_eq!(
            chain.iter().map(ToString::to_string).collect::<Vec<_>>(),
            expected,
            "{name}"
        );

        // Chunk by chunk is the same.
        let mut parent = root;
        for (i, tokens) in tokens.chunks_exact(chunk_tokens as usize).enumerate() {
            let start = i as u32 * chunk_tokens;
            let here = extras
                .iter()
                .filter(|extra| (start..start + chunk_tokens).contains(&extra.offset));
            let here: Vec<Extra> = here
                .map(|extra| Extra {
                    offset: extra.offset - start,
                    bytes: extra.bytes.clone(),
                })
                .collect();
            parent = hasher.chunk(&parent, tokens, &here).unwrap();
            assert_eq!(parent, chain[i], "{name}");
        }
    }
}

#[test]
fn keys() {
    for case in cases(&vectors(), "keys") {
        let prefix = KeyPrefix::new(text(&case["prefix"]));
        let space: SpaceId = text(&case["space_id"]).parse().unwrap();
        let chunk: ChunkHash = text(&case["chunk"]).parse().unwrap();
        assert_eq!(prefix.chunk(space.into(), &chunk), case["chunk_key"]);
        assert_eq!(prefix.space_json(space.into()), case["space_key"]);
    }
}

#[test]
fn digests() {
    for case in cases(&vectors(), "digests") {
        let bytes = bytes_from_0(number(&case["n"]));
        let crc = u64::from_str_radix(text(&case["crc64nvme"]), 16).unwrap();
        assert_eq!(PlaneDigest::Crc64Nvme.of(&bytes)[..8], crc.to_le_bytes());
        assert_eq!(hex(&PlaneDigest::Blake3.of(&bytes)), case["blake3"]);
    }
}

/// The keys that a case's tenant has.
fn keyring(space: &Space, case: &Value) -> Keyring {
    let key = case["tenant_key"]
        .as_str()
        .map(|hex| TenantSecret::from_hex(hex).unwrap());
    let tenant = TenantKeys {
        keys: key.into_iter().collect(),
        ..TenantKeys::default()
    };
    Keyring::new([(space.tenant().to_owned(), tenant)].into())
}

/// The header of a named case, as its own bytes, and what it must say.
fn header(vectors: &Value, case: &Value) -> (Space, ChunkHash, Vec<u8>) {
    let space = space_named(vectors, &case["space"]);
    let payload = bytes_from_0(space.layout().payload_len());
    let keys = keyring(&space, case);
    if let Some(salt) = case["salt"].as_str() {
        return encrypted(&space, &keys, case, salt);
    }
    let digest = match text(&case["digest"]) {
        "crc64nvme" => PlaneDigest::Crc64Nvme,
        "blake3" => PlaneDigest::Blake3,
        _ => keys.writes(&space, DigestKind::Crc64Nvme).unwrap(),
    };
    let start = space.layout().header_len();
    let plane = |plane| {
        let bytes = space.layout().plane(plane);
        digest.of(&payload[bytes.start - start..bytes.end - start])
    };
    let chunk: ChunkHash = text(&case["chunk"]).parse().unwrap();
    let header = Header {
        space_id: space.id(),
        chunk,
        parent: text(&case["parent"]).parse().unwrap(),
        tokens: space.chunk_tokens(),
        payload_len: payload.len() as u64,
        kind: space.kind(),
        is_draft: !space.draft().is_empty(),
        digest_kind: digest.kind(),
        digests: (0..space.layout().planes()).map(plane).collect(),
        seal: None,
    };
    let header = digest.seal(header);
    let mut bytes = vec![0xff; number(&case["header_len"])];
    header.write(&mut bytes);
    assert_eq!(Header::parse(&bytes).as_ref(), Ok(&header));
    assert_eq!(
        header.expect(&space, &chunk, &keys),
        Ok(PlaneCheck::Digest(digest))
    );
    (space, chunk, bytes)
}

/// The same of an encrypted object. Its salt is random, so it comes from the header that the reference made; all else
/// is made here.
fn encrypted(space: &Space, keys: &Keyring, case: &Value, salt: &str) -> (Space, ChunkHash, Vec<u8>) {
    let chunk: ChunkHash = text(&case["chunk"]).parse().unwrap();
    let theirs = Header::parse(&unhex(text(&case["header"]))).unwrap();
    assert_eq!(hex(&theirs.seal.as_ref().unwrap().salt), salt);
    let PlaneCheck::Open(cipher) = theirs.expect(space, &chunk, keys).unwrap() else {
        panic!("it is encrypted")
    };
    let layout = space.layout();
    let plain = bytes_from_0(layout.payload_len());
    let mut payload = plain.clone();
    let in_payload = |plane| {
        let bytes = layout.plane(plane);
        bytes.start - layout.header_len()..bytes.end - layout.header_len()
    };
    let digests: Vec<[u8; 32]> = (0..layout.planes())
        .map(|plane| cipher.seal(plane, &mut payload[in_payload(plane)]))
        .collect();
    assert_eq!(blake3::hash(&payload).to_string(), case["payload_blake3"]);
    let header = Header {
        digests,
        seal: None,
        ..theirs.clone()
    };
    let header = cipher.sealed(header);
    assert_eq!(header, theirs);
    for plane in 0..layout.planes() {
        assert!(cipher.open(plane, &mut payload[in_payload(plane)], &header.digests[plane]));
    }
    assert_eq!(payload, plain);
    let mut bytes = vec![0xff; number(&case["header_len"])];
    header.write(&mut bytes);
    (space.clone(), chunk, bytes)
}

#[test]
fn headers() {
    let vectors = vectors();
    for case in cases(&vectors, "headers") {
        let (_, _, bytes) = header(&vectors, &case);
        assert_eq!(
            blake3::hash(&bytes).to_string(),
            case["header_blake3"],
            "{}",
            case["name"]
        );
        if let Some(expected) = case["header"].as_str() {
            assert_eq!(hex(&bytes), expected, "{}", case["name"]);
        }
    }
}

#[test]
fn bad_headers() {
    let vectors = vectors();
    let headers = cases(&vectors, "headers");
    for case in cases(&vectors, "bad_headers") {
        let base = headers
            .iter()
            .find(|header| header["name"] == case["base"])
            .unwrap();
        let (space, chunk, mut bytes) = header(&vectors, base);
        for patch in case["patches"].as_array().unwrap() {
            let (at, new) = (number(&patch["offset"]), unhex(text(&patch["hex"])));
            bytes[at..at + new.len()].copy_from_slice(&new);
        }
        if case["reseal"] == true {
            let body = bytes.len() - 32;
            let digest = blake3::hash(&bytes[..body]);
            bytes[body..].copy_from_slice(digest.as_bytes());
        }
        assert_eq!(
            blake3::hash(&bytes).to_string(),
            case["header_blake3"],
            "{}",
            case["reason"]
        );
        let result =
            Header::parse(&bytes).and_then(|header| header.expect(&space, &chunk, &keyring(&space, base)));
        assert!(result.is_err(), "accepted although {}", case["reason"]);
    }
}

#[test]
fn masks() {
    for case in cases(&vectors(), "masks") {
        let n = number(&case["n"]);
        let mut mask = Mask::new(n);
        case["bits"]
            .as_array()
            .unwrap()
            .iter()
            .for_each(|bit| mask.set(number(bit)));
        assert_eq!(mask.to_hex(), case["hex"]);
        assert_eq!(Mask::from_bytes(n, &unhex(text(&case["hex"]))), Ok(mask));
    }
}

#[test]
fn run_hints() {
    let hashes = |case: &Value, member: &str| -> Vec<ChunkHash> {
        let hashes = case[member].as_array().unwrap().iter();
        hashes
            .map(|hash| ChunkHash(unhex(text(hash)).try_into().unwrap()))
            .collect()
    };
    for case in cases(&vectors(), "runs") {
        let run = Run::of(&hashes(&case, "following"));
        assert_eq!(run.text(), text(&case["text"]));
        let read = Run::parse(text(&case["text"])).unwrap();
        assert_eq!(read.agrees(&hashes(&case, "reader")), number(&case["agrees"]));
    }
}
