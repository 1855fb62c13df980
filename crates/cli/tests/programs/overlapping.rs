//! Of two overlapping writes over several pages, one is last in all pages. A read over several pages sees all of a write or nothing
//! of it. This holds inline, through the mount, and for both at once.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::program::{under_run, within_limit};
use crate::volume::Volume;

const BYTES: usize = 60_000;
const AT: u64 = 3_000;
const SECONDS: u64 = 3;

/// Writes blocks of one repeated byte, with a different byte each time, and reads them. Prints the number of rounds.
const PROGRAM: &str = "
import os, sys, time
first, at, count = map(int, sys.argv[1:4])
file = os.open('f', os.O_RDWR)
end, n = time.monotonic() + float(sys.argv[4]), 0
# Inline writers continue until the others have ended: the guarantee holds only while there is an inline writer.
inline = sys.argv[5] == 'inline'
while n < 50 or (not os.path.exists('stop') if inline else time.monotonic() < end):
    os.pwrite(file, bytes([first + n % 100]) * count, at)
    seen = os.pread(file, count, at)
    if seen.count(seen[:1]) != count:
        sys.exit('half of a write after %d writes' % n)
    n += 1
print(n)
";

fn run(inline: usize, through_mount: usize) {
    let volume = Volume::mounted("256M", 2, "32M");
    std::fs::write(volume.at("f"), vec![0; 100_000]).expect("write");
    let programs: Vec<_> = (0..inline + through_mount)
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
            // The guarantee begins with the first inline writer, whose first writes go through the kernel.
            let deadline = Instant::now() + Duration::from_secs(60);
            while n < inline && volume.stat()["writes_granted"] == 0 {
                assert!(Instant::now() < deadline, "no program writes inline");
                std::thread::sleep(Duration::from_millis(5));
            }
            program
        })
        .collect();
    // Meanwhile the test reads without the library.
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
        let output = program.wait_with_output().expect("the program ends");
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
fn writes_of_two_inline_programs_do_not_mix() {
    run(2, 0);
}

#[test]
fn writes_of_an_inline_program_and_one_through_the_mount_do_not_mix() {
    run(1, 1);
}
