//! The state of an fd, and how an unknown fd gets a description.

use jericho_sys::files;

use super::grant::{GrantedSlot, ask_for_slot, flags_of};
use super::size_limit::size_limit_changed;
use crate::descriptors::{self, Facts, FdState, FileIdentity, OpenFd, SEEK_CUR};
use crate::session::report::{self, Reason};
use crate::session::{Session, devices};

/// Attempts to look an fd up, which fail when its state changes meanwhile.
const LOOKUPS: u32 = 3;

/// Returns the state of an fd, unless it takes the kernel path.
#[inline]
pub(super) fn fast_state(fd: i32) -> Option<FdState> {
    descriptors::state(fd).filter(|state| *state != FdState::Kernel)
}

/// Returns the description of an fd that may go inline. Looks an unknown fd up.
#[inline]
pub(super) fn described(fd: i32, state: FdState) -> Option<OpenFd> {
    match state {
        FdState::Described(open) => Some(open),
        FdState::Kernel => None,
        FdState::Unknown { opened, word } => described_unknown(fd, opened, word),
    }
}

#[cold]
fn described_unknown(fd: i32, opened: bool, word: u64) -> Option<OpenFd> {
    let (mut opened, mut word) = (opened, word);
    for _ in 0..LOOKUPS {
        classify(fd, opened, word)?;
        match descriptors::state(fd)? {
            FdState::Kernel => return None,
            FdState::Described(open) => return Some(open),
            FdState::Unknown { opened: o, word: w } => (opened, word) = (o, w),
        }
    }
    None
}

/// Looks an fd up, and gives it a description or puts it on the kernel path. Returns `None` when that is not possible now.
#[cold]
fn classify(fd: i32, opened: bool, word: u64) -> Option<()> {
    let kernel = |why: Option<Reason>| {
        why.into_iter().for_each(report::to_kernel);
        descriptors::set_kernel(fd, word);
        Some(())
    };
    if opened && descriptors::is_in_use(word) {
        return None;
    }
    let stat = files::identify(fd).ok()?;
    if !devices::is_ours(stat.device) {
        return kernel(None);
    }
    if !stat.is_regular {
        return kernel(Some(Reason::NotRegular));
    }
    let mode = files::mode(fd).ok()?;
    if mode.direct || mode.path {
        return kernel(Some(Reason::Direct));
    }
    let (session, slot) = match ask_for_slot(fd, stat.device, flags_of(&mode)) {
        Ok(granted) => granted,
        Err(why) => return kernel(Some(why)),
    };
    let identity = FileIdentity::from(&stat);
    if describe(fd, opened, word, session, &slot, &mode, identity).is_none() {
        // The table is full, or the fd's word has changed. A changed word stays as it is.
        kernel(Some(Reason::Table))?;
    }
    Some(())
}

/// Gives an unknown fd a description, if its word is still `word`: no call that moves the kernel's offset has begun since that
/// word was loaded. Returns `None` otherwise, and when no description is free.
pub(super) fn describe(
    fd: i32,
    opened: bool,
    word: u64,
    session: &Session,
    slot: &GrantedSlot,
    mode: &files::Mode,
    identity: FileIdentity,
) -> Option<OpenFd> {
    // Another process may have changed the limit.
    size_limit_changed();
    let facts = Facts {
        session: session.index,
        slot: slot.slot,
        slot_generation: slot.generation,
        object: slot.object,
        flags: flags_of(mode),
    };
    let offset = match opened.then(|| files::lseek(fd, 0, SEEK_CUR)) {
        Some(Ok(offset)) => u64::try_from(offset).ok(),
        _ => None,
    };
    let open = descriptors::describe(fd, word, &facts, identity, offset)?;
    report::descriptor();
    Some(open)
}
