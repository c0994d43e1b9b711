//! The CUDA code without a GPU: the real cudarc calls go to a driver of our own, and kernels are compiled by g++.
//!
//! | file       | what                                                                      |
//! |------------|---------------------------------------------------------------------------|
//! | `mock/`    | the driver (`libcuda.cc`), and what makes the kernels run on a CPU        |
//! | `mock.rs`  | builds it, loads it before cudarc looks for one, steers it                |
//! | `layouts`  | `kvgate gpu check`'s cases, lazy and permuted                             |
//! | `stage`    | an engine that computes and copies on streams, as all others below use it |
//! | `groups`   | several copiers on the lanes of one worker: groups of layers, and a state   |
//! | `waits`    | each wait is taken out, each number made wrong; all must be noticed       |
//! | `failures` | every call of the driver fails once                                       |
//! | `kernel`   | mistakes planted in the kernels' source                                   |
//! | `command`  | `kvgate gpu`, with and without a driver                                   |
//! | `worker`   | a rank and a daemon, and a GPU that fails                                 |
//!
//! It can't show speed, nor that NVIDIA's driver takes our PTX: `kvgate gpu check` does, where there is a GPU.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::naive_bytecount,
    clippy::unused_self,
    reason = "small numbers; and whoever steers the driver must have it"
)]

mod command;
mod failures;
mod groups;
mod kernel;
mod layouts;
mod mock;
mod stage;
mod waits;
mod worker;
