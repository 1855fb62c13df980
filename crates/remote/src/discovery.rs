//! Asks which exports there are. Needs no key and begins no session: HELLO without a name, and the OFFERs that answer it.

use std::collections::BTreeMap;

use jericho_format::wire::{
    FLAG_FROM_TARGET, FLAG_READ_ONLY, FrameHeader, Hello, Mac, NAME_BYTES, Offer, WIRE_MAGIC,
    WIRE_VERSION, frame_kind,
};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::frame::{Body, Entropy, Frame, Link, random_index};
use crate::key::Security;

/// Most exports that are kept: frames may be forged.
const FOUND_MAX: usize = 10_000;

/// An export that has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Name of its host.
    pub host: String,
    /// Name of the export.
    pub export: String,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// How its frames are protected. `None`: in a way that this side does not know.
    pub security: Option<Security>,
    /// Whether its target speaks a version of the protocol that this side speaks.
    pub is_usable: bool,
    /// Addresses of its target, with the index of the link that each was seen on.
    pub addresses: Vec<(u16, Mac)>,
}

/// Host, export and instance of the target.
type Key = ([u8; NAME_BYTES], [u8; NAME_BYTES], [u8; 16]);

/// Asks all targets on some links.
pub struct Discovery {
    links: Vec<Link>,
    ethertype: u16,
    index: u32,
    found: BTreeMap<Key, Found>,
}

impl Discovery {
    /// Creates a discovery that has asked nothing yet.
    pub fn new(links: &[Link], ethertype: u16, mut entropy: Entropy) -> Discovery {
        Discovery {
            links: links.to_vec(),
            ethertype,
            index: random_index(&mut entropy),
            found: BTreeMap::new(),
        }
    }

    /// Returns a HELLO for each link. The caller sends them several times, because a frame may be lost.
    pub fn questions(&self) -> Vec<Frame> {
        let mut hello = Hello::new_zeroed();
        hello.magic = WIRE_MAGIC;
        (hello.version_min, hello.version_max) = (WIRE_VERSION, WIRE_VERSION);
        hello.index = U32::new(self.index);
        let question = |(at, link): (u16, &Link)| {
            let header = FrameHeader::new(frame_kind::HELLO, size_of::<Hello>());
            let body = Body::Bytes(hello.as_bytes().to_vec());
            Frame::new((at, link.mac), [0xff; 6], self.ethertype, header, body)
        };
        (0..).zip(&self.links).map(question).collect()
    }

    /// Takes a frame that has arrived on a link. Ignores all but answers to its questions.
    pub fn on_frame(&mut self, link: u16, frame: &[u8]) {
        let Some((header, payload)) = FrameHeader::split(frame) else {
            return;
        };
        let Some(own) = self.links.get(usize::from(link)) else {
            return;
        };
        let is_answer = header.kind == frame_kind::OFFER
            && header.ethertype.get() == self.ethertype
            && header.destination == own.mac
            && header.flags & FLAG_FROM_TARGET != 0
            && header.index.get() == self.index
            && header.is_sealed(0, payload);
        let Ok((offer, _)) = Offer::read_from_prefix(payload) else {
            return;
        };
        if !is_answer || offer.magic != WIRE_MAGIC {
            return;
        }
        let (Some(host), Some(export)) = (text(&offer.host), text(&offer.export)) else {
            return;
        };
        let key = (offer.host, offer.export, offer.target);
        if self.found.len() == FOUND_MAX && !self.found.contains_key(&key) {
            return;
        }
        let security = Security::of_number(offer.security);
        let found = self.found.entry(key).or_insert(Found {
            host,
            export,
            is_read_only: offer.flags.get() & FLAG_READ_ONLY != 0,
            security,
            is_usable: offer.version == WIRE_VERSION && security.is_some(),
            addresses: vec![],
        });
        let address = (link, header.source);
        let is_known = found.addresses.contains(&address);
        if !is_known && found.addresses.len() < self.links.len() {
            found.addresses.push(address);
        }
    }

    /// Returns what has answered, by host and export. Two targets of one name are two entries.
    pub fn found(&self) -> Vec<Found> {
        self.found.values().cloned().collect()
    }
}

/// Returns a name without its padding. Returns `None` for bytes that are no name: a stranger may have sent them.
fn text(name: &[u8; NAME_BYTES]) -> Option<String> {
    let end = name.iter().position(|byte| *byte == 0);
    let (name, padding) = name.split_at(end.unwrap_or(NAME_BYTES));
    let text = std::str::from_utf8(name).ok()?;
    let is_name = !text.is_empty()
        && !text.contains(|c: char| c.is_control() || c == '/')
        && padding.iter().all(|byte| *byte == 0);
    is_name.then(|| text.to_owned())
}
