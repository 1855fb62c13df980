//! The control segment: the facts of a volume that clients need. The daemon writes it; clients only read it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use jericho_format::threads::{MoveCost, ThreadPolicy, ThreadsOfInode};
use jericho_sys::memory::Mapping;

use crate::entry::PageState;
use crate::memory::Geometry;

const MAGIC: u64 = u64::from_ne_bytes(*b"JRCHshm1");
const VERSION: u32 = 11;
const CPUS: usize = 1024;
const MOVE_COSTS_AT: usize = 4096;
const SLICES_AT: usize = 8192;
const SLICES: usize = 1024;
const SLOTS_AT: usize = SLICES_AT + 64 * SLICES;

#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    slices: AtomicU32,
    slots: AtomicU32,
    nodes: AtomicU32,
    instance: AtomicU64,
    policy: AtomicU32,
    move_ns: AtomicU32,
    _unused: [u32; 6],
    cpu_nodes: [AtomicU16; CPUS],
}

#[repr(C, align(64))]
struct SliceInfo {
    frames: AtomicU32,
    node: AtomicU16,
    _unused: u16,
    home_frames: AtomicU32,
}

/// The cost of a move of a thread, for each of its nodes and each node of the data. See [`MoveCost::number`].
#[repr(C, align(64))]
struct MoveCosts([[AtomicU32; Control::MOVE_NODES]; Control::MOVE_NODES]);

/// The daemon's part of a file's slot.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct SlotInfo {
    object: AtomicU64,
    word: AtomicU64,
    policy: AtomicU8,
}

/// The word that tells whether a lookup of a slot is still valid: `[home:16][flags:16][generation:32]`, high to low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotWord(u64);

impl SlotWord {
    /// Returns the generation. It changes each time the daemon gives the slot out or takes it back.
    #[inline]
    pub fn generation(self) -> u32 {
        self.0 as u32
    }

    /// Returns the flags: `SlotInfo::KERNEL`, `SlotInfo::NO_WRITE`, `SlotInfo::NO_GROW`.
    #[inline]
    pub fn flags(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Returns the slice that caches the file.
    #[inline]
    pub fn home(self) -> u16 {
        (self.0 >> 48) as u16
    }

    fn new(generation: u32, flags: u16, home: u16) -> SlotWord {
        SlotWord(u64::from(home) << 48 | u64::from(flags) << 32 | u64::from(generation))
    }
}

const _: () = assert!(size_of::<SlotInfo>() == 64 && size_of::<SliceInfo>() == 64);
const _: () = assert!(std::mem::offset_of!(SliceInfo, home_frames) == 8);
const _: () = assert!(std::mem::offset_of!(Header, cpu_nodes) == 64);
const _: () = assert!(size_of::<Header>() <= MOVE_COSTS_AT);
const _: () = assert!(MOVE_COSTS_AT + size_of::<MoveCosts>() == SLICES_AT);

impl SlotInfo {
    /// No inline access.
    pub const KERNEL: u16 = 1;
    /// No inline writes.
    pub const NO_WRITE: u16 = 2;
    /// No inline writes that extend the file.
    pub const NO_GROW: u16 = 4;

    /// Returns the object; 0: the slot is free. Acquire: a generation that is loaded later is at least as new.
    #[inline]
    pub fn object(&self) -> u64 {
        self.object.load(Ordering::Acquire)
    }

    /// Returns the word. Acquire: later loads of the slot are at least as new.
    #[inline]
    pub fn word(&self) -> SlotWord {
        SlotWord(self.word.load(Ordering::Acquire))
    }

    fn change(&self, change: impl Fn(SlotWord) -> SlotWord) {
        let next = |word| Some(change(SlotWord(word)).0);
        let _ = self
            .word
            .fetch_update(Ordering::SeqCst, Ordering::Relaxed, next);
    }

    /// Returns the thread policy of the file; `None`: the volume's.
    #[inline]
    pub fn policy(&self) -> Option<ThreadPolicy> {
        ThreadsOfInode::from_byte(self.policy.load(Ordering::Relaxed)).policy()
    }

    /// Gives the slot to an object, or (0) takes it back. Only the daemon calls this and the three functions below.
    pub fn set(&self, object: u64, home: u16, flags: u16) {
        self.object.store(object, Ordering::Release);
        self.change(|word| SlotWord::new(word.generation().wrapping_add(1), flags, home));
    }

    /// Changes the home.
    pub fn set_home(&self, home: u16) {
        self.change(|word| SlotWord::new(word.generation(), word.flags(), home));
    }

    /// Sets and clears flags.
    pub fn set_flags(&self, set: u16, clear: u16) {
        self.change(|word| {
            let flags = word.flags() & !clear | set;
            SlotWord::new(word.generation(), flags, word.home())
        });
    }

    /// Sets the thread policy.
    pub fn set_policy(&self, policy: Option<ThreadPolicy>) {
        let number = policy.map_or(0, |policy| policy as u8 + 1);
        self.policy.store(number, Ordering::Relaxed);
    }
}

/// The control segment, mapped.
#[derive(Debug)]
pub struct Control {
    mapping: Mapping,
    /// Slices that this process uses. Only the daemon's value changes.
    slices: AtomicU16,
    slots: u32,
}

impl Control {
    /// Nodes between which moves of threads have a cost: those below this number.
    pub const MOVE_NODES: usize = 32;

    /// Creates the segment of a volume: sizes and node of each slice (at most 1024), and the node of each CPU (65535: none).
    pub fn create(
        name: &str,
        slices: &[(Geometry, u16)],
        slots: u32,
        cpu_nodes: &[u16],
        instance: u64,
    ) -> io::Result<Control> {
        assert!(slices.len() <= SLICES, "more slices than a volume can have");
        let len = SLOTS_AT + slots as usize * size_of::<SlotInfo>();
        let mapping = Mapping::create(&format!("jericho-{name}-control"), len, false)?;
        let control = Control {
            mapping,
            slices: AtomicU16::new(0),
            slots,
        };
        let header = control.header();
        for (cpu, word) in header.cpu_nodes.iter().enumerate() {
            let node = cpu_nodes.get(cpu).copied().unwrap_or(u16::MAX);
            word.store(node, Ordering::Relaxed);
        }
        for (geometry, node) in slices {
            control.append(*geometry, *node);
        }
        header.slots.store(slots, Ordering::Relaxed);
        let known = cpu_nodes.iter().filter(|n| **n != u16::MAX);
        let nodes = known.map(|n| u32::from(*n) + 1).max().unwrap_or(1);
        header.nodes.store(nodes, Ordering::Relaxed);
        header.instance.store(instance, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(control)
    }

    /// Appends a slice, with its sizes and its node. Only the daemon calls this.
    pub fn append(&self, geometry: Geometry, node: u16) {
        let index = self.slice_count();
        assert!(
            usize::from(index) < SLICES,
            "more slices than a volume can have"
        );
        let info = self.info_at(index);
        info.frames.store(geometry.frames, Ordering::Relaxed);
        info.home_frames
            .store(geometry.home_frames, Ordering::Relaxed);
        info.node.store(node, Ordering::Relaxed);
        self.slices.store(index + 1, Ordering::Release);
        // A client that finds the number finds the slice.
        self.header()
            .slices
            .store(u32::from(index) + 1, Ordering::Release);
    }

    /// Maps another process's segment read-only. Fails with `InvalidData` for other contents and for another version, and with
    /// the errors of `Mapping::from_fd`.
    pub fn attach(fd: OwnedFd) -> io::Result<Control> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let slots = {
            let head = Mapping::from_fd(fd.try_clone()?, SLOTS_AT, false)?;
            let head = Control {
                mapping: head,
                slices: AtomicU16::new(0),
                slots: 0,
            };
            let header = head.header();
            if header.magic.load(Ordering::Acquire) != MAGIC {
                return Err(bad("not a Jericho control segment".into()));
            }
            let version = header.version.load(Ordering::Relaxed);
            if version != VERSION {
                return Err(bad(format!(
                    "shared memory has version {version}, this library needs {VERSION}"
                )));
            }
            header.slots.load(Ordering::Relaxed)
        };
        let len = SLOTS_AT + slots as usize * size_of::<SlotInfo>();
        let mapping = Mapping::from_fd(fd, len, false)?;
        let control = Control {
            mapping,
            slices: AtomicU16::new(0),
            slots,
        };
        let slices = control.header().slices.load(Ordering::Acquire);
        if slices as usize > SLICES {
            return Err(bad(format!(
                "invalid slice count {slices}: expected at most {SLICES}"
            )));
        }
        control.slices.store(slices as u16, Ordering::Relaxed);
        Ok(control)
    }

    /// Returns the segment, to be sent to clients (read-only).
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the mapping is at least SLOTS_AT long, page-aligned, and lives as long as `self`; the
        // fields are atomics, valid for every bit pattern.
        unsafe { &*self.mapping.as_ptr().cast::<Header>() }
    }

    #[inline]
    fn move_costs(&self) -> &MoveCosts {
        // SAFETY: as in `header`; the table ends where the slices begin.
        unsafe { &*self.mapping.as_ptr().add(MOVE_COSTS_AT).cast::<MoveCosts>() }
    }

    #[inline]
    fn slice_info(&self, slice: u16) -> &SliceInfo {
        assert!(slice < self.slice_count(), "no such slice");
        self.info_at(slice)
    }

    #[inline]
    fn info_at(&self, slice: u16) -> &SliceInfo {
        assert!(usize::from(slice) < SLICES);
        // SAFETY: as in `header`; there is room for 1024 slices.
        unsafe {
            &*self
                .mapping
                .as_ptr()
                .add(SLICES_AT)
                .cast::<SliceInfo>()
                .add(usize::from(slice))
        }
    }

    /// Returns the daemon's instance number, which is random.
    pub fn instance(&self) -> u64 {
        self.header().instance.load(Ordering::Relaxed)
    }

    /// Returns the number of slices.
    #[inline]
    pub fn slice_count(&self) -> u16 {
        self.slices.load(Ordering::Acquire)
    }

    /// Returns the number of slots.
    #[inline]
    pub fn slot_count(&self) -> u32 {
        self.slots
    }

    /// Returns one more than the highest node.
    pub fn node_count(&self) -> u32 {
        self.header().nodes.load(Ordering::Relaxed)
    }

    /// Returns the number of frames of a slice, with those that have no memory.
    pub fn frames_of(&self, slice: u16) -> u32 {
        self.slice_info(slice).frames.load(Ordering::Relaxed)
    }

    /// Returns the number of frames at home of a slice, which always have memory.
    pub fn home_frames_of(&self, slice: u16) -> u32 {
        self.slice_info(slice).home_frames.load(Ordering::Relaxed)
    }

    /// Returns the sizes of a slice. Fails with `InvalidData` for impossible ones.
    pub fn geometry_of(&self, slice: u16) -> io::Result<Geometry> {
        let frames = self.frames_of(slice);
        let home = self.home_frames_of(slice);
        Geometry::new(frames, home).ok_or_else(|| {
            let what = format!(
                "invalid frame count {frames}, {home} of them on the home node: expected 1 to {}",
                PageState::FRAMES_MAX
            );
            io::Error::new(io::ErrorKind::InvalidData, what)
        })
    }

    /// Returns the node whose CPUs are local to a slice: its home, or the nearest one with CPUs.
    #[inline]
    pub fn node_of_slice(&self, slice: u16) -> u16 {
        self.slice_info(slice).node.load(Ordering::Relaxed)
    }

    /// Returns the node of a CPU; 65535: none.
    #[inline]
    pub fn node_of_cpu(&self, cpu: u32) -> u16 {
        let nodes = &self.header().cpu_nodes;
        nodes
            .get(cpu as usize)
            .map_or(u16::MAX, |node| node.load(Ordering::Relaxed))
    }

    /// Returns the thread policy of the volume.
    #[inline]
    pub fn policy(&self) -> ThreadPolicy {
        ThreadPolicy::from_number(self.header().policy.load(Ordering::Relaxed))
    }

    /// Sets the thread policy of the volume. Only the daemon calls this.
    pub fn set_policy(&self, policy: ThreadPolicy) {
        self.header()
            .policy
            .store(u32::from(policy as u8), Ordering::Relaxed);
    }

    /// Returns the cost of a move of a thread on one node to data on another one. Nodes from [`Control::MOVE_NODES`] up have the default.
    pub fn move_cost(&self, from: usize, to: usize) -> MoveCost {
        let cell = self.move_costs().0.get(from).and_then(|row| row.get(to));
        cell.map_or(MoveCost::Default, |cost| {
            MoveCost::from_number(cost.load(Ordering::Relaxed))
        })
    }

    /// Sets such a cost. Ignores nodes from [`Control::MOVE_NODES`] up. Only the daemon calls this.
    pub fn set_move_cost(&self, from: usize, to: usize, cost: MoveCost) {
        if let Some(cell) = self.move_costs().0.get(from).and_then(|row| row.get(to)) {
            cell.store(cost.number(), Ordering::Relaxed);
        }
    }

    /// Returns how long a move of a thread takes, in nanoseconds; 0: nobody has measured it.
    pub fn move_ns(&self) -> u32 {
        self.header().move_ns.load(Ordering::Relaxed)
    }

    /// Sets that time. Only the daemon calls this.
    pub fn set_move_ns(&self, ns: u32) {
        self.header().move_ns.store(ns, Ordering::Relaxed);
    }

    /// Returns the daemon's part of a slot; `None` beyond the last.
    #[inline]
    pub fn slot(&self, index: u32) -> Option<&SlotInfo> {
        (index < self.slots).then(|| {
            // SAFETY: as in `header`; the mapping has room for `slots` slots.
            unsafe {
                &*self
                    .mapping
                    .as_ptr()
                    .add(SLOTS_AT)
                    .cast::<SlotInfo>()
                    .add(index as usize)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attached_control_segment_shows_the_created_values() {
        let spilling = Geometry::new(8192, 1024).unwrap();
        let slices = [(Geometry::for_frames(4096), 0), (spilling, 1)];
        let made = Control::create("test", &slices, 100, &[0, 1, 1], 42).unwrap();
        made.set_policy(ThreadPolicy::Always);
        made.set_move_cost(0, 1, MoveCost::Bytes(3 << 20));
        made.set_move_cost(31, 31, MoveCost::Never);
        made.set_move_cost(0, 32, MoveCost::Never);
        made.set_move_ns(90_000);
        made.slot(99).unwrap().set(7, 1, SlotInfo::NO_WRITE);
        let fd = made.mapping().read_only_fd().unwrap();
        let seen = Control::attach(fd).unwrap();
        assert_eq!((seen.slice_count(), seen.slot_count()), (2, 100));
        assert_eq!((seen.frames_of(1), seen.node_of_slice(1)), (8192, 1));
        assert_eq!(seen.geometry_of(1).unwrap(), spilling);
        made.info_at(1).home_frames.store(100, Ordering::Relaxed);
        let error = seen.geometry_of(1).unwrap_err();
        assert!(error.to_string().contains("8192, 100"), "{error}");
        assert_eq!(seen.node_of_cpu(2), 1);
        assert_eq!(seen.node_of_cpu(3), u16::MAX);
        assert_eq!(seen.node_of_cpu(5000), u16::MAX);
        assert_eq!((seen.instance(), seen.node_count()), (42, 2));
        assert_eq!(seen.policy(), ThreadPolicy::Always);
        assert_eq!(seen.move_cost(0, 1), MoveCost::Bytes(3 << 20));
        assert_eq!(seen.move_cost(31, 31), MoveCost::Never);
        assert_eq!(seen.move_ns(), 90_000);
        for (from, to) in [(1, 0), (0, 32), (1000, 0)] {
            assert_eq!(seen.move_cost(from, to), MoveCost::Default);
        }
        let slot = seen.slot(99).unwrap();
        let word = slot.word();
        assert_eq!(
            (slot.object(), word.home(), word.flags()),
            (7, 1, SlotInfo::NO_WRITE)
        );
        assert_eq!(word.generation(), 1);
        made.slot(99).unwrap().set_home(0);
        made.slot(99)
            .unwrap()
            .set_flags(SlotInfo::KERNEL, SlotInfo::NO_WRITE);
        assert_eq!(slot.word(), SlotWord::new(1, SlotInfo::KERNEL, 0));
        assert!(seen.slot(100).is_none());
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let made = Control::create("test", &[(Geometry::for_frames(4096), 0)], 1, &[0], 1).unwrap();
        made.header().version.store(12, Ordering::Relaxed);
        let error = Control::attach(made.mapping().read_only_fd().unwrap()).unwrap_err();
        assert!(error.to_string().contains("version 12"), "{error}");
    }
}
