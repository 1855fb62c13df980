//! A Jericho remote device as a client: one thread begins transfers and takes their ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use jericho_ether::{AttachConfig, RemoteDevice};
use jericho_storage::{Completion, Device, Direction, Finish, IoError, Segment};
use jericho_sys::memory::Mapping;

use crate::Result;
use crate::remote::client::{Client, MEMORY_BYTES, Transfer};

/// An attached device.
pub struct Jericho {
    // Before the memory: it ends the transfers when it is dropped.
    device: Arc<RemoteDevice>,
    memory: Arc<Mapping>,
    ends: Arc<Ends>,
    /// Transfers that the next `wait` sends together, as a queue of Jericho does.
    unsent: Vec<jericho_storage::Transfer>,
    /// Ends that were taken from `ends`.
    taken: Vec<(usize, std::result::Result<(), IoError>)>,
}

/// Takes the ends of transfers from the thread that receives, and wakes the generator.
struct Ends {
    ended: Mutex<Vec<(usize, std::result::Result<(), IoError>)>>,
    generator: Thread,
}

impl Ends {
    fn lock(&self) -> MutexGuard<'_, Vec<(usize, std::result::Result<(), IoError>)>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Finish for Ends {
    fn finish(&self, completion: Completion) {
        let end = (completion.tag as usize, completion.result);
        self.lock().push(end);
        self.generator.unpark();
    }
}

impl Jericho {
    /// Attaches a device. Only the calling thread may use it.
    pub fn attach(config: &AttachConfig) -> Result<Jericho> {
        let memory = Mapping::create("bench", MEMORY_BYTES, false)?;
        memory.populate(0..MEMORY_BYTES)?;
        Ok(Jericho {
            device: RemoteDevice::attach(config)?,
            memory: Arc::new(memory),
            ends: Arc::new(Ends {
                ended: Mutex::new(Vec::with_capacity(64)),
                generator: std::thread::current(),
            }),
            unsent: Vec::with_capacity(64),
            taken: Vec::with_capacity(64),
        })
    }
}

impl Client for Jericho {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn begin(&mut self, slot: usize, transfer: Transfer) -> Result<()> {
        let segment = Segment {
            mapping: Arc::clone(&self.memory),
            offset: slot * transfer.length_bytes,
            len: transfer.length_bytes,
        };
        let transfer = jericho_storage::Transfer {
            tag: slot as u64,
            device: 0,
            direction: match transfer.is_write {
                true => Direction::Write,
                false => Direction::Read,
            },
            offset_bytes: transfer.offset_bytes,
            // The interface takes a vector for each transfer.
            segments: vec![segment],
        };
        self.unsent.push(transfer);
        Ok(())
    }

    fn wait(&mut self, ended: &mut Vec<usize>) -> Result<()> {
        if !self.unsent.is_empty() {
            let asynchronous =
                (self.device.asynchronous()).ok_or("the device has no transfers of its own")?;
            let unsent = std::mem::replace(&mut self.unsent, Vec::with_capacity(64));
            asynchronous.begin_all(unsent, Arc::clone(&self.ends) as Arc<dyn Finish>);
        }
        loop {
            std::mem::swap(&mut *self.ends.lock(), &mut self.taken);
            if !self.taken.is_empty() {
                break;
            }
            std::thread::park();
        }
        for (slot, result) in self.taken.drain(..) {
            result?;
            ended.push(slot);
        }
        Ok(())
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.memory.copy_in(at, bytes);
    }

    fn get(&self, at: usize, bytes: &mut [u8]) {
        self.memory.copy_out(at, bytes);
    }

    fn repetitions(&self) -> Option<u64> {
        let network = self.device.network()?;
        Some(network.channels.iter().map(|one| one.lost_frames).sum())
    }
}
