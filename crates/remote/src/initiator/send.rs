//! Frames of an initiator's channels.

use jericho_format::wire::{FrameHeader, RequestRecord, frame_kind};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::{Initiator, InitiatorOutput, LinkState};
use crate::Time;
use crate::attachment::{Attachment, Sender, level};
use crate::content::{Content, Part};
use crate::frame::{Body, Frame};
use crate::lanes::Sources;

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

    /// Sends content on the channels, as far as they have room, and then the acknowledgements that are due.
    pub(super) fn transmit(&mut self, now: Time) {
        let count = self.links.len();
        let records = self.requests.waiting_records();
        let in_progress = self.requests.in_progress().saturating_sub(records);
        let holds = self.batch.holds(now, records, in_progress);
        if !holds {
            self.batch.release();
        }
        self.look(now, holds);
        let open = self.open_lanes();
        let has_room = |state: &LinkState| {
            let channel = state.channel.as_ref();
            channel.is_some_and(|attachment| attachment.channel.has_room())
        };
        let mut ready: Vec<usize> = (0..count).filter(|&at| has_room(&self.links[at])).collect();
        while let Some(place) = self.next_of(&ready, holds) {
            let link = ready[place];
            if self.transmit_one(now, link, &open, holds) {
                self.turn = (link + 1) % count;
            } else {
                ready.swap_remove(place);
            }
        }
        for link in 0..count {
            let attachment = self.links[link].channel.as_ref();
            if attachment.is_some_and(|attachment| attachment.channel.is_ack_due(now)) {
                self.send_ack(now, link);
            }
        }
    }

    /// Returns which of some links sends next: the one that has carried the fewest bytes, and of several the next one in turn.
    ///
    /// While the lanes are open, requests take the links in turn, because the target answers a read on the lane of the link that carried the request. The
    /// payloads of writes do not take turns: some links would get all small frames with requests, and others all large frames with payloads.
    fn next_of(&self, ready: &[usize], holds: bool) -> Option<usize> {
        let count = self.links.len();
        let is_in_turn = !holds && self.schedule.is_open() && self.requests.waiting_records() > 0;
        let key = |link: usize| {
            let attachment = self.links[link].channel.as_ref();
            let bytes = attachment.filter(|_| !is_in_turn);
            let bytes = bytes.map_or(0, Attachment::balance_bytes);
            (bytes, (link + count - self.turn) % count)
        };
        (0..ready.len()).min_by_key(|&place| key(ready[place]))
    }

    /// Returns for each lane whether channels of other lanes may take its content.
    fn open_lanes(&self) -> Vec<bool> {
        let is_open = self.schedule.is_open();
        let channels = self.channels_of_lanes();
        match channels.len() {
            1 => vec![false],
            _ => channels.iter().map(|&up| is_open || up == 0).collect(),
        }
    }

    /// Returns how many channels of each lane work.
    fn channels_of_lanes(&self) -> Vec<u64> {
        let mut channels = vec![0; self.nodes.len().max(1)];
        for state in &self.links {
            let is_up = state.channel.as_ref().is_some_and(Attachment::is_up);
            channels[usize::from(state.lane)] += u64::from(is_up);
        }
        channels
    }

    /// Has the scheduler look at the load, if it is time. `holds`: records wait for others, and not for channels.
    fn look(&mut self, now: Time, holds: bool) {
        let channels = self.channels_of_lanes();
        if channels.len() == 1 || !self.schedule.is_due(now) {
            return;
        }
        let lanes = 0..channels.len() as u16;
        let waits: Vec<bool> = lanes
            .map(|lane| self.lane_waits(now, lane, holds))
            .collect();
        let changes = self.schedule.changes();
        self.schedule.look(now, &channels, &waits);
        if self.schedule.changes() != changes {
            let channels = self.links.iter_mut();
            level(channels.filter_map(|state| state.channel.as_mut()));
        }
    }

    /// Returns whether a lane has more to send than its channels carry: content waits here, or frames wait in queues below the sockets of all these
    /// channels. `holds`: records wait for others, and not for channels.
    fn lane_waits(&mut self, now: Time, lane: u16, holds: bool) -> bool {
        let own = self.links.iter_mut().filter(|state| state.lane == lane);
        let channels = own.filter_map(|state| state.channel.as_mut());
        let queues: Vec<bool> = channels
            .filter(|attachment| attachment.is_up())
            .map(|attachment| attachment.channel.has_standing_queue(now))
            .collect();
        let is_queued = !queues.is_empty() && queues.iter().all(|queues| *queues);
        is_queued || self.requests.waiting_bytes(lane, holds) > 0
    }

    /// Sends one frame with content on a link. `holds`: records must still wait. Returns whether it did.
    fn transmit_one(&mut self, now: Time, link: usize, open: &[bool], holds: bool) -> bool {
        let attachment = self.links[link].channel.as_ref();
        let Some(attachment) = attachment.filter(|attachment| attachment.channel.has_room()) else {
            return false;
        };
        let (payload_max, acks_fit) =
            (attachment.payload_max, attachment.channel.acks_fit_header());
        let own = attachment.lane;
        let from = Sources { own, open };
        let Some(content) = self.requests.next_content(from, payload_max, holds) else {
            return false;
        };
        let lane = self.requests.lane_of_content(&content);
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
            let bytes = u64::from(frame.0.payload_bytes.get());
            if let Some(channel) = &mut self.links[link].channel {
                channel.carried(lane, bytes);
            }
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
