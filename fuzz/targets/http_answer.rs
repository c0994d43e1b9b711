#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvgate::net::fuzz_answer(bytes));
