//! Frames of a target's channels.

use jericho_format::wire::{
    ACK_WORDS, CompletionRecord, FLAG_ACK_WANTED, FLAG_FROM_TARGET, FrameHeader, PLACE_BYTES,
    frame_kind,
};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32};

use super::{Session, Target, TargetOutput};
use crate::Time;
use crate::content::{Content, Part};
use crate::frame::{Body, Frame};
use crate::slots::Slots;

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
        lost.into_iter()
            .for_each(|content| session.slots.lost(content));
        for channel in pings {
            self.send_ping(now, (number, channel));
        }
    }

    /// Sends a PING of the largest size: a channel that carries small frames only does not work.
    pub(super) fn send_ping(&mut self, now: Time, (number, channel): (u64, usize)) {
        let size = usize::from(self.sessions[&number].channels[channel].payload_max);
        let header = FrameHeader::new(frame_kind::PING, size);
        let flags = FLAG_ACK_WANTED;
        let header = FrameHeader { flags, ..header };
        self.send(
            now,
            (number, channel),
            header,
            Body::Bytes(vec![0; size]),
            None,
        );
    }

    /// Sends content on all channels in turn, as far as they have room, and then the acknowledgements that are due.
    pub(super) fn transmit(&mut self, now: Time, number: u64) {
        let Some(count) = self.sessions.get(&number).map(|s| s.channels.len()) else {
            return;
        };
        let mut without = 0;
        while without < count {
            let Some(session) = self.sessions.get_mut(&number) else {
                return;
            };
            let channel = session.turn % count;
            session.turn = (channel + 1) % count;
            match self.transmit_one(now, number, channel) {
                true => without = 0,
                false => without += 1,
            }
        }
        for channel in 0..count {
            let is_due = |session: &Session| session.channels[channel].channel.is_ack_due(now);
            if self.sessions.get(&number).is_some_and(is_due) {
                self.send_ack(now, (number, channel));
            }
        }
    }

    /// Sends one frame with content on a channel. Returns whether it did.
    pub(super) fn transmit_one(&mut self, now: Time, number: u64, channel: usize) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else {
            return false;
        };
        let attachment = &session.channels[channel];
        if !attachment.channel.has_room() {
            return false;
        }
        let (payload_max, acks_fit) =
            (attachment.payload_max, attachment.channel.acks_fit_header());
        let Some(content) = session.slots.next_content(payload_max) else {
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
            Content::Data(part) => data_frame(&session.slots, number, *part),
        };
        if !acks_fit {
            self.send_ack(now, (number, channel));
        }
        if let Some((header, body)) = frame {
            self.send(now, (number, channel), header, body, Some(content));
        }
        true
    }

    pub(super) fn send_ack(&mut self, now: Time, of: (u64, usize)) {
        let header = FrameHeader::new(frame_kind::ACK, ACK_WORDS * 8);
        self.send(now, of, header, Body::Bytes(Vec::new()), None);
    }

    /// Sends a frame of a channel.
    pub(super) fn send(
        &mut self,
        now: Time,
        (number, channel): (u64, usize),
        mut header: FrameHeader,
        body: Body,
        content: Option<Content>,
    ) {
        let Some(session) = self.sessions.get_mut(&number) else {
            return;
        };
        let attachment = &mut session.channels[channel];
        header.index = U32::new(attachment.peer_index);
        let content_is_acked = content.is_some();
        let body = match header.kind {
            frame_kind::ACK => {
                let words = attachment.channel.send_ack(now, &mut header);
                Body::Bytes(words.as_bytes().to_vec())
            }
            _ => {
                attachment.channel.send(now, &mut header, content);
                body
            }
        };
        if content_is_acked && !attachment.channel.has_room() {
            header.flags |= FLAG_ACK_WANTED;
        }
        header.flags |= FLAG_FROM_TARGET;
        let from = (
            attachment.link,
            self.links[usize::from(attachment.link)].mac,
        );
        let (peer, ethertype) = (attachment.peer, self.config.ethertype);
        let mut frame = Frame::new(from, peer, ethertype, header, body);
        frame.salt = session.salt;
        self.outputs.push_back(TargetOutput::Send(frame));
    }
}

fn data_frame(slots: &Slots, session: u64, part: Part) -> Option<(FrameHeader, Body)> {
    let run = slots.data(part.name)?;
    let length_bytes = part.to_bytes - part.from_bytes;
    let mut header = FrameHeader::new(frame_kind::DATA, length_bytes as usize);
    header.slot = U16::new(part.name.slot);
    header.sequence = U32::new(part.name.sequence);
    header.place = U16::new((part.from_bytes / PLACE_BYTES) as u16);
    let body = Body::Pool {
        session,
        offset_bytes: run.offset_bytes() + u64::from(part.from_bytes),
        length_bytes,
    };
    Some((header, body))
}
