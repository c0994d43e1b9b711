//! The C API of `include/kvgate.h`, which has the documentation: the calls of [`kvgate::engine::direct`] behind pointers.
//!
//! | file       | what                                                          |
//! |------------|---------------------------------------------------------------|
//! | `status`   | status codes, the last error's text, panics                   |
//! | `borrow`   | what callers hand over, checked for NULL and turned into Rust |
//! | `session`  | sessions and their calls                                      |
//! | `space`    | spaces                                                        |
//!
//! All unsafe code rests on the header's rules: pointers are NULL or valid for the length that comes with them, handles
//! come from this library and are used until they are freed, and a call's memory is the call's until it returns.

mod borrow;
mod session;
mod space;
mod status;
