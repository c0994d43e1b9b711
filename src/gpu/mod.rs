//! `kvgate gpu`: what GPUs are here, whether copies to and from their pages are right, and how fast they are.
//!
//! | file    | what                                                             |
//! |---------|------------------------------------------------------------------|
//! | `pages` | an engine's paged cache, on the device and as a host image of it |
//! | `check` | every known layout both ways, against the CPU's copies           |

mod check;
mod pages;

pub use check::{Case, Checked, GpuCheckError, cases, check};
pub use pages::DevicePages;
