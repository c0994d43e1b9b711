//! The NVIDIA driver and its devices.

use std::path::Path;

use super::Finding;
use super::system::size;
use crate::engine::copy::cuda::{CudaError, Gpu};

const CHECK: &str = "gpu";

pub fn check() -> Vec<Finding> {
    let mut found = Vec::new();
    for device in 0.. {
        match Gpu::open(device).and_then(|gpu| gpu.presence()) {
            Ok(gpu) => {
                let memory = size(gpu.memory_bytes as u64);
                let seen = format!("{device}: {}, {memory}, driver for CUDA {}", gpu.name, gpu.driver);
                found.push(Finding::ok(CHECK, seen));
            }
            Err(CudaError::NoDevice { count: 0, .. }) => {
                let advice = "Look at `nvidia-smi`: the driver is there and sees no GPU";
                found.push(Finding::warning(CHECK, "the driver sees no GPU", advice));
                break;
            }
            Err(CudaError::NoDevice { .. }) => break,
            Err(CudaError::NoDriver) if Path::new("/dev/nvidiactl").exists() => {
                let seen = "there is a GPU, and libcuda.so.1 can't be loaded";
                let advice =
                    "Install the driver's libraries; for a container, --gpus all or the NVIDIA runtime";
                found.push(Finding::failed(CHECK, seen, advice));
                break;
            }
            Err(CudaError::NoDriver) => {
                let seen = "no NVIDIA driver here: engines copy by the CPU, or by their own device's calls";
                found.push(Finding::ok(CHECK, seen));
                break;
            }
            Err(error @ CudaError::DriverTooOld(_)) => {
                found.push(Finding::failed(
                    CHECK,
                    error.to_string(),
                    "Install driver 525 or newer",
                ));
                break;
            }
            Err(error) => {
                let advice = "Look at `nvidia-smi`; `kvgate gpu check` tries every copy";
                found.push(Finding::failed(CHECK, format!("{device}: {error}"), advice));
                break;
            }
        }
    }
    found
}
