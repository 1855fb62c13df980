//! A channel: numbers, acknowledgements, loss, window and state of one pair of links. Section *A channel* of `docs/formats/wire.md` has
//! the rules.
//!
//! A channel knows nothing of slots. What it carries, the *content*, comes back when its frame is lost, and the session sends it again on
//! any channel.
//!
//! States: `Up` ── three probes without an answer (`probe`) ──> `Suspect` ── an acknowledgement (`on_acks`) ──> `Up`.
//! `Suspect` ── `quiet_after` (`on_timer`) ──> `Quiet` ── a frame arrives (`on_frame`) ──> `Suspect`.

use std::collections::VecDeque;
use std::time::Duration;

use jericho_format::wire::{ACK_WORDS, FLAG_ACK_WANTED, FrameHeader, NUMBERS_KEPT, frame_kind};
use zerocopy::byteorder::little_endian::{U16, U64};

use crate::Time;
use crate::received::Received;
use crate::round_trip::RoundTrip;
use crate::window::Window;

/// Probes without an answer that make a channel suspect.
const PROBES_MAX: u32 = 3;
/// How long a channel carries nothing before its owner asks whether the peer is there.
const SILENCE: Duration = Duration::from_millis(200);
/// Initial and greatest reordering distance.
const REORDERING_MIN: u64 = 3;
const REORDERING_MAX: u64 = 64;

/// Whether a channel works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The peer acknowledges.
    Up,
    /// The peer does not acknowledge, since this time.
    Suspect { since: Time, next_ping: Time },
    /// As suspect, but nothing is sent until a frame arrives.
    Quiet,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Flying,
    /// Acknowledged, or lost, or not to be acknowledged.
    Ended,
}

#[derive(Debug)]
struct Sent<C> {
    time: Time,
    content: Option<C>,
    fate: Fate,
}

/// The peer acknowledged a frame that was not sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NeverSent;

/// One pair of links, as its owner sees it. `C` is what a frame carries.
#[derive(Debug)]
pub(crate) struct Channel<C> {
    received: Received,
    /// Frames from `sent_first` on.
    sent: VecDeque<Sent<C>>,
    sent_first: u64,
    in_flight: u32,
    /// One more than the greatest number that the peer has received.
    acked_end: u64,
    /// Numbers of frames that were taken for lost, while their acknowledgement can still arrive.
    lost: VecDeque<u64>,
    reordering: u64,
    round_trip: RoundTrip,
    window: Window,
    /// Frames that the peer lets this side have in flight.
    credit: u16,
    /// Frames that this side lets the peer have in flight.
    own_credit: u16,
    probes: u32,
    /// Suspect: a frame has arrived since the last PING.
    is_heard: bool,
    /// When the last frame that must be acknowledged was sent, or the last acknowledgement arrived.
    progress: Time,
    /// When the last frame arrived.
    heard: Time,
    /// When a frame that is older than an acknowledged one counts as lost.
    loss_time: Option<Time>,
    state: State,
    /// How long a suspect channel sends PING. `None`: for ever.
    quiet_after: Option<Duration>,
    /// Frames that were taken for lost.
    losses: u64,
}

/// What an administrator may want to know of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelStatus {
    /// Whether the peer acknowledges.
    pub is_up: bool,
    /// Smoothed time between a frame and its acknowledgement.
    pub round_trip: Duration,
    /// Frames that may be in flight, by the congestion window and the peer's credit.
    pub window: u32,
    /// Frames that were sent.
    pub sent: u64,
    /// Frames that were taken for lost, and whose content was sent again.
    pub lost: u64,
    /// Bytes of content of requests of the node of the channel's network interface.
    pub local_bytes: u64,
    /// Bytes of content of other requests.
    pub remote_bytes: u64,
}

impl<C> Channel<C> {
    /// Returns a channel without frames. `credit` is the peer's for this side, and `own_credit` this side's for the peer.
    pub fn new(credit: u16, own_credit: u16, quiet_after: Option<Duration>) -> Channel<C> {
        Channel {
            received: Received::default(),
            sent: VecDeque::new(),
            sent_first: 0,
            in_flight: 0,
            acked_end: 0,
            lost: VecDeque::new(),
            reordering: REORDERING_MIN,
            round_trip: RoundTrip::new(),
            window: Window::new(),
            credit,
            own_credit,
            probes: 0,
            is_heard: false,
            progress: Time::ZERO,
            heard: Time::ZERO,
            loss_time: None,
            state: State::Up,
            quiet_after,
            losses: 0,
        }
    }

    /// Has the channel send nothing but acknowledgements until a frame of the peer arrives: a copy of an old HANDSHAKE may have made it.
    pub fn unconfirmed(mut self) -> Channel<C> {
        self.state = State::Quiet;
        self
    }

    /// Returns what an administrator may want to know.
    pub fn status(&self) -> ChannelStatus {
        ChannelStatus {
            is_up: self.state == State::Up,
            round_trip: self.round_trip.smoothed(),
            window: self.window.frames().min(self.credit.max(1).into()),
            sent: self.next_number(),
            lost: self.losses,
            local_bytes: 0,
            remote_bytes: 0,
        }
    }

    /// Returns whether frames of this side have waited in a queue on their way since the last call.
    pub fn has_standing_queue(&mut self, now: Time) -> bool {
        let mut sent = self.sent.iter();
        let oldest = sent.find(|frame| frame.fate == Fate::Flying);
        let age = oldest.map(|frame| now.saturating_sub(frame.time));
        self.round_trip.has_standing_queue(age)
    }

    /// Returns the state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Sets how many frames this side lets the peer have in flight.
    pub fn set_own_credit(&mut self, credit: u16) {
        self.own_credit = credit;
    }

    /// Returns whether a frame of the peer has arrived.
    pub fn has_received(&self) -> bool {
        self.received.has_any()
    }

    /// Returns whether content may be sent now.
    pub fn has_room(&self) -> bool {
        self.state == State::Up
            && self.in_flight < self.window.frames().min(self.credit.max(1).into())
    }

    /// Numbers a frame and puts the acknowledgements into its header. `content` comes back if the frame is lost.
    pub fn send(&mut self, now: Time, header: &mut FrameHeader, content: Option<C>) {
        let must_be_acked = is_acknowledged(header.kind);
        header.number = U64::new(self.sent_first + self.sent.len() as u64);
        header.credit = U16::new(self.own_credit);
        let (end, words) = self.received.acknowledge();
        header.ack_end = U64::new(end);
        header.acks = U64::new(words[0]);
        self.sent.push_back(Sent {
            time: now,
            content,
            fate: match must_be_acked {
                true => Fate::Flying,
                false => Fate::Ended,
            },
        });
        if must_be_acked {
            self.in_flight += 1;
            self.progress = now;
        }
        self.trim();
    }

    /// Returns whether an ACK must be sent now.
    pub fn is_ack_due(&self, now: Time) -> bool {
        self.received.is_due(now)
    }

    /// Returns whether the header of another frame has room for what must be acknowledged.
    pub fn acks_fit_header(&self) -> bool {
        self.received.fits_header()
    }

    /// Numbers an ACK, and returns its payload.
    pub fn send_ack(&mut self, now: Time, header: &mut FrameHeader) -> [U64; ACK_WORDS] {
        let (_, words) = self.received.acknowledge();
        self.send(now, header, None);
        std::array::from_fn(|word| U64::new(words[word + 1]))
    }

    /// Takes the number of a frame that arrived. Returns whether the frame is new.
    pub fn on_frame(&mut self, now: Time, header: &FrameHeader) -> bool {
        let is_new = self.received.take(header.number.get());
        if is_acknowledged(header.kind) {
            // A repeated frame is acknowledged again: its sender may not know that it arrived.
            let is_wanted = header.flags & FLAG_ACK_WANTED != 0 || !is_new;
            self.received.owe(now, is_wanted);
        }
        if !is_new {
            // Anybody may have sent this copy.
            return false;
        }
        self.heard = now;
        // The peer's frames get through again, so this side's may, too.
        let since = match self.state {
            State::Up => None,
            State::Suspect { since, .. } => Some(since),
            State::Quiet => Some(now),
        };
        if let Some(since) = since.filter(|_| !self.is_heard) {
            self.is_heard = true;
            let next_ping = now;
            self.state = State::Suspect { since, next_ping };
        }
        true
    }

    /// Takes the acknowledgements of a frame: those of its header, then those of an ACK's payload. Appends content that is lost. Returns
    /// whether something was acknowledged for the first time.
    pub fn on_acks(
        &mut self,
        now: Time,
        header: &FrameHeader,
        more: &[U64],
        lost: &mut Vec<C>,
    ) -> Result<bool, NeverSent> {
        let (end, next) = (header.ack_end.get(), self.next_number());
        if end > next {
            return Err(NeverSent);
        }
        // An older frame that was overtaken has an older credit.
        if end >= self.acked_end {
            self.credit = header.credit.get();
        }
        let words = std::iter::once(header.acks.get()).chain(more.iter().map(|word| word.get()));
        let mut is_progress = false;
        for (word, mut bits) in words.enumerate() {
            while bits != 0 {
                let below = word as u64 * 64 + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                let Some(number) = end.checked_sub(below + 1) else {
                    return Err(NeverSent);
                };
                is_progress |= self.acknowledged(now, number, below == 0);
            }
        }
        self.acked_end = self.acked_end.max(end);
        if is_progress {
            (self.probes, self.progress) = (0, now);
            self.state = State::Up;
            self.detect_losses(now, lost);
        }
        self.trim();
        Ok(is_progress)
    }

    /// Returns when an owner that waits for the peer should send PING: no frame in flight can reveal that the peer is gone.
    pub fn silent_at(&self) -> Option<Time> {
        let is_idle = self.state == State::Up && self.in_flight == 0;
        is_idle.then(|| self.heard.max(self.progress) + SILENCE)
    }

    /// Returns when `on_timer` has something to do.
    pub fn timer(&self) -> Option<Time> {
        let sends = match self.state {
            State::Up if self.in_flight > 0 => {
                let probe = self.progress + self.round_trip.probe_time(self.probes);
                Some(self.loss_time.map_or(probe, |loss| loss.min(probe)))
            }
            State::Suspect { next_ping, .. } => Some(next_ping),
            _ => None,
        };
        [sends, self.received.deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Finds lost frames by their age. Returns whether a PING must be sent. Appends content that is lost.
    pub fn on_timer(&mut self, now: Time, lost: &mut Vec<C>) -> bool {
        match self.state {
            State::Up if self.in_flight > 0 => {
                if self.loss_time.is_some_and(|time| time <= now) {
                    self.detect_losses(now, lost);
                } else if self.progress + self.round_trip.probe_time(self.probes) <= now {
                    return self.probe(now, lost);
                }
                false
            }
            State::Suspect { since, next_ping } if next_ping <= now => {
                if self.quiet_after.is_some_and(|after| since + after <= now) {
                    self.state = State::Quiet;
                    // The next frame makes the channel suspect again.
                    self.is_heard = false;
                    return false;
                }
                self.probes += 1;
                self.is_heard = false;
                let next_ping = now + self.round_trip.probe_time(self.probes);
                self.state = State::Suspect { since, next_ping };
                self.give_up_all(lost);
                true
            }
            _ => false,
        }
    }

    fn next_number(&self) -> u64 {
        self.sent_first + self.sent.len() as u64
    }

    /// Returns the place of a number in `sent`.
    fn at(&self, number: u64) -> Option<usize> {
        let at = number.checked_sub(self.sent_first)?;
        usize::try_from(at).ok().filter(|&at| at < self.sent.len())
    }

    /// Notes that the peer has a frame. Returns whether this was not known.
    fn acknowledged(&mut self, now: Time, number: u64, is_newest: bool) -> bool {
        if let Some(at) = self.at(number)
            && self.sent[at].fate == Fate::Flying
        {
            if is_newest {
                let sample = now.saturating_sub(self.sent[at].time);
                self.round_trip.measured(sample);
            }
            self.window.acknowledged(self.in_flight);
            self.end(at);
            return true;
        }
        if let Ok(at) = self.lost.binary_search(&number) {
            self.lost.remove(at);
            let distance = self.acked_end.saturating_sub(number);
            self.reordering = self.reordering.max(distance.min(REORDERING_MAX));
            self.window.restore(number);
            return true;
        }
        false
    }

    /// Ends a frame in flight, and returns its content.
    fn end(&mut self, at: usize) -> Option<C> {
        self.sent[at].fate = Fate::Ended;
        self.in_flight -= 1;
        self.sent[at].content.take()
    }

    /// Ends a frame that counts as lost.
    fn lose(&mut self, at: usize, lost: &mut Vec<C>) {
        self.losses += 1;
        let number = self.sent_first + at as u64;
        lost.extend(self.end(at));
        // The numbers are in order, except after a probe.
        let place = self.lost.partition_point(|&other| other < number);
        self.lost.insert(place, number);
    }

    fn detect_losses(&mut self, now: Time, lost: &mut Vec<C>) {
        self.loss_time = None;
        let age = self.round_trip.loss_age();
        let below = self.acked_end.saturating_sub(self.sent_first);
        for at in 0..self.sent.len().min(below as usize) {
            if self.sent[at].fate != Fate::Flying {
                continue;
            }
            let number = self.sent_first + at as u64;
            let time = self.sent[at].time + age;
            if number + self.reordering < self.acked_end || time <= now {
                self.lose(at, lost);
                self.window.lost(number, self.next_number());
            } else {
                self.loss_time = Some(self.loss_time.map_or(time, |other| other.min(time)));
            }
        }
    }

    /// Sends the oldest content again. Returns whether a PING must be sent, because there is no content.
    fn probe(&mut self, now: Time, lost: &mut Vec<C>) -> bool {
        self.probes += 1;
        self.progress = now;
        if self.probes >= PROBES_MAX {
            self.give_up_all(lost);
            self.window.collapse();
            self.is_heard = false;
            self.state = State::Suspect {
                since: now,
                next_ping: now + self.round_trip.probe_time(self.probes),
            };
            return true;
        }
        let is_in_flight = |sent: &Sent<C>| sent.fate == Fate::Flying;
        let Some(oldest) = self.sent.iter().position(is_in_flight) else {
            return false;
        };
        let before = lost.len();
        self.lose(oldest, lost);
        // The window may be full. The frame that is lost has made room for one.
        lost.len() == before
    }

    /// Counts all frames in flight as lost, and appends their content.
    pub fn give_up_all(&mut self, lost: &mut Vec<C>) {
        for at in 0..self.sent.len() {
            if self.sent[at].fate == Fate::Flying {
                self.lose(at, lost);
            }
        }
        self.loss_time = None;
    }

    /// Forgets frames that ended, and losses that are too old for an acknowledgement.
    fn trim(&mut self) {
        while self
            .sent
            .front()
            .is_some_and(|sent| sent.fate == Fate::Ended)
        {
            self.sent.pop_front();
            self.sent_first += 1;
        }
        while let Some(&number) = self.lost.front()
            && (number + NUMBERS_KEPT < self.acked_end || self.lost.len() as u64 > NUMBERS_KEPT)
        {
            self.lost.pop_front();
        }
    }
}

/// Returns whether frames of a kind must be acknowledged.
fn is_acknowledged(kind: u8) -> bool {
    matches!(
        kind,
        frame_kind::REQUESTS | frame_kind::COMPLETIONS | frame_kind::DATA | frame_kind::PING
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_channel_wakes_also_if_a_frame_arrived_just_before_it_went_quiet() {
        let quiet_after = Duration::from_secs(10);
        let mut channel: Channel<()> = Channel::new(4, 4, Some(quiet_after));
        let (mut now, mut lost) = (Time::from_secs(1000), Vec::new());
        let ping = FrameHeader::new(frame_kind::PING, 0);
        channel.send(now, &mut ping.clone(), None);
        let since = loop {
            now = channel.timer().expect("a probe");
            if channel.on_timer(now, &mut lost) {
                channel.send(now, &mut ping.clone(), None);
            }
            if let State::Suspect { since, .. } = channel.state() {
                break since;
            }
        };
        // The timer is late: the channel hears the peer after the time of its last PING.
        now = since + quiet_after;
        channel.on_frame(now, &ping);
        assert!(!channel.on_timer(now, &mut lost));
        assert_eq!(channel.state(), State::Quiet);
        // A copy of the frame before may come from anybody.
        channel.on_frame(now, &ping);
        assert!(!channel.on_timer(now, &mut lost));
        let mut next = ping;
        next.number = 1.into();
        channel.on_frame(now, &next);
        assert!(channel.on_timer(now, &mut lost), "it sends PING again");
    }
}
