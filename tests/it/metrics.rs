//! `/metrics`: what an engine does moves the figures that are about it, and nothing else.

use std::collections::BTreeMap;

use kvgate::protocol::{LookupRequest, Order, Strategy};

use crate::support::daemon::{Serving, Site, id, load, store};
use crate::support::fixture::Prompt;

/// Each line's value, by its name and labels.
type Lines = BTreeMap<String, f64>;

async fn read(serving: &Serving) -> Lines {
    let text = serving.client.get("/metrics").await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap());
    pairs
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// What has grown since, of the figures whose names begin so.
fn grown(before: &Lines, after: &Lines, begin: &str) -> Vec<(String, f64)> {
    let ours = after.iter().filter(|(name, _)| name.starts_with(begin));
    let by = ours.map(|(name, value)| (name[begin.len()..].to_owned(), value - before[name]));
    by.filter(|(_, by)| *by != 0.0).collect()
}

fn of<const N: usize>(pairs: [(&str, f64); N]) -> Vec<(String, f64)> {
    pairs.map(|(name, by)| (name.to_owned(), by)).to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures_tell_what_engines_asked_for_and_got() {
    let site = Site::new().await;
    let prompt = Prompt::new(6);
    let bytes = prompt.payload(0).len() as f64;
    site.store_by_another(
        &Prompt {
            hashes: prompt.hashes[..4].to_vec(),
            ..prompt.clone()
        },
        &[],
    )
    .await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    serving.client.declare(&prompt.space).await.unwrap();
    let start = read(&serving).await;
    assert_eq!(
        start.get("kvgate_load_misses_total{reason=\"bad_digest\"}"),
        Some(&0.0),
        "there from the start"
    );

    let request = LookupRequest {
        space: id(&prompt.space),
        hashes: Some(prompt.hashes.clone()),
        strategy: Some(Strategy::Exact),
        ..LookupRequest::default()
    };
    serving.client.lookup(&request).await.unwrap();
    let asked = read(&serving).await;
    assert_eq!(
        grown(&start, &asked, "kvgate_lookup_seconds_count"),
        of([("", 1.0)])
    );
    assert_eq!(
        grown(&start, &asked, "kvgate_lookup_chunks_total"),
        of([("{found=\"absent\"}", 2.0), ("{found=\"s3\"}", 4.0)])
    );
    assert_eq!(grown(&start, &asked, "kvgate_load"), []);
    assert_eq!(
        grown(&start, &asked, "kvgate_s3_request_seconds_count"),
        of([("{kind=\"head\"}", 6.0)])
    );

    load(&engine, &prompt, "a", Order::Chunk).await;
    let loaded = read(&serving).await;
    assert_eq!(
        grown(&asked, &loaded, "kvgate_load_chunks_total"),
        of([("{tier=\"s3\"}", 4.0)])
    );
    assert_eq!(
        grown(&asked, &loaded, "kvgate_load_bytes_total"),
        of([("{tier=\"s3\"}", 4.0 * bytes)])
    );
    assert_eq!(
        grown(&asked, &loaded, "kvgate_load_misses_total"),
        of([("{reason=\"absent\"}", 2.0)])
    );
    for name in ["kvgate_load_seconds_count", "kvgate_load_first_seconds_count"] {
        assert_eq!(grown(&asked, &loaded, name), of([("", 1.0)]), "{name}");
    }
    let turns = grown(&asked, &loaded, "kvgate_wait_seconds_count{queue=\"turn\"}");
    assert!(turns[0].1 >= 4.0, "{turns:?}");
    assert_eq!(grown(&asked, &loaded, "kvgate_store"), []);

    // Layer by layer, each chunk counts once.
    load(&engine, &prompt, "b", Order::Layer).await;
    let again = read(&serving).await;
    assert_eq!(
        grown(&loaded, &again, "kvgate_load_chunks_total"),
        of([("{tier=\"memory\"}", 4.0)])
    );
    assert_eq!(
        grown(&loaded, &again, "kvgate_load_bytes_total"),
        of([("{tier=\"memory\"}", 4.0 * bytes)])
    );
    assert_eq!(grown(&loaded, &again, "kvgate_s3_request_seconds_count"), []);

    assert_eq!(
        store(&serving.client, &engine, &prompt).await,
        ["present", "present", "present", "present", "stored", "stored"]
    );
    serving.flush().await;
    let stored = read(&serving).await;
    assert_eq!(
        grown(&again, &stored, "kvgate_store_chunks_total"),
        of([("{answer=\"present\"}", 4.0), ("{answer=\"reserved\"}", 2.0)])
    );
    assert_eq!(
        grown(&again, &stored, "kvgate_store_commits_total"),
        of([("{outcome=\"published\"}", 2.0)])
    );
    assert_eq!(
        grown(&again, &stored, "kvgate_behind_seconds_count"),
        of([("", 2.0)])
    );
}

/// As Prometheus wants it: buckets add up, and the last one has all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buckets_are_cumulative() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &Prompt::new(3)).await;
    serving.flush().await;
    let text = serving.client.get("/metrics").await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let name = "kvgate_behind_seconds_";
    let lines = text.lines().filter_map(|line| line.strip_prefix(name));
    let values: Vec<(&str, f64)> = lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    let buckets: Vec<f64> = values
        .iter()
        .filter(|(name, _)| name.starts_with("bucket"))
        .map(|of| of.1)
        .collect();
    assert!(buckets.is_sorted() && buckets.len() == 19, "{values:?}");
    assert_eq!(
        (buckets.last(), values.last()),
        (Some(&3.0), Some(&("count", 3.0)))
    );
    assert!(text.contains("kvgate_behind_seconds_bucket{le=\"0.00005\"} 0\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_a_connection_and_for_a_disk_are_timed() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let settings = [("disk.paths", disk.to_str().unwrap()), ("disk.depth", "1")];
    let one = site.store_with(|options| options.connections_max = 1).await;
    let (stored, asked) = (Prompt::new(12), Prompt::new(12));
    let serving = site.serve_over(one, &settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let before = read(&serving).await;
    store(&serving.client, &engine, &stored).await;
    serving
        .client
        .lookup_space(&asked.space, &asked.hashes, "strategy=exact")
        .await
        .unwrap();
    serving.flush().await;
    let after = read(&serving).await;
    let waits = grown(&before, &after, "kvgate_wait_seconds_count");
    let queues: Vec<&str> = waits.iter().map(|(queue, _)| queue.as_str()).collect();
    for queue in ["{queue=\"connection\"}", "{queue=\"disk\"}"] {
        assert!(queues.contains(&queue), "{waits:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_tenant_s_share_is_told() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let serving = site.serve(&[("disk.paths", disk.to_str().unwrap())]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(3);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let lines = read(&serving).await;
    for tier in ["memory", "disk"] {
        let name = format!(
            "kvgate_{tier}_tenant_bytes{{tenant=\"{}\"}}",
            prompt.space.tenant()
        );
        let least = (3 * prompt.space.layout().object_len()) as f64;
        assert!(lines[&name] >= least, "{name}: {}", lines[&name]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_s3_is_told() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let lines = read(&serving).await;
    let of = |metric: &str| {
        let series: Vec<_> = lines
            .iter()
            .filter(|(name, _)| name.starts_with(metric))
            .collect();
        assert_eq!(series.len(), 1, "{series:?}");
        assert!(series[0].0.contains("{name=\"127.0.0.1:"));
        *series[0].1
    };
    let figures = ["addresses", "age_seconds", "failing"].map(|of| format!("kvgate_dns_{of}"));
    let expected = [Some(1.0), Some(0.0), Some(0.0)];
    assert_eq!(figures.each_ref().map(|metric| Some(of(metric))), expected);
}
