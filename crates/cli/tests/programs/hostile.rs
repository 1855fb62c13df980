//! A client that lies: a program that got a volume's segments writes nonsense over all that it may write.
//!
//! It spoils what the volume has in its cache, which it could have done with the volume's file, too. But the daemon lives on, and
//! every request of other programs ends: with an error if need be. Metadata stays sound, and another volume notices nothing.

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
/// How long it lies, unless JERICHO_HOSTILE_MS says otherwise.
const LIES_MS: u64 = 4000;
/// How long programs go on afterwards.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// A request takes no longer. A page that is latched costs whoever wants it a second.
const REQUEST_MAX: Duration = Duration::from_secs(8);
/// Nor does the end of a program or of the daemon.
const END_MAX: Duration = Duration::from_secs(15);
const FILES: usize = 4;
const FILE_BYTES: usize = 1 << 20;

/// Makes one request of the program below, with any result. Returns its name.
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

/// The ordinary program of the test below.
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
    let (mut count, mut longest, mut what) = (0, Duration::ZERO, "");
    while !stop.exists() {
        let begun = Instant::now();
        let name = request(&mut random, dir, &mut files);
        count += 1;
        if begun.elapsed() > longest {
            (longest, what) = (begun.elapsed(), name);
        }
    }
    println!(
        "\n{count} requests, longest {} ms: {what}",
        longest.as_millis()
    );
    assert!(longest < REQUEST_MAX, "{what} took {longest:?}");
}

/// A child that ends with the test.
struct Started {
    child: Child,
    who: &'static str,
}

impl Started {
    fn of(who: &'static str, command: &mut Command) -> Started {
        let child = roles::start(command);
        Started { child, who }
    }

    /// What it said; panics unless it succeeds in time.
    fn end(&mut self) -> String {
        let status = roles::wait_for_end(&mut self.child, self.who, END_MAX);
        let said = roles::said_by(&mut self.child);
        assert!(status.success(), "{}: {status}\n{said}", self.who);
        said
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It may hang in a request: it is not waited for.
        let _ = self.child.kill();
    }
}

/// Runs it; panics unless it ends in time.
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
fn a_client_that_lies_harms_neither_the_daemon_nor_metadata_nor_other_volumes() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = from_environment("JERICHO_SEED")
        .unwrap_or_else(|| now.map_or(1, |now| now.as_nanos() as u64));
    // Shown when the test fails. Who meets which lie depends on the machine, too.
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
    let mut ordinary = |who, dir: &Path, inline| {
        let seed = random.below(1 << 40).to_string();
        let path = |path: &Path| path.display().to_string();
        let role = [&*seed, &path(dir), &path(&stop)];
        Started::of(who, &mut roles::command("hostile::role", &role, inline))
    };
    let mut programs = [
        ordinary("who goes through the kernel", &dirs[0], false),
        ordinary("another that does", &dirs[1], false),
        ordinary("who goes inline", &dirs[2], true),
    ];
    let mut hostile = Started::of("who lies", &mut hostile);
    let mut said = String::new();
    let pipe = hostile.child.stdout.as_mut().expect("a pipe");
    BufReader::new(pipe).read_line(&mut said).expect("a line");
    if said != "ready\n" {
        panic!("it does not get the segments: {}", hostile.end());
    }

    let lies = Duration::from_millis(from_environment("JERICHO_HOSTILE_MS").unwrap_or(LIES_MS));
    let until = Instant::now() + lies;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
        let stat = in_time(jericho().arg("stat").arg(volume.mnt()).arg("--json"));
        assert!(stat.status.success(), "stat: {stat:?}\n{}", volume.log());
        let _ = in_time(jericho().arg("where").arg(dirs[0].join("file0")));
    }
    assert!(
        hostile.child.try_wait().expect("wait").is_none(),
        "it should lie until it is killed: {}",
        hostile.end()
    );
    hostile.child.kill().expect("kill");
    hostile.child.wait().expect("wait");

    std::thread::sleep(AFTERWARDS);
    std::fs::write(&stop, "").expect("write");
    for program in &mut programs {
        let said = program.end();
        println!("{}: {said}", program.who);
    }
    // Once nobody asks for anything, nothing is done. What is dirty is written back by the sync.
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
        "the daemon works on for nobody\n{}",
        volume.log()
    );
    // It can be used on, whatever is in its cache.
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
