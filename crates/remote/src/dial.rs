//! How an initiator gets a channel on one of its links: HELLO, then HANDSHAKE. Rules 14 and 15 of `docs/formats/wire.md`.
//!
//! States: `Idle` ── `seek` ──> `Seeking` (HELLO each second, more rarely while another link works) ── OFFER (`offered`) ──> `Asking` (HANDSHAKE each 100 ms) ── ACCEPT ──> `Idle`.
//! `Asking` without an answer goes back to `Seeking`.

use std::time::Duration;

use jericho_format::wire::{Mac, NAME_BYTES, smaller_payload};

use crate::Time;
use crate::key::Security;

/// Least and greatest time between two HELLOs.
const HELLO_INTERVAL: Duration = Duration::from_secs(1);
const HELLO_INTERVAL_MAX: Duration = Duration::from_secs(32);
/// Time between two HANDSHAKEs.
const ASK_INTERVAL: Duration = Duration::from_millis(100);
/// HANDSHAKEs of one size.
const ATTEMPTS: u32 = 3;

/// An attempt to get a channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking {
    /// What the target has offered.
    pub offered: Offered,
    /// This side's index of the new channel.
    pub index: u32,
    pub payload_max: u16,
    /// The index in the HELLO that was answered.
    hello: u32,
    attempts: u32,
    next: Time,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Dial {
    Idle,
    Seeking {
        index: u32,
        next: Time,
        interval: Duration,
    },
    Asking(Asking),
}

/// The parts of an OFFER that the initiator uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    /// Its sender.
    pub peer: Mac,
    pub cookie: [u8; 16],
    pub security: Security,
    /// Instance of the target, and the name of its host.
    pub target: [u8; 16],
    pub host: [u8; NAME_BYTES],
}

/// A frame that must be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sends {
    Hello { index: u32 },
    Handshake(Asking),
}

impl Dial {
    /// Begins to look for a target, at once, with a new index. Does nothing if the link is not idle.
    pub fn seek(&mut self, now: Time, index: impl FnOnce() -> u32) {
        if let Dial::Idle = self {
            *self = seeking(index(), now);
        }
    }

    /// Takes an OFFER. `index` is for the new channel; the first HANDSHAKE is sent at `next`. Does nothing if the link is
    /// not seeking.
    pub fn offered(&mut self, next: Time, offered: Offered, index: u32, payload_max: u16) {
        if let Dial::Seeking { index: hello, .. } = *self {
            *self = Dial::Asking(Asking {
                offered,
                index,
                payload_max,
                hello,
                attempts: 0,
                next,
            });
        }
    }

    /// Handles *waiting*: counts the attempts from the start again.
    pub fn waits(&mut self, now: Time) {
        if let Dial::Asking(asking) = self {
            asking.attempts = 0;
            asking.next = now + ASK_INTERVAL;
        }
    }

    /// Returns the index that a HANDSHAKE proposed.
    pub fn asked_index(&self) -> Option<u32> {
        match self {
            Dial::Asking(asking) => Some(asking.index),
            _ => None,
        }
    }

    /// Returns the index in the last HELLO, if an OFFER may still answer it.
    pub fn hello_index(&self) -> Option<u32> {
        match self {
            Dial::Seeking { index, .. } => Some(*index),
            Dial::Asking(asking) => Some(asking.hello),
            Dial::Idle => None,
        }
    }

    /// Returns when `on_timer` has something to do.
    pub fn timer(&self) -> Option<Time> {
        match self {
            Dial::Idle => None,
            Dial::Seeking { next, .. } | Dial::Asking(Asking { next, .. }) => Some(*next),
        }
    }

    /// Returns what must be sent now. `index` gives a new index, if HELLOs begin again. If the session `is_served` by another link,
    /// HELLOs become rare: this link may lead nowhere.
    pub fn on_timer(
        &mut self,
        now: Time,
        index: impl FnOnce() -> u32,
        is_served: bool,
    ) -> Option<Sends> {
        if let Dial::Asking(asking) = self
            && asking.next <= now
            && asking.attempts == ATTEMPTS
        {
            asking.attempts = 0;
            match smaller_payload(asking.payload_max) {
                // A target that has taken the larger size knows its index as a channel with that size.
                Some(smaller) => (asking.payload_max, asking.index) = (smaller, index()),
                None => *self = seeking(index(), now),
            }
        }
        match self {
            Dial::Seeking {
                index,
                next,
                interval,
            } if *next <= now => {
                *interval = match is_served {
                    true => (*interval * 2).min(HELLO_INTERVAL_MAX),
                    false => HELLO_INTERVAL,
                };
                *next = now + *interval;
                Some(Sends::Hello { index: *index })
            }
            Dial::Asking(asking) if asking.next <= now => {
                asking.attempts += 1;
                asking.next = now + ASK_INTERVAL;
                Some(Sends::Handshake(*asking))
            }
            _ => None,
        }
    }
}

fn seeking(index: u32, next: Time) -> Dial {
    Dial::Seeking {
        index,
        next,
        interval: HELLO_INTERVAL,
    }
}
