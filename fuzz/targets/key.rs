//! Keys that a bucket lists: nothing panics, our keys are read, and a key that is read is the one that we would write.
#![no_main]

use kvgate::format::{ChunkHash, Key, KeyPrefix, SpaceId, SpaceKey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&str, [[u8; 32]; 2], usize, char, &str)| {
    let (prefix, [space, chunk], at, other, noise) = input;
    let keys = KeyPrefix::new(prefix);
    let (space, chunk) = (SpaceKey::from(SpaceId(space)), ChunkHash(chunk));
    let ours = [
        (keys.chunk(space, &chunk), Key::Chunk(space, chunk)),
        (keys.space_json(space), Key::SpaceJson(space)),
    ];
    for (text, key) in ours {
        assert_eq!(keys.parse(&text), Some(key));
        let mut changed: Vec<char> = text.chars().collect();
        let at = at % changed.len();
        changed[at] = other;
        check(&keys, &changed.into_iter().collect::<String>());
    }
    check(&keys, noise);
    check(&keys, &format!("{}{noise}", keys.as_str()));
});

fn check(keys: &KeyPrefix, text: &str) {
    let written = match keys.parse(text) {
        Some(Key::Chunk(space, chunk)) => keys.chunk(space, &chunk),
        Some(Key::SpaceJson(space)) => keys.space_json(space),
        None => return,
    };
    assert_eq!(written, text);
}
