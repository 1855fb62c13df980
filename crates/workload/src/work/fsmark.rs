//! fs_mark: each thread has a directory of up to 128 files. It chooses a directory and a file in it at random, and creates, opens, writes, reads and closes it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;

use crate::buffer;
use crate::case::{Case, Scale};
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::kind::Variant;
use crate::meter::{Done, Meter};
use crate::random;
use crate::reach::{Files, Opening};
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

/// Returns the number of files of a thread: the paper's, or fewer if the run's data is less.
fn files(variant: Variant, threads: usize, scale: Scale) -> u64 {
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
}
