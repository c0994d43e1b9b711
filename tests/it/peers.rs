//! Other nodes' memories before S3: who is asked, what is answered, and that nothing that goes wrong there fails a load.

use kvgate::protocol::Order;

use crate::support::daemon::{Site, load, store};
use crate::support::fixture::Prompt;
use crate::support::fleet::{Fleet, gets};

/// Of each chunk, "peer" if node `owner` owns it, else "s3".
fn expected(owners: &[usize], asker: usize) -> Vec<String> {
    let word = |owner: &usize| if *owner == asker { "s3" } else { "peer" };
    owners.iter().map(|owner| word(owner).to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_in_a_neighbours_memory_is_read_from_there() {
    let site = Site::new().await;
    let fleet = Fleet::new(&site, 2);
    let nodes = fleet.serve_all(&site, &[]).await;
    let prompt = Prompt::new(24);
    let (writer, reader) = (nodes[0].attach("writer").await, nodes[1].attach("reader").await);
    store(&nodes[0].client, &writer, &prompt).await;
    nodes[0].flush().await;
    nodes[1].client.declare(&prompt.space).await.unwrap();

    let hashes = prompt.hashes.iter();
    let owners: Vec<usize> = hashes.map(|hash| fleet.owner(&nodes[1], &prompt, hash)).collect();
    assert!(owners.contains(&0) && owners.contains(&1), "{owners:?}");
    let before = gets(&nodes[1]);
    let words = load(&reader, &prompt, "a", Order::Chunk).await;
    assert_eq!(words, expected(&owners, 1));
    let own = owners.iter().filter(|owner| **owner == 1).count() as u64;
    let sections = prompt.space.layout().sections(16 << 20).len() as u64;
    assert_eq!(gets(&nodes[1]) - before, own * sections, "S3 sent the others' chunks");
    assert_eq!(load(&reader, &prompt, "b", Order::Chunk).await, vec!["memory"; 24]);
}
