//! Syncs that share flushes, in the threads of their callers. The committer flushes on its own.
//!
//! If another thread is flushing the device, the caller leaves its callback there and goes on. When that flush has ended, the
//! other thread flushes once more, for all callbacks that were left meanwhile, and calls them. So at most one thread waits for each device,
//! and a flush serves every sync that has written its data before the flush began. After `ROUNDS_MAX` flushes the thread hands
//! the callbacks that are left to the committer, so that its own call ends under any load.
//!
//! # Gathering
//! A sync that is writing its pages will need a flush when the write has ended (`Coming`). A flush that begins before that does not
//! cover these pages. So while there are such syncs, no thread begins a flush: the callbacks wait, and the last of those syncs flushes for
//! all. No thread sleeps for that.
//!
//! ```text
//!   not led ──a callback, no sync comes──▶ led ──no callback left──▶ not led
//!      │                                   ▲ │
//!      └──a callback, syncs come──▶ gathers┘ └──callbacks left, syncs come──▶ gathers
//!                                     the last of these syncs comes, or needs no flush
//! ```
//!
//! A gathering waits only for syncs that began before it (`FlushQueue::generation`), so callbacks wait for at most one write of each of these.
//! A sync that is alone flushes at once. If the last sync turns out to need no flush, or fails, its thread still flushes for the
//! others.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::data::operations::NewestOperations;
use crate::error::{Error, Result};
use crate::flushes::DataFlushes;
use crate::types::Done;

/// Number of flushes of a device that one call makes at most.
const ROUNDS_MAX: usize = 16;

/// The syncs that wait for flushes, by device, and the newest operations, by which a sync knows whether it must commit.
pub struct SharedFlushes {
    devices: Vec<Mutex<FlushQueue>>,
    pub operations: NewestOperations,
}

#[derive(Default)]
struct FlushQueue {
    /// Whether a thread flushes, and will look at `waiting` afterwards.
    is_led: bool,
    /// Whether the callbacks wait for the last caller of the previous generation.
    gathers: bool,
    waiting: Vec<Done>,
    /// The generation of the callers that begin now.
    generation: Generation,
    /// By generation: the number of callers that are writing and will then need a flush. Without `gathers`, all are of `generation`.
    coming: [usize; 2],
}

/// Distinguishes callers that began before the last gathering from those that began after it: 0 or 1 in turn.
type Generation = usize;

impl FlushQueue {
    /// Takes the lead, unless another thread has it, no callback waits, or a caller that is writing will take it.
    fn take_lead(&mut self) -> bool {
        if self.is_led || self.waiting.is_empty() {
            return false;
        }
        if !self.gathers && self.coming[self.generation] > 0 {
            self.gathers = true;
            // The gathering does not wait for callers that begin from here on, so the flush comes after one write at the latest.
            self.generation ^= 1;
        }
        if self.gathers && self.coming[self.generation ^ 1] > 0 {
            return false;
        }
        self.gathers = false;
        self.is_led = true;
        true
    }

    /// Gives the lead up. Returns the callbacks that are left.
    fn end_lead(&mut self) -> Vec<Done> {
        self.is_led = false;
        std::mem::take(&mut self.waiting)
    }
}

/// A caller that writes data to a device, and then needs a flush. Callbacks may wait for it. Dropping it says that the caller needs no
/// flush. The dropping thread may then flush for the others, or hand them over if it panics.
pub struct Coming<'a> {
    queue: &'a Mutex<FlushQueue>,
    device: u16,
    data: &'a DataFlushes,
    /// `None` once the caller has come.
    generation: Option<Generation>,
    hand_over: &'a dyn Fn(Done),
}

impl Coming<'_> {
    /// Leaves the caller's callback with those that wait for the device.
    fn come(mut self, done: Done) {
        let own = self.generation.take();
        let left = leave(self.queue, self.data, self.device, own, done);
        left.into_iter().for_each(self.hand_over);
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        let Some(own) = self.generation.take() else {
            return;
        };
        {
            let mut queue = self.queue.lock();
            queue.coming[own] -= 1;
            if !queue.take_lead() {
                return;
            }
        }
        let left = match std::thread::panicking() {
            true => self.queue.lock().end_lead(),
            false => lead(self.queue, self.data, self.device),
        };
        left.into_iter().for_each(self.hand_over);
    }
}

impl SharedFlushes {
    pub fn new(devices: usize) -> SharedFlushes {
        SharedFlushes {
            devices: (0..devices).map(|_| Mutex::default()).collect(),
            operations: NewestOperations::new(),
        }
    }

    /// Records that the caller is about to write data to a device and then to sync it. The calling thread may block. `hand_over` is as in
    /// `flush`.
    pub fn begin<'a>(
        &'a self,
        data: &'a DataFlushes,
        device: u16,
        hand_over: &'a dyn Fn(Done),
    ) -> Coming<'a> {
        let queue = &self.devices[usize::from(device)];
        let generation = {
            let mut queue = queue.lock();
            let generation = queue.generation;
            queue.coming[generation] += 1;
            generation
        };
        Coming {
            queue,
            device,
            data,
            generation: Some(generation),
            hand_over,
        }
    }

    /// Makes data that was written to `devices` before the call durable, then calls `done`: in this thread, or in another one that is
    /// flushing or soon will. Skips devices whose data is durable. May run the callbacks of other threads. The calling thread may
    /// block. `coming` is from the caller's `begin`. `hand_over` takes callbacks that are left after many rounds, and has another thread
    /// flush for them.
    pub fn flush(
        &self,
        data: &DataFlushes,
        devices: Vec<u16>,
        mut coming: Option<Coming<'_>>,
        done: Done,
        hand_over: &dyn Fn(Done),
    ) {
        let mut needed = devices;
        needed.retain(|device| data.needs_flush(*device));
        // The caller's own device comes first, so that its callbacks do not wait for flushes of the other devices.
        let own = coming.as_ref().map(|coming| coming.device);
        match needed.iter().position(|device| Some(*device) == own) {
            Some(at) => needed.swap(0, at),
            None => drop(coming.take()),
        }
        let mut leave = |device: u16, done| {
            if let Some(coming) = coming.take_if(|coming| coming.device == device) {
                return coming.come(done);
            }
            let queue = &self.devices[usize::from(device)];
            let left = leave(queue, data, device, None, done);
            left.into_iter().for_each(hand_over);
        };
        match needed[..] {
            [] => return done(Ok(())),
            [device] => return leave(device, done),
            _ => {}
        }
        let all = Arc::new(Mutex::new(AllDevices {
            remaining: needed.len(),
            result: Ok(()),
            done: Some(done),
        }));
        for device in needed {
            let all = all.clone();
            leave(
                device,
                Box::new(move |result| AllDevices::flushed(&all, result)),
            );
        }
    }
}

/// Leaves a callback with the others of a device. Flushes until none is left, unless another thread is doing that or soon will. Returns
/// the callbacks that are left after `ROUNDS_MAX` flushes.
fn leave(
    queue: &Mutex<FlushQueue>,
    data: &DataFlushes,
    device: u16,
    coming: Option<Generation>,
    done: Done,
) -> Vec<Done> {
    {
        let mut queue = queue.lock();
        coming.into_iter().for_each(|own| queue.coming[own] -= 1);
        // A flush in progress may have begun before this caller's write.
        queue.waiting.push(done);
        if !queue.take_lead() {
            return vec![];
        }
    }
    lead(queue, data, device)
}

/// Flushes a device until no callback is left, or a gathering begins. The caller has taken the lead. Returns the callbacks that are left
/// after `ROUNDS_MAX` flushes.
fn lead(queue: &Mutex<FlushQueue>, data: &DataFlushes, device: u16) -> Vec<Done> {
    let lead = Lead(queue);
    for _ in 0..ROUNDS_MAX {
        let batch = std::mem::take(&mut queue.lock().waiting);
        let result = data.flush([device]).map_err(Error::from);
        for done in batch {
            done(result.clone());
        }
        if !lead.goes_on() {
            return vec![];
        }
    }
    lead.end()
}

/// A flush of several devices.
struct AllDevices {
    remaining: usize,
    result: Result<()>,
    done: Option<Done>,
}

impl AllDevices {
    /// Records that one device was flushed. Calls `done` after the last one.
    fn flushed(all: &Mutex<AllDevices>, result: Result<()>) {
        let mut guard = all.lock();
        guard.remaining -= 1;
        let before = std::mem::replace(&mut guard.result, Ok(()));
        guard.result = before.and(result);
        if guard.remaining > 0 {
            return;
        }
        let (done, result) = (guard.done.take(), guard.result.clone());
        drop(guard);
        if let Some(done) = done {
            done(result);
        }
    }
}

/// The thread that flushes a device. If it unwinds from a panic, the others that wait get an error, and the next caller takes
/// its place.
struct Lead<'a>(&'a Mutex<FlushQueue>);

impl Lead<'_> {
    /// Returns whether the caller has to flush once more and keeps the lead.
    fn goes_on(&self) -> bool {
        let mut queue = self.0.lock();
        queue.is_led = false;
        queue.take_lead()
    }

    /// Gives the lead up. Returns the callbacks that are left.
    fn end(&self) -> Vec<Done> {
        self.0.lock().end_lead()
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for done in self.end() {
            done(Err(Error::HalfDone));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_sim::{FaultPlan, Operation, SimDevice};
    use jericho_storage::Device;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    fn told(tx: &Sender<(Result<()>, ThreadId)>) -> Done {
        let tx = tx.clone();
        Box::new(move |result| tx.send((result, std::thread::current().id())).unwrap())
    }

    /// Devices with data that is not durable.
    struct Bed {
        sims: Vec<Arc<SimDevice>>,
        data: DataFlushes,
        shared: SharedFlushes,
    }

    impl Bed {
        fn new(names: &[&str]) -> Bed {
            let sims = names.iter().map(|n| Arc::new(SimDevice::new(n, 1 << 20)));
            let sims: Vec<_> = sims.collect();
            let devices: Vec<Arc<dyn Device>> = sims.iter().map(|d| d.clone() as _).collect();
            Bed {
                data: DataFlushes::new(&devices),
                shared: SharedFlushes::new(devices.len()),
                sims,
            }
        }

        fn devices(&self) -> Vec<u16> {
            (0..self.sims.len() as u16).collect()
        }

        /// Writes to all devices, and flushes.
        fn flush(&self, done: Done) {
            (0..self.sims.len() as u16).for_each(|n| assert!(self.data.note_write(n).is_some()));
            self.shared
                .flush(&self.data, self.devices(), None, done, &|_| {
                    panic!("handed over")
                });
        }

        fn flushed(&self) -> u64 {
            self.sims[0].operations(Some(Operation::Flush))
        }
    }

    #[test]
    fn callers_that_meet_a_flush_share_the_next_one_and_do_not_wait() {
        let bed = Bed::new(&["sim"]);
        let (begun, go) = bed.sims[0].block_next(Operation::Flush);
        let (tx, rx) = channel();
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.flush(told(&tx)));
            begun.recv().unwrap();
            for _ in 0..5 {
                bed.flush(told(&tx));
            }
            assert!(
                rx.try_recv().is_err(),
                "the first flush does not cover them"
            );
            drop(go);
            let leader = leader.thread().id();
            for _ in 0..6 {
                let (result, thread) = rx.recv().unwrap();
                assert!(result.is_ok());
                assert_eq!(thread, leader);
            }
        });
        assert_eq!(bed.flushed(), 2);
        // Nobody leads now, so the next caller flushes itself.
        bed.flush(told(&tx));
        let own = std::thread::current().id();
        assert_eq!(rx.try_recv().unwrap().1, own);
        assert_eq!(bed.flushed(), 3);
    }

    /// Leaves one more callback in each flush.
    fn again(bed: Arc<Bed>, handed_over: Arc<Mutex<Vec<Done>>>) -> Done {
        Box::new(move |_| {
            assert!(bed.data.note_write(0).is_some());
            let next = again(bed.clone(), handed_over.clone());
            let hand_over = |done| handed_over.lock().push(done);
            bed.shared
                .flush(&bed.data, bed.devices(), None, next, &hand_over);
        })
    }

    #[test]
    fn a_call_ends_though_others_leave_callbacks_without_end() {
        let bed = Arc::new(Bed::new(&["sim"]));
        let handed_over = Arc::new(Mutex::new(vec![]));
        assert!(bed.data.note_write(0).is_some());
        let first = again(bed.clone(), handed_over.clone());
        let hand_over = |done| handed_over.lock().push(done);
        bed.shared
            .flush(&bed.data, bed.devices(), None, first, &hand_over);
        assert_eq!(bed.flushed(), ROUNDS_MAX as u64);
        assert_eq!(std::mem::take(&mut *handed_over.lock()).len(), 1);
        // Nobody leads now.
        let (tx, rx) = channel();
        bed.flush(told(&tx));
        assert!(rx.try_recv().is_ok());
    }

    /// A caller of `begin` that must not have to hand over.
    fn begin(bed: &Bed) -> Coming<'_> {
        bed.shared.begin(&bed.data, 0, &|_| panic!("handed over"))
    }

    /// Writes, and flushes as the caller that has begun.
    fn come(bed: &Bed, coming: Coming<'_>, tx: &Sender<(Result<()>, ThreadId)>) {
        assert!(bed.data.note_write(0).is_some());
        let (coming, done) = (Some(coming), told(tx));
        (bed.shared).flush(&bed.data, bed.devices(), coming, done, &|_| {
            panic!("handed over")
        });
    }

    #[test]
    fn a_caller_that_meets_nobody_flushes_at_once() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        for flushed in 1..4 {
            come(&bed, begin(&bed), &tx);
            assert!(rx.try_recv().unwrap().0.is_ok());
            assert_eq!(bed.flushed(), flushed);
        }
    }

    #[test]
    fn the_last_caller_that_writes_flushes_for_those_that_have_written() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        let mut coming: Vec<_> = (0..4).map(|_| begin(&bed)).collect();
        let last = coming.pop().unwrap();
        for one in coming {
            come(&bed, one, &tx);
        }
        bed.flush(told(&tx));
        assert!(rx.try_recv().is_err());
        come(&bed, last, &tx);
        assert_eq!(
            rx.try_iter().filter(|(result, _)| result.is_ok()).count(),
            5
        );
        assert_eq!(bed.flushed(), 1);
    }

    #[test]
    fn nobody_waits_for_a_caller_that_begins_after_the_gathering() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        let first = begin(&bed);
        bed.flush(told(&tx));
        let second = begin(&bed);
        come(&bed, first, &tx);
        assert_eq!((rx.try_iter().count(), bed.flushed()), (2, 1));
        // The next gathering waits for the second one.
        bed.flush(told(&tx));
        assert_eq!((rx.try_iter().count(), bed.flushed()), (0, 1));
        come(&bed, second, &tx);
        assert_eq!((rx.try_iter().count(), bed.flushed()), (2, 2));
    }

    #[test]
    fn a_caller_that_needs_no_flush_or_panics_keeps_nobody_waiting() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        let coming = begin(&bed);
        bed.flush(told(&tx));
        drop(coming);
        assert!(rx.try_recv().unwrap().0.is_ok());
        assert_eq!(bed.flushed(), 1);

        let handed_over = Mutex::new(vec![]);
        let hand_over = |done| handed_over.lock().push(done);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _coming = bed.shared.begin(&bed.data, 0, &hand_over);
            bed.flush(told(&tx));
            panic!("a caller that panics, in a test");
        }));
        assert!(ended.is_err() && rx.try_recv().is_err());
        assert_eq!((handed_over.lock().len(), bed.flushed()), (1, 1));
        come(&bed, begin(&bed), &tx);
        assert!(rx.try_recv().unwrap().0.is_ok());
    }

    #[test]
    fn a_gathering_does_not_wait_for_the_flush_of_another_device() {
        let bed = Bed::new(&["slow", "fast"]);
        let (begun, go) = bed.sims[0].block_next(Operation::Flush);
        let (tx, rx) = channel();
        let coming = bed.shared.begin(&bed.data, 1, &|_| panic!("handed over"));
        assert!(bed.data.note_write(1).is_some());
        (bed.shared).flush(&bed.data, vec![1], None, told(&tx), &|_| {
            panic!("handed over")
        });
        assert!(rx.try_recv().is_err(), "it waits for the other caller");
        let (own, of_own) = channel();
        let answered = std::thread::scope(|scope| {
            let answered = scope.spawn(move || {
                begun.recv().unwrap();
                let answered = rx.try_recv();
                drop(go);
                (answered, rx)
            });
            assert!(bed.data.note_write(0).is_some());
            assert!(bed.data.note_write(1).is_some());
            let (coming, done) = (Some(coming), told(&own));
            (bed.shared).flush(&bed.data, bed.devices(), coming, done, &|_| {
                panic!("handed over")
            });
            answered.join().unwrap()
        });
        assert!(answered.0.is_ok(), "the fast device waits for the slow one");
        assert!(of_own.try_recv().unwrap().0.is_ok());
    }

    #[test]
    fn a_thread_that_has_flushed_leaves_the_next_flush_to_a_caller_that_writes() {
        let bed = Bed::new(&["sim"]);
        let (begun, go) = bed.sims[0].block_next(Operation::Flush);
        let (tx, rx) = channel();
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.flush(told(&tx)));
            begun.recv().unwrap();
            let coming = begin(&bed);
            bed.flush(told(&tx));
            drop(go);
            leader.join().unwrap();
            assert_eq!((rx.try_iter().count(), bed.flushed()), (1, 1));
            come(&bed, coming, &tx);
        });
        let own = std::thread::current().id();
        assert!(rx.try_iter().all(|(_, thread)| thread == own));
        assert_eq!(bed.flushed(), 2);
    }

    #[test]
    fn each_of_many_threads_is_told_that_its_own_write_is_durable() {
        const THREADS: usize = 8;
        const ROUNDS: usize = 300;
        let bed = Bed::new(&["sim"]);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let bed = &bed;
                scope.spawn(move || {
                    let handed_over = |done: Done| done(bed.data.flush([0]).map_err(Error::from));
                    for round in 0..ROUNDS {
                        let (tx, rx) = channel();
                        // A thread that drops it, too, may have to hand callbacks over.
                        let coming = bed.shared.begin(&bed.data, 0, &handed_over);
                        if (thread + round) % 5 == 0 {
                            // The sync has failed, or commits.
                            drop(coming);
                            continue;
                        }
                        let epoch = bed.data.note_write(0).unwrap();
                        let (coming, done) = (Some(coming), told(&tx));
                        (bed.shared).flush(&bed.data, bed.devices(), coming, done, &handed_over);
                        rx.recv().unwrap().0.unwrap();
                        assert!(bed.data.is_flushed(0, epoch));
                    }
                });
            }
        });
        let queue = bed.shared.devices[0].lock();
        assert!(!queue.is_led && !queue.gathers && queue.waiting.is_empty());
        assert_eq!(queue.coming, [0, 0]);
    }

    #[test]
    fn without_new_data_nothing_is_flushed() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        bed.shared
            .flush(&bed.data, bed.devices(), None, told(&tx), &|_| {
                panic!("handed over")
            });
        bed.flush(told(&tx));
        bed.shared
            .flush(&bed.data, bed.devices(), None, told(&tx), &|_| {
                panic!("handed over")
            });
        assert!(rx.try_iter().all(|(result, _)| result.is_ok()));
        assert_eq!(bed.flushed(), 1);
    }

    #[test]
    fn a_failed_flush_fails_all_that_it_serves_also_beside_good_devices() {
        let bed = Bed::new(&["good", "bad"]);
        bed.sims[1].set_plan(FaultPlan::fail_nth(Some(Operation::Flush), 1, 5));
        let (tx, rx) = channel();
        for _ in 0..2 {
            bed.flush(told(&tx));
            let (result, _) = rx.try_recv().unwrap();
            assert_eq!(result.unwrap_err().errno(), 5);
        }
    }

    #[test]
    fn a_leader_that_panics_fails_those_that_wait_and_leaves_its_place() {
        let bed = Bed::new(&["sim"]);
        let (begun, go) = bed.sims[0].block_next(Operation::Flush);
        bed.sims[0].set_plan(FaultPlan::panic_at(Some(Operation::Flush), 1));
        let (tx, rx) = channel();
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| bed.flush(told(&tx)));
            begun.recv().unwrap();
            bed.flush(told(&tx));
            drop(go);
            assert!(leader.join().is_err());
        });
        assert_eq!(rx.try_recv().unwrap().0.unwrap_err().errno(), 5);
        bed.flush(told(&tx));
        assert!(rx.try_recv().unwrap().0.is_ok());
    }
}
