//! Tests of the log: what a reader has read is what is announced, whatever it missed.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const SCHEME: &str = "blocks of 16";
const MANY: EventOptions = EventOptions {
    chunks_max: 100,
    removals_max: 100,
};

fn space(number: u8) -> SpaceKey {
    SpaceKey::from_hex(&format!("{number:032x}")).unwrap()
}

fn chunk(number: u8) -> BoundChunk {
    BoundChunk {
        hash: ChunkHash([number; 32]),
        parent: None,
        tokens: vec![number.into()],
        event: String::new(),
    }
}

fn key(number: u8) -> ChunkId {
    (space(0), ChunkHash([number; 32]))
}

/// Follows a stream as an engine does.
#[derive(Default)]
struct Reader {
    cursor: Option<String>,
    here: BTreeMap<(u8, Tier), BoundChunk>,
    lost: usize,
}

impl Reader {
    fn read(&mut self, events: &KvEvents, most: usize) -> bool {
        let answer = events.read(space(0), SCHEME, self.cursor.as_deref(), most);
        assert!(answer.events.len() <= most);
        if answer.is_lost {
            self.here.clear();
            self.lost += 1;
        }
        for event in answer.events {
            let key = (event.hash.0[0], event.tier);
            match event.stored {
                Some(bound) => assert!(self.here.insert(key, bound).is_none(), "announced once"),
                None => drop(self.here.remove(&key)),
            }
        }
        self.cursor = Some(answer.cursor);
        answer.is_end
    }

    fn catch_up(&mut self, events: &KvEvents, most: usize) -> Vec<(u8, Tier)> {
        while !self.read(events, most) {}
        self.here.keys().copied().collect()
    }
}

fn bind(events: &KvEvents, numbers: &[u8], here: &[(u8, Tier)]) {
    let chunks: Vec<BoundChunk> = numbers.iter().map(|number| chunk(*number)).collect();
    let hashes: Vec<ChunkHash> = chunks.iter().map(|chunk| chunk.hash).collect();
    events.bind(space(0), SCHEME, chunks);
    for (number, tier) in here.iter().filter(|(number, _)| numbers.contains(number)) {
        events.stored(&key(*number), *tier);
    }
    events.settle(space(0), SCHEME, &hashes);
}

#[test]
fn a_chunk_has_events_once_it_is_bound_and_here() {
    let (events, mut reader) = (KvEvents::new(MANY), Reader::default());
    events.stored(&key(1), Tier::Memory);
    assert!(reader.catch_up(&events, 9).is_empty(), "nobody has bound it");
    bind(&events, &[1, 2], &[(1, Tier::Memory)]);
    assert_eq!(reader.catch_up(&events, 9), [(1, Tier::Memory)]);
    assert_eq!(reader.here[&(1, Tier::Memory)], chunk(1));
    events.stored(&key(2), Tier::Memory);
    assert_eq!(
        reader.catch_up(&events, 9),
        [(1, Tier::Memory)],
        "it was not here when it was bound"
    );
    events.stored(&key(1), Tier::Disk);
    events.removed(&key(1), Tier::Memory);
    assert_eq!(reader.catch_up(&events, 9), [(1, Tier::Disk)]);
    events.removed(&key(1), Tier::Disk);
    events.stored(&key(1), Tier::Disk);
    assert!(
        reader.catch_up(&events, 9).is_empty(),
        "once it is gone it must be bound anew"
    );
    assert_eq!(events.counts(), (0, 2));
    assert_eq!(reader.lost, 0);
}

#[test]
fn streams_are_apart() {
    let events = KvEvents::new(MANY);
    bind(&events, &[1], &[(1, Tier::Memory)]);
    let of = |space, scheme| events.read(space, scheme, None, 9).events.len();
    assert_eq!(
        [of(space(0), SCHEME), of(space(1), SCHEME), of(space(0), "other")],
        [1, 0, 0]
    );
}

#[test]
fn a_cursor_of_another_incarnation_or_of_nonsense_is_lost() {
    let (events, other) = (KvEvents::new(MANY), KvEvents::new(MANY));
    bind(&events, &[1], &[(1, Tier::Memory)]);
    let cursor = other.read(space(0), SCHEME, None, 9).cursor;
    let own = format!("{:016x}", events.incarnation);
    let (beyond, began) = (format!("{own}-0-{}", u64::MAX), format!("{own}-{}-0", u64::MAX));
    for cursor in [cursor.as_str(), "", "0-0", "nonsense", &beyond, &began] {
        let answer = events.read(space(0), SCHEME, Some(cursor), 9);
        assert!(answer.is_lost && answer.events.len() == 1, "{cursor:?}");
    }
}

#[test]
fn with_no_room_the_oldest_have_no_events_any_more() {
    let options = EventOptions {
        chunks_max: 3,
        ..MANY
    };
    let (events, mut reader) = (KvEvents::new(options), Reader::default());
    let here: Vec<_> = (0..5).map(|number| (number, Tier::Memory)).collect();
    bind(&events, &[0, 1, 2], &here);
    assert_eq!(reader.catch_up(&events, 9), here[..3]);
    bind(&events, &[3, 4], &here);
    assert_eq!(reader.catch_up(&events, 9), here[2..]);
    assert_eq!(events.counts().0, 3);
    let off = KvEvents::new(EventOptions {
        chunks_max: 0,
        ..MANY
    });
    bind(&off, &[0], &here);
    assert!(off.read(space(0), SCHEME, None, 9).events.is_empty());
}

#[test]
fn with_no_room_the_beginning_of_a_prompt_has_events_longest() {
    let options = EventOptions {
        chunks_max: 3,
        ..MANY
    };
    let (events, mut reader) = (KvEvents::new(options), Reader::default());
    let parent = |number: u8| Some(ChunkHash([number.checked_sub(1)?; 32]));
    let prompt = (0..3).map(|number| BoundChunk {
        parent: parent(number),
        ..chunk(number)
    });
    events.bind(space(0), SCHEME, prompt.collect());
    let here: Vec<_> = (0..5).map(|number| (number, Tier::Memory)).collect();
    (0..3).for_each(|number| events.stored(&key(number), Tier::Memory));
    bind(&events, &[3], &here);
    let told = |numbers: &[u8]| -> Vec<_> { numbers.iter().map(|number| (*number, Tier::Memory)).collect() };
    assert_eq!(reader.catch_up(&events, 9), told(&[0, 1, 3]));
    bind(&events, &[4], &here);
    assert_eq!(reader.catch_up(&events, 9), told(&[0, 3, 4]));
}

#[test]
fn a_stream_without_chunks_leaves_nothing_behind_but_that_its_readers_lost_something() {
    let (events, mut reader) = (KvEvents::new(MANY), Reader::default());
    bind(&events, &[1], &[(1, Tier::Memory)]);
    reader.catch_up(&events, 9);
    events.removed(&key(1), Tier::Memory);
    // Of another stream.
    events.bind(space(1), SCHEME, vec![chunk(7)]);
    events.stored(&(space(1), ChunkHash([7; 32])), Tier::Memory);
    events.settle(space(1), SCHEME, &[]);
    assert_eq!(events.counts(), (1, 0));
    assert!(reader.catch_up(&events, 9).is_empty());
    assert_eq!(reader.lost, 1);
}

#[derive(Debug, Clone)]
enum Step {
    Bind(Vec<u8>),
    Stored(u8, Tier),
    Removed(u8, Tier),
    Read(usize),
    CatchUp,
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || prop_oneof![Just(Tier::Memory), Just(Tier::Disk)];
    prop_oneof![
        proptest::collection::vec(0..12_u8, 1..5).prop_map(Step::Bind),
        (0..12_u8, tier()).prop_map(|(number, tier)| Step::Stored(number, tier)),
        (0..12_u8, tier()).prop_map(|(number, tier)| Step::Removed(number, tier)),
        (1..4_usize).prop_map(Step::Read),
        Just(Step::CatchUp),
    ]
}

proptest! {
    /// Against a model: sets of what is here, and of what of it is bound. With few removals kept, readers lose some.
    #[test]
    fn a_reader_that_has_caught_up_has_what_is_announced(
        steps in proptest::collection::vec(step(), 1..120),
        removals_max in 1..6_usize,
    ) {
        let events = KvEvents::new(EventOptions { chunks_max: 100, removals_max });
        let (mut here, mut bound) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
        let mut reader = Reader::default();
        for step in steps {
            match step {
                Step::Bind(numbers) => {
                    let has = |number: &u8| [Tier::Memory, Tier::Disk].iter().any(|tier| here.contains(&(*number, *tier)));
                    bound.extend(numbers.iter().copied().filter(has));
                    let here: Vec<_> = here.iter().copied().collect();
                    bind(&events, &numbers, &here);
                }
                Step::Stored(number, tier) => {
                    here.insert((number, tier));
                    events.stored(&key(number), tier);
                }
                Step::Removed(number, tier) => {
                    here.remove(&(number, tier));
                    events.removed(&key(number), tier);
                    if ![Tier::Memory, Tier::Disk].iter().any(|tier| here.contains(&(number, *tier))) {
                        bound.remove(&number);
                    }
                }
                Step::Read(most) => drop(reader.read(&events, most)),
                Step::CatchUp => {
                    let announced: Vec<_> = here.iter().copied().filter(|(number, _)| bound.contains(number)).collect();
                    prop_assert_eq!(reader.catch_up(&events, 3), announced);
                }
            }
        }
        let announced: Vec<_> = here.iter().copied().filter(|(number, _)| bound.contains(number)).collect();
        prop_assert_eq!(reader.catch_up(&events, 3), announced);
        prop_assert!(events.counts().1 <= removals_max);
    }
}
