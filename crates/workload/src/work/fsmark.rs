//! fs_mark: each thread has a directory of up to 128 files.
//!
//! The variant `files` is the paper's: a thread chooses a directory and a file in it at random, and creates, opens, writes, reads and closes it. The
//! variant `create` is what the program fs_mark does: a thread creates, writes and closes all files of its directory, then removes them, round after round.
//! Rates of `create` leave out the removals, as those of fs_mark do.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_sys::node_memory::NodeBuffer;

use crate::buffer;
use crate::case::{Case, Scale};
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::kind::Variant;
use crate::meter::{Done, Meter};
use crate::random;
use crate::reach::{Files, Opening};
use crate::resident;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// Files of a thread: *Implications*, IV.C.2.
const FILES: u64 = 128;
/// Space is allocated in units of this size by most filesystems.
const UNIT_BYTES: u64 = 4096;

/// Returns the space that a file takes.
fn space_bytes(variant: Variant) -> u64 {
    (variant.request_bytes as u64).next_multiple_of(UNIT_BYTES)
}

/// Bytes that the variant `create` writes in one call: fs_mark's default.
pub(crate) const CHUNK_BYTES: usize = 16 << 10;

/// Returns the number of files of a thread: the paper's, or fewer if the run's data is less.
pub(crate) fn files(variant: Variant, threads: usize, scale: Scale) -> u64 {
    match scale.as_paper {
        true => FILES,
        false => (scale.data_bytes / threads.max(1) as u64 / space_bytes(variant)).clamp(1, FILES),
    }
}

/// Returns the bytes of all files.
pub fn bytes(variant: Variant, threads: usize, scale: Scale) -> u64 {
    threads as u64 * files(variant, threads, scale) * space_bytes(variant)
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    match case.variant == Variant::CREATE {
        true => creators(case),
        false => users(case),
    }
}

/// Returns the threads of the variant `files`.
fn users<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    let dir = |index: usize| scratch.dir(index).join(format!("dir.{index}"));
    // As in the paper, the instance of a device chooses among directories of that device.
    let targets = case.targets.len().min(case.seats.len());
    let own = |target: usize| (target..case.seats.len()).step_by(targets);
    let dirs: Vec<Arc<[PathBuf]>> = (0..targets)
        .map(|target| own(target).map(dir).collect())
        .collect();
    for dir in dirs.iter().flat_map(|dirs| dirs.iter()) {
        case.files.make_dir(dir).at(dir, "make it")?;
    }
    let seats: Vec<Arc<[Seat]>> = (0..targets)
        .map(|target| own(target).map(|index| case.seats[index].clone()).collect())
        .collect();
    Ok(case.each(move |index, seat| {
        let (dirs, seats) = (&dirs[index % targets], &seats[index % targets]);
        let mut bytes = buffer::on(case.topology, seat.thread, case.variant.request_bytes)?;
        random::fill(case.seed, &mut bytes);
        Ok(Box::new(Fsmark {
            store: case.files.clone(),
            frames: match case.is_jericho() {
                // The pages of a file are on the node of its directory's slice, whichever thread has written them.
                true => Frames::of_all(seats),
                // New pages come from the node that the policy of the thread says.
                false => Frames::bound_by(seat),
            },
            dirs: dirs.clone(),
            random: random::Random::new(case.seed ^ index as u64),
            files: files(case.variant, case.seats.len(), case.scale),
            file_bytes: case.variant.request_bytes,
            bytes,
        }) as Box<dyn Worker>)
    }))
}

/// Returns the threads of the variant `create`. Each uses its own directory only, so its files are on its own target.
fn creators<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    Ok(case.each(move |index, seat| {
        let mut zeros = buffer::on(case.topology, seat.thread, CHUNK_BYTES)?;
        zeros.fill(0);
        Ok(Box::new(Creator {
            store: case.files.clone(),
            frames: match case.is_jericho() {
                true => seat.device.map_or(Frames::Unknown, Frames::On),
                false => Frames::bound_by(seat),
            },
            kernel_node: seat
                .kernel_node(case.topology)
                .filter(|_| !case.is_jericho()),
            dir: scratch.dir(index).to_owned(),
            random: random::Random::new(case.seed ^ index as u64),
            files: files(case.variant, case.seats.len(), case.scale),
            file_bytes: case.variant.request_bytes,
            zeros,
            made: Vec::new(),
            counted_since: Instant::now(),
        }) as Box<dyn Worker>)
    }))
}

struct Creator {
    store: Arc<dyn Files>,
    frames: Frames,
    /// The kernel's node on which the cached pages must be.
    kernel_node: Option<u32>,
    dir: PathBuf,
    random: random::Random,
    /// Number of files of a round.
    files: u64,
    file_bytes: usize,
    /// fs_mark writes zeros.
    zeros: NodeBuffer,
    /// The files of this round.
    made: Vec<PathBuf>,
    /// The next file counts from here: the end of the last file, or of the removals.
    counted_since: Instant,
}

impl Creator {
    /// Returns a name that no file of the round has, as long and as random as those of fs_mark.
    fn name(&mut self) -> String {
        let (one, two) = (self.random.next(), self.random.next());
        format!("{:08x}{one:016x}{two:016x}", self.made.len())
    }

    fn remove(&mut self) -> Result<()> {
        for path in self.made.drain(..) {
            self.store.remove_file(&path).at(&path, "remove it")?;
        }
        Ok(())
    }
}

impl Worker for Creator {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        if self.made.len() as u64 >= self.files {
            self.remove()?;
        }
        if self.made.is_empty() {
            self.counted_since = Instant::now();
        }
        let name = self.name();
        let path = self.dir.join(name);
        let began = Instant::now();
        let file = self.store.open(&path, Opening::Empty);
        let file = file.at(&path, "create it")?;
        for at in (0..self.file_bytes).step_by(CHUNK_BYTES) {
            let chunk = &self.zeros[..CHUNK_BYTES.min(self.file_bytes - at)];
            file.write_all_at(chunk, at as u64).at(&path, "write it")?;
        }
        drop(file);
        self.made.push(path);
        let ended = Instant::now();
        let done = Done {
            read_bytes: 0,
            written_bytes: self.file_bytes as u64,
            began,
        };
        meter.count_ended(done, ended);
        // With the time between two files, as fs_mark counts.
        let took = ended.saturating_duration_since(self.counted_since);
        meter.active += took.max(Duration::from_nanos(1));
        self.counted_since = ended;
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        let Some(node) = self.kernel_node else {
            return Ok(None);
        };
        let Some(path) = self.made.last() else {
            return Ok(Some(false));
        };
        let file = self.store.open(path, Opening::Read).at(path, "open it")?;
        let part = 0..self.file_bytes as u64;
        resident::confirm((&*file, part), path, node).map(Some)
    }
}

struct Fsmark {
    store: Arc<dyn Files>,
    frames: Frames,
    dirs: Arc<[PathBuf]>,
    random: random::Random,
    /// Number of files in each directory.
    files: u64,
    file_bytes: usize,
    bytes: NodeBuffer,
}

impl Worker for Fsmark {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let dir = &self.dirs[self.random.below(self.dirs.len() as u64) as usize];
        let path = dir.join(format!("file.{}", self.random.below(self.files)));
        let began = Instant::now();
        let file = self.store.open(&path, Opening::Empty);
        let file = file.at(&path, "create it")?;
        let data = &mut self.bytes[..self.file_bytes];
        file.write_all_at(data, 0).at(&path, "write it")?;
        // Another thread may have chosen the same file, and truncated it.
        let read = file.read_at(data, 0).at(&path, "read it")?;
        drop(file);
        meter.count(Done {
            read_bytes: read as u64,
            written_bytes: self.file_bytes as u64,
            began,
        });
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        // Any thread may have written any file last, so the kernel is asked about the threads only.
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    #[test]
    fn a_thread_makes_files_on_its_own_device_only() {
        let story = Story::with(Kind::Fsmark, "best", 4, 2);
        let case = story.case();
        let scratch = case.scratch.unwrap();
        let files = |index: usize| {
            let dir = scratch.dir(index).join(format!("dir.{index}"));
            std::fs::read_dir(dir).unwrap().count()
        };
        let thread = threads(&case).unwrap().swap_remove(1);
        let mut worker = (thread.make)().unwrap();
        let mut meter = Meter::new().unwrap();
        for _ in 0..64 {
            worker.step(&mut meter).unwrap();
        }
        assert_eq!((files(0), files(2)), (0, 0));
        assert!(files(1) > 0 && files(3) > 0);
    }

    #[test]
    fn a_round_of_creates_is_removed_before_the_next_and_its_removal_is_not_counted() {
        let story = Story::new(Kind::Fsmark, "best");
        let mut case = story.case();
        case.variant = Variant::CREATE;
        let dir = case.scratch.unwrap().dir(0);
        let mut worker = (threads(&case).unwrap().remove(0).make)().unwrap();
        let mut meter = Meter::new().unwrap();
        let round = files(case.variant, 1, case.scale);
        let began = Instant::now();
        for step in 0..2 * round + 1 {
            worker.step(&mut meter).unwrap();
            let left: Vec<_> = std::fs::read_dir(dir).unwrap().collect();
            assert_eq!(left.len() as u64, step % round + 1);
            // Other work of the thread counts as fs_mark's own work does, within a round only.
            if step % round == round - 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            for entry in left {
                let entry = entry.unwrap();
                assert_eq!(entry.metadata().unwrap().len(), 50 << 10);
                assert_eq!(entry.file_name().len(), 40);
            }
        }
        let created = 2 * round + 1;
        assert_eq!(meter.operations, created);
        assert_eq!(
            (meter.read_bytes, meter.written_bytes),
            (0, created * (50 << 10))
        );
        assert!(meter.active + Duration::from_millis(40) <= began.elapsed());
        let bytes = std::fs::read(
            std::fs::read_dir(dir)
                .unwrap()
                .next()
                .unwrap()
                .unwrap()
                .path(),
        );
        assert!(bytes.unwrap().iter().all(|byte| *byte == 0));
    }
}
