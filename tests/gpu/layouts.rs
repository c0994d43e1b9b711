//! Every known layout, with the driver as late as it may be and in any permitted order.

use kvgate::engine::copy::CudaOptions;
use kvgate::engine::copy::cuda::{Gpu, PTX};
use kvgate::tools::gpu_check::{cases, check};

use crate::mock::{Mock, SEEDS};

/// Small, so that everything has several pieces.
pub const OPTIONS: CudaOptions = CudaOptions {
    piece_bytes: 40 << 10,
    staging_buffers: 2,
    thread_blocks: 3,
    direct_bytes: 4096,
    pin_bytes: 12 << 10,
};

#[test]
fn every_known_layout_is_right_lazy_and_permuted() {
    for seed in SEEDS.step_by(20) {
        let mock = Mock::start(seed);
        let gpu = Gpu::open(0).unwrap();
        let (mut direct, mut all) = (0, 0);
        for case in cases().unwrap() {
            let checked = check(&gpu, &case, OPTIONS).unwrap_or_else(|error| panic!("{error}"));
            direct += usize::from(checked.direct);
            all += 1;
        }
        assert!(all > 60 && direct > 5 && direct < all / 2, "{direct} of {all}");
        drop(gpu);
        assert_eq!(mock.registered(), 0, "pinned memory is left");
    }
}

#[test]
fn the_ptx_has_both_kernels_and_is_for_old_drivers() {
    for kernel in ["kvgate_scatter", "kvgate_gather"] {
        assert!(PTX.contains(&format!(".visible .entry {kernel}(")));
    }
    assert!(PTX.contains(".version 8.0\n.target sm_80\n"));
    assert!(PTX.len() < 64 << 10, "{}", PTX.len());
}
