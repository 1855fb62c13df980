#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| jericho_fuzz::run("nbd", data));
