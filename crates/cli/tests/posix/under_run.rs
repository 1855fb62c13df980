//! The same behaviour for programs that read and write through the preload library, and a test that the library serves them.

use super::support::{Volume, again, jericho, pattern, succeed};

#[test]
fn every_case_has_the_same_result_in_a_program_under_run() {
    // Inline reads do not change access times, so the tests of access times cannot run here.
    again::cases_again(&["under_run::", "access_times::"]);
}

/// Reads and writes cached pages many times. Prints how many read and write calls the kernel counted.
const CALLS: &str = "
import os
file = os.open('f', os.O_RDWR)
os.pread(file, 4096, 0)
os.pwrite(file, b'x', 0)

def calls():
    fields = dict(line.split(': ') for line in open('/proc/self/io'))
    return int(fields['syscr']), int(fields['syscw'])

before = calls()
for n in range(2000):
    os.pread(file, 4096, n % 16 * 4096)
    os.pwrite(file, bytes([n % 256]) * 100, n % 16 * 4096 + 50)
after = calls()
for page in range(16):
    last = 2000 - 16 + page
    assert os.pread(file, 100, page * 4096 + 50) == bytes([last % 256]) * 100
print(after[0] - before[0], after[1] - before[1])
";

#[test]
fn reads_and_writes_of_cached_pages_make_no_system_calls() {
    let v = Volume::mounted();
    std::fs::write(v.at("f"), pattern(1, 65_536)).unwrap();
    let mut command = jericho(["run", "--", "python3", "-c", CALLS]);
    let said = succeed(command.current_dir(v.mnt()));
    let calls: Vec<u32> = said
        .split_whitespace()
        .map(|n| n.parse().expect("a number"))
        .collect();
    // The program makes a few calls to read the counters, and an access goes through the kernel if write-back has its page.
    assert!(
        matches!(calls[..], [reads, writes] if reads < 100 && writes < 100),
        "of 2,000 reads and writes the kernel saw {said}"
    );
    // Programs without the library read the bytes that the program wrote inline.
    let bytes = std::fs::read(v.at("f")).unwrap();
    let mut expected = pattern(1, 65_536);
    expected[0] = b'x';
    for page in 0..16 {
        let last = (2000 - 16 + page) % 256;
        expected[page * 4096 + 50..][..100].fill(last as u8);
    }
    assert!(bytes == expected);
}
