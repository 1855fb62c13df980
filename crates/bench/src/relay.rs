//! The programs `relay` and `relay_ring`: the minimal daemons that read from a device through one of the kernel's FUSE
//! transports.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Result;
use crate::mounts::{compile, detach};
use crate::settings::{Settings, Transport};

const SOURCE: &str = include_str!("../programs/relay.c");
const RING_SOURCE: &str = include_str!("../programs/relay_ring.c");

/// Name of the relay in tables.
pub const NAME: &str = "a FUSE filesystem that does nothing but read the device";

/// The relay, mounted and served by its own process.
pub struct Relay {
    mnt: PathBuf,
    /// The process ends when the relay is unmounted.
    process: Child,
}

impl Relay {
    /// Compiles the relay into the directory of the run, and mounts it there. Every name in it is `bytes` of `file` from `offset`
    /// on. Returns `None` and prints a message if the user may not mount.
    pub fn mount(
        settings: &Settings,
        file: &Path,
        offset: u64,
        bytes: u64,
        transport: Transport,
    ) -> Result<Option<Relay>> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("relay: only root can mount it; its ceiling is omitted");
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
            return Err("relay did not mount; see its messages above".into());
        }
        Ok(Some(relay))
    }

    /// Returns the mount point.
    pub fn mnt(&self) -> &Path {
        &self.mnt
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        detach(&self.mnt);
        // The process ends after the unmount. If the unmount failed, waiting would not end, so the process is killed.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
