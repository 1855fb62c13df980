//! A volume's segments, as this process has mapped them.
//!
//! A session stays mapped for the life of the process, because any thread may read it at any time. Its memory is freed together
//! with its daemon (docs/internals/keeper.md). The process adds a session for each daemon, and another when it needs a writable
//! one. A child of fork(2) adds its own, because it is a different client than its parent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use jericho_format::threads::ThreadPolicy;
use jericho_shm::{Area, Control, Key, SliceMemory, Slots};
use jericho_sys::files::ForkMark;

use crate::migration;
use crate::migration::nodes::{MoveBytes, Nodes};

/// Sessions that a process can have.
pub const SESSIONS_MAX: usize = 64;
/// Word of the mark: one more than the index of the first session that is this process's own. Zero: none is.
pub const FIRST: usize = 0;

/// The segments of a volume's daemon, mapped by this process.
#[derive(Debug)]
pub struct Session {
    /// Index among this process's sessions.
    pub index: usize,
    /// The daemon's instance number.
    pub instance: u64,
    /// State that the daemon shows to all clients.
    pub control: Control,
    /// State that writers share.
    pub slots: Slots,
    /// This process's own area.
    pub area: Area,
    /// The pages of each slice.
    pub slices: Vec<SliceMemory>,
    /// The owner number with which this process latches and locks.
    pub owner: u16,
    /// Whether threads may migrate to this volume's data: its table of nodes is the one of this process (`migration::learn`).
    pub may_migrate: bool,
    /// The mount moves no companions, so threads ask for none.
    pub refuses_companions: AtomicBool,
    /// The thread policy of this run, if it has one. It takes precedence over the policy of a file, which takes precedence over
    /// the volume's.
    pub policy_of_run: Option<ThreadPolicy>,
    /// The word `FIRST` of the mark, which tells whether the session is this process's own.
    first: &'static AtomicU64,
    /// Device number of the mount, once a file of it was found to be this daemon's; 0 before.
    device: AtomicU64,
}

impl Session {
    /// Makes a session of the segments that the handshake has brought.
    pub fn new(
        index: usize,
        mark: &'static ForkMark,
        control: Control,
        slots: Slots,
        area: Area,
        slices: Vec<SliceMemory>,
    ) -> Session {
        // Sets rseq up now, where time does not matter, rather than in an access.
        jericho_sys::rseq::current_cpu();
        let may_migrate = migration::learn(Nodes::new(|cpu| control.node_of_cpu(cpu)));
        if may_migrate {
            let cost = |from, to| control.move_cost(from, to);
            migration::learn_costs(MoveBytes::new(cost, control.move_ns()));
        }
        Session {
            may_migrate,
            refuses_companions: AtomicBool::new(false),
            policy_of_run: migration::policy_of_run(),
            first: mark.word(FIRST),
            device: AtomicU64::new(0),
            index,
            instance: control.instance(),
            owner: area.owner(),
            control,
            slots,
            area,
            slices,
        }
    }

    /// Returns whether the session is this process's own, and not its parent's.
    #[inline(always)]
    pub fn is_own(&self) -> bool {
        let first = self.first.load(Ordering::Acquire);
        // `first` is one more than an index. If it is zero, this subtracts to the largest number, which no index reaches.
        self.index as u64 >= first.wrapping_sub(1)
    }

    /// Makes the session this process's own, or its parent's.
    #[cfg(test)]
    pub fn set_own(&mut self, own: bool) {
        static NONE: AtomicU64 = AtomicU64::new(0);
        static ALL: AtomicU64 = AtomicU64::new(1);
        self.first = if own { &ALL } else { &NONE };
    }

    /// Returns whether this process may write inline.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.slices.first().is_some_and(SliceMemory::is_writable)
    }

    /// Records the device number of the daemon's mount.
    pub fn serves(&self, device: u64) {
        self.device.store(device, Ordering::Relaxed);
    }

    /// Reports a page that became dirty. Returns true if the caller must ring the doorbell.
    #[inline]
    pub fn report(&self, key: Key) -> bool {
        self.area.report(key, &self.slots)
    }

    /// Takes a block of the area for the calling thread. Returns its index, and whether the thread has it for itself.
    pub fn take_block(&self) -> (u32, bool) {
        let tid = jericho_sys::affinity::current_tid();
        self.area.take_block(tid, jericho_sys::affinity::has_ended)
    }

    /// Returns whether a file of the mount with this device number was found to be this daemon's.
    pub fn is_of_device(&self, device: u64) -> bool {
        self.device.load(Ordering::Relaxed) == device
    }
}
