//! Estimates the round-trip time of a channel: rules 3 and 4 of a channel in `docs/formats/wire.md`.

use std::time::Duration;

use crate::received::ACK_DELAY;

/// The least and the greatest probe time.
const PROBE_MIN: Duration = Duration::from_millis(1);
const PROBE_MAX: Duration = Duration::from_millis(200);
/// Least part of the probe time for the variation.
const VARIATION_MIN: Duration = Duration::from_micros(250);
/// Round-trip time before the first measurement.
const INITIAL: Duration = Duration::from_millis(1);
/// Longest delay in queues that is harmless (RFC 8289: TARGET).
const QUEUEING: Duration = Duration::from_millis(5);

/// A smoothed round-trip time and its variation (RFC 6298, section 2).
#[derive(Debug)]
pub(crate) struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
    latest: Duration,
    /// The least one: without queues.
    least: Option<Duration>,
    /// The least one since the last `has_standing_queue`.
    least_since: Option<Duration>,
}

impl RoundTrip {
    /// Returns an estimate without a measurement.
    pub fn new() -> RoundTrip {
        RoundTrip {
            smoothed: None,
            variation: INITIAL / 2,
            latest: INITIAL,
            least: None,
            least_since: None,
        }
    }

    /// Takes a measurement.
    pub fn measured(&mut self, sample: Duration) {
        self.latest = sample;
        for least in [&mut self.least, &mut self.least_since] {
            *least = Some(least.map_or(sample, |other| other.min(sample)));
        }
        let Some(smoothed) = self.smoothed else {
            (self.smoothed, self.variation) = (Some(sample), sample / 2);
            return;
        };
        self.variation = (self.variation * 3 + smoothed.abs_diff(sample)) / 4;
        self.smoothed = Some((smoothed * 7 + sample) / 8);
    }

    /// Returns the smoothed time.
    pub fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or(INITIAL)
    }

    /// Returns the age at which a frame is lost, if a later one is acknowledged.
    pub fn loss_age(&self) -> Duration {
        self.smoothed().max(self.latest) * 9 / 8
    }

    /// Returns whether a queue stood on the way since the last call: no frame took as little time as without one (RFC 8289, section 3). `waiting`: age of
    /// the oldest frame in flight. It counts if nothing was measured.
    pub fn has_standing_queue(&mut self, waiting: Option<Duration>) -> bool {
        let Some(time) = self.least_since.take().or(waiting) else {
            return false;
        };
        let without = self.least.unwrap_or(INITIAL);
        time > without + without.max(QUEUEING)
    }

    /// Returns how long to wait for an acknowledgement after `probes` probes without an answer.
    pub fn probe_time(&self, probes: u32) -> Duration {
        let variation = (self.variation * 4).max(VARIATION_MIN);
        let first = (self.smoothed() + variation + ACK_DELAY).max(PROBE_MIN);
        first
            .saturating_mul(1 << probes.min(16))
            .min(PROBE_MAX.max(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_queue_stands_if_no_frame_came_through_without_delay() {
        let mut trip = RoundTrip::new();
        assert!(!trip.has_standing_queue(None));
        trip.measured(ms(1));
        trip.measured(ms(80));
        assert!(!trip.has_standing_queue(None));
        trip.measured(ms(80));
        trip.measured(ms(7));
        assert!(trip.has_standing_queue(None));
        // Nothing was measured: an idle channel, then one whose frames are stuck.
        assert!(!trip.has_standing_queue(None));
        assert!(!trip.has_standing_queue(Some(ms(6))));
        assert!(trip.has_standing_queue(Some(ms(100))));
        // A frame has come through meanwhile.
        trip.measured(ms(2));
        assert!(!trip.has_standing_queue(Some(ms(100))));
    }

    /// On a long way, a few milliseconds more are no queue.
    #[test]
    fn the_delay_that_counts_grows_with_the_way() {
        let mut trip = RoundTrip::new();
        trip.measured(ms(40));
        trip.has_standing_queue(None);
        trip.measured(ms(70));
        assert!(!trip.has_standing_queue(None));
        trip.measured(ms(81));
        assert!(trip.has_standing_queue(None));
    }
}
