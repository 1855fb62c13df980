//! zmIO: asynchronous direct reads or writes. The *status queue* is bounded: when it is full, the thread waits for one to end and then begins the next one.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_storage::{Completion, Direction, Queue, Transfer, open_queue};
use jericho_sys::memory::{Mapping, Segment};

use crate::buffer;
use crate::case::{Case, Scale};
use crate::direct::{self, Devices, first_request, requests_of};
use crate::error::{Error, Result, warn};
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::random;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// Places of the status queue.
pub const DEPTH: usize = 32;
/// The paper reads from devices. A file for each instance takes their place in a directory.
const FILE_BYTES: u64 = 1 << 30;
/// Bytes that are added up at a time. They stay in the first cache of the CPU.
const CHUNK_BYTES: usize = 4096;
/// Longest wait for a transfer. Then the thread looks whether the run has ended.
const WAIT: Duration = Duration::from_millis(100);
/// Time in which the last transfers of a run end, unless the device hangs.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns the bytes of the file of each instance.
pub fn file_bytes(threads: usize, scale: Scale) -> u64 {
    scale.file_bytes(FILE_BYTES, threads, 1 << 20)
}

/// Returns the bytes of all files.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    threads as u64 * file_bytes(threads, scale)
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let bytes = file_bytes(case.seats.len(), case.scale);
    let devices = Devices::open(case)?;
    Ok(case.each(move |index, seat| {
        let worker = Zmio::open(case, &devices, index, seat, bytes)?;
        Ok(Box::new(worker) as Box<dyn Worker>)
    }))
}

struct Zmio {
    frames: Frames,
    kernel_node: Option<u32>,
    /// `None`: it was left to a device that hangs.
    queue: Option<Box<dyn Queue>>,
    target: PathBuf,
    memory: Arc<Mapping>,
    request_bytes: usize,
    /// Number of requests that the device has room for, and the next one.
    requests: u64,
    next: u64,
    /// When the transfer of each place began.
    began: Vec<Instant>,
    free: Vec<usize>,
    /// Transfers that have ended, and when the thread has seen that.
    ended: VecDeque<(Completion, Instant)>,
    writes: bool,
    /// Whether the thread adds all bytes up that it has read.
    adds: bool,
    sum: u64,
    patience: Duration,
}

impl Zmio {
    fn open(case: &Case, devices: &Devices, index: usize, seat: &Seat, bytes: u64) -> Result<Zmio> {
        let device = devices.of(case, index, bytes)?;
        let request_bytes = case.variant.request_bytes;
        let memory = buffer::for_transfers(case.topology, seat, DEPTH * request_bytes)?;
        fill_places(&memory, case.seed ^ index as u64);
        let requests = requests_of(&*device, request_bytes)?;
        // With registered buffers, the kernel need not pin their pages for each transfer.
        let buffers = [memory.clone()];
        let queue = open_queue(&[device.clone()][..], &buffers, DEPTH as u32);
        let queue = queue.map_err(|error| Error::new(error.to_string()))?;
        let target = &case.targets[index % case.targets.len()].path;
        case.engine
            .note(case.placement, target, &*device, Some(&*queue))?;
        Ok(Zmio {
            frames: Frames::of_buffer(case.topology, seat, buffer::nodes_of(&memory)),
            kernel_node: seat.kernel_node(case.topology),
            queue: Some(queue),
            target: target.clone(),
            memory,
            request_bytes,
            requests,
            next: first_request(case, index, requests),
            began: vec![Instant::now(); DEPTH],
            free: (0..DEPTH).collect(),
            ended: VecDeque::with_capacity(DEPTH),
            writes: case.variant.writes,
            adds: direct::adds(case, true),
            sum: 0,
            patience: PATIENCE,
        })
    }

    /// Begins a transfer in each free place, and waits until one has ended or the time is over.
    fn begin_all(&mut self, wait: Duration) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        while let Some(place) = self.free.pop() {
            self.began[place] = Instant::now();
            queue.submit(Transfer {
                tag: place as u64,
                device: 0,
                direction: match self.writes {
                    true => Direction::Write,
                    false => Direction::Read,
                },
                offset_bytes: self.next * self.request_bytes as u64,
                segments: vec![Segment {
                    mapping: self.memory.clone(),
                    offset: place * self.request_bytes,
                    len: self.request_bytes,
                }],
            });
            self.next = (self.next + 1) % self.requests;
        }
        let mut ended = Vec::new();
        queue.wait(&mut ended, Some(wait));
        let now = Instant::now();
        self.ended.extend(ended.into_iter().map(|one| (one, now)));
    }

    /// Counts a transfer, and adds up its bytes.
    fn end(&mut self, (completion, at): (Completion, Instant), meter: &mut Meter) -> Result<()> {
        completion.result?;
        let place = completion.tag as usize;
        let bytes = self.request_bytes as u64;
        let (read_bytes, written_bytes) = match self.writes {
            true => (0, bytes),
            false => (bytes, 0),
        };
        let done = Done {
            read_bytes,
            written_bytes,
            began: self.began[place],
        };
        // Not the time in which the thread adds up this one, and others before it.
        meter.count_ended(done, at);
        if self.adds {
            let sum = add_up(&self.memory, place * self.request_bytes, self.request_bytes);
            self.sum = std::hint::black_box(self.sum.wrapping_add(sum));
        }
        self.free.push(place);
        Ok(())
    }
}

/// Fills the memory with bytes that no device can compress.
fn fill_places(memory: &Mapping, seed: u64) {
    let mut chunk = [0u8; CHUNK_BYTES];
    for at in (0..memory.len()).step_by(CHUNK_BYTES) {
        random::fill(seed.wrapping_add(at as u64), &mut chunk);
        memory.copy_in(at, &chunk[..CHUNK_BYTES.min(memory.len() - at)]);
    }
}

/// Adds up the bytes of a place, a copy of a piece at a time, because bytes that a device writes cannot be borrowed.
fn add_up(memory: &Mapping, offset: usize, bytes: usize) -> u64 {
    let mut chunk = [0u8; CHUNK_BYTES];
    let pieces = (0..bytes).step_by(CHUNK_BYTES);
    pieces
        .map(|at| {
            let piece = &mut chunk[..CHUNK_BYTES.min(bytes - at)];
            memory.copy_out(offset + at, piece);
            direct::sum(piece)
        })
        .sum()
}

impl Worker for Zmio {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        if self.ended.is_empty() {
            self.begin_all(WAIT);
        }
        while let Some(one) = self.ended.pop_front() {
            self.end(one, meter)?;
            if self.adds {
                // The device goes on while the thread adds up the next one.
                self.begin_all(Duration::ZERO);
                break;
            }
        }
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        buffer::confirm(buffer::nodes_of(&self.memory), self.kernel_node)
    }
}

impl Drop for Zmio {
    /// Leaves the transfers to a device that hangs: the queue would wait for them, and so would the run.
    fn drop(&mut self) {
        let Some(mut queue) = self.queue.take() else {
            return;
        };
        let until = Instant::now() + self.patience;
        let mut ended = Vec::new();
        while queue.in_flight() > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                warn(format_args!(
                    "{}: {} transfers do not end; the run leaves them to the device",
                    self.target.display(),
                    queue.in_flight()
                ));
                // The queue has the memory, which so stays mapped.
                std::mem::forget(queue);
                return;
            }
            queue.wait(&mut ended, Some(left.min(WAIT)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use jericho_storage::Wake;

    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    struct Nobody;

    impl Wake for Nobody {
        fn wake(&self) {}
    }

    /// The number of transfers in progress, and the timeout, of each wait.
    type Waits = Vec<(usize, Option<Duration>)>;

    /// A queue whose transfers end as the test says, and what it was asked to do.
    #[derive(Default)]
    struct Scripted {
        in_flight: usize,
        /// How many transfers end at each wait.
        ends: VecDeque<usize>,
        begun: Vec<u64>,
        log: Arc<Mutex<Waits>>,
        dropped: Arc<AtomicUsize>,
    }

    impl Scripted {
        fn ending(counts: impl Into<VecDeque<usize>>) -> Scripted {
            let mut scripted = Scripted::default();
            scripted.ends = counts.into();
            scripted
        }
    }

    impl Queue for Scripted {
        fn submit(&mut self, transfer: Transfer) {
            self.begun.push(transfer.tag);
            self.in_flight += 1;
        }

        fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) {
            self.log.lock().unwrap().push((self.in_flight, timeout));
            let count = self.ends.pop_front().unwrap_or(0);
            for tag in self.begun.drain(..count) {
                completions.push(Completion {
                    tag,
                    result: Ok(()),
                });
            }
            self.in_flight -= count;
        }

        fn waker(&self) -> Arc<dyn Wake> {
            Arc::new(Nobody)
        }

        fn in_flight(&self) -> usize {
            self.in_flight
        }

        fn describe(&self) -> String {
            "io_uring of a test".into()
        }
    }

    impl Drop for Scripted {
        fn drop(&mut self) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn zmio(name: &str, queue: Scripted) -> Zmio {
        let story = Story::new(Kind::Zmio, name);
        let case = story.case();
        let devices = Devices::open(&case).unwrap();
        let mut zmio = Zmio::open(&case, &devices, 0, &case.seats[0], 1 << 20).unwrap();
        zmio.queue = Some(Box::new(queue));
        zmio.patience = Duration::ZERO;
        zmio
    }

    #[test]
    fn the_device_has_its_transfers_back_after_each_sum() {
        let queue = Scripted::ending([DEPTH]);
        let log = queue.log.clone();
        let mut zmio = zmio("TLORPLIR", queue);
        let mut meter = Meter::new().unwrap();
        for _ in 0..DEPTH {
            zmio.step(&mut meter).unwrap();
        }
        assert_eq!(meter.operations, DEPTH as u64);
        // All places are in progress, then one more after each sum.
        let in_flight: Vec<usize> = log
            .lock()
            .unwrap()
            .iter()
            .map(|(count, _)| *count)
            .collect();
        assert!(
            in_flight
                .into_iter()
                .eq(std::iter::once(DEPTH).chain(1..=DEPTH))
        );
    }

    #[test]
    fn a_latency_ends_when_the_transfer_was_seen_to_end_and_not_after_sums() {
        let queue = Scripted::ending([DEPTH]);
        let mut zmio = zmio("TLORPLIR", queue);
        let mut meter = Meter::new().unwrap();
        let start = Instant::now();
        zmio.step(&mut meter).unwrap();
        let seen: Vec<Instant> = zmio.ended.iter().map(|(_, at)| *at).collect();
        assert!(seen.iter().all(|at| *at == seen[0]));
        let bound = seen[0].duration_since(start);
        for _ in 1..DEPTH {
            zmio.step(&mut meter).unwrap();
        }
        // The histogram rounds up in its third digit.
        let most = (bound.as_nanos() as u64).max(1) * 1002 / 1000 + 1;
        assert!(
            meter.latency_ns.max() <= most,
            "{} {most}",
            meter.latency_ns.max()
        );
    }

    #[test]
    fn a_device_that_does_not_answer_holds_neither_a_step_nor_the_end() {
        let queue = Scripted::default();
        let (log, dropped) = (queue.log.clone(), queue.dropped.clone());
        let mut zmio = zmio("native", queue);
        let mut meter = Meter::new().unwrap();
        assert_eq!(zmio.step(&mut meter).unwrap(), Progress::More);
        assert_eq!(meter.operations, 0);
        assert!(
            log.lock()
                .unwrap()
                .iter()
                .all(|(_, timeout)| timeout.is_some())
        );
        drop(zmio);
        assert_eq!(dropped.load(Ordering::Relaxed), 0, "the queue is left");
    }
}
