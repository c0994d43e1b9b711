#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvgate::s3::net::fuzz_answer(bytes));
