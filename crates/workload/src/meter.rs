//! What one thread has done: operations, bytes, latencies, and how many of its accesses were local.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::error::{Error, Result};

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
    /// Of the sampled operations, those whose thread was on the node of its cached page or, with direct I/O, of its buffer.
    pub local: f64,
    /// The sampled operations whose nodes are known.
    pub sampled: u64,
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
            local: 0.0,
            sampled: 0,
        })
    }

    /// Forgets everything: the run begins.
    pub fn reset(&mut self) {
        self.latency_ns.reset();
        (self.operations, self.read_bytes, self.written_bytes) = (0, 0, 0);
        (self.local, self.sampled) = (0.0, 0);
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
        self.operations.is_multiple_of(SAMPLE)
    }

    /// Counts a sampled operation. `local` is 1 for a local one, 0 for a remote one, and between for one that used pages of several nodes.
    pub fn sample(&mut self, local: f64) {
        self.local += local;
        self.sampled += 1;
    }

    /// Adds what another thread has done.
    pub fn add(&mut self, other: &Meter) -> Result<()> {
        let added = self.latency_ns.add(&other.latency_ns);
        added.map_err(|e| Error::new(format!("cannot add histograms: {e}")))?;
        self.operations += other.operations;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.local += other.local;
        self.sampled += other.sampled;
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
        assert!(one.is_sampled());
        one.count(done);
        assert!(!one.is_sampled());
        one.sample(1.0);
        two.count(done);
        two.sample(0.0);
        two.add(&one).unwrap();
        assert_eq!(
            (two.operations, two.read_bytes, two.written_bytes),
            (2, 20, 2)
        );
        assert_eq!((two.latency_ns.len(), two.local_share()), (2, Some(0.5)));
        two.reset();
        assert_eq!(
            (two.operations, two.latency_ns.len(), two.local_share()),
            (0, 0, None)
        );
    }
}
