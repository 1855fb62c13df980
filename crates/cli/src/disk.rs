//! The server of an attached disk.
//!
//!     open the device -> mount the file -> make the loop device -> serving -> unmounted -> flushed
//!
//! The server ends when the file is unmounted, by `detach` or another process, or at SIGTERM, SIGINT or SIGHUP, unless the disk is in use. A second
//! SIGTERM or SIGINT ends it in any case: programs get ENOTCONN then, and a further signal ends the wait for a device that does not answer.
//!
//! With a loop device, the kernel may have to write to the disk before it can give memory to this process. `docs/internals/attach.md` says
//! why that ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use jericho_export::Disk;
use jericho_fuse::attach::Connection;
use jericho_fuse::{MountConfig, Running, mount_disk};
use jericho_sys::{limits, process, service};

use crate::args::AttachArgs;
use crate::attached::{self, Device};
use crate::events::{self, Event, HANGUP};
use crate::failure::{Context, Failure, Outcome};
use crate::marker::{self, Marker};
use crate::mounts::{self, Mount};
use crate::{loops, notify, preload, served};

/// The first signal requests an end, the second one an end of a disk in use.
const SIGNALS_TO_FORCE: usize = 2;
/// How long the release of a disk may take after the second signal.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the last flush may take after the second signal.
const FLUSH_MAX: Duration = Duration::from_secs(30);
/// How long the last flush may take after a further signal.
const GRACE: Duration = Duration::from_secs(1);

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
    let mounted = mounted.map_err(|error| Failure::new(error.to_string()));
    let mounted = mounted.and_then(|running| Ok((OwnMount::of(&running)?, Arc::new(running))));
    let (own, running) = match mounted {
        Ok(mounted) => mounted,
        Err(failure) => {
            marker.iter().for_each(Marker::remove);
            place.remove();
            return Err(failure);
        }
    };
    let mut server = Server {
        own,
        events,
        inbox,
        signals: 0,
        end_is_requested: false,
        force_at: None,
    };
    let outcome = server.use_until_end(args, read_only, &named, running, serving);
    if outcome.is_err() {
        // Nothing uses it yet, so this is no loss.
        server.own.abandon();
    }
    let flushed = match read_only {
        true => Ok(()),
        false => server.flush(&device),
    };
    if let Some(marker) = &marker {
        match &flushed {
            Ok(()) => marker.remove(),
            Err(message) => {
                if let Err(error) = marker.leave(message) {
                    // The marker has its first message.
                    tracing::warn!(%error, "cannot leave a message in {}", place.dir.display());
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

/// What the server of a disk waits for.
enum DiskEvent {
    Of(Event),
    /// The process that should release the disk has failed with this message.
    Refused(String),
    /// The last flush has ended.
    Flushed(Result<(), String>),
}

impl From<Event> for DiskEvent {
    fn from(event: Event) -> DiskEvent {
        DiskEvent::Of(event)
    }
}

/// The end of a disk as signals and other processes request it.
struct Server {
    own: OwnMount,
    events: Sender<DiskEvent>,
    inbox: Receiver<DiskEvent>,
    /// Number of signals so far, without hangups.
    signals: usize,
    /// A process is releasing the disk.
    end_is_requested: bool,
    /// When the disk ends even if it is in use.
    force_at: Option<Instant>,
}

impl Server {
    /// Makes the disk usable, and waits for its end. Fails only before programs can use it.
    fn use_until_end(
        &mut self,
        args: &AttachArgs,
        read_only: bool,
        named: &Device,
        running: Arc<Running>,
        serving: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let file = running.dir().join(named.file_name());
        events::watch(running, self.events.clone())?;
        let path = match args.with_loop {
            true => loops::make(&file, read_only)?,
            false => file,
        };
        let source = named.source();
        tracing::info!(device = %source.display(), path = %path.display(), "serving");
        serving(&path)?;
        notify::ready(&format!("{} as {}", source.display(), path.display()));
        while !self.has_ended() {}
        notify::stopping();
        Ok(())
    }

    /// Waits for an event. Returns whether the disk has ended.
    fn has_ended(&mut self) -> bool {
        match receive(&self.inbox, self.force_at) {
            Some(DiskEvent::Of(Event::Unmounted(Ok(())))) => tracing::info!("unmounted"),
            Some(DiskEvent::Of(Event::Unmounted(Err(error)))) => {
                tracing::error!(%error, "the mount ended with an error");
            }
            Some(DiskEvent::Of(Event::Signal(name))) => return self.stop(name),
            Some(DiskEvent::Refused(why)) => {
                self.end_is_requested = false;
                return self.refused(&why);
            }
            Some(DiskEvent::Flushed(_)) => return false,
            None => {
                tracing::error!(
                    "the disk could not be released. The programs get errors from now on"
                );
                self.own.abandon();
            }
        }
        true
    }

    /// Acts on a signal. Returns whether the disk has ended.
    fn stop(&mut self, name: &'static str) -> bool {
        tracing::info!(signal = name, "stopping");
        self.signals += usize::from(name != HANGUP);
        let is_forced = self.signals >= SIGNALS_TO_FORCE;
        if !self.own.is_there() {
            if self.signals == 0 {
                tracing::info!("programs still use the disk, which was unmounted");
                return false;
            }
            tracing::error!(
                "the disk was unmounted. The programs that still use it get errors from now on"
            );
            self.own.abort();
            return true;
        }
        if self.end_is_requested {
            if is_forced {
                tracing::error!(
                    "the disk could not be released yet. The programs get errors from now on"
                );
                self.own.abandon();
            }
            return is_forced;
        }
        if is_forced {
            self.force_at = Some(Instant::now() + PATIENCE);
        }
        // The mount's end is the next event.
        match self.own.request_end(&self.events) {
            Ok(()) => {
                self.end_is_requested = true;
                false
            }
            Err(failure) => self.refused(&failure.to_string()),
        }
    }

    /// Returns whether the disk has ended although something uses it.
    fn refused(&self, why: &str) -> bool {
        if self.signals < SIGNALS_TO_FORCE {
            tracing::error!("{why}. The disk stays; one more SIGTERM or SIGINT ends it");
            return false;
        }
        tracing::error!("{why}. The programs get errors from now on");
        self.own.abandon();
        true
    }

    /// Makes everything durable. Waits for a device that does not answer until signals, or the time after them, end the wait.
    fn flush(&mut self, device: &Arc<dyn jericho_storage::Device>) -> Result<(), String> {
        let (device, events) = (Arc::clone(device), self.events.clone());
        let flush = move || {
            let flushed = device.flush().map_err(|error| error.to_string());
            // The server may have given up.
            let _ = events.send(DiskEvent::Flushed(flushed));
        };
        service::spawn("last-flush", flush).map_err(|error| error.to_string())?;
        let is_forced = self.signals >= SIGNALS_TO_FORCE;
        let mut until = is_forced.then(|| Instant::now() + FLUSH_MAX);
        loop {
            match receive(&self.inbox, until) {
                Some(DiskEvent::Flushed(flushed)) => return flushed,
                Some(DiskEvent::Of(Event::Signal(name))) if name != HANGUP => {
                    self.signals += 1;
                    if self.signals < SIGNALS_TO_FORCE {
                        tracing::warn!(
                            "still writing to the device; one more SIGTERM or SIGINT ends that"
                        );
                        continue;
                    }
                    until = Some(Instant::now() + GRACE);
                }
                Some(_) => {}
                None => {
                    return Err("the device did not answer: changes that programs had not synced may be lost".into());
                }
            }
        }
    }
}

/// Waits for an event. Returns `None` after the given time.
fn receive(inbox: &Receiver<DiskEvent>, until: Option<Instant>) -> Option<DiskEvent> {
    match until {
        None => inbox.recv().ok(),
        Some(until) => {
            let left = until.saturating_duration_since(Instant::now());
            inbox.recv_timeout(left).ok()
        }
    }
}

/// The mount of this process. Other mounts may cover it, and it may be unmounted while programs still use it.
struct OwnMount {
    mount: Mount,
    /// Only root has it.
    connection: Option<Connection>,
}

impl OwnMount {
    /// Finds the mount that was just made.
    fn of(running: &Running) -> Result<OwnMount, Failure> {
        let mount = mounts::at(running.dir())?
            .ok_or_else(|| Failure::new(format!("{} was unmounted", running.dir().display())))?;
        Ok(OwnMount {
            connection: attached::connection(&mount),
            mount,
        })
    }

    /// Returns whether the disk is mounted, also elsewhere or below another mount.
    fn is_there(&self) -> bool {
        let is_gone = |mounts: Vec<Mount>| mounts.iter().all(|m| m.device != self.mount.device);
        !mounts::list().is_ok_and(is_gone)
    }

    /// Starts a process that releases the disk as `jericho detach` does. A failure of the process becomes an event. This process must not do
    /// that itself: a thread that waits for the disk cannot be killed, so neither could the process that the disk waits for.
    fn request_end(&self, events: &Sender<DiskEvent>) -> Result<(), Failure> {
        // This program, even if its file was replaced.
        let mut command = Command::new("/proc/self/exe");
        preload::unset(&mut command);
        command.args(["detach", "--own-mount"]);
        command.arg(attached::device_text(&self.mount));
        command.arg("--").arg(&self.mount.dir);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let child = process::spawn_with_standard_streams(&mut command);
        let child = child.context("cannot start the process that releases the disk")?;
        let events = events.clone();
        let wait = move || {
            let refused = match child.wait_with_output() {
                Ok(output) if output.status.success() => return,
                Ok(output) => match String::from_utf8_lossy(&output.stderr).trim() {
                    "" => format!(
                        "the process that releases the disk ended ({})",
                        output.status
                    ),
                    message => message.trim_start_matches("jericho: ").to_owned(),
                },
                Err(error) => error.to_string(),
            };
            // The server may have ended.
            let _ = events.send(DiskEvent::Refused(refused));
        };
        service::spawn("releasing", wait).context("cannot start a thread")?;
        Ok(())
    }

    /// Ends the connection to the kernel: programs get errors from now on.
    fn abort(&self) {
        if let Some(Err(error)) = self.connection.as_ref().map(Connection::abort) {
            tracing::warn!(%error, "cannot abort the FUSE connection; it ends when this process ends");
        }
    }

    /// Removes a disk in use. The loop devices end when nothing uses them any more.
    fn abandon(&self) {
        // The first, so that nothing below waits for this process.
        self.abort();
        let note = |note: String| tracing::warn!("{note}");
        if let Err(failure) = loops::abandon_all(&self.mount, note) {
            tracing::warn!("{failure}");
        }
        if let Err(error) = attached::unmount(&self.mount, true) {
            tracing::warn!(%error, "cannot unmount");
        }
    }
}

/// Prepares this process for writes that the kernel waits for when it needs memory. Continues without the preparation if rights are missing.
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
