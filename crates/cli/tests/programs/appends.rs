//! Threads that append to one file under `jericho run`, each with a descriptor of its own.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use crate::roles;
use crate::volume::Volume;

const THREADS: usize = 32;
/// Records that each thread appends.
const RECORDS: usize = 312;
const RECORD: usize = 4_096;
/// Least writes that must be inline: 95 in a hundred. The first few writes of each descriptor go through the kernel.
const INLINE_MIN: usize = THREADS * RECORDS * 95 / 100;
const HANG: Duration = Duration::from_secs(240);

fn record(thread: usize, number: usize) -> Vec<u8> {
    let mut record = vec![thread as u8; RECORD];
    record[1..3].copy_from_slice(&(number as u16).to_le_bytes());
    record
}

#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn appender() {
    let Some([path]) = roles::role() else { return };
    let line = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (path, line) = (&path, &line);
            scope.spawn(move || {
                let log = File::options().append(true).create(true).open(path);
                let mut log = log.expect("open");
                for number in 0..RECORDS {
                    // The threads append in rounds, so each append finds an end that other threads moved.
                    line.wait();
                    // One call must write the whole record: a second call could append behind another thread's record.
                    let written = log.write(&record(thread, number)).expect("write");
                    assert_eq!(written, RECORD);
                }
            });
        }
    });
}

/// Asserts that the file holds each record once, and each thread's records in the order in which the thread wrote them.
fn assert_whole(path: &Path) {
    let log = std::fs::read(path).expect("read");
    assert_eq!(log.len(), THREADS * RECORDS * RECORD);
    let mut next = [0; THREADS];
    for (n, found) in log.chunks(RECORD).enumerate() {
        let thread = usize::from(found[0]);
        let number = next.get_mut(thread);
        let number = number.unwrap_or_else(|| panic!("record {n} begins with {}", found[0]));
        assert!(
            found == record(thread, *number),
            "record {n} is not number {number} of thread {thread}"
        );
        *number += 1;
    }
}

/// Returns the number of inline writes in the library's report.
pub fn inline(report: &str) -> usize {
    let writes = report.lines().find(|line| line.contains("writes:"));
    let words: Vec<&str> = writes.expect("writes").split_whitespace().collect();
    let inline = words.iter().position(|word| *word == "inline");
    let count = inline.expect("the number of inline writes") - 1;
    words[count].parse().expect("a number")
}

#[test]
fn appends_of_several_threads_to_one_file_stay_inline_and_whole() {
    let volume = Volume::mounted("256M", 1, "256M");
    let (path, report) = (volume.at("log"), volume.outside("report"));
    let mut command = roles::command("appends::appender", &[path.to_str().expect("UTF-8")], true);
    let mut appender = roles::start(command.env("JERICHO_REPORT", &report));
    let status = roles::wait_for_end(&mut appender, "the appending program", HANG);
    assert!(status.success(), "{}", roles::output_of(&mut appender));
    assert_whole(&path);
    let report = std::fs::read_to_string(report).expect("the report");
    assert!(inline(&report) >= INLINE_MIN, "{report}");
    volume.finish();
}
