//! `jericho grow`: through the daemon if the volume is mounted, else in this process.

use std::path::PathBuf;
use std::process::ExitCode;

use jericho_daemon::GrowRequest;
use jericho_fuse::control::{Grow, GrownBytes};
use jericho_storage::is_remote;
use jericho_volume::{OpenMode, Volume, VolumeError};

use crate::args::GrowArgs;
use crate::failure::{Failure, Outcome, print, print_json};
use crate::{control, mounts, size};

pub fn run(args: &GrowArgs) -> Outcome {
    let shown = args.volume.display();
    let mount = mounts::of_volume(&args.volume)?;
    if let Some(device) = args.device.as_deref().filter(|device| is_remote(device))
        && let Some(dir) = &mount
    {
        return Err(Failure::new(format!(
            "{} is on another host: its size is read when the volume is mounted; unmount {} and grow {} then",
            device.display(),
            dir.display(),
            shown
        )));
    }
    let device = args.device.as_deref().map(Volume::device_id).transpose();
    let request = GrowRequest {
        device: device.map_err(refused)?,
        size_bytes: args.size,
    };
    let result = match &mount {
        Some(dir) => control::grow(dir, &request)?,
        None => grow_here(args, &request)?,
    };
    if let Some(error) = result.error {
        return Err(Failure::new(format!("cannot grow {shown}: {error}")));
    }
    if args.json {
        print_json(&result.devices)?;
    } else if result.devices.is_empty() {
        let why = match args.size {
            Some(_) => "it has this size already",
            None => "no device of it has become larger; to make a file larger, give --size",
        };
        print(&format!("{shown}: nothing to do: {why}\n"))?;
    } else {
        print(&result.devices.iter().map(line).collect::<String>())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn line(grown: &GrownBytes) -> String {
    let (old, new) = (grown.old_bytes, grown.new_bytes);
    format!(
        "{}: grown from {} to {} ({new} bytes)\n",
        grown.device,
        size::human(old),
        size::human(new)
    )
}

fn refused(error: VolumeError) -> Failure {
    Failure::new(error.to_string())
}

/// Grows a volume that no process uses.
fn grow_here(args: &GrowArgs, request: &GrowRequest) -> Result<Grow, Failure> {
    let mode = OpenMode {
        read_only: false,
        force: args.force,
    };
    let others: Vec<PathBuf> = args.device.iter().cloned().collect();
    let open = || {
        // Refuses what is not the first device of a volume with a better error than the lock's.
        Volume::is_dirty_at(&args.volume)?;
        let mut lock = Volume::lock(&args.volume, mode)?;
        let volume = Volume::open_among(&args.volume, &others, mode)?;
        lock.cover(&volume)?;
        Ok((volume, lock))
    };
    let (volume, _lock) = open().map_err(refused)?;
    Ok(Grow::of(volume.grow(request)))
}
