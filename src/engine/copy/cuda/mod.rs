//! Copies by the GPU that the engine computes on, in the engine's own process and primary context.
//!
//! **Mechanism.** The arena is registered as pinned memory ([`Pinned`]). A load copies this rank's share of a
//! chunk, as it lies in the object, into a small staging ring by strided DMA in pieces, and a kernel writes each
//! piece's rows into the pages while the next piece is on the bus ([`lane`](self)). A store is the reverse, with a
//! ring and streams of its own, so both directions of the bus are used at once. Where a block's tokens are long
//! runs in the pages, DMAs go there without a kernel. A worker's copiers, one for each group of layers, share streams
//! and rings ([`Lanes`]), so that device memory does not grow with their number.
//!
//! **Order.** A load writes pages only after the work that the engine's stream was given before it; a store reads
//! them only after the forward pass. Each load waits for its own mark alone: loads whose mark is not passed yet
//! have a lane of their own, so that they delay no older load. Streams have the default priority, which is the
//! lowest. A staging buffer is reused when the copy that reads it is done, a slot of the arena when its
//! [`Pending`](super::Pending) is done. A test removes each of these waits in turn (`tests/gpu/waits.rs`).
//!
//! **Why not** copy by the kernel straight out of pinned memory: it reaches two thirds of the bus and holds SMs for
//! as long as the bus takes. Why no IPC with the daemon: it works for some allocations only, and a dying daemon
//! must not take a GPU with it.
//!
//! | file     | what                                                          |
//! |----------|---------------------------------------------------------------|
//! | `gpu`    | driver, primary context, module, events                       |
//! | `kernel` | the kernels' parameters                                       |
//! | `pinned` | the arena, registered in pieces                               |
//! | `dma`    | blocks of rows, cut where registrations meet                  |
//! | `shares` | this rank's share of each plane, and its pieces               |
//! | `lane`   | streams and staging ring of one direction                     |
//! | `lanes`  | the lanes of a worker, which its copiers share                |
//! | `copier` | loads and stores                                              |
//! | `pages`  | pages of our own, for `kvgate gpu`                            |

mod copier;
mod dma;
mod gpu;
mod kernel;
mod lane;
mod lanes;
mod pages;
mod pinned;
mod shares;

pub use copier::{CudaCopier, CudaOptions};
pub use gpu::{CudaError, Gpu, GpuEvent, Presence, StreamMark};
pub use kernel::PTX;
pub use lanes::Lanes;
pub use pages::{DevicePages, PagesError};
pub use pinned::{Mapped, Pinned};
