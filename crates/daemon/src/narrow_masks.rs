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
            if affinity::mask(Some(task.tid)).is_ok_and(|mask| mask == self.narrowed)
                && task.is_alive()
            {
                self.restore_in(task.tid);
            }
        }
        found
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

    /// Writes a note, and then narrows the mask. Returns `None` without narrowing it if there are too many notes, and if the kernel refuses.
    pub fn narrow(&self, mask: &NarrowMask) -> Option<NoteIndex> {
        let index = {
            let mut is_used = self.is_used.lock();
            let index = is_used.iter().position(|used| !used)?;
            is_used[index] = true;
            NoteIndex(index)
        };
        let written = self.write(&index, &mask.encode());
        if written.is_err() || affinity::set_mask(Some(mask.task.tid), &mask.narrowed).is_err() {
            self.erase(index);
            return None;
        }
        Some(index)
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

    /// Starts a process that sleeps. Returns a narrow mask for it, if it may use several CPUs.
    fn program() -> (std::process::Child, Option<NarrowMask>) {
        let child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (task, _) = Task::find(child.id()).unwrap();
        let original = affinity::mask(Some(task.tid)).unwrap();
        let first = affinity::get(Some(task.tid)).unwrap()[0];
        let mask = NarrowMask {
            task,
            original,
            narrowed: [first].into_iter().collect(),
            since_ticks: tasks::now_ticks().unwrap(),
        };
        (child, (mask.narrowed != original).then_some(mask))
    }

    fn end(mut child: std::process::Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn masks_that_the_daemon_has_left_narrow_are_restored_from_its_notes() {
        let (child, mask) = program();
        if let Some(mask) = mask {
            let notes = MaskNotes::new().unwrap();
            let copy = File::from(notes.fd().try_clone_to_owned().unwrap());
            assert_eq!(restore_noted(&copy).unwrap(), 0);
            notes.narrow(&mask).unwrap();
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), mask.narrowed);
            // The daemon is gone.
            drop(notes);
            assert_eq!(restore_noted(&copy).unwrap(), 1);
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), mask.original);
        }
        end(child);
    }

    #[test]
    fn a_mask_that_the_program_has_set_and_an_erased_note_change_nothing() {
        let (child, mask) = program();
        if let Some(mask) = mask {
            let notes = MaskNotes::new().unwrap();
            let index = notes.narrow(&mask).unwrap();
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
        if let Some(mask) = mask {
            let notes = MaskNotes::new().unwrap();
            notes.is_used.lock().fill(true);
            assert_eq!(notes.narrow(&mask), None);
            assert_eq!(affinity::mask(Some(child.id())).unwrap(), mask.original);
        }
        end(child);
    }
}
