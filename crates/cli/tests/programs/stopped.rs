//! A program that stops in the middle of an inline write delays only readers of the same bytes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::program::{command, succeed, under_run};
use crate::volume::Volume;

const SOURCE: &str = include_str!("stopped.c");
const O_DIRECT: i32 = 0o40000;
const PAGE: u64 = 4096;
/// Attempts. The read waits for at most a second, so on a slow machine it may end before the other request begins.
const TRIES: u32 = 30;
const HANG: Duration = Duration::from_secs(60);

/// Returns whether a thread of this process sleeps in pread(2).
fn sleeps_in_pread(tid: &str) -> bool {
    let syscall = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall"));
    let number = syscall.ok().and_then(|line| {
        // The file says "running" while the thread does not sleep.
        line.split(' ').next()?.parse().ok()
    });
    number == Some(libc::SYS_pread64)
}

/// Binds the calling thread to the first CPU that the process may use. Returns the thread's id.
fn pin() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("proc");
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpu = allowed.and_then(|list| list.trim().split([',', '-']).next());
    let thread = std::fs::read_link("/proc/thread-self").expect("proc");
    let tid = thread
        .file_name()
        .and_then(OsStr::to_str)
        .expect("a thread");
    succeed(command("taskset").args(["-cp", cpu.expect("a CPU"), tid]));
    tid.to_owned()
}

/// Returns whether another request on the same CPU was answered while the read waited.
fn overtakes(volume: &Volume, program: &Path, attempt: u32) -> bool {
    let mut stopped = under_run(program)
        .arg(volume.at("f"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program");
    let mut line = String::new();
    let out = stopped.stdout.take().expect("piped");
    BufReader::new(out).read_line(&mut line).expect("a line");
    assert_eq!(line, "stopped\n", "{:?}", stopped.wait());

    let mut options = File::options();
    let direct = options.read(true).custom_flags(O_DIRECT);
    let file = direct.open(volume.at("f")).expect("open");
    let done = AtomicBool::new(false);
    let (tell, told) = mpsc::channel();
    let overtaken = std::thread::scope(|scope| {
        let (file, done) = (&file, &done);
        scope.spawn(move || {
            tell.send(pin()).expect("the other thread runs");
            // These pages are not latched by the stopped write.
            let mut bytes = vec![0; 3 * PAGE as usize];
            file.read_exact_at(&mut bytes, 4 * PAGE).expect("read");
            done.store(true, Ordering::SeqCst);
        });
        let other = scope.spawn(move || {
            pin();
            let begun = Instant::now();
            let reader = told
                .recv_timeout(HANG)
                .expect("the reader sends its thread id");
            while !sleeps_in_pread(&reader) && !done.load(Ordering::SeqCst) {
                assert!(begun.elapsed() < HANG, "the read never begins");
                std::thread::yield_now();
            }
            // The kernel does not know this name yet, so it asks the daemon.
            let absent = std::fs::metadata(volume.at(&format!("absent{attempt}")));
            assert!(absent.is_err());
            !done.load(Ordering::SeqCst)
        });
        other.join().expect("the other request")
    });
    stopped.kill().expect("kill");
    stopped.wait().expect("wait");
    overtaken
}

#[test]
fn a_stopped_writer_delays_reads_of_its_file_and_no_other_request_of_the_same_cpu() {
    let volume = Volume::mounted("256M", 2, "32M");
    let options = ["-O1", "-Wall", "-Werror", "-Wno-unused-result"];
    let program = volume.compile("stopped", SOURCE, &options);
    std::fs::write(volume.at("f"), vec![b'o'; 100_000]).expect("write");
    let overtaken = (0..TRIES).any(|attempt| overtakes(&volume, &program, attempt));
    assert!(
        overtaken,
        "in all attempts the other request waited for the stopped writer"
    );
    volume.finish();
}
