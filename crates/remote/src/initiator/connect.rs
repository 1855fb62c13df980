//! How an initiator finds its target, gets channels and sessions, and leaves: section *Sessions* of `docs/formats/wire.md`.

use std::time::Duration;

use jericho_format::wire::{
    Accept, FLAG_CONTINUES, FLAG_READ_ONLY, FLAG_RESUMES, FLAG_TAKE_OVER, FrameHeader, Handshake,
    Hello, Mac, NAME_BYTES, Offer, PAYLOAD_BYTES_MAX, PAYLOADS, Refused, SLOTS_MAX, WIRE_MAGIC,
    WIRE_VERSION, frame_kind, payload_max_of, reason,
};
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{Attached, Ended, Initiator, InitiatorOutput, Leaving, REDIAL_AFTER, Session};
use crate::Time;
use crate::attachment::Attachment;
use crate::channel::{Channel, State};
use crate::dial::{Asking, Dial, Sends};
use crate::frame::{Body, Frame, random_index};
use crate::requests::POOL_PAGES_MIN;

/// How long an initiator waits for further offers before its first session, to notice two targets.
const OFFERS_TIME: Duration = Duration::from_millis(20);
/// CLOSE frames of an end in order, and the time between them.
const CLOSES: u32 = 5;
const CLOSE_INTERVAL: Duration = Duration::from_millis(20);

impl Initiator {
    /// Takes OFFER, ACCEPT or REFUSED.
    pub(super) fn on_answer(&mut self, now: Time, link: u16, header: &FrameHeader, payload: &[u8]) {
        let Some((magic, _)) = payload.split_first_chunk::<8>() else {
            return;
        };
        if *magic != WIRE_MAGIC {
            return;
        }
        match header.kind {
            frame_kind::OFFER => {
                if let Ok((offer, _)) = Offer::read_from_prefix(payload) {
                    self.on_offer(now, link, header, &offer);
                }
            }
            frame_kind::ACCEPT => {
                if let Ok((accept, _)) = Accept::read_from_prefix(payload) {
                    self.on_accept(now, link, header, &accept);
                }
            }
            _ => {
                if let Ok((refused, _)) = Refused::read_from_prefix(payload) {
                    self.on_refused(now, link, &refused);
                }
            }
        }
    }

    pub(super) fn on_offer(&mut self, now: Time, link: u16, header: &FrameHeader, offer: &Offer) {
        // Another interface of the target has another address.
        let is_known = self.session.is_some_and(|s| s.target == offer.target);
        let is_wanted = offer.export == self.export
            && (self.host == [0; NAME_BYTES] || offer.host == self.host)
            && (is_known || self.address.is_none_or(|address| address == header.source));
        if !is_wanted {
            return;
        }
        let is_first = self.session.is_none();
        let is_reachable = self.is_reachable;
        let state = &mut self.links[usize::from(link)];
        if state.dial.hello_index() != Some(header.index.get()) {
            return;
        }
        // A target that was restarted has another instance, and the address that it had.
        if is_first
            && let Some((target, mac)) = state.answered
            && target != offer.target
            && mac != header.source
        {
            return self.end(now, Ended::TwoTargets(mac, header.source));
        }
        state.answered = Some((offer.target, header.source));
        if is_reachable
            && self
                .session
                .is_some_and(|session| session.target != offer.target)
        {
            // The target of the session is alive, so this is another one.
            return;
        }
        if offer.version != WIRE_VERSION {
            return self.end(now, Ended::Version);
        }
        let payload_max = payload_max_of(state.link.mtu).unwrap_or(PAYLOAD_BYTES_MAX as u16);
        let next = match is_first {
            true => now + OFFERS_TIME,
            false => now,
        };
        let offered = (header.source, offer.cookie);
        let index = random_index(&mut self.entropy);
        state.dial.offered(next, offered, index, payload_max);
    }

    pub(super) fn on_accept(
        &mut self,
        now: Time,
        link: u16,
        header: &FrameHeader,
        accept: &Accept,
    ) {
        let at = usize::from(link);
        let Dial::Asking(asking) = self.links[at].dial else {
            return;
        };
        let payload_max = accept.payload_max.get();
        if header.index.get() != asking.index
            || accept.instance != self.instance
            || payload_max > asking.payload_max
        {
            return;
        }
        let is_possible = accept.version == WIRE_VERSION
            && PAYLOADS.contains(&payload_max)
            && (1..=SLOTS_MAX).contains(&accept.slots.get())
            && accept.pool_pages.get() >= POOL_PAGES_MIN;
        if !is_possible {
            return self.end(now, Ended::Protocol);
        }
        if self
            .session
            .is_none_or(|session| session.id != accept.session)
            && !self.begin_session(now, at, accept)
        {
            return;
        }
        self.requests.on_verifier(accept.verifier.get());
        let state = &mut self.links[at];
        state.dial = Dial::Idle;
        let credit = accept.credit.get();
        let attachment = Attachment {
            channel: Channel::new(credit, state.link.credit, None),
            link,
            peer: header.source,
            own_index: asking.index,
            peer_index: accept.index.get(),
            payload_max,
        };
        if let Some(old) = state.channel.replace(attachment) {
            self.take_content(old);
        }
        self.answers(now);
        self.take_events();
        self.outputs.push_back(InitiatorOutput::Attached(Attached {
            size_bytes: accept.size_bytes.get(),
            is_read_only: accept.flags.get() & FLAG_READ_ONLY != 0,
        }));
    }

    /// Leaves the old session and begins a new one: rules 11 and 14. Returns `false` if others may have changed the export.
    pub(super) fn begin_session(&mut self, now: Time, link: usize, accept: &Accept) -> bool {
        for (other, state) in self.links.iter_mut().enumerate() {
            state.channel = None;
            if other != link {
                state.dial = Dial::Idle;
                state.dial.seek(now, || random_index(&mut self.entropy));
            }
        }
        let target = self.links[link]
            .answered
            .map_or([0; 16], |(target, _)| target);
        self.session = Some(Session {
            id: accept.session,
            target,
            salt: accept.salt.get(),
        });
        let begins = self.requests.begin_session(
            accept.slots.get(),
            accept.pool_pages.get(),
            accept.verifier.get(),
            accept.flags.get() & FLAG_CONTINUES != 0,
        );
        if !begins {
            self.end(now, Ended::Fenced);
        }
        begins
    }

    pub(super) fn on_refused(&mut self, now: Time, link: u16, refused: &Refused) {
        let state = &mut self.links[usize::from(link)];
        let refused_index = refused.index.get();
        if refused.reason.get() == reason::UNKNOWN_INDEX {
            let is_ours = |old: &mut Attachment| old.peer_index == refused_index;
            if let Some(old) = state.channel.take_if(is_ours) {
                if let Leaving::No = self.leaving {
                    state.dial.seek(now, || random_index(&mut self.entropy));
                }
                self.take_content(old);
            }
            return;
        }
        if state.dial.asked_index() != Some(refused_index) {
            return;
        }
        let had_session = self.session.is_some();
        match refused.reason.get() {
            reason::WAITING => state.dial.waits(now),
            reason::FENCED => self.end(now, Ended::Fenced),
            reason::IN_USE if had_session => self.end(now, Ended::Fenced),
            reason::IN_USE => self.end(now, Ended::InUse),
            reason::VERSION => self.end(now, Ended::Version),
            reason::NOT_ALLOWED => self.end(now, Ended::NotAllowed),
            _ => self.end(now, Ended::Protocol),
        }
    }

    pub(super) fn take_content(&mut self, mut old: Attachment) {
        let mut lost = Vec::new();
        old.channel.give_up_all(&mut lost);
        self.requests.lost(lost);
    }

    pub(super) fn on_link_timer(&mut self, now: Time, link: usize) {
        let state = &mut self.links[link];
        match state.channel.as_ref().map(|old| old.channel.state()) {
            Some(State::Suspect { since, .. })
                if since + REDIAL_AFTER <= now && matches!(self.leaving, Leaving::No) =>
            {
                state.dial.seek(now, || random_index(&mut self.entropy));
            }
            Some(State::Up) => state.dial = Dial::Idle,
            _ => {}
        }
        let index = || random_index(&mut self.entropy);
        let sends = state.dial.on_timer(now, index, self.is_reachable);
        let mut lost = Vec::new();
        let waits = self.requests.is_active();
        let pings = match &mut state.channel {
            Some(Attachment { channel, .. }) => {
                let is_silent = waits && channel.silent_at().is_some_and(|time| time <= now);
                channel.on_timer(now, &mut lost) || is_silent
            }
            None => false,
        };
        self.requests.lost(lost);
        match sends {
            Some(Sends::Hello { index }) => self.send_hello(link, index),
            Some(Sends::Handshake(asking)) => self.send_handshake(link, &asking),
            None => {}
        }
        if pings {
            self.send_ping(now, link);
        }
    }

    pub(super) fn send_hello(&mut self, link: usize, index: u32) {
        let mut hello = Hello::new_zeroed();
        hello.magic = WIRE_MAGIC;
        (hello.version_min, hello.version_max) = (WIRE_VERSION, WIRE_VERSION);
        hello.index = U32::new(index);
        (hello.host, hello.export) = (self.host, self.export);
        let body = hello.as_bytes().to_vec();
        self.send_outside(link, [0xff; 6], frame_kind::HELLO, body);
    }

    pub(super) fn send_handshake(&mut self, link: usize, asking: &Asking) {
        let mut handshake = Handshake::new_zeroed();
        handshake.magic = WIRE_MAGIC;
        handshake.version = WIRE_VERSION;
        let had_session = self.session.is_some();
        let take_over = u16::from(self.config.take_over && !had_session) * FLAG_TAKE_OVER;
        let resumes = u16::from(had_session) * FLAG_RESUMES;
        handshake.flags = U16::new(take_over + resumes);
        handshake.index = U32::new(asking.index);
        handshake.cookie = asking.cookie;
        (handshake.client, handshake.instance) = (self.config.client, self.instance);
        handshake.export = self.export;
        handshake.credit = U16::new(self.links[link].link.credit);
        handshake.payload_max = U16::new(asking.payload_max);
        let old = self.links[link].channel.as_ref();
        handshake.replaces = U32::new(old.map_or(0, |old| old.own_index));
        let mut body = handshake.as_bytes().to_vec();
        body.resize(asking.payload_max.into(), 0);
        self.send_outside(link, asking.peer, frame_kind::HANDSHAKE, body);
    }

    pub(super) fn send_outside(&mut self, link: usize, to: Mac, kind: u8, body: Vec<u8>) {
        let header = FrameHeader::new(kind, body.len());
        let from = (link as u16, self.links[link].link.mac);
        let frame = Frame::new(from, to, self.config.ethertype, header, Body::Bytes(body));
        self.outputs.push_back(InitiatorOutput::Send(frame));
    }

    /// Sends CLOSE on all channels, a few times, and ends.
    pub(super) fn leave(&mut self, now: Time) {
        let Leaving::Closing { closes, next } = self.leaving else {
            return;
        };
        if next > now {
            return;
        }
        let has_channel = self.links.iter().any(|state| state.channel.is_some());
        if closes == CLOSES || !has_channel {
            return self.end(now, Ended::Detached);
        }
        self.leaving = Leaving::Closing {
            closes: closes + 1,
            next: now + CLOSE_INTERVAL,
        };
        self.send_close(now, reason::DETACHED);
    }
}
