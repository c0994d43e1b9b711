//! Paged copies: from a chunk's object in host memory into the pages that an engine chose, and back.
//!
//! **Mechanism.** An engine describes each tensor of its KV memory once, by the meaning of its axes
//! ([`Tensor`]); [`PagedCache`] checks that description against the space and turns it into *parts*: for each plane
//! (and for K and V where they are apart) an address and three strides. That is all a copy needs to know, so every
//! layout of every engine is the same loop. Where a chunk's tokens go is a list of *spans* ([`Span`]), made from a
//! block table or from token slots ([`SlotMapping`]). A [`Copier`] then moves the bytes: [`CpuCopier`] for engines
//! on CPUs, [`CudaCopier`] for those on NVIDIA GPUs, [`FrameworkCopier`] for those on any other device, by the engine's
//! own framework.
//!
//! **Why.** The object has head-major planes, so that any rank's share of a plane is one run; pages have whatever
//! order the engine's attention kernels like. With one description there is one kernel, one test and one proof for
//! all of them.
//!
//! **Not for** conversions: rows are moved as they are. Who may touch a slot is the node's business; a copy only
//! keeps what it was given until the device is done with it.
//!
//! | file       | what                                                                       |
//! |------------|----------------------------------------------------------------------------|
//! | `tensor`   | a tensor by its axes                                                       |
//! | `cache`    | all tensors together, checked: parts                                       |
//! | `overlap`  | whether two parts touch the same bytes                                     |
//! | `mapping`  | a chunk's tokens in blocks: spans                                          |
//! | `region`   | one part of one span: two loops of runs                                    |
//! | `object`   | memory that a copy reads or writes, kept until it is done                  |
//! | `copier`   | the interface: load, store, pending                                        |
//! | `cpu`      | copies by the CPU, and the reference for the others                        |
//! | `cuda/`    | copies by the GPU: pinned arena, staging ring, kernel of `kernels/paged.cu` |
//! | `framework` | copies by the engine's framework (PyTorch), on all other devices          |
//! | `pages`    | pages in host memory of our own, for those who have no engine              |
//! | `known`    | the layouts of vLLM, SGLang and FlashInfer by name, for tests and `kvgate gpu` |

#![allow(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits here, and numbers were checked against the cache"
)]

mod cache;
mod copier;
mod cpu;
pub mod cuda;
mod error;
mod framework;
pub mod known;
mod mapping;
mod object;
mod overlap;
mod pages;
mod region;
mod tensor;

pub use cache::{PagedCache, PlanePart};
pub use copier::{Copier, CopyJob, EngineStream, Mark, Pending, wait_for_all};
pub use cpu::{CpuCopier, CpuOptions};
pub use cuda::{CudaCopier, CudaOptions};
pub use error::{CopyError, LayoutError, MappingError};
pub use framework::{Framework, FrameworkCopier, FrameworkMark, FrameworkPart, FrameworkRows};
pub use mapping::{SlotMapping, Span, Spans};
pub use object::{Source, Target};
pub use pages::{HostPages, HostPagesError};
pub use tensor::Tensor;

#[cfg(test)]
mod tests;
