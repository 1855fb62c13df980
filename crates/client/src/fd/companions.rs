//! Asks the daemon to move a thread's companions, because only the daemon changes the CPUs of other threads.

use std::sync::atomic::Ordering::Relaxed;

use jericho_shm::{Answer, Call, Refusal};

use crate::descriptors::OpenFd;
use crate::session::{Session, ask};
use crate::thread::Thread;

/// Asks for the companions of the calling thread, if that is due.
#[inline]
pub(super) fn bring_if_due(thread: &Thread, open: &OpenFd, session: &Session) {
    if let Some((node, always)) = thread.migration.take_companions() {
        bring(node, always, session, |call| ask(open.fd, call).ok());
    }
}

/// Asks by `ask`, unless the daemon of the session has refused to move companions for good, or numbers the nodes otherwise than this process does.
#[cold]
fn bring(node: u16, always: bool, session: &Session, ask: impl FnOnce(Call) -> Option<Answer>) {
    if !session.may_migrate || session.refuses_companions.load(Relaxed) {
        return;
    }
    let call = Call::Companions {
        node,
        always,
        owner: session.owner,
        instance: session.instance,
    };
    // If the request fails, they stay where they are.
    if ask(call).is_some_and(|answer| answer.status == Refusal::Companions as u32) {
        session.refuses_companions.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use jericho_shm::{Area, Control, Geometry, Slots};

    use super::*;
    use crate::session;

    #[test]
    fn a_daemon_that_refuses_is_not_asked_again_nor_one_with_other_nodes() {
        let control =
            Control::create("test", &[(Geometry::for_frames(8), 0)], 4, &[0; 64], 42).unwrap();
        let slots = Slots::create("test", 4).unwrap();
        let area = Area::create("test", 2).unwrap();
        let mark = session::mark().unwrap();
        let mut session = Session::new(0, mark, control, slots, area, vec![]);
        let asked = Cell::new(0);
        let bring = |session: &Session, answer: Option<Answer>| {
            bring(0, false, session, |_| {
                asked.set(asked.get() + 1);
                answer
            });
        };
        session.may_migrate = false;
        bring(&session, Some(Answer::default()));
        assert_eq!(asked.get(), 0);
        session.may_migrate = true;
        bring(&session, Some(Answer::default()));
        bring(&session, Some(Answer::refused(Refusal::Busy)));
        bring(&session, None);
        assert_eq!(asked.get(), 3);
        bring(&session, Some(Answer::refused(Refusal::Companions)));
        bring(&session, Some(Answer::default()));
        assert_eq!(asked.get(), 4);
    }
}
