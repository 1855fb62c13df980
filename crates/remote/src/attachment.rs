//! A channel with its link, the peer's address and both indexes. Makes the channel's frames, and takes those of the peer.

use jericho_format::wire::{
    ACK_WORDS, FLAG_ACK_WANTED, FrameHeader, HEADER_BYTES, Mac, NOISE_BYTES, Refused, frame_kind,
};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::Time;
use crate::channel::{Channel, NeverSent, State};
use crate::content::Content;
use crate::frame::{Body, Frame};
use crate::seal::Seals;

/// Bytes of the payload of an ACK.
const ACK_BYTES: usize = 8 * ACK_WORDS;

/// What all frames of a session from one link have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sender {
    pub mac: Mac,
    pub ethertype: u16,
    /// `FLAG_FROM_TARGET` or 0.
    pub flags: u8,
}

#[derive(Debug)]
pub(crate) struct Attachment {
    pub channel: Channel<Content>,
    pub link: u16,
    pub peer: Mac,
    pub own_index: u32,
    pub peer_index: u32,
    pub payload_max: u16,
    pub seals: Seals,
    /// The initiator's lane.
    pub lane: u16,
    /// Bytes of content that were sent on it.
    pub load: Load,
    /// At a target: what made the channel.
    pub asked: Option<Box<Asked>>,
    /// At an initiator: an unauthenticated frame says that the target does not know the channel.
    pub is_doubted: bool,
}

/// The HANDSHAKE that made a channel, and its answer.
#[derive(Debug)]
pub(crate) struct Asked {
    pub noise: [u8; NOISE_BYTES],
    /// The initiator's index of the channel that ends when a frame arrives on this one, or 0.
    pub replaces: u32,
    /// Start of the payload of ACCEPT.
    pub answer: Vec<u8>,
}

/// A frame that has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    /// It did not arrive before.
    pub is_new: bool,
    /// It acknowledges something that was not acknowledged before.
    pub is_progress: bool,
}

/// How much a channel has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Bytes of content, for the choice of the next channel. A channel that begins to work has as many as the one with the fewest, so
    /// that it does not get all content until it has caught up.
    balance_bytes: u64,
    /// Whether the channel worked at the last check.
    was_up: bool,
    /// Bytes of content of its own lane, and of others.
    pub own_bytes: u64,
    pub other_bytes: u64,
}

/// Notes which channels have begun to work since the last call.
pub(crate) fn rebalance<'a>(channels: impl Iterator<Item = &'a mut Attachment>) {
    let channels: Vec<&mut Attachment> = channels.collect();
    let settled = channels.iter().filter(|one| one.is_up() && one.load.was_up);
    let least = settled.map(|one| one.load.balance_bytes).min();
    for one in channels {
        if one.is_up()
            && !one.load.was_up
            && let Some(least) = least
        {
            one.load.balance_bytes = one.load.balance_bytes.max(least);
        }
        one.load.was_up = one.is_up();
    }
}

/// Lets all channels count as having carried the same. Otherwise a node's channels, which have carried little by affinity, would get all content until
/// they have caught up.
pub(crate) fn level<'a>(channels: impl Iterator<Item = &'a mut Attachment>) {
    channels.for_each(|channel| channel.load.balance_bytes = 0);
}

impl Attachment {
    /// Returns the bytes that decide which channel sends next: the one with the fewest.
    pub fn balance_bytes(&self) -> u64 {
        self.load.balance_bytes
    }

    /// Notes content of a lane that was sent.
    pub fn carried(&mut self, lane: Option<u16>, bytes: u64) {
        self.load.balance_bytes += bytes;
        match lane == Some(self.lane) {
            true => self.load.own_bytes += bytes,
            false => self.load.other_bytes += bytes,
        }
    }

    /// Returns whether the peer acknowledges.
    pub fn is_up(&self) -> bool {
        self.channel.state() == State::Up
    }

    /// Checks a frame that arrived, and decrypts it in place. Returns its payload, or `None` if the peer has not made it.
    pub fn open<'f>(&mut self, header: &FrameHeader, frame: &'f mut [u8]) -> Option<&'f [u8]> {
        let is_genuine = self.seals.open(header, frame);
        let length = usize::from(header.payload_bytes.get());
        let payload = frame.get(HEADER_BYTES..HEADER_BYTES + length);
        payload.filter(|_| is_genuine)
    }

    /// Takes the number and the acknowledgements of a frame that `open` has checked. `kinds` are those that the peer may send, besides ACK.
    /// Appends content that is lost. Returns `None` for a frame that must be ignored.
    pub fn arrived(
        &mut self,
        now: Time,
        header: &FrameHeader,
        payload: &[u8],
        kinds: &[u8],
        lost: &mut Vec<Content>,
    ) -> Option<Result<Arrived, NeverSent>> {
        if payload.len() > usize::from(self.payload_max) {
            return None;
        }
        let more = match header.kind {
            frame_kind::ACK => <[U64; ACK_WORDS]>::ref_from_bytes(payload).ok()?,
            kind if kinds.contains(&kind) => [].as_slice(),
            _ => return None,
        };
        let is_new = self.channel.on_frame(now, header);
        let acks = self.channel.on_acks(now, header, more, lost);
        Some(acks.map(|is_progress| Arrived {
            is_new,
            is_progress,
        }))
    }

    /// Returns a frame with content, which comes back if the frame is lost.
    pub fn content(
        &mut self,
        now: Time,
        sender: &Sender,
        (mut header, body): (FrameHeader, Body),
        content: Content,
    ) -> Frame {
        self.channel.send(now, &mut header, Some(content));
        if !self.channel.has_room() {
            header.flags |= FLAG_ACK_WANTED;
        }
        self.frame(sender, header, body)
    }

    /// Returns an ACK.
    pub fn ack(&mut self, now: Time, sender: &Sender) -> Frame {
        let mut header = FrameHeader::new(frame_kind::ACK, ACK_BYTES);
        let words = self.channel.send_ack(now, &mut header);
        self.frame(sender, header, Body::Bytes(words.as_bytes().to_vec()))
    }

    /// Returns a PING of the largest size: a channel that carries small frames only does not work.
    pub fn ping(&mut self, now: Time, sender: &Sender) -> Frame {
        let size = usize::from(self.payload_max);
        let mut header = FrameHeader::new(frame_kind::PING, size);
        header.flags = FLAG_ACK_WANTED;
        self.channel.send(now, &mut header, None);
        self.frame(sender, header, Body::Bytes(vec![0; size]))
    }

    /// Returns a CLOSE.
    pub fn close(&mut self, now: Time, sender: &Sender, reason: u16) -> Frame {
        let body = Refused::new(reason, 0).as_bytes().to_vec();
        let mut header = FrameHeader::new(frame_kind::CLOSE, body.len());
        self.channel.send(now, &mut header, None);
        self.frame(sender, header, Body::Bytes(body))
    }

    fn frame(&mut self, sender: &Sender, mut header: FrameHeader, body: Body) -> Frame {
        header.index = U32::new(self.peer_index);
        header.flags |= sender.flags;
        let from = (self.link, sender.mac);
        let mut frame = Frame::new(from, self.peer, sender.ethertype, header, body);
        frame.seal = self.seals.seal(header.number.get());
        frame
    }
}
