//! Measurements of memory: streams, chains of reads, and moves of a thread.
//!
//! Each is repeated, and the median counts. Bandwidth and latency refer to the CPU time of the thread, which waits for memory include, so that
//! other programs on its CPU do not count. How long a measurement lasts refers to the clock.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jericho_sys::memory::Mapping;
use jericho_sys::process::thread_cpu_time;

use crate::buffer::Buffer;
use crate::plan::REPETITIONS;
use crate::threads::{Reason, check, on_cpus, on_each_cpu, pin};

/// Bytes of a stream between two looks at the clock.
const CHUNK_BYTES: usize = 1 << 20;
/// Steps of a chain between two looks at the clock.
const CHUNK_STEPS: u64 = 2000;
/// Parts of the streams of different CPUs begin at multiples of this.
const PART_UNIT: usize = 4096;
/// Number of moves of a thread of which the median counts.
const MOVES: usize = 15;
/// Passes over the working set that make it warm.
const WARM_PASSES: usize = 3;

/// What a stream does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Returns the bandwidth in bytes a second with which all `cpus` together stream through a buffer. Each has its own part of it.
pub(crate) fn bandwidth(
    cpus: &[u32],
    buffer: &Buffer,
    access: Access,
    time: Duration,
) -> Result<u64, Reason> {
    let mut rates = repeated(|| {
        let rates = on_each_cpu(cpus, |index| {
            let part = part(&buffer.stream, index, cpus.len());
            let (begun, begun_cpu) = (Instant::now(), thread_cpu_time());
            let bytes = stream(&buffer.mapping, part, access, || {
                begun.elapsed() >= time / REPETITIONS
            });
            bytes as f64 / since(begun_cpu).as_secs_f64()
        })?;
        Ok(rates.iter().sum())
    })?;
    Ok((median(&mut rates) as u64).max(1))
}

/// Returns the latency in nanoseconds of reads by `cpu` while the CPUs `load` stream reads from the same memory.
pub(crate) fn latency(
    cpu: u32,
    load: &[u32],
    buffer: &Buffer,
    time: Duration,
) -> Result<f64, Reason> {
    let cpus: Vec<u32> = [cpu].into_iter().chain(load.iter().copied()).collect();
    let begin = AtomicUsize::new(buffer.chain.start);
    let mut latencies = repeated(|| {
        let is_over = AtomicBool::new(false);
        let results = on_each_cpu(&cpus, |index| {
            let begun = Instant::now();
            if index > 0 {
                let part = part(&buffer.stream, index - 1, load.len());
                // The time limit is for the case that the first thread panics.
                let ends = || is_over.load(Ordering::Relaxed) || begun.elapsed() > 10 * time;
                stream(&buffer.mapping, part, Access::Read, ends);
                return 0.0;
            }
            let (nanoseconds, end) = chase(&buffer.mapping, begin.load(Ordering::Relaxed), || {
                begun.elapsed() >= time / REPETITIONS
            });
            is_over.store(true, Ordering::Relaxed);
            // The next repetition goes on from here: the lines behind may be in a cache.
            begin.store(end, Ordering::Relaxed);
            nanoseconds
        })?;
        results
            .first()
            .copied()
            .ok_or_else(|| "no thread has measured".into())
    })?;
    Ok(rounded(median(&mut latencies)))
}

/// Returns what a move of a thread from `from` to `to` costs in nanoseconds: the time until it runs there and has read `working_set` bytes,
/// beyond the time of reading them when they are warm. Returns `None` if a CPU belongs to both, so that the thread need not move.
pub(crate) fn migration(
    from: &[u32],
    to: &[u32],
    buffer: &Buffer,
    working_set: usize,
) -> Result<Option<f64>, Reason> {
    let (Some(from), Some(to)) = (from.first(), to.first()) else {
        return Ok(None);
    };
    if from == to {
        return Ok(None);
    }
    let end = (buffer.stream.start + working_set).min(buffer.stream.end);
    let set = buffer.stream.start..end;
    let pass = || {
        let begun = Instant::now();
        black_box(buffer.mapping.stream_read(set.clone()));
        begun.elapsed()
    };
    let move_once = || -> Result<f64, Reason> {
        pin(&[*from])?;
        let warm = (0..WARM_PASSES).map(|_| pass()).min().unwrap_or_default();
        let begun = Instant::now();
        pin(&[*to])?;
        pass();
        let taken = begun.elapsed();
        check(&[*to])?;
        Ok(taken.saturating_sub(warm).as_nanos() as f64)
    };
    // The closure pins its thread itself; at the end the thread is where `on_cpus` expects it.
    let moves = on_cpus(&[*from, *to], || -> Result<Vec<f64>, Reason> {
        (0..MOVES).map(|_| move_once()).collect()
    })?;
    Ok(Some(rounded(median(&mut moves?)).max(1.0)))
}

/// Streams through a range, again and again, until `ends`. Returns the number of bytes.
fn stream(mapping: &Mapping, range: Range<usize>, access: Access, ends: impl Fn() -> bool) -> u64 {
    let (mut at, mut bytes) = (range.start, 0);
    while !range.is_empty() {
        let end = (at + CHUNK_BYTES).min(range.end);
        match access {
            Access::Read => {
                black_box(mapping.stream_read(at..end));
            }
            Access::Write => mapping.stream_write(at..end, bytes as u8),
        }
        bytes += (end - at) as u64;
        at = if end == range.end { range.start } else { end };
        if ends() {
            break;
        }
    }
    bytes
}

/// Follows the chain from `at` until `ends`. Returns the nanoseconds of a step, and where the chain goes on.
fn chase(mapping: &Mapping, mut at: usize, ends: impl Fn() -> bool) -> (f64, usize) {
    let (begun_cpu, mut steps) = (thread_cpu_time(), 0);
    loop {
        at = black_box(mapping.chase(at, CHUNK_STEPS));
        steps += CHUNK_STEPS;
        if ends() {
            return (since(begun_cpu).as_nanos() as f64 / steps as f64, at);
        }
    }
}

/// Returns how much CPU time the thread has used since. Never 0, because callers divide by it.
fn since(begun_cpu: Duration) -> Duration {
    let used = thread_cpu_time().saturating_sub(begun_cpu);
    used.max(Duration::from_nanos(1))
}

/// Returns the part of a range that belongs to one of `count` streams.
fn part(range: &Range<usize>, index: usize, count: usize) -> Range<usize> {
    let len = range.len() / count.max(1) / PART_UNIT * PART_UNIT;
    let start = range.start + index * len;
    start..start + len
}

fn repeated(measure: impl Fn() -> Result<f64, Reason>) -> Result<Vec<f64>, Reason> {
    (0..REPETITIONS).map(|_| measure()).collect()
}

/// Returns the median of some values.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Rounds a time to tenths of a nanosecond: further digits mean nothing.
fn rounded(nanoseconds: f64) -> f64 {
    (nanoseconds * 10.0).round().max(1.0) / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn the_median_ignores_a_disturbance() {
        assert_eq!(median(&mut [5.0, 1.0, 900.0, 4.0, 6.0]), 5.0);
        assert_eq!(median(&mut []), 0.0);
    }
}
