//! A wish: the daemon grants a file its slot together with an ordinary read or write, so that the library makes no request for
//! the slot.
//!
//! The protocol and its interleavings: docs/formats/shm.md, *Wishes*. A wish without an answer costs nothing more: a later call
//! asks with the ioctl.

use std::sync::atomic::{AtomicU32, Ordering};

use jericho_sys::files;

use super::grant::GrantedSlot;
use super::reserve::{WrittenTo, described_with_write};
use super::state::describe;
use crate::descriptors::{self, FdState, FileIdentity};
use crate::session::{self, Session};
use crate::thread::{self, Doing};

/// Number of this process's last wish.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A wish for the file of an fd.
pub(super) struct FdWish {
    session: &'static Session,
    block: u32,
    wish: jericho_shm::Wish,
    mode: files::Mode,
    identity: FileIdentity,
}

impl FdWish {
    /// Prepares a wish. `reserve`: the call is a write, and other writes are likely to follow. Returns `None` when the daemon
    /// could not answer the wish, or the fd takes the kernel path for good.
    pub fn new(fd: i32, reserve: bool) -> Option<FdWish> {
        #[cfg(test)]
        if !tests::ARE_LEFT.get() {
            return None;
        }
        let stat = files::identify(fd).ok()?;
        let session = session::of_device(stat.device)?;
        let mode = files::mode(fd).ok()?;
        if !stat.is_regular || mode.direct || mode.path {
            return None;
        }
        // Fails in a signal handler that has interrupted an inline call: that call may be about to take a block.
        let block = thread::enter(Doing::Reading, |thread| thread.own_block(session))??;
        Some(FdWish {
            session,
            block,
            wish: jericho_shm::Wish {
                number: next_number(),
                ino: stat.inode,
                write: mode.write && !mode.sync,
                reserve: reserve && session::find(session.instance, true).is_some(),
            },
            mode,
            identity: FileIdentity::from(&stat),
        })
    }

    /// Leaves the wish for the thread's next request.
    pub fn leave(&self) {
        self.session.area.wishing(self.block).leave(self.wish);
    }

    /// Returns the object of the granted slot, if the slot is still that of the grant.
    fn object_of(&self, granted: &jericho_shm::Granted) -> Option<u64> {
        let info = self.session.control.slot(granted.slot)?;
        // The object comes first: the slot's next object is there only after the generation has changed.
        let object = info.object();
        let is_same = info.word().generation() == granted.generation;
        (is_same && object != 0).then_some(object)
    }

    /// Ends the wish after the call. Gives the fd a description if the daemon has granted the file a slot, and the fd still
    /// refers to the same open file as when its word was `word`.
    pub fn end(&self, fd: i32, word: u64, written: WrittenTo) {
        let granted = self.session.area.wishing(self.block).end(self.wish);
        let (Some(granted), Some(FdState::Unknown { opened, word: now })) =
            (granted, descriptors::state(fd))
        else {
            return;
        };
        if !descriptors::is_same_unknown(now, word) || (opened && descriptors::is_in_use(now)) {
            return;
        }
        let Some(object) = self.object_of(&granted) else {
            return;
        };
        let slot = GrantedSlot {
            slot: granted.slot,
            generation: granted.generation,
            object,
        };
        let session = session::find(self.session.instance, self.wish.write).unwrap_or(self.session);
        thread::enter(Doing::Reading, |_| {
            let open = describe(fd, opened, now, session, &slot, &self.mode, self.identity);
            if let Some(open) = open {
                described_with_write(&open, written, granted.reserved_to);
            }
        });
    }
}

fn next_number() -> u32 {
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if number != 0 {
            return number;
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Unless a test sets this, no thread leaves wishes: all daemons of tests have one device number.
        pub static ARE_LEFT: Cell<bool> = const { Cell::new(false) };
    }
}
