//! What one thread has done: operations, bytes, latencies, and how many of its accesses were local.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use jericho_topology::{NodeId, Topology};

use crate::error::{Error, Result};
use crate::frames::Frames;

/// The longest latency that a histogram tells apart from longer ones.
const LATENCY_MAX: Duration = Duration::from_secs(100);
/// One in this many operations asks on which CPU it runs.
const SAMPLE: u64 = 64;

/// Counts the operations of a thread, or of all threads together.
#[derive(Clone, Debug)]
pub struct Meter {
    /// Latency of each operation in nanoseconds, with three digits.
    pub latency_ns: Histogram<u64>,
    /// Number of operations.
    pub operations: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time in which the thread has made the operations, if it does other work between them, which rates leave out. Zero: all of the measurement.
    pub active: Duration,
    /// Of the sampled operations, those whose thread was on the node of its cached page or, with direct I/O, of its buffer.
    pub local: f64,
    /// The sampled operations whose nodes are known.
    pub sampled: u64,
    /// Bytes of the sampled operations, by the nodes that took part.
    pub places: BTreeMap<Places, u64>,
    /// Number of operations after which the next one is sampled.
    next_sample: u64,
}

/// The nodes of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Places {
    /// Node of the CPU on which the thread ran.
    pub cpu: NodeId,
    /// Node of the cached page or, with direct I/O, of the buffer.
    pub frame: NodeId,
    /// Whether it was a write.
    pub is_write: bool,
}

/// One operation that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Bytes that it has read.
    pub read_bytes: u64,
    /// Bytes that it has written.
    pub written_bytes: u64,
    /// When it began.
    pub began: Instant,
}

/// What a meter had counted before an operation.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    operations: u64,
    read_bytes: u64,
    written_bytes: u64,
}

impl Meter {
    /// Creates a meter that has counted nothing.
    pub fn new() -> Result<Meter> {
        let highest = LATENCY_MAX.as_nanos() as u64;
        let histogram = Histogram::new_with_bounds(1, highest, 3);
        let latency_ns =
            histogram.map_err(|e| Error::new(format!("cannot create a histogram: {e}")))?;
        Ok(Meter {
            latency_ns,
            operations: 0,
            read_bytes: 0,
            written_bytes: 0,
            active: Duration::ZERO,
            local: 0.0,
            sampled: 0,
            places: BTreeMap::new(),
            next_sample: 0,
        })
    }

    /// Forgets everything: the run begins.
    pub fn reset(&mut self) {
        self.latency_ns.reset();
        (self.operations, self.read_bytes, self.written_bytes) = (0, 0, 0);
        self.active = Duration::ZERO;
        (self.local, self.sampled) = (0.0, 0);
        self.places.clear();
        self.next_sample = 0;
    }

    /// Counts an operation that ends now.
    pub fn count(&mut self, done: Done) {
        self.count_ended(done, Instant::now());
    }

    /// Counts an operation that has ended at this moment.
    pub fn count_ended(&mut self, done: Done, at: Instant) {
        let took = at.saturating_duration_since(done.began).min(LATENCY_MAX);
        // A latency beyond the bounds counts as the bound.
        self.latency_ns.saturating_record(took.as_nanos() as u64);
        self.operations += 1;
        self.read_bytes += done.read_bytes;
        self.written_bytes += done.written_bytes;
    }

    /// Returns whether the next operation is one of those that ask where they run.
    pub fn is_sampled(&self) -> bool {
        self.operations >= self.next_sample
    }

    /// Counts the operations since `before` as sampled. They ran on a CPU of `cpu` and used the memory `frames`. Does nothing if none has ended, or if the
    /// place of the memory is unknown.
    pub fn sample(&mut self, topology: &Topology, cpu: NodeId, frames: &Frames, before: Before) {
        if self.operations == before.operations {
            return;
        }
        self.next_sample = (before.operations / SAMPLE + 1) * SAMPLE;
        let Some(local) = frames.local_share(topology, cpu) else {
            return;
        };
        // Of several nodes' pages, each operation uses some of each, for all that is known.
        self.local += local;
        self.sampled += 1;
        for (is_write, bytes) in [
            (false, self.read_bytes - before.read_bytes),
            (true, self.written_bytes - before.written_bytes),
        ] {
            for (frame, share) in frames.shares() {
                let place = Places {
                    cpu,
                    frame,
                    is_write,
                };
                let part = (bytes as f64 * share) as u64;
                if part > 0 {
                    *self.places.entry(place).or_default() += part;
                }
            }
        }
    }

    /// Returns what has been counted so far.
    pub fn before(&self) -> Before {
        Before {
            operations: self.operations,
            read_bytes: self.read_bytes,
            written_bytes: self.written_bytes,
        }
    }

    /// Returns an amount per second, of [`Meter::active`] or of a measurement of this length.
    pub fn rate(&self, amount: u64, seconds: f64) -> f64 {
        let seconds = match self.active.is_zero() {
            true => seconds,
            false => self.active.as_secs_f64(),
        };
        amount as f64 / seconds.max(1e-9)
    }

    /// Adds what another thread has done. Threads do it at the same time, so `active` does not add up.
    pub fn add(&mut self, other: &Meter) -> Result<()> {
        let added = self.latency_ns.add(&other.latency_ns);
        added.map_err(|e| Error::new(format!("cannot add histograms: {e}")))?;
        self.operations += other.operations;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.local += other.local;
        self.sampled += other.sampled;
        for (place, bytes) in &other.places {
            *self.places.entry(*place).or_default() += bytes;
        }
        Ok(())
    }

    /// Returns the share of local accesses among the sampled ones. `None`: none was sampled.
    pub fn local_share(&self) -> Option<f64> {
        (self.sampled > 0).then(|| self.local / self.sampled as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meters_of_threads_add_up_and_forget() {
        let began = Instant::now();
        let done = Done {
            read_bytes: 10,
            written_bytes: 1,
            began,
        };
        let (mut one, mut two) = (Meter::new().unwrap(), Meter::new().unwrap());
        let topology = Topology::from_spec("virtual:2").unwrap();
        let (near, far) = (NodeId(0), NodeId(1));
        assert!(one.is_sampled());
        let before = one.before();
        // Nothing has ended: no sample.
        one.sample(&topology, near, &Frames::On(far), before);
        one.count(done);
        one.sample(&topology, near, &Frames::On(near), before);
        assert!(!one.is_sampled());
        // The place is unknown: no sample.
        one.sample(&topology, near, &Frames::Unknown, before);
        let before = two.before();
        two.count(done);
        two.sample(&topology, near, &Frames::On(far), before);
        two.add(&one).unwrap();
        let bytes: Vec<(u16, bool, u64)> = two
            .places
            .iter()
            .map(|(place, bytes)| (place.frame.0, place.is_write, *bytes))
            .collect();
        let expected = [(0, false, 10), (0, true, 1), (1, false, 10), (1, true, 1)];
        assert_eq!(bytes, expected);
        assert_eq!(
            (two.operations, two.read_bytes, two.written_bytes),
            (2, 20, 2)
        );
        assert_eq!((two.latency_ns.len(), two.local_share()), (2, Some(0.5)));
        // Operations that end in batches are sampled, too, and waiting is not.
        let mut batches = Meter::new().unwrap();
        let mut sampled = 0;
        for step in 0..64 {
            let is_sampled = batches.is_sampled();
            let before = batches.before();
            (0..step % 3 * 16).for_each(|_| batches.count(done));
            if is_sampled {
                batches.sample(&topology, near, &Frames::On(near), before);
                sampled += u64::from(step % 3 > 0);
            }
        }
        assert_eq!(batches.sampled, sampled);
        assert_eq!(batches.sampled, batches.operations.div_ceil(64));
        two.reset();
        assert_eq!(
            (two.operations, two.latency_ns.len(), two.local_share()),
            (0, 0, None)
        );
        assert!(two.places.is_empty());
    }
}
