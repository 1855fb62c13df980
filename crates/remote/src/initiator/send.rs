//! Frames of an initiator's channels.

use jericho_format::wire::{
    ACK_WORDS, FLAG_ACK_WANTED, FrameHeader, PLACE_BYTES, Refused, WIRE_MAGIC, frame_kind,
};
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromZeros, IntoBytes};

use super::{Initiator, InitiatorOutput, is_up};
use crate::Time;
use crate::content::{Content, Part};
use crate::frame::{Body, Frame};

/// Bytes of the payload of an ACK.
const ACK_BYTES: usize = 8 * ACK_WORDS;

impl Initiator {
    /// Sends CLOSE on all channels.
    pub(super) fn send_close(&mut self, now: Time, reason: u16) {
        let mut refused = Refused::new_zeroed();
        refused.magic = WIRE_MAGIC;
        refused.reason = U16::new(reason);
        for link in 0..self.links.len() {
            let body = refused.as_bytes().to_vec();
            let header = FrameHeader::new(frame_kind::CLOSE, body.len());
            self.send(now, link, header, Body::Bytes(body), None);
        }
    }

    /// Sends a PING of the largest size: a channel that carries small frames only does not work.
    pub(super) fn send_ping(&mut self, now: Time, link: usize) {
        let attachment = self.links[link].channel.as_ref();
        let size = attachment.map_or(0, |attachment| attachment.payload_max.into());
        let header = FrameHeader::new(frame_kind::PING, size);
        let flags = FLAG_ACK_WANTED;
        let header = FrameHeader { flags, ..header };
        self.send(now, link, header, Body::Bytes(vec![0; size]), None);
    }

    /// Sends a frame of a channel.
    pub(super) fn send(
        &mut self,
        now: Time,
        link: usize,
        mut header: FrameHeader,
        body: Body,
        content: Option<Content>,
    ) {
        let state = &mut self.links[link];
        let (Some(attachment), Some(session)) = (&mut state.channel, self.session) else {
            return;
        };
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
        let from = (link as u16, state.link.mac);
        let mut frame = Frame::new(from, attachment.peer, self.config.ethertype, header, body);
        frame.salt = session.salt;
        self.outputs.push_back(InitiatorOutput::Send(frame));
    }

    pub(super) fn send_ack(&mut self, now: Time, link: usize) {
        let header = FrameHeader::new(frame_kind::ACK, ACK_BYTES);
        self.send(now, link, header, Body::Bytes(Vec::new()), None);
    }

    /// Sends content on all channels in turn, as far as they have room, and then the acknowledgements that are due.
    pub(super) fn transmit(&mut self, now: Time) {
        let count = self.links.len();
        let mut without = 0;
        while without < count {
            let link = self.turn % count;
            self.turn = (link + 1) % count;
            match self.transmit_one(now, link) {
                true => without = 0,
                false => without += 1,
            }
        }
        for link in 0..count {
            let attachment = self.links[link].channel.as_ref();
            if attachment.is_some_and(|attachment| attachment.channel.is_ack_due(now)) {
                self.send_ack(now, link);
            }
        }
    }

    /// Sends one frame with content on a link. Returns whether it did.
    pub(super) fn transmit_one(&mut self, now: Time, link: usize) -> bool {
        let Some(attachment) = is_up(&self.links[link].channel) else {
            return false;
        };
        if !attachment.channel.has_room() {
            return false;
        }
        if !attachment.channel.acks_fit_header() {
            self.send_ack(now, link);
        }
        let payload_max = match is_up(&self.links[link].channel) {
            Some(attachment) => attachment.payload_max,
            None => return false,
        };
        let Some(content) = self.requests.next_content(payload_max) else {
            return false;
        };
        match &content {
            Content::Records(names) => {
                let records = names.iter().filter_map(|name| self.requests.record(*name));
                let body: Vec<u8> = records.flat_map(|r| r.as_bytes().to_vec()).collect();
                let header = FrameHeader::new(frame_kind::REQUESTS, body.len());
                self.send(now, link, header, Body::Bytes(body), Some(content));
            }
            Content::Data(part) => {
                let Some((header, body)) = self.data_frame(*part) else {
                    return true;
                };
                self.send(now, link, header, body, Some(content));
            }
        }
        true
    }

    pub(super) fn data_frame(&self, part: Part) -> Option<(FrameHeader, Body)> {
        let (local, remote) = self.requests.runs(part.name)?;
        let length_bytes = part.to_bytes - part.from_bytes;
        let mut header = FrameHeader::new(frame_kind::DATA, length_bytes as usize);
        header.slot = U16::new(part.name.slot);
        header.sequence = U32::new(part.name.sequence);
        header.place = U16::new((part.from_bytes / PLACE_BYTES) as u16);
        header.pool_page = U32::new(remote.page);
        let offset_bytes = local.offset_bytes() + u64::from(part.from_bytes);
        let body = Body::Pool {
            session: 0,
            offset_bytes,
            length_bytes,
        };
        Some((header, body))
    }
}
