//! Follows how the mount keeps access times: `relatime`, `noatime` or `strictatime`.
//!
//! The kernel does not pass these mount options to FUSE daemons. It lists them in /proc/self/mountinfo and signals changes
//! of the list. Requests do not say through which mount they came. So the options of one mount count for all requests, also
//! for those through bind mounts and through mounts in other namespaces: the mount on this daemon's directory in the list of
//! this process.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use jericho_daemon::Mounted;
use jericho_fs::types::AccessTimes;
use jericho_sys::service as threads;
use rustix::event::{PollFd, PollFlags};

const MOUNTS: &str = "/proc/self/mountinfo";

/// The thread that watches the options.
pub(crate) struct Watch {
    /// Closing it ends the thread.
    stop: UnixStream,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Applies the current options of the mount on `dir`, and follows their changes. Fails without /proc, with
    /// EMFILE, or when no thread can be started.
    pub(crate) fn start(mounted: Arc<Mounted>, dir: &Path) -> io::Result<Watch> {
        // Opened before the first read, so that any later change raises an event.
        let list = File::open(MOUNTS)?;
        let (stop, stopped) = UnixStream::pair()?;
        let dir = escaped(dir.as_os_str().as_bytes());
        adopt(&mounted, &dir);
        let thread = std::thread::Builder::new()
            .name("mount-options".into())
            .spawn(move || threads::run(|| follow(&mounted, &dir, &list, &stopped)))?;
        Ok(Watch { stop, thread })
    }

    /// Ends the thread.
    pub(crate) fn end(self) {
        drop(self.stop);
        // The thread cannot panic.
        let _ = self.thread.join();
    }
}

fn follow(mounted: &Mounted, dir: &[u8], list: &File, stopped: &UnixStream) {
    loop {
        let mut events = [
            PollFd::new(list, PollFlags::PRI),
            PollFd::new(stopped, PollFlags::IN),
        ];
        match rustix::event::poll(&mut events, None) {
            Ok(_) if !events[1].revents().is_empty() => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => adopt(mounted, dir),
            Err(error) => {
                tracing::warn!(%error, "cannot watch the mount's options: later changes of noatime or relatime have no effect");
                return;
            }
        }
    }
}

fn adopt(mounted: &Mounted, dir: &[u8]) {
    match std::fs::read(MOUNTS) {
        // The mount is not listed if it was moved or is about to end. Keeps the last known option.
        Ok(mounts) => {
            if let Some(times) = access_times(&mounts, dir) {
                mounted.fs().set_access_times(times);
            }
        }
        Err(error) => tracing::warn!(%error, "cannot read {MOUNTS}"),
    }
}

/// Returns the option of the visible mount on `dir`, which is escaped as in the list.
fn access_times(mounts: &[u8], dir: &[u8]) -> Option<AccessTimes> {
    let line = mounts.split(|byte| *byte == b'\n').rfind(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        fields.nth(4) == Some(dir)
    })?;
    let mut options = line
        .split(|byte| *byte == b' ')
        .nth(5)?
        .split(|b| *b == b',');
    Some(options.find_map(named).unwrap_or(AccessTimes::Always))
}

/// Returns the meaning of a listed option; `None` for options that do not concern access times. A mount with `strictatime` lists
/// neither `noatime` nor `relatime`.
fn named(option: &[u8]) -> Option<AccessTimes> {
    match option {
        b"noatime" => Some(AccessTimes::Never),
        b"relatime" => Some(AccessTimes::Relative),
        _ => None,
    }
}

/// Escapes a path as the kernel does in the list: space, tab, newline and backslash as three octal digits.
fn escaped(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for byte in path {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => out.extend(format!("\\{byte:03o}").into_bytes()),
            _ => out.push(*byte),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_are_those_of_the_visible_mount_on_the_directory() {
        let list = b"36 35 0:52 / /mnt/my\\040dir rw,noatime shared:1 - fuse.jericho v rw\n\
            37 35 0:53 / /mnt rw,nosuid,relatime - ext4 d rw\n\
            38 35 0:54 / /mnt rw,nosuid - fuse.jericho d rw,relatime\n";
        let of = |dir: &[u8]| access_times(list, &escaped(dir));
        assert_eq!(of(b"/mnt/my dir"), Some(AccessTimes::Never));
        assert_eq!(of(b"/mnt"), Some(AccessTimes::Always));
        assert_eq!(of(b"/elsewhere"), None);
    }
}
