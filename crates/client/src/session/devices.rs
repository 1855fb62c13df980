//! Finds out which devices are mounts of Jericho, from `jericho run` or from /proc/self/mountinfo.

use std::sync::OnceLock;

use jericho_sys::files;

/// Set by `jericho run`: "major:minor,major:minor".
pub const VARIABLE: &str = "JERICHO_DEVICES";
const MOUNTINFO: &str = "/proc/self/mountinfo";
const KIND: &str = "fuse.jericho";

static DEVICES: OnceLock<Vec<u64>> = OnceLock::new();

/// Finds the devices now, before the process has threads. If a process forked while another thread was in this search, the child
/// would wait for that thread forever.
pub fn prepare() {
    DEVICES.get_or_init(find);
}

/// Returns whether a device (numbered as by fstat(2)) is a mount of Jericho.
pub fn is_ours(device: u64) -> bool {
    DEVICES.get_or_init(find).contains(&device)
}

fn find() -> Vec<u64> {
    match std::env::var(VARIABLE) {
        Ok(list) => list.split(',').filter_map(device_number).collect(),
        Err(_) => {
            let text = files::read_file(MOUNTINFO).unwrap_or_default();
            in_mountinfo(&String::from_utf8_lossy(&text))
        }
    }
}

/// Returns the mount points of the Jericho mounts that this process sees now.
pub fn directories() -> Vec<Vec<u8>> {
    let text = files::read_file(MOUNTINFO).unwrap_or_default();
    directories_in(&text, is_ours)
}

fn directories_in(mountinfo: &[u8], is_ours: impl Fn(u64) -> bool) -> Vec<Vec<u8>> {
    let lines = mountinfo.split(|byte| *byte == b'\n');
    let directory = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let device = device_number(std::str::from_utf8(fields.next()?).ok()?)?;
        is_ours(device).then(|| fields.nth(1).map(unescaped))?
    };
    lines.filter_map(directory).collect()
}

/// Decodes blanks and similar characters, which are written as `\040`.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|_| *first == b'\\');
        let value = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(value.unwrap_or(*first));
        rest = if value.is_some() { &tail[3..] } else { tail };
    }
    out
}

fn device_number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(files::device(major.parse().ok()?, minor.parse().ok()?))
}

fn in_mountinfo(text: &str) -> Vec<u64> {
    let ours = text.lines().filter(|line| {
        let kind = line.split_once(" - ").map(|(_, rest)| rest);
        kind.is_some_and(|rest| rest.split(' ').next() == Some(KIND))
    });
    ours.filter_map(|line| device_number(line.split(' ').nth(2)?))
        .collect()
}

#[cfg(test)]
pub fn set_for_tests(device: u64) {
    let devices = DEVICES.get_or_init(|| vec![device]);
    assert_eq!(devices, &[device]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_jericho_are_found() {
        let text = "22 1 0:21 / /sys rw - sysfs sysfs rw\n\
                    90 1 0:55 / /mnt/a\\040b rw,nosuid shared:7 - fuse.jericho /vol rw,user_id=0\n\
                    91 1 0:56 / /mnt/c rw - fuse.sshfs fuse.jericho rw\n\
                    broken line\n\
                    92 1 259:3 / /mnt/d rw - fuse.jericho other ro\n";
        let ours = [files::device(0, 55), files::device(259, 3)];
        assert_eq!(in_mountinfo(text), ours);
        let directories = directories_in(text.as_bytes(), |device| ours.contains(&device));
        assert_eq!(directories, [b"/mnt/a b".to_vec(), b"/mnt/d".to_vec()]);
        assert_eq!(device_number(" 0:55"), Some(ours[0]));
        assert_eq!(device_number("0"), None);
    }
}
