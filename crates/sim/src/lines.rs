//! The cache lines that parts of a program read and write.
//!
//! A test runs one of its own tests under valgrind's tool lackey, which prints each access to memory. That test calls [`record`] around
//! each part to be recorded. Lackey does not tell threads apart, but valgrind runs one thread at a time and prints each change. So a record
//! has the accesses of the thread that called `record`, and no other thread's. System calls are not in it: what the kernel writes is missing.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Length of a cache line in bytes.
pub const LINE_BYTES: u64 = 64;

/// Written at the begin and at the end of each record. The trace shows where.
static MARK: Mark = Mark([0; 16], AtomicU64::new(0), [0; 16]);

/// Has cache lines of its own.
#[repr(align(128))]
struct Mark(
    #[expect(dead_code)] [u64; 16],
    AtomicU64,
    #[expect(dead_code)] [u64; 16],
);

/// Tells the process that traces this one where the mark is. Call it before `record`.
pub fn announce() {
    println!("mark {:08x},", &raw const MARK.1 as usize);
}

/// Records the accesses of the calling thread while it runs `part`. One thread at a time may record.
pub fn record<T>(part: impl FnOnce() -> T) -> T {
    MARK.1.store(1, Ordering::SeqCst);
    let result = part();
    MARK.1.store(2, Ordering::SeqCst);
    result
}

/// Where a line was read and written last, as addresses of instructions.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    read: Option<u64>,
    written: Option<u64>,
}

/// The lines that a part of a program used.
#[derive(Default)]
pub struct Record(BTreeMap<u64, Use>);

impl Record {
    /// Returns the number of written lines.
    pub fn written(&self) -> usize {
        self.0
            .values()
            .filter(|line| line.written.is_some())
            .count()
    }

    /// Returns a description of each line that one of two records writes and the other one uses. Leaves out the lines that one of `known` uses.
    pub fn shared_with(&self, other: &Record, known: &[&Record]) -> Vec<String> {
        let both = self.0.iter().filter_map(|(line, own)| {
            let theirs = other.0.get(line)?;
            Some((line, own, theirs))
        });
        both.filter(|(_, own, theirs)| own.written.is_some() || theirs.written.is_some())
            .filter(|(line, ..)| !known.iter().any(|record| record.0.contains_key(line)))
            .map(|(line, own, theirs)| format!("{:#x}: {own:x?} {theirs:x?}", line * LINE_BYTES))
            .collect()
    }

    /// Leaves only the lines that were written.
    #[must_use]
    pub fn only_written(mut self) -> Record {
        self.0.retain(|_, line| line.written.is_some());
        self
    }
}

/// Follows lackey's trace: a line `I  ADDRESS,SIZE` for each instruction, and ` L`, ` S` or ` M` for each load, store and both.
#[derive(Default)]
struct Trace {
    /// The thread that runs, as valgrind numbers it.
    thread: u32,
    instruction: u64,
    /// The thread whose accesses are recorded.
    recorded: Option<u32>,
    records: Vec<Record>,
}

impl Trace {
    /// Follows a line. `mark` is the address of the mark as lackey prints it; empty until it is known. A trace has 100 million lines, and few of
    /// them belong to a record, so this reads no more of a line than it needs.
    fn follow(&mut self, line: &[u8], mark: &[u8]) {
        let (kind, place) = match line {
            [b'-', b'-', ..] => {
                let thread = str::from_utf8(line).ok().and_then(thread_that_begins);
                self.thread = thread.unwrap_or(self.thread);
                return;
            }
            [b'I', b' ', b' ', place @ ..] => (b'I', place),
            [b' ', kind @ (b'L' | b'S' | b'M'), b' ', place @ ..] => (*kind, place),
            _ => return,
        };
        let is_store = matches!(kind, b'S' | b'M');
        if is_store && !mark.is_empty() && place.starts_with(mark) {
            return self.pass_mark();
        }
        if self.recorded != Some(self.thread) {
            return;
        }
        let (Some(record), Some((address, size))) = (self.records.last_mut(), parsed(place)) else {
            return;
        };
        if kind == b'I' {
            self.instruction = address;
            return;
        }
        for line in address / LINE_BYTES..=(address + size - 1) / LINE_BYTES {
            let uses = record.0.entry(line).or_default();
            match is_store {
                true => uses.written = Some(self.instruction),
                false => uses.read = Some(self.instruction),
            }
        }
    }

    fn pass_mark(&mut self) {
        match self.recorded {
            None => {
                self.recorded = Some(self.thread);
                self.records.push(Record::default());
            }
            Some(thread) => {
                assert_eq!(thread, self.thread, "one thread at a time records");
                self.recorded = None;
            }
        }
    }
}

/// Returns the address and the size in `ADDRESS,SIZE`.
fn parsed(place: &[u8]) -> Option<(u64, u64)> {
    let (address, size) = str::from_utf8(place).ok()?.trim_end().split_once(',')?;
    Some((u64::from_str_radix(address, 16).ok()?, size.parse().ok()?))
}

/// Returns the thread that begins to run, from a line such as `--123--   SCHED[2]:  acquired lock (...)`.
fn thread_that_begins(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once("SCHED[")?;
    let (thread, what) = rest.split_once("]:")?;
    what.trim_start()
        .starts_with("acquired lock")
        .then_some(())?;
    thread.parse().ok()
}

/// Runs an ignored test of the calling test's program under valgrind, with these variables in its environment. Returns its records, in
/// order. Panics if it fails.
pub fn trace(test: &str, variables: &[(&str, &std::ffi::OsStr)]) -> Vec<Record> {
    let mut traced = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"])
        .arg("--trace-sched=yes")
        .arg(std::env::current_exe().expect("the program has a path"))
        .args(["--exact", test, "--ignored"])
        .args(["--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        // Else a thread goes on to use memory that another thread has allocated and that it has freed itself, and threads share a heap if there
        // are more than eight for each CPU.
        .env(
            "GLIBC_TUNABLES",
            "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=256",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("valgrind runs");
    let said = BufReader::new(traced.stdout.take().expect("a pipe"));
    let mark = Arc::new(OnceLock::new());
    let found = mark.clone();
    let reader = std::thread::spawn(move || {
        for line in said.lines().map_while(Result::ok) {
            if let Some((_, address)) = line.split_once("mark ") {
                let _ = found.set(address.to_owned());
            }
        }
    });
    let mut trace = Trace::default();
    let stderr = traced.stderr.take().expect("a pipe");
    let mut lines = BufReader::with_capacity(1 << 20, stderr);
    let (mut line, mut messages) = (Vec::new(), Vec::new());
    while lines.read_until(b'\n', &mut line).expect("a trace") > 0 {
        if !matches!(line[0], b'I' | b' ' | b'-') {
            messages.extend_from_slice(&line);
        }
        trace.follow(&line, mark.get().map_or(b"", String::as_bytes));
        line.clear();
    }
    let status = traced.wait().expect("the program ends");
    let messages = String::from_utf8_lossy(&messages);
    assert!(status.success(), "{status}:\n{messages}");
    reader.join().expect("the reader does not panic");
    assert_eq!(trace.recorded, None, "a record has no end");
    trace.records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_the_accesses_of_its_thread() {
        let mut trace = Trace::default();
        for line in [
            "--7--   SCHED[1]:  acquired lock (VG_(scheduler))",
            " S 00001000,8",
            "I  00400000,3",
            " S 00009000,8",
            " M 00001008,4",
            "--7--   SCHED[1]: releasing lock (VG_(client_syscall)[async]) -> VgTs_WaitSys",
            "--7--   SCHED[2]:  acquired lock (VG_(client_syscall)[async])",
            " S 00002000,8",
            "--7--   SCHED[1]:  acquired lock (VG_(client_syscall)[async])",
            " L 0000307c,8",
            " M 00009000,8",
            " S 00004000,8",
            " S 00009000,8",
            " L 00001000,8",
            " S 000030c0,8",
            " S 00009000,8",
        ] {
            trace.follow(line.as_bytes(), b"00009000,");
        }
        assert_eq!(trace.recorded, None);
        let [first, second] = &trace.records[..] else {
            panic!("{} records", trace.records.len());
        };
        let lines = |record: &Record| record.0.keys().copied().collect::<Vec<_>>();
        assert_eq!(lines(first), [0x1000 / 64, 0x3040 / 64, 0x3080 / 64]);
        assert_eq!(lines(second), [0x1000 / 64, 0x30c0 / 64]);
        assert_eq!((first.written(), second.written()), (1, 1));
        let shared = first.shared_with(second, &[]);
        assert_eq!(shared.len(), 1, "{shared:?}");
        assert!(shared[0].starts_with("0x1000: "), "{shared:?}");
        assert!(first.shared_with(second, &[second]).is_empty());
    }
}
