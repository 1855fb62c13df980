//! What a target knows of an export besides its session: verifier, owners and the flush in progress.

use std::collections::VecDeque;

use jericho_format::wire::{FINGERPRINT_BYTES, Handshake, Mac, NAME_BYTES, name_field};

use crate::content::RequestId;
use crate::key::{Key, Security};

/// A device that a target serves.
#[derive(Clone, Debug)]
pub struct ExportConfig {
    /// Name, at most `wire::NAME_BYTES`.
    pub name: String,
    /// Size of the device, a multiple of 4096.
    pub size_bytes: u64,
    /// Refuse writes.
    pub is_read_only: bool,
    /// Do not answer a HELLO that does not name it.
    pub is_hidden: bool,
    /// The owner that `TargetOutput::RecordOwner` recorded last.
    pub last_owner: Option<Owner>,
    /// How frames are protected.
    pub security: Security,
    /// Clients that the target admits, with their keys. Every client is admitted if `security` is `None`.
    pub clients: Vec<Client>,
}

/// A client that may use an export.
#[derive(Clone, Debug)]
pub struct Client {
    /// The target's name for it, for messages.
    pub id: String,
    /// The key that it has.
    pub key: Key,
}

/// The client that has an export, or had it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The client.
    pub client: [u8; 16],
    /// Its instance.
    pub instance: [u8; 16],
    /// The instance has not ended its session in order. It may have changes that are not flushed.
    pub is_attached: bool,
}

/// A request of a session: the number of the session and the request's name.
pub(crate) type Asked = (u64, RequestId);

/// A HANDSHAKE that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub handshake: Handshake,
    /// The client, as the owner's record has it.
    pub client: [u8; 16],
    /// Generation of the export for which the cookie was given.
    pub cookie_generation: u64,
    pub link: u16,
    pub mac: Mac,
    /// The new owner is being recorded. Before that, the operations of the old session end.
    pub is_recording: bool,
}

#[derive(Debug)]
pub(crate) struct Export {
    pub config: ExportConfig,
    pub name: [u8; NAME_BYTES],
    /// Fingerprints of the keys of `config.clients`.
    fingerprints: Vec<[u8; FINGERPRINT_BYTES]>,
    pub verifier: u64,
    /// The session that has it.
    pub owner: Option<u64>,
    /// Changes with each owner, so that cookies that were given before are void.
    pub generation: u64,
    pub pending: Option<Pending>,
    pub flushes: Flushes,
}

impl Export {
    /// Returns an export without a session. Returns `None` if the name is too long.
    pub fn new(config: ExportConfig, verifier: u64) -> Option<Export> {
        Some(Export {
            name: name_field(&config.name)?,
            fingerprints: config.clients.iter().map(|c| c.key.fingerprint()).collect(),
            config,
            verifier,
            owner: None,
            generation: 0,
            pending: None,
            flushes: Flushes::default(),
        })
    }

    /// Returns the client whose key has a fingerprint.
    pub fn client(&self, fingerprint: &[u8; FINGERPRINT_BYTES]) -> Option<&Client> {
        let at = self
            .fingerprints
            .iter()
            .position(|one| one == fingerprint)?;
        self.config.clients.get(at)
    }
}

/// The flushes of an export: one at a time.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// The requests that the flush in progress serves.
    serving: Option<Vec<Asked>>,
    /// The requests that the next one will serve.
    waiting: VecDeque<Asked>,
}

impl Flushes {
    /// Adds a request. Returns whether the device must flush now.
    pub fn add(&mut self, asked: Asked) -> bool {
        self.waiting.push_back(asked);
        self.begin()
    }

    /// Ends the flush in progress. Returns the requests that it served.
    pub fn ended(&mut self) -> Vec<Asked> {
        self.serving.take().unwrap_or_default()
    }

    /// Begins a flush if requests wait for one and none is in progress. Returns whether the device must flush now.
    pub fn begin(&mut self) -> bool {
        if self.serving.is_some() || self.waiting.is_empty() {
            return false;
        }
        self.serving = Some(self.waiting.drain(..).collect());
        true
    }
}
