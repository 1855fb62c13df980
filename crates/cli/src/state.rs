//! Finds the directory in which the commands of a user other than root keep their state.

use std::path::PathBuf;

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
