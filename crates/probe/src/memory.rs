//! Measurements of memory: streams, chains of reads, and moves of a thread.
//!
//! Each is repeated, and the median counts. Bandwidth and latency refer to the CPU time of the thread, which waits for memory include, so that
//! other programs on its CPU do not count. How long a measurement lasts refers to the clock.

use std::hint::black_box;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use jericho_sys::memory::Mapping;
use jericho_sys::process::thread_cpu_time;

use crate::buffer::Buffer;
use crate::plan::{MOVES, REPETITIONS};
use crate::streams::{Access, Streams, since};
use crate::threads::{Reason, check, on_cpus, pin};

/// Steps of a chain between two looks at the clock.
const CHUNK_STEPS: u64 = 2000;
/// Passes over the working set that make it warm.
const WARM_PASSES: usize = 3;

/// Returns the bandwidth in bytes a second with which all `cpus` together stream through a buffer. Each has its own part of it.
pub(crate) fn bandwidth(
    cpus: &[u32],
    buffer: &Buffer,
    access: Access,
    time: Duration,
) -> Result<u64, Reason> {
    let streams = Streams::new(buffer, cpus.len(), access);
    let mut rates = repeated(|| {
        let rates = streams.rates(cpus, time / REPETITIONS)?;
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
    let streams = Streams::new(buffer, load.len(), Access::Read);
    let mut latencies = repeated(|| {
        streams.beside(cpu, load, || {
            let begun = Instant::now();
            // Goes on where the last measurement ended: the lines behind may be in a cache.
            let at = buffer.chain_at.load(Ordering::Relaxed);
            let (nanoseconds, at) = chase(&buffer.mapping, at, || {
                begun.elapsed() >= time / REPETITIONS
            });
            buffer.chain_at.store(at, Ordering::Relaxed);
            nanoseconds
        })
    })?;
    Ok(rounded(median(&mut latencies)))
}

/// Returns what a move of a thread from `from` to `to` costs in nanoseconds: the time until it runs there and has read `working_set` bytes,
/// which are in no cache there, beyond the time of reading them when they are warm. Returns `None` if both have the same first CPU, so that the thread need
/// not move.
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
    let move_once = |number: usize| -> Result<f64, Reason> {
        pin(&[*from])?;
        // The caches of `to` have the set from the move before. A write takes it out of them.
        buffer.mapping.stream_write(set.clone(), number as u8);
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
        (1..=MOVES).map(move_once).collect()
    })?;
    Ok(Some(rounded(median(&mut moves?)).max(1.0)))
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
    use crate::buffer::FILL;
    use crate::example::buffer;
    use jericho_sys::affinity;

    #[test]
    fn each_move_finds_the_caches_of_the_other_cpu_without_the_working_set() {
        let cpus = affinity::get(None).unwrap();
        let buffer = buffer(2 << 20, 4 << 20);
        let first = |at| {
            let mut byte = [0];
            buffer.mapping.copy_out(at, &mut byte);
            byte[0]
        };
        let set = 1 << 20;
        assert_eq!(migration(&cpus[..1], &cpus[..1], &buffer, set), Ok(None));
        assert_eq!(first(buffer.stream.start), FILL);
        if cpus.len() > 1 {
            let cost = migration(&cpus[..1], &cpus[1..2], &buffer, set).unwrap();
            assert!(cost.unwrap() > 0.0);
            // The last move has written all lines of the set, and none beyond.
            let mut lines = (buffer.stream.start..buffer.stream.start + set).step_by(64);
            assert!(lines.all(|at| first(at) == MOVES as u8));
            assert_eq!(first(buffer.stream.start + set), FILL);
        }
    }

    #[test]
    fn a_measurement_goes_on_in_the_chain_where_the_one_before_ended() {
        let cpus = affinity::get(None).unwrap();
        let buffer = buffer(2 << 20, 4 << 20);
        let steps = |from: usize, to: usize| {
            let mut at = from;
            let all = buffer.chain.len() as u64 / 64;
            (1..=all).find(|_| {
                at = buffer.mapping.chase(at, 1);
                at == to
            })
        };
        let mut at = buffer.chain.start;
        // No time: each repetition takes one chunk of steps.
        for _ in 0..2 {
            latency(cpus[0], &[], &buffer, Duration::ZERO).unwrap();
            let now = buffer.chain_at.load(Ordering::Relaxed);
            let taken = CHUNK_STEPS * u64::from(REPETITIONS);
            assert_eq!(steps(at, now), Some(taken));
            at = now;
        }
    }

    #[test]
    fn the_median_ignores_a_disturbance() {
        assert_eq!(median(&mut [5.0, 1.0, 900.0, 4.0, 6.0]), 5.0);
        assert_eq!(median(&mut []), 0.0);
    }
}
