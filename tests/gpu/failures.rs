//! Each call of the driver fails once: an error, never a slot used again too early.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvgate::engine::copy::CopyError;
use kvgate::engine::copy::cuda::{CudaError, Gpu};
use kvgate::engine::copy::known::KNOWN;

use crate::mock::Mock;
use crate::stage::{Stage, peek};

/// Everything that is called of the driver, and how it may fail: out of memory, and an error that stays.
const CALLS: [&str; 21] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuLaunchKernel",
];

/// A load and a store; what they say.
fn copies() -> Result<(), CopyError> {
    let stage = Stage::new(&KNOWN[1], usize::MAX)?;
    let (job, object) = (stage.job(0), stage.object(1));
    let copier = stage.copier();
    let loaded = copier.load(object, &job, Some(&copier.mark(stage.stream())?))?;
    loaded.hold_up(stage.stream())?;
    let after = copier.mark(stage.stream());
    let stored = after.map(|after| copier.store(stage.slot(), &job, Some(&after)));
    loaded.wait()?;
    let stored = stored??.wait()?;
    let share = stage.space.layout().plane(0);
    let heads = share.start + share.len() / 4..share.start + share.len() / 4 * 3;
    let object = stage.object(1);
    assert!(
        stored[heads.clone()] == object[heads],
        "it said that all went well"
    );
    Ok(())
}

#[test]
fn every_call_may_fail() {
    let mut failed = 0;
    for name in CALLS {
        let calls = {
            let mock = Mock::start(0);
            copies().unwrap();
            mock.calls(name)
        };
        assert!(calls > 0, "{name} is not called");
        for nth in 1..=calls {
            for code in [2, 700] {
                let mock = Mock::start(1);
                mock.fail(name, nth, code);
                let result = catch_unwind(AssertUnwindSafe(copies));
                let result = result.unwrap_or_else(|_| panic!("{name}, call {nth}, error {code}"));
                failed += usize::from(result.is_err());
                // It does not matter to those who come after.
                mock.reset(0);
                copies().unwrap_or_else(|error| panic!("after {name}, call {nth}, error {code}: {error}"));
            }
        }
    }
    assert!(failed > 100, "{failed}");
}

#[test]
fn memory_that_can_t_be_pinned_is_copied_all_the_same() {
    for nth in 1..6 {
        let mock = Mock::start(nth as u64);
        mock.fail("cuMemHostRegister_v2", nth, 2);
        copies().unwrap();
    }
}

#[test]
fn a_machine_that_lacks_something_says_so() {
    let says = |mock: &Mock, devices, version| {
        mock.machine(devices, version, 1 << 30);
        Gpu::open(0).err().unwrap().to_string()
    };
    let mock = Mock::start(0);
    assert!(says(&mock, 0, 13000).contains("no GPU 0: this machine has 0"));
    assert!(says(&mock, 1, 11080).contains("supports CUDA 11.8, and 12.0 is needed: install driver 525"));
    mock.machine(1, 13000, 200_000);
    let error = Stage::new(&KNOWN[1], usize::MAX).err().unwrap();
    assert!(
        matches!(error, CopyError::Cuda(CudaError::Call { .. })),
        "{error}"
    );
}

/// After an error that stays, nobody knows what the device still does: its slot is not given to others.
#[test]
fn a_slot_of_a_copy_that_failed_is_not_used_again() {
    let mock = Mock::start(0);
    let stage = Stage::new(&KNOWN[1], usize::MAX).unwrap();
    let used = stage.arena.stats().used_bytes;
    let pending = stage.copier().load(stage.object(1), &stage.job(0), None).unwrap();
    mock.fail("cuEventSynchronize", mock.calls("cuEventSynchronize") + 1, 700);
    pending.wait().err().unwrap();
    assert!(stage.arena.stats().used_bytes > used);
    let refused = stage.copier().store(stage.slot(), &stage.job(0), None);
    assert!(refused.is_err());
    mock.reset(0);
}

#[test]
fn a_pending_copy_that_is_dropped_waits() {
    let _mock = Mock::start(0);
    let stage = Stage::new(&KNOWN[1], usize::MAX).unwrap();
    let (job, object) = (stage.job(0), stage.object(1));
    stage.engine.synchronize().unwrap();
    let mut image = peek(stage.base(), stage.bytes());
    drop(stage.copier().load(object.clone(), &job, None).unwrap());
    stage.twin_load(&mut image, &object, &job);
    assert!(peek(stage.base(), stage.bytes()) == image);
}
