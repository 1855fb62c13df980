//! Places for tests: the usual temporary directory, tmpfs, a full filesystem, a loop device.

#![allow(dead_code)] // each test file uses its own part

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use jericho_storage::{BLOCK_BYTES, Device, OpenOptions, Segment, open_device};
use jericho_sys::memory::Mapping;

pub const BLOCK: usize = BLOCK_BYTES as usize;

/// Returns a directory on the usual disk and one on tmpfs.
pub fn directories() -> Vec<tempfile::TempDir> {
    let shm = Path::new("/dev/shm");
    let mut directories = vec![tempfile::tempdir().unwrap()];
    if shm.is_dir() {
        directories.push(tempfile::tempdir_in(shm).unwrap());
    } else {
        eprintln!("SKIPPED: no tmpfs at /dev/shm");
    }
    directories
}

pub fn file_device(directory: &Path, blocks: usize) -> Arc<dyn Device> {
    let options = OpenOptions {
        create_size: Some((blocks * BLOCK) as u64),
        ..OpenOptions::default()
    };
    open_device(&directory.join("volume"), options).unwrap()
}

/// Runs a command and returns its output. After a failure, prints that the test is skipped and returns `None`.
fn run(what: &str, command: &mut Command) -> Option<String> {
    match command.output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
        }
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_string();
            eprintln!("SKIPPED: no {what} here: {why}");
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: no {what} here: {error}");
            None
        }
    }
}

/// A loop device on a file of its own. Dropping it removes both.
pub struct LoopDevice {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl LoopDevice {
    pub fn new(blocks: usize) -> Option<LoopDevice> {
        let directory = tempfile::tempdir().unwrap();
        let backing = directory.path().join("backing");
        std::fs::File::create(&backing)
            .unwrap()
            .set_len((blocks * BLOCK) as u64)
            .unwrap();
        let mut command = Command::new("losetup");
        let command = command.args(["--find", "--show"]).arg(&backing);
        let path = PathBuf::from(run("loop device", command)?);
        Some(LoopDevice {
            path,
            _directory: directory,
        })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
            .output();
    }
}

impl LoopDevice {
    /// Returns the number of blocks that were written to the device, and of its flushes. The kernel's number of writes counts the
    /// requests for a flush, too.
    pub fn writes_and_flushes(&self) -> (u64, u64) {
        let name = self.path.file_name().unwrap();
        let stat = Path::new("/sys/block").join(name).join("stat");
        let text = std::fs::read_to_string(stat).unwrap();
        let counts: Vec<u64> = text
            .split_whitespace()
            .map(|count| count.parse().unwrap())
            .collect();
        (counts[6] * 512 / BLOCK_BYTES, counts[15])
    }
}

/// An ext4 filesystem on a loop device. Dropping it unmounts it.
pub struct Ext4 {
    directory: tempfile::TempDir,
    pub device: LoopDevice,
}

impl Ext4 {
    pub fn new(blocks: usize) -> Option<Ext4> {
        let device = LoopDevice::new(blocks)?;
        let mut command = Command::new("mkfs.ext4");
        let command = command.args(["-q", "-b", "4096", "-E", "lazy_itable_init=0"]);
        run("mkfs.ext4", command.arg(&device.path))?;
        let directory = tempfile::tempdir().unwrap();
        // Without lazytime each change of the modification time is a change for the journal.
        let mut command = Command::new("mount");
        let command = command.args(["-o", "lazytime"]).arg(&device.path);
        run("right to mount ext4", command.arg(directory.path()))?;
        Some(Ext4 { directory, device })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).output();
    }
}

/// A tmpfs with very little space. Dropping it unmounts it.
pub struct SmallFilesystem {
    directory: tempfile::TempDir,
}

impl SmallFilesystem {
    pub fn new(blocks: usize) -> Option<SmallFilesystem> {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={}", blocks * BLOCK);
        let mut command = Command::new("mount");
        let command = command
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(directory.path());
        run("right to mount a tmpfs", command)?;
        Some(SmallFilesystem { directory })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).output();
    }
}

pub fn memory(blocks: usize) -> Arc<Mapping> {
    Arc::new(Mapping::create("jericho-storage-test", blocks * BLOCK, false).unwrap())
}

pub fn segment(mapping: &Arc<Mapping>, block: usize, blocks: usize) -> Segment {
    Segment {
        mapping: Arc::clone(mapping),
        offset: block * BLOCK,
        len: blocks * BLOCK,
    }
}

pub fn bytes_of(mapping: &Mapping, block: usize, blocks: usize) -> Vec<u8> {
    let mut out = vec![0; blocks * BLOCK];
    mapping.copy_out(block * BLOCK, &mut out);
    out
}

/// Returns contents that differ between blocks and between seeds.
pub fn pattern(seed: u64, blocks: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..blocks * BLOCK / 8).flat_map(|_| next()).collect()
}
