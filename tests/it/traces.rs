//! Where the time of a load goes, as `kvgate trace` shows it.

use kvgate::engine::client::Client;
use kvgate::protocol::Order;
use serde_json::Value;

use crate::support::daemon::{Site, load, store};
use crate::support::fixture::Prompt;

async fn traces(client: &Client, query: &str) -> Vec<Value> {
    let text = client.get(&format!("/v1/traces{query}")).await.unwrap();
    let answer: Value = serde_json::from_slice(&text).unwrap();
    answer["loads"].as_array().unwrap().clone()
}

fn spans<'a>(load: &'a Value, name: &str) -> Vec<&'a Value> {
    let spans = load["spans"].as_array().unwrap();
    spans.iter().filter(|span| span["name"] == name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_from_s3_shows_its_ranges_addresses_and_waits() {
    let site = Site::new().await;
    let (prompt, here) = (Prompt::new(4), Prompt::new(2));
    site.store_by_another(&prompt, &[]).await;
    let serving = site.serve(&[("api.traces", "3")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    serving.client.declare(&prompt.space).await.unwrap();
    for order in [Order::Chunk, Order::Layer] {
        let name = format!("request/{order:?} 1#7");
        load(&engine, &prompt, &name, order).await;
        let found = traces(&serving.client, &format!("?load=request%2F{order:?}%201")).await;
        assert_eq!(found.len(), 1);
        let one = &found[0];
        assert_eq!((&one["load"], &one["instance"]), (&name.into(), &"one".into()));
        assert_eq!(
            (&one["chunks"], &one["missed"]),
            (&4.into(), &serde_json::json!({}))
        );
        assert!(one["seconds"].as_f64().unwrap() > 0.0);
        if order == Order::Layer {
            // By then they are in memory.
            assert_eq!(one["loaded"], serde_json::json!({"memory": 4}));
            continue;
        }
        assert_eq!(one["loaded"], serde_json::json!({"s3": 4}));
        let (gets, requests) = (spans(one, "GET"), spans(one, "request"));
        assert!(gets.len() >= 4 && requests.len() >= gets.len(), "{one}");
        assert_eq!(
            (spans(one, "came").len(), spans(one, "verify").len()),
            (4, gets.len())
        );
        for request in requests {
            let about = &request["attributes"];
            assert!(
                about["address"].as_str().unwrap().starts_with("127.0.0.1:")
                    && about["status"].as_str().unwrap().starts_with("20"),
                "{about}"
            );
            // Each request is a part of a range's.
            let get = gets.iter().find(|get| get["id"] == request["parent"]);
            assert!(
                get.unwrap()["attributes"]["range"]
                    .as_str()
                    .unwrap()
                    .contains('-')
            );
            let [start, sent, answered, end] = [
                &request["start_us"],
                &request["marks"][0][1],
                &request["marks"][1][1],
                &request["end_us"],
            ]
            .map(|at| at.as_u64().unwrap());
            assert!(start <= sent && sent <= answered && answered <= end, "{request}");
        }
    }

    // What is in memory has no spans, what is not there says why; and only the latest are kept.
    store(&serving.client, &engine, &here).await;
    load(&engine, &here, "a", Order::Chunk).await;
    load(&engine, &Prompt::new(1), "b", Order::Chunk).await;
    let names: Vec<_> = traces(&serving.client, "").await;
    let names: Vec<_> = names.iter().map(|load| load["load"].as_str().unwrap()).collect();
    assert_eq!(names, ["request/Layer 1#7", "a", "b"]);
    assert_eq!(
        traces(&serving.client, "?load=a").await[0]["spans"],
        serde_json::json!([])
    );
    let missed = &traces(&serving.client, "?load=b").await[0];
    assert_eq!(missed["missed"], serde_json::json!({"absent": 1}));
    assert_eq!(spans(missed, "missed").len(), 1);
    assert!(traces(&serving.client, "?load=request").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_from_a_disk_shows_the_disk() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let settings = [("disk.paths", disk.to_str().unwrap())];
    let prompt = Prompt::new(3);
    site.store_by_another(&prompt, &settings).await;
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    serving.client.declare(&prompt.space).await.unwrap();
    load(&engine, &prompt, "a", Order::Chunk).await;
    let one = &traces(&serving.client, "?load=a").await[0];
    assert_eq!(one["loaded"], serde_json::json!({"disk": 3}));
    let disks = spans(one, "disk");
    assert_eq!(disks.len(), 3);
    assert!(disks.iter().all(|span| span["marks"][0][0] == "read"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_keeps_no_traces_has_none() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.traces", "0")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(1);
    store(&serving.client, &engine, &prompt).await;
    load(&engine, &prompt, "a", Order::Chunk).await;
    assert!(traces(&serving.client, "").await.is_empty());
}
