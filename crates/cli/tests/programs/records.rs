//! Readers see all of a write over many pages or nothing of it. This holds also when the file changes or a page is evicted in the
//! middle of the write, so that the library completes the write through the kernel.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::commands::wait_until;
use crate::program::{under_run, within_limit};
use crate::volume::Volume;

const SOURCE: &str = include_str!("records.c");
/// Bytes of a record: as many as one request of the kernel carries.
const BYTES: usize = 1 << 20;
const SECONDS: u64 = 6;

struct Records {
    volume: Volume,
    program: PathBuf,
    count: usize,
    bytes: usize,
}

impl Records {
    fn new(cache: &'static str, count: usize, bytes: usize) -> Records {
        let volume = Volume::mounted("256M", 2, cache);
        let program = volume.compile("records", SOURCE, &["-O2", "-Wall", "-Werror"]);
        // The file has a page after the records.
        std::fs::write(volume.at("f"), vec![1; count * bytes + 4096]).expect("write");
        Records {
            volume,
            program,
            count,
            bytes,
        }
    }

    /// Starts one of the programs, which ends when its standard input is closed.
    fn start(&self, number: usize, mut command: Command, what: &str) -> Child {
        let (count, bytes) = (self.count.to_string(), self.bytes.to_string());
        command.arg(what).arg(self.volume.at("f"));
        command.args([count, bytes, number.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    }

    /// Runs all programs at the same time. Each is `(under run, what)`. The first one ends last, because the guarantee holds only while
    /// there is an inline writer.
    fn run(self, programs: &[(bool, &str)]) {
        let mut running = Vec::new();
        for (number, (inline, what)) in programs.iter().enumerate() {
            let command = match inline {
                true => under_run(&self.program),
                false => within_limit(&self.program),
            };
            running.push(self.start(number, command, what));
            wait_until("a program writes inline", || {
                self.volume.stat()["writes_granted"] != 0
            });
        }
        std::thread::sleep(Duration::from_secs(SECONDS));
        let mut said = Vec::new();
        for (mut program, (_, what)) in running.into_iter().zip(programs).rev() {
            drop(program.stdin.take());
            let output = program.wait_with_output().expect("the program ends");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{what}: {error}");
            let times: u64 = String::from_utf8_lossy(&output.stdout)
                .trim()
                .parse()
                .expect("a number");
            said.push((*what, times));
        }
        println!("{said:?}");
        assert!(said.iter().all(|(_, times)| *times > 0), "{said:?}");
        let log = self.volume.log();
        assert!(!log.contains("for too long"), "{log}");
        self.volume.finish();
    }
}

#[test]
fn records_are_whole_though_the_file_is_changed_in_the_middle_of_their_writes() {
    Records::new("64M", 2, BYTES).run(&[
        (true, "write"),
        (true, "read"),
        (false, "read"),
        (false, "punch"),
    ]);
}

#[test]
fn records_are_whole_though_their_pages_are_evicted_repeatedly() {
    Records::new("16M", 40, BYTES).run(&[(true, "write"), (true, "read"), (false, "read")]);
}

#[test]
fn records_are_whole_for_readers_of_several_buffers() {
    // Half as many bytes: the kernel counts the pages of each buffer separately, so one request carries fewer bytes.
    Records::new("64M", 2, BYTES / 2).run(&[(true, "write"), (true, "vector"), (false, "punch")]);
}
