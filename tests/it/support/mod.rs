//! Helpers that the tests share.
//!
//! | file            | what                                                                        |
//! |-----------------|-----------------------------------------------------------------------------|
//! | `backends`      | the S3 servers that are there, and a test's own folder in each               |
//! | `fixture`       | a small space, prompts, arenas, and gateways over any store                  |
//! | `daemon`        | a daemon in this process, and what engines do with it                        |
//! | `fleet`         | daemons in this process that are each other's peers                          |
//! | `program`       | the program itself, as a process with a folder of its own                    |
//! | `paused_store`  | a store in memory whose requests wait until a test lets them go              |
//! | `capped`        | a proxy of so many bytes a second, which can fail, hang and come back        |
//! | `capped_prompt` | a stored prompt behind a name with several addresses, a capped proxy at each |
//! | `dns_server`    | a DNS server whose answers a test chooses, and dnsmasq                       |
//! | `ranks`         | ranks of a model with several kinds of KV, and what must be in their pages   |
//! | `tls_front`     | TLS in front of a server that has none                                       |
//! | `way`           | a way to a server on which some requests get another answer                  |

pub mod backends;
pub mod capped;
pub mod capped_prompt;
pub mod daemon;
pub mod dns_server;
pub mod fixture;
pub mod fleet;
pub mod paused_store;
pub mod program;
pub mod ranks;
pub mod tls_front;
pub mod way;
