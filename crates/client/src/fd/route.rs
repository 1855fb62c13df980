//! From a description to its file in shared memory.

use jericho_sys::files;

use super::grant::ask_for_slot;
use super::kernel_path::give_up;
use crate::descriptors::{self, Facts, FileIdentity, OpenFd, TO_KERNEL};
use crate::session::report::Reason;
use crate::session::{self, InlineFile, Session, Why};

/// Returns the facts of a description; `None` when it takes the kernel path or is gone.
#[inline]
pub(super) fn facts(open: &OpenFd) -> Option<Facts> {
    open.facts().filter(|facts| facts.flags & TO_KERNEL == 0)
}

/// The way to access a file, after the lookup of its slot.
pub(super) enum Route {
    /// Inline.
    Inline(&'static Session, InlineFile<'static>),
    /// Through the kernel for this call.
    Kernel(Why),
    /// By the ordinary call: the fd refers to another file, or takes the kernel path for good.
    Ordinary,
}

pub(super) fn route(open: &OpenFd, facts: &Facts) -> Route {
    match session::get(facts.session) {
        Some(session) => match file(session, facts) {
            Ok(file) => Route::Inline(session, file),
            Err(why) => route_again(open, facts, why),
        },
        None => route_again(open, facts, Why::Stale),
    }
}

#[inline]
pub(super) fn file(
    session: &'static Session,
    facts: &Facts,
) -> std::result::Result<InlineFile<'static>, Why> {
    InlineFile::of(session, facts.slot, facts.slot_generation, facts.object)
}

/// Asks for a new slot: the slot no longer belongs to the file, or this process is a child and the session is its parent's.
#[cold]
fn route_again(open: &OpenFd, facts: &Facts, why: Why) -> Route {
    if let Some(session) = session::get(facts.session) {
        if session.area.is_revoked() {
            give_up(open, Reason::Revoked);
            return Route::Ordinary;
        }
        if why != Why::Stale {
            return Route::Kernel(why);
        }
    }
    // The fd may refer to another file now.
    let now = files::fstat(open.fd).map(|stat| FileIdentity::from(&stat));
    let Some(now) = now.ok().filter(|now| open.identity() == Some(*now)) else {
        descriptors::disown(open);
        return Route::Ordinary;
    };
    let granted = match ask_for_slot(open.fd, now.device, facts.flags) {
        Ok((_, slot)) if slot.object != facts.object => Err(Reason::Refused),
        granted => granted,
    };
    let (session, slot) = match granted {
        Ok(granted) => granted,
        Err(why) => {
            give_up(open, why);
            return Route::Ordinary;
        }
    };
    let facts = Facts {
        session: session.index,
        slot: slot.slot,
        slot_generation: slot.generation,
        ..*facts
    };
    open.set_slot(&facts);
    match file(session, &facts) {
        Ok(file) => Route::Inline(session, file),
        Err(why) => Route::Kernel(why),
    }
}
