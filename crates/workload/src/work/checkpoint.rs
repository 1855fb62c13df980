//! Checkpoint, as IOR: the threads write their parts of a shared file in order, or read them.

use super::files::Cached;
use crate::case::{Case, Scale};
use crate::error::Result;
use crate::frames::Frames;
use crate::kind::Variant;
use crate::meter::Meter;
use crate::run::{Progress, Thread, Worker};

/// *Implications*, IV.C.3: each of 32 processes has 2 GB of state.
const PART_BYTES: u64 = 2 << 30;

fn part_bytes(threads: usize, scale: Scale) -> u64 {
    scale.file_bytes(PART_BYTES, threads, 256 << 10)
}

/// Returns the bytes of all files.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    threads as u64 * part_bytes(threads, scale)
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    let bytes = part_bytes(case.seats.len(), case.scale);
    let targets = case.targets.len();
    Ok(case.each(move |index, seat| {
        // One shared file for each target.
        let dir = scratch.dir(case.kind.directory_of(index, targets));
        let path = dir.join("checkpoint");
        let begin = bytes * (index / targets) as u64;
        let mut file = Cached::open(case, seat, &path, case.variant.request_bytes)?;
        match case.variant.writes {
            true => file.uses(begin..begin + bytes),
            false => file.fill(case, seat, begin..begin + bytes)?,
        }
        file.drop_if_named(case, begin..begin + bytes)?;
        Ok(Box::new(Checkpoint {
            file,
            variant: case.variant,
            begin,
            bytes,
            next: 0,
        }) as Box<dyn Worker>)
    }))
}

struct Checkpoint {
    file: Cached,
    variant: Variant,
    /// The part of the file.
    begin: u64,
    bytes: u64,
    /// Offset in the part.
    next: u64,
}

impl Worker for Checkpoint {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let bytes = self.variant.request_bytes;
        let offset = self.begin + self.next;
        match self.variant.writes {
            true => self.file.write(offset, bytes, meter)?,
            false => {
                self.file.read(offset, bytes, meter)?;
            }
        }
        self.next = (self.next + bytes as u64) % self.bytes;
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        self.file.frames()
    }

    fn confirm(&self) -> Result<Option<bool>> {
        self.file.confirm()
    }
}
