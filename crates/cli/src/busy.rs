//! Finds the processes that keep a mount from being unmounted: they have a file or directory of it open, mapped, or as their
//! working directory. Best effort: an ordinary user does not see processes of other users.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::mounts::Mount;

/// Returns one line for each process, at most `most` lines.
pub fn users(mount: &Mount, most: usize) -> Vec<String> {
    let device = rustix::fs::makedev(mount.device.0, mount.device.1);
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Some(what) = use_of(&process.path(), device, mount) else {
            continue;
        };
        let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        found.push(format!("process {pid} ({}): {what}", command.trim()));
        if found.len() == most {
            break;
        }
    }
    found
}

fn use_of(process: &Path, device: u64, mount: &Mount) -> Option<String> {
    let on_it = |link: &Path| std::fs::metadata(link).is_ok_and(|m| m.dev() == device);
    for (link, what) in [
        ("cwd", "works in"),
        ("root", "has as its root"),
        ("exe", "runs"),
    ] {
        let link = process.join(link);
        if on_it(&link) {
            return Some(format!("{what} {}", target(&link).display()));
        }
    }
    let descriptors = std::fs::read_dir(process.join("fd")).ok()?;
    for descriptor in descriptors.flatten() {
        if on_it(&descriptor.path()) {
            return Some(format!("has {} open", target(&descriptor.path()).display()));
        }
    }
    let maps = std::fs::read_to_string(process.join("maps")).ok()?;
    let dev = format!(" {:02x}:{:02x} ", mount.device.0, mount.device.1);
    maps.lines().find(|l| l.contains(&dev)).map(|l| {
        let path = l.find('/').map_or("a file of it", |at| &l[at..]);
        format!("maps {path}")
    })
}

fn target(link: &Path) -> PathBuf {
    std::fs::read_link(link).unwrap_or_else(|_| link.to_owned())
}
