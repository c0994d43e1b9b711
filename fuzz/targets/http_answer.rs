//! Answers from a server: any bytes are read to an end without a panic, and within the memory limit.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvgate::s3::net::fuzz_answer(bytes));
