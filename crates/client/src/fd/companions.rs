//! Asks the daemon to move a thread's companions, because only the daemon changes the CPUs of other threads.

use jericho_shm::Call;

use crate::descriptors::OpenFd;
use crate::session::{Session, ask};
use crate::thread::Thread;

/// Asks for the companions of the calling thread, if that is due.
#[inline]
pub(super) fn bring_if_due(thread: &Thread, open: &OpenFd, session: &Session) {
    if let Some((node, always)) = thread.migration.take_companions() {
        bring(node, always, open, session);
    }
}

#[cold]
fn bring(node: u16, always: bool, open: &OpenFd, session: &Session) {
    let call = Call::Companions {
        node,
        always,
        owner: session.owner,
        instance: session.instance,
    };
    // If the request fails, they stay where they are.
    let _ = ask(open.fd, call);
}
