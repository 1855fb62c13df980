//! Files of a run, whose pages the kernel or Jericho caches.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};
use rustix::fs::{Advice, fadvise};

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::placement::Way;
use crate::random;
use crate::seats::Seat;

/// An open file, a buffer of the thread, and where both are.
pub struct Cached {
    pub path: PathBuf,
    pub file: File,
    buffer: NodeBuffer,
    topology: Topology,
    frames: Frames,
    dropping: Option<Dropping>,
}

/// Pages that leave the page cache again and again, so that their transfers from and to the device take place.
struct Dropping {
    /// The part of the file.
    begin: u64,
    bytes: u64,
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

/// Drops the pages of a part of a file from the page cache; 0 bytes: up to its end. With `are_dirty`, writes them to the device first.
pub fn drop_pages(
    file: &File,
    path: &Path,
    (begin, bytes): (u64, u64),
    are_dirty: bool,
) -> Result<()> {
    if are_dirty {
        file.sync_data().at(path, "write it to its device")?;
    }
    let dropped = fadvise(file, begin, NonZeroU64::new(bytes), Advice::DontNeed);
    dropped
        .map_err(io::Error::from)
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
        cached.fill(case, 0, bytes)?;
        cached.frames = Frames::of(case, seat, &cached.file, path)?;
        cached.drop_if_named(case, 0, bytes)?;
        Ok(cached)
    }

    /// Opens a file, new or not, about whose pages nothing is known yet.
    pub fn open(case: &Case, seat: &Seat, path: &Path, request_bytes: usize) -> Result<Cached> {
        let mut options = OpenOptions::new();
        let opened = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = opened.at(path, "open it")?;
        let mut buffer = buffer::on(case.topology, seat.thread, request_bytes)?;
        random::fill(case.seed, &mut buffer);
        Ok(Cached {
            path: path.to_owned(),
            file,
            buffer,
            topology: case.topology.clone(),
            frames: seat.frame.map_or(Frames::Unknown, Frames::On),
            dropping: None,
        })
    }

    /// Drops the thread's part of the file from the page cache, now and whenever the thread has moved as many bytes or [`DROP_BYTES`], if the placement
    /// is about transfers with the device.
    pub fn drop_if_named(&mut self, case: &Case, begin: u64, bytes: u64) -> Result<()> {
        if !has_transfers(case) {
            return Ok(());
        }
        self.dropping = Some(Dropping {
            begin,
            bytes,
            writes: case.variant.writes,
            moved: Cell::new(0),
        });
        drop_pages(&self.file, &self.path, (begin, bytes), true)
    }

    /// Takes note that the thread has moved bytes of its part.
    fn has_moved(&self, bytes: usize) -> Result<()> {
        let Some(part) = &self.dropping else {
            return Ok(());
        };
        let moved = part.moved.get() + bytes as u64;
        part.moved.set(moved);
        if moved < part.bytes.min(DROP_BYTES) {
            return Ok(());
        }
        part.moved.set(0);
        let range = (part.begin, part.bytes);
        drop_pages(&self.file, &self.path, range, part.writes)
    }

    /// Writes a part of the file from the calling thread, and counts nothing.
    pub fn fill(&self, case: &Case, begin: u64, bytes: u64) -> Result<()> {
        random::pieces(case.seed, bytes, case.stopping, |at, piece| {
            let written = self.file.write_all_at(piece, begin + at);
            written.at(&self.path, "write it")
        })
    }

    /// Reads `bytes` bytes at an offset into the thread's buffer, and counts that.
    pub fn read(&mut self, offset: u64, bytes: usize, meter: &mut Meter) -> Result<&[u8]> {
        let buffer = &mut self.buffer[..bytes];
        read(&self.file, &self.path, offset, buffer, meter)?;
        self.has_moved(bytes)?;
        Ok(&self.buffer[..bytes])
    }

    /// Fills another buffer with the bytes at an offset, and counts that.
    pub fn read_into(&self, offset: u64, buffer: &mut [u8], meter: &mut Meter) -> Result<()> {
        read(&self.file, &self.path, offset, buffer, meter)?;
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

    /// Returns the share of the file's cached pages that are local to a thread on this node.
    pub fn local_share(&self, thread: NodeId) -> Option<f64> {
        self.frames.local_share(&self.topology, thread)
    }
}

fn read(file: &File, path: &Path, offset: u64, buffer: &mut [u8], meter: &mut Meter) -> Result<()> {
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
        match preadv2(&cached.file, &mut slices, 0, ReadWriteFlags::NOWAIT) {
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
