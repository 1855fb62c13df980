//! Modes of Jericho that are compared. A new one is one entry of [`Mode::all`].

use jericho_ether::AttachConfig;
use std::time::Duration;

use crate::Result;

/// What a target has behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// `null:`, which completes without I/O.
    Nothing,
    /// A file on tmpfs.
    Memory,
}

/// Who may use the export, and what protects its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// `--no-auth`: CRC-32C in each frame, and no keys.
    None,
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
    /// A target uses an interface with an Ethertype, so each mode has its own.
    pub ethertype: u16,
}

/// The mode of the tables that have only one.
pub const PLAIN: Mode = Mode {
    name: "jericho",
    behind: Behind::Nothing,
    auth: Auth::None,
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
        ]
    }

    /// Returns the options of `jericho serve`.
    pub fn serve_options(&self) -> Vec<String> {
        match self.auth {
            Auth::None => vec!["--no-auth".into()],
        }
    }

    /// Returns how to attach the device over interfaces.
    pub fn attach_config(&self, interfaces: &[&str]) -> Result<AttachConfig> {
        Ok(AttachConfig {
            remote: format!("tyche://hostb/{}", self.name).parse()?,
            interfaces: interfaces.iter().map(|&name| name.to_owned()).collect(),
            ethertype: self.ethertype,
            take_over: false,
            replay: true,
            patience: Duration::from_secs(10),
            dead_after: None,
            read_only: false,
        })
    }
}
