//! The file in which a report is kept.
//!
//! A daemon reads it, so nothing in it is trusted: its size is bounded, and a value that is impossible refuses the whole file. A writer
//! replaces the file as a whole, so a reader never sees a half.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use jericho_sys::block::{self, Open};
use jericho_sys::process::cpu_model;
use jericho_topology::Topology;
use serde::Deserialize;

use crate::digest::digest;
use crate::error::{LoadError, SaveError};
use crate::report::{FORMAT, Report};

/// Name of the file in the directory of state.
pub const FILE_NAME: &str = "probe.json";
/// Largest file. A report of 64 nodes and some devices takes a quarter of it.
const BYTES_MAX: u64 = 4 << 20;
const NOT_REGULAR: &str = "it is not a regular file";

/// Keeps a report: writes it beside the file, makes it durable, and renames it. Makes the directory if it is missing.
pub fn save(report: &Report, path: &Path) -> Result<(), SaveError> {
    let failed = |action, path: &Path| {
        let path = path.to_path_buf();
        move |source| SaveError {
            action,
            path,
            source,
        }
    };
    // The parent of a name without a directory is empty.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    replaceable(path).map_err(failed("replace", path))?;
    let made = DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.map_err(failed("make", dir))?;
    let mut text = serde_json::to_vec(report)
        .map_err(io::Error::other)
        .map_err(failed("write", path))?;
    text.push(b'\n');
    // Two probes at once write different files, and the last one wins.
    let temporary = path.with_extension(format!("json.{}", std::process::id()));
    let written = write(&temporary, &text).and_then(|()| fs::rename(&temporary, path));
    written.map_err(|source| {
        // The error of the write is the one to report.
        let _ = fs::remove_file(&temporary);
        failed("write", path)(source)
    })?;
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(failed("make durable", dir))
}

/// Fails if a report must not take the place of what is there: a rename would remove a device such as /dev/null.
fn replaceable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(there) if !there.is_file() => Err(refused(NOT_REGULAR)),
        // What else is wrong shows when the file is written.
        _ => Ok(()),
    }
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    // A rest of a process with the same number is in the way of `create_new`.
    let _ = fs::remove_file(path);
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

/// Reads the report about the present topology. Returns `None` when there is no file. Fails if the file is not a report, is of a newer
/// format, or is about another topology or another machine. (A home directory may be shared by machines with equal nodes.)
pub fn load(path: &Path, topology: &Topology) -> Result<Option<Report>, LoadError> {
    let Some(report) = load_any(path)? else {
        return Ok(None);
    };
    if report.topology.digest != digest(topology) {
        return Err(LoadError::OtherTopology {
            path: path.to_path_buf(),
            time: report.time,
            source_then: report.topology.source,
            source_now: topology.source.clone(),
        });
    }
    let model_now = cpu_model();
    if report.machine.cpu_model != model_now {
        return Err(LoadError::OtherMachine {
            path: path.to_path_buf(),
            time: report.time,
            model_then: report.machine.cpu_model,
            model_now,
        });
    }
    match report.node_count() == topology.nodes.len() {
        true => Ok(Some(report)),
        false => Err(malformed(path, "it has not the nodes of its digest".into())),
    }
}

/// Reads the file without waiting for a writer of a FIFO, and not more than `BYTES_MAX`.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = block::open(path, Open::default())?;
    if !file.metadata()?.is_file() {
        return Err(refused(NOT_REGULAR));
    }
    let mut text = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut text)?;
    match text.len() as u64 > BYTES_MAX {
        true => Err(refused("it has more than 4 MiB")),
        false => Ok(text),
    }
}

fn malformed(path: &Path, reason: String) -> LoadError {
    let path = path.to_path_buf();
    LoadError::Malformed { path, reason }
}

/// Reads a report about any machine. Returns `None` when there is no file. Fails if the file is not a report, or is of a newer format.
pub fn load_any(path: &Path) -> Result<Option<Report>, LoadError> {
    match read(path) {
        Ok(text) => parse(&text, path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn parse(text: &[u8], path: &Path) -> Result<Report, LoadError> {
    /// The only field that all formats share.
    #[derive(Deserialize)]
    struct Version {
        format: u64,
    }
    let refused = |error: serde_json::Error| malformed(path, error.to_string());
    let version: Version = serde_json::from_slice(text).map_err(refused)?;
    match version.format {
        0 => return Err(malformed(path, "format 0 does not exist".into())),
        found if found > u64::from(FORMAT) => {
            return Err(LoadError::Newer {
                path: path.to_path_buf(),
                found,
                known: FORMAT,
            });
        }
        _ => {}
    }
    let report: Report = serde_json::from_slice(text).map_err(refused)?;
    report.check().map_err(|reason| malformed(path, reason))?;
    Ok(report)
}

#[cfg(test)]
mod tests;
