//! Descriptors that get the fast path together with one of the program's reads or writes, without a request of their own.

use std::process::Command;

use crate::program::{succeed, under_run};
use crate::volume::Volume;

const FILES: u64 = 200;
/// Largest number of a thread's files that may get the fast path by a request of their own. One request attaches the process, and a
/// second names the thread's block. The limit is twice that, because another thread may take the thread's entry in the daemon's table.
const REQUESTS_OF_THREAD: u64 = 4;

/// Defines `each(do)`, which calls `do` with the number of each file, and `write_six(n)`, which writes file `n` with six calls and
/// returns its descriptor.
const EACH: &str = "
import os, threading
def each(do, files=range(200)):
    for n in files:
        do(n)
def write_six(n, flags=os.O_WRONLY):
    fd = os.open(f'f{n}', flags | os.O_CREAT, 0o644)
    for k in range(6):
        assert os.write(fd, bytes([n % 251]) * 1000) == 1000
    return fd
";

/// Runs a script on the mount under `jericho run`. Returns how many slots programs asked for by a request meanwhile, and how many
/// the daemon granted with a read or write.
fn run(volume: &Volume, script: &str) -> (u64, u64) {
    run_as(volume, under_run("python3"), script)
}

fn run_as(volume: &Volume, mut command: Command, script: &str) -> (u64, u64) {
    let counters = || {
        let stat = volume.stat();
        ["slots_by_request", "slots_by_wish"].map(|name| stat[name].as_u64().expect(name))
    };
    let before = counters();
    let script = format!("{EACH}\n{script}");
    succeed(command.args(["-c", &script]).current_dir(volume.mnt()));
    let after = counters();
    (after[0] - before[0], after[1] - before[1])
}

#[test]
fn files_that_are_written_and_read_a_few_times_cost_no_request_of_their_own() {
    let volume = Volume::mounted("256M", 2, "32M");
    let (asked, granted) = run(&volume, "each(lambda n: os.close(write_six(n)))");
    assert!(
        asked <= REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    assert!(
        granted >= FILES - REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    for read in [
        "os.read(fd, 1000)",
        "os.pread(fd, 1000, k * 1000)",
        "os.preadv(fd, [bytearray(1000)], k * 1000)",
    ] {
        let script = format!(
            "
def read(n):
    fd = os.open(f'f{{n}}', os.O_RDONLY)
    for k in range(6):
        got = {read}
        assert got == 1000 or got == bytes([n % 251]) * 1000, (n, k, got)
    os.close(fd)
each(read)"
        );
        let (asked, granted) = run(&volume, &script);
        assert!(
            asked <= REQUESTS_OF_THREAD,
            "{read}: {asked} asked, {granted} granted"
        );
        assert!(
            granted >= FILES - REQUESTS_OF_THREAD,
            "{read}: {asked} asked, {granted} granted"
        );
    }
    volume.finish();
}

#[test]
fn every_thread_gets_the_fast_path_with_its_calls() {
    let volume = Volume::mounted("256M", 2, "32M");
    let (asked, granted) = run(
        &volume,
        "
each(lambda n: os.close(write_six(n)), range(4))
def work(first):
    each(lambda n: os.close(write_six(n)), range(first, 200, 4))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
",
    );
    assert!(
        asked <= 5 * REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    assert!(
        granted >= FILES - 5 * REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    volume.finish();
}

#[test]
fn a_program_in_another_pid_namespace_reads_and_writes_right_and_has_the_fast_path() {
    let volume = Volume::mounted("256M", 2, "32M");
    let mut command = under_run("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "python3"]);
    let script = "
each(lambda n: os.close(write_six(n)))
each(lambda n: os.close(write_six(n, os.O_WRONLY | os.O_APPEND)))
for n in range(200):
    with open(f'f{n}', 'rb') as f:
        assert f.read() == bytes([n % 251]) * 12000
";
    let (asked, granted) = run_as(&volume, command, script);
    assert!(
        asked <= REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    assert!(
        granted >= 2 * FILES - REQUESTS_OF_THREAD,
        "{asked} asked, {granted} granted"
    );
    volume.finish();
}

/// Reads a file into a mapping of another file. The kernel then reads the pages of the mapping in the same thread.
const INTO_A_MAPPING: &str = "
import mmap
each(lambda n: os.close(write_six(n)))
for n in range(0, 200, 2):
    fd, other = os.open(f'f{n}', os.O_RDWR), os.open(f'f{n + 1}', os.O_RDWR)
    os.ftruncate(other, 4096 * 8)
    mapped = mmap.mmap(other, 4096 * 8)
    parts = memoryview(mapped)
    for k in range(6):
        part = parts[4096 * k:4096 * k + 1000]
        assert os.preadv(fd, [part], 1000 * k) == 1000
        assert bytes(part) == bytes([n % 251]) * 1000, (n, k, bytes(part)[:9])
        assert os.pwrite(fd, parts[4096 * k:4096 * k + 500], 1000 * k) == 500
    del part
    parts.release()
    mapped.close()
    os.close(fd)
    os.close(other)
    with open(f'f{n}', 'rb') as f:
        assert f.read() == bytes([n % 251]) * 6000, n
";

#[test]
fn a_call_whose_buffer_is_a_mapping_of_another_file_gets_its_own_files_slot() {
    let volume = Volume::mounted("256M", 2, "32M");
    let (_, granted) = run(&volume, INTO_A_MAPPING);
    assert!(granted >= FILES, "{granted} granted");
    volume.finish();
}
