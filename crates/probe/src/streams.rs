//! Streams of several CPUs through one buffer, at the same time.
//!
//! Invariants:
//! - A stream goes on where it ended the last time, and first reads more than the caches of its CPU, or all of its part, without being
//!   measured. So a line is read again only after all others of the part, and a measurement does not read what the caches hold from the one before.
//! - All streams run from before the first of them is measured until the last one has been. So no stream has a part of the memory's bandwidth
//!   that another one uses at other times.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jericho_sys::memory::Mapping;
use jericho_sys::process::thread_cpu_time;

use crate::buffer::{Buffer, FILL};
use crate::threads::{Reason, on_cpu_beside, on_each_cpu_together};

/// Bytes of a stream between two looks at the clock.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Parts of the streams of different CPUs begin at multiples of this.
const PART_UNIT: usize = 4096;

/// What a stream does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// The streams of some CPUs, each through its own part of a buffer.
pub(crate) struct Streams<'a> {
    access: Access,
    mapping: &'a Mapping,
    warm_bytes: usize,
    each: Vec<Mutex<Stream>>,
}

/// How far a stream is.
struct Stream {
    part: Range<usize>,
    at: usize,
    bytes: usize,
}

impl<'a> Streams<'a> {
    /// Returns `count` streams that have not begun.
    pub fn new(buffer: &'a Buffer, count: usize, access: Access) -> Streams<'a> {
        let stream = |index| {
            let part = part(&buffer.stream, index, count);
            Mutex::new(Stream {
                at: part.start,
                part,
                bytes: 0,
            })
        };
        Streams {
            access,
            mapping: &buffer.mapping,
            warm_bytes: buffer.warm_bytes(),
            each: (0..count).map(stream).collect(),
        }
    }

    /// Lets each stream run on one of the CPUs. Returns their rates in bytes a second of CPU time, measured for about `time`.
    pub fn rates(&self, cpus: &[u32], time: Duration) -> Result<Vec<f64>, Reason> {
        let measure = |index| {
            let mut stream = self.stream(index);
            let (begun, begun_cpu, before) = (Instant::now(), thread_cpu_time(), stream.bytes);
            loop {
                self.access(&mut stream);
                if begun.elapsed() >= time {
                    break;
                }
            }
            (stream.bytes - before) as f64 / since(begun_cpu).as_secs_f64()
        };
        let go_on = |index| self.access(&mut self.stream(index));
        on_each_cpu_together(cpus, |index| self.warm(index), measure, go_on)
    }

    /// Calls `work` on `cpu`, while each stream runs on one of the CPUs `load`: from before the work begins until after it ends.
    pub fn beside<T: Send>(
        &self,
        cpu: u32,
        load: &[u32],
        work: impl Fn() -> T + Sync,
    ) -> Result<T, Reason> {
        let go_on = |index| self.access(&mut self.stream(index));
        on_cpu_beside(cpu, load, work, |index| self.warm(index), go_on)
    }

    fn stream(&self, index: usize) -> MutexGuard<'_, Stream> {
        // A thread that panicked fails the measurement. For the next one, any position is good.
        let stream = self.each[index].lock();
        stream.unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a stream that has not passed the caches of its CPU do so.
    fn warm(&self, index: usize) {
        let mut stream = self.stream(index);
        let enough = self.warm_bytes.min(stream.part.len());
        while stream.bytes < enough {
            self.access(&mut stream);
        }
    }

    /// Accesses the next bytes of a stream, which begins again at the end of its part.
    fn access(&self, stream: &mut Stream) {
        let end = (stream.at + CHUNK_BYTES).min(stream.part.end);
        match self.access {
            Access::Read => {
                black_box(self.mapping.stream_read(stream.at..end));
            }
            Access::Write => self.mapping.stream_write(stream.at..end, value(stream)),
        }
        stream.bytes += end - stream.at;
        let is_at_end = end == stream.part.end;
        stream.at = if is_at_end { stream.part.start } else { end };
    }
}

/// Returns what a stream writes next: never 0 (see [`FILL`]), and never `FILL`.
fn value(stream: &Stream) -> u8 {
    (stream.bytes / CHUNK_BYTES % usize::from(FILL - 1) + 1) as u8
}

/// Returns how much CPU time the thread has used since. Never 0, because callers divide by it.
pub(crate) fn since(begun_cpu: Duration) -> Duration {
    let used = thread_cpu_time().saturating_sub(begun_cpu);
    used.max(Duration::from_nanos(1))
}

/// Returns the part of a range that belongs to one of `count` streams.
fn part(range: &Range<usize>, index: usize, count: usize) -> Range<usize> {
    let len = range.len() / count.max(1) / PART_UNIT * PART_UNIT;
    let start = range.start + index * len;
    start..start + len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::buffer;
    use jericho_sys::affinity;

    #[test]
    fn the_parts_of_streams_do_not_overlap_and_stay_in_the_range() {
        let range = 8192..8192 + 100 * PART_UNIT;
        for count in [1, 3, 7, 100] {
            let parts: Vec<_> = (0..count).map(|index| part(&range, index, count)).collect();
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
            assert!(parts[0].start == range.start && parts[count - 1].end <= range.end);
            assert!(!parts[0].is_empty());
        }
        assert!(part(&range, 0, 1000).is_empty(), "more CPUs than pages");
    }

    /// Returns which chunks of the buffer's stream were written.
    fn written(buffer: &Buffer) -> Vec<bool> {
        let starts = buffer.stream.clone().step_by(CHUNK_BYTES);
        let is_written = |at| {
            let mut byte = [0];
            buffer.mapping.copy_out(at, &mut byte);
            assert_ne!(byte, [0], "zeros may be faster than other bytes");
            byte != [FILL]
        };
        starts.map(is_written).collect()
    }

    #[test]
    fn a_stream_goes_on_where_it_ended_after_it_has_passed_the_caches() {
        let cpu = affinity::get(None).unwrap()[0];
        // Half of the chain, 4 MiB, passes the caches.
        let buffer = buffer(8 << 20, 16 << 20);
        let streams = Streams::new(&buffer, 1, Access::Write);
        for chunks in [5, 6, 7] {
            let rates = streams.rates(&[cpu], Duration::ZERO).unwrap();
            assert!(rates[0] > 0.0);
            let written = written(&buffer);
            assert!(written[..chunks].iter().all(|is_written| *is_written));
            assert!(written[chunks..].iter().all(|is_written| !is_written));
        }
    }

    #[test]
    fn a_stream_that_is_shorter_than_the_caches_is_passed_once() {
        let cpu = affinity::get(None).unwrap()[0];
        let buffer = buffer(64 << 20, 2 << 20);
        let streams = Streams::new(&buffer, 1, Access::Read);
        streams.rates(&[cpu], Duration::ZERO).unwrap();
        let bytes = streams.each[0].lock().unwrap().bytes;
        assert_eq!(bytes, (2 << 20) + CHUNK_BYTES);
    }
}
