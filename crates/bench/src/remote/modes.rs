//! Modes of Jericho that are compared. A new one is one entry of [`Mode::all`].

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jericho_ether::{AttachConfig, Key, LinkChoice, Scheduler, new_key};
use jericho_topology::Topology;

use crate::Result;

/// What a target has behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// `null:`, which completes without I/O.
    Nothing,
    /// A file on tmpfs.
    Memory,
}

/// The clients that an export admits, and the protection of its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// `--no-auth`: CRC-32C in each frame, and no keys.
    None,
    /// `--mac`: a tag in each frame.
    Mac,
    /// `--encrypt`: a tag, and an encrypted payload.
    Encrypt,
}

/// A mode of Jericho.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// Name of its side in tables and in JSON.
    pub name: &'static str,
    /// What the target serves.
    pub behind: Behind,
    /// Keys.
    pub auth: Auth,
    /// Sockets of both ends.
    pub link: LinkChoice,
    /// A target uses an interface with an Ethertype, so each mode has its own.
    pub ethertype: u16,
}

/// The mode of the tables that have only one.
pub const PLAIN: Mode = Mode {
    name: "jericho",
    behind: Behind::Nothing,
    auth: Auth::None,
    link: LinkChoice::Packet,
    ethertype: 0x88B5,
};

impl Mode {
    /// Returns the modes of the main table.
    pub fn all() -> Vec<Mode> {
        vec![
            PLAIN,
            Mode {
                name: "jericho-memory",
                behind: Behind::Memory,
                ethertype: 0x9001,
                ..PLAIN
            },
            Mode {
                name: "jericho-mac",
                auth: Auth::Mac,
                ethertype: 0x9002,
                ..PLAIN
            },
            Mode {
                name: "jericho-encrypt",
                auth: Auth::Encrypt,
                ethertype: 0x9003,
                ..PLAIN
            },
        ]
    }

    /// Returns the modes of the table of sockets.
    pub fn links() -> [Mode; 2] {
        let xdp = Mode {
            name: "jericho-xdp",
            link: LinkChoice::Xdp,
            ethertype: 0x9004,
            ..PLAIN
        };
        [PLAIN, xdp]
    }

    /// Returns the options of `jericho serve`. A mode with keys has its key in a file in `dir`.
    pub fn serve_options(&self, dir: &Path) -> Result<Vec<String>> {
        let security = match self.auth {
            Auth::None => return Ok(vec!["--no-auth".into()]),
            Auth::Mac => "--mac",
            Auth::Encrypt => "--encrypt",
        };
        let file = dir.join(format!("{}.key", self.name));
        let private = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&file);
        private?.write_all(key()?.to_text().as_bytes())?;
        let client = format!("bench:{}", file.display());
        Ok(vec![security.into(), "--client".into(), client])
    }

    /// Returns how to attach the device over interfaces.
    pub fn attach_config(&self, interfaces: &[&str]) -> Result<AttachConfig> {
        Ok(AttachConfig {
            remote: format!("tyche://hostb/{}", self.name).parse()?,
            interfaces: interfaces.iter().map(|&name| name.to_owned()).collect(),
            ethertype: self.ethertype,
            link: self.link,
            take_over: false,
            replay: true,
            patience: Duration::from_secs(10),
            dead_after: None,
            read_only: false,
            key: match self.auth {
                Auth::None => None,
                Auth::Mac | Auth::Encrypt => Some(key()?.clone()),
            },
            scheduler: Scheduler::Affinity,
            channels: 1,
            mode: jericho_ether::Mode::default(),
            batches: true,
            topology: Arc::new(Topology::detect()?),
        })
    }
}

/// Returns the key of this run, which the first call makes.
fn key() -> Result<&'static Key> {
    static KEY: OnceLock<Key> = OnceLock::new();
    if let Some(key) = KEY.get() {
        return Ok(key);
    }
    let new = new_key()?;
    Ok(KEY.get_or_init(|| new))
}
