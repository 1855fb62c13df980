//! The server of an attached disk.
//!
//!     open the device -> mount the file -> make the loop device -> serving -> unmounted -> flushed
//!
//! The server ends when the file is unmounted, by `detach` or another process, or at SIGTERM, SIGINT or SIGHUP, unless the disk is in use. A second
//! SIGTERM or SIGINT ends it in any case: programs get ENOTCONN then.
//!
//! With a loop device, the kernel may have to write to the disk before it can give memory to this process. `docs/internals/attach.md` says
//! why that ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use jericho_export::Disk;
use jericho_fuse::{MountConfig, MountError, Running, mount_disk};
use jericho_sys::{limits, process};

use crate::args::AttachArgs;
use crate::attached::{self, Device};
use crate::events::{self, Event, HANGUP};
use crate::failure::{Context, Failure, Outcome};
use crate::marker::{self, Marker};
use crate::{busy, loops, mounts, notify, served};

/// The first signal requests an end, the second one an end of a disk in use.
const SIGNALS_TO_FORCE: usize = 2;
/// Maximum number of users in a message.
const USERS_MAX: usize = 10;

/// Serves a disk. Calls `serving` with its path when programs can use it.
pub fn serve(args: &AttachArgs, serving: impl FnOnce(&Path) -> Result<(), Failure>) -> Outcome {
    spare_memory(args.with_loop);
    let (events, inbox) = channel();
    // Listens before the disk is there, so that a signal never leaves it behind.
    events::listen_for_signals(events.clone())?;
    limits::raise_open_files();
    let named = Device::named(&args.device)?;
    let (device, claim) = served::open(&named.source(), args.read_only)?;
    tracing::info!("{}", device.describe());
    let (dir, is_new) = attached::prepare(args.at.as_deref(), &named)?;
    let place = Place {
        below: File::open(&dir).context(format_args!("cannot open {}", dir.display()))?,
        dir,
        is_new,
    };
    let read_only = args.read_only || device.is_read_only();
    let marker = match read_only {
        true => None,
        false => Some(place.mark().inspect_err(|_| place.remove())?),
    };
    let config = MountConfig {
        subtype: jericho_fuse::disk::SUBTYPE,
        allow_other: false,
        ..MountConfig::for_this_user(named.source().to_string_lossy().into_owned(), read_only)
    };
    let disk = Disk::new(Arc::clone(&device), args.read_only);
    let mounted = mount_disk(disk, &named.file_name(), &place.dir, config);
    let running = match mounted {
        Ok(running) => Arc::new(running),
        Err(error) => {
            marker.iter().for_each(Marker::remove);
            place.remove();
            return Err(Failure::new(error.to_string()));
        }
    };
    let outcome = use_until_end(args, read_only, &named, &running, events, &inbox, serving);
    if outcome.is_err() {
        // Nothing uses it yet, so this is no loss.
        let _ = running.unmount(true);
    }
    let flushed = match read_only {
        true => Ok(()),
        false => device.flush(),
    };
    if let Some(marker) = &marker {
        match &flushed {
            Ok(()) => marker.remove(),
            Err(error) => {
                if let Err(why) = marker.leave(&error.to_string()) {
                    // The marker has its first message.
                    tracing::warn!(error = %why, "cannot leave a message in {}", place.dir.display());
                }
            }
        }
    }
    place.remove();
    drop(device);
    // The last, because `attach` can use the directory and the device after it.
    drop(claim);
    drop(marker);
    outcome?;
    flushed.context("not everything is durable")?;
    tracing::info!("everything is on the device");
    Ok(ExitCode::SUCCESS)
}

/// Makes the disk usable, and waits for its end. Fails only before programs can use it.
fn use_until_end(
    args: &AttachArgs,
    read_only: bool,
    named: &Device,
    running: &Arc<Running>,
    events: std::sync::mpsc::Sender<Event>,
    inbox: &Receiver<Event>,
    serving: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    events::watch(Arc::clone(running), events)?;
    let file = running.dir().join(named.file_name());
    let path = match args.with_loop {
        true => loops::make(&file, read_only)?,
        false => file,
    };
    let source = named.source();
    tracing::info!(device = %source.display(), path = %path.display(), "serving");
    if let Err(failure) = serving(&path) {
        end(running)?;
        return Err(failure);
    }
    notify::ready(&format!("{} as {}", source.display(), path.display()));
    let mut signals = 0;
    loop {
        match inbox.recv() {
            Ok(Event::Unmounted(Ok(()))) => tracing::info!("unmounted"),
            Ok(Event::Unmounted(Err(error))) => {
                tracing::error!(%error, "the mount ended with an error");
            }
            Ok(Event::Signal(name)) => {
                tracing::info!(signal = name, "stopping");
                signals += usize::from(name != HANGUP);
                // The mount's end is the next event.
                match end(running) {
                    Ok(()) => notify::stopping(),
                    Err(failure) if signals < SIGNALS_TO_FORCE => {
                        tracing::error!(
                            "{failure}. The disk stays; one more SIGTERM or SIGINT ends it"
                        );
                    }
                    Err(failure) => {
                        notify::stopping();
                        tracing::error!("{failure}. The programs get errors from now on");
                        abandon(running);
                        return Ok(());
                    }
                }
                continue;
            }
            Err(_) => tracing::error!("the threads that wait for the end of the disk are gone"),
        }
        notify::stopping();
        return Ok(());
    }
}

/// Removes the loop devices and the mount, if they are not in use.
fn end(running: &Running) -> Result<(), Failure> {
    for device in loops::over(running.dir()) {
        loops::release(&device)?;
    }
    match running.unmount(false) {
        Ok(()) => Ok(()),
        Err(MountError::Busy { dir }) => {
            let mount = mounts::at(&dir)?;
            let users = mount.map(|mount| busy::users(&mount, USERS_MAX));
            Err(Failure::new(format!(
                "{} is in use: {}",
                dir.display(),
                users.unwrap_or_default().join("; ")
            )))
        }
        Err(error) => Err(Failure::new(error.to_string())),
    }
}

/// Removes the mount of a disk in use. The loop devices end when nothing uses them any more.
fn abandon(running: &Running) {
    for device in loops::over(running.dir()) {
        if let Err(failure) = loops::abandon(&device) {
            tracing::warn!("{failure}");
        }
    }
    if let Err(error) = running.unmount(true) {
        tracing::warn!(%error, "cannot unmount");
    }
}

/// Prepares this process for writes that the kernel waits for when it needs memory. Both are helpful only, and need rights.
fn spare_memory(with_loop: bool) {
    // Threads inherit it, so it comes first.
    if let Err(error) = process::become_io_flusher() {
        match with_loop {
            true => {
                tracing::warn!(%error, "cannot become an I/O flusher: a system without free memory may hang")
            }
            false => tracing::debug!(%error, "cannot become an I/O flusher"),
        }
    }
    if with_loop && let Err(error) = limits::lock_memory() {
        tracing::warn!(%error, "cannot lock the memory of this process: do not swap to this disk");
    }
}

/// The directory of a disk.
struct Place {
    dir: PathBuf,
    /// The directory below the mount.
    below: File,
    /// The directory is removed at the end.
    is_new: bool,
}

impl Place {
    /// Makes the marker of a disk.
    fn mark(&self) -> Result<Marker, Failure> {
        let shown = self.dir.display();
        Marker::make(&self.below).map_err(|error| {
            Failure::new(format!(
                "cannot make the file {} in {shown}, which says until the end that not everything is durable: {error}; \
                 choose another directory with --at",
                marker::NAME
            ))
        })
    }

    /// Removes the directory, unless there is a message in it.
    fn remove(&self) {
        if self.is_new
            && let Err(error) = std::fs::remove_dir(&self.dir)
        {
            tracing::debug!(%error, "{} stays", self.dir.display());
        }
    }
}
