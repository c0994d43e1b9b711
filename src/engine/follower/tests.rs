//! Tests of what is known, without a node. `tests/it/events.rs` has one.

use super::*;
use crate::protocol::KvEvent;

fn chunk(number: u8) -> BoundChunk {
    BoundChunk {
        hash: ChunkHash([number; 32]),
        parent: None,
        tokens: Vec::new(),
        event: String::new(),
    }
}

fn answer(events: impl IntoIterator<Item = (u8, Tier, bool)>) -> EventsAnswer {
    let event = |(number, tier, is_stored)| match is_stored {
        true => KvEvent::stored(tier, &chunk(number)),
        false => KvEvent::removed(tier, ChunkHash([number; 32])),
    };
    EventsAnswer {
        cursor: String::new(),
        is_lost: false,
        is_end: true,
        events: events.into_iter().map(event).collect(),
    }
}

fn taken(followed: &mut Followed, most: usize) -> Vec<(u8, Tier, bool)> {
    let changes = followed.take(most).into_iter();
    let of = |change: TierChange| (change.chunk.hash.0[0], change.tier, change.is_stored);
    changes.map(of).collect()
}

#[test]
fn an_engine_that_steps_late_is_told_the_difference() {
    let mut followed = Followed::default();
    followed.apply(answer([
        (1, Tier::Memory, true),
        (2, Tier::Memory, true),
        (2, Tier::Memory, false),
    ]));
    followed.apply(answer([(1, Tier::Disk, true), (3, Tier::Memory, true)]));
    let expected = [
        (1, Tier::Memory, true),
        (1, Tier::Disk, true),
        (3, Tier::Memory, true),
    ];
    assert_eq!(taken(&mut followed, 9), expected);
    assert!(taken(&mut followed, 9).is_empty());
    followed.apply(answer([
        (1, Tier::Memory, false),
        (1, Tier::Memory, true),
        (3, Tier::Memory, false),
    ]));
    assert_eq!(taken(&mut followed, 9), [(3, Tier::Memory, false)]);
    assert_eq!(
        followed.known.len(),
        1,
        "what is gone, and was told to be, is forgotten"
    );
}

#[test]
fn what_is_lost_is_withdrawn_and_comes_back() {
    let mut followed = Followed::default();
    followed.apply(answer((0..4).map(|number| (number, Tier::Disk, true))));
    assert_eq!(taken(&mut followed, 9).len(), 4);
    followed.withdraw();
    let gone: Vec<_> = (0..4).map(|number| (number, Tier::Disk, false)).collect();
    assert_eq!(taken(&mut followed, 9), gone);
    let all: Vec<u8> = followed.all().iter().map(|bound| bound.hash.0[0]).collect();
    assert_eq!(all, [0, 1, 2, 3], "a new daemon is told of them");
    followed.apply(answer([(1, Tier::Disk, true)]));
    followed.close();
    assert_eq!(taken(&mut followed, 9), [(1, Tier::Disk, true)]);
    assert_eq!(followed.known.len(), 1);
}

#[test]
fn a_chunk_is_told_of_after_its_parent() {
    let mut followed = Followed::default();
    let stored = |tier, number, parent| {
        let parent = Some(ChunkHash([parent; 32]));
        KvEvent::stored(
            tier,
            &BoundChunk {
                parent,
                ..chunk(number)
            },
        )
    };
    let log = |events| EventsAnswer { events, ..answer([]) };
    followed.apply(log(vec![stored(Tier::Disk, 3, 2), stored(Tier::Memory, 2, 1)]));
    assert!(taken(&mut followed, 9).is_empty(), "their first is nowhere");
    followed.apply(answer([(1, Tier::Disk, true)]));
    let parents_first = [
        (1, Tier::Disk, true),
        (2, Tier::Memory, true),
        (3, Tier::Disk, true),
    ];
    assert_eq!(taken(&mut followed, 9), parents_first);
    followed.apply(answer([(1, Tier::Disk, false)]));
    followed.apply(log(vec![stored(Tier::Memory, 4, 1), stored(Tier::Disk, 2, 1)]));
    assert_eq!(taken(&mut followed, 9), [(1, Tier::Disk, false)]);
    followed.apply(answer([(2, Tier::Memory, false), (1, Tier::Memory, true)]));
    let mut told = taken(&mut followed, 9);
    assert_eq!(told[..2], [(2, Tier::Memory, false), (1, Tier::Memory, true)]);
    told.sort_unstable();
    assert_eq!(
        told[1..],
        [
            (2, Tier::Memory, false),
            (2, Tier::Disk, true),
            (4, Tier::Memory, true)
        ]
    );
}

#[test]
fn what_came_and_left_between_two_steps_costs_no_memory() {
    let mut followed = Followed::default();
    for _ in 0..3 {
        let both =
            (0..200).flat_map(|number| [true, false].map(|is_stored| (number, Tier::Memory, is_stored)));
        followed.apply(answer(both));
    }
    assert_eq!((followed.known.len(), followed.changed.len()), (0, 0));
}

#[test]
fn what_was_told_is_told_anew_once_subscribers_have_forgotten_it() {
    let mut followed = Followed::default();
    followed.apply(answer([(1, Tier::Disk, true), (2, Tier::Disk, true)]));
    assert_eq!(taken(&mut followed, 1), [(1, Tier::Disk, true)]);
    followed.tell_anew();
    followed.tell_anew();
    let mut anew = taken(&mut followed, 9);
    assert_eq!(anew.remove(0), (1, Tier::Disk, false));
    anew.sort_unstable();
    assert_eq!(anew, [(1, Tier::Disk, true), (2, Tier::Disk, true)]);
    assert!(taken(&mut followed, 9).is_empty());
}

#[test]
fn a_node_that_answers_late_costs_no_memory() {
    let mut followed = Followed::default();
    for _ in 0..3 {
        let request = BindRequest {
            space: String::new(),
            scheme: String::new(),
            chunks: vec![chunk(0); BINDS_MAX / 2],
            block_size: None,
            lora_name: String::new(),
            cache_salt: String::new(),
        };
        followed.ask(request);
    }
    assert_eq!(
        (followed.to_bind.len(), followed.unbound),
        (2, BINDS_MAX as u64 / 2)
    );
}
