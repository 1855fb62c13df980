//! Runs the threads of a workload, each in its seat, and measures them and the machine together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use jericho_topology::{NodeId, Topology};

use crate::error::{Error, Result};
use crate::frames::Frames;
use crate::machine::{Machine, Moment, Span};
use crate::meter::Meter;
use crate::reach::{Daemon, InlinePages};
use crate::seats::Seat;

/// Whether a worker has more to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It goes on until the run ends.
    More,
    /// It has done all of its work.
    Finished,
}

/// The work of one thread.
pub trait Worker {
    /// Does one operation, or begins and ends some, and counts those that ended. Returns within a second if the device answers.
    fn step(&mut self, meter: &mut Meter) -> Result<Progress>;

    /// Returns where the cached pages of the last operation are, or with direct I/O the buffer.
    fn frames(&self) -> &Frames;

    /// Asks the kernel, after the last operation, whether the memory is still where the seat says. Returns whether the kernel has told all of it,
    /// and `None` if the seat says nothing. Fails if a page is elsewhere: the run has measured another placement.
    fn confirm(&self) -> Result<Option<bool>>;
}

/// Makes a worker, in its thread and on its node.
pub type Make<'a> = Box<dyn FnOnce() -> Result<Box<dyn Worker>> + Send + 'a>;

/// A thread of a run.
pub struct Thread<'a> {
    /// Where it is.
    pub seat: Seat,
    /// Makes its worker.
    pub make: Make<'a>,
    /// Whether its operations are those of the workload. `false` for threads that only load the machine.
    pub counts: bool,
}

/// How long a run takes.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Time of the measurement. It ends earlier if all workers finish, and later if no operation has begun and ended in it.
    pub measured: Duration,
}

/// What a run has measured.
#[derive(Debug)]
pub struct Outcome {
    /// All threads together.
    pub meter: Meter,
    /// What each seat has done, in their order.
    pub meters: Vec<(Seat, Meter)>,
    /// Mean latency, if another program tells no other latency.
    pub latency_ns_mean: Option<u64>,
    /// What the threads have moved that do not count.
    pub beside: Beside,
    /// Pages that this process accessed inline meanwhile. `None`: no volume is mounted.
    pub inline_pages: Option<InlinePages>,
    /// Whether the kernel has confirmed, after the measurement, that threads and memory were where the seats say. `None`: they say nothing.
    pub confirmed: Option<bool>,
    /// The machine.
    pub span: Span,
}

/// Threads beside a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Number of the threads.
    pub threads: usize,
    /// Bytes that they have read and written.
    pub bytes: u64,
}

/// What is read when the measurement begins and ends.
#[derive(Clone, Copy)]
pub struct Watched<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// The volumes.
    pub daemon: &'a dyn Daemon,
}

impl Watched<'_> {
    pub(crate) fn now(&self) -> Result<Seen> {
        Ok(Seen {
            inline_pages: self.daemon.inline_pages(),
            moment: self.machine.now()?,
        })
    }
}

/// What `Watched` had counted.
pub(crate) struct Seen {
    inline_pages: Option<InlinePages>,
    moment: Moment,
}

/// Time between two looks for the end of a phase.
pub(crate) const LOOK: Duration = Duration::from_millis(5);

/// Longest time by which a measurement is extended to count its first operation. A device that does not answer must not keep the run for ever.
const EXTENSION_MAX: Duration = Duration::from_secs(60);

/// The phases of a run, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Workers are made.
    Make,
    WarmUp,
    Measure,
    Stop,
}

/// The phase of the run, which the threads read between operations.
struct Phases<'a> {
    /// Set with the last phase, for threads that still make their files.
    stopping: &'a AtomicBool,
    now: Mutex<Phase>,
    changed: Condvar,
    /// The same, for a look without the lock.
    shown: AtomicU8,
    /// Whether a thread has counted an operation in the measurement.
    has_counted: AtomicBool,
}

impl Phases<'_> {
    fn new(stopping: &AtomicBool) -> Phases<'_> {
        Phases {
            stopping,
            now: Mutex::new(Phase::Make),
            changed: Condvar::new(),
            shown: AtomicU8::new(Phase::Make as u8),
            has_counted: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on to a phase. Does nothing if the run is in a later one.
    fn begin(&self, phase: Phase) {
        let mut now = self.lock();
        if *now < phase {
            *now = phase;
            self.shown.store(phase as u8, Ordering::Relaxed);
            if phase == Phase::Stop {
                self.stopping.store(true, Ordering::Relaxed);
            }
            self.changed.notify_all();
        }
    }

    fn is_at_least(&self, phase: Phase) -> bool {
        self.shown.load(Ordering::Relaxed) >= phase as u8
    }

    /// Waits until all workers are made, or the run stops.
    fn wait_for_begin(&self) {
        let mut now = self.lock();
        while *now == Phase::Make {
            now = self
                .changed
                .wait(now)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What a thread tells the one that measures.
enum Event {
    Made,
    Ended,
}

/// Runs the threads. Fails with the failure of a worker, or if `interrupted` is set meanwhile, after all threads have ended. Sets `stopping`, which
/// the makers of workers read, when the run ends or fails.
pub fn run(
    topology: &Topology,
    watched: Watched,
    threads: Vec<Thread>,
    timing: Timing,
    interrupted: &AtomicBool,
    stopping: &AtomicBool,
) -> Result<Outcome> {
    let phases = &Phases::new(stopping);
    let (tell, events) = channel();
    thread::scope(|scope| {
        let mut handles = Vec::new();
        for (index, each) in threads.into_iter().enumerate() {
            let tell = tell.clone();
            let builder = thread::Builder::new().name(format!("bench-{index}"));
            let (seat, counts) = (each.seat.clone(), each.counts);
            let body = move || {
                let result = occupy(topology, each, phases, &tell);
                if result.is_err() {
                    phases.begin(Phase::Stop);
                }
                // The receiver may have seen enough.
                let _ = tell.send(Event::Ended);
                result
            };
            match builder.spawn_scoped(scope, body) {
                Ok(handle) => handles.push((seat, counts, handle)),
                Err(error) => {
                    // The other threads wait for the begin.
                    phases.begin(Phase::Stop);
                    return Err(Error::new(format!(
                        "cannot start thread {index} of the run: {error}; use fewer threads, or raise the limit (ulimit -u)"
                    )));
                }
            }
        }
        drop(tell);
        let seen = follow(watched, phases, &events, handles.len(), timing, interrupted);
        phases.begin(Phase::Stop);
        let (mut meters, mut failures) = (Vec::new(), Vec::new());
        let (mut confirmed, mut beside) = (None, Beside::default());
        for (seat, counts, handle) in handles {
            let joined = handle.join();
            match joined.unwrap_or_else(|_| Err(Error::new("a thread of the run has panicked"))) {
                Ok((meter, told)) if counts => {
                    confirmed = both(confirmed, told);
                    meters.push((seat, meter));
                }
                Ok((meter, _)) => {
                    beside.threads += 1;
                    beside.bytes += meter.read_bytes + meter.written_bytes;
                }
                Err(error) => failures.push(error),
            }
        }
        // One failure interrupts the other threads.
        failures.sort_by_key(Error::is_interruption);
        if let Some(first) = failures.into_iter().next() {
            return Err(first);
        }
        let (first, last) = seen?;
        let outcome = Outcome::of(watched, (&first, &last), meters)?;
        Ok(Outcome {
            confirmed,
            beside,
            ..outcome
        })
    })
}

impl Outcome {
    /// Adds up what the threads have done between two moments.
    pub(crate) fn of(
        watched: Watched,
        (first, last): (&Seen, &Seen),
        meters: Vec<(Seat, Meter)>,
    ) -> Result<Outcome> {
        let inline = last.inline_pages.zip(first.inline_pages);
        let mut meter = Meter::new()?;
        for (_, own) in &meters {
            meter.add(own)?;
        }
        Ok(Outcome {
            meter,
            latency_ns_mean: None,
            meters,
            beside: Beside::default(),
            confirmed: None,
            inline_pages: inline.map(|(last, first)| last.since(first)),
            span: watched.machine.between(&first.moment, &last.moment),
        })
    }

    /// Returns an amount per second: the rates of all threads together.
    pub fn rate(&self, amount: impl Fn(&Meter) -> u64) -> f64 {
        let rates = self.meters.iter();
        rates
            .map(|(_, meter)| meter.rate(amount(meter), self.span.seconds))
            .sum()
    }

    /// Returns bytes moved per second, by the home node of the device, or by the node of the thread if the device's is unknown.
    pub fn bytes_per_s_by_node(&self) -> BTreeMap<NodeId, f64> {
        let mut rates = BTreeMap::new();
        for (seat, meter) in &self.meters {
            if let Some(node) = seat.device.or(seat.thread) {
                let bytes = meter.read_bytes + meter.written_bytes;
                *rates.entry(node).or_default() += meter.rate(bytes, self.span.seconds);
            }
        }
        rates
    }
}

/// Makes the workers, each in its thread and seat, and ends them. Their files stay. Sets `stopping`, which the makers read, if `interrupted` is set.
pub fn prepare(
    topology: &Topology,
    threads: Vec<Thread>,
    interrupted: &AtomicBool,
    stopping: &AtomicBool,
) -> Result<()> {
    let make = |each: Thread| {
        each.seat.take(topology)?;
        each.seat.bind_pages(topology)?;
        (each.make)().map(drop)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = threads
            .into_iter()
            .map(|each| scope.spawn(move || make(each)))
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            if interrupted.load(Ordering::Relaxed) {
                stopping.store(true, Ordering::Relaxed);
            }
            thread::sleep(LOOK);
        }
        let ended = threads.into_iter().map(|thread| {
            let joined = thread.join();
            joined.map_err(|_| Error::new("a thread that makes files has panicked"))?
        });
        ended.collect()
    })
}

/// Begins the phases in turn. Returns the moments of begin and end of the measurement.
fn follow(
    watched: Watched,
    phases: &Phases,
    events: &Receiver<Event>,
    count: usize,
    timing: Timing,
    interrupted: &AtomicBool,
) -> Result<(Seen, Seen)> {
    let (mut made, mut ended) = (0, 0);
    // Waits until all threads have ended, or until `is_over`. Looks for an interruption meanwhile.
    let mut wait = |is_over: &dyn Fn(usize) -> bool| {
        while ended < count && !is_over(made + ended) {
            match events.recv_timeout(LOOK) {
                Ok(Event::Made) => made += 1,
                Ok(Event::Ended) => ended += 1,
                Err(RecvTimeoutError::Timeout) => {}
                // No thread is left.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if interrupted.load(Ordering::Relaxed) {
                return Err(Error::interrupted());
            }
        }
        Ok(())
    };
    wait(&|made| made >= count)?;
    phases.begin(Phase::WarmUp);
    let until = Instant::now() + timing.warm_up;
    wait(&|_| Instant::now() >= until)?;
    let first = watched.now()?;
    phases.begin(Phase::Measure);
    let until = Instant::now() + timing.measured;
    // A run on a slow device or a busy machine would otherwise have no rate, no latency and no place.
    wait(&|_| {
        let now = Instant::now();
        let has_counted = phases.has_counted.load(Ordering::Relaxed);
        now >= until && (has_counted || now >= until + EXTENSION_MAX)
    })?;
    Ok((first, watched.now()?))
}

/// Runs one worker. Returns what it has done in the measured time, and whether the kernel has confirmed its seat afterwards.
fn occupy(
    topology: &Topology,
    each: Thread,
    phases: &Phases,
    tell: &Sender<Event>,
) -> Result<(Meter, Option<bool>)> {
    each.seat.take(topology)?;
    // Each operation writes to the meter, so its memory is local to the thread. The reset touches it.
    let mut meter = Meter::new()?;
    meter.reset();
    each.seat.bind_pages(topology)?;
    let mut worker = (each.make)()?;
    // The receiver may have seen enough.
    let _ = tell.send(Event::Made);
    phases.wait_for_begin();
    let (mut is_measured, mut has_counted) = (false, false);
    while !phases.is_at_least(Phase::Stop) {
        if !is_measured && phases.is_at_least(Phase::Measure) {
            is_measured = true;
            meter.reset();
        }
        // The CPU on which the operation begins: it may move the thread to its data.
        let cpu = match meter.is_sampled() {
            true => topology.node_of_cpu(rustix::thread::sched_getcpu() as u32),
            false => None,
        };
        let before = meter.before();
        let progress = worker.step(&mut meter)?;
        if let Some(cpu) = cpu {
            meter.sample(topology, cpu, worker.frames(), before);
        }
        if is_measured && !has_counted && each.counts && meter.operations > 0 {
            has_counted = true;
            phases.has_counted.store(true, Ordering::Relaxed);
        }
        if progress == Progress::Finished {
            break;
        }
    }
    if !is_measured {
        // One operation has lasted from the warm-up to the end: nothing was measured.
        meter.reset();
    }
    let memory = worker.confirm()?;
    Ok((meter, both(each.seat.confirm(topology)?, memory)))
}

/// Returns what two questions to the kernel give together: `Some(false)` if it has not answered one, `None` if there was none.
pub(crate) fn both(one: Option<bool>, other: Option<bool>) -> Option<bool> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one && other),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::meter::Done;
    use crate::reach::tests::NoDaemon;

    /// A worker whose operations run this function before they count.
    struct Fake<F>(F);

    impl<F: Fn()> Worker for Fake<F> {
        fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
            let began = Instant::now();
            (self.0)();
            meter.count(Done {
                read_bytes: 4096,
                written_bytes: 0,
                began,
            });
            Ok(Progress::More)
        }

        fn frames(&self) -> &Frames {
            &Frames::Unknown
        }

        fn confirm(&self) -> Result<Option<bool>> {
            Ok(None)
        }
    }

    #[test]
    fn an_operation_that_began_in_the_warm_up_is_not_measured() {
        let topology = Topology::from_spec("virtual:1").unwrap();
        let stopping: &'static AtomicBool = Box::leak(Box::default());
        let phases: &'static Phases = Box::leak(Box::new(Phases::new(stopping)));
        phases.begin(Phase::WarmUp);
        let each = Thread {
            seat: Seat::default(),
            make: Box::new(|| {
                // One operation lasts from the warm-up to the end of the run.
                Ok(Box::new(Fake(|| {
                    phases.begin(Phase::Measure);
                    phases.begin(Phase::Stop);
                })) as Box<dyn Worker>)
            }),
            counts: true,
        };
        let (tell, _events) = channel();
        let (meter, _) = occupy(&topology, each, phases, &tell).unwrap();
        assert_eq!((meter.operations, meter.read_bytes), (0, 0));
        assert!(stopping.load(Ordering::Relaxed));
    }

    #[test]
    fn a_measurement_counts_an_operation_however_short_it_is() {
        let slow = |counts| Thread {
            seat: Seat::default(),
            // Each operation lasts longer than the measurement.
            make: Box::new(|| Ok(Box::new(Fake(|| thread::sleep(4 * LOOK))) as Box<dyn Worker>)),
            counts,
        };
        let outcome = run(
            &Topology::from_spec("virtual:1").unwrap(),
            Watched {
                machine: &Machine::of(None),
                daemon: &NoDaemon,
            },
            // The operations of the second thread are not the run's.
            vec![slow(true), slow(false)],
            Timing {
                warm_up: LOOK,
                measured: Duration::ZERO,
            },
            &AtomicBool::new(false),
            &AtomicBool::new(false),
        )
        .unwrap();
        assert!(outcome.meter.operations >= 1);
        assert_eq!(outcome.beside.threads, 1);
        assert!(outcome.span.seconds >= (4 * LOOK).as_secs_f64());
    }

    /// Returns a thread that makes files until the run stops it, or fails with a message.
    fn maker(stopping: &Arc<AtomicBool>, failure: Option<&'static str>) -> Thread<'static> {
        let stopping = stopping.clone();
        Thread {
            seat: Seat::default(),
            make: Box::new(move || {
                if let Some(message) = failure {
                    return Err(Error::new(message));
                }
                while !stopping.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                Err(Error::interrupted())
            }),
            counts: true,
        }
    }

    fn failure_of(threads: &[Option<&'static str>], interrupted: bool) -> String {
        let topology = Topology::from_spec("virtual:1").unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let threads = threads.iter().map(|failure| maker(&stopping, *failure));
        let timing = Timing {
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
        };
        let outcome = run(
            &topology,
            Watched {
                machine: &Machine::of(None),
                daemon: &NoDaemon,
            },
            threads.collect(),
            timing,
            &AtomicBool::new(interrupted),
            &stopping,
        );
        outcome.unwrap_err().to_string()
    }

    #[test]
    fn a_signal_or_a_failure_ends_the_making_of_files_and_the_cause_is_told() {
        assert_eq!(failure_of(&[None, None], true), "interrupted");
        assert_eq!(
            failure_of(&[None, Some("disk full"), None], false),
            "disk full"
        );
    }
}
