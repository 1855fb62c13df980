//! Frames of an initiator's channels.

use jericho_format::wire::{FrameHeader, RequestRecord, frame_kind};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::{Initiator, InitiatorOutput};
use crate::Time;
use crate::attachment::{Attachment, Sender};
use crate::content::{Content, Part};
use crate::frame::{Body, Frame};

impl Initiator {
    /// Sends CLOSE on all channels.
    pub(super) fn send_close(&mut self, now: Time, reason: u16) {
        for link in 0..self.links.len() {
            self.send(link, |channel, sender| channel.close(now, sender, reason));
        }
    }

    pub(super) fn send_ping(&mut self, now: Time, link: usize) {
        self.send(link, |channel, sender| channel.ping(now, sender));
    }

    fn send_ack(&mut self, now: Time, link: usize) {
        self.send(link, |channel, sender| channel.ack(now, sender));
    }

    /// Sends a frame that the link's channel makes, if it has one.
    fn send(&mut self, link: usize, make: impl FnOnce(&mut Attachment, &Sender) -> Frame) {
        let state = &mut self.links[link];
        let Some(channel) = &mut state.channel else {
            return;
        };
        let sender = Sender {
            mac: state.link.mac,
            ethertype: self.config.ethertype,
            flags: 0,
        };
        let frame = make(channel, &sender);
        self.outputs.push_back(InitiatorOutput::Send(frame));
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
    fn transmit_one(&mut self, now: Time, link: usize) -> bool {
        let attachment = self.links[link].channel.as_ref();
        let Some(attachment) = attachment.filter(|attachment| attachment.channel.has_room()) else {
            return false;
        };
        let (payload_max, acks_fit) =
            (attachment.payload_max, attachment.channel.acks_fit_header());
        let Some(content) = self.requests.next_content(payload_max) else {
            return false;
        };
        let frame = match &content {
            Content::Records(names) => {
                let records = names.iter().filter_map(|name| self.requests.record(*name));
                let records: Vec<RequestRecord> = records.collect();
                let body = records.as_bytes().to_vec();
                let header = FrameHeader::new(frame_kind::REQUESTS, body.len());
                Some((header, Body::Bytes(body)))
            }
            Content::Data(part) => self.data_frame(*part),
        };
        if !acks_fit {
            self.send_ack(now, link);
        }
        if let Some(frame) = frame {
            self.send(link, |channel, sender| {
                channel.content(now, sender, frame, content)
            });
        }
        true
    }

    fn data_frame(&self, part: Part) -> Option<(FrameHeader, Body)> {
        let (local, remote) = self.requests.runs(part.name)?;
        let mut header = part.header();
        header.pool_page = U32::new(remote.page);
        let body = Body::Pool {
            session: 0,
            offset_bytes: local.offset_bytes() + u64::from(part.from_bytes),
            length_bytes: part.length_bytes(),
        };
        Some((header, body))
    }
}
