//! Hosts and HTTP: connections, heads, and bodies that land in slots. It never knows chunks.

mod landing;

pub use landing::{Landing, Watch};
