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

/// A smoothed round-trip time and its variation (RFC 6298, section 2).
#[derive(Debug)]
pub(crate) struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
    latest: Duration,
}

impl RoundTrip {
    /// Returns an estimate without a measurement.
    pub fn new() -> RoundTrip {
        RoundTrip {
            smoothed: None,
            variation: INITIAL / 2,
            latest: INITIAL,
        }
    }

    /// Takes a measurement.
    pub fn measured(&mut self, sample: Duration) {
        self.latest = sample;
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

    /// Returns how long to wait for an acknowledgement after `probes` probes without an answer.
    pub fn probe_time(&self, probes: u32) -> Duration {
        let variation = (self.variation * 4).max(VARIATION_MIN);
        let first = (self.smoothed() + variation + ACK_DELAY).max(PROBE_MIN);
        first
            .saturating_mul(1 << probes.min(16))
            .min(PROBE_MAX.max(first))
    }
}
