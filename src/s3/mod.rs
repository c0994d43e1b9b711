//! One request's way down to S3.
//!
//! | folder   | what                                                                              |
//! |----------|-----------------------------------------------------------------------------------|
//! | `object` | the calls that kvgate needs, with errors that say what they mean                  |
//! | `fanout` | which of the server's addresses gets a request, retries and hedges                |
//! | `net`    | connections: the body of a ranged GET goes from the socket straight into a slot   |
//! | `dns`    | the addresses behind a name, kept up to date                                      |

pub mod dns;
pub mod fanout;
pub mod net;
pub mod object;
