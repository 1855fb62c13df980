//! Finds where commands keep their state.

use std::path::PathBuf;

use jericho_sys::process;

use crate::failure::Failure;

/// Returns jericho's directory below $XDG_STATE_HOME or ~/.local/state (XDG Base Directory Specification). Returns `None` if HOME is not
/// set either.
pub fn directory() -> Option<PathBuf> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("jericho"))
}

/// Returns the file in which `jericho probe` keeps its report: that of $JERICHO_PROBE, or one in the directory of state. Returns `None` if
/// $JERICHO_PROBE is empty: no report is kept or used. Fails if HOME is not set for a user other than root.
pub fn probe_file() -> Result<Option<PathBuf>, Failure> {
    if let Some(file) = std::env::var_os("JERICHO_PROBE") {
        return Ok(Some(PathBuf::from(file)).filter(|file| !file.as_os_str().is_empty()));
    }
    let dir = match process::effective_uid() {
        0 => PathBuf::from("/var/lib/jericho"),
        _ => directory().ok_or_else(|| {
            Failure::new("HOME is not set: name the file of the report in JERICHO_PROBE")
        })?,
    };
    Ok(Some(dir.join(jericho_probe::FILE_NAME)))
}
