//! Files of a run, whose pages the kernel or Jericho caches.

use std::cell::Cell;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::placement::Way;
use crate::random;
use crate::reach::{OpenFile, Opening};
use crate::resident::{confirm, frames_of};
use crate::seats::Seat;

/// An open file, a buffer of the thread, and where both are.
pub struct Cached {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    buffer: NodeBuffer,
    frames: Frames,
    /// The part of the file that the thread uses.
    part: Range<u64>,
    /// The kernel's node on which the cached pages of that part must be.
    kernel_node: Option<u32>,
    dropping: Option<Dropping>,
}

/// Pages that leave the page cache again and again, so that their transfers from and to the device take place.
struct Dropping {
    part: Range<u64>,
    /// Whether the thread writes them.
    writes: bool,
    /// Bytes that the thread has moved since the last time.
    moved: Cell<u64>,
}

/// Bytes that a thread moves before it drops the pages of its part of a file.
const DROP_BYTES: u64 = 16 << 20;

/// Returns whether the placement is about transfers between devices and cached pages. Of data that stays in the page cache there are none.
pub fn has_transfers(case: &Case) -> bool {
    case.placement.only == Some(Way::Cached)
}

/// Drops the pages of a part of a file from the page cache. With `are_dirty`, writes them to the device first.
pub fn drop_pages(
    file: &dyn OpenFile,
    path: &Path,
    part: Range<u64>,
    are_dirty: bool,
) -> Result<()> {
    if are_dirty {
        file.sync().at(path, "write it to its device")?;
    }
    file.drop_pages(part)
        .at(path, "drop it from the page cache")
}

impl Cached {
    /// Writes a file of `bytes` bytes from the calling thread, so that its cached pages are where the seat says. Uses requests of `request_bytes` later.
    pub fn create(
        case: &Case,
        seat: &Seat,
        path: &Path,
        bytes: u64,
        request_bytes: usize,
    ) -> Result<Cached> {
        let mut cached = Cached::open(case, seat, path, request_bytes)?;
        cached.fill(case, seat, 0..bytes)?;
        cached.drop_if_named(case, 0..bytes)?;
        Ok(cached)
    }

    /// Opens a file, new or not, about whose pages nothing is known yet.
    pub fn open(case: &Case, seat: &Seat, path: &Path, request_bytes: usize) -> Result<Cached> {
        let file = case.files.open(path, Opening::Write).at(path, "open it")?;
        let mut buffer = buffer::on(case.topology, seat.thread, request_bytes)?;
        random::fill(case.seed, &mut buffer);
        Ok(Cached {
            path: path.to_owned(),
            file,
            buffer,
            frames: Frames::bound_by(seat),
            part: 0..u64::MAX,
            kernel_node: seat
                .kernel_node(case.topology)
                .filter(|_| !case.is_jericho()),
            dropping: None,
        })
    }

    /// Drops the thread's part of the file from the page cache, now and whenever the thread has moved as many bytes or [`DROP_BYTES`], if the placement
    /// is about transfers with the device.
    pub fn drop_if_named(&mut self, case: &Case, part: Range<u64>) -> Result<()> {
        if !has_transfers(case) {
            return Ok(());
        }
        self.dropping = Some(Dropping {
            part: part.clone(),
            writes: case.variant.writes,
            moved: Cell::new(0),
        });
        drop_pages(&*self.file, &self.path, part, true)
    }

    /// Takes note that the thread has moved bytes of its part.
    fn has_moved(&self, bytes: usize) -> Result<()> {
        let Some(dropping) = &self.dropping else {
            return Ok(());
        };
        let moved = dropping.moved.get() + bytes as u64;
        dropping.moved.set(moved);
        if moved < (dropping.part.end - dropping.part.start).min(DROP_BYTES) {
            return Ok(());
        }
        dropping.moved.set(0);
        drop_pages(
            &*self.file,
            &self.path,
            dropping.part.clone(),
            dropping.writes,
        )
    }

    /// Asks the kernel again where the cached pages are. See `Worker::confirm`.
    pub fn confirm(&self) -> Result<Option<bool>> {
        let asked = |node| confirm((&*self.file, self.part.clone()), &self.path, node);
        self.kernel_node.map(asked).transpose()
    }

    /// Writes a part of the file from the calling thread, and counts nothing. Asks the kernel where its cached pages are. Other parts are no longer
    /// the thread's.
    pub fn fill(&mut self, case: &Case, seat: &Seat, part: Range<u64>) -> Result<()> {
        let name = self.path.file_name().unwrap_or_default().as_bytes();
        let seed = random::seed_for(case.seed ^ part.start, name);
        random::pieces(seed, part.end - part.start, case.stopping, |at, piece| {
            let written = self.file.write_all_at(piece, part.start + at);
            written.at(&self.path, "write it")
        })?;
        // Else its write-back would be counted in the measurement.
        self.file.sync().at(&self.path, "make it durable")?;
        self.frames = frames_of(case, seat, (&*self.file, part.clone()), &self.path)?;
        self.part = part;
        Ok(())
    }

    /// Says which part the thread uses of a file that it has not filled.
    pub fn uses(&mut self, part: Range<u64>) {
        self.part = part;
    }

    /// Reads `bytes` bytes at an offset into the thread's buffer, and counts that.
    pub fn read(&mut self, offset: u64, bytes: usize, meter: &mut Meter) -> Result<&[u8]> {
        let buffer = &mut self.buffer[..bytes];
        read(&*self.file, &self.path, offset, buffer, meter)?;
        self.has_moved(bytes)?;
        Ok(&self.buffer[..bytes])
    }

    /// Fills another buffer with the bytes at an offset, and counts that.
    pub fn read_into(&self, offset: u64, buffer: &mut [u8], meter: &mut Meter) -> Result<()> {
        read(&*self.file, &self.path, offset, buffer, meter)?;
        self.has_moved(buffer.len())
    }

    /// Writes `bytes` bytes of the thread's buffer at an offset, and counts that.
    pub fn write(&self, offset: u64, bytes: usize, meter: &mut Meter) -> Result<()> {
        self.write_from(offset, &self.buffer[..bytes], Instant::now(), meter)
    }

    /// Writes other bytes at an offset, and counts that as an operation that has begun before.
    pub fn write_from(
        &self,
        offset: u64,
        bytes: &[u8],
        began: Instant,
        meter: &mut Meter,
    ) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .at(&self.path, "write it")?;
        meter.count(Done {
            read_bytes: 0,
            written_bytes: bytes.len() as u64,
            began,
        });
        self.has_moved(bytes.len())
    }

    /// Returns where the file's cached pages are.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }
}

fn read(
    file: &dyn OpenFile,
    path: &Path,
    offset: u64,
    buffer: &mut [u8],
    meter: &mut Meter,
) -> Result<()> {
    let began = Instant::now();
    file.read_exact_at(buffer, offset).at(path, "read it")?;
    meter.count(Done {
        read_bytes: buffer.len() as u64,
        written_bytes: 0,
        began,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;

    use rustix::io::{Errno, ReadWriteFlags, preadv2};

    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    /// Returns whether the page cache has the first page of the file.
    fn is_cached(cached: &Cached) -> bool {
        let mut page = [0; 4096];
        let mut slices = [IoSliceMut::new(&mut page)];
        match preadv2(
            cached.file.descriptor().unwrap(),
            &mut slices,
            0,
            ReadWriteFlags::NOWAIT,
        ) {
            Ok(read) => read == 4096,
            Err(Errno::AGAIN) => false,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn only_placements_of_transfers_read_the_device_again() {
        for (name, stays) in [("best", true), ("TRLCPL", false), ("TRRCPR", false)] {
            let story = Story::new(Kind::Scan, name);
            let case = story.case();
            let path = case.scratch.unwrap().dir(0).join("file");
            let bytes = 64 << 10;
            let mut cached = Cached::create(&case, &case.seats[0], &path, bytes, 4096).unwrap();
            assert_eq!(is_cached(&cached), stays, "{name}: before the first pass");
            let mut meter = Meter::new().unwrap();
            for at in (0..bytes).step_by(4096) {
                assert!(at == 0 || is_cached(&cached), "{name}: within a pass");
                cached.read(at, 4096, &mut meter).unwrap();
            }
            assert_eq!(is_cached(&cached), stays, "{name}: after a pass");
        }
    }
}
