//! Discards freed blocks on devices that support it, so that the host gets their space back.
//!
//! Blocks to discard come only from the allocator's bitmaps, which show a block as free only when its removal is durable and no
//! transfer to it is in flight. While a range is being discarded it is lent (`alloc/lend.rs`) and cannot be allocated.

pub(crate) mod discarder;
mod trim;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jericho_format::superblock::FLAG_PREALLOCATED;
use jericho_storage::DiscardEffect;
use jericho_volume::Volume;
use parking_lot::{Condvar, Mutex};

/// Longest time that the remaining discards may delay an unmount.
const FINISH: Duration = Duration::from_secs(5);

/// State of discarding.
pub struct Discards {
    /// By device: whether it supports discards.
    devices: Box<[AtomicBool]>,
    /// Held during a discard: one range is discarded at a time.
    working: Mutex<()>,
    control: Mutex<Control>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Control {
    /// Blocks were freed since the last search.
    work: bool,
    stop: Option<Stop>,
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
        let is_useful = |effect: DiscardEffect| match effect {
            DiscardEffect::Nothing => false,
            DiscardEffect::FreesSpace => !keeps_space,
            DiscardEffect::FreesBlocks => true,
        };
        let devices = volume.devices().iter();
        Discards {
            devices: devices
                .map(|device| AtomicBool::new(!read_only && is_useful(device.discard_effect())))
                .collect(),
            working: Mutex::new(()),
            control: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Returns whether any device supports discards.
    pub fn is_on(&self) -> bool {
        self.devices.iter().any(|on| on.load(Ordering::Acquire))
    }

    /// Wakes the thread to search for freed blocks.
    pub fn wake(&self) {
        self.control.lock().work = true;
        self.changed.notify_all();
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
            self.changed.wait(&mut control);
        }
        control.work = false;
        control.stop
    }

    /// Sleeps for a time, or until the thread must stop. Returns the way to stop, or `None` after the time.
    fn pause(&self, time: Duration) -> Option<Stop> {
        let until = Instant::now() + time;
        let mut control = self.control.lock();
        while control.stop.is_none() {
            if self.changed.wait_until(&mut control, until).timed_out() {
                break;
            }
        }
        control.stop
    }
}
