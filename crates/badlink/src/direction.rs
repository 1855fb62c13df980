//! One direction of a bad link.
//!
//! The faults of a frame depend only on the seed, the direction and the number of the frame, so a run can be repeated. Cuts are the
//! exception: they depend on times.
//!
//! ```text
//! send ── cut? lost? corrupted? duplicated? ──┬── on time ─────────────── flight ── cut? ── receive
//!                                             └── reordered ── held ──────┘
//!                                                 until at most `reorder_by` later frames came, or HOLD_MAX has passed
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use crate::chance::Chance;
use crate::flight::Flight;
use crate::random::Random;

/// Longest time that a frame is held so that later frames overtake it: the last frame of a burst has no later ones.
pub const HOLD_MAX: Duration = Duration::from_millis(10);
/// Most bytes that a direction keeps, with what a frame costs beside its bytes.
const KEPT_BYTES_MAX: usize = 64 << 20;
const FRAME_COST_BYTES: usize = 128;
/// Bytes of an Ethernet header, which corruption spares: a frame for another address would only be lost.
const HEADER_BYTES: usize = 14;

/// What a direction does to frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A frame is lost.
    pub loss: Chance,
    /// A frame is held, so that later frames overtake it.
    pub reorder: Chance,
    /// Most frames that overtake a frame.
    pub reorder_by: u32,
    /// A frame arrives twice. Each copy may be reordered.
    pub duplicate: Chance,
    /// A byte beyond the Ethernet header changes.
    pub corrupt: Chance,
    /// Time that a frame takes.
    pub delay: Duration,
    /// Times when nothing passes.
    pub cut: Option<Cut>,
}

/// A part of each period, at its end, when nothing passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The period.
    pub period: Duration,
    /// The part of it when nothing passes.
    pub length: Duration,
}

impl Cut {
    /// Returns whether nothing passes at a time.
    fn is_cut(self, now: Duration) -> bool {
        let passed_ns = now.as_nanos().checked_rem(self.period.as_nanos());
        let open = self.period.saturating_sub(self.length);
        passed_ns.is_some_and(|passed_ns| passed_ns >= open.as_nanos())
    }
}

/// Numbers of frames. Each frame that came, and each copy, is in one of `forwarded`, `lost`, `cut` and `dropped`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames that the outgoing interface took.
    pub forwarded: u64,
    /// Frames that were lost on purpose.
    pub lost: u64,
    /// Frames and copies that were held so that later frames overtake them.
    pub reordered: u64,
    /// Copies that were made.
    pub duplicated: u64,
    /// Frames in which a byte was changed.
    pub corrupted: u64,
    /// Frames that were lost because the link was cut.
    pub cut: u64,
    /// Frames that were lost, but not on purpose: missed before `send`, no room, refused by the outgoing interface, or under way at the end.
    pub dropped: u64,
}

/// One direction of a link.
#[derive(Debug)]
pub struct Direction {
    faults: Faults,
    seed: u64,
    direction: u64,
    /// Number of frames that came.
    number: u64,
    is_cut: bool,
    /// In the order of their arrival, which is that of their deadlines.
    held: VecDeque<Held>,
    flight: Flight<Vec<u8>>,
    /// Cost of the frames in `held` and `flight`.
    kept_bytes: usize,
    counts: Counts,
}

/// A frame that later frames may overtake.
#[derive(Debug)]
struct Held {
    /// The frame leaves after the frame with this number.
    until_number: u64,
    /// The frame leaves at this time at the latest.
    deadline: Duration,
    frame: Vec<u8>,
}

fn cost_bytes(frame: &[u8]) -> usize {
    frame.len() + FRAME_COST_BYTES
}

impl Direction {
    /// Returns a direction without frames. `direction` makes the faults of two directions with one seed different.
    pub fn new(seed: u64, direction: u64, faults: Faults) -> Direction {
        Direction {
            faults,
            seed,
            direction,
            number: 0,
            is_cut: false,
            held: VecDeque::new(),
            flight: Flight::new(),
            kept_bytes: 0,
            counts: Counts::default(),
        }
    }

    /// Cuts the direction, or joins it again. A cut also loses the frames that arrive meanwhile.
    pub fn set_cut(&mut self, is_cut: bool) {
        self.is_cut = is_cut;
    }

    /// Sends a frame. Times must not go back.
    pub fn send(&mut self, now: Duration, frame: &[u8]) {
        self.number += 1;
        let mut random = Random::of(self.seed, &[self.direction, self.number]);
        if self.is_cut_at(now) {
            self.counts.cut += 1;
        } else if self.faults.loss.happens(&mut random) {
            self.counts.lost += 1;
        } else {
            self.spoil(now, frame, &mut random);
        }
        self.release(now);
    }

    /// Takes a frame that has arrived. The caller then says with `arrived` what became of it.
    pub fn receive(&mut self, now: Duration) -> Option<Vec<u8>> {
        while self.held.front().is_some_and(|held| held.deadline <= now) {
            self.release_at(0, now);
        }
        loop {
            let frame = self.flight.take(now)?;
            self.kept_bytes -= cost_bytes(&frame);
            if !self.is_cut_at(now) {
                return Some(frame);
            }
            self.counts.cut += 1;
        }
    }

    /// Returns when `receive` has something to do.
    pub fn next_time(&self) -> Option<Duration> {
        let deadline = self.held.front().map(|held| held.deadline);
        [deadline, self.flight.next_time()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Counts a frame that `receive` has returned. `is_forwarded` is false if the outgoing interface refused it.
    pub fn arrived(&mut self, is_forwarded: bool) {
        match is_forwarded {
            true => self.counts.forwarded += 1,
            false => self.counts.dropped += 1,
        }
    }

    /// Counts frames that were lost before `send`.
    pub fn missed(&mut self, frames: u64) {
        self.counts.dropped += frames;
    }

    /// Ends the direction. Drops the frames that are under way.
    pub fn finish(mut self) -> Counts {
        self.counts.dropped += (self.held.len() + self.flight.len()) as u64;
        self.counts
    }

    fn is_cut_at(&self, now: Duration) -> bool {
        self.is_cut || self.faults.cut.is_some_and(|cut| cut.is_cut(now))
    }

    /// Changes, copies and holds a frame, as its random numbers say.
    fn spoil(&mut self, now: Duration, frame: &[u8], random: &mut Random) {
        let mut frame = frame.to_vec();
        if self.faults.corrupt.happens(random) && frame.len() > HEADER_BYTES {
            let body = &mut frame[HEADER_BYTES..];
            let at = random.below(body.len() as u64) as usize;
            body[at] ^= 1 + random.below(255) as u8;
            self.counts.corrupted += 1;
        }
        if self.faults.duplicate.happens(random) {
            self.counts.duplicated += 1;
            self.keep(now, frame.clone(), random);
        }
        self.keep(now, frame, random);
    }

    fn keep(&mut self, now: Duration, frame: Vec<u8>, random: &mut Random) {
        let kept_bytes = self.kept_bytes + cost_bytes(&frame);
        if kept_bytes > KEPT_BYTES_MAX {
            self.counts.dropped += 1;
            return;
        }
        self.kept_bytes = kept_bytes;
        if self.faults.reorder_by > 0 && self.faults.reorder.happens(random) {
            self.counts.reordered += 1;
            self.held.push_back(Held {
                until_number: self.number + 1 + random.below(self.faults.reorder_by.into()),
                deadline: now + HOLD_MAX,
                frame,
            });
        } else {
            self.flight.start(now + self.faults.delay, frame);
        }
    }

    /// Lets the held frames go that enough later frames have overtaken.
    fn release(&mut self, now: Duration) {
        let mut at = 0;
        while let Some(held) = self.held.get(at) {
            match held.until_number <= self.number {
                true => self.release_at(at, now),
                false => at += 1,
            }
        }
    }

    fn release_at(&mut self, at: usize, now: Duration) {
        if let Some(held) = self.held.remove(at) {
            self.flight.start(now + self.faults.delay, held.frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: u64 = 100_000;
    const US: Duration = Duration::from_micros(1);

    /// Sends frames, one each microsecond, and returns what arrives, with the times, and the counts. A frame has its number after its header.
    fn run(seed: u64, faults: Faults, frames: u64) -> (Vec<(Duration, Vec<u8>)>, Counts) {
        let mut direction = Direction::new(seed, 0, faults);
        let mut arrived = Vec::new();
        for number in 0..frames {
            let now = US * number as u32;
            take_until(&mut direction, now, &mut arrived);
            direction.send(now, &numbered(number));
        }
        take_until(&mut direction, Duration::from_secs(3600), &mut arrived);
        assert_eq!(direction.next_time(), None);
        assert_eq!(direction.kept_bytes, 0);
        let counts = direction.finish();
        let ends = counts.forwarded + counts.lost + counts.cut + counts.dropped;
        assert_eq!(frames + counts.duplicated, ends, "{counts:?}");
        (arrived, counts)
    }

    /// Takes frames at the times at which the direction asks for a call.
    fn take_until(
        direction: &mut Direction,
        end: Duration,
        arrived: &mut Vec<(Duration, Vec<u8>)>,
    ) {
        while let Some(time) = direction.next_time().filter(|time| *time <= end) {
            while let Some(frame) = direction.receive(time) {
                direction.arrived(true);
                arrived.push((time, frame));
            }
        }
    }

    fn numbered(number: u64) -> Vec<u8> {
        let mut frame = vec![7; HEADER_BYTES];
        frame.extend(number.to_le_bytes());
        frame
    }

    fn number_of((_, frame): &(Duration, Vec<u8>)) -> u64 {
        u64::from_le_bytes(frame[HEADER_BYTES..].try_into().unwrap())
    }

    fn all_faults() -> Faults {
        let chance = |percent: u64| Chance::of_millionths(percent * 10_000);
        Faults {
            loss: chance(1),
            reorder: chance(10),
            reorder_by: 16,
            duplicate: chance(10),
            corrupt: chance(1),
            delay: 200 * US,
            cut: None,
        }
    }

    #[test]
    fn a_link_without_faults_passes_every_frame_in_order_at_once() {
        let (arrived, counts) = run(1, Faults::default(), 1000);
        for (number, one) in (0..).zip(&arrived) {
            assert_eq!(one, &(US * number as u32, numbered(number)));
        }
        let forwarded = 1000;
        assert_eq!(
            counts,
            Counts {
                forwarded,
                ..Counts::default()
            }
        );
    }

    #[test]
    fn the_same_seed_makes_the_same_faults_and_another_one_makes_others() {
        let first = run(7, all_faults(), 10_000);
        assert!(first == run(7, all_faults(), 10_000));
        assert!(first.0 != run(8, all_faults(), 10_000).0);
    }

    #[test]
    fn the_directions_of_a_link_have_different_faults() {
        let faults = Faults {
            loss: Chance::of_millionths(500_000),
            ..Faults::default()
        };
        let passed = |direction| {
            let mut direction = Direction::new(1, direction, faults);
            let passes = |number| {
                direction.send(Duration::ZERO, &numbered(number));
                direction.receive(Duration::ZERO).is_some()
            };
            (0..64).map(passes).collect::<Vec<bool>>()
        };
        assert_ne!(passed(0), passed(1));
    }

    #[test]
    fn faults_have_the_rates_that_were_asked_for() {
        let (arrived, counts) = run(1, all_faults(), FRAMES);
        let is_near = |count: u64, of: u64, percent: u64| {
            // Five standard deviations of a binomial distribution.
            let expected = of as f64 * percent as f64 / 100.0;
            let deviation = (expected * (1.0 - percent as f64 / 100.0)).sqrt();
            assert!(
                (count as f64 - expected).abs() < 5.0 * deviation,
                "{counts:?}"
            );
        };
        let passed = FRAMES - counts.lost;
        is_near(counts.lost, FRAMES, 1);
        is_near(counts.corrupted, passed, 1);
        is_near(counts.duplicated, passed, 10);
        is_near(counts.reordered, passed + counts.duplicated, 10);
        assert_eq!(arrived.len() as u64, counts.forwarded);
    }

    #[test]
    fn corruption_changes_one_byte_beyond_the_header() {
        let faults = Faults {
            corrupt: Chance::of_millionths(1_000_000),
            ..Faults::default()
        };
        let (arrived, counts) = run(1, faults, 1000);
        assert_eq!(counts.corrupted, 1000);
        for (number, (_, frame)) in (0..).zip(&arrived) {
            let sent = numbered(number);
            assert_eq!(frame[..HEADER_BYTES], sent[..HEADER_BYTES]);
            let pairs = frame.iter().zip(&sent);
            assert_eq!(pairs.filter(|(one, other)| one != other).count(), 1);
        }
        // A frame without a body passes.
        let mut direction = Direction::new(1, 0, faults);
        direction.send(Duration::ZERO, &[1; HEADER_BYTES]);
        assert_eq!(
            direction.receive(Duration::ZERO),
            Some(vec![1; HEADER_BYTES])
        );
    }

    #[test]
    fn a_frame_is_overtaken_by_at_most_as_many_frames_as_were_asked_for() {
        for reorder_by in [1, 16] {
            let faults = Faults {
                reorder: Chance::of_millionths(300_000),
                reorder_by,
                ..Faults::default()
            };
            let (arrived, counts) = run(3, faults, FRAMES);
            let numbers: Vec<u64> = arrived.iter().map(number_of).collect();
            let overtaken = |(at, number): (usize, &u64)| {
                let before = &numbers[at.saturating_sub(100)..at];
                before.iter().filter(|other| *other > number).count()
            };
            let most = numbers.iter().enumerate().map(overtaken).max();
            assert_eq!(most, Some(reorder_by as usize));
            assert_eq!(counts.forwarded, FRAMES);
        }
    }

    #[test]
    fn a_held_frame_without_later_ones_leaves_after_a_while() {
        let faults = Faults {
            reorder: Chance::of_millionths(1_000_000),
            reorder_by: 16,
            delay: US,
            ..Faults::default()
        };
        let (arrived, _) = run(1, faults, 1);
        assert_eq!(arrived, [(HOLD_MAX + US, numbered(0))]);
    }

    #[test]
    fn every_frame_takes_the_delay() {
        let faults = Faults {
            delay: 250 * US,
            ..Faults::default()
        };
        let (arrived, _) = run(1, faults, 1000);
        for one in &arrived {
            assert_eq!(one.0, US * number_of(one) as u32 + 250 * US);
        }
        assert_eq!(arrived.len(), 1000);
    }

    #[test]
    fn nothing_passes_at_the_end_of_each_period() {
        let faults = Faults {
            delay: 10 * US,
            cut: Some(Cut {
                period: 1000 * US,
                length: 200 * US,
            }),
            ..Faults::default()
        };
        let (arrived, counts) = run(1, faults, 10_000);
        let phase = |time: Duration| time.as_micros() % 1000;
        assert!(arrived.iter().all(|(time, _)| phase(*time) < 800));
        // Those that come while the link is cut, and those that would arrive then.
        assert_eq!(counts.cut, 10 * (200 + 10));
    }

    #[test]
    fn a_cut_link_passes_nothing_until_it_is_joined_again() {
        let faults = Faults {
            delay: US,
            ..Faults::default()
        };
        let mut direction = Direction::new(1, 0, faults);
        let mut is_passed = |at: u32, is_cut| {
            direction.send(US * at, b"frame");
            direction.set_cut(is_cut);
            direction.receive(US * (at + 1)).is_some()
        };
        // A frame under way is lost, too.
        assert!(!is_passed(0, true));
        assert!(!is_passed(10, true));
        assert!(!is_passed(20, false));
        assert!(is_passed(30, false));
        assert_eq!(direction.finish().cut, 3);
    }

    #[test]
    fn kept_frames_have_bounded_memory() {
        let faults = Faults {
            delay: Duration::from_secs(60),
            ..Faults::default()
        };
        let mut direction = Direction::new(1, 0, faults);
        let frames = KEPT_BYTES_MAX as u64 / 1000;
        for _ in 0..frames {
            direction.send(Duration::ZERO, &[0; 1000]);
        }
        assert!(direction.kept_bytes <= KEPT_BYTES_MAX);
        let kept = direction.flight.len() as u64;
        assert_eq!(direction.counts.dropped, frames - kept);
        assert!((1..frames).contains(&kept));
        assert_eq!(direction.finish().dropped, frames);
    }
}
