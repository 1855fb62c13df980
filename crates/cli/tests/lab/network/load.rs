//! A program that reads and writes a remote device: threads on nodes, with buffers on nodes.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use jericho_ether::RemoteDevice;
use jericho_storage::{Completion, Device, Direction, Finish, Segment, Transfer};
use jericho_sys::affinity;
use jericho_sys::memory::Mapping;

use super::hosts::cpus_of;

/// A thread of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Node on which it runs.
    pub node: usize,
    /// Node of its buffers.
    pub buffers: usize,
    /// Bytes of a transfer.
    pub bytes: usize,
    /// Transfers in progress at a time.
    pub depth: usize,
}

struct Ends(Mutex<Sender<Completion>>);

impl Finish for Ends {
    fn finish(&self, completion: Completion) {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The thread that waits has failed.
        let _ = sender.send(completion);
    }
}

impl Worker {
    /// Reads or writes until `ask` returns no offset for a transfer. Each transfer has a buffer of its own.
    fn run(self, device: &RemoteDevice, direction: Direction, ask: impl Fn() -> Option<u64>) {
        affinity::set(None, &cpus_of(self.node)).expect("CPUs of the node");
        let length = self.bytes * self.depth;
        let memory = Mapping::create("buffers", length, false).expect("memory");
        memory.bind(0..length, self.buffers as u32).expect("a node");
        memory.populate(0..length).expect("memory");
        let pages: Vec<usize> = (0..length).step_by(4096).collect();
        let nodes = memory.nodes_of(&pages).expect("move_pages");
        let is_right = |node: &Option<u32>| *node == Some(self.buffers as u32);
        assert!(nodes.iter().all(is_right), "buffers: {nodes:?}");
        let memory = Arc::new(memory);
        let (sender, ended) = channel();
        let ends = Arc::new(Ends(Mutex::new(sender)));
        let begin = |slot: usize| {
            let Some(offset_bytes) = ask() else {
                return false;
            };
            let transfer = Transfer {
                tag: slot as u64,
                device: 0,
                direction,
                offset_bytes,
                segments: vec![Segment {
                    mapping: Arc::clone(&memory),
                    offset: slot * self.bytes,
                    len: self.bytes,
                }],
            };
            let asynchronous = device.asynchronous().expect("transfers without threads");
            asynchronous.begin(transfer, Arc::clone(&ends) as Arc<dyn Finish>);
            true
        };
        let mut active = (0..self.depth).filter(|slot| begin(*slot)).count();
        while active > 0 {
            let completion = ended.recv().expect("the device ends each transfer");
            completion.result.expect("no errors");
            if !begin(completion.tag as usize) {
                active -= 1;
            }
        }
    }
}

/// Runs workers, each of which transfers some bytes.
pub fn transfer(device: &RemoteDevice, direction: Direction, workers: &[Worker], bytes: usize) {
    std::thread::scope(|scope| {
        for (number, worker) in (0_u64..).zip(workers) {
            scope.spawn(move || {
                let range = range_of(number, device);
                let next = AtomicU64::new(0);
                let count = (bytes / worker.bytes) as u64;
                worker.run(device, direction, || {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    (number < count).then(|| place(&range, number, worker.bytes))
                });
            });
        }
    });
}

/// Runs workers that write, until `during` returns.
pub fn write_during<T>(device: &RemoteDevice, workers: &[Worker], during: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, worker) in (0_u64..).zip(workers) {
            let stop = &stop;
            scope.spawn(move || {
                let range = range_of(number, device);
                let next = AtomicU64::new(0);
                worker.run(device, Direction::Write, || {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let is_over = stop.load(Ordering::Relaxed);
                    (!is_over).then(|| place(&range, number, worker.bytes))
                });
            });
        }
        let result = during();
        stop.store(true, Ordering::Relaxed);
        result
    })
}

/// Returns the part of the device that a worker uses: 64 MiB.
fn range_of(worker: u64, device: &RemoteDevice) -> Range<u64> {
    let range = worker << 26..(worker + 1) << 26;
    assert!(range.end <= device.size_bytes());
    range
}

/// Returns the offset of a worker's transfer: all over its range, in no order.
fn place(range: &Range<u64>, number: u64, bytes: usize) -> u64 {
    let places = (range.end - range.start) / bytes as u64;
    range.start + number.wrapping_mul(7919) % places * bytes as u64
}
