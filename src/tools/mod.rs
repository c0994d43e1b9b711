//! The program `kvgate`: its commands, and code that only they need.
//!
//! | folder      | what                                                                           |
//! |-------------|--------------------------------------------------------------------------------|
//! | `cli`       | a file a command: arguments, progress, reports                                 |
//! | `bench`     | the speed of an S3 server, by kvgate's own requests                            |
//! | `demo`      | the whole path of a KV cache, on one machine                                   |
//! | `doctor`    | all that a node needs, checked, with what to do                               |
//! | `gpu_check` | correctness and speed of copies to and from a GPU                              |
//! | `model`     | the kinds of KV of a model, by its config.json or its name                       |
//! | `replay`    | a trace through the eviction policies                                            |
//! | `s3_server` | the configured S3 server, or one in this process                               |

pub mod bench;
pub mod cli;
pub mod demo;
pub mod doctor;
pub mod gpu_check;
mod model;
pub mod replay;
mod s3_server;
