//! Asks the daemon for the slot of a file.

use jericho_shm::{Call, ClientThread};
use jericho_sys::files;

use crate::descriptors::{APPEND, READ, SYNC, WRITE};
use crate::session::report::Reason;
use crate::session::{self, Session, ask};
use crate::thread;

/// A slot that the daemon has granted for a file.
pub(super) struct GrantedSlot {
    pub slot: u32,
    pub generation: u32,
    pub object: u64,
}

/// Asks the daemon of a mount for a slot for an open file, and attaches to that daemon. `flags`: the file's, as in its
/// description. Fails with the reason why the file takes the kernel path.
pub(super) fn ask_for_slot(
    fd: i32,
    device: u64,
    flags: u32,
) -> std::result::Result<(&'static Session, GrantedSlot), Reason> {
    let write = flags & (WRITE | SYNC) == WRITE;
    let thread = client_thread(session::of_device(device));
    let answer = ask(fd, Call::Fast { write, thread }).ok();
    let answer = answer.filter(|answer| answer.status == 0);
    let answer = answer.ok_or(Reason::Refused)?;
    // The first write asks for write access to the segments.
    let session = session::attach(answer.instance).map_err(|_| Reason::Attach)?;
    session.serves(device);
    let slot = GrantedSlot {
        slot: answer.slot,
        generation: answer.generation,
        object: answer.object,
    };
    Ok((session, slot))
}

/// Returns the place where the daemon finds the wishes of the calling thread. The thread must be making an inline call. Returns
/// `None` without a session, or when the thread has no block of its own.
fn client_thread(session: Option<&Session>) -> Option<ClientThread> {
    let session = session?;
    let block = thread::current(|thread| thread.own_block(session))?;
    Some(ClientThread {
        owner: session.owner,
        block,
        instance: session.instance,
    })
}

pub(super) fn flags_of(mode: &files::Mode) -> u32 {
    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
    flag(mode.read, READ)
        | flag(mode.write, WRITE)
        | flag(mode.append, APPEND)
        | flag(mode.sync, SYNC)
}
