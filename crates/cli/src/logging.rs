//! The destination of the daemon's messages: always standard error. In the foreground that is the terminal or the journal. For a
//! background daemon, its parent has opened a file there.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tracing_subscriber::EnvFilter;

use crate::failure::{Context, Failure};
use crate::state;

/// Starts logging to standard error. RUST_LOG filters the messages.
pub fn start() {
    let filter = EnvFilter::builder()
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .from_env_lossy();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // The journal has its own time stamps.
    let started = if std::env::var_os("JOURNAL_STREAM").is_some() {
        builder.without_time().try_init()
    } else {
        builder.try_init()
    };
    if let Err(error) = started {
        eprintln!("jericho: messages will not be logged: {error}");
    }
}

/// Opens the file for the messages of a background daemon. Returns its path too.
pub fn open(asked: Option<&Path>, volume: &Path) -> Result<(File, PathBuf), Failure> {
    let path = match asked {
        Some(path) => path.to_owned(),
        None => {
            let dir = default_dir()?;
            DirBuilder::new()
                .recursive(true)
                .mode(0o750)
                .create(&dir)
                .context(format_args!(
                    "cannot make {} for the daemon's messages (choose another file with --log)",
                    dir.display()
                ))?;
            dir.join(name_of(volume))
        }
    };
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        .open(&path)
        .context(format_args!(
            "cannot open {} for the daemon's messages (choose another file with --log)",
            path.display()
        ))?;
    Ok((file, path))
}

fn default_dir() -> Result<PathBuf, Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/log/jericho".into());
    }
    state::directory().ok_or_else(|| {
        Failure::new("HOME is not set: say with --log where the daemon's messages go")
    })
}

/// Returns the volume's path as one file name: /srv/a.volume is srv-a.volume.log.
fn name_of(volume: &Path) -> PathBuf {
    let mut name: Vec<u8> = volume.as_os_str().as_bytes().to_vec();
    while name.first() == Some(&b'/') {
        name.remove(0);
    }
    for byte in &mut name {
        if *byte == b'/' {
            *byte = b'-';
        }
    }
    // A file name has at most 255 bytes. The end of the path distinguishes volumes best.
    let start = name.len().saturating_sub(200);
    let mut name = String::from_utf8_lossy(&name[start..]).into_owned();
    name.push_str(".log");
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_has_a_log_of_its_own() {
        assert_eq!(
            name_of(Path::new("/srv/a.volume")),
            Path::new("srv-a.volume.log")
        );
        assert!(name_of(Path::new(&"/x".repeat(400))).as_os_str().len() < 255);
    }
}
