//! How sessions and channels begin at a target: section *Sessions* of `docs/formats/wire.md`.

use std::time::Duration;

use jericho_format::wire::{
    Accept, CHANNELS_MAX, FLAG_CONTINUES, FLAG_FROM_TARGET, FLAG_READ_ONLY, FLAG_RESUMES,
    FLAG_TAKE_OVER, FrameHeader, Handshake, Hello, LANES_MAX, Mac, NAME_BYTES, Offer, PAYLOADS,
    Refused, WIRE_MAGIC, WIRE_VERSION, frame_kind, payload_max_of, reason,
};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{FORGED_BUCKETS, Strange, Target, TargetOutput};
use crate::Time;
use crate::attachment::{Asked, Attachment, Load};
use crate::channel::Channel;
use crate::export::{Export, Owner, Pending};
use crate::frame::{Body, Frame, random_index};
use crate::key::Security;
use crate::noise::{self, Ends};
use crate::seal::Seals;

/// How long a channel that does not answer sends PING.
const QUIET_AFTER: Duration = Duration::from_secs(10);
/// Frames that a channel may have in flight in any case.
const CREDIT_MIN: usize = 4;
/// Answers to unknown indexes in a second.
const UNKNOWN_MAX: u32 = 100;
/// How long one index is not answered again: the frames of one initiator must not use up the answers for others.
const UNKNOWN_PAUSE: Duration = Duration::from_millis(5);
/// HANDSHAKEs of an address in a second whose forgery is noticed with some effort.
const FORGED_MAX: u16 = 50;

impl Target {
    /// Takes HELLO or HANDSHAKE.
    pub(super) fn on_outside(
        &mut self,
        now: Time,
        link: u16,
        header: &FrameHeader,
        payload: &[u8],
    ) {
        match header.kind {
            frame_kind::HELLO => {
                let Ok((hello, _)) = Hello::read_from_prefix(payload) else {
                    return;
                };
                if hello.magic == WIRE_MAGIC {
                    self.on_hello(now, link, header, &hello);
                }
            }
            frame_kind::HANDSHAKE => {
                let Ok((handshake, _)) = Handshake::read_from_prefix(payload) else {
                    return;
                };
                // It is as long as the answer, so that no host can make the target send more bytes than the host sends itself.
                let is_whole = payload.len() >= handshake.payload_max.get().into();
                if handshake.magic == WIRE_MAGIC && is_whole {
                    self.on_handshake(now, (link, header.source), &handshake);
                }
            }
            _ => {}
        }
    }

    pub(super) fn on_hello(&mut self, now: Time, link: u16, header: &FrameHeader, hello: &Hello) {
        let any = [0; NAME_BYTES];
        if hello.host != any && hello.host != self.host {
            return;
        }
        let speaks = (hello.version_min..=hello.version_max).contains(&WIRE_VERSION);
        for export in 0..self.exports.len() {
            let known = &self.exports[export];
            let is_asked = match hello.export == any {
                true => !known.config.is_hidden,
                false => hello.export == known.name,
            };
            if !is_asked {
                continue;
            }
            let mut offer = Offer::new_zeroed();
            offer.magic = WIRE_MAGIC;
            offer.version = if speaks { WIRE_VERSION } else { 0 };
            offer.security = known.config.security.number();
            offer.flags = U16::new(u16::from(known.config.is_read_only) * FLAG_READ_ONLY);
            let generation = (export, known.generation);
            offer.cookie = self.cookies.give(now, (link, header.source), generation);
            (offer.target, offer.host, offer.export) = (self.instance, self.host, known.name);
            let body = offer.as_bytes().to_vec();
            let to = (link, header.source);
            self.send_outside(to, hello.index.get(), frame_kind::OFFER, body);
        }
    }

    /// Takes a HANDSHAKE: rules 12 to 14.
    pub(super) fn on_handshake(&mut self, now: Time, who: (u16, Mac), handshake: &Handshake) {
        let named = |export: &Export| export.name == handshake.export;
        let Some(at) = self.exports.iter().position(named) else {
            return;
        };
        if let Some((number, index)) = self.repeated(at, who, handshake) {
            return self.accept(number, index);
        }
        let export = &self.exports[at];
        let is_repeated = |pending: &&Pending| {
            pending.handshake.instance == handshake.instance
                && pending.handshake.index == handshake.index
                && pending.handshake.noise == handshake.noise
        };
        if let Some(pending) = export.pending.as_ref().filter(is_repeated) {
            let asked = pending.handshake;
            return self.refuse(who, &asked, reason::WAITING);
        }
        let Some(cookie_generation) = self.given(now, at, who, handshake) else {
            return;
        };
        if handshake.version != WIRE_VERSION {
            return self.refuse_unproved(who, handshake, reason::VERSION);
        }
        let payload_max = handshake.payload_max.get();
        let is_possible = PAYLOADS.contains(&payload_max)
            && handshake.index.get() != 0
            && handshake.lane.get() < LANES_MAX;
        if !is_possible {
            return self.refuse_unproved(who, handshake, reason::PROTOCOL);
        }
        let client = match self.client_of(now, at, who, handshake) {
            Ok(client) => client,
            Err(None) => return,
            Err(Some(why)) => {
                self.notice_stranger(now, who.1, handshake, why);
                return self.refuse_unproved(who, handshake, reason::NOT_ALLOWED);
            }
        };
        let export = &self.exports[at];
        let resumes = handshake.flags.get() & FLAG_RESUMES != 0;
        let is_last = |owner: Owner| owner.instance == handshake.instance && owner.client == client;
        if resumes && !export.config.last_owner.is_some_and(is_last) {
            // It must not take the export back from the session that came after it.
            return self.refuse(who, handshake, reason::FENCED);
        }
        self.begin(now, at, who, handshake, (client, cookie_generation));
    }

    /// Returns the generation of the export for which the cookie of a HANDSHAKE was given, if it is still valid.
    fn given(
        &self,
        now: Time,
        export: usize,
        who: (u16, Mac),
        handshake: &Handshake,
    ) -> Option<u64> {
        let known = &self.exports[export];
        let owner = known.owner.and_then(|number| self.sessions.get(&number));
        // The session's own instance may ask again with the cookie that it has, with a smaller payload.
        let own = owner.filter(|session| session.instance == handshake.instance);
        let generations = [Some(known.generation), own.map(|o| o.cookie_generation)];
        let cookie = &handshake.cookie;
        let is_given = |given: &u64| self.cookies.accept(cookie, now, who, (export, *given));
        generations.into_iter().flatten().find(is_given)
    }

    /// Gives the export to a client that may have it: a further channel, or a new session.
    fn begin(
        &mut self,
        now: Time,
        at: usize,
        who: (u16, Mac),
        handshake: &Handshake,
        (client, cookie_generation): ([u8; 16], u64),
    ) {
        let export = &self.exports[at];
        let takes_over = handshake.flags.get() & FLAG_TAKE_OVER != 0;
        if let Some(pending) = &export.pending {
            // It asks again, and then replaces the session that begins now.
            let replaces = pending.client == client || takes_over;
            let reason = match replaces {
                true => reason::WAITING,
                false => reason::IN_USE,
            };
            return self.refuse(who, handshake, reason);
        }
        let owner = export.owner;
        let session = owner.and_then(|number| Some((number, self.sessions.get(&number)?)));
        match session {
            Some((number, session))
                if session.instance == handshake.instance && session.client == client =>
            {
                match self.add_channel(number, handshake, who) {
                    true => self.transmit(now, number),
                    false => self.refuse(who, handshake, reason::WAITING),
                }
            }
            Some((number, session)) => {
                if session.client != client && !takes_over {
                    return self.refuse(who, handshake, reason::IN_USE);
                }
                self.set_pending(at, who, handshake, (client, cookie_generation));
                self.refuse(who, handshake, reason::WAITING);
                self.fence(now, number, reason::FENCED);
            }
            None => {
                // Before a restart of the target another client had the export, and may come back with what it has not flushed.
                let is_others = |owner: Owner| owner.is_attached && owner.client != client;
                if export.config.last_owner.is_some_and(is_others) && !takes_over {
                    return self.refuse(who, handshake, reason::IN_USE);
                }
                self.set_pending(at, who, handshake, (client, cookie_generation));
                self.record_if_free(at);
            }
        }
    }

    /// Returns the client that has made a HANDSHAKE. With keys, clients with different keys differ, whatever they call themselves. Returns why it may not
    /// use the export, or `None` if its address has sent too many forged ones in this second: each costs time.
    fn client_of(
        &mut self,
        now: Time,
        export: usize,
        who: (u16, Mac),
        handshake: &Handshake,
    ) -> Result<[u8; 16], Option<Strange>> {
        let config = &self.exports[export].config;
        if handshake.security != config.security.number() {
            return Err(Some(Strange::OtherSecurity));
        }
        if config.security == Security::None {
            return Ok(handshake.client);
        }
        let bucket = (self.cookies.hash_of(&who.1) % FORGED_BUCKETS as u64) as usize;
        if self.forged.0 != now.as_secs() {
            self.forged = (now.as_secs(), [0; FORGED_BUCKETS]);
        }
        if self.forged.1[bucket] >= FORGED_MAX {
            return Err(None);
        }
        let client = self.exports[export].client(&handshake.key);
        let key = &client.ok_or(Some(Strange::UnknownKey))?.key;
        if !noise::is_genuine(key, handshake, &self.ends(who)) {
            self.forged.1[bucket] += 1;
            return Err(Some(Strange::Forged));
        }
        Ok(key.client(&handshake.client))
    }

    /// Returns the two ends of a channel of a link to an address.
    fn ends(&self, (link, mac): (u16, Mac)) -> Ends {
        Ends {
            host: self.host,
            target: self.instance,
            target_mac: self.links[usize::from(link)].mac,
            initiator_mac: mac,
        }
    }

    fn notice_stranger(&mut self, now: Time, mac: Mac, handshake: &Handshake, why: Strange) {
        if std::mem::replace(&mut self.stranger, now.as_secs()) != now.as_secs() {
            let key = handshake.key;
            let output = TargetOutput::Stranger { mac, key, why };
            self.outputs.push_back(output);
        }
    }

    pub(super) fn set_pending(
        &mut self,
        export: usize,
        (link, mac): (u16, Mac),
        handshake: &Handshake,
        (client, cookie_generation): ([u8; 16], u64),
    ) {
        let export = &mut self.exports[export];
        export.generation += 1;
        export.pending = Some(Pending {
            handshake: *handshake,
            client,
            cookie_generation,
            link,
            mac,
            is_recording: false,
        });
    }

    /// Returns the session and the index of a channel that an earlier copy of the HANDSHAKE made.
    fn repeated(
        &self,
        export: usize,
        (link, mac): (u16, Mac),
        handshake: &Handshake,
    ) -> Option<(u64, u32)> {
        let number = self.exports[export].owner?;
        let session = self.sessions.get(&number)?;
        if session.instance != handshake.instance {
            return None;
        }
        let is_same = |channel: &&Attachment| {
            let asked = channel.asked.as_ref();
            channel.peer_index == handshake.index.get()
                && (channel.link, channel.peer) == (link, mac)
                && asked.is_some_and(|asked| asked.noise == handshake.noise)
        };
        let channel = session.channels.iter().find(is_same)?;
        Some((number, channel.own_index))
    }

    /// Records the next owner, if no session has the export and none that had it executes an operation.
    pub(super) fn record_if_free(&mut self, at: usize) {
        let is_busy = self.sessions.values().any(|session| session.export == at);
        let export = &mut self.exports[at];
        if is_busy {
            return;
        }
        if let Some(pending) = &mut export.pending
            && !pending.is_recording
        {
            pending.is_recording = true;
            let owner = Owner {
                client: pending.client,
                instance: pending.handshake.instance,
                is_attached: true,
            };
            let export = at;
            let output = TargetOutput::RecordOwner { export, owner };
            self.outputs.push_back(output);
        }
    }

    /// Adds a channel to a session, and sends ACCEPT. Returns `false` if the session has too many, or its keys cannot be made.
    pub(super) fn add_channel(
        &mut self,
        number: u64,
        handshake: &Handshake,
        (link, peer): (u16, Mac),
    ) -> bool {
        let own_index = loop {
            let index = random_index(&mut self.entropy);
            if !self.indexes.contains_key(&index) {
                break index;
            }
        };
        let own = self.links[usize::from(link)];
        let link_max = payload_max_of(own.mtu).unwrap_or(u16::MAX);
        let payload_max = handshake.payload_max.get().min(link_max);
        let accept = self.accept_record(number, own_index, (link, payload_max));
        let Some(accept) = accept else {
            return false;
        };
        let ends = self.ends((link, peer));
        let Some(session) = self.sessions.get(&number) else {
            return false;
        };
        let export = &self.exports[session.export];
        let (mut seals, mut answer) = (Seals::Checksum(session.salt), accept.as_bytes().to_vec());
        if export.config.security != Security::None {
            let client = export.client(&handshake.key);
            let answered = client.and_then(|client| {
                noise::answer(&client.key, handshake, &ends, &accept, &mut self.entropy)
            });
            let Some((message, secrets)) = answered else {
                return false;
            };
            let of_frames = (&*secrets.to_initiator, &*secrets.to_target);
            let per_key = self.config.frames_per_key;
            seals = Seals::keys(of_frames, export.config.security, per_key);
            answer = message.to_vec();
        }
        if session.channels.len() >= CHANNELS_MAX {
            let is_unused = |channel: &Attachment| !channel.channel.has_received();
            let is_silent = |channel: &Attachment| !channel.is_up();
            let channels = &session.channels;
            let ends = channels.iter().position(is_unused);
            let Some(ends) = ends.or_else(|| channels.iter().position(is_silent)) else {
                return false;
            };
            self.end_channel(number, ends);
        }
        let Some(session) = self.sessions.get_mut(&number) else {
            return false;
        };
        let channel = Channel::new(handshake.credit.get(), own.credit, Some(QUIET_AFTER));
        session.channels.push(Attachment {
            channel: channel.unconfirmed(),
            link,
            peer,
            own_index,
            peer_index: handshake.index.get(),
            payload_max,
            seals,
            lane: handshake.lane.get(),
            load: Load::default(),
            asked: Some(Box::new(Asked {
                noise: handshake.noise,
                replaces: handshake.replaces.get(),
                answer,
            })),
            is_doubted: false,
        });
        self.indexes.insert(own_index, number);
        self.accept(number, own_index);
        true
    }

    /// Takes the first frame of a channel: the initiator uses it, in place of the one that it replaces.
    pub(super) fn confirmed(&mut self, number: u64, own_index: u32) {
        let Some(session) = self.sessions.get(&number) else {
            return;
        };
        let of_index = |channel: &&Attachment| channel.own_index == own_index;
        let Some(channel) = session.channels.iter().find(of_index) else {
            return;
        };
        let link = channel.link;
        let replaces = channel.asked.as_ref().map_or(0, |asked| asked.replaces);
        let is_replaced =
            |channel: &Attachment| channel.peer_index == replaces && channel.own_index != own_index;
        if let Some(ends) = session.channels.iter().position(is_replaced) {
            self.end_channel(number, ends);
        }
        self.share_credit(link);
    }

    /// Ends a channel of a session. Its content goes to others.
    fn end_channel(&mut self, number: u64, at: usize) {
        if let Some(session) = self.sessions.get_mut(&number) {
            let mut old = session.channels.remove(at);
            self.indexes.remove(&old.own_index);
            let mut lost = Vec::new();
            old.channel.give_up_all(&mut lost);
            session.slots.lost(lost);
        }
    }

    /// Shares the credit of a link among its channels: they have one receive buffer.
    pub(super) fn share_credit(&mut self, link: u16) {
        let share = self.share(link, 0);
        let sessions = self.sessions.values_mut();
        let channels = sessions.flat_map(|session| &mut session.channels);
        for one in channels.filter(|one| one.link == link) {
            one.channel.set_own_credit(share);
        }
    }

    /// Returns the credit of each used channel of a link. Counts the channel with the index `own_index` as used, too; 0: counts only the channels that are in use already.
    fn share(&self, link: u16, own_index: u32) -> u16 {
        let sessions = self.sessions.values();
        let channels = sessions.flat_map(|session| &session.channels);
        // Channels that the initiator has not used yet need no share.
        let is_used = |one: &&Attachment| one.link == link && one.channel.has_received();
        let others = channels.filter(|one| is_used(one) && one.own_index != own_index);
        let count = others.count() + usize::from(own_index != 0);
        let credit = usize::from(self.links[usize::from(link)].credit);
        (credit / count.max(1)).max(CREDIT_MIN) as u16
    }

    /// Sends ACCEPT for a channel.
    pub(super) fn accept(&mut self, number: u64, own_index: u32) {
        let session = &self.sessions[&number];
        let of_index = |channel: &&Attachment| channel.own_index == own_index;
        let Some(channel) = session.channels.iter().find(of_index) else {
            return;
        };
        let mut body = match &channel.asked {
            Some(asked) => asked.answer.clone(),
            None => return,
        };
        body.resize(channel.payload_max.into(), 0);
        let (to, index) = ((channel.link, channel.peer), channel.peer_index);
        self.send_outside(to, index, frame_kind::ACCEPT, body);
    }

    /// Returns the record of the ACCEPT for a channel with an index, a link and a largest payload.
    fn accept_record(
        &self,
        number: u64,
        own_index: u32,
        (link, payload_max): (u16, u16),
    ) -> Option<Accept> {
        let session = self.sessions.get(&number)?;
        let export = &self.exports[session.export];
        let mut accept = Accept::new_zeroed();
        accept.magic = WIRE_MAGIC;
        accept.version = WIRE_VERSION;
        accept.flags = U16::new(
            u16::from(export.config.is_read_only) * FLAG_READ_ONLY
                + u16::from(session.continues) * FLAG_CONTINUES,
        );
        accept.index = U32::new(own_index);
        (accept.instance, accept.session) = (session.instance, session.id);
        accept.size_bytes = U64::new(export.config.size_bytes);
        accept.verifier = U64::new(export.verifier);
        accept.salt = U32::new(session.salt);
        accept.pool_pages = U32::new(self.config.pool_pages);
        accept.slots = U16::new(self.config.slots);
        let (at, link) = (link, self.links[usize::from(link)]);
        accept.credit = U16::new(self.share(at, own_index));
        let near = self.near(link.node);
        accept.near_page = U32::new(near.start);
        accept.near_pages = U32::new(near.end - near.start);
        accept.payload_max = U16::new(payload_max);
        Some(accept)
    }

    /// Refuses a HANDSHAKE that the client has made: with keys, with a proof.
    pub(super) fn refuse(&mut self, who: (u16, Mac), handshake: &Handshake, reason: u16) {
        let refused = Refused::new(reason, handshake.index.get());
        let mut body = refused.as_bytes().to_vec();
        let mut exports = self.exports.iter();
        let export = exports.find(|export| export.name == handshake.export);
        if let Some(client) = export.and_then(|export| export.client(&handshake.key)) {
            let ends = self.ends(who);
            let tag = noise::refusal_tag(&client.key, handshake, &ends, refused.as_bytes());
            body.extend_from_slice(&tag);
        }
        self.send_outside(who, handshake.index.get(), frame_kind::REFUSED, body);
    }

    /// Refuses a HANDSHAKE that an attacker may have made or changed. With a proof, the attacker could end a session.
    fn refuse_unproved(&mut self, who: (u16, Mac), handshake: &Handshake, reason: u16) {
        let index = handshake.index.get();
        let body = Refused::new(reason, index).as_bytes().to_vec();
        self.send_outside(who, index, frame_kind::REFUSED, body);
    }

    /// Answers a frame with an index that no session has: rule 17.
    pub(super) fn on_unknown(&mut self, now: Time, link: u16, header: &FrameHeader) {
        if self.unknown.0 != now.as_secs() {
            self.unknown = (now.as_secs(), 0);
        }
        let index = header.index.get();
        let (last, answered) = self.last_unknown;
        let is_answered = last == index && now < answered + UNKNOWN_PAUSE;
        if self.unknown.1 >= UNKNOWN_MAX || is_answered {
            return;
        }
        self.last_unknown = (index, now);
        self.unknown.1 += 1;
        let refused = Refused::new(reason::UNKNOWN_INDEX, index);
        let body = refused.as_bytes().to_vec();
        self.send_outside((link, header.source), 0, frame_kind::REFUSED, body);
    }

    pub(super) fn send_outside(
        &mut self,
        (link, to): (u16, Mac),
        index: u32,
        kind: u8,
        body: Vec<u8>,
    ) {
        let mut header = FrameHeader::new(kind, body.len());
        header.index = U32::new(index);
        header.flags = FLAG_FROM_TARGET;
        let from = (link, self.links[usize::from(link)].mac);
        let frame = Frame::new(from, to, self.config.ethertype, header, Body::Bytes(body));
        self.outputs.push_back(TargetOutput::Send(frame));
    }
}
