//! Files of a run, whose pages the kernel or Jericho caches.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::random;
use crate::seats::Seat;

/// An open file, a buffer of the thread, and where both are.
pub struct Cached {
    pub path: PathBuf,
    pub file: File,
    buffer: NodeBuffer,
    topology: Topology,
    frames: Frames,
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
        })
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
        Ok(buffer)
    }

    /// Fills another buffer with the bytes at an offset, and counts that.
    pub fn read_into(&self, offset: u64, buffer: &mut [u8], meter: &mut Meter) -> Result<()> {
        read(&self.file, &self.path, offset, buffer, meter)
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
        Ok(())
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
