//! Measures random and sequential reads through a queue, for comparison with fio on the same file.
//!
//! `queue_throughput FILE [SECONDS]` prints one line per workload; the fio jobs to compare with:
//! `fio --name=r --filename=FILE --ioengine=io_uring --direct=1 --rw=randread --bs=4k --iodepth=32`
//! and `--rw=read --bs=1m --iodepth=8`, both with `--time_based --runtime=SECONDS`.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_storage::{
    Device, Direction, OpenOptions, Queue, Segment, Transfer, open_device, open_queue,
};
use jericho_sys::memory::Mapping;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments
        .next()
        .ok_or("usage: queue_throughput FILE [SECONDS]")?;
    let seconds: f64 = arguments.next().map_or(Ok(5.0), |text| text.parse())?;
    let limit = Duration::try_from_secs_f64(seconds)?;
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let device = open_device(Path::new(&path), options)?;
    println!("{}", device.describe());
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    measure(
        "random 4 KiB, depth 32",
        &device,
        4096,
        32,
        limit,
        |_, blocks| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % blocks
        },
    )?;
    measure(
        "sequential 1 MiB, depth 8",
        &device,
        1 << 20,
        8,
        limit,
        |index, blocks| index % blocks,
    )
}

/// Keeps `depth` reads of `length` bytes in flight. The device consists of places of `length` bytes; `choose` returns the place of
/// a read, given the read's index and the number of places.
fn measure(
    label: &str,
    device: &Arc<dyn Device>,
    length: usize,
    depth: u32,
    limit: Duration,
    mut choose: impl FnMut(u64, u64) -> u64,
) -> Result<(), Failure> {
    let places = device.size_bytes() / length as u64;
    if places == 0 {
        return Err("the file is smaller than one transfer".into());
    }
    let memory = Arc::new(Mapping::create(
        "jericho-bench",
        length * depth as usize,
        true,
    )?);
    memory.populate(0..memory.len())?;
    let mut queue = open_queue(&[Arc::clone(device)], &[Arc::clone(&memory)], depth)?;
    let mut submitted = 0;
    let mut submit = |queue: &mut dyn Queue, slot: u64| {
        let segment = Segment {
            mapping: Arc::clone(&memory),
            offset: slot as usize * length,
            len: length,
        };
        queue.submit(Transfer {
            tag: slot,
            device: 0,
            direction: Direction::Read,
            offset_bytes: choose(submitted, places) * length as u64,
            segments: vec![segment],
        });
        submitted += 1;
    };
    let start = Instant::now();
    (0..u64::from(depth)).for_each(|slot| submit(queue.as_mut(), slot));
    let mut completions = Vec::new();
    let mut completed = 0u64;
    while queue.in_flight() > 0 {
        queue.wait(&mut completions, None);
        let is_over = start.elapsed() >= limit;
        for completion in completions.drain(..) {
            completion.result?;
            completed += 1;
            if !is_over {
                submit(queue.as_mut(), completion.tag);
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let (per_second, bytes) = (completed as f64 / seconds, completed as f64 * length as f64);
    let mib = bytes / seconds / f64::from(1 << 20);
    println!(
        "{label}: {per_second:.0} IOPS, {mib:.0} MiB/s ({})",
        queue.describe()
    );
    Ok(())
}
