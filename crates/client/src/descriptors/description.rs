//! Open file descriptions that use the fast path.
//!
//! The table is static and consists of atomics. It begins as zeros, so it takes no memory before it is used. The code allocates
//! nothing and takes no lock, because a signal handler or a child of a process with threads may call any of it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use jericho_sys::files;

use super::offset::Offset;
use super::read_ahead::ReadAhead;
use super::word::{DESCRIBED, KIND_SHIFT};

/// A power of two below 2^29: bits 29 to 31 of the upper half of an fd's word are CLOSING and the kind. The upper half modulo this
/// number is therefore the index alone.
const DESCRIPTIONS: usize = 16_384;
/// Entries that a search for a free description tries.
const PROBES: usize = 64;
/// Reference count of a description that is being freed.
const DYING: u32 = u32::MAX;

/// Value of `extended_to` before the first extending write of a description.
pub const NEVER: u64 = u64::MAX;

static TABLE: [Description; DESCRIPTIONS] = [const { Description::new() }; DESCRIPTIONS];

/// The file may be read.
pub const READ: u32 = 1;
/// The file may be written.
pub const WRITE: u32 = 2;
/// Writes append.
pub const APPEND: u32 = 4;
/// Writes must be durable, so they take the kernel path.
pub const SYNC: u32 = 8;
/// The daemon gave no write access to the segments.
pub const NO_INLINE_WRITE: u32 = 32;
/// All calls take the kernel path.
pub const TO_KERNEL: u32 = 64;

/// A description, reached through an fd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFd {
    /// The fd.
    pub fd: i32,
    /// Index in the table.
    pub index: u32,
    /// The description's generation.
    pub generation: u32,
}

/// Facts of a description at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Session through which the library reaches the slot.
    pub session: usize,
    /// The slot.
    pub slot: u32,
    /// The slot's generation.
    pub slot_generation: u32,
    /// The object.
    pub object: u64,
    /// `READ` and the other flags.
    pub flags: u32,
}

/// The kernel's identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// Device, as in fstat(2).
    pub device: u64,
    /// Inode, as in fstat(2).
    pub inode: u64,
}

impl From<&files::Stat> for FileIdentity {
    fn from(stat: &files::Stat) -> FileIdentity {
        FileIdentity {
            device: stat.device,
            inode: stat.inode,
        }
    }
}

/// An open file description.
/// The first cache line identifies the file; every thread that uses it reads that line. Each sequential call changes the second
/// line.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Description {
    generation: AtomicU32,
    references: AtomicU32,
    session: AtomicU32,
    slot: AtomicU32,
    slot_generation: AtomicU32,
    flags: AtomicU32,
    object: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    /// Number of further extending writes that do not ask the daemon for pages. Each such write counts it down; a write that asks
    /// sets it if the daemon refuses.
    pub reserve_pause: AtomicU32,
    _unused: [u32; 3],
    /// The offset, while this library keeps it.
    pub offset: Offset,
    /// The position of sequential reads.
    pub read_ahead: ReadAhead,
    /// End of the last write that extended the file, or `NEVER`.
    pub extended_to: AtomicU64,
}

// Entries are found by a shift.
const _: () = assert!(size_of::<Description>() == 128);
// The two cache lines.
const _: () = assert!(std::mem::offset_of!(Description, offset) == 64);

impl Description {
    const fn new() -> Description {
        Description {
            generation: AtomicU32::new(0),
            references: AtomicU32::new(0),
            session: AtomicU32::new(0),
            slot: AtomicU32::new(0),
            slot_generation: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            object: AtomicU64::new(0),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            reserve_pause: AtomicU32::new(0),
            _unused: [0; 3],
            offset: Offset::new(),
            read_ahead: ReadAhead::new(),
            extended_to: AtomicU64::new(0),
        }
    }

    /// Returns the flags of the entry's present description.
    #[inline(always)]
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Takes the entry for a new description, if it is free. Returns the description's generation.
    fn take(&self, facts: &Facts, identity: FileIdentity, offset: Option<u64>) -> Option<u32> {
        self.references
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        // The entry's generation is even, and no other thread uses the entry.
        fence(Ordering::Release);
        self.set(facts, identity);
        self.read_ahead.reset();
        self.extended_to.store(NEVER, Ordering::Relaxed);
        self.reserve_pause.store(0, Ordering::Relaxed);
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1);
        self.offset.begin(generation as u16, offset);
        self.generation.store(generation, Ordering::Release);
        Some(generation)
    }

    fn set(&self, facts: &Facts, identity: FileIdentity) {
        self.session.store(facts.session as u32, Ordering::Relaxed);
        self.slot.store(facts.slot, Ordering::Relaxed);
        self.slot_generation
            .store(facts.slot_generation, Ordering::Relaxed);
        self.object.store(facts.object, Ordering::Relaxed);
        self.device.store(identity.device, Ordering::Relaxed);
        self.inode.store(identity.inode, Ordering::Relaxed);
        self.flags.store(facts.flags, Ordering::Relaxed);
    }

    /// Drops a reference. The last one frees the description.
    pub fn release(&self) {
        let mut references = self.references.load(Ordering::Relaxed);
        loop {
            let next = match references {
                0 | DYING => return,
                1 => DYING,
                n => n - 1,
            };
            match self.references.compare_exchange(
                references,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) if next == DYING => break,
                Ok(_) => return,
                Err(now) => references = now,
            }
        }
        // An even generation belongs to no description.
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.references.store(0, Ordering::Release);
    }

    /// Returns whether exactly one fd refers to it.
    pub fn has_one_fd(&self) -> bool {
        self.references.load(Ordering::Relaxed) == 1
    }

    /// Adds a reference if the description still has this generation.
    pub fn retain(&self, generation: u32) -> bool {
        let more = |n: u32| (n != 0 && n != DYING).then_some(n + 1);
        let counted = self
            .references
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, more)
            .is_ok();
        if counted && self.generation.load(Ordering::Acquire) != generation {
            self.release();
            return false;
        }
        counted
    }
}

impl OpenFd {
    /// Makes a description for an fd, which the caller then enters in the fd's word. `offset`: the file offset, unless it is in
    /// the kernel. Returns `None` when no description is free.
    pub fn new(
        fd: i32,
        facts: &Facts,
        identity: FileIdentity,
        offset: Option<u64>,
    ) -> Option<OpenFd> {
        (0..PROBES).find_map(|probe| {
            let index = (fd as usize + probe) % DESCRIPTIONS;
            Some(OpenFd {
                fd,
                index: index as u32,
                generation: TABLE[index].take(facts, identity, offset)?,
            })
        })
    }

    /// Returns the description's entry.
    #[inline]
    pub fn description(&self) -> &'static Description {
        &TABLE[self.index as usize % DESCRIPTIONS]
    }

    /// Returns the tag that distinguishes the description's offset from those of other descriptions in the same entry.
    #[inline]
    pub fn tag(&self) -> u16 {
        self.generation as u16
    }

    /// Returns the facts; `None` when the description is gone.
    #[inline]
    pub fn facts(&self) -> Option<Facts> {
        let d = self.description();
        let facts = Facts {
            session: d.session.load(Ordering::Relaxed) as usize,
            slot: d.slot.load(Ordering::Relaxed),
            slot_generation: d.slot_generation.load(Ordering::Relaxed),
            object: d.object.load(Ordering::Relaxed),
            flags: d.flags.load(Ordering::Relaxed),
        };
        self.is_still().then_some(facts)
    }

    /// Returns the flags; `None` when the description is gone.
    pub fn flags(&self) -> Option<u32> {
        let flags = self.description().flags();
        self.is_still().then_some(flags)
    }

    /// Returns the file's identity; `None` when the description is gone.
    pub fn identity(&self) -> Option<FileIdentity> {
        let d = self.description();
        let identity = FileIdentity {
            device: d.device.load(Ordering::Relaxed),
            inode: d.inode.load(Ordering::Relaxed),
        };
        self.is_still().then_some(identity)
    }

    /// Returns whether the values loaded before belong to this description.
    #[inline]
    fn is_still(&self) -> bool {
        // The generation changes before any other field of a description that is gone.
        fence(Ordering::Acquire);
        self.description().generation.load(Ordering::Relaxed) == self.generation
    }

    /// Stores another slot, or the same slot reached through another session. A thread that sees half of the change finds a slot
    /// that is not the object's, and then also calls this.
    pub fn set_slot(&self, facts: &Facts) {
        let d = self.description();
        d.session.store(facts.session as u32, Ordering::Relaxed);
        d.slot.store(facts.slot, Ordering::Relaxed);
        d.slot_generation
            .store(facts.slot_generation, Ordering::Relaxed);
    }

    /// Adds flags.
    pub fn add_flags(&self, flags: u32) {
        self.description().flags.fetch_or(flags, Ordering::AcqRel);
    }

    /// Sets and clears the flags that fcntl(2) can change.
    pub fn change_flags(&self, set: u32, clear: u32) {
        let change = |flags: u32| Some(flags & !clear | set);
        let flags = &self.description().flags;
        let _ = flags.fetch_update(Ordering::AcqRel, Ordering::Relaxed, change);
    }

    /// Decodes the word of an fd that has a description.
    #[inline(always)]
    pub fn of_word(fd: i32, word: u64) -> OpenFd {
        OpenFd {
            fd,
            index: (word >> 32) as u32 % DESCRIPTIONS as u32,
            generation: word as u32,
        }
    }

    /// Returns the word of the fd.
    pub fn word(&self) -> u64 {
        DESCRIBED << KIND_SHIFT | u64::from(self.index) << 32 | u64::from(self.generation)
    }
}
