//! Frames of a target's channels.

use jericho_format::wire::{
    CompletionRecord, FLAG_FROM_TARGET, FrameHeader, LANES_MAX, frame_kind,
};
use zerocopy::IntoBytes;

use super::{Session, Target, TargetOutput};
use crate::Time;
use crate::attachment::{Attachment, Sender};
use crate::content::{Content, Part};
use crate::frame::{Body, Frame};
use crate::lanes::Sources;
use crate::slots::Slots;

/// A channel: the session, and the place in its list of channels.
type ChannelOf = (u64, usize);

impl Target {
    pub(super) fn on_session_timer(&mut self, now: Time, number: u64) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        let mut pings = Vec::new();
        let mut lost = Vec::new();
        for (at, attachment) in session.channels.iter_mut().enumerate() {
            if attachment.channel.on_timer(now, &mut lost) {
                pings.push(at);
            }
        }
        session.slots.lost(lost);
        for channel in pings {
            self.send((number, channel), |channel, sender| {
                channel.ping(now, sender)
            });
        }
    }

    /// Sends content on the channels, as far as they have room, and then the acknowledgements that are due.
    pub(super) fn transmit(&mut self, now: Time, number: u64) {
        let Some(session) = self.sessions.get(&number) else {
            return;
        };
        let count = session.channels.len();
        let mut open = [true; LANES_MAX as usize];
        let up = session.channels.iter().filter(|channel| channel.is_up());
        up.for_each(|channel| open[usize::from(channel.lane)] = false);
        let has_room = |at: &usize| session.channels[*at].channel.has_room();
        let mut ready: Vec<usize> = (0..count).filter(has_room).collect();
        while let Some(place) = self.next_of(number, &ready) {
            if !self.transmit_one(now, (number, ready[place]), &open) {
                ready.remove(place);
            }
        }
        for channel in 0..count {
            let is_due = |session: &Session| session.channels[channel].channel.is_ack_due(now);
            if self.sessions.get(&number).is_some_and(is_due) {
                self.send_ack(now, (number, channel));
            }
        }
    }

    /// Returns which of some channels sends next: the one that has carried the fewest bytes.
    fn next_of(&self, number: u64, ready: &[usize]) -> Option<usize> {
        let channels = &self.sessions.get(&number)?.channels;
        let bytes = |place: &usize| channels[ready[*place]].balance_bytes();
        (0..ready.len()).min_by_key(bytes)
    }

    /// Sends one frame with content on a channel. Returns whether it did.
    fn transmit_one(&mut self, now: Time, of: ChannelOf, open: &[bool]) -> bool {
        let Some(session) = self.sessions.get_mut(&of.0) else {
            return false;
        };
        let attachment = &session.channels[of.1];
        if !attachment.channel.has_room() {
            return false;
        }
        let (payload_max, acks_fit) =
            (attachment.payload_max, attachment.channel.acks_fit_header());
        let own = attachment.lane;
        let Some(content) = session
            .slots
            .next_content(Sources { own, open }, payload_max)
        else {
            return false;
        };
        let frame = match &content {
            Content::Records(names) => {
                let records = names.iter().filter_map(|name| session.slots.record(*name));
                let records: Vec<CompletionRecord> = records.collect();
                let body = records.as_bytes().to_vec();
                let header = FrameHeader::new(frame_kind::COMPLETIONS, body.len());
                Some((header, Body::Bytes(body)))
            }
            Content::Data(part) => data_frame(&session.slots, of.0, *part),
        };
        if !acks_fit {
            self.send_ack(now, of);
        }
        if let Some(frame) = frame {
            let bytes = u64::from(frame.0.payload_bytes.get());
            if let Some(session) = self.sessions.get_mut(&of.0) {
                session.channels[of.1].carried(Some(own), bytes);
            }
            self.send(of, |channel, sender| {
                channel.content(now, sender, frame, content)
            });
        }
        true
    }

    fn send_ack(&mut self, now: Time, of: ChannelOf) {
        self.send(of, |channel, sender| channel.ack(now, sender));
    }

    /// Sends a frame that a channel makes.
    pub(super) fn send(
        &mut self,
        (number, channel): ChannelOf,
        make: impl FnOnce(&mut Attachment, &Sender) -> Frame,
    ) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        let attachment = &mut session.channels[channel];
        let sender = Sender {
            mac: self.links[usize::from(attachment.link)].mac,
            ethertype: self.config.ethertype,
            flags: FLAG_FROM_TARGET,
        };
        let frame = make(attachment, &sender);
        self.outputs.push_back(TargetOutput::Send(frame));
    }
}

fn data_frame(slots: &Slots, session: u64, part: Part) -> Option<(FrameHeader, Body)> {
    let body = Body::Pool {
        session,
        offset_bytes: slots.data(part.name)?.offset_bytes() + u64::from(part.from_bytes),
        length_bytes: part.length_bytes(),
    };
    Some((part.header(), body))
}
