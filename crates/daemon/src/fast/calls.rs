//! The ioctls on a file's descriptor.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use jericho_cache::OWNER_DAEMON;
use jericho_format::{FILE_BYTES_MAX, PAGE_BYTES};
use jericho_shm::{Answer, Call, Refusal, Segments};

use super::Fast;
use super::slot_file::SlotFile;
use super::trusted::Asker;
use crate::handle::Handle;

/// Most pages that one call reserves or reads ahead: 8 MiB.
const PAGES_MAX: u32 = 2048;
/// Most pages that one call of a program can touch: the kernel moves at most 2 GiB.
const CALL_PAGES_MAX: u64 = (2 << 30) / PAGE_BYTES + 1;

impl Fast {
    /// Answers an ioctl on an open file. May call `reply` later, from another thread.
    pub fn call<R>(
        self: &Arc<Self>,
        handle: &Arc<Handle>,
        call: Call,
        Asker { uid, gid, thread }: Asker,
        reply: R,
    ) where
        R: FnOnce(Answer) + Send + 'static,
    {
        if self.closing.load(Ordering::SeqCst) {
            return reply(Answer::refused(Refusal::Off));
        }
        // A mapping affects the access of all programs, so any user may report it.
        if call != Call::Mapped && !self.trusted.includes(uid, gid) {
            return reply(Answer::refused(Refusal::Owner));
        }
        match call {
            Call::Fast {
                write,
                thread: block,
            } => {
                self.counts.slots_by_request.fetch_add(1, Ordering::Relaxed);
                if let Some(block) = block {
                    self.knows_thread(block, thread);
                }
                self.answer_grant(handle, write, reply);
            }
            Call::ReadAhead { first, pages } => {
                self.prefetch(handle, first, pages.min(PAGES_MAX));
                reply(Answer::default());
            }
            Call::Reserve { first, pages, soon } => {
                let pages = pages.min(PAGES_MAX);
                let pages = match soon {
                    true => self.reserve_soon(handle, first, pages),
                    false => self.reserve(handle, first, pages),
                };
                reply(pages.map_or_else(Answer::refused, |pages| Answer {
                    pages,
                    ..Answer::default()
                }));
            }
            Call::Mapped => self.answer_mapped(handle, reply),
            Call::Token => reply(self.token(handle, uid)),
            Call::Interrupted {
                first,
                pages,
                owner,
                instance,
            } => {
                // Gives up only the caller's latches: another client may still be copying into its frame, which the evictor would
                // reuse.
                reply(self.of_writer((owner, instance), thread, || Answer {
                    pages: self.give_up_latches(handle, first, pages, owner),
                    ..Answer::default()
                }));
            }
            Call::Copied {
                slice,
                frame,
                owner,
                instance,
            } => {
                reply(self.of_writer((owner, instance), thread, || {
                    if let Some(slice) = self.volume.slices.get(usize::from(slice)) {
                        slice.copy_ended(owner, frame);
                    }
                    Answer::default()
                }));
            }
            // `Mounted::call` has ordered it.
            Call::Companions { .. } => reply(Answer::default()),
        }
    }

    /// Returns whether a thread belongs to the client with an owner number of this instance of the daemon.
    pub fn has_client_thread(&self, (owner, instance): (u16, u64), thread: u32) -> bool {
        instance == self.control.instance() && self.is_client_thread(owner, thread)
    }

    /// Answers a call in which a client names itself by its owner number and by the daemon's instance. Refuses the call unless
    /// `thread` belongs to that client. Does nothing for a call that names an earlier instance of the daemon.
    fn of_writer(
        &self,
        (owner, instance): (u16, u64),
        thread: u32,
        answer: impl FnOnce() -> Answer,
    ) -> Answer {
        if instance != self.control.instance() {
            Answer::default()
        } else if !self.is_writer(owner, thread) {
            Answer::refused(Refusal::Owner)
        } else {
            answer()
        }
    }

    /// Returns a token (the right to write inline) to a process of `uid` that has the file open for writing.
    fn token(&self, handle: &Handle, uid: u32) -> Answer {
        if !handle.writable || self.volume.read_only {
            return Answer::refused(Refusal::ReadOnly);
        }
        match self.tokens.give(uid) {
            Some(token) => Answer {
                token,
                ..Answer::default()
            },
            None => Answer::refused(Refusal::Off),
        }
    }

    /// Gives up the client's latches on pages, and its locks if no latch is left. Returns how many of the pages it still has
    /// latched.
    fn give_up_latches(&self, handle: &Handle, first: u64, pages: u32, owner: u16) -> u32 {
        let file = &handle.file;
        self.absorb(file.ino());
        let (object, size) = (file.object(), file.size());
        let give_up = |pages: Range<u64>| -> u32 {
            let runs = file.layout().runs(pages);
            runs.map(|(slice, pages)| {
                let slice = self.volume.slice(slice);
                slice.give_up_latches(&object, pages, owner)
            })
            .sum()
        };
        let beyond = size.div_ceil(PAGE_BYTES);
        let end = first.saturating_add(u64::from(pages));
        let mut left = give_up(pages_to_check(first, pages, beyond));
        // A write beyond the end of file must first clear what an interrupted write left there.
        if end > beyond || first.saturating_add(1) >= beyond {
            let from = beyond.saturating_sub(1);
            left += give_up(from..beyond + u64::from(PAGES_MAX));
        }
        if left == 0
            && let Some(slot_file) = self.written_file(file.ino())
        {
            let (slot, bytes) = (self.slot(&slot_file), u64::from(pages) * PAGE_BYTES);
            let at = first.saturating_mul(PAGE_BYTES);
            if bytes > 0 && at < FILE_BYTES_MAX {
                slot.take_range_from(Segments::of(at, bytes), owner, OWNER_DAEMON);
            }
            if end > beyond || first.saturating_add(1) >= beyond {
                self.take_extend_lock_from(&slot_file, owner);
            }
        }
        left
    }

    /// Takes the extend lock from a client that interrupted its own write. Zeroes what that write left beyond the end of file.
    fn take_extend_lock_from(&self, slot_file: &SlotFile, owner: u16) {
        let slot = self.slot(slot_file);
        // As in `Slot::seize`. If a thread of the daemon holds the lock by now, that thread zeroes the bytes.
        let Some(held) = slot.extend_lock().take_from(owner, OWNER_DAEMON) else {
            return;
        };
        slot.raise_truncation_count();
        self.clear_seized(slot_file);
        slot.extend_lock().unlock(held);
    }

    fn answer_grant<R>(self: &Arc<Self>, handle: &Arc<Handle>, write: bool, reply: R)
    where
        R: FnOnce(Answer) + Send + 'static,
    {
        let file = &handle.file;
        let granted = loop {
            // Every write has to clear set-id bits and capabilities, and only a write through the kernel does.
            if write && !matches!(self.volume.fs.has_privileges(file.ino()), Ok(false)) {
                break Err(Refusal::SetId);
            }
            self.await_changes(file.ino());
            match self.grant_slot(handle, &mut handle.grants.lock(), write) {
                // The mode changed after it was checked, or another change began.
                Err(Refusal::SetId | Refusal::Busy) => {}
                granted => break granted,
            }
        };
        match granted {
            Ok((answer, None)) => reply(answer),
            Ok((answer, Some(first))) => self.begin_inline_writes(first, move || reply(answer)),
            Err(refusal) => reply(Answer::refused(refusal)),
        }
    }

    /// Ends inline access of the file, which the program is about to map through this handle.
    fn answer_mapped<R>(self: &Arc<Self>, handle: &Arc<Handle>, reply: R)
    where
        R: FnOnce(Answer) + Send + 'static,
    {
        let slot_file = self.map(handle);
        let weak = Arc::downgrade(self);
        // Posts the job even if no inline access has to end. Jobs run one after the other, so the jobs that earlier requests
        // posted for this file are complete before this reply.
        self.later(move || {
            if let (Some(slot_file), Some(fast)) = (slot_file, weak.upgrade()) {
                fast.revoke_inline_writes(&slot_file.file);
                fast.drop_kernel_pages(&slot_file.file);
            }
            reply(Answer::default());
        });
    }
}

/// Returns which of the named pages an interrupted write may hold: none after the page that follows the end of file, and at most
/// as many as one call can touch, because a thread that answers requests checks each.
fn pages_to_check(first: u64, pages: u32, beyond: u64) -> Range<u64> {
    let pages = u64::from(pages).min(CALL_PAGES_MAX);
    first..first.saturating_add(pages).min(beyond + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_all_pages_of_a_large_file_checks_those_of_one_call() {
        let beyond = 1 << 40;
        assert_eq!(pages_to_check(7, u32::MAX, beyond), 7..7 + CALL_PAGES_MAX);
        assert_eq!(pages_to_check(7, 2, beyond), 7..9);
        assert_eq!(pages_to_check(7, u32::MAX, 9), 7..10);
        assert!(pages_to_check(u64::MAX, u32::MAX, 9).is_empty());
    }
}
