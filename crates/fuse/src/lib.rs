//! The mount: kernel requests to filesystem and data path.
//!
//! Knows the kernel's protocol (through `fuser`) and nothing of slices, extents or devices: it calls
//! `jericho_daemon::Mounted` for bytes and `jericho_fs::fs::Fs` for names. Reading order:
//! [`attach`] (how a directory becomes a mount), `filesystem` (one method per request), `bytes` and `names` (what the
//! frequent ones do, whichever way they came), `handles` (descriptors), `control` (the `jericho.*` attributes through which
//! the command talks to the daemon), `workers` (which thread serves where). Then `ring`: the other way in, with `protocol`,
//! `helpers` and `forward`.
#![forbid(unsafe_code)]

pub mod attach;
mod bytes;
mod caches;
pub mod control;
mod convert;
mod filesystem;
mod forward;
mod handles;
mod helpers;
mod names;
mod protocol;
mod ring;
mod workers;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use jericho_daemon::Mounted;
use parking_lot::Mutex;

pub use attach::MountError;

/// How requests come from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Through its ring where it offers one, else by the device.
    #[default]
    Auto,
    /// By `/dev/fuse`.
    Device,
    /// Through its ring (FUSE over io_uring).
    Ring,
}

impl std::str::FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Transport, String> {
        [Transport::Auto, Transport::Device, Transport::Ring]
            .into_iter()
            .find(|transport| transport.name() == name)
            .ok_or_else(|| "a transport is auto, device or ring".into())
    }
}

impl Transport {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Device => "device",
            Transport::Ring => "ring",
        }
    }
}

/// How a volume is mounted.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// What `mount` and `/proc/mounts` show as the source: the path of the volume.
    pub source: String,
    /// The kernel refuses every change.
    pub read_only: bool,
    /// Other users may enter (the kernel checks their permissions). An ordinary user needs
    /// `user_allow_other` in /etc/fuse.conf for it.
    pub allow_other: bool,
    /// Honour set-id bits and device files, as a mount by root does.
    pub privileged: bool,
    /// Threads that serve requests; `None`: one per CPU, at least four, at most 32.
    pub workers: Option<usize>,
    /// How requests come.
    pub transport: Transport,
}

impl MountConfig {
    /// What fits the user who mounts: root mounts for everybody, others for themselves.
    pub fn for_this_user(source: String, read_only: bool) -> MountConfig {
        let root = rustix::process::geteuid().is_root();
        MountConfig {
            source,
            read_only,
            allow_other: root,
            privileged: root,
            workers: None,
            transport: Transport::Auto,
        }
    }
}

/// A mount that serves. Dropping it does not unmount: whoever holds it decides how it ends.
pub struct Running {
    dir: PathBuf,
    session: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

impl Running {
    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Detaches the mount from its directory. With `lazy` also when it is busy: who has files open
    /// keeps them, nobody new can enter. Errors: busy, not permitted.
    pub fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        attach::unmount(&self.dir, lazy)
    }

    /// Waits until the kernel has ended the mount, whoever asked for that. Error: what a worker met.
    pub fn wait(&self) -> io::Result<()> {
        let Some(thread) = self.session.lock().take() else {
            return Ok(());
        };
        thread
            .join()
            .map_err(|_| io::Error::other("the thread of the mount panicked"))?
    }
}

/// Mounts a volume that is up on `dir` and serves it in threads of this process. When it returns,
/// the mount answers. `dir` must be an existing directory; what is in it is hidden.
pub fn mount(
    mounted: Arc<Mounted>,
    dir: &Path,
    config: MountConfig,
) -> Result<Running, MountError> {
    let dir = std::fs::canonicalize(dir).map_err(|cause| MountError::Directory {
        dir: dir.to_owned(),
        cause,
    })?;
    let placement = workers::Placement::new(mounted.topology());
    let workers = config
        .workers
        .unwrap_or_else(|| placement.default_workers())
        .max(1);
    let rings = rings(&mounted, &dir, config.transport)?;
    let filesystem = filesystem::Jericho::new(mounted.clone(), placement, rings.is_some());

    let device = attach::attach(&dir, &config)?;
    let mut session_config = fuser::Config::default();
    session_config.n_threads = Some(workers);
    // A channel of its own for every worker, so that a reply wakes and locks nobody else's. It
    // needs the right to open the device, which the helper for ordinary users does not give: they
    // share one channel.
    session_config.clone_fd = workers > 1 && attach::may_open_device();
    session_config.acl = if config.allow_other {
        fuser::SessionACL::All
    } else {
        fuser::SessionACL::Owner
    };
    tracing::info!(
        dir = %dir.display(), workers, own_channels = session_config.clone_fd, "mounting"
    );
    // From here on the directory is a mount: an error must take it away again.
    let undo = |cause: io::Error| {
        if let Err(error) = attach::unmount(&dir, true) {
            tracing::error!(%error, "cannot take the failed mount away");
        }
        MountError::Session {
            dir: dir.clone(),
            cause,
        }
    };
    let for_ring = device.try_clone().map_err(undo)?;
    let session = fuser::Session::from_fd(
        filesystem.clone(),
        device,
        session_config.acl,
        session_config.clone(),
    )
    .map_err(undo)?;
    let agreed = filesystem.ring.load(Ordering::Relaxed);
    let serving = match rings.filter(|_| agreed) {
        Some(rings) => {
            session_config.clone_fd = false;
            let serving = ring::Serving::start(rings, &for_ring, filesystem, session_config);
            Some(serving.map_err(undo)?)
        }
        None => None,
    };
    drop(for_ring);
    if config.transport == Transport::Ring && serving.is_none() {
        return Err(undo(io::Error::other(ring::NOT_OFFERED)));
    }
    tracing::info!(ring = serving.is_some(), "the kernel is ready");
    // Without it the mount works as well, only slower.
    if let Err(error) = mounted.serve_clients(Arc::new(caches::Caches(session.notifier()))) {
        tracing::warn!(%error, "programs get no fast path");
    }
    let thread = std::thread::Builder::new()
        .name("mount".into())
        .spawn(move || {
            let result = session.run();
            if let Some(serving) = serving {
                serving.wait();
            }
            result
        })
        .map_err(undo)?;
    Ok(Running {
        dir,
        session: Mutex::new(Some(thread)),
    })
}

/// Rings, where they are wanted and can be had.
fn rings(
    mounted: &Mounted,
    dir: &Path,
    transport: Transport,
) -> Result<Option<ring::Rings>, MountError> {
    let failed = |cause: io::Error| MountError::Session {
        dir: dir.to_owned(),
        cause,
    };
    match (transport, ring::is_offered()) {
        (Transport::Device, _) | (Transport::Auto, false) => Ok(None),
        (Transport::Ring, false) => Err(failed(io::Error::other(ring::NOT_OFFERED))),
        (Transport::Auto, true) => Ok(ring::Rings::new(mounted.topology())
            .inspect_err(|error| tracing::warn!(%error, "no ring; requests come by the device"))
            .ok()),
        (Transport::Ring, true) => ring::Rings::new(mounted.topology())
            .map(Some)
            .map_err(failed),
    }
}
