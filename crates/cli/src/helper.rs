//! `mount.fuse.jericho` and `umount.fuse.jericho`: the names under which mount(8) and umount(8) call this program for `mount -t
//! fuse.jericho` and lines of /etc/fstab. Detects such a call by the program's name, and translates the arguments into those of
//! `jericho mount` and `jericho umount`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::failure::{Failure, Outcome};

/// Options that have no effect here: they state a default, or are for mount(8) or systemd.
const OF_OTHERS: [&str; 21] = [
    "rw", "defaults", "auto", "noauto", "nofail", "_netdev", "suid", "dev", "exec", "async",
    "nouser", "atime", "diratime", "relatime", "owner", "group", "nogroup", "noowner", "nousers",
    "silent", "loud",
];
/// Options with a value that `jericho mount` also has.
const WITH_VALUE: [&str; 12] = [
    "cache",
    "spill",
    "topology",
    "threads",
    "transport",
    "scrub-rate",
    "fast-path",
    "device",
    "log",
    "nic",
    "ethertype",
    "dead-after",
];

/// Purpose of a call of the program.
#[derive(Debug, PartialEq, Eq)]
pub enum Call {
    /// A command of `jericho` itself, not a call as a helper.
    Own,
    /// Arguments for `jericho`.
    Jericho(Vec<OsString>),
    /// Arguments for mount(8), which performs a remount itself, because a remount concerns only the kernel.
    Remount(Vec<OsString>),
    /// `-f`: mount(8) only simulates the mount.
    Nothing,
}

/// Determines the purpose of this call from the program's name and its arguments.
pub fn call(arguments: impl IntoIterator<Item = OsString>) -> Result<Call, Failure> {
    let mut arguments = arguments.into_iter();
    let program = arguments.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(OsStr::as_bytes);
    match name {
        Some(b"mount.fuse.jericho") => mount(arguments),
        Some(b"umount.fuse.jericho") => umount(arguments),
        _ => Ok(Call::Own),
    }
}

/// Translates `VOLUME DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`.
fn mount(arguments: impl Iterator<Item = OsString>) -> Result<Call, Failure> {
    let parsed = Parsed::of(arguments)?;
    if parsed.flags.contains(&b'f') {
        return Ok(Call::Nothing);
    }
    let mut options = parsed.options.iter().flat_map(|o| o.split(','));
    if options.any(|option| option == "remount") {
        let mut call: Vec<OsString> = vec!["-i".into(), "-o".into()];
        call.push(parsed.options.join(",").into());
        // The last path is the directory; the volume comes before it.
        call.extend(parsed.operands.last().cloned());
        return Ok(Call::Remount(call));
    }
    let mut call: Vec<OsString> = vec!["jericho".into(), "mount".into()];
    for option in parsed.options.iter().flat_map(|o| o.split(',')) {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let dashed = name.replace('_', "-");
        match value {
            None if name == "ro" => call.push("--read-only".into()),
            None if name == "force" => call.push("--force".into()),
            None if dashed == "with-parent" => call.push("--with-parent".into()),
            None if dashed == "take-over" => call.push("--take-over".into()),
            None if dashed == "no-replay" => call.push("--no-replay".into()),
            Some(value) if WITH_VALUE.contains(&dashed.as_str()) => {
                call.push(format!("--{dashed}={value}").into());
            }
            _ if name.is_empty() || OF_OTHERS.contains(&name) => {}
            _ if name.starts_with("x-") || name.starts_with("comment") => {}
            // mount(8) -s requests that unknown options are ignored.
            _ if parsed.flags.contains(&b's') => {}
            _ => {
                return Err(Failure::new(format!(
                    "a Jericho volume cannot be mounted with the option {option:?}; there are ro, force, with-parent, take-over, no-replay, {}, and those of \
                     mount(8) that change nothing here",
                    WITH_VALUE.map(|name| format!("{name}=")).join(", ")
                )));
            }
        }
    }
    call.push("--".into());
    call.extend(parsed.operands);
    Ok(Call::Jericho(call))
}

/// Replaces this process by mount(8).
pub fn remount(arguments: Vec<OsString>) -> Outcome {
    let error = Command::new("mount").args(arguments).exec();
    Err(Failure::new(format!("cannot start mount(8): {error}")))
}

/// Translates `DIR [-flnrv] [-N NAMESPACE] [-t TYPE]`.
fn umount(arguments: impl Iterator<Item = OsString>) -> Result<Call, Failure> {
    let parsed = Parsed::of(arguments)?;
    let mut call: Vec<OsString> = vec!["jericho".into(), "umount".into()];
    // `--lazy` takes precedence: it frees the directory at once even if data cannot be written, so nothing need be discarded.
    let options = [(b'l', "--lazy"), (b'f', "--force")];
    let asked = (options.iter()).find(|(flag, _)| parsed.flags.contains(flag));
    call.extend(asked.map(|(_, option)| option.into()));
    call.push("--".into());
    call.extend(parsed.operands);
    Ok(Call::Jericho(call))
}

#[derive(Default)]
struct Parsed {
    operands: Vec<OsString>,
    flags: Vec<u8>,
    options: Vec<String>,
}

impl Parsed {
    fn of(mut arguments: impl Iterator<Item = OsString>) -> Result<Parsed, Failure> {
        let mut parsed = Parsed::default();
        while let Some(argument) = arguments.next() {
            let Some(flags) = argument.as_bytes().strip_prefix(b"-") else {
                parsed.operands.push(argument);
                continue;
            };
            for flag in flags {
                if !b"oNt".contains(flag) {
                    parsed.flags.push(*flag);
                    continue;
                }
                let value = arguments.next().unwrap_or_default();
                if *flag == b'o' {
                    let text = value.into_string().map_err(|value| {
                        Failure::new(format!(
                            "the mount options {} are not UTF-8",
                            value.display()
                        ))
                    });
                    parsed.options.push(text?);
                }
            }
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn arguments_of_mount_and_umount_become_those_of_jericho() {
        let cases = [
            (
                "/sbin/mount.fuse.jericho /v /mnt -o ro,cache=64M,nofail,_netdev,x-systemd.automount,topology=virtual:2",
                "jericho mount --read-only --cache=64M --topology=virtual:2 -- /v /mnt",
            ),
            (
                "mount.fuse.jericho /v /mnt -n -o rw,fast_path=ada,fast-path=:db,device=/b -t fuse.jericho",
                "jericho mount --fast-path=ada --fast-path=:db --device=/b -- /v /mnt",
            ),
            (
                "/sbin/umount.fuse.jericho /mnt -n",
                "jericho umount -- /mnt",
            ),
            (
                "umount.fuse.jericho /mnt -f",
                "jericho umount --force -- /mnt",
            ),
            (
                "umount.fuse.jericho /mnt -f -l",
                "jericho umount --lazy -- /mnt",
            ),
            (
                "umount.fuse.jericho /mnt -fl",
                "jericho umount --lazy -- /mnt",
            ),
            (
                "mount.fuse.jericho /v /mnt -o threads=always,with_parent",
                "jericho mount --threads=always --with-parent -- /v /mnt",
            ),
            (
                "mount.fuse.jericho /v /mnt -s -o nosuid",
                "jericho mount -- /v /mnt",
            ),
        ];
        for (given, expected) in cases {
            assert_eq!(
                call(words(given)).unwrap(),
                Call::Jericho(words(expected)),
                "{given}"
            );
        }
        assert_eq!(
            call(words("mount.fuse.jericho /v /mnt -n -o rw,remount,noatime")).unwrap(),
            Call::Remount(words("-i -o rw,remount,noatime /mnt"))
        );
        let fake = call(words("mount.fuse.jericho /v /mnt -f"));
        assert_eq!(fake.unwrap(), Call::Nothing);
        assert_eq!(call(words("jericho mount -o x")).unwrap(), Call::Own);
        let refused = call(words("mount.fuse.jericho /v /mnt -o ro,noexec"));
        assert!(refused.unwrap_err().to_string().contains("\"noexec\""));
    }
}
