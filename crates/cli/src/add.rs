//! `jericho add`: through the daemon if the volume is mounted, else in this process.

use std::fmt::Write;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use jericho_fs::add::add;
use jericho_fuse::addition::{Add, AddRequest, Seen};
use jericho_storage::is_remote;
use jericho_sys::process::random_u64;
use jericho_volume::{FormatOptions, OpenMode, Volume, VolumeError};

use crate::args::AddArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::format::show_progress;
use crate::{control, mounts, size};

pub fn run(args: &AddArgs) -> Outcome {
    let mount = mounts::of_volume(&args.volume)?;
    let added = match &mount {
        Some(dir) => add_to_mounted(args, dir)?,
        None => add_here(args)?,
    };
    if let Some(error) = added.error {
        return Err(Failure::new(format!(
            "cannot add {} to {}: {error}",
            args.new.display(),
            args.volume.display()
        )));
    }
    print(&text(&added, mount.is_some()).context("cannot write the text")?)?;
    Ok(ExitCode::SUCCESS)
}

/// Has the daemon of the mount at `dir` add the device.
fn add_to_mounted(args: &AddArgs, dir: &Path) -> Result<Add, Failure> {
    let path = match is_remote(&args.new) {
        true => args.new.clone(),
        false => std::path::absolute(&args.new)
            .context(format_args!("cannot find {}", args.new.display()))?,
    };
    let seen = Seen::at(&path);
    let mounted = std::fs::metadata(dir).context(format_args!("cannot find {}", dir.display()))?;
    if seen.is_some_and(|seen| seen.device == mounted.dev()) {
        return Err(Failure::new(format!(
            "{} is on the volume itself, so the next mount could not open it; choose a path outside of the volume",
            args.new.display()
        )));
    }
    let request = AddRequest {
        number: random_u64().context("cannot get a random number")?,
        path: path.as_os_str().as_bytes().to_vec(),
        size_bytes: args.size,
        slices: args.slices,
        force: args.force,
        seen,
    };
    control::add(dir, &request)
}

/// Adds the device to a volume that no process uses.
fn add_here(args: &AddArgs) -> Result<Add, Failure> {
    let refused = |error: VolumeError| Failure::new(error.to_string());
    let mut lock = Volume::lock(&args.volume, OpenMode::WRITE).map_err(refused)?;
    let volume =
        Volume::open_among(&args.volume, &args.device, OpenMode::WRITE).map_err(refused)?;
    lock.cover(&volume).map_err(refused)?;
    let options = FormatOptions {
        size_bytes: args.size,
        slices: Some(args.slices),
        force: args.force,
        progress: std::io::stderr()
            .is_terminal()
            .then_some(show_progress as fn(u64, u64)),
        ..FormatOptions::default()
    };
    let added = add(&volume, &args.new, &options);
    Ok(Add::of(added.map(|(added, _lock)| added)))
}

fn text(added: &Add, is_mounted: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for (name, bytes) in &added.devices {
        writeln!(out, "added device {name}: {}", size::human(*bytes))?;
    }
    for (slice, (node, device, bytes)) in (added.first_slice..).zip(&added.slices) {
        let node = node.map_or(String::from("any node"), |n| format!("node {n}"));
        let bytes = size::human(*bytes);
        writeln!(out, "  slice {slice}: {bytes} on device {device}, {node}")?;
    }
    let what = if added.slices.len() == 1 {
        "slice"
    } else {
        "slices"
    };
    match &added.unused {
        Some(reason) => writeln!(
            out,
            "this mount does not use the new {what}: {reason}; unmount the volume and mount it again"
        )?,
        None if is_mounted => writeln!(out, "new files can use the new {what} now")?,
        None => {}
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_tells_whether_the_mount_uses_the_new_slices() {
        let mut added = Add {
            first_slice: 2,
            devices: vec![("new".into(), 1 << 30)],
            slices: vec![(None, 1, 1 << 29), (Some(1), 1, 1 << 29)],
            ..Add::default()
        };
        let closed = text(&added, false).unwrap();
        assert!(closed.contains("slice 3") && closed.lines().count() == 3);
        let mounted = text(&added, true).unwrap();
        assert!(
            mounted.ends_with("can use the new slices now\n"),
            "{mounted}"
        );
        added.unused = Some("no memory".into());
        let unused = text(&added, true).unwrap();
        let last = unused.lines().last().unwrap();
        assert!(
            last.contains("does not use the new slices: no memory"),
            "{last}"
        );
        assert!(last.ends_with("mount it again"), "{last}");
    }
}
