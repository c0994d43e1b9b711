//! The part that runs in the engine's process.
//!
//! | folder      | what                                                                           |
//! |-------------|--------------------------------------------------------------------------------|
//! | `client`    | calls to a node's daemon, and its arena mapped                                 |
//! | `copy`      | chunks into an engine's pages and back, on CPUs and GPUs                       |
//! | `rank`      | a rank's loads and stores: client and copies together                          |
//! | `follower`  | what the node's memory and disks hold, for an engine's own KV events           |
//! | `direct`    | whole calls for programs that are no engine: the Python API and the C API      |

pub mod client;
pub mod copy;
pub mod direct;
pub mod follower;
pub mod rank;
