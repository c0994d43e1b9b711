//! Impossible descriptions are refused, with the reason.

use super::*;

fn tensor(axes: &str, shape: &[u64]) -> Tensor {
    Tensor {
        address: 4096,
        bytes: shape.iter().product::<u64>() * 2,
        axes: axes.into(),
        shape: shape.to_vec(),
        strides: Tensor::contiguous_strides(shape, 2),
        element_bytes: 2,
        planes: vec![0],
        heads: None,
        row_offset: 0,
    }
}

fn refused(planes: &[(u32, u32)], tensors: &[Tensor]) -> String {
    PagedCache::new(&space(16, planes), tensors)
        .unwrap_err()
        .to_string()
}

/// Changes of a good tensor, each with the error's text.
#[test]
fn what_does_not_fit_is_told() {
    type Change = fn(&mut Tensor);
    let cases: [(Change, &str); 15] = [
        (|t| t.axes = "BHNX".into(), "'X'"),
        (|t| t.axes = "BHHD".into(), "have H twice"),
        (|t| t.axes = "BHKD".into(), "need B and N, or S"),
        (|t| t.axes = "BHN".into(), "need C or D"),
        (
            |t| t.shape = vec![8, 2, 4],
            "as many sizes and strides, not 3 and 4",
        ),
        (|t| t.shape[0] = 0, "axis B has size 0"),
        (|t| t.strides[3] = 4, "side by side"),
        (|t| t.strides[0] = 8, "overlaps itself"),
        (|t| t.bytes -= 1, "its storage has"),
        (|t| t.strides[0] = u64::MAX / 2, "behind the last address"),
        (|t| t.planes = vec![1], "plane 1 is not in a space of 1"),
        (|t| t.planes = vec![], "0 planes are named"),
        (
            |t| t.heads = Some((1, 3)),
            "heads 1 to 3 are not in plane 0, which has 2",
        ),
        (|t| t.heads = Some((1, 2)), "axis H has size 2, and heads 1 to 2"),
        (
            |t| t.row_offset = 2,
            "rows of 16 bytes, and its tensors have bytes 2 to 18",
        ),
    ];
    let good = tensor("BHND", &[8, 2, 4, 8]);
    PagedCache::new(&space(16, &[(2, 16)]), std::slice::from_ref(&good)).unwrap();
    for (change, says) in cases {
        let mut wrong = good.clone();
        change(&mut wrong);
        let error = refused(&[(2, 16)], &[wrong]);
        assert!(error.contains(says), "{error:?} should say {says:?}");
    }
}

#[test]
fn tensors_must_go_together() {
    let planes = [(2, 16), (2, 16)];
    let one = tensor("BHND", &[8, 2, 4, 8]);
    let other = |change: fn(&mut Tensor)| {
        let mut other = Tensor {
            address: 1 << 20,
            planes: vec![1],
            ..tensor("BHND", &[8, 2, 4, 8])
        };
        change(&mut other);
        refused(&planes, &[one.clone(), other])
    };
    assert!(other(|t| t.address = 4096 + 8).contains("planes 0 and 1 share memory"));
    assert!(
        other(|t| *t = Tensor {
            planes: vec![1],
            ..tensor("BHND", &[9, 2, 4, 8])
        })
        .contains("9 blocks of 4")
    );
    assert!(other(|t| t.planes = vec![0]).contains("bytes 0 to 16, 0 to 16"));
    assert!(refused(&planes, &[]).contains("there are none"));
    let k = tensor("KBNHD", &[3, 8, 4, 2, 4]);
    assert!(refused(&[(2, 16)], &[k]).contains("axis K has size 3"));
}

#[test]
fn layers_that_interleave_do_not_overlap() {
    // BLHNC: each layer's view strides over the others.
    let view = |layer: u64| Tensor {
        address: 4096 + layer * 128,
        strides: vec![256, 64, 16, 2],
        bytes: 256 * 8 - layer * 128,
        planes: vec![layer as usize],
        ..tensor("BHNC", &[8, 2, 4, 8])
    };
    let planes = [(2, 16), (2, 16)];
    PagedCache::new(&space(16, &planes), &[view(0), view(1)]).unwrap();
    let mut near = view(1);
    near.address -= 2;
    assert!(refused(&planes, &[view(0), near]).contains("share memory"));
}

/// Latents and an indexer's keys: each block has the rows of one, then those of the other.
#[test]
fn rows_of_different_widths_may_share_a_page() {
    let view = |plane: usize, at: u64, elements: u64| Tensor {
        address: 4096 + at,
        bytes: 160 * 8 + 16 - at,
        strides: vec![160, elements * 2, 2],
        planes: vec![plane],
        ..tensor("BNC", &[8, 4, elements])
    };
    let planes = [(1, 32), (1, 8)];
    PagedCache::new(&space(16, &planes), &[view(0, 0, 16), view(1, 128, 4)]).unwrap();
    for near in [126, 130] {
        let error = refused(&planes, &[view(0, 0, 16), view(1, near, 4)]);
        assert!(error.contains("share memory"), "{near}: {error}");
    }
}

#[test]
fn slots_and_blocks_are_checked() {
    let cache = PagedCache::new(&space(16, &[(2, 16)]), &[tensor("BHND", &[8, 2, 4, 8])]).unwrap();
    let blocks = |table: &[u32], first_token| cache.spans(SlotMapping::Blocks { table, first_token }, 0..16);
    assert_eq!(blocks(&[0, 1, 2, 3], 0).unwrap().as_slice().len(), 4);
    let starts_inside = blocks(&[0, 1, 2, 3, 4], 3).unwrap();
    assert_eq!(starts_inside.as_slice()[0].tokens, 1);
    assert_eq!(starts_inside.as_slice().len(), 5);
    let says = |result: Result<Spans, MappingError>| result.unwrap_err().to_string();
    assert!(says(blocks(&[0, 1, 2], 0)).contains("end before token 12"));
    assert!(says(blocks(&[0, 1, 2, 8], 0)).contains("block 8 is not in a cache of 8 blocks"));
    assert!(says(blocks(&[0, 1, 2, 1], 0)).contains("written to block 1, token 0"));
    assert!(says(blocks(&[0], u64::MAX)).contains("end before token"));
    let slots = |slots: &[i64], tokens| cache.spans(SlotMapping::Slots(slots), tokens);
    assert!(says(slots(&[1, 2], 0..3)).contains("3 tokens need as many slots"));
    assert!(says(slots(&[1, 1], 0..2)).contains("block 0, token 1"));
    assert!(says(slots(&[32], 0..1)).contains("block 8"));
    assert!(says(slots(&[], 5..17)).contains("tokens 5 to 17"));
    let holed = slots(&[4, -1, 6], 0..3).unwrap();
    assert_eq!((holed.tokens(), holed.as_slice().len()), (2, 2));
}

#[test]
fn a_store_leaves_no_token_out() {
    let space = space(3, &[(2, 16)]);
    let memory = vec![0_u8; 1024];
    let there = Tensor {
        address: memory.as_ptr() as u64,
        ..tensor("BHND", &[8, 2, 4, 8])
    };
    let cache = PagedCache::new(&space, &[there]).unwrap();
    let job = CopyJob {
        planes: 0..1,
        spans: cache.spans(SlotMapping::Slots(&[4, -1, 6]), 0..3).unwrap(),
        at: 0,
    };
    // SAFETY: the memory outlives it.
    let copier = unsafe { CpuCopier::new(cache, ONE_THREAD) };
    let object = vec![0; space.layout().object_len()];
    let refused = copier.store(object.clone(), &job).err().unwrap();
    assert!(
        matches!(
            refused,
            CopyError::Tokens {
                tokens: 2,
                chunk_tokens: 3
            }
        ),
        "{refused}"
    );
    let other = super::space(4, &[(2, 16)]);
    let of_other = PagedCache::new(&other, &[tensor("BHND", &[8, 2, 4, 8])]).unwrap();
    let job = CopyJob {
        spans: of_other.spans(SlotMapping::Slots(&[0, 1, 2, 3]), 0..4).unwrap(),
        ..job
    };
    assert!(matches!(
        copier.load(object, &job).err().unwrap(),
        CopyError::OtherCache
    ));
}
