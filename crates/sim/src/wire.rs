//! A simulated wire: frames between endpoints on several links, with seeded loss, repetition, damage and delay.

use std::collections::BTreeMap;
use std::time::Duration;

use jericho_badlink::{Chance, Flight, Random};

/// What a link does to frames. Chances are in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireFaults {
    /// A frame is lost.
    pub loss: u64,
    /// A frame arrives twice.
    pub repetition: u64,
    /// A bit of a frame changes.
    pub damage: u64,
    /// A frame is overtaken: it takes up to 16 times `delay` longer.
    pub overtaking: u64,
    /// A frame arrives up to a minute later.
    pub holding: u64,
    /// Time that a frame takes.
    pub delay: Duration,
    /// Frames that are longer are lost. 0: none are.
    pub longest_bytes: usize,
    /// Time for which a frame occupies its direction of the link. Others wait meanwhile. 0: frames never wait.
    pub frame_time: Duration,
    /// Frames that may wait in a direction. Further ones are lost.
    pub queue_frames: u32,
}

/// A frame that arrives.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// The link.
    pub link: u16,
    /// Who receives it.
    pub to: u16,
    /// The frame.
    pub frame: Vec<u8>,
}

/// Links between endpoints.
#[derive(Debug)]
pub struct Wire {
    random: Random,
    faults: Vec<WireFaults>,
    is_cut: Vec<bool>,
    flying: Flight<Arrival>,
    /// Link and receiver -> when the direction has sent the frames that wait.
    free_at: BTreeMap<(u16, u16), Duration>,
    sent: u64,
}

impl Wire {
    /// Returns a wire of links.
    pub fn new(seed: u64, faults: Vec<WireFaults>) -> Wire {
        Wire {
            random: Random::of(seed, &[0x7769_7265]),
            is_cut: vec![false; faults.len()],
            faults,
            flying: Flight::new(),
            free_at: BTreeMap::new(),
            sent: 0,
        }
    }

    /// Changes the faults of a link.
    pub fn set_faults(&mut self, link: u16, faults: WireFaults) {
        self.faults[usize::from(link)] = faults;
    }

    /// Cuts a link, or joins it again. Frames that are under way still arrive.
    pub fn set_cut(&mut self, link: u16, is_cut: bool) {
        self.is_cut[usize::from(link)] = is_cut;
    }

    /// Returns the number of frames sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends a frame at a time.
    pub fn send(&mut self, now: Duration, link: u16, to: u16, mut frame: Vec<u8>) {
        self.sent += 1;
        let faults = self.faults[usize::from(link)];
        let is_too_long = faults.longest_bytes > 0 && frame.len() > faults.longest_bytes;
        if self.is_cut[usize::from(link)] || is_too_long || self.happens(faults.loss) {
            return;
        }
        let Some(departure) = self.departure(now, (link, to)) else {
            return;
        };
        if self.happens(faults.damage) {
            let bit = self.random.below(frame.len() as u64 * 8);
            frame[bit as usize / 8] ^= 1 << (bit % 8);
        }
        let copies = 1 + u64::from(self.happens(faults.repetition));
        for copy in 0..copies {
            let mut time = departure + faults.delay;
            if self.happens(faults.overtaking) || copy > 0 {
                let longest = faults.delay.as_nanos() as u64 * 16;
                time += Duration::from_nanos(self.random.below(longest));
            }
            if self.happens(faults.holding) {
                time += Duration::from_millis(self.random.below(60_000));
            }
            let frame = frame.clone();
            self.hold(time, Arrival { link, to, frame });
        }
    }

    /// Returns when a frame leaves the queue of its direction of a link, or `None` if the queue is full.
    fn departure(&mut self, now: Duration, direction: (u16, u16)) -> Option<Duration> {
        let faults = self.faults[usize::from(direction.0)];
        if faults.frame_time.is_zero() {
            return Some(now);
        }
        let free_at = self.free_at.entry(direction).or_default();
        let begin = now.max(*free_at);
        if begin - now > faults.frame_time * faults.queue_frames {
            return None;
        }
        *free_at = begin + faults.frame_time;
        Some(*free_at)
    }

    /// Makes a frame arrive at a time.
    pub fn hold(&mut self, time: Duration, arrival: Arrival) {
        self.flying.start(time, arrival);
    }

    /// Returns when the next frame arrives.
    pub fn next_time(&self) -> Option<Duration> {
        self.flying.next_time()
    }

    /// Returns the next frame that has arrived.
    pub fn receive(&mut self, now: Duration) -> Option<Arrival> {
        self.flying.take(now)
    }

    fn happens(&mut self, millionths: u64) -> bool {
        Chance::of_millionths(millionths).happens(&mut self.random)
    }
}
