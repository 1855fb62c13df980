//! The programs `relay` and `relay_ring` (programs): the least that a daemon can do that has to ask a device for what is read
//! through one of the kernel's FUSE transports.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Result;
use crate::mounts::{compile, detach};
use crate::settings::{Settings, Transport};

const SOURCE: &str = include_str!("../programs/relay.c");
const RING_SOURCE: &str = include_str!("../programs/relay_ring.c");

/// What it is called in tables.
pub const NAME: &str = "a FUSE filesystem that does nothing but read the device";

/// The relay, mounted and served by a process of its own.
pub struct Relay {
    mnt: PathBuf,
    /// Ends when it is unmounted.
    process: Child,
}

impl Relay {
    /// Compiles it into the directory of the run, and mounts it there: every name in it is `bytes` of `file` from
    /// `offset` on. `None`, and a word on standard error, for who may not mount.
    pub fn mount(
        settings: &Settings,
        file: &Path,
        offset: u64,
        bytes: u64,
        transport: Transport,
    ) -> Result<Option<Relay>> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("relay: only root can mount it; its bound is left out");
            return Ok(None);
        }
        let program = match transport {
            Transport::Device => compile(settings, "relay", SOURCE, "-luring")?,
            Transport::Ring => compile(settings, "relay_ring", RING_SOURCE, "-luring")?,
        };
        let mnt = settings.dir.join("relay.mnt");
        std::fs::create_dir_all(&mnt)?;
        let mut process = Command::new(program)
            .arg(file)
            .args([offset.to_string(), bytes.to_string()])
            .arg(&mnt)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout).read_line(&mut said)?;
        }
        let relay = Relay { mnt, process };
        if said.trim() != "mounted" {
            return Err("relay did not mount; what it says is above".into());
        }
        Ok(Some(relay))
    }

    /// Where it is mounted.
    pub fn mnt(&self) -> &Path {
        &self.mnt
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        detach(&self.mnt);
        // It ends by itself then; should it still be mounted, it must not be waited for without end.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
