//! Finds the processes that keep a mount from being unmounted, because they have a file or directory of it open, mapped, or as their
//! working directory, and those that have a block device open. Best effort: an ordinary user does not see processes of other users.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::mounts::Mount;

/// Returns one line for each process, at most `most` lines.
pub fn users(mount: &Mount, most: usize) -> Vec<String> {
    let device = rustix::fs::makedev(mount.device.0, mount.device.1);
    processes(most, |process| use_of(process, device, mount))
}

/// Returns one line for each other process that has a block device open, at most `most` lines.
pub fn openers(device: u64, most: usize) -> Vec<String> {
    let own = Path::new("/proc").join(std::process::id().to_string());
    // A character device may have the same number.
    let is_it = |link: &Path| {
        std::fs::metadata(link).is_ok_and(|m| m.file_type().is_block_device() && m.rdev() == device)
    };
    processes(most, |process| match process == own {
        true => None,
        false => open_file(process, is_it),
    })
}

/// Returns one line for each process of which `what` tells something.
fn processes(most: usize, what: impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Some(what) = what(&process.path()) else {
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
    if let Some(open) = open_file(process, on_it) {
        return Some(open);
    }
    let maps = std::fs::read_to_string(process.join("maps")).ok()?;
    let dev = format!(" {:02x}:{:02x} ", mount.device.0, mount.device.1);
    maps.lines().find(|l| l.contains(&dev)).map(|l| {
        let path = l.find('/').map_or("a file of it", |at| &l[at..]);
        format!("maps {path}")
    })
}

/// Returns what a process has open of the files of which `is_it` is true.
fn open_file(process: &Path, is_it: impl Fn(&Path) -> bool) -> Option<String> {
    let descriptors = std::fs::read_dir(process.join("fd")).ok()?.flatten();
    let mut open = descriptors.map(|descriptor| descriptor.path());
    let found = open.find(|path| is_it(path))?;
    Some(format!("has {} open", target(&found).display()))
}

fn target(link: &Path) -> PathBuf {
    std::fs::read_link(link).unwrap_or_else(|_| link.to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_character_device_is_no_block_device_of_the_same_number() {
        let null = std::fs::metadata("/dev/null").unwrap().rdev();
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let users = openers(null, 1);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(users.is_empty(), "{users:?}");
    }
}
