//! Discards freed blocks on devices that support it, so that the host gets their space back.
//!
//! Blocks to discard come only from the allocator's bitmaps, which show a block as free only when its removal is durable and no
//! transfer to it is in flight. While a range is being discarded it is lent (`alloc/lend.rs`) and cannot be allocated.

pub(crate) mod discarder;
mod trim;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jericho_format::superblock::FLAG_PREALLOCATED;
use jericho_storage::{Appended, Device, DiscardEffect};
use jericho_volume::Volume;
use parking_lot::{Condvar, Mutex};

/// Longest time that the remaining discards may delay an unmount.
const FINISH: Duration = Duration::from_secs(5);

/// State of discarding.
pub struct Discards {
    /// By device: whether it supports discards.
    devices: Appended<AtomicBool>,
    /// The devices keep the space that they have on their hosts.
    keeps_space: bool,
    /// Held during a discard: one range is discarded at a time.
    working: Mutex<()>,
    control: Mutex<Control>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Control {
    /// Blocks were freed since the last search.
    work: bool,
    asleep: Option<Asleep>,
    stop: Option<Stop>,
}

/// What ends the thread's sleep, besides a stop.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asleep {
    UntilWork,
    Pausing,
}

#[derive(Clone, Copy)]
enum Stop {
    Now,
    /// Discard the freed blocks before stopping.
    Finish(Instant),
}

impl Discards {
    pub fn new(volume: &Volume, read_only: bool) -> Discards {
        let keeps_space = volume
            .superblocks()
            .with(|s| s.head.flags.get() & FLAG_PREALLOCATED != 0);
        let devices = volume.devices().iter();
        let is_on = |device: &Arc<dyn Device>| !read_only && is_useful(&**device, keeps_space);
        Discards {
            devices: devices
                .map(|device| AtomicBool::new(is_on(device)))
                .collect(),
            keeps_space,
            working: Mutex::new(()),
            control: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Appends a device of a volume that is open for writing.
    pub fn append(&self, device: &dyn Device) {
        let is_on = is_useful(device, self.keeps_space);
        self.devices.append([AtomicBool::new(is_on)]);
    }

    /// Notes whether a device that was missing supports discards.
    pub fn put_back(&self, index: usize, device: &dyn Device) {
        if let Some(is_on) = self.devices.get(index) {
            is_on.store(is_useful(device, self.keeps_space), Ordering::Release);
        }
    }

    /// Returns whether any device supports discards.
    pub fn is_on(&self) -> bool {
        self.devices.iter().any(|on| on.load(Ordering::Acquire))
    }

    /// Has the thread search for freed blocks. Wakes it only if it sleeps until there is work: each commit that has freed blocks
    /// calls this, and a thread that pauses would only go on with its pause. Returns how many threads it has woken.
    pub fn wake(&self) -> usize {
        let mut control = self.control.lock();
        control.work = true;
        match control.asleep {
            Some(Asleep::UntilWork) => self.changed.notify_all(),
            _ => 0,
        }
    }

    /// Tells the thread to discard the freed blocks, for a few seconds at most, and then to stop.
    pub fn finish(&self) {
        self.stop(Stop::Finish(Instant::now() + FINISH));
    }

    /// Tells the thread to stop.
    pub fn stop_now(&self) {
        self.stop(Stop::Now);
    }

    fn stop(&self, how: Stop) {
        self.control.lock().stop = Some(how);
        self.changed.notify_all();
    }

    /// Sleeps until there is work or the thread must stop. Returns the way to stop, or `None` if there is work.
    fn wait_for_work(&self) -> Option<Stop> {
        let mut control = self.control.lock();
        while !control.work && control.stop.is_none() {
            control.asleep = Some(Asleep::UntilWork);
            self.changed.wait(&mut control);
            control.asleep = None;
        }
        control.work = false;
        control.stop
    }

    /// Sleeps for a time, or until the thread must stop. Returns the way to stop, or `None` after the time.
    fn pause(&self, time: Duration) -> Option<Stop> {
        let until = Instant::now() + time;
        let mut control = self.control.lock();
        while control.stop.is_none() {
            control.asleep = Some(Asleep::Pausing);
            let waited = self.changed.wait_until(&mut control, until);
            control.asleep = None;
            if waited.timed_out() {
                break;
            }
        }
        control.stop
    }
}

fn is_useful(device: &dyn Device, keeps_space: bool) -> bool {
    match device.discard_effect() {
        DiscardEffect::Nothing => false,
        DiscardEffect::FreesSpace => !keeps_space,
        DiscardEffect::FreesBlocks => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discards() -> Arc<Discards> {
        Arc::new(Discards {
            devices: [AtomicBool::new(true)].into_iter().collect(),
            keeps_space: false,
            working: Mutex::new(()),
            control: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn until(is_true: impl Fn() -> bool) {
        while !is_true() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn freed_blocks_wake_a_thread_that_waits_for_work_and_none_that_pauses() {
        let discards = discards();
        let thread = {
            let discards = discards.clone();
            std::thread::spawn(move || {
                assert!(discards.wait_for_work().is_none());
                discards.pause(Duration::from_secs(3600))
            })
        };
        until(|| discards.control.lock().asleep == Some(Asleep::UntilWork));
        assert_eq!(discards.wake(), 1);
        until(|| discards.control.lock().asleep == Some(Asleep::Pausing));
        for _ in 0..100 {
            assert_eq!(discards.wake(), 0);
        }
        assert!(discards.control.lock().work, "the next search finds them");
        discards.stop_now();
        assert!(matches!(thread.join().unwrap(), Some(Stop::Now)));
    }
}
