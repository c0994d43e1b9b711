//! Copies by the GPU that the engine computes on, in the engine's own process and primary context.
//!
//! **Mechanism.** The arena is registered as pinned memory ([`Pinned`]). A load brings this rank's share of a chunk, as
//! it lies in the object, into a small staging ring by strided DMA in pieces, and a kernel puts each piece's rows into
//! the pages while the next piece is on the bus ([`lane`](self)). A store is the same backwards, with a ring and streams
//! of its own, so both directions of the bus are used at once. Where a block's tokens are long runs in the pages, DMAs
//! go there without a kernel.
//!
//! **Order.** A load writes pages only after what the engine's stream was given before it; a store reads them only
//! after the forward pass. Each load waits for its own mark alone: loads whose mark is not passed yet have a lane of their own,
//! so that they hold up no older one. Streams have the default priority, which is the lowest. A staging buffer is used again when the copy that reads it is done, a slot of the arena when
//! its [`Pending`](super::Pending) says so. Each of these waits is taken out by a test (`tests/gpu/waits.rs`).
//!
//! **Why not** copy by the kernel straight out of pinned memory: it reaches two thirds of the bus and holds SMs for as
//! long as the bus takes. Why no IPC with the daemon: it works for some allocations only, and a daemon that dies must
//! not take a GPU with it.
//!
//! | file     | what                                                          |
//! |----------|---------------------------------------------------------------|
//! | `gpu`    | driver, primary context, module, events                       |
//! | `kernel` | what `kernels/paged.cu` is given                              |
//! | `pinned` | the arena, registered in pieces                               |
//! | `dma`    | blocks of rows, cut where registrations meet                  |
//! | `shares` | what of each plane this rank has, and the pieces it goes in   |
//! | `lane`   | streams and staging ring of one direction                     |
//! | `copier` | loads and stores                                              |
//! | `pages`  | pages of our own, for `kvgate gpu`                            |

mod copier;
mod dma;
mod gpu;
mod kernel;
mod lane;
mod pages;
mod pinned;
mod shares;

pub use copier::{CudaCopier, CudaOptions};
pub use gpu::{CudaError, Gpu, GpuEvent, Presence, StreamMark};
pub use kernel::PTX;
pub use pages::{DevicePages, PagesError};
pub use pinned::{Mapped, Pinned};
