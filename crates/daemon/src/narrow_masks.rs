//! Masks that the daemon has narrowed in other processes, and notes of them for the keeper.
//!
//! ```text
//! note ── narrow the mask ── the thread moves ── restore the mask ── erase the note
//!   └── the daemon is killed ──▶ the keeper restores the masks that have a note
//! ```
//!
//! The notes are in a memfd of which the keeper has a descriptor. The daemon writes a note before it narrows a mask, so no narrow mask is without a note.
//!
//! Invariant: a mask is restored only if the thread still has the narrow one. Another mask is the program's own.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use jericho_sys::affinity::{self, CpuMask};
use jericho_sys::memory::Mapping;
use parking_lot::Mutex;

use crate::tasks::{self, Task};

/// Masks that can be narrow at once.
const NOTES_MAX: usize = 512;
/// Length of a note. A write of one crosses no page, so it is there as a whole or not at all.
const NOTE_BYTES: usize = 512;
const MASKS_AT: usize = 32;
const NOTE_END: usize = MASKS_AT + 2 * CpuMask::BYTES;
const _: () = assert!(NOTE_END <= NOTE_BYTES);

/// A mask that was narrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NarrowMask {
    pub task: Task,
    pub original: CpuMask,
    pub narrowed: CpuMask,
    /// When it was narrowed, in ticks since boot: threads that were started since may have inherited it.
    pub since_ticks: u64,
}

/// What `NarrowMask::restore` has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The narrow mask, which it has replaced, or no thread.
    AsNarrowed,
    /// A mask that the program has set.
    ChangedByProgram,
}

impl NarrowMask {
    /// Restores the thread's mask, and the masks of the threads and processes that inherited the narrow one.
    pub fn restore(&self) -> Found {
        let mut found = Found::AsNarrowed;
        // The id may belong to another thread by now.
        if self.task.is_alive() {
            match affinity::mask(Some(self.task.tid)) {
                Ok(mask) if mask == self.narrowed => self.restore_in(self.task.tid),
                Ok(_) => found = Found::ChangedByProgram,
                Err(_) => {}
            }
        }
        // Threads that this one has started run on after its end.
        for task in tasks::started_since(&self.task, self.since_ticks) {
            // In this order, because the program may set a mask at any time: nothing is between the look at the mask and its change.
            if task.is_alive() {
                self.restore_in_if_narrow(task.tid);
            }
        }
        found
    }

    fn restore_in_if_narrow(&self, tid: u32) {
        if affinity::mask(Some(tid)).is_ok_and(|mask| mask == self.narrowed) {
            self.restore_in(tid);
        }
    }

    fn restore_in(&self, tid: u32) {
        // Fails only if the thread has just ended.
        let _ = affinity::set_mask(Some(tid), &self.original);
    }

    fn encode(&self) -> [u8; NOTE_BYTES] {
        let mut bytes = [0; NOTE_BYTES];
        bytes[0..4].copy_from_slice(&self.task.tid.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.task.pid.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.task.start.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.since_ticks.to_ne_bytes());
        let (original, narrowed) = (self.original.to_bytes(), self.narrowed.to_bytes());
        bytes[MASKS_AT..][..CpuMask::BYTES].copy_from_slice(&original);
        bytes[MASKS_AT + CpuMask::BYTES..NOTE_END].copy_from_slice(&narrowed);
        bytes
    }

    /// Decodes a note. Returns `None` for an erased one.
    fn decode(bytes: &[u8; NOTE_BYTES]) -> Option<NarrowMask> {
        let u32_at = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let mask_at = |at: usize| {
            let bytes = bytes.get(at..at + CpuMask::BYTES)?;
            Some(CpuMask::from_bytes(bytes.try_into().ok()?))
        };
        let tid = u32_at(0).filter(|tid| *tid != 0)?;
        Some(NarrowMask {
            task: Task {
                tid,
                pid: u32_at(4)?,
                start: u64_at(8)?,
            },
            since_ticks: u64_at(16)?,
            original: mask_at(MASKS_AT)?,
            narrowed: mask_at(MASKS_AT + CpuMask::BYTES)?,
        })
    }
}

/// The place of a note.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoteIndex(usize);

/// The notes of a daemon.
pub(crate) struct MaskNotes {
    file: File,
    is_used: Mutex<Vec<bool>>,
}

impl MaskNotes {
    pub fn new() -> io::Result<MaskNotes> {
        let mapping = Mapping::create("jericho-masks", NOTES_MAX * NOTE_BYTES, false)?;
        Ok(MaskNotes {
            file: File::from(mapping.fd().try_clone_to_owned()?),
            is_used: Mutex::new(vec![false; NOTES_MAX]),
        })
    }

    /// Returns the notes, to be sent to the keeper.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Writes a note, and then narrows the mask of a thread to some CPUs. Returns `None` without narrowing it if there is nothing to narrow, if the thread has
    /// ended, if there are too many notes, and if the kernel refuses.
    pub fn narrow(&self, task: &Task, cpus: &CpuMask) -> Option<(NarrowMask, NoteIndex)> {
        self.narrow_by(task, cpus, || task.is_alive())
    }

    /// Does the work of `narrow`. `is_alive` tells whether the thread has not ended.
    fn narrow_by(
        &self,
        task: &Task,
        cpus: &CpuMask,
        mut is_alive: impl FnMut() -> bool,
    ) -> Option<(NarrowMask, NoteIndex)> {
        let index = self.reserve()?;
        let mask = self.narrow_with(&index, task, cpus, &mut is_alive);
        if let Some(mask) = mask
            && is_alive()
        {
            return Some((mask, index));
        }
        if let Some(mask) = mask {
            // Another thread may have got the id, and then the narrow mask.
            mask.restore_in_if_narrow(task.tid);
            // Children of the thread may have inherited the mask.
            mask.restore();
        }
        self.erase(index);
        None
    }

    /// Returns a free place for a note.
    fn reserve(&self) -> Option<NoteIndex> {
        let mut is_used = self.is_used.lock();
        let index = is_used.iter().position(|used| !used)?;
        is_used[index] = true;
        Some(NoteIndex(index))
    }

    /// Writes the note and narrows the mask.
    fn narrow_with(
        &self,
        index: &NoteIndex,
        task: &Task,
        cpus: &CpuMask,
        mut is_alive: impl FnMut() -> bool,
    ) -> Option<NarrowMask> {
        // Reads the time before it narrows the mask, because new threads inherit the mask from then on.
        let since_ticks = tasks::now_ticks();
        if !is_alive() {
            return None;
        }
        // The program may set a mask at any time, and that mask would be lost. So only the write of the note is between the look at the mask and its change.
        // This fails if the thread has ended, or belongs to a user whose threads the daemon may not move.
        let original = affinity::mask(Some(task.tid)).ok()?;
        let narrowed = original.and(cpus);
        if narrowed.is_empty() || narrowed == original {
            return None;
        }
        let mask = NarrowMask {
            task: *task,
            original,
            narrowed,
            since_ticks,
        };
        self.write(index, &mask.encode()).ok()?;
        affinity::set_mask(Some(task.tid), &narrowed).ok()?;
        Some(mask)
    }

    /// Takes a mask that is narrow already.
    #[cfg(test)]
    pub fn note(&self, mask: &NarrowMask) -> NoteIndex {
        let index = self.reserve().unwrap();
        self.write(&index, &mask.encode()).unwrap();
        index
    }

    /// Erases a note. Its mask is restored.
    pub fn erase(&self, index: NoteIndex) {
        // Writes to memory do not fail. A note that stayed would do no harm: the keeper finds no narrow mask.
        let _ = self.write(&index, &[0; NOTE_BYTES]);
        self.is_used.lock()[index.0] = false;
    }

    fn write(&self, index: &NoteIndex, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, (index.0 * NOTE_BYTES) as u64)
    }
}

/// Restores the masks of all notes, after the daemon has ended. Returns their number.
pub(crate) fn restore_noted(notes: &File) -> io::Result<usize> {
    let mut restored = 0;
    for index in 0..NOTES_MAX {
        let mut bytes = [0; NOTE_BYTES];
        notes.read_exact_at(&mut bytes, (index * NOTE_BYTES) as u64)?;
        if let Some(mask) = NarrowMask::decode(&bytes) {
            mask.restore();
            restored += 1;
        }
    }
    Ok(restored)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a process that sleeps. Returns it, its mask, and a part of this mask, if it may use several CPUs.
    fn program() -> (std::process::Child, Option<(Task, CpuMask, CpuMask)>) {
        let child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (task, _) = Task::find(child.id()).unwrap();
        let original = affinity::mask(Some(task.tid)).unwrap();
        let first = affinity::get(Some(task.tid)).unwrap()[0];
        let part: CpuMask = [first].into_iter().collect();
        (child, (part != original).then_some((task, original, part)))
    }

    fn end(mut child: std::process::Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn masks_that_the_daemon_has_left_narrow_are_restored_from_its_notes() {
        let (child, mask) = program();
        if let Some((task, original, part)) = mask {
            let notes = MaskNotes::new().unwrap();
            let copy = File::from(notes.fd().try_clone_to_owned().unwrap());
            assert_eq!(restore_noted(&copy).unwrap(), 0);
            notes.narrow(&task, &part).unwrap();
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), part);
            // The daemon is gone.
            drop(notes);
            assert_eq!(restore_noted(&copy).unwrap(), 1);
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), original);
        }
        end(child);
    }

    #[test]
    fn a_mask_that_the_program_has_set_and_an_erased_note_change_nothing() {
        let (child, mask) = program();
        if let Some((task, _, part)) = mask {
            let notes = MaskNotes::new().unwrap();
            let (mask, index) = notes.narrow(&task, &part).unwrap();
            let last = *affinity::get(None).unwrap().last().unwrap();
            affinity::set(Some(child.id()), &[last]).unwrap();
            assert_eq!(restore_noted(&notes.file).unwrap(), 1);
            assert_eq!(affinity::get(Some(child.id())).unwrap(), [last]);
            assert_eq!(mask.restore(), Found::ChangedByProgram);
            notes.erase(index);
            assert_eq!(restore_noted(&notes.file).unwrap(), 0);
        }
        end(child);
    }

    #[test]
    fn without_room_for_a_note_no_mask_is_narrowed() {
        let (child, mask) = program();
        if let Some((task, original, part)) = mask {
            let notes = MaskNotes::new().unwrap();
            notes.is_used.lock().fill(true);
            assert_eq!(notes.narrow(&task, &part), None);
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), original);
        }
        end(child);
    }

    #[test]
    fn a_later_thread_with_the_same_id_keeps_its_mask_or_gets_it_back() {
        let (child, mask) = program();
        if let Some((task, original, part)) = mask {
            let notes = MaskNotes::new().unwrap();
            let earlier = Task {
                start: task.start - 1,
                ..task
            };
            let mask_now = || affinity::mask(Some(child.id())).unwrap();
            assert_eq!(notes.narrow(&earlier, &part), None);
            assert_eq!(mask_now(), original);
            // The id passes on after the first check.
            let mut seen = vec![];
            let narrowed = notes.narrow_by(&earlier, &part, || {
                seen.push(mask_now());
                seen.len() == 1
            });
            assert_eq!((narrowed, mask_now()), (None, original));
            assert_eq!(seen, [original, part]);
            assert!(notes.is_used.lock().iter().all(|is_used| !is_used));
        }
        end(child);
    }
}
