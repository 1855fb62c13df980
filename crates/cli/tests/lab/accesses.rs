//! Runs an unmodified program whose threads access files (`accesses.c`), beside a recording of where they run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::kernel_trace::{Recording, Stays};

const NAME: &str = "accesses";
const LOG: &str = "/tmp/accesses.log";
/// Length of `struct access` in the program.
const RECORD_BYTES: usize = 32;

/// An access of a thread to a file. Times are ticks of the time-stamp counter.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub begin: u64,
    pub end: u64,
    pub thread: u32,
    /// The first page, and the number of pages.
    pub page: u32,
    pub pages: u32,
    pub pass: u16,
    /// Index of the file in `Work::threads`.
    pub file: u16,
}

impl Access {
    fn parse(record: &[u8; RECORD_BYTES]) -> Access {
        let bytes = |at: usize, len: usize| {
            let mut word = [0; 8];
            word[..len].copy_from_slice(&record[at..at + len]);
            u64::from_le_bytes(word)
        };
        Access {
            begin: bytes(0, 8),
            end: bytes(8, 8),
            thread: bytes(16, 4) as u32,
            page: bytes(20, 4) as u32,
            pages: bytes(24, 4) as u32,
            pass: bytes(28, 2) as u16,
            file: bytes(30, 2) as u16,
        }
    }
}

/// What the program does.
pub struct Work<'a> {
    /// `read`, `write` or `fill`.
    pub operation: &'a str,
    /// Bytes of each file.
    pub bytes: usize,
    /// Bytes of an access.
    pub piece: usize,
    /// Least length of a pass.
    pub milliseconds: u64,
    /// A thread for each file. `None`: it may run on all CPUs; otherwise only on this one.
    pub threads: Vec<(Option<usize>, &'a Path)>,
}

/// What the program did, and where the kernel let it run.
pub struct Done {
    pub accesses: Vec<Access>,
    pub stays: Stays,
    /// The node of each thread's buffer, by the kernel.
    pub buffers: BTreeMap<u32, usize>,
}

/// The program while it runs.
pub struct Program {
    process: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
    recording: Recording,
}

impl Program {
    /// Starts it under `jericho run` with this policy, or without the library if there is none.
    pub fn start(policy: Option<&str>, work: &Work) -> Program {
        let path = format!("/usr/bin/{NAME}");
        let mut command = match policy {
            Some(policy) => {
                let mut command = Command::new("/usr/bin/jericho");
                command.args(["run", "--threads", policy, "--", &path]);
                command
            }
            None => Command::new(path),
        };
        command.args([LOG, work.operation]);
        command.args([work.bytes, work.piece].map(|n| n.to_string()));
        command.arg(work.milliseconds.to_string());
        for (cpu, file) in &work.threads {
            let cpu = cpu.map_or("-1".to_owned(), |cpu| cpu.to_string());
            command.arg(format!("{cpu},{}", file.display()));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let recording = Recording::start(NAME);
        let mut process = command.spawn().expect("the program");
        Program {
            input: process.stdin.take(),
            output: BufReader::new(process.stdout.take().expect("a pipe")).lines(),
            process,
            recording,
        }
    }

    /// Waits until the pass in progress may end.
    pub fn wait(&mut self) {
        let line = self.output.next().expect("a line").expect("a line");
        assert_eq!(line, "pass");
    }

    /// Begins the next pass.
    pub fn begin_pass(&mut self) {
        let input = self.input.as_mut().expect("a pipe");
        input.write_all(b"n").expect("the program takes it");
    }

    /// Begins `count` passes, one after the other, and waits for the end of each.
    pub fn passes(&mut self, count: usize) {
        for _ in 0..count {
            self.begin_pass();
            self.wait();
        }
    }

    /// Ends the program after the pass in progress.
    pub fn end(mut self) -> Done {
        drop(self.input.take());
        let mut buffers = BTreeMap::new();
        for line in self.output.by_ref() {
            let line = line.expect("a line");
            let mut words = line.split(' ').skip(1);
            let number = |word: Option<&str>| {
                word.map(|w| {
                    w.parse()
                        .unwrap_or_else(|_| panic!("the program said {line:?}"))
                })
            };
            if let (Some(thread), Some(node)) = (number(words.next()), number(words.next())) {
                buffers.insert(thread, node as usize);
            }
        }
        let status = self.process.wait().expect("the program's end");
        assert!(status.success(), "the program ended with {status}");
        let stays = self.recording.end();
        let log = std::fs::read(LOG).expect("the log");
        let (records, rest) = log.as_chunks();
        assert!(rest.is_empty() && !records.is_empty(), "the log is cut");
        Done {
            accesses: records.iter().map(Access::parse).collect(),
            stays,
            buffers,
        }
    }
}

/// Has the program write all bytes of its files once.
pub fn fill(threads: Vec<(Option<usize>, &Path)>, bytes: usize, piece: usize) {
    let work = Work {
        operation: "fill",
        bytes,
        piece,
        milliseconds: 0,
        threads,
    };
    Program::start(None, &work).end();
}
