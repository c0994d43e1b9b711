//! The kernels' source on the CPU: nothing outside of the pages is touched, and planted mistakes are found.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;

use kvgate::engine::copy::cuda::Gpu;
use kvgate::tools::gpu_check::{cases, check};

use crate::layouts::OPTIONS;
use crate::mock::{CHILD, Mock, build, fails_in_child, function};

/// `struct Part`, `struct Span` and `struct Params` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    address: u64,
    block_stride: u64,
    token_stride: u64,
    head_stride: u64,
    share_offset: u64,
    row_bytes: u32,
    row_offset: u32,
    run_bytes: u32,
    heads: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Span {
    token: u32,
    tokens: u32,
    block: u32,
    offset: u32,
}

#[repr(C)]
struct Params {
    parts: *const Part,
    spans: *const Span,
    staging: u64,
    share_offset: u64,
    parts_count: u32,
    spans_count: u32,
    tiles: u32,
    unit: u32,
    chunk_tokens: u32,
    blocks: u32,
    block_tokens: u32,
    reserved: u32,
}

/// Copies one part of 4 blocks of 8 tokens, whatever the span says. Pages and staging afterwards.
fn run(kernel: &str, span: Span) -> (Vec<u8>, Vec<u8>) {
    // Around both there is room for what goes wrong.
    let (mut pages, mut staging) = (vec![1_u8; 3 << 16], vec![2_u8; 3 << 16]);
    let part = Part {
        address: pages[1 << 16..].as_mut_ptr() as u64,
        block_stride: 8 * 32,
        token_stride: 32,
        head_stride: 4 * 8 * 32,
        share_offset: 0,
        row_bytes: 32,
        row_offset: 0,
        run_bytes: 32,
        heads: 2,
    };
    let params = Params {
        parts: &raw const part,
        spans: &raw const span,
        staging: staging[1 << 16..].as_mut_ptr() as u64,
        share_offset: 0,
        parts_count: 1,
        spans_count: 1,
        tiles: 1,
        unit: 1,
        chunk_tokens: 16,
        blocks: 4,
        block_tokens: 8,
        reserved: 0,
    };
    let launch: extern "C" fn(*const c_char, u32, u32, *const c_void, u64) -> bool = function("run_kernel");
    let name = CString::new(kernel).unwrap();
    assert!(launch(name.as_ptr(), 2, 256, (&raw const params).cast(), 1));
    (pages, staging)
}

#[test]
fn spans_that_lead_outside_touch_nothing() {
    let _mock = Mock::start(0);
    let good = Span {
        token: 3,
        tokens: 5,
        block: 2,
        offset: 3,
    };
    for kernel in ["kvgate_scatter", "kvgate_gather"] {
        let bad = [
            Span { block: 4, ..good },
            Span {
                block: u32::MAX,
                ..good
            },
            Span { offset: 4, ..good },
            Span {
                offset: u32::MAX,
                ..good
            },
            Span {
                offset: 0,
                tokens: 9,
                ..good
            },
            Span { token: 12, ..good },
            Span {
                token: u32::MAX,
                ..good
            },
        ];
        for span in bad {
            let (pages, staging) = run(kernel, span);
            assert!(pages.iter().all(|&byte| byte == 1) && staging.iter().all(|&byte| byte == 2));
        }
        let (pages, staging) = run(kernel, good);
        let written = pages.iter().filter(|&&byte| byte == 2).count()
            + staging.iter().filter(|&&byte| byte == 1).count();
        assert_eq!(written, 2 * 5 * 32, "{kernel}");
    }
}

/// Lines of the source, each with a mistake that somebody could have made there.
const MISTAKES: [(&str, &str); 20] = [
    ("if (unit < units)", "if (unit <= units)"),
    ("if (k < count)", "if (k + 1 < count)"),
    ("count = k + 1;", "count = k;"),
    ("if (span.block >= p.blocks) continue;", ""),
    ("if (span.block >= p.blocks)", "if (span.block > p.blocks)"),
    ("span.offset >= p.block_tokens || ", ""),
    ("span.tokens > p.block_tokens - span.offset", "false"),
    ("span.token >= p.chunk_tokens || ", ""),
    ("span.tokens > p.chunk_tokens - span.token", "false"),
    ("at += gridDim.x", "at += gridDim.x + 1"),
    ("span.block * part.block_stride", "span.block * part.token_stride"),
    (" + span.offset * part.token_stride", ""),
    ("part.share_offset - p.share_offset", "part.share_offset"),
    ("head * p.chunk_tokens", "head * span.tokens"),
    ("span.token + token", "token"),
    (" + part.row_offset + byte", " + byte"),
    ("heads_inner ? part.heads : span.tokens", "span.tokens"),
    ("(tile * DEPTH + k) * blockDim.x", "(tile + k) * blockDim.x"),
    ("at / p.tiles", "at / (p.tiles + 1)"),
    ("pair / p.spans_count", "pair % p.parts_count"),
];

/// All that tells a good kernel from a bad one.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    spans_that_lead_outside_touch_nothing();
    for seed in [0, 1] {
        let _mock = Mock::start(seed);
        let gpu = Gpu::open(0).unwrap();
        for case in cases().unwrap() {
            check(&gpu, &case, OPTIONS).unwrap();
        }
    }
}

#[test]
fn every_mistake_in_the_kernels_is_caught() {
    let source = include_str!("../../kernels/paged.cu");
    assert!(!fails_in_child("kernel::child", "as it is", None));
    for (nth, (right, wrong)) in MISTAKES.into_iter().enumerate() {
        assert_eq!(source.matches(right).count(), 1, "{right:?} must be there, once");
        let planted =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("paged-{}-{nth}.cu", std::process::id()));
        std::fs::write(&planted, source.replace(right, wrong)).unwrap();
        let library = build(&format!("mistake-{nth}"), Some(&planted));
        let caught = fails_in_child("kernel::child", wrong, Some(&library));
        std::fs::remove_file(&planted).unwrap();
        std::fs::remove_file(&library).unwrap();
        assert!(caught, "nobody notices {wrong:?} in place of {right:?}");
    }
}
