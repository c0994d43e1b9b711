//! Tests of the arena: slots and their parts, the mapped file, the ticket, and slots taken back under pressure.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn arena(size: usize) -> Arena {
    Arena::new(&ArenaOptions {
        size,
        ..ArenaOptions::default()
    })
    .unwrap()
}

const PAGE: usize = SLOT_ALIGN;

/// Among those of an arena of so many.
fn page_of(slot: &Slot, pages: usize) -> usize {
    (slot.offset() - front::Front::len(pages * PAGE)) / PAGE
}

#[test]
fn a_slot_is_free_again_when_its_last_handle_is_gone() {
    let arena = arena(2 * PAGE);
    let slot = arena.try_reserve(2 * PAGE).unwrap().freeze();
    let body = bytes::Bytes::from_owner(slot.slice(10..20));
    drop(slot);
    assert!(arena.try_reserve(1).is_none(), "the body still reads it");
    let rest = body.slice(3..);
    drop(body);
    assert!(arena.try_reserve(1).is_none());
    drop(rest);
    assert!(arena.try_reserve(2 * PAGE).is_some());
    let stats = arena.stats();
    assert_eq!(
        (
            stats.used_bytes,
            stats.used_bytes_peak,
            stats.slots_peak,
            stats.refused
        ),
        (0, 2 * PAGE, 1, 2)
    );
}

#[test]
fn parts_write_apart_and_join() {
    let arena = arena(4 * PAGE);
    let mut first = arena.try_reserve(100).unwrap();
    assert_eq!(first.len(), 100);
    let mut third = first.split_off(60);
    let mut second = first.split_off(25);
    std::thread::scope(|scope| {
        scope.spawn(|| first.fill(1));
        scope.spawn(|| second.fill(2));
        scope.spawn(|| third.fill(3));
    });
    first.join(second);
    first.join(third);
    let slot = first.freeze();
    let expected: Vec<u8> = (0..100)
        .map(|i| {
            if i < 25 {
                1
            } else if i < 60 {
                2
            } else {
                3
            }
        })
        .collect();
    assert_eq!(slot[..], expected[..]);
    assert_eq!(slot.slice(24..26)[..], [1, 2]);
}

#[test]
#[should_panic(expected = "neighbours")]
fn parts_of_other_slots_do_not_join() {
    let arena = arena(4 * PAGE);
    let mut a = arena.try_reserve(PAGE).unwrap();
    a.join(arena.try_reserve(PAGE).unwrap());
}

#[test]
fn the_whole_arena_is_one_slot_and_one_byte_more_is_none() {
    let arena = arena(3 * PAGE + 1);
    assert_eq!(arena.size() / PAGE, 3);
    assert!(arena.try_reserve(3 * PAGE + 1).is_none());
    assert!(arena.try_reserve(3 * PAGE).is_some());
    assert!(
        Arena::new(&ArenaOptions {
            size: 10,
            ..ArenaOptions::default()
        })
        .is_err()
    );
}

#[test]
fn a_named_arena_is_a_new_private_file_and_goes_with_it() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arena");
    std::fs::write(&path, "left by an earlier start").unwrap();
    let options = ArenaOptions {
        size: 3 * PAGE,
        path: Some(path.clone()),
        prefault: true,
        ..ArenaOptions::default()
    };
    let arena = Arena::new(&options).unwrap();
    let mut slot = arena.try_reserve(5).unwrap();
    slot.copy_from_slice(b"hello");
    let slot = slot.freeze();
    let file = std::fs::read(&path).unwrap();
    assert_eq!(file[slot.offset()..][..5], *b"hello");
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let second = Arena::new(&options).err().unwrap().to_string();
    assert!(second.contains("another [arena] path"), "{second}");
    assert!(path.exists(), "it did not take the first one's file away");
    drop((slot, arena));
    assert!(!path.exists());
    let arena = Arena::new(&options).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "somebody else's by now").unwrap();
    drop(arena);
    assert!(path.exists());
    let missing = ArenaOptions {
        path: Some("/nowhere/arena".into()),
        ..options
    };
    assert!(
        Arena::new(&missing)
            .err()
            .unwrap()
            .to_string()
            .contains("[arena] path")
    );
}

#[test]
fn the_last_pages_are_the_tickets() {
    let arena = Arena::new(&ArenaOptions {
        size: 8 * PAGE,
        ticket_bytes: 3 * PAGE,
        ..ArenaOptions::default()
    })
    .unwrap();
    let common: Vec<_> = std::iter::from_fn(|| arena.try_reserve(PAGE)).collect();
    assert_eq!((common.len(), arena.slot_bytes_max()), (5, 5 * PAGE));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let ticket = arena.ticket().await;
        let slot = ticket.reserve(3 * PAGE).await;
        assert_eq!(page_of(&slot.freeze(), 8), 5);
    });
}

#[test]
fn a_slot_that_nobody_uses_makes_room() {
    let arena = arena(2 * PAGE);
    let kept = std::sync::Arc::new(std::sync::Mutex::new(vec![
        arena.try_reserve(2 * PAGE).unwrap().freeze(),
    ]));
    let of = std::sync::Arc::clone(&kept);
    arena.on_pressure(move |_| {
        of.lock()
            .unwrap()
            .pop_if(|slot| !slot.is_used_by_others(1))
            .is_some()
    });
    let used = kept.lock().unwrap()[0].slice(0..10);
    assert!(arena.try_reserve(PAGE).is_none());
    drop(used);
    assert!(arena.try_reserve(PAGE).is_some());
}

#[test]
fn a_mapped_file_has_boot_id_and_generations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arena");
    let options = ArenaOptions {
        size: 4 * PAGE,
        path: Some(path.clone()),
        ..ArenaOptions::default()
    };
    let arena = Arena::new(&options).unwrap();
    let attached = AttachedArena::map(&path, arena.boot_id()).unwrap();
    let mut slot = arena.try_reserve(2 * PAGE).unwrap();
    let (at, generation) = (slot.slot_offset(), slot.generation());
    assert_eq!(attached.generation(at).unwrap(), generation);
    attached.copy_in(at + 10, b"from there").unwrap();
    assert_eq!(slot[10..20], *b"from there");
    slot[..4].copy_from_slice(b"here");
    let mut four = [0; 4];
    attached.copy_out(at, &mut four).unwrap();
    assert_eq!(four, *b"here");
    drop(slot);
    assert_eq!(attached.generation(at).unwrap(), 0);
    let again = arena.try_reserve(PAGE).unwrap();
    assert!(again.slot_offset() == at && again.generation() != generation);
    for (at, len) in [(0, 1), (at + 4 * PAGE, 1), (at, 4 * PAGE + 1), (usize::MAX, 2)] {
        assert!(attached.copy_in(at, &vec![0; len]).is_err(), "{at} {len}");
    }
    let other = Arena::new(&ArenaOptions {
        path: None,
        ..options
    })
    .unwrap();
    assert!(
        AttachedArena::map(&path, other.boot_id()).is_err(),
        "another start's"
    );
}

#[test]
fn an_arena_of_another_version_is_not_mapped_and_says_which_side_is_older() {
    use std::os::unix::fs::FileExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arena");
    let arena = Arena::new(&ArenaOptions {
        size: 4 * PAGE,
        path: Some(path.clone()),
        ..ArenaOptions::default()
    })
    .unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let told = |version: u32| {
        file.write_all_at(&version.to_le_bytes(), 8).unwrap();
        AttachedArena::map(&path, arena.boot_id())
            .unwrap_err()
            .to_string()
    };
    let newer = told(2);
    assert!(
        newer.contains(
            " has version 2, and the engine's kvgate maps version 1: the daemon is the newer one. Install"
        ),
        "{newer}"
    );
    let older = told(0);
    assert!(
        older.contains("has version 0") && older.contains("the daemon is the older one"),
        "{older}"
    );
    file.write_all_at(&1_u32.to_le_bytes(), 8).unwrap();
    AttachedArena::map(&path, arena.boot_id()).unwrap();
    file.write_all_at(b"OTHER", 0).unwrap();
    let other = AttachedArena::map(&path, arena.boot_id())
        .unwrap_err()
        .to_string();
    assert!(other.contains("it is no arena of kvgate"), "{other}");
}

#[test]
fn asking_for_huge_pages_works_with_and_without_them() {
    let arena = Arena::new(&ArenaOptions {
        size: 3 << 20,
        huge_pages: true,
        ..ArenaOptions::default()
    })
    .unwrap();
    let mut slot = arena.try_reserve(3 << 20).unwrap();
    slot.fill(7);
    assert!(slot.iter().all(|&byte| byte == 7));
}

#[tokio::test(start_paused = true)]
async fn waiting_is_in_order_and_can_be_given_up() {
    let arena = arena(2 * PAGE);
    let held = arena.try_reserve(2 * PAGE).unwrap();
    let reserve = |pages: usize| {
        let arena = arena.clone();
        async move { arena.ticket().await.reserve(pages * PAGE).await }
    };
    let first = tokio::spawn(reserve(2));
    tokio::time::sleep(Duration::from_millis(1)).await;
    let second = tokio::spawn(reserve(1));
    tokio::time::sleep(Duration::from_millis(1)).await;
    drop(held);
    let large = tokio::time::timeout(Duration::from_secs(1), first)
        .await
        .expect("the oldest is served first")
        .unwrap();
    assert!(!second.is_finished());
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
    drop(large);
    let third = tokio::time::timeout(Duration::from_secs(1), reserve(2)).await;
    assert!(third.is_ok(), "one that gave up does not block the next");
}

proptest! {
    /// Against a model: which page belongs to which slot.
    #[test]
    fn slots_never_overlap_and_nothing_is_lost(steps in prop::collection::vec((1_usize..9, any::<bool>()), 1..200)) {
        const PAGES: usize = 64;
        let arena = arena(PAGES * PAGE);
        let mut live: Vec<Slot> = Vec::new();
        for (pages, take) in steps {
            if take {
                let room = (0..PAGES).map(|page| !live.iter().any(|slot| {
                    (page_of(slot, PAGES)..page_of(slot, PAGES) + slot.len().div_ceil(PAGE)).contains(&page)
                })).collect::<Vec<_>>();
                let fits = room.windows(pages).any(|window| window.iter().all(|&free| free));
                let got = arena.try_reserve(pages * PAGE);
                prop_assert_eq!(got.is_some(), fits);
                live.extend(got.map(SlotMut::freeze));
            } else if !live.is_empty() {
                live.swap_remove(pages % live.len());
            }
            let used: usize = live.iter().map(|slot| slot.len()).sum();
            prop_assert_eq!(arena.stats().used_bytes, used);
            for (i, a) in live.iter().enumerate() {
                for b in &live[..i] {
                    prop_assert!(a.offset() + a.len() <= b.offset() || b.offset() + b.len() <= a.offset());
                }
            }
        }
    }
}

#[test]
fn slots_are_exclusive_under_threads() {
    const PAGES: usize = 32;
    let arena = arena(PAGES * PAGE);
    // The model: an owner a page.
    let owners: Vec<AtomicU32> = (0..PAGES).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 1..=4_u32 {
            let (arena, owners) = (&arena, &owners);
            scope.spawn(move || {
                let mut seed = thread;
                let mut held = Vec::new();
                for _ in 0..5_000 {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let pages = 1 + (seed >> 16) as usize % 6;
                    if held.len() < 3
                        && let Some(mut slot) = arena.try_reserve(pages * PAGE)
                    {
                        let mut tail = slot.split_off(PAGE / 2);
                        slot.fill(thread as u8);
                        tail.fill(thread as u8);
                        slot.join(tail);
                        let slot = slot.freeze();
                        for page in 0..pages {
                            assert_eq!(
                                owners[page_of(&slot, PAGES) + page].swap(thread, Ordering::SeqCst),
                                0
                            );
                        }
                        held.push(slot);
                    } else if let Some(slot) = held.pop() {
                        assert!(slot.iter().all(|&byte| u32::from(byte) == thread));
                        for page in 0..slot.len() / PAGE {
                            assert_eq!(
                                owners[page_of(&slot, PAGES) + page].swap(0, Ordering::SeqCst),
                                thread
                            );
                        }
                    }
                }
                for slot in held {
                    owners[page_of(&slot, PAGES)..][..slot.len() / PAGE]
                        .iter()
                        .for_each(|o| o.store(0, Ordering::SeqCst));
                }
            });
        }
    });
    assert_eq!((arena.stats().used_bytes, arena.stats().slots), (0, 0));
}

/// The start waited for somebody to write into it, for ever.
#[test]
fn a_path_of_the_arena_that_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (fifo, link) = (folder.path().join("fifo"), folder.path().join("link"));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let others = folder.path().join("others");
    std::fs::write(&others, "another's").unwrap();
    std::os::unix::fs::symlink(&others, &link).unwrap();
    for path in [fifo, link, folder.path().to_owned()] {
        let options = ArenaOptions {
            size: PAGE,
            path: Some(path.clone()),
            ..ArenaOptions::default()
        };
        let refused = Arena::new(&options).err().unwrap().to_string();
        assert!(
            refused.contains("can't make the arena file"),
            "{}: {refused}",
            path.display()
        );
    }
    assert_eq!(std::fs::read(&others).unwrap(), b"another's");
}

#[test]
fn an_arena_on_a_disk_is_told_from_one_in_memory() {
    for (path, expected) in [("/dev/shm", true), ("/proc/self", false)] {
        let folder = std::fs::File::open(path).unwrap();
        assert_eq!(super::mapping::is_in_memory(&folder), expected, "{path}");
    }
}
