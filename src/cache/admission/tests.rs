//! The admission by itself, with a clock of the tests' own.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const CHUNK: u64 = 1000;

/// A budget of so many chunks a second.
fn admission(chunks_per_s: u64) -> Admission<u64> {
    Admission::new(AdmissionOptions {
        bytes_per_s: chunks_per_s * CHUNK,
        chunks_max: 10_000,
    })
}

fn offer(key: u64, parent: Option<u64>, added: u32) -> Offer<u64> {
    Offer {
        key,
        parent,
        is_doubtful: false,
        bytes: CHUNK,
        added,
    }
}

/// Offers a prompt of new chunks, the first of which has this number. Returns how many leading ones were admitted, and
/// fails if others were.
fn prompt(admission: &mut Admission<u64>, first: u64, chunks: u32, at_ms: u64) -> u64 {
    let mut answers = Vec::new();
    for i in 0..u64::from(chunks) {
        // The root has a number, too.
        let parent = first + i - 1;
        let answer = admission.offer(&offer(first + i, Some(parent), chunks), at_ms);
        answers.push(answer.is_ok());
    }
    let head = answers.iter().take_while(|admitted| **admitted).count();
    assert!(
        answers[head..].iter().all(|admitted| !admitted),
        "a descendant of a declined chunk was admitted"
    );
    head as u64
}

#[test]
fn a_budget_that_suffices_admits_all() {
    let mut admission = admission(1000);
    for second in 0..100 {
        assert_eq!(prompt(&mut admission, 1 + 100 * second, 20, 1000 * second), 20);
    }
    let stats = admission.stats();
    assert_eq!((stats.admitted_chunks, stats.declined_now), (2000, 0));
    assert_eq!(stats.admitted_bytes, 2000 * CHUNK);
}

#[test]
fn the_budget_bounds_the_bytes_a_second_and_keeps_the_heads_of_chains() {
    let mut admission = admission(10);
    let (mut admitted, mut heads) = (0, 0);
    for second in 0..1000_u64 {
        let head = prompt(&mut admission, 1 + 100 * second, 50, 1000 * second);
        admitted += head;
        heads += u64::from(head > 0);
    }
    let most = 10 * 1000 + 10 * 60 + 1;
    assert!((9_000..=most).contains(&admitted), "{admitted} of at most {most}");
    assert!(heads > 900, "{heads} of 1000 prompts have their head on S3");
    let stats = admission.stats();
    assert_eq!(stats.admitted_chunks, admitted);
    assert_eq!(stats.declined_now + stats.forgotten, 50_000 - admitted);
    assert!(stats.declined_now <= 10_000, "no more are remembered");
    assert_eq!(stats.unlikely.chunks + stats.parent.chunks, 50_000 - admitted);
    assert_eq!(
        stats.unlikely.bytes + stats.parent.bytes,
        (50_000 - admitted) * CHUNK
    );
}

#[test]
fn the_least_likely_go_without() {
    let mut admission = admission(10);
    let (mut likely, mut unlikely) = (0, 0);
    for second in 0..2000_u64 {
        let first = 1 + 100 * second;
        let small = prompt(&mut admission, first, 4, 1000 * second);
        let large = prompt(&mut admission, first + 50, 32, 1000 * second + 1);
        if second >= 1000 {
            (likely, unlikely) = (likely + small, unlikely + large);
        }
        // The small ones are asked for again, wherever they are.
        for key in first..first + 4 {
            admission.used(&key);
        }
    }
    assert!(likely > 3_900, "{likely} of 4000 likely ones");
    assert!(
        (4_000..7_000).contains(&unlikely),
        "{unlikely} fill up the budget of 10000"
    );
}

#[test]
fn a_declined_chunk_that_is_asked_for_again_is_admitted_with_its_ancestors_first() {
    let mut admission = admission(10);
    // Too many at once.
    let mut more = 0;
    while prompt(&mut admission, 10_001 + more * 100, 50, 0) > 0 {
        more += 1;
    }
    assert_eq!(prompt(&mut admission, 1, 50, 0), 0);
    assert_eq!(admission.standing(&3), Some(Standing::Declined));
    assert_eq!(admission.used(&3), Some(Standing::Declined));
    assert_eq!(admission.declined_chain(&3), Some(vec![1, 2, 3]));
    assert_eq!(
        admission.offer(&offer(3, Some(2), 0), 0),
        Err(Reason::Parent),
        "not without them"
    );
    for key in [1, 2, 3] {
        assert_eq!(admission.offer(&offer(key, Some(key - 1), 0), 0), Ok(()));
    }
    assert_eq!(admission.declined_chain(&3), Some(vec![]));
    assert_eq!(admission.declined_chain(&5), Some(vec![4, 5]));
    assert_eq!(admission.stats().second_chances, 3);
    // A new prompt that is unlikely does not get what is kept for them.
    assert_eq!(prompt(&mut admission, 900_001, 50, 0), 0);
}

#[test]
fn with_the_budget_used_up_even_a_second_chance_waits() {
    let mut admission = admission(1);
    for first in 0..200 {
        prompt(&mut admission, 1 + 100 * first, 9, 0);
    }
    let declined = |admission: &Admission<u64>| {
        let keys = (0..200).map(|first| 1 + 100 * first);
        keys.filter(|key| admission.standing(key) == Some(Standing::Declined))
            .collect::<Vec<_>>()
    };
    let again = |admission: &mut Admission<u64>, at_ms| {
        let keys = declined(admission).into_iter();
        keys.flat_map(|key| admission.offer(&offer(key, Some(key - 1), 0), at_ms))
            .count()
    };
    again(&mut admission, 0);
    assert!(declined(&admission).len() > 20);
    assert_eq!(again(&mut admission, 100), 1, "down to nothing, and one more");
    assert_eq!(again(&mut admission, 200), 0);
    assert!(admission.stats().budget.chunks > 0);
    assert_eq!(again(&mut admission, 6_050), 6);
}

/// A rank may commit a chunk before the one that it follows.
#[test]
fn the_parent_of_an_admitted_chunk_is_admitted_whatever_the_budget() {
    let mut admission = admission(1);
    assert_eq!(admission.offer(&offer(2, Some(1), 2), 0), Ok(()));
    for first in 10..500 {
        let _ = admission.offer(&offer(first * 10, Some(first * 10 - 1), 2), 0);
    }
    assert_eq!(admission.offer(&offer(7, Some(6), 2), 0), Err(Reason::Unlikely));
    assert_eq!(admission.offer(&offer(1, Some(0), 2), 0), Ok(()));
}

#[test]
fn a_chunk_without_a_chain_needs_no_other() {
    let mut admission = admission(1);
    while admission.offer(&offer(fastrand::u64(100..), None, 1), 0).is_ok() {}
    assert!(admission.offer(&offer(1, None, 1), 0).is_err());
    assert_eq!(admission.declined_chain(&1), Some(vec![1]));
    assert_eq!(admission.offer(&offer(1, None, 1), 1_500), Ok(()));
}

#[test]
fn what_another_node_stored_is_declined_no_more() {
    let mut admission = admission(1);
    for first in 0..100 {
        prompt(&mut admission, 1 + 100 * first, 2, 0);
    }
    let declined = admission.stats().declined_now;
    assert_eq!(admission.standing(&9_901), Some(Standing::Declined));
    admission.is_there(&9_901);
    assert_eq!(admission.stats().declined_now, declined - 1);
    assert_eq!(admission.declined_chain(&9_902), Some(vec![9_902]));
    admission.forget(&9_902);
    assert_eq!(
        (admission.standing(&9_902), admission.stats().declined_now),
        (None, declined - 2)
    );
}

#[test]
fn what_an_earlier_life_declined_is_offered_from_the_first() {
    let mut admission = admission(10);
    admission.is_missing(5, Some(4), false);
    admission.is_missing(6, Some(5), false);
    assert_eq!(admission.declined_chain(&6), Some(vec![5, 6]));
    admission.is_missing(9, Some(8), true);
    admission.is_missing(10, Some(9), false);
    assert_eq!(admission.declined_chain(&10), None, "8 is nowhere");
    assert_eq!(admission.stats().declined_now, 4);
}

#[test]
fn a_chunk_waits_for_what_is_told_of_a_parent_that_s3_may_lack() {
    let doubtful = Offer {
        is_doubtful: true,
        ..offer(6, Some(5), 1)
    };
    let mut admission = admission(10);
    assert_eq!(admission.offer(&doubtful, 0), Err(Reason::Parent));
    assert_eq!(admission.declined_parent(&6), Some(5));
    assert_eq!(
        admission.declined_chain(&6),
        None,
        "nothing is known of its parent"
    );
    admission.doubt(5);
    assert_eq!(admission.declined_chain(&6), None, "nor is it now");
    assert_eq!(admission.offer(&offer(6, Some(5), 1), 0), Err(Reason::Parent));
    admission.is_missing(5, Some(4), false);
    assert_eq!(admission.declined_chain(&6), Some(vec![5, 6]));
    admission.is_there(&5);
    assert_eq!(admission.declined_chain(&6), Some(vec![6]));
    assert_eq!(admission.offer(&offer(6, Some(5), 1), 0), Ok(()));
}

#[test]
fn a_chunk_that_could_not_be_queued_costs_nothing() {
    let mut admission = admission(10);
    let before = admission.stats();
    assert_eq!(admission.offer(&offer(1, None, 1), 0), Ok(()));
    admission.take_back(&1, CHUNK);
    let after = AdmissionStats {
        declined_now: 1,
        ..before
    };
    assert_eq!(admission.stats(), after);
    assert_eq!(admission.standing(&1), Some(Standing::Declined));
}

/// The head of a chain is forgotten before the rest.
#[test]
fn a_chain_whose_head_is_forgotten_is_not_admitted_without_it() {
    let mut admission = Admission::new(AdmissionOptions {
        bytes_per_s: 1,
        chunks_max: 10,
    });
    while admission.offer(&offer(fastrand::u64(100..), None, 1), 0).is_ok() {}
    prompt(&mut admission, 1, 12, 0);
    assert_eq!(admission.standing(&1), None);
    assert_eq!(admission.standing(&12), Some(Standing::Declined));
    assert_eq!(admission.declined_chain(&12), None);
}

/// It counted once more each time.
#[test]
fn a_chunk_that_was_forgotten_counts_once_when_it_is_declined_again() {
    let mut admission = Admission::new(AdmissionOptions {
        bytes_per_s: 1,
        chunks_max: 10,
    });
    while admission.offer(&offer(fastrand::u64(100..), None, 1), 0).is_ok() {}
    for _ in 0..3 {
        prompt(&mut admission, 1, 20, 0);
        let left_out = (1..=20).filter(|key| admission.standing(key) == Some(Standing::Declined));
        assert_eq!((admission.stats().declined_now, left_out.count()), (10, 10));
    }
    assert!((50..=60).contains(&admission.stats().forgotten));
}

#[derive(Debug, Clone)]
enum Act {
    /// Some chunks of a document are offered, in order.
    Store(u64, u64),
    /// One of them is asked for, and then it and its ancestors are offered again.
    Ask(u64, u64),
    Pass(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0_u64..20, 1_u64..12).prop_map(|(document, chunks)| Act::Store(document, chunks)),
        3 => (0_u64..20, 0_u64..12).prop_map(|(document, chunk)| Act::Ask(document, chunk)),
        1 => (0_u64..5_000).prop_map(Act::Pass),
    ]
}

proptest! {
    #[test]
    fn no_chunk_is_on_s3_without_those_before_it(acts in prop::collection::vec(act(), 1..300), budget in 1_u64..20) {
        let mut admission = admission(budget);
        let (mut at_ms, mut on_s3, mut bytes) = (0, HashMap::new(), 0);
        let mut offered = |admission: &mut Admission<u64>, key: u64, at_ms| {
            let is_first = key % 100 == 1;
            let admitted = admission.offer(&offer(key, Some(key - 1), 5), at_ms).is_ok();
            bytes += if admitted { CHUNK } else { 0 };
            on_s3.insert(key, admitted || on_s3.get(&key) == Some(&true));
            !admitted || is_first || on_s3.get(&(key - 1)) == Some(&true)
        };
        for act in acts {
            match act {
                Act::Store(document, chunks) => for key in 1..=chunks {
                    let key = 100 * document + key;
                    if admission.standing(&key) != Some(Standing::Admitted) {
                        prop_assert!(offered(&mut admission, key, at_ms));
                    }
                },
                Act::Ask(document, chunk) => {
                    let key = 100 * document + 1 + chunk;
                    if admission.used(&key) == Some(Standing::Declined) {
                        for key in admission.declined_chain(&key).unwrap() {
                            prop_assert!(offered(&mut admission, key, at_ms));
                        }
                    }
                }
                Act::Pass(ms) => at_ms += ms,
            }
        }
        let declined = on_s3.values().filter(|admitted| !**admitted).count();
        prop_assert_eq!(admission.stats().declined_now, declined as u64);
        let most = budget * CHUNK * (at_ms / 1000 + 1 + 60) + CHUNK;
        prop_assert!(bytes <= most, "{} bytes of at most {}", bytes, most);
    }
}
