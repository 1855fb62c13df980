//! The extend lock of a slot as the daemon holds it: all its threads together, as towards clients they are one.

use std::time::Duration;

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{Holding, Slot};
use parking_lot::{Condvar, Mutex};

/// For how long a thread of the daemon lets another finish. Then it goes on beside it: what the two do to the
/// file is kept apart below, and one that waits for a device must not stop all others.
const PATIENCE: Duration = Duration::from_millis(20);

/// Who of the daemon's threads holds a slot's extend lock.
#[derive(Default)]
pub(crate) struct Extend {
    holders: Mutex<Holders>,
    given_back: Condvar,
}

#[derive(Default)]
struct Holders {
    count: u32,
    held: Option<Holding>,
}

impl Extend {
    /// Takes the extend lock, if necessary from a client that does not release it. Returns true when it was taken from a
    /// client in the middle of a write: the caller zeroes what that write left beyond the end of file
    /// (`Fs::clear_behind_end`).
    #[must_use]
    pub fn hold(&self, slot: &Slot) -> bool {
        let mut holders = self.holders.lock();
        if holders.count > 0 {
            self.given_back
                .wait_while_for(&mut holders, |h| h.count > 0, PATIENCE);
        }
        let mut taken_away = false;
        if holders.count == 0 {
            let (held, seized) = slot.seize(OWNER_DAEMON);
            holders.held = Some(held);
            taken_away = seized;
        }
        holders.count += 1;
        taken_away
    }

    /// Gives back what `hold` took, in any thread.
    pub fn give_back(&self, slot: &Slot) {
        let mut holders = self.holders.lock();
        holders.count -= 1;
        if holders.count == 0 {
            if let Some(held) = holders.held.take() {
                slot.extend_lock().unlock(held);
            }
            self.given_back.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use jericho_shm::Slots;

    use super::*;

    #[test]
    fn a_client_gets_the_lock_only_when_the_last_thread_of_the_daemon_has_given_it_back() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let extend = Extend::default();
        assert!(!extend.hold(slot));
        assert!(!extend.hold(slot));
        extend.give_back(slot);
        assert_eq!(slot.extend_lock().try_lock(7), None);
        extend.give_back(slot);
        assert!(slot.extend_lock().try_lock(7).is_some());
    }

    #[test]
    fn a_client_that_keeps_the_lock_loses_it_and_its_size() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let held = slot.extend_lock().lock(7).unwrap();
        let seen = slot.size();
        let extend = Extend::default();
        assert!(extend.hold(slot));
        assert!(!slot.extend_lock().is_held(held));
        assert!(!slot.extend(seen, 10));
        extend.give_back(slot);
        assert!(!slot.extend_lock().unlock(held), "it is not the client's");
        assert!(slot.extend_lock().try_lock(8).is_some());
    }
}
