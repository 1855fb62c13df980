//! Flushes of the devices that take file data. Any thread may ask for one.

use std::panic::resume_unwind;
use std::sync::Arc;

use jericho_storage::{Appended, Device, FlushEpoch, FlushEpochs, IoError};

/// The devices of a volume, and the data on them that is not durable.
pub struct DataFlushes(Appended<DataDevice>);

/// Has cache lines of its own: each write of data to the device changes it.
#[repr(align(128))]
struct DataDevice {
    device: Arc<dyn Device>,
    epochs: FlushEpochs,
}

impl DataDevice {
    fn new(device: &Arc<dyn Device>) -> DataDevice {
        DataDevice {
            device: Arc::clone(device),
            epochs: FlushEpochs::default(),
        }
    }

    /// Makes durable what was recorded before the call. Threads that flush the device at the same time share a flush.
    fn flush(&self) -> Result<(), IoError> {
        let flush = self.epochs.begin_flush();
        self.device.flush()?;
        self.epochs.flushed(flush);
        Ok(())
    }
}

impl DataFlushes {
    pub fn new(devices: &[Arc<dyn Device>]) -> DataFlushes {
        DataFlushes(devices.iter().map(DataDevice::new).collect())
    }

    /// Appends a device that has no file data.
    pub fn append(&self, device: &Arc<dyn Device>) {
        self.0.append([DataDevice::new(device)]);
    }

    /// Records that a write of data to a device completed, before any thread relies on it. Returns `None` for a device that does
    /// not exist.
    pub fn note_write(&self, device: u16) -> Option<FlushEpoch> {
        Some(self.0.get(usize::from(device))?.epochs.note_write())
    }

    /// Returns whether all writes to a device that have this epoch are durable.
    pub fn is_flushed(&self, device: u16, epoch: FlushEpoch) -> bool {
        let device = self.0.get(usize::from(device));
        device.is_some_and(|device| device.epochs.is_flushed(epoch))
    }

    /// Returns the devices with recorded writes that may not be durable, each with the epoch of the newest one.
    pub fn unflushed(&self) -> Vec<(u16, FlushEpoch)> {
        let devices = (0_u16..).zip(self.0.iter());
        devices
            .filter_map(|(number, device)| Some((number, device.epochs.unflushed()?)))
            .collect()
    }

    /// Makes the data on `devices` durable whose write was recorded before the call.
    pub fn flush(&self, devices: impl IntoIterator<Item = u16>) -> Result<(), IoError> {
        let mut devices: Vec<u16> = devices.into_iter().collect();
        devices.sort_unstable();
        devices.dedup();
        let device = |device| self.0.get(usize::from(device));
        flush_dirty(devices.into_iter().filter_map(device))
    }
}

/// Flushes the devices that need it, all at the same time. Ends when all flushes have ended, and returns the first error.
fn flush_dirty<'a>(devices: impl Iterator<Item = &'a DataDevice>) -> Result<(), IoError> {
    let mut dirty = devices.filter(|device| device.epochs.needs_flush());
    let Some(first) = dirty.next() else {
        return Ok(());
    };
    let others: Vec<&DataDevice> = dirty.collect();
    if others.is_empty() {
        return first.flush();
    }
    std::thread::scope(|scope| {
        let flush = |device: &'a DataDevice| {
            let thread = std::thread::Builder::new().name("flush".into());
            thread.spawn_scoped(scope, move || device.flush())
        };
        let threads: Vec<_> = others.iter().map(|device| flush(device)).collect();
        let mut result = first.flush();
        for (thread, device) in threads.into_iter().zip(&others) {
            let flushed = match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                // No more threads can be started.
                Err(_) => device.flush(),
            };
            result = result.and(flushed);
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::ThreadId;
    use std::time::Duration;

    use jericho_storage::Cause;
    use parking_lot::Mutex;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A device whose flushes a test begins and ends.
    struct Slow {
        /// Receives the thread of each flush that begins.
        began: Mutex<Sender<ThreadId>>,
        /// A flush ends with what it receives. It succeeds when the sender is gone.
        outcomes: Mutex<Receiver<bool>>,
    }

    type Flushes = (Receiver<ThreadId>, Sender<bool>);

    fn slow() -> (Arc<dyn Device>, Flushes) {
        let (began, has_began) = channel();
        let (outcome, outcomes) = channel();
        let device = Arc::new(Slow {
            began: Mutex::new(began),
            outcomes: Mutex::new(outcomes),
        });
        (device, (has_began, outcome))
    }

    impl Device for Slow {
        fn name(&self) -> Arc<str> {
            "slow".into()
        }
        fn size_bytes(&self) -> u64 {
            1 << 20
        }
        fn home_node(&self) -> Option<u32> {
            None
        }
        fn read_at(&self, _offset_bytes: u64, _buf: &mut [u8]) -> Result<(), IoError> {
            Ok(())
        }
        fn write_at(&self, _offset_bytes: u64, _buf: &[u8]) -> Result<(), IoError> {
            Ok(())
        }
        fn flush(&self) -> Result<(), IoError> {
            let _ = self.began.lock().send(std::thread::current().id());
            match self.outcomes.lock().recv() {
                Ok(false) => Err(IoError {
                    operation: "flush",
                    device: self.name(),
                    offset_bytes: 0,
                    length_bytes: self.size_bytes(),
                    cause: Cause::Errno(5),
                }),
                _ => Ok(()),
            }
        }
        fn discard(&self, _offset_bytes: u64, _length_bytes: u64) -> Result<(), IoError> {
            Ok(())
        }
        fn queue_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            None
        }
        fn describe(&self) -> String {
            "slow".into()
        }
    }

    #[test]
    fn data_that_another_thread_flushes_is_not_durable_before_that_flush_ends() {
        let (device, (began, end)) = slow();
        let flushes = DataFlushes::new(&[device]);
        let epoch = flushes.note_write(0).unwrap();
        std::thread::scope(|scope| {
            // Is dropped when the test fails, which ends the flushes.
            let end = end;
            let first = scope.spawn(|| flushes.flush(0..2));
            began.recv_timeout(MINUTE).unwrap();
            assert!(!flushes.is_flushed(0, epoch));
            let second = scope.spawn(|| flushes.flush(0..2));
            // The second thread does not take the data for durable: it flushes, too.
            began.recv_timeout(MINUTE).unwrap();
            assert!(!first.is_finished() && !second.is_finished());
            end.send(true).unwrap();
            end.send(true).unwrap();
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
        });
        assert!(flushes.is_flushed(0, epoch));
        flushes.flush(0..2).unwrap();
        assert!(began.try_recv().is_err(), "nothing was written since");
    }

    #[test]
    fn one_dirty_device_is_flushed_by_the_caller() {
        let ((clean, (clean_began, _)), (dirty, (began, end))) = (slow(), slow());
        let flushes = DataFlushes::new(&[clean, dirty]);
        drop(end);
        flushes.note_write(1).unwrap();
        flushes.flush(0..2).unwrap();
        assert_eq!(began.try_recv(), Ok(std::thread::current().id()));
        assert!(clean_began.try_recv().is_err());
        assert!(flushes.note_write(2).is_none());
    }

    #[test]
    fn several_dirty_devices_are_flushed_at_the_same_time() {
        let (one, two, three) = (slow(), slow(), slow());
        let flushes = DataFlushes::new(&[one.0, two.0, three.0]);
        let ends: Vec<Flushes> = vec![one.1, two.1, three.1];
        let epochs: Vec<_> = (0..3).map(|n| flushes.note_write(n).unwrap()).collect();
        std::thread::scope(|scope| {
            // Is dropped when the test fails, which ends the flushes.
            let ends = ends;
            let flushed = scope.spawn(|| flushes.flush(0..3));
            for (began, _) in &ends {
                began.recv_timeout(MINUTE).unwrap();
            }
            // The second device fails before the others have ended.
            for (device, outcome) in [(1, false), (2, true), (0, true)] {
                assert!(!flushed.is_finished());
                ends[device].1.send(outcome).unwrap();
            }
            let error = flushed.join().unwrap().unwrap_err();
            assert_eq!(error.cause, Cause::Errno(5));
        });
        let is_flushed = |n: u16| flushes.is_flushed(n, epochs[usize::from(n)]);
        assert_eq!([0, 1, 2].map(is_flushed), [true, false, true]);
    }

    #[test]
    fn only_the_named_devices_are_flushed() {
        let ((one, (one_began, _one)), (two, (two_began, end))) = (slow(), slow());
        let flushes = DataFlushes::new(&[one, two]);
        flushes.note_write(0).unwrap();
        flushes.note_write(1).unwrap();
        drop(end);
        flushes.flush([1, 1]).unwrap();
        assert!(two_began.try_recv().is_ok() && two_began.try_recv().is_err());
        assert!(one_began.try_recv().is_err());
    }
}
