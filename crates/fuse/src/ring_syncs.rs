//! Which syncs a thread of the FUSE ring performs itself.
//!
//! A sync by a helper costs two futex calls and two wake-ups. A sync by the thread itself costs none of these, but every other request of
//! the thread's queues waits until it has ended. So the thread performs a sync itself if no other request of its queues is in progress or
//! waits, unless the syncs that it has performed itself show that it should not:
//!
//! - Requests came during the last one: other programs use the queues.
//! - The last `LONG_MAX` took long: the device is slow, so a wake-up more makes no difference, and a request that comes would wait long.
//!
//! A volume on several devices leaves all syncs to helpers: a device that does not answer must not delay requests for the others.
//!
//! In the first two cases helpers perform the next `HELPED_MIN` syncs. Then the thread tries again. If that fails soon, helpers perform four times as
//! many, so the more often others come, the more rarely one of them waits.

use std::time::Duration;

/// Number of syncs that helpers perform after one that the thread should not have performed itself.
const HELPED_MIN: u32 = 32;
const HELPED_MAX: u32 = 2048;

/// A sync that takes longer belongs to a helper: about a hundred times the cost of the hand-over.
const LONG: Duration = Duration::from_millis(5);

/// Number of long syncs, one after the other, that show a slow device. A single one may be an accident.
const LONG_MAX: u32 = 3;

/// The recent syncs of a thread.
#[derive(Default)]
pub(crate) struct OwnSyncs {
    /// Helpers perform all syncs.
    never: bool,
    /// Number of syncs that helpers still have to perform.
    helped: u32,
    /// Number of syncs that helpers had to perform the last time; 0 if that is long ago.
    helped_last: u32,
    /// Number of syncs that the thread has performed since.
    own: u32,
    /// Number of long syncs since the last one that was not long.
    long: u32,
}

impl OwnSyncs {
    /// Takes the number of the volume's devices.
    pub(crate) fn has_devices(&mut self, devices: usize) {
        self.never = devices > 1;
    }

    /// Returns whether the thread may perform the next sync itself.
    pub(crate) fn next(&mut self) -> bool {
        let may = self.helped == 0 && !self.never;
        self.helped = self.helped.saturating_sub(1);
        may
    }

    /// Records that the thread has performed a sync. `has_kept_waiting`: requests came meanwhile.
    pub(crate) fn ended(&mut self, took: Duration, has_kept_waiting: bool) {
        self.long = match took > LONG {
            true => self.long.saturating_add(1),
            false => 0,
        };
        if has_kept_waiting || self.long >= LONG_MAX {
            self.helped = (self.helped_last * 4).clamp(HELPED_MIN, HELPED_MAX);
            (self.helped_last, self.own) = (self.helped, 0);
            return;
        }
        self.own += 1;
        if self.own == HELPED_MIN {
            (self.helped_last, self.own) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = LONG;
    const TOO_LONG: Duration = Duration::from_millis(6);

    /// Returns how many syncs helpers perform from now on.
    fn helped(syncs: &mut OwnSyncs) -> u32 {
        (0..).take_while(|_| !syncs.next()).count() as u32
    }

    #[test]
    fn helpers_sync_on_volumes_of_several_devices() {
        let mut syncs = OwnSyncs::default();
        syncs.has_devices(1);
        assert!(syncs.next());
        let mut several = syncs;
        several.has_devices(2);
        assert!((0..1000).all(|_| !several.next()));
    }

    #[test]
    fn helpers_sync_for_a_while_after_a_sync_that_kept_others_waiting() {
        let mut syncs = OwnSyncs::default();
        for _ in 0..3 {
            assert_eq!(helped(&mut syncs), 0);
            syncs.ended(SHORT, false);
        }
        syncs.ended(SHORT, true);
        assert_eq!(helped(&mut syncs), HELPED_MIN);
        syncs.ended(SHORT, false);
        assert_eq!(helped(&mut syncs), 0);
    }

    #[test]
    fn helpers_sync_longer_the_more_often_others_come() {
        let mut syncs = OwnSyncs::default();
        for expected in [32, 128, 512, 2048, 2048] {
            syncs.ended(SHORT, false);
            syncs.ended(SHORT, true);
            assert_eq!(helped(&mut syncs), expected);
        }
        for _ in 0..HELPED_MIN {
            assert_eq!(helped(&mut syncs), 0);
            syncs.ended(SHORT, false);
        }
        syncs.ended(SHORT, true);
        assert_eq!(helped(&mut syncs), HELPED_MIN);
    }

    #[test]
    fn helpers_sync_while_the_device_is_slow() {
        let mut syncs = OwnSyncs::default();
        for took in [TOO_LONG, SHORT, TOO_LONG, TOO_LONG] {
            assert_eq!(helped(&mut syncs), 0);
            syncs.ended(took, false);
        }
        for expected in [32, 128, 512] {
            syncs.ended(TOO_LONG, false);
            assert_eq!(helped(&mut syncs), expected);
        }
        syncs.ended(SHORT, false);
        syncs.ended(TOO_LONG, false);
        assert_eq!(helped(&mut syncs), 0);
    }
}
