//! The extend lock of a slot, as the daemon holds it. All threads of the daemon hold it together, because clients see the daemon
//! as one owner.

use std::time::Duration;

use jericho_cache::OWNER_DAEMON;
use jericho_shm::{Holding, Seized, Slot};
use parking_lot::{Condvar, Mutex};

/// Longest time that a thread of the daemon waits for another to release the lock. Then it proceeds without waiting: lower layers
/// keep the changes of both apart, and a thread that waits for a device must not stop all others.
const WAIT_MAX: Duration = Duration::from_millis(20);

/// The threads of the daemon that hold a slot's extend lock.
#[derive(Default)]
pub(crate) struct ExtendHolders {
    holders: Mutex<Holders>,
    given_back: Condvar,
}

#[derive(Default)]
struct Holders {
    count: u32,
    held: Option<Holding>,
    /// The holding of the client that lends the lock.
    lent: Option<Holding>,
}

impl ExtendHolders {
    /// Takes the extend lock, if necessary from a client that does not release it. Borrows it when `lends` says that the holding
    /// client lends it. Returns true when it was taken from a client in the middle of a write: the caller zeroes what that write
    /// left beyond the end of file (`Fs::clear_behind_end`).
    #[must_use]
    pub fn hold(&self, slot: &Slot, lends: impl FnMut(Holding) -> bool) -> bool {
        let mut holders = self.holders.lock();
        if holders.count > 0 {
            self.given_back
                .wait_while_for(&mut holders, |h| h.count > 0, WAIT_MAX);
        }
        let mut taken_away = false;
        if holders.count == 0 {
            let (held, seized) = slot.seize(OWNER_DAEMON, lends);
            holders.held = Some(held);
            match seized {
                Seized::Free => {}
                Seized::Lent(lent) => holders.lent = Some(lent),
                Seized::TakenAway => taken_away = true,
            }
        }
        holders.count += 1;
        taken_away
    }

    /// Gives back what `hold` took, in any thread. `is_lent` tells whether a client still lends the lock.
    pub fn give_back(&self, slot: &Slot, is_lent: impl FnOnce(Holding) -> bool) {
        let mut holders = self.holders.lock();
        holders.count -= 1;
        if holders.count == 0 {
            let (held, lent) = (holders.held.take(), holders.lent.take());
            match (held, lent) {
                (Some(held), Some(lent)) => slot.return_extend(held, lent, is_lent),
                (Some(held), None) => {
                    slot.extend_lock().unlock(held);
                }
                (None, _) => {}
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
    fn a_client_gets_the_lock_only_after_the_last_thread_of_the_daemon_has_released_it() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let extend = ExtendHolders::default();
        assert!(!extend.hold(slot, |_| false));
        assert!(!extend.hold(slot, |_| false));
        extend.give_back(slot, |_| false);
        assert_eq!(slot.extend_lock().try_lock(7), None);
        extend.give_back(slot, |_| false);
        assert!(slot.extend_lock().try_lock(7).is_some());
    }

    #[test]
    fn a_client_that_keeps_the_lock_loses_it_and_its_size() {
        let slots = Slots::create("test", 1).unwrap();
        let slot = slots.slot(0).unwrap();
        let held = slot.extend_lock().lock(7).unwrap();
        let seen = slot.size();
        let extend = ExtendHolders::default();
        assert!(extend.hold(slot, |_| false));
        assert!(!slot.extend_lock().is_held(held));
        assert!(!slot.extend(seen, 10));
        extend.give_back(slot, |_| false);
        assert!(
            !slot.extend_lock().unlock(held),
            "the client has lost the lock"
        );
        assert!(slot.extend_lock().try_lock(8).is_some());
    }
}
