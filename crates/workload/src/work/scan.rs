//! Scan: 64 files, and threads that each read or write their own ones, 4 KiB at a time, in order or at random.

use super::files::Cached;
use crate::case::{Case, Scale};
use crate::error::Result;
use crate::frames::Frames;
use crate::kind::Variant;
use crate::meter::Meter;
use crate::part::Part;
use crate::random::Random;
use crate::run::{Progress, Thread, Worker, both};

/// *Jericho*, III.B: 64 files of 2 GB.
const FILES: usize = 64;
const FILE_BYTES: u64 = 2 << 30;

/// Returns the number of files. Each thread has at least one, also if there are more threads than files in the paper.
fn files(threads: usize) -> usize {
    FILES.max(threads)
}

fn file_bytes(threads: usize, scale: Scale) -> u64 {
    scale.file_bytes(FILE_BYTES, files(threads), 64 << 10)
}

/// Returns the bytes of all files.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    files(threads) as u64 * file_bytes(threads, scale)
}

/// Returns the files of a thread.
pub fn part(case: &Case, index: usize) -> Result<Part> {
    let (scratch, count) = (case.scratch()?, case.seats.len());
    let own = (index..files(count)).step_by(count);
    let path = |number| scratch.dir(index).join(format!("file.{number}"));
    Ok(Part {
        paths: own.map(path).collect(),
        offset: 0,
        bytes: file_bytes(count, case.scale),
    })
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    case.scratch()?;
    let request_bytes = case.variant.request_bytes;
    Ok(case.each(move |index, seat| {
        let Part { paths, bytes, .. } = part(case, index)?;
        let files = paths
            .iter()
            .map(|path| Cached::create(case, seat, path, bytes, request_bytes));
        Ok(Box::new(Scan {
            files: files.collect::<Result<_>>()?,
            variant: case.variant,
            requests: bytes / request_bytes as u64,
            random: Random::new(case.seed ^ index as u64),
            next: 0,
            used: 0,
        }) as Box<dyn Worker>)
    }))
}

struct Scan {
    files: Vec<Cached>,
    variant: Variant,
    /// Requests of each file.
    requests: u64,
    random: Random,
    /// The number of the next request over all files, in order.
    next: u64,
    /// The file of the last request.
    used: usize,
}

impl Worker for Scan {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let all = self.requests * self.files.len() as u64;
        let number = match self.variant.is_random {
            true => self.random.below(all),
            false => self.next,
        };
        self.next = (self.next + 1) % all;
        self.used = (number / self.requests) as usize;
        let file = &mut self.files[self.used];
        let bytes = self.variant.request_bytes;
        let offset = number % self.requests * bytes as u64;
        match self.variant.writes {
            true => file.write(offset, bytes, meter)?,
            false => {
                file.read(offset, bytes, meter)?;
            }
        }
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        self.files[self.used].frames()
    }

    fn confirm(&self) -> Result<Option<bool>> {
        let asked = self.files.iter().map(Cached::confirm);
        let asked = asked.collect::<Result<Vec<_>>>()?;
        Ok(asked.into_iter().reduce(both).flatten())
    }
}
