//! Digests that are computed while bytes arrive: what is damaged on the way is read again, and no object is called
//! damaged for it.

use std::sync::Arc;

use kvgate::cache::gateway::{AfterMiss, Gateway, StoreOutcome};
use kvgate::format::DigestKind;
use kvgate::protocol::Strategy;
use kvgate::s3::object::{ErrorKind, ObjectStore};

use crate::faults::Hooked;
use crate::support::backends::Backend;
use crate::support::fixture::{
    Prompt, Site, arena, arena_empties, load_codes, lookup, store_all, store_chunk,
};

const N: usize = 3;
const BAD: usize = 1;

async fn stored() -> (Backend, Site, Prompt) {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(N);
    store_all(&site.gateway(), &prompt).await;
    (backend, site, prompt)
}

/// GETs that loading the whole prompt takes when nothing is wrong.
fn gets(site: &Site, prompt: &Prompt) -> u64 {
    (N * prompt.space.layout().sections(site.options().part_bytes).len()) as u64
}

/// In the header, in the first section's first plane, and the very last.
fn places(prompt: &Prompt) -> [usize; 3] {
    let layout = prompt.space.layout();
    [100, layout.plane(0).start, layout.object_len() - 1]
}

#[tokio::test]
async fn a_byte_flipped_once_on_the_way_is_read_again() {
    let (_server, site, prompt) = stored().await;
    for byte in places(&prompt) {
        let hooked = Hooked::flipping(Arc::clone(&site.store), site.key(&prompt, BAD), byte);
        for known in [false, true] {
            let gateway = site.gateway_over(Arc::clone(&hooked) as Arc<_>);
            if known {
                assert_eq!(lookup(&gateway, &prompt, Strategy::Exact).await.prefix, N);
            }
            hooked.flip_times(1);
            let before = gateway.requests();
            assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; N]);
            assert_eq!(
                gateway.requests().since(&before).get,
                gets(&site, &prompt) + 1,
                "one section once more"
            );
            assert_eq!(lookup(&gateway, &prompt, Strategy::Exact).await.prefix, N);
            arena_empties(&gateway).await;
        }
    }
}

#[tokio::test]
async fn an_object_that_is_wrong_twice_is_damaged() {
    let (_server, site, prompt) = stored().await;
    for (byte, code) in places(&prompt)
        .into_iter()
        .zip(["bad_header", "bad_digest", "bad_digest"])
    {
        let hooked = Hooked::flipping(Arc::clone(&site.store), site.key(&prompt, BAD), byte);
        let gateway = site.gateway_over(Arc::clone(&hooked) as Arc<_>);
        hooked.flip_times(2);
        let before = gateway.requests();
        assert_eq!(
            load_codes(&gateway, &prompt, AfterMiss::Continue).await,
            ["ok", code, "ok"]
        );
        let taken = gateway.requests().since(&before).get;
        assert!(
            taken <= gets(&site, &prompt) + 1,
            "{taken}: once more, not again and again"
        );
        assert_eq!(
            lookup(&gateway, &prompt, Strategy::Exact).await.prefix,
            BAD,
            "quarantined"
        );
    }
}

/// One reading's word is not enough to call an object damaged.
#[tokio::test]
async fn a_chunk_that_can_t_be_read_again_is_unknown() {
    let (_server, site, prompt) = stored().await;
    let last = prompt.space.layout().object_len() - 1;
    let flipping = Hooked::flipping(Arc::clone(&site.store), site.key(&prompt, 0), last);
    flipping.flip_times(1);
    let sections = gets(&site, &prompt) as usize / N;
    let denying = Arc::new(Hooked::over(flipping));
    let hooked = Hooked::before_get(Arc::clone(&denying) as Arc<_>, sections, {
        let denying = Arc::clone(&denying);
        move || {
            denying.fail(Some(ErrorKind::Denied));
            Box::pin(async {})
        }
    });
    let gateway = site.gateway_over(Arc::new(hooked));
    let first = Prompt {
        space: prompt.space.clone(),
        root: prompt.root,
        hashes: prompt.hashes[..1].to_vec(),
    };
    assert_eq!(load_codes(&gateway, &first, AfterMiss::Stop).await, ["unknown"]);
    denying.fail(None);
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; N]);
}

#[tokio::test]
async fn an_attempt_that_broke_off_leaves_no_trace_in_the_digests() {
    let (_server, site, prompt) = stored().await;
    let gateway = site.gateway_over(Arc::new(Hooked::breaking(Arc::clone(&site.store), 4)));
    let before = gateway.requests();
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; N]);
    assert_eq!(
        gateway.requests().since(&before).get,
        gets(&site, &prompt),
        "those that broke off did not get to the server; none was read again for its digest"
    );
}

#[tokio::test]
async fn another_digest_than_configured_is_verified_as_well() {
    let (_server, site, _) = stored().await;
    let with = |store: &Arc<dyn ObjectStore>, digest| {
        let mut options = site.options();
        options.digest = digest;
        Gateway::new(Arc::clone(store), arena(8 << 20), site.capabilities, options)
    };
    for (wrote, reads) in [
        (DigestKind::Blake3, DigestKind::Crc64Nvme),
        (DigestKind::Crc64Nvme, DigestKind::Blake3),
        (DigestKind::Blake3, DigestKind::Blake3),
    ] {
        let prompt = Prompt::new(N);
        let writer = with(&site.store, wrote);
        for i in 0..N {
            let outcome = store_chunk(&writer, &prompt, i).await;
            assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
        }
        for byte in &places(&prompt)[1..] {
            let hooked = Hooked::flipping(Arc::clone(&site.store), site.key(&prompt, BAD), *byte);
            let store: Arc<dyn ObjectStore> = Arc::clone(&hooked) as Arc<_>;
            for known in [false, true] {
                for (flips, code) in [(0, "ok"), (1, "ok"), (usize::MAX, "bad_digest")] {
                    let reader = with(&store, reads);
                    if known {
                        assert_eq!(lookup(&reader, &prompt, Strategy::Exact).await.prefix, N);
                    }
                    hooked.flip_times(flips);
                    assert_eq!(
                        load_codes(&reader, &prompt, AfterMiss::Continue).await,
                        ["ok", code, "ok"],
                        "{wrote:?} read by {reads:?}, {flips} flips of byte {byte}"
                    );
                }
            }
        }
    }
}
