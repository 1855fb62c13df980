//! The library that serves a program's reads and writes inside of the program, and the environment that makes programs load it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use jericho_daemon::{THREADS_VARIABLE, ThreadPolicy, WITH_PARENT_VARIABLE};

use crate::failure::{Context, Failure};
use crate::mounts;

/// Name of the library's file.
const LIBRARY: &str = "libjericho_preload.so";
/// Variable of the dynamic linker: libraries to load before all others, separated by colons or spaces.
const LD_PRELOAD: &str = "LD_PRELOAD";

/// Finds the library at the path in JERICHO_PRELOAD. If the variable is not set, searches `deps` in cargo's output directory, the
/// directory of this program, and the directory of `make install`. `deps` comes first: cargo builds the library there for each
/// test, but may leave an old copy beside the program.
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
    // The dynamic linker would split the path.
    if found.as_os_str().as_bytes().iter().any(is_separator) {
        return Err(Failure::new(format!(
            "{} cannot be preloaded: the dynamic linker takes no path with a colon or a space; put a \
             copy elsewhere and name it in the variable JERICHO_PRELOAD",
            found.display()
        )));
    }
    Ok(found)
}

/// Returns whether this program runs with the library.
pub fn is_loaded() -> bool {
    // Without /proc, nothing is known, and the library does not work either.
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let name = LIBRARY.as_bytes();
    maps.windows(name.len()).any(|part| part == name)
}

/// Makes a command load the library, and passes the mounted volumes to the library.
///
/// Fails if the kernel's list of mounts cannot be read.
pub fn set(
    command: &mut Command,
    library: &Path,
    threads: Option<ThreadPolicy>,
    with_parent: bool,
) -> Result<(), Failure> {
    let devices = devices()?;
    if devices.is_empty() {
        // The library then searches for mounts itself, each time a program starts.
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
    if with_parent {
        command.env(WITH_PARENT_VARIABLE, "1");
    }
    Ok(())
}

/// Makes a command run without the library, if this program runs with it. A daemon does not need it.
pub fn unset(command: &mut Command) {
    let others = others();
    if others.is_empty() {
        command.env_remove(LD_PRELOAD);
    } else {
        command.env(LD_PRELOAD, others);
    }
}

/// Returns the device numbers of all mounted volumes: `major:minor,major:minor`.
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

/// Returns the other libraries that are preloaded into this program.
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
    fn only_this_library_is_removed_from_a_list() {
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
