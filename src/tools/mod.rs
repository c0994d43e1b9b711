//! The program `kvgate`: its commands, and what only they need.
//!
//! | folder      | what                                                                           |
//! |-------------|--------------------------------------------------------------------------------|
//! | `cli`       | a file a command: arguments, progress, reports                                 |
//! | `bench`     | how fast an S3 server is, by kvgate's own requests                             |
//! | `demo`      | the whole way of a KV cache, on one machine                                    |
//! | `gpu_check` | whether copies to and from a GPU are right, and how fast                       |
//! | `inventory` | what a bucket holds: listing, checking, removing                               |
//! | `s3_server` | the configured S3 server, or one in this process                               |

pub mod bench;
pub mod cli;
pub mod demo;
pub mod gpu_check;
pub mod inventory;
mod s3_server;
