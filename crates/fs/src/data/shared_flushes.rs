//! Syncs that share flushes, in the threads of their callers. The committer flushes on its own.
//!
//! A thread that asks while another thread flushes the device leaves its callback there and goes on. When that flush has ended, the
//! other thread flushes once more, for all callbacks that were left meanwhile, and calls them. So one thread waits for each device
//! at most, and a flush serves every sync that has written its data before the flush began. After `ROUNDS_MAX` flushes the thread hands
//! the callbacks that are left to the committer, so that its own call ends under any load.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::data::operations::NewestOperations;
use crate::error::{Error, Result};
use crate::flushes::DataFlushes;
use crate::types::Done;

/// Number of flushes of a device that one call makes at most.
const ROUNDS_MAX: usize = 16;

/// The syncs that wait for flushes, by device, and what tells a sync that it needs no commit.
pub struct SharedFlushes {
    devices: Vec<Mutex<FlushQueue>>,
    pub operations: NewestOperations,
}

#[derive(Default)]
struct FlushQueue {
    /// A thread flushes, and will look at `waiting` afterwards.
    is_led: bool,
    waiting: Vec<Done>,
}

impl SharedFlushes {
    pub fn new(devices: usize) -> SharedFlushes {
        SharedFlushes {
            devices: (0..devices).map(|_| Mutex::default()).collect(),
            operations: NewestOperations::new(),
        }
    }

    /// Makes durable what was written to `devices` before the call, then calls `done`: in this thread, or in another one that flushes
    /// already. Without data that needs it, flushes nothing. May run the callbacks of other threads. The calling thread may block.
    /// `hand_over` takes callbacks that are left after many rounds, and has another thread flush for them.
    pub fn flush(
        &self,
        data: &DataFlushes,
        devices: Vec<u16>,
        done: Done,
        hand_over: &dyn Fn(Done),
    ) {
        let mut needed = devices;
        needed.retain(|device| data.needs_flush(*device));
        let lead = |device: u16, done| {
            let queue = &self.devices[usize::from(device)];
            lead(queue, data, device, done)
                .into_iter()
                .for_each(hand_over);
        };
        match needed[..] {
            [] => return done(Ok(())),
            [device] => return lead(device, done),
            _ => {}
        }
        let all = Arc::new(Mutex::new(AllDevices {
            remaining: needed.len(),
            result: Ok(()),
            done: Some(done),
        }));
        for device in needed {
            let all = all.clone();
            lead(
                device,
                Box::new(move |result| AllDevices::flushed(&all, result)),
            );
        }
    }
}

/// Flushes a device until no callback is left, or leaves `done` with the thread that does. Returns the callbacks that are left after
/// `ROUNDS_MAX` flushes.
fn lead(queue: &Mutex<FlushQueue>, data: &DataFlushes, device: u16, done: Done) -> Vec<Done> {
    {
        let mut queue = queue.lock();
        if queue.is_led {
            // The flush in progress may have begun before this caller's write.
            queue.waiting.push(done);
            return vec![];
        }
        queue.is_led = true;
    }
    let lead = Lead(queue);
    let mut batch = vec![done];
    for round in 1..=ROUNDS_MAX {
        let result = data.flush([device]).map_err(Error::from);
        for done in batch {
            done(result.clone());
        }
        batch = lead.next(round < ROUNDS_MAX);
        if batch.is_empty() {
            break;
        }
    }
    batch
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
    /// Returns the callbacks that were left during the last flush. Without any, or if it must not go on, the caller leads no longer.
    fn next(&self, goes_on: bool) -> Vec<Done> {
        let mut queue = self.0.lock();
        queue.is_led = goes_on && !queue.waiting.is_empty();
        std::mem::take(&mut queue.waiting)
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let left = {
            let mut queue = self.0.lock();
            queue.is_led = false;
            std::mem::take(&mut queue.waiting)
        };
        for done in left {
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
                .flush(&self.data, self.devices(), done, &|_| panic!("handed over"));
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
            bed.shared.flush(&bed.data, bed.devices(), next, &hand_over);
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
            .flush(&bed.data, bed.devices(), first, &hand_over);
        assert_eq!(bed.flushed(), ROUNDS_MAX as u64);
        assert_eq!(std::mem::take(&mut *handed_over.lock()).len(), 1);
        // Nobody leads now.
        let (tx, rx) = channel();
        bed.flush(told(&tx));
        assert!(rx.try_recv().is_ok());
    }

    #[test]
    fn without_new_data_nothing_is_flushed() {
        let bed = Bed::new(&["sim"]);
        let (tx, rx) = channel();
        bed.shared.flush(&bed.data, bed.devices(), told(&tx), &|_| {
            panic!("handed over")
        });
        bed.flush(told(&tx));
        bed.shared.flush(&bed.data, bed.devices(), told(&tx), &|_| {
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
