//! How fast files are made on a target, so that the length of the runs can be told before.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::error::Result;
use crate::random;
use crate::reach::Files;
use crate::target::{Scratch, Target};

/// Bytes that are written for this.
const BYTES: u64 = 16 << 20;
/// Bounds of the result in bytes per second. Above, other costs count; below, the time would not be worth a plan.
const BOUNDS: (u64, u64) = (1 << 20, 1 << 30);

/// Writes a file of 16 MiB with direct I/O, removes it, and returns the bytes per second.
pub(crate) fn fill_bytes_per_s(files: &Arc<dyn Files>, targets: &[Target]) -> Result<u64> {
    let scratch = Scratch::make(files, &targets[..targets.len().min(1)], 1)?;
    let device = files.create_direct(&scratch.dir(0).join("speed"), BYTES)?;
    let began = Instant::now();
    random::pieces(1, BYTES, &AtomicBool::new(false), |at, piece| {
        Ok(device.write_at(at, piece)?)
    })?;
    device.flush()?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(((BYTES as f64 / seconds.max(1e-6)) as u64).clamp(BOUNDS.0, BOUNDS.1))
}
