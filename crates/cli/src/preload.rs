//! The library that serves a program's reads and writes in the program itself, and the environment
//! that makes a program load it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use jericho_daemon::{THREADS_VARIABLE, ThreadPolicy};

use crate::failure::{Context, Failure};
use crate::mounts;

/// Name of the library's file.
const LIBRARY: &str = "libjericho_preload.so";
/// What the dynamic linker reads: libraries to load before all others, separated by colons or spaces.
const LD_PRELOAD: &str = "LD_PRELOAD";

/// Where the library is: what JERICHO_PRELOAD says, or where cargo builds it (below `deps` it is never
/// an old one), or next to this program, or where `make install` puts it.
pub fn find() -> Result<PathBuf, Failure> {
    let candidates = match std::env::var_os("JERICHO_PRELOAD") {
        Some(path) => vec![PathBuf::from(path)],
        None => {
            let program = std::env::current_exe().context("cannot find this program")?;
            let dir = program.parent().unwrap_or(Path::new("/"));
            ["deps", ".", "../lib/jericho"]
                .map(|place| dir.join(place).join(LIBRARY))
                .into()
        }
    };
    let found = candidates.iter().find(|path| path.is_file());
    let found = found.ok_or_else(|| {
        let looked: Vec<_> = candidates.iter().map(|c| c.display().to_string()).collect();
        Failure::new(format!(
            "{} was not found; build it with make build, install it with make install, name it in \
             the variable JERICHO_PRELOAD, or run without it: --no-preload",
            looked.join(" or ")
        ))
    })?;
    let found =
        std::fs::canonicalize(found).context(format_args!("cannot use {}", found.display()))?;
    // The dynamic linker would take it for several.
    if found.as_os_str().as_bytes().iter().any(is_separator) {
        return Err(Failure::new(format!(
            "{} cannot be preloaded: the dynamic linker takes no path with a colon or a space; put a \
             copy elsewhere and name it in the variable JERICHO_PRELOAD",
            found.display()
        )));
    }
    Ok(found)
}

/// Makes a command load the library, and tells the library which volumes are mounted.
///
/// Errors: the kernel's list of mounts cannot be read.
pub fn set(
    command: &mut Command,
    library: &Path,
    threads: Option<ThreadPolicy>,
) -> Result<(), Failure> {
    let devices = devices()?;
    if devices.is_empty() {
        // The library then looks for itself, each time a program starts.
        command.env_remove("JERICHO_DEVICES");
        eprintln!(
            "jericho: no volume is mounted, so nothing is served inline yet; mount one with: jericho \
             mount VOLUME DIR"
        );
    } else {
        command.env("JERICHO_DEVICES", devices);
    }
    let others = others();
    let mut list = OsString::from(library);
    if !others.is_empty() {
        list.push(":");
        list.push(&others);
    }
    command.env(LD_PRELOAD, list);
    if let Some(policy) = threads {
        command.env(THREADS_VARIABLE, policy.name());
    }
    Ok(())
}

/// Makes a command run without the library, if this program runs with it: a daemon has no use for it.
pub fn unset(command: &mut Command) {
    let others = others();
    if others.is_empty() {
        command.env_remove(LD_PRELOAD);
    } else {
        command.env(LD_PRELOAD, others);
    }
}

/// Device numbers of all mounted volumes: `major:minor,major:minor`.
fn devices() -> Result<String, Failure> {
    let mut devices: Vec<_> = mounts::list()?
        .into_iter()
        .filter(|mount| mount.filesystem == mounts::FILESYSTEM)
        .map(|mount| mount.device)
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let devices: Vec<_> = devices
        .iter()
        .map(|(major, minor)| format!("{major}:{minor}"))
        .collect();
    Ok(devices.join(","))
}

/// What else is preloaded into this program.
fn others() -> OsString {
    std::env::var_os(LD_PRELOAD).map_or_else(OsString::new, |list| without_ours(&list))
}

fn without_ours(list: &OsStr) -> OsString {
    let entries = list.as_bytes().split(is_separator);
    let others: Vec<_> = entries
        .filter(|entry| !entry.is_empty())
        .filter(|entry| Path::new(OsStr::from_bytes(entry)).file_name() != Some(LIBRARY.as_ref()))
        .collect();
    OsString::from_vec(others.join(&b':'))
}

fn is_separator(byte: &u8) -> bool {
    matches!(byte, b':' | b' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_library_is_taken_from_a_list() {
        let without = |list: &str| without_ours(list.as_ref()).into_string().unwrap();
        assert_eq!(without(""), "");
        assert_eq!(without("/usr/lib/jericho/libjericho_preload.so"), "");
        assert_eq!(
            without("/a/libjericho_preload.so:/lib/libjemalloc.so.2 libjericho_preload.so:/b.so"),
            "/lib/libjemalloc.so.2:/b.so"
        );
        assert_eq!(
            without("/libjericho_preload.so.old"),
            "/libjericho_preload.so.old"
        );
    }
}
