//! A malicious client: a program that holds a volume's segments writes random words over all memory that it may write.
//!
//! It corrupts the cached data of the volume, which it could also do through the volume's file. But the daemon continues, and
//! every request of other programs ends, if necessary with an error. Metadata stays sound, and other volumes are not affected.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use jericho_sim::Random;

use crate::idle::cpu_ticks;
use crate::program::{outcome, within_limit};
use crate::roles::{self, from_environment};
use crate::volume::{Volume, jericho};

const SOURCE: &str = include_str!("hostile.c");
/// How long the client corrupts memory, unless JERICHO_HOSTILE_MS says otherwise.
const CORRUPTING_MS: u64 = 4000;
/// How long the ordinary programs continue after the end of the malicious one.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// Limit of one request. A page that stays latched delays each request for it by a second.
const REQUEST_MAX: Duration = Duration::from_secs(8);
/// Limit for the end of a program or of the daemon.
const END_MAX: Duration = Duration::from_secs(15);
const FILES: usize = 4;
const FILE_BYTES: usize = 1 << 20;

/// Makes a random request, as the ordinary program below, and ignores its result. Returns the request's name.
fn request(random: &mut Random, dir: &Path, files: &mut [File]) -> &'static str {
    let file = &files[random.below(FILES as u64) as usize];
    let at = random.below(FILE_BYTES as u64);
    let mut bytes = vec![1; 1 + random.below(9000) as usize];
    // The daemon must answer. The result does not matter, because the cache may be corrupted.
    match random.below(20) {
        0..8 => {
            let _ = file.read_at(&mut bytes, at);
            "read"
        }
        8..14 => {
            let _ = file.write_at(&bytes, at);
            "write"
        }
        14 => {
            let _ = file.sync_data();
            "fdatasync"
        }
        15 => {
            let _ = file.sync_all();
            "fsync"
        }
        16 => {
            let _ = file.set_len(at);
            "ftruncate"
        }
        17 => {
            let _ = file.metadata();
            "fstat"
        }
        18 => {
            let name = dir.join("replaced");
            let _ = std::fs::write(&name, &bytes);
            let _ = std::fs::read(&name);
            let _ = std::fs::remove_file(&name);
            "create, write, read and unlink"
        }
        _ => {
            let number = random.below(FILES as u64) as usize;
            if let Ok(opened) = open(dir, number) {
                files[number] = opened;
            }
            "open and close"
        }
    }
}

fn open(dir: &Path, number: usize) -> std::io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(dir.join(format!("file{number}")))
}

/// Runs as an ordinary program of the test below.
#[test]
#[ignore = "a part of the test here, which starts it as a process of its own"]
fn role() {
    let Some([seed, dir, stop]) = roles::role() else {
        return;
    };
    let (dir, stop) = (Path::new(&dir), Path::new(&stop));
    let mut random = Random::new(seed.parse().expect("a seed"));
    let files: std::io::Result<Vec<File>> = (0..FILES).map(|number| open(dir, number)).collect();
    let mut files = files.expect("files");
    let (mut count, mut longest, mut slowest) = (0, Duration::ZERO, "");
    while !stop.exists() {
        let begun = Instant::now();
        let name = request(&mut random, dir, &mut files);
        count += 1;
        if begun.elapsed() > longest {
            (longest, slowest) = (begun.elapsed(), name);
        }
    }
    println!(
        "\n{count} requests, longest {} ms: {slowest}",
        longest.as_millis()
    );
    assert!(longest < REQUEST_MAX, "{slowest} took {longest:?}");
}

/// A child process that is killed when dropped.
struct Started {
    child: Child,
    name: &'static str,
}

impl Started {
    fn of(name: &'static str, command: &mut Command) -> Started {
        let child = roles::start(command);
        Started { child, name }
    }

    /// Waits for the program's end and returns its output. Panics unless it succeeds in time.
    fn end(&mut self) -> String {
        let status = roles::wait_for_end(&mut self.child, self.name, END_MAX);
        let said = roles::output_of(&mut self.child);
        assert!(status.success(), "{}: {status}\n{said}", self.name);
        said
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Does not wait for the end: the program may hang in a request.
        let _ = self.child.kill();
    }
}

/// Runs a command. Panics unless it ends in time.
fn in_time(command: &mut Command) -> std::process::Output {
    let begun = Instant::now();
    let output = outcome(command);
    let took = begun.elapsed();
    assert!(took < END_MAX, "{command:?} took {took:?}");
    output
}

fn compiled(volume: &Volume) -> PathBuf {
    volume.compile("hostile", SOURCE, &["-O1", "-Wall", "-Wextra", "-Werror"])
}

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "one scenario, in the order in which it happens"
)]
fn a_malicious_client_harms_neither_the_daemon_nor_metadata_nor_other_volumes() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = from_environment("JERICHO_SEED")
        .unwrap_or_else(|| now.map_or(1, |now| now.as_nanos() as u64));
    // The output shows the seed when the test fails. The order in which programs meet corrupted words also depends on the machine.
    println!("JERICHO_SEED={seed}");
    let mut random = Random::new(seed);
    let volume = Volume::mounted("512M", 2, "8M");
    let other = Volume::mounted("256M", 1, "8M");
    let kept: Vec<u8> = (0..FILE_BYTES).map(|at| (at * 7 / 5) as u8).collect();
    let elsewhere = File::create(other.at("kept")).expect("create");
    elsewhere.write_all_at(&kept, 0).expect("write");
    elsewhere.sync_all().expect("fsync");
    drop(elsewhere);

    let program = compiled(&volume);
    let (stop, dirs) = (
        volume.outside("stop"),
        ["a", "b", "c"].map(|dir| volume.make_dir(dir)),
    );
    let mut hostile = Command::new(&program);
    hostile.arg(seed.to_string());
    for dir in &dirs {
        for number in 0..FILES {
            let file = open(dir, number).expect("create");
            file.write_all_at(&kept, 0).expect("write");
            hostile.arg(dir.join(format!("file{number}")));
        }
    }
    let mut ordinary = |name, dir: &Path, inline| {
        let seed = random.below(1 << 40).to_string();
        let path = |path: &Path| path.display().to_string();
        let role = [&*seed, &path(dir), &path(&stop)];
        Started::of(name, &mut roles::command("hostile::role", &role, inline))
    };
    let mut programs = [
        ordinary(
            "the first program that goes through the kernel",
            &dirs[0],
            false,
        ),
        ordinary(
            "the second program that goes through the kernel",
            &dirs[1],
            false,
        ),
        ordinary("the inline program", &dirs[2], true),
    ];
    let mut hostile = Started::of("the malicious program", &mut hostile);
    let mut said = String::new();
    let pipe = hostile.child.stdout.as_mut().expect("a pipe");
    BufReader::new(pipe).read_line(&mut said).expect("a line");
    if said != "ready\n" {
        panic!(
            "the malicious program did not get the segments: {}",
            hostile.end()
        );
    }

    let corrupting =
        Duration::from_millis(from_environment("JERICHO_HOSTILE_MS").unwrap_or(CORRUPTING_MS));
    let until = Instant::now() + corrupting;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
        let stat = in_time(jericho().arg("stat").arg(volume.mnt()).arg("--json"));
        assert!(stat.status.success(), "stat: {stat:?}\n{}", volume.log());
        let _ = in_time(jericho().arg("where").arg(dirs[0].join("file0")));
    }
    assert!(
        hostile.child.try_wait().expect("wait").is_none(),
        "the malicious program ended before it was killed: {}",
        hostile.end()
    );
    hostile.child.kill().expect("kill");
    hostile.child.wait().expect("wait");

    std::thread::sleep(AFTERWARDS);
    std::fs::write(&stop, "").expect("write");
    for program in &mut programs {
        let said = program.end();
        println!("{}: {said}", program.name);
    }
    // Without requests the daemon must be idle. The sync writes back the dirty pages first.
    let pid = volume.daemon_pid();
    let _ = in_time(within_limit("sync").arg("-f").arg(volume.mnt()));
    let used = (0..4).find_map(|_| {
        let before = cpu_ticks(pid);
        std::thread::sleep(Duration::from_secs(1));
        let used = cpu_ticks(pid) - before;
        (used <= 10).then_some(used)
    });
    assert!(
        used.is_some(),
        "the daemon uses CPU time without requests\n{}",
        volume.log()
    );
    // The volume stays usable, although its cache is corrupted.
    let new = dirs[0].join("new");
    let _ = in_time(within_limit("cp").args([&program, &new]));
    let _ = in_time(within_limit("cmp").args([&program, &new]));

    let umount = in_time(jericho().arg("umount").arg(volume.mnt()));
    let log = volume.log();
    assert!(!log.contains("panicked"), "{log}");
    println!("umount: {}", umount.status);
    assert!(umount.status.success(), "{umount:?}\n{log}");
    volume.check();
    volume.mount();
    std::fs::write(&new, &kept).expect("a new file");
    volume.remount();
    assert!(std::fs::read(&new).expect("read") == kept);
    volume.finish();

    assert!(std::fs::read(other.at("kept")).expect("read") == kept);
    other.remount();
    assert!(std::fs::read(other.at("kept")).expect("read") == kept);
    other.finish();
}
