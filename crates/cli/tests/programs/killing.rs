//! The common part of tests that kill writing programs again and again while other programs verify.
//!
//! After each write a program notes a sequence number in a [`Ledger`] beside the mount. The ledger survives the program's death. So
//! a page holds at any time the *record* of the noted number or of the next one. A killed program may leave its last writes half
//! done.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use jericho_sim::Random;

use crate::roles::{self, from_environment, output_of};

const PAGE: usize = 4096;
/// Largest number of writing programs in a test.
const PROGRAMS_MAX: u64 = 16;

fn mix(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// Returns the content of a page after its write with this sequence number. The number comes first.
pub fn record(page: u64, sequence: u64) -> Vec<u8> {
    let cells = (1..PAGE as u64 / 8).map(|cell| mix((page << 44) ^ (sequence << 9) ^ cell));
    let cells = std::iter::once(sequence).chain(cells);
    cells.flat_map(u64::to_le_bytes).collect()
}

/// Returns a range of the endless text that belongs to a writer.
pub fn text(writer: u64, range: std::ops::Range<u64>) -> Vec<u8> {
    let byte = |at: u64| (mix((writer << 56) ^ (at / 8)) >> (at % 8 * 8)) as u8;
    range.map(byte).collect()
}

/// Returns the number that lies at an offset.
pub fn number_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Says how many 8-byte cells of a page belong to each of the records from `from` to `to`.
fn blame(bytes: &[u8], page: u64, from: u64, to: u64) -> String {
    let cells = |bytes: &[u8]| -> Vec<[u8; 8]> { bytes.as_chunks().0.to_vec() };
    let found = cells(bytes);
    let mut said = String::new();
    for sequence in from.max(to.saturating_sub(1000))..=to {
        let expected = cells(&record(page, sequence));
        let same = found.iter().zip(&expected).filter(|(a, b)| a == b).count();
        if same > 0 {
            said += &format!("{same} of {} cells are of number {sequence}; ", found.len());
        }
    }
    let zeros = found.iter().filter(|cell| **cell == [0; 8]).count();
    said + &format!("{zeros} are zero")
}

/// Asserts that a page holds one of the records from `from` to `to`.
pub fn assert_record(bytes: &[u8], page: u64, from: u64, to: u64) {
    let sequence = number_at(bytes, 0);
    assert!(
        (from..=to).contains(&sequence) && *bytes == *record(page, sequence),
        "page {page}: numbers {from} to {to} are possible, it begins with {sequence}; {}",
        blame(bytes, page, from, to)
    );
}

/// Asserts that each byte of a page comes from the noted record or from the next one.
pub fn assert_record_or_next(bytes: &[u8], page: u64, noted: u64) {
    let (old, new) = (record(page, noted), record(page, noted + 1));
    let known = |at: usize| bytes[at] == old[at] || bytes[at] == new[at];
    if let Some(at) = (0..PAGE).find(|at| !known(*at)) {
        let blame = blame(bytes, page, 0, noted + 1);
        panic!("page {page}, written {noted} times, has a foreign byte at {at}; {blame}");
    }
}

/// Numbers beside the mount that all processes share.
pub struct Ledger(File);

#[derive(Clone, Copy)]
pub enum Entry {
    /// Not 0 when the verifiers must end.
    Stop,
    /// The process id of a program. 0 until the program runs.
    Pid(u64),
    /// The number of kills of a program. The test increments it before each kill.
    Kills(u64),
    /// The value of `Kills` when the program last finished rewriting all its data. Nothing is half written while both are equal.
    WholeSince(u64),
    /// An entry of the test, which numbers its entries itself.
    Own(u64),
}

impl Ledger {
    /// Creates a ledger of zeros with `own` entries of the test.
    pub fn create(path: &Path, own: u64) {
        let zeros = vec![0; Ledger::offset(Entry::Own(own)) as usize];
        std::fs::write(path, zeros).expect("the ledger");
    }

    fn open(path: &Path) -> Ledger {
        let mut options = File::options();
        let file = options.read(true).write(true).open(path);
        Ledger(file.expect("the ledger opens"))
    }

    fn offset(entry: Entry) -> u64 {
        let index = match entry {
            Entry::Stop => 0,
            Entry::Pid(program) => 1 + program,
            Entry::Kills(program) => 1 + PROGRAMS_MAX + program,
            Entry::WholeSince(program) => 1 + 2 * PROGRAMS_MAX + program,
            Entry::Own(number) => 1 + 3 * PROGRAMS_MAX + number,
        };
        index * 8
    }

    pub fn get(&self, entry: Entry) -> u64 {
        let mut bytes = [0; 8];
        let at = Self::offset(entry);
        self.0.read_exact_at(&mut bytes, at).expect("the ledger");
        u64::from_le_bytes(bytes)
    }

    pub fn set(&self, entry: Entry, value: u64) {
        let (at, bytes) = (Self::offset(entry), value.to_le_bytes());
        self.0.write_all_at(&bytes, at).expect("the ledger");
    }

    /// Returns the number of a program's kills. Returns `None` if some of its data may be half written.
    pub fn whole(&self, program: u64) -> Option<u64> {
        let kills = self.get(Entry::Kills(program));
        (self.get(Entry::WholeSince(program)) == kills).then_some(kills)
    }
}

/// The directory on the mount and the ledger, as a process of the test sees them.
pub struct Stage {
    pub on_mount: PathBuf,
    pub ledger: Ledger,
}

impl Stage {
    fn open(on_mount: PathBuf, ledger: &Path) -> Stage {
        let ledger = Ledger::open(ledger);
        Stage { on_mount, ledger }
    }

    /// Opens a file of the directory to read and write.
    pub fn file(&self, name: &str) -> File {
        let mut options = File::options();
        let file = options.read(true).write(true);
        file.open(self.on_mount.join(name)).expect("a file opens")
    }
}

/// A program that writes until it is killed.
pub struct Writing {
    pub number: u64,
    /// The program's number of kills when it began.
    pub kills: u64,
    pub random: Random,
}

/// Runs `write` or `verify`, as the test that started this process asks. Does nothing in other processes. `verify` returns how many
/// reads it has judged.
pub fn play(write: impl FnOnce(&Stage, Writing), verify: impl FnOnce(&Stage, Random) -> u64) {
    let Some([kind, number, seed, on_mount, ledger]) = roles::role() else {
        return;
    };
    let stage = Stage::open(on_mount.into(), Path::new(&ledger));
    let random = Random::new(seed.parse().expect("a seed"));
    if kind == "write" {
        let number = number.parse().expect("a number");
        let kills = stage.ledger.get(Entry::Kills(number));
        // The process id is noted only after the kills are read: once the test knows the process, it may count the next kill.
        let pid = std::process::id().into();
        stage.ledger.set(Entry::Pid(number), pid);
        let writing = Writing {
            number,
            kills,
            random,
        };
        write(&stage, writing);
    } else {
        println!("judged {}", verify(&stage, random));
    }
}

/// The parameters of a test.
pub struct Plan {
    /// The name of the ignored test that calls `play`.
    pub role: &'static str,
    /// Number of writing programs. The first `inline` of them run under `jericho run`, the others do not.
    pub programs: u64,
    pub inline: u64,
    /// How long the test kills programs (`make soak` asks for more), and how often at least.
    pub seconds: u64,
    pub kills_min: u32,
    /// Longest pause before a kill.
    pub pause_max: Duration,
    /// Limit of every wait. A program that reaches it hangs.
    pub hang: Duration,
}

/// A running test with its processes.
pub struct Play {
    pub stage: Stage,
    plan: Plan,
    ledger: PathBuf,
    programs: Vec<Child>,
    verifiers: Vec<(&'static str, Child)>,
    random: Random,
}

impl Play {
    /// Starts all writing programs and two verifying ones.
    pub fn start(plan: Plan, on_mount: PathBuf, ledger: PathBuf) -> Play {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = from_environment("JERICHO_SEED")
            .unwrap_or_else(|| now.map_or(1, |now| now.as_nanos() as u64));
        // The output shows the seed when the test fails. The moments of the kills also depend on the machine.
        println!("JERICHO_SEED={seed}");
        let mut play = Play {
            stage: Stage::open(on_mount, &ledger),
            plan,
            ledger,
            programs: vec![],
            verifiers: vec![],
            random: Random::new(seed),
        };
        for program in 0..play.plan.programs {
            // A program's data is not whole until the program notes that.
            play.stage.ledger.set(Entry::Kills(program), 1);
            let child = play.start_program(program);
            play.programs.push(child);
        }
        for (how, inline) in [("inline", true), ("through the kernel", false)] {
            let child = play.start_process("verify", 0, inline);
            play.verifiers.push((how, child));
        }
        play
    }

    fn start_process(&mut self, kind: &str, number: u64, inline: bool) -> Child {
        let (number, seed) = (number.to_string(), self.random.below(u64::MAX).to_string());
        let path = |path: &Path| path.display().to_string();
        let (on_mount, ledger) = (path(&self.stage.on_mount), path(&self.ledger));
        let role = [kind, &number, &seed, &on_mount, &ledger];
        roles::start(&mut roles::command(self.plan.role, &role, inline))
    }

    fn start_program(&mut self, program: u64) -> Child {
        self.stage.ledger.set(Entry::Pid(program), 0);
        self.start_process("write", program, program < self.plan.inline)
    }

    /// Waits until `done`. Panics if the program ends before or hangs.
    pub fn wait_for(&mut self, program: u64, what: &str, done: impl Fn(&Ledger) -> bool) {
        let deadline = Instant::now() + self.plan.hang;
        while !done(&self.stage.ledger) {
            let child = &mut self.programs[program as usize];
            if child.try_wait().expect("wait").is_some() {
                panic!(
                    "program {program} ended before {what}:\n{}",
                    output_of(child)
                );
            }
            assert!(
                Instant::now() < deadline,
                "program {program} hangs before {what}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn wait_until_whole(&mut self, program: u64) {
        self.wait_for(program, "it had written everything once", |ledger| {
            ledger.whole(program).is_some()
        });
    }

    /// Kills programs and restarts them until the time is over. Calls `after` with each dead program.
    pub fn kill_again_and_again(&mut self, mut after: impl FnMut(&Stage, u64)) {
        let seconds = from_environment("JERICHO_SOAK_SECONDS").unwrap_or(self.plan.seconds);
        let until = Instant::now() + Duration::from_secs(seconds);
        let mut kills = 0;
        while Instant::now() < until || kills < self.plan.kills_min {
            let program = self.random.below(self.plan.programs);
            if self.random.below(4) > 0 {
                // Most programs die in the middle of their work, some at their start.
                self.wait_until_whole(program);
            }
            let pause_max = self.plan.pause_max.as_micros() as u64;
            std::thread::sleep(Duration::from_micros(self.random.below(pause_max)));
            self.kill(program, &mut after);
            self.programs[program as usize] = self.start_program(program);
            kills += 1;
        }
        println!("{kills} kills");
    }

    /// Kills all programs and does not restart them.
    pub fn kill_all(&mut self, mut after: impl FnMut(&Stage, u64)) {
        (0..self.plan.programs).for_each(|program| self.kill(program, &mut after));
    }

    fn kill(&mut self, program: u64, after: &mut impl FnMut(&Stage, u64)) {
        self.wait_for(program, "it ran", |ledger| {
            ledger.get(Entry::Pid(program)) != 0
        });
        // The test counts the kill before it kills, so that no verifier judges a half-written page.
        let kills = self.stage.ledger.get(Entry::Kills(program));
        self.stage.ledger.set(Entry::Kills(program), kills + 1);
        let pid = self.stage.ledger.get(Entry::Pid(program)) as i32;
        let pid = rustix::process::Pid::from_raw(pid).expect("a process id");
        let killed = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let child = &mut self.programs[program as usize];
        let killed_one = format!("program {program}, which was killed,");
        roles::wait_for_end(child, &killed_one, self.plan.hang);
        if killed.is_err() {
            panic!(
                "program {program} ended before it was killed:\n{}",
                output_of(child)
            );
        }
        after(&self.stage, program);
    }

    /// Ends the programs that verify. Each must have found nothing wrong, and have judged something.
    pub fn end_verifying(&mut self) {
        self.stage.ledger.set(Entry::Stop, 1);
        for (how, mut child) in std::mem::take(&mut self.verifiers) {
            let verifier = format!("the program that verifies {how}");
            let status = roles::wait_for_end(&mut child, &verifier, self.plan.hang);
            let said = output_of(&mut child);
            assert!(status.success(), "verifying {how}:\n{said}");
            let judged = said.lines().find_map(|line| line.strip_prefix("judged "));
            let judged: u64 = judged.and_then(|n| n.parse().ok()).expect("a count");
            println!("{judged} reads judged {how}");
            assert!(judged > 0, "no reads judged {how}");
        }
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        // If the test has failed, its programs still run.
        self.stage.ledger.set(Entry::Stop, 1);
        for (program, child) in (0..).zip(&mut self.programs) {
            let pid = self.stage.ledger.get(Entry::Pid(program)) as i32;
            if matches!(child.try_wait(), Ok(None))
                && let Some(pid) = rustix::process::Pid::from_raw(pid)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let verifiers = self.verifiers.iter_mut().map(|(_, child)| child);
        for child in self.programs.iter_mut().chain(verifiers) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
