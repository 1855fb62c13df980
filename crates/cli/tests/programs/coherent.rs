//! A program sees through every call the bytes that another program wrote inline, whether it runs under `jericho run` or not. This
//! includes programs that read the kernel's page cache.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::program::{succeed, under_run, within_limit};
use crate::volume::Volume;

const SOURCE: &str = include_str!("coherent.py");
const SIZE: usize = 20_000;
const ROUNDS: usize = 200;
const WAYS: [&str; 6] = [
    "pread",
    "sendfile",
    "splice",
    "copy_file_range",
    "mmap",
    "kept_mmap",
];

/// A running `coherent.py`, which reads one command from each line of its standard input.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(volume: &Volume, name: &str, mut command: Command, flags: &str) -> Peer {
        let script = volume.outside("coherent.py");
        std::fs::write(&script, SOURCE).expect("write");
        let (beside, on_mount) = (volume.outside(name), volume.at(name));
        command.arg(script).arg(volume.at("file"));
        command.args([beside, on_mount]).arg(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        Peer {
            input: child.stdin.take().expect("a pipe"),
            output: BufReader::new(child.stdout.take().expect("a pipe")),
            child,
        }
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.input, "{what}").expect("the program listens");
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .expect("the program answers");
        line.trim_end().to_owned()
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().expect("wait").success());
    }
}

fn value(round: usize) -> usize {
    round % 251 + 1
}

/// Returns in how many rounds one call of the reader did not see the bytes that the writer had just written.
fn wrong_rounds(writer: &mut Peer, mut reader: Option<&mut Peer>, way: &str) -> usize {
    let mut wrong = 0;
    for round in 0..ROUNDS {
        let byte = value(round);
        assert_eq!(writer.ask(&format!("write {byte}")), "ok");
        let found = match &mut reader {
            Some(reader) => reader.ask(way),
            None => writer.ask(way),
        };
        wrong += usize::from(found != format!("{SIZE} {byte}"));
    }
    wrong
}

fn volume() -> Volume {
    let volume = Volume::mounted("256M", 2, "16M");
    std::fs::write(volume.at("file"), vec![0; SIZE]).expect("write");
    volume
}

/// Returns how many bytes programs have written inline.
fn inline_bytes(volume: &Volume) -> u64 {
    let stat = volume.stat();
    let clients = stat["clients"].as_array().expect("a list");
    let of = |client: &serde_json::Value| client["written_bytes"].as_u64().expect("a number");
    clients.iter().map(of).sum()
}

fn writer(volume: &Volume) -> Peer {
    let mut writer = Peer::start(volume, "writer", under_run("python3"), "write");
    // The first calls go through the kernel.
    for _ in 0..50 {
        assert_eq!(writer.ask("write 1"), "ok");
    }
    writer
}

#[test]
fn every_call_without_the_library_sees_inline_writes() {
    let volume = volume();
    let mut writer = writer(&volume);
    let mut reader = Peer::start(&volume, "reader", within_limit("python3"), "read");
    let found = WAYS.map(|way| (way, wrong_rounds(&mut writer, Some(&mut reader), way)));
    assert_eq!(found, WAYS.map(|way| (way, 0)), "of {ROUNDS}");
    reader.end();
    writer.end();
    volume.finish();
}

#[test]
fn every_call_with_the_library_sees_inline_writes_of_another_program() {
    let volume = volume();
    let mut writer = writer(&volume);
    let mut reader = Peer::start(&volume, "reader", under_run("python3"), "read");
    let found = WAYS.map(|way| (way, wrong_rounds(&mut writer, Some(&mut reader), way)));
    assert_eq!(found, WAYS.map(|way| (way, 0)), "of {ROUNDS}");
    reader.end();
    writer.end();
    volume.finish();
}

#[test]
fn every_call_sees_inline_writes_of_its_own_program() {
    let volume = volume();
    let mut writer = writer(&volume);
    let found = WAYS.map(|way| (way, wrong_rounds(&mut writer, None, way)));
    assert_eq!(found, WAYS.map(|way| (way, 0)), "of {ROUNDS}");
    writer.end();
    volume.finish();
}

#[test]
fn only_use_of_the_page_cache_stops_inline_writes_and_they_come_back() {
    let volume = volume();
    let mut writer = writer(&volume);
    let mut reader = Peer::start(&volume, "reader", within_limit("python3"), "read");
    let counts = || {
        let stat = volume.stat();
        ["writes_withheld", "writes_granted"].map(|name| stat[name].as_u64().expect(name))
    };
    let inline_bytes = || inline_bytes(&volume);
    assert_eq!(writer.ask("write 1"), "ok");
    let begin = counts();
    assert_eq!(begin[1], 1, "the first write gets the permission");
    // Plain reads do not fill the page cache.
    assert_eq!(wrong_rounds(&mut writer, Some(&mut reader), "pread"), 0);
    assert_eq!(counts(), begin);
    let before = inline_bytes();
    assert!(before >= (SIZE * ROUNDS) as u64);

    assert_eq!(reader.ask("mmap"), format!("{SIZE} {}", value(ROUNDS - 1)));
    assert_eq!(counts(), [begin[0] + 1, begin[1]]);
    assert_eq!(writer.ask("write 7"), "ok");
    assert_eq!(inline_bytes(), before, "withheld");
    assert_eq!(reader.ask("kept_mmap"), format!("{SIZE} 7"));
    // The daemon grants inline writes again after a while, although the mapping stays.
    let deadline = Instant::now() + Duration::from_secs(60);
    while inline_bytes() == before {
        assert_eq!(writer.ask("write 8"), "ok");
        assert!(Instant::now() < deadline, "still withheld");
    }
    let granted = counts();
    assert_eq!(granted[1], begin[1] + 1);
    assert_eq!(writer.ask("write 9"), "ok");
    assert_eq!(reader.ask("kept_mmap"), format!("{SIZE} 9"));
    // In a workload that mixes writes and mapped reads, the daemon does not grant inline writes in each round.
    for round in 0..ROUNDS {
        assert_eq!(writer.ask(&format!("write {}", value(round))), "ok");
        let found = reader.ask("kept_mmap");
        assert_eq!(found, format!("{SIZE} {}", value(round)));
    }
    assert!(counts()[1] <= granted[1] + 10, "{:?}", counts());
    reader.end();
    writer.end();
    volume.finish();
}

const PIECE: usize = 1_000;
const PIECE_WAYS: [&str; 4] = ["sendfile", "splice", "copy_file_range", "mmap"];

/// A file that grows piece by piece: the offset and the number of its next piece.
struct Growing {
    at: usize,
    round: usize,
}

impl Growing {
    fn put(&mut self, writer: &mut Peer) -> (usize, usize) {
        let (at, byte) = (self.at, value(self.round));
        assert_eq!(writer.ask(&format!("put {byte} {at}")), "ok");
        self.at += PIECE;
        self.round += 1;
        (at, byte)
    }
}

/// Returns in how many rounds a reader did not see the piece that the writer had just appended.
fn rounds_without_piece(
    growing: &mut Growing,
    writer: &mut Peer,
    reader: &mut Peer,
    way: &str,
) -> usize {
    let mut short = 0;
    for _ in 0..ROUNDS / 2 {
        let (at, byte) = growing.put(writer);
        let found = reader.ask(&format!("piece {way} {at}"));
        short += usize::from(found != format!("{PIECE} {byte}"));
    }
    short
}

#[test]
fn every_call_without_the_library_sees_bytes_that_extended_the_file() {
    let volume = volume();
    let counted = || inline_bytes(&volume);
    let mut writer = writer(&volume);
    let mut growing = Growing { at: SIZE, round: 0 };
    for known_before in [true, false] {
        // Once the previous reader's descriptor is released, there is no reader and the writer extends the file inline.
        let (before, deadline) = (counted(), Instant::now() + Duration::from_secs(60));
        while counted() == before {
            assert!(
                Instant::now() < deadline,
                "the file was never extended inline"
            );
            growing.put(&mut writer);
        }
        let mut reader = Peer::start(&volume, "reader", within_limit("python3"), "read");
        if known_before {
            assert_eq!(reader.ask("size"), growing.at.to_string());
        }
        let found = PIECE_WAYS.map(|way| {
            let short = rounds_without_piece(&mut growing, &mut writer, &mut reader, way);
            (way, short)
        });
        assert_eq!(found, PIECE_WAYS.map(|way| (way, 0)), "{known_before}");
        reader.end();
    }
    writer.end();
    volume.finish();
}

#[test]
fn a_reader_that_opened_the_file_before_the_writer_sees_bytes_that_extend_it() {
    let volume = volume();
    let mut reader = Peer::start(&volume, "reader", within_limit("python3"), "read");
    assert_eq!(reader.ask("size"), SIZE.to_string());
    let mut writer = writer(&volume);
    let mut growing = Growing { at: SIZE, round: 0 };
    let found = PIECE_WAYS.map(|way| {
        let short = rounds_without_piece(&mut growing, &mut writer, &mut reader, way);
        (way, short)
    });
    assert_eq!(found, PIECE_WAYS.map(|way| (way, 0)));
    reader.end();
    writer.end();
    volume.finish();
}

/// Compiles two programs of equal size that print different words.
fn programs(volume: &Volume) -> [PathBuf; 2] {
    ["one", "two"].map(|word| {
        let text =
            format!("#include <stdio.h>\nint main(void) {{ puts(\"{word}\"); return 0; }}\n");
        volume.compile(word, &text, &["-O1"])
    })
}

#[test]
fn an_executable_file_that_was_written_inline_runs_with_the_new_bytes() {
    let volume = volume();
    let programs = programs(&volume);
    let target = volume.at("program");
    std::fs::copy(&programs[0], &target).expect("copy");
    for round in 0..ROUNDS / 4 {
        // `dd` writes in place and closes the file, because a file that is open for writing cannot be executed.
        let mut write = under_run("dd");
        write.arg(format!("if={}", programs[round % 2].display()));
        write.arg(format!("of={}", target.display()));
        succeed(write.args(["bs=4096", "conv=notrunc", "status=none"]));
        let mut run = match round % 4 {
            0 | 1 => within_limit(&target),
            _ => under_run(&target),
        };
        assert_eq!(
            succeed(&mut run).trim(),
            ["one", "two"][round % 2],
            "round {round}"
        );
    }
    volume.finish();
}
