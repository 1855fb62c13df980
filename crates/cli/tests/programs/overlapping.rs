//! Overlapping writes over several pages end as one or the other, and reads over several pages see all of a write or none of it:
//! inline, through the mount, and both at once.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::program::{under_run, within_limit};
use crate::volume::Volume;

const BYTES: usize = 60_000;
const AT: u64 = 3_000;
const SECONDS: u64 = 3;

/// Writes blocks of one repeated byte, another byte each time, and reads; prints how often it did.
const PROGRAM: &str = "
import os, sys, time
first, at, count = map(int, sys.argv[1:4])
file = os.open('f', os.O_RDWR)
end, n = time.monotonic() + float(sys.argv[4]), 0
# Inline writers go on until the others have ended: without one nothing is promised.
inline = sys.argv[5] == 'inline'
while n < 50 or (not os.path.exists('stop') if inline else time.monotonic() < end):
    os.pwrite(file, bytes([first + n % 100]) * count, at)
    seen = os.pread(file, count, at)
    if seen.count(seen[:1]) != count:
        sys.exit('half of a write after %d writes' % n)
    n += 1
print(n)
";

fn run(inline: usize, by_mount: usize) {
    let volume = Volume::mounted("256M", 2, "32M");
    std::fs::write(volume.at("f"), vec![0; 100_000]).expect("write");
    let programs: Vec<_> = (0..inline + by_mount)
        .map(|n| {
            let mut command = match n < inline {
                true => under_run("python3"),
                false => within_limit("python3"),
            };
            command
                .args(["-c", PROGRAM, &(1 + n * 100).to_string()])
                .args([AT.to_string(), BYTES.to_string(), SECONDS.to_string()])
                .arg(if n < inline { "inline" } else { "by the mount" })
                .current_dir(volume.mnt())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let program = command.spawn().expect("python3");
            // The promise begins with the first inline writer, whose first writes are ordinary calls.
            let deadline = Instant::now() + Duration::from_secs(60);
            while n < inline && volume.stat()["writes_granted"] == 0 {
                assert!(Instant::now() < deadline, "nobody writes inline");
                std::thread::sleep(Duration::from_millis(5));
            }
            program
        })
        .collect();
    // Reads without the library in the meantime.
    let (file, mut bytes, mut reads) =
        (File::open(volume.at("f")).expect("open"), vec![0; BYTES], 0);
    let end = Instant::now() + Duration::from_secs(SECONDS);
    while Instant::now() < end || reads == 0 {
        file.read_exact_at(&mut bytes, AT).expect("read");
        assert!(
            bytes.iter().all(|b| *b == bytes[0]),
            "half of a write after {reads} reads"
        );
        reads += 1;
    }
    for (n, program) in programs.into_iter().enumerate().rev() {
        if n < inline {
            std::fs::write(volume.at("stop"), "").expect("write");
        }
        let output = program.wait_with_output().expect("it ends");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    file.read_exact_at(&mut bytes, AT).expect("read");
    assert!(
        bytes.iter().all(|b| *b == bytes[0]),
        "two writes were mixed"
    );
    let log = volume.log();
    assert!(!log.contains("for too long"), "{log}");
    drop(file);
    volume.finish();
}

#[test]
fn of_two_programs_that_write_inline() {
    run(2, 0);
}

#[test]
fn of_one_inline_and_one_by_the_mount() {
    run(1, 1);
}
