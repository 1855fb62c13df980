//! The daemon of one mounted volume.
//!
//!     open the volume -> mount -> serving -> unmounted -> everything written back, marked clean
//!
//! The daemon ends when the directory is unmounted, by any process, or on SIGTERM, SIGINT or SIGHUP. If the mount is in use then,
//! the daemon detaches it: programs with open files get a short time to finish, and ENOTCONN afterwards. All written data reaches
//! the device in both cases.
//!
//! If data cannot be written back after the mount has ended, the daemon keeps it and retries. It names the files in its log and
//! holds the volume until all data is written, or until a second signal discards it.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use jericho_daemon::{Mounted, OpenOptions};
use jericho_fuse::attach::Connection;
use jericho_fuse::{MountConfig, MountError, Running};
use jericho_sys::limits;
use jericho_topology::Topology;

use crate::args::{MountArgs, MountOptions};
use crate::events::{self, Event, HANGUP};
use crate::failure::{Context, Failure, Outcome};
use crate::mountable::{self, Checked};
use crate::{background, busy, keeper, logging, mounts, notify, probe, utab};

/// How long programs may continue to use the mount after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// Pause between attempts to write back remaining data after the mount has ended.
const RETRY: Duration = Duration::from_secs(1);
/// The first signal requests a stop, the second a stop that discards data.
const SIGNALS_TO_DISCARD: usize = 2;
/// Bytes that the background check of a volume with checksums reads in a second by default: a terabyte in three days.
const SCRUB_RATE: u64 = 4 << 20;
/// Maximum number of files named in one message.
const NAMES_MAX: usize = 100;

/// Serves in this process. Messages and errors go to standard error.
pub fn in_foreground(checked: &Checked, options: &MountOptions) -> Outcome {
    logging::start();
    serve(checked, options, |_| Ok(()))
}

/// Serves as the daemon that `mount` started.
pub fn as_daemon(args: &MountArgs) -> Outcome {
    let checked = Checked {
        volume: args.volume.clone(),
        dir: args.dir.clone(),
    };
    background::run(|| serve(&checked, &args.options, background::report_serving))
}

fn serve(
    checked: &Checked,
    options: &MountOptions,
    serving: impl FnOnce(&[String]) -> Result<(), Failure>,
) -> Outcome {
    let (events, inbox) = channel();
    // Listens before the volume is touched, so that a signal never ends the daemon midway.
    events::listen_for_signals(events.clone())?;
    // Each program takes two descriptors. Service managers often set a soft limit of 1024, and a hard limit of about 500,000.
    limits::raise_open_files();
    let topology =
        Topology::from_spec(&options.topology).map_err(|e| Failure::new(e.to_string()))?;
    let mounted = Mounted::open(OpenOptions {
        volume: checked.volume.clone(),
        read_only: options.read_only,
        devices: options.device.clone(),
        force: options.force,
        cache_bytes: options.cache,
        spill_bytes: options.spill.unwrap_or(0),
        threads: options.threads.unwrap_or_default(),
        with_parent: options.with_parent,
        move_costs: probe::costs(&topology),
        fast_path: mountable::trusted(options)?,
        keeper: Some(keeper::command),
        topology,
    })
    .map_err(|e| Failure::new(format!("{e}{}", where_mounted(&checked.volume))))?;
    let scrub_rate = options.scrub_rate.unwrap_or(SCRUB_RATE);
    mounted.fs().set_scrub_rate(scrub_rate);

    let source = checked.volume.to_string_lossy().into_owned();
    let config = MountConfig {
        transport: options.transport,
        ..MountConfig::for_this_user(source, options.read_only)
    };
    let running = match jericho_fuse::mount(mounted.clone(), &checked.dir, config) {
        Ok(running) => Arc::new(running),
        Err(e) => {
            close(&mounted)?;
            return Err(Failure::new(e.to_string()));
        }
    };
    tracing::info!(volume = %checked.volume.display(), dir = %checked.dir.display(), "serving");
    let entry = utab::enter(&checked.volume, &checked.dir);
    events::watch(running.clone(), events)?;
    let warnings = mounted.warnings();
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    if let Err(failure) = serving(&warnings) {
        stop(&running, &checked.volume, &inbox);
        close(&mounted)?;
        return Err(failure);
    }
    notify::ready(&format!(
        "{} on {}",
        checked.volume.display(),
        checked.dir.display()
    ));

    let mut signals = 0;
    match inbox.recv() {
        Ok(Event::Signal(name)) => {
            tracing::info!(signal = name, "stopping");
            notify::stopping();
            signals = usize::from(name != HANGUP);
            stop(&running, &checked.volume, &inbox);
        }
        Ok(Event::Unmounted(result)) => {
            notify::stopping();
            ended(result);
        }
        Err(_) => tracing::error!("the threads that wait for the end of the mount are gone"),
    }
    // Removes the entry before the volume is free and another process can mount it there.
    drop(entry);
    write_all_back(&mounted, &checked.volume, &inbox, signals);
    close(&mounted)?;
    tracing::info!("everything is on the device");
    Ok(ExitCode::SUCCESS)
}

/// Retries until everything is written, nothing more can be written, or `SIGNALS_TO_DISCARD` signals have come.
fn write_all_back(mounted: &Mounted, volume: &Path, inbox: &Receiver<Event>, mut signals: usize) {
    mounted.end_clients();
    let mut reported = false;
    while let Err(error) = mounted.sync() {
        if !mounted.fs().may_recover() {
            tracing::error!(
                "can no longer write: {error}; lost: {}. All data that was synced before is on the volume",
                shortened(mounted.unwritten())
            );
            return;
        }
        if signals >= SIGNALS_TO_DISCARD {
            let names = shortened(mounted.unwritten());
            tracing::error!("discarded what could not be written, as requested: {names}");
            return;
        }
        if !reported {
            reported = true;
            let what = match error.is_unreachable() {
                true => "Waiting until the host answers; discard them with",
                false => "Free space on the host, or discard them with",
            };
            tracing::error!(
                "still writing back: {error}; unwritten: {}. {what}: jericho umount --force {}",
                shortened(mounted.unwritten()),
                volume.display()
            );
        }
        match inbox.recv_timeout(RETRY) {
            Ok(Event::Signal(HANGUP)) => {
                tracing::warn!("continuing to write back; a hangup does not discard");
            }
            Ok(Event::Signal(name)) => {
                signals += 1;
                tracing::warn!(
                    signal = name,
                    "still writing back; one more signal discards"
                );
            }
            Ok(Event::Unmounted(_)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(RETRY),
        }
    }
}

/// Joins the first names, and adds the number of the others.
fn shortened(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let mut text = names[..names.len() - more].join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

fn close(mounted: &Mounted) -> Result<(), Failure> {
    mounted.close().map_err(|e| {
        Failure::new(format!(
            "not everything could be written: {e}; see the messages above"
        ))
    })
}

/// Unmounts, by force if needed, and waits until the kernel has released the mount or the grace period is over.
fn stop(running: &Running, volume: &Path, inbox: &Receiver<Event>) {
    // Opened before the mount is detached, because a later mount may reuse its number.
    let connection = connection_of(volume, running.dir());
    match running.unmount(false) {
        Ok(()) => {}
        Err(MountError::Busy { .. }) => {
            if let Ok(Some(mount)) = mounts::at(running.dir()) {
                for user in busy::users(&mount, 10) {
                    tracing::warn!("still in use: {user}");
                }
            }
            // The kernel holds pages changed through mappings. Detaching does not write them.
            flush_mappings(running.dir());
            if let Err(error) = running.unmount(true) {
                tracing::error!(%error, "cannot detach");
            }
        }
        // Another process may have unmounted it at this moment; the watch thread reports that.
        Err(error) => tracing::warn!(%error, "cannot unmount"),
    }
    let mut in_grace = true;
    loop {
        // After the abort of the connection, the loop waits for `GRACE` once more, so that requests in progress can end.
        match inbox.recv_timeout(GRACE) {
            Ok(Event::Unmounted(result)) => return ended(result),
            Ok(Event::Signal(_)) => {}
            Err(RecvTimeoutError::Timeout) if in_grace => {
                in_grace = false;
                tracing::warn!("still in use; the programs get ENOTCONN from now on");
                // Without the abort, the kernel ends the connection only some time after this process has ended, and until then
                // answers requests over the FUSE ring with ECANCELED.
                let aborted = match &connection {
                    Ok(connection) => connection.abort().map_err(|e| e.to_string()),
                    Err(error) => Err(error.to_string()),
                };
                if let Err(error) = aborted {
                    tracing::info!(%error, "cannot abort the FUSE connection; it ends when this process ends");
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Opens the FUSE connection of this process's mount. This process holds the volume, so no other mount has it as its source.
fn connection_of(volume: &Path, dir: &Path) -> Result<Connection, Failure> {
    let is_ours = |m: &mounts::Mount| {
        m.filesystem == mounts::FILESYSTEM && m.source == volume && m.dir == dir
    };
    let mount = mounts::list()?.into_iter().rfind(is_ours);
    let mount = mount.ok_or_else(|| Failure::new("it is no longer mounted"))?;
    Connection::of_mount(mount.device.1).context("cannot open its `abort` file")
}

fn flush_mappings(dir: &Path) {
    let synced = File::open(dir).and_then(|d| Ok(rustix::fs::syncfs(&d)?));
    if let Err(error) = synced {
        tracing::error!(%error, "cannot write back changes made through mappings");
    }
}

fn ended(result: std::io::Result<()>) {
    match result {
        Ok(()) => tracing::info!("unmounted"),
        Err(error) => tracing::error!(%error, "the mount ended with an error"),
    }
}

/// Returns " (it is mounted on DIR)" for a mounted volume, else nothing.
fn where_mounted(volume: &Path) -> String {
    let Ok(mounts) = mounts::list() else {
        return String::new();
    };
    mounts
        .into_iter()
        .find(|m| m.filesystem == mounts::FILESYSTEM && m.source == volume)
        .map(|m| format!(" (it is mounted on {})", m.dir.display()))
        .unwrap_or_default()
}
