//! How an initiator finds its target, gets channels and sessions, and leaves: section *Sessions* of `docs/formats/wire.md`.

use std::time::Duration;

use jericho_format::wire::{
    Accept, FLAG_CONTINUES, FLAG_READ_ONLY, FLAG_RESUMES, FLAG_TAKE_OVER, FrameHeader, Handshake,
    Hello, Mac, NAME_BYTES, Offer, PAYLOAD_BYTES_MAX, PAYLOADS, Refused, SLOTS_MAX, WIRE_MAGIC,
    WIRE_VERSION, frame_kind, payload_max_of, reason,
};
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{
    Attached, Ended, Initiator, InitiatorOutput, Leaving, LinkState, REDIAL_AFTER, Session,
};
use crate::Time;
use crate::attachment::{Attachment, Load};
use crate::channel::{Channel, State};
use crate::dial::{Asking, Dial, Offered, Sends};
use crate::frame::{Body, Frame, random_index};
use crate::key::Security;
use crate::noise::{Ends, Question};
use crate::requests::POOL_PAGES_MIN;
use crate::seal::Seals;

/// How long an initiator waits for further offers before its first session, to notice two targets.
const OFFERS_TIME: Duration = Duration::from_millis(20);
/// CLOSE frames of an end in order, and the time between them.
const CLOSES: u32 = 5;
const CLOSE_INTERVAL: Duration = Duration::from_millis(20);

impl Initiator {
    /// Takes OFFER, ACCEPT or REFUSED.
    pub(super) fn on_answer(&mut self, now: Time, nic: u16, header: &FrameHeader, payload: &[u8]) {
        let Some(link) = self.asked_link(nic, header, payload) else {
            return;
        };
        match header.kind {
            frame_kind::OFFER => {
                if let Ok((offer, _)) = Offer::read_from_prefix(payload)
                    && offer.magic == WIRE_MAGIC
                {
                    self.on_offer(now, link, header, &offer);
                }
            }
            frame_kind::ACCEPT => {
                self.on_accept(now, link, header, payload);
            }
            _ => {
                if let Ok((refused, tag)) = Refused::read_from_prefix(payload)
                    && refused.magic == WIRE_MAGIC
                {
                    self.on_refused(now, link, &refused, tag);
                }
            }
        }
    }

    /// Returns the link of a network interface whose question a frame answers.
    fn asked_link(&self, nic: u16, header: &FrameHeader, payload: &[u8]) -> Option<u16> {
        let index = header.index.get();
        let refused = Refused::read_from_prefix(payload).ok();
        let refused = refused.map_or(0, |(refused, _)| refused.index.get());
        let is_asked = |state: &LinkState| {
            let channel = state.channel.as_ref();
            match header.kind {
                frame_kind::OFFER => state.dial.hello_index() == Some(index),
                frame_kind::ACCEPT => state.dial.asked_index() == Some(index),
                // Of a HANDSHAKE, or of a frame on a channel.
                _ => {
                    state.dial.asked_index() == Some(refused)
                        || channel.is_some_and(|channel| channel.peer_index == refused)
                }
            }
        };
        let mut links = (0_u16..).zip(&self.links);
        let found = links.find(|(_, state)| state.link.nic == nic && is_asked(state))?;
        Some(found.0)
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
        // A target that was restarted has another instance, and the address that it had.
        if is_first
            && let Some((target, mac)) = state.answered
            && target != offer.target
            && mac != header.source
        {
            // The address of a frame may be damaged, and a target may have been restarted since the first answer. So the next search decides.
            state.conflicts += 1;
            if state.conflicts > 1 {
                return self.end(now, Ended::TwoTargets(mac, header.source));
            }
            (state.answered, state.dial) = (None, Dial::Idle);
            return state.dial.seek(now, || random_index(&mut self.entropy));
        }
        state.answered = Some((offer.target, header.source));
        let is_doubted = state.channel.as_ref().is_some_and(|one| one.is_doubted);
        let is_other = |session: Session| session.target != offer.target;
        if is_reachable && !is_doubted && self.session.is_some_and(is_other) {
            // The target of the session is alive, so this is another one.
            return;
        }
        let security = Security::of_number(offer.security);
        let trouble = match (security, &self.config.key) {
            _ if offer.version != WIRE_VERSION => Some(Ended::Version),
            (None, _) => Some(Ended::Version),
            (Some(Security::None), Some(_)) => Some(Ended::NoKeys),
            (Some(Security::Mac | Security::Encrypt), None) => Some(Ended::NeedsKey),
            _ => None,
        };
        if let Some(why) = trouble {
            return match &self.config.key {
                // Any host on the link can make an OFFER.
                Some(_) => self.doubt(now, why),
                None => self.end(now, why),
            };
        }
        let payload_max = payload_max_of(state.link.mtu).unwrap_or(PAYLOAD_BYTES_MAX as u16);
        let next = match is_first {
            true => now + OFFERS_TIME,
            false => now,
        };
        let offered = Offered {
            peer: header.source,
            cookie: offer.cookie,
            security: security.unwrap_or(Security::None),
            target: offer.target,
            host: match self.host == [0; NAME_BYTES] {
                true => offer.host,
                false => self.host,
            },
        };
        let index = random_index(&mut self.entropy);
        state.dial.offered(next, offered, index, payload_max);
    }

    pub(super) fn on_accept(&mut self, now: Time, link: u16, header: &FrameHeader, payload: &[u8]) {
        let at = usize::from(link);
        let Dial::Asking(asking) = self.links[at].dial else {
            return;
        };
        // `asked_link` has compared the index.
        if header.source != asking.offered.peer {
            return;
        }
        let Some((accept, seals)) = self.read_accept(at, &asking, payload) else {
            return;
        };
        let payload_max = accept.payload_max.get();
        if accept.instance != self.instance || payload_max > asking.payload_max {
            return;
        }
        let is_possible = accept.magic == WIRE_MAGIC
            && accept.version == WIRE_VERSION
            && PAYLOADS.contains(&payload_max)
            && (1..=SLOTS_MAX).contains(&accept.slots.get())
            && accept.pool_pages.get() >= POOL_PAGES_MIN;
        if !is_possible {
            return self.end(now, Ended::Protocol);
        }
        if self
            .session
            .is_none_or(|session| session.id != accept.session)
            && !self.begin_session(now, at, &accept, asking.offered.target)
        {
            return;
        }
        let state = &mut self.links[at];
        (state.dial, state.question) = (Dial::Idle, None);
        let credit = accept.credit.get();
        let attachment = Attachment {
            channel: Channel::new(credit, state.link.credit, None),
            link,
            peer: header.source,
            own_index: asking.index,
            peer_index: accept.index.get(),
            payload_max,
            seals,
            lane: state.lane,
            load: Load::default(),
            asked: None,
            is_doubted: false,
        };
        let near = accept.near_page.get();
        let near_end = near.saturating_add(accept.near_pages.get());
        self.requests.set_near(state.lane, near..near_end);
        if let Some(old) = state.channel.replace(attachment) {
            self.take_content(old);
        }
        // The target sends nothing on the channel before it has got a frame.
        self.send_ping(now, at);
        self.answers(now);
        self.take_events();
        self.outputs.push_back(InitiatorOutput::Attached(Attached {
            size_bytes: accept.size_bytes.get(),
            is_read_only: accept.flags.get() & FLAG_READ_ONLY != 0,
            security: asking.offered.security,
        }));
    }

    /// Returns the record of an ACCEPT, and what protects the frames of its channel. Returns `None` if it does not answer the HANDSHAKE of
    /// the link.
    fn read_accept(
        &mut self,
        link: usize,
        asking: &Asking,
        payload: &[u8],
    ) -> Option<(Accept, Seals)> {
        if self.config.key.is_none() {
            let (accept, _) = Accept::read_from_prefix(payload).ok()?;
            return Some((accept, Seals::Checksum(accept.salt.get())));
        }
        let question = self.links[link].question.as_mut()?;
        let is_current = question.handshake.index.get() == asking.index;
        let (accept, secrets) = question.answered(payload).filter(|_| is_current)?;
        let of_frames = (&*secrets.to_target, &*secrets.to_initiator);
        let seals = Seals::keys(
            of_frames,
            asking.offered.security,
            self.config.frames_per_key,
        );
        Some((accept, seals))
    }

    /// Leaves the old session and begins a new one: rules 11 and 14. Returns `false` if others may have changed the export.
    fn begin_session(&mut self, now: Time, link: usize, accept: &Accept, target: [u8; 16]) -> bool {
        self.excuse = None;
        for (other, state) in self.links.iter_mut().enumerate() {
            state.channel = None;
            if other != link {
                state.dial = Dial::Idle;
                state.dial.seek(now, || random_index(&mut self.entropy));
            }
        }
        self.session = Some(Session {
            id: accept.session,
            target,
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

    /// Takes REFUSED, and the tag that it has with keys.
    pub(super) fn on_refused(&mut self, now: Time, link: u16, refused: &Refused, tag: &[u8]) {
        let state = &mut self.links[usize::from(link)];
        let refused_index = refused.index.get();
        let key = self.config.key.as_ref();
        if refused.reason.get() == reason::UNKNOWN_INDEX {
            let is_ours = |old: &&mut Attachment| old.peer_index == refused_index;
            let Some(old) = state.channel.as_mut().filter(is_ours) else {
                return;
            };
            let stays = matches!(self.leaving, Leaving::No);
            if key.is_some() && stays {
                // Any host on the link can send this frame. So the initiator keeps the channel until another one replaces it.
                if state.doubts_from <= now {
                    state.doubts_from = now + REDIAL_AFTER;
                    old.is_doubted = true;
                    state.dial.seek(now, || random_index(&mut self.entropy));
                }
                return;
            }
            if stays {
                state.dial.seek(now, || random_index(&mut self.entropy));
            }
            if let Some(old) = state.channel.take() {
                self.take_content(old);
            }
            return;
        }
        if state.dial.asked_index() != Some(refused_index) {
            return;
        }
        let had_session = self.session.is_some();
        let question = state.question.as_ref();
        let is_genuine = key.is_none_or(|key| {
            question.is_some_and(|one| one.is_refused(key, refused.as_bytes(), tag))
        });
        match refused.reason.get() {
            reason::WAITING if is_genuine => state.dial.waits(now),
            reason::FENCED if is_genuine => self.end(now, Ended::Fenced),
            reason::IN_USE if is_genuine && had_session => self.end(now, Ended::Fenced),
            reason::IN_USE if is_genuine => self.end(now, Ended::InUse),
            // A target cannot prove these to a client whose key it does not know.
            reason::VERSION if key.is_some() => self.doubt(now, Ended::Version),
            reason::NOT_ALLOWED if key.is_some() => self.doubt(now, Ended::NotAllowed),
            _ if key.is_some() => {}
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
            Some(State::Up) if !state.channel.as_ref().is_some_and(|one| one.is_doubted) => {
                (state.dial, state.question) = (Dial::Idle, None);
            }
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
        let question = self.links[link].question.as_ref();
        let repeated = question.map(|question| question.handshake);
        let repeated = repeated.filter(|handshake| handshake.index.get() == asking.index);
        let Some(handshake) = repeated.or_else(|| self.new_handshake(link, asking)) else {
            return;
        };
        let mut body = handshake.as_bytes().to_vec();
        body.resize(asking.payload_max.into(), 0);
        self.send_outside(link, asking.offered.peer, frame_kind::HANDSHAKE, body);
    }

    /// Returns the HANDSHAKE of an attempt. With keys, keeps it for its repetitions. Returns `None` if the library of the keys fails.
    fn new_handshake(&mut self, link: usize, asking: &Asking) -> Option<Handshake> {
        let mut handshake = Handshake::new_zeroed();
        handshake.magic = WIRE_MAGIC;
        handshake.version = WIRE_VERSION;
        handshake.security = asking.offered.security.number();
        let had_session = self.session.is_some();
        let take_over = u16::from(self.config.take_over && !had_session) * FLAG_TAKE_OVER;
        let resumes = u16::from(had_session) * FLAG_RESUMES;
        handshake.flags = U16::new(take_over + resumes);
        handshake.index = U32::new(asking.index);
        handshake.cookie = asking.offered.cookie;
        (handshake.client, handshake.instance) = (self.config.client, self.instance);
        handshake.export = self.export;
        handshake.payload_max = U16::new(asking.payload_max);
        handshake.credit = U16::new(self.links[link].link.credit);
        let old = self.links[link].channel.as_ref();
        handshake.lane = U16::new(self.links[link].lane);
        handshake.replaces = U32::new(old.map_or(0, |old| old.own_index));
        let Some(key) = &self.config.key else {
            return Some(handshake);
        };
        let ends = Ends {
            host: asking.offered.host,
            target: asking.offered.target,
            target_mac: asking.offered.peer,
            initiator_mac: self.links[link].link.mac,
        };
        let question = Question::new(key, handshake, ends, &mut self.entropy)?;
        let handshake = question.handshake;
        self.links[link].question = Some(question);
        Some(handshake)
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
