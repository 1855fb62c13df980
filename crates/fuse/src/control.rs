//! The extended attributes through which the command talks to the daemon of a mount.
//!
//! They need no socket and no path of their own. Any file of the mount reaches the right daemon, and the kernel has checked the
//! caller's permissions. No listing shows them.
//!
//! | attribute         | get                                            | set                              |
//! |-------------------|------------------------------------------------|----------------------------------|
//! | `jericho.stat`    | `Stat` as JSON, at most [`STAT_SLICES_PER_PAGE`] slices (`jericho.stat+N`: from slice N on) | |
//! | `jericho.where`   | `Where` of this inode as JSON                  |                                  |
//! | `jericho.place`   | [`InodePlacement`] of this inode as JSON                | where new files below go         |
//! | `jericho.threads` |                                                | the policy for migrating threads to its data, or to that of new files below |
//! | `jericho.sync`    | nothing, after everything written to the volume is durable |                      |
//! | `jericho.syncfs`  | the same for syncfs(2): also fails once after a write-back has failed, even if a retry has succeeded | |
//! | `jericho.trim+FROM+LEAST` | [`Trim`] as JSON, after about a second: free space from byte FROM on, in runs of at least LEAST bytes | |
//! | `jericho.grow+SIZE+DEVICE` | [`Grow`] as JSON, after the growth. SIZE is in bytes, 0: as large as the devices are. DEVICE is the id of its label in hexadecimal digits, `all`: every device | |
//! | `jericho.add`     |                                                | adds the device of an [`AddRequest`](crate::addition::AddRequest) in JSON |
//! | `jericho.added+N` | [`Add`](crate::addition::Add) as JSON, the result of the request with the number N | |
//! | `jericho.move`    |                                                | moves this inode, and waits for the end |
//!
//! A place is written `node:N`, `N` or `slice:N`. A policy is `never`, `always`, `adaptive` or `inherit`. Only root and the
//! inode's owner may set an attribute. Only root and the user who mounted may trim, grow and add.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use jericho_daemon::{
    GrowError, GrowRequest, GrownDevice, Interruption, Mounted, with_interruption,
};
use jericho_fs::types::{Ino, SliceId};
use jericho_sys::process::effective_uid;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addition::{ADD, Additions};
use crate::config::Transport;

/// All names with this prefix belong to the daemon.
pub const PREFIX: &str = "jericho.";
/// Counters.
pub const STAT: &str = "jericho.stat";
/// The present location of a file.
pub const WHERE: &str = "jericho.where";
/// The intended location of a file.
pub const PLACE: &str = "jericho.place";
/// The policy for migrating threads to a file's data.
pub const THREADS: &str = "jericho.threads";
/// Makes everything durable. A read of the attribute starts it.
pub const SYNC: &str = "jericho.sync";
/// Makes everything durable, and reports a failed write-back once, as syncfs(2) does.
pub const SYNCFS: &str = "jericho.syncfs";
/// Discards free space. A read of the attribute starts it.
pub const TRIM: &str = "jericho.trim";
/// Takes larger devices into use. A read of the attribute starts it.
pub const GROW: &str = "jericho.grow";
/// Moves a file.
pub const MOVE: &str = "jericho.move";
/// Most slices, nodes or clients in one page. An attribute holds at most 64 KiB, so further ones come in further pages.
pub const STAT_SLICES_PER_PAGE: usize = 64;

/// The result of `jericho place --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodePlacement {
    /// The slice.
    pub slice: SliceId,
    /// Its home node.
    pub node: u16,
    /// A user has set the place here. Otherwise it was inherited or assigned in turn.
    pub explicit: bool,
    /// The policy for migrating threads: `adaptive`, `never` or `always`.
    pub threads: String,
    /// The origin of the policy: `set here`, `inherited`, or `the volume`.
    pub threads_from: String,
}

/// Result of one part of `jericho trim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trim {
    /// Bytes that devices discarded.
    pub bytes: u64,
    /// Where the next part begins; `None` when the trim is complete.
    pub next: Option<u64>,
}

/// Result of `jericho grow`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grow {
    /// The devices that have grown.
    pub devices: Vec<GrownBytes>,
    /// Why the volume could not grow.
    pub error: Option<String>,
}

/// A device that has grown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrownBytes {
    /// Path of the device.
    pub device: String,
    /// Bytes that the volume used before.
    pub old_bytes: u64,
    /// Bytes that the volume uses now.
    pub new_bytes: u64,
}

impl Grow {
    /// Describes a growth, or why it failed.
    pub fn of(result: Result<Vec<GrownDevice>, GrowError>) -> Grow {
        let bytes = |grown: GrownDevice| GrownBytes {
            device: grown.name.to_string(),
            old_bytes: grown.old_bytes,
            new_bytes: grown.new_bytes,
        };
        match result {
            Ok(grown) => Grow {
                devices: grown.into_iter().map(bytes).collect(),
                error: None,
            },
            Err(error) => Grow {
                devices: vec![],
                error: Some(error.to_string()),
            },
        }
    }
}

/// Returns whether an attribute is of the command, and a request for it may change the volume.
pub(crate) fn is_change(name: &[u8]) -> bool {
    name.starts_with(PREFIX.as_bytes()) && name != SYNC.as_bytes() && name != SYNCFS.as_bytes()
}

/// Returns the name of the attribute that grows the volume as requested.
pub fn grow_name(request: &GrowRequest) -> String {
    let device = request.device.map_or("all".into(), |uuid| {
        let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        digits
    });
    format!("{GROW}+{}+{device}", request.size_bytes.unwrap_or(0))
}

/// Parses a name that `grow_name` returned. Fails with ENODATA for any other name.
fn grow_request(name: &str) -> Result<GrowRequest, i32> {
    let parsed = (|| {
        let (size, device) = name
            .strip_prefix(GROW)?
            .strip_prefix('+')?
            .split_once('+')?;
        let device = match device {
            "all" => None,
            digits => {
                let number = u128::from_str_radix(digits, 16).ok()?;
                Some(number.to_be_bytes()).filter(|_| digits.len() == 32)
            }
        };
        let size_bytes: u64 = size.parse().ok()?;
        Some(GrowRequest {
            device,
            size_bytes: Some(size_bytes).filter(|bytes| *bytes > 0),
        })
    })();
    // Any other name is a different request.
    parsed
        .filter(|request| grow_name(request) == name)
        .ok_or(libc::ENODATA)
}

/// A range of the volume's space to discard, in bytes. Offsets count through all slices: the space of a slice begins where that
/// of the slice before it ends. Has the layout of `struct fstrim_range` of linux/fs.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct TrimRange {
    pub(crate) start: u64,
    /// In the answer to FITRIM: the number of discarded bytes.
    pub(crate) len: u64,
    /// Length of the shortest run to discard.
    pub(crate) least: u64,
}

impl TrimRange {
    /// Parses `+FROM+LEAST`, the text after the attribute's name. Fails with ENODATA for any other text.
    fn parse(text: &str) -> Result<TrimRange, i32> {
        let mut numbers = text.split('+').map(|number| number.parse::<u64>());
        match (
            numbers.next(),
            numbers.next(),
            numbers.next(),
            numbers.next(),
        ) {
            (Some(Err(_)), Some(Ok(start)), Some(Ok(least)), None) if text.starts_with('+') => {
                Ok(TrimRange {
                    start,
                    len: u64::MAX,
                    least,
                })
            }
            _ => Err(libc::ENODATA),
        }
    }
}

/// The place that the value of [`PLACE`] or [`MOVE`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A slice, which may not exist.
    Slice(SliceId),
    /// A node, which may not exist.
    Node(u16),
}

impl Target {
    /// Parses `node:N`, `N` or `slice:N`. Fails with EINVAL for any other value.
    pub fn parse(value: &[u8]) -> Result<Target, i32> {
        let value = text(value)?;
        let number = |digits: &str| digits.parse().map_err(|_| libc::EINVAL);
        match value.strip_prefix("slice:") {
            Some(slice) => Ok(Target::Slice(number(slice)?)),
            None => Ok(Target::Node(number(
                value.strip_prefix("node:").unwrap_or(value),
            )?)),
        }
    }
}

/// Returns a value as text, without the newline or NUL that a shell or a C program appends.
fn text(value: &[u8]) -> Result<&str, i32> {
    let value = std::str::from_utf8(value).map_err(|_| libc::EINVAL)?;
    Ok(value.trim_end_matches(['\0', '\n']))
}

type Job = Box<dyn FnOnce() + Send>;

/// Answers control attributes. Public for fuzzers.
pub struct Control {
    mounted: Arc<Mounted>,
    /// Requests come through the FUSE ring.
    ring: bool,
    /// Runs moves in a thread of its own, one at a time. Moves wait for devices for a long time, and must not hold a worker.
    mover: Worker,
    /// Runs syncs in another thread, so that a sync does not wait for a move.
    syncer: Worker,
    /// Runs trims in a thread of their own.
    trimmer: Worker,
    /// Runs growths in a thread of their own: the host may take long to allocate the space.
    grower: Worker,
    /// The results of additions, which the grower also runs.
    additions: Arc<Additions>,
}

/// Time limit for one part of a trim.
const TRIM_PART: Duration = Duration::from_secs(1);

impl Control {
    /// Creates it for a mounted volume. `ring`: requests come through the FUSE ring.
    pub fn new(mounted: Arc<Mounted>, ring: bool) -> Control {
        Control {
            mounted,
            ring,
            mover: Worker::new("mover"),
            syncer: Worker::new("syncer"),
            trimmer: Worker::new("trimmer"),
            grower: Worker::new("grower"),
            additions: Arc::default(),
        }
    }

    /// Returns the value of an attribute whose name begins with [`PREFIX`]. Fails with an errno.
    pub fn get(&self, ino: Ino, name: &str) -> Result<Vec<u8>, i32> {
        if let Some(page) = name.strip_prefix(STAT) {
            return self.stat(page);
        }
        if let Some(added) = self.additions.result(name) {
            return to_json(&added);
        }
        match name {
            WHERE => to_json(&self.mounted.where_is(ino).map_err(|e| e.errno())?),
            PLACE => {
                let (slice, explicit) = self.mounted.fs().placement(ino).map_err(|e| e.errno())?;
                let threads = self.mounted.fs().threads(ino).map_err(|e| e.errno())?;
                let from = match threads.policy() {
                    None => "the volume",
                    Some(_) if threads.is_set_here() => "set here",
                    Some(_) => "inherited",
                };
                to_json(&InodePlacement {
                    slice,
                    node: self.mounted.node_of_slice(slice).0,
                    explicit,
                    threads: threads
                        .policy()
                        .unwrap_or(self.mounted.threads())
                        .to_string(),
                    threads_from: from.into(),
                })
            }
            _ => Err(libc::ENODATA),
        }
    }

    /// Makes everything written to the volume durable, as the attribute `name` says ([`SYNC`] or [`SYNCFS`]). Calls `reply` with the
    /// result later, from another thread.
    pub fn sync(&self, name: &str, reply: impl FnOnce(Result<(), i32>) + Send + 'static) {
        let mounted = self.mounted.clone();
        let reports = name == SYNCFS;
        let interruption = Interruption::of_thread();
        self.syncer.run(Box::new(move || {
            let result = with_interruption(interruption, || match reports {
                true => mounted.syncfs(),
                false => mounted.sync(),
            });
            if let Err(error) = &result {
                tracing::warn!(%error, "sync: not everything could be made durable");
            }
            reply(result.map_err(|e| e.errno()));
        }));
    }

    /// Runs one part of a trim. Calls `reply` with the result later, from another thread.
    pub fn trim_part(
        &self,
        name: &str,
        uid: u32,
        reply: impl FnOnce(Result<Vec<u8>, i32>) + Send + 'static,
    ) {
        match TrimRange::parse(name.strip_prefix(TRIM).unwrap_or(name)) {
            Ok(range) => self.trim(range, Some(TRIM_PART), uid, |trim| {
                reply(trim.and_then(|trim| to_json(&trim)));
            }),
            Err(errno) => reply(Err(errno)),
        }
    }

    /// Discards the free space in a range, or the first part of it that takes `time`. Calls `reply` with the result later,
    /// from another thread.
    pub(crate) fn trim(
        &self,
        range: TrimRange,
        time: Option<Duration>,
        uid: u32,
        reply: impl FnOnce(Result<Trim, i32>) + Send + 'static,
    ) {
        if uid != 0 && uid != effective_uid() {
            return reply(Err(libc::EPERM));
        }
        let mounted = self.mounted.clone();
        self.trimmer.run(Box::new(move || {
            let bytes = range.start..range.start.saturating_add(range.len);
            let until = time.map(|time| Instant::now() + time);
            let trimmed = mounted.trim(bytes, range.least, until);
            reply(
                trimmed
                    .map_err(|e| e.errno())
                    .map(|(bytes, next)| Trim { bytes, next }),
            );
        }));
    }

    /// Grows the volume as the attribute `name` says. Calls `reply` with the result later, from another thread.
    pub fn grow(
        &self,
        name: &str,
        uid: u32,
        reply: impl FnOnce(Result<Vec<u8>, i32>) + Send + 'static,
    ) {
        let request = match grow_request(name) {
            Ok(request) => request,
            Err(errno) => return reply(Err(errno)),
        };
        if uid != 0 && uid != effective_uid() {
            return reply(Err(libc::EPERM));
        }
        let mounted = self.mounted.clone();
        self.grower.run(Box::new(move || {
            let grown = mounted.grow(&request);
            if let Err(error) = &grown {
                tracing::warn!(%error, "the volume could not grow");
            }
            reply(to_json(&Grow::of(grown)));
        }));
    }

    /// Adds a device, as the value says. Calls `reply` later, from another thread.
    fn add(&self, value: &[u8], uid: u32, reply: impl FnOnce(Result<(), i32>) + Send + 'static) {
        if uid != 0 && uid != effective_uid() {
            return reply(Err(libc::EPERM));
        }
        let request = match Additions::parse(value) {
            Ok(request) => request,
            Err(errno) => return reply(Err(errno)),
        };
        let (mounted, additions) = (self.mounted.clone(), self.additions.clone());
        self.grower.run(Box::new(move || {
            additions.run(&mounted, &request);
            reply(Ok(()));
        }));
    }

    fn stat(&self, page: &str) -> Result<Vec<u8>, i32> {
        let first: usize = match page.strip_prefix('+') {
            Some(number) => number.parse().map_err(|_| libc::ENODATA)?,
            None if page.is_empty() => 0,
            None => return Err(libc::ENODATA),
        };
        let mut stat = self.mounted.stat();
        stat.transport = match self.ring {
            true => Transport::Ring.name().into(),
            false => Transport::Device.name().into(),
        };
        stat.slices = stat
            .slices
            .into_iter()
            .skip(first)
            .take(STAT_SLICES_PER_PAGE)
            .collect();
        stat.nodes = stat
            .nodes
            .into_iter()
            .skip(first)
            .take(STAT_SLICES_PER_PAGE)
            .collect();
        stat.clients = stat
            .clients
            .into_iter()
            .skip(first)
            .take(STAT_SLICES_PER_PAGE)
            .collect();
        to_json(&stat)
    }

    /// Sets an attribute. Calls `reply` with the result, perhaps later and in another thread.
    pub fn set(
        &self,
        ino: Ino,
        name: &str,
        value: &[u8],
        uid: u32,
        reply: impl FnOnce(Result<(), i32>) + Send + 'static,
    ) {
        if name == ADD {
            return self.add(value, uid, reply);
        }
        if name == THREADS {
            return reply(self.set_threads(ino, value, uid));
        }
        match self.checked(ino, name, value, uid) {
            Err(errno) => reply(Err(errno)),
            Ok(slice) if name == PLACE => {
                reply(
                    self.mounted
                        .fs()
                        .set_placement(ino, slice)
                        .map_err(|e| e.errno()),
                );
            }
            Ok(slice) => {
                let mounted = self.mounted.clone();
                self.mover.run(Box::new(move || {
                    let result = mounted.move_to(ino, slice);
                    if let Err(error) = &result {
                        tracing::warn!(ino, slice, %error, "a move failed");
                    }
                    reply(result.map_err(|e| e.errno()));
                }));
            }
        }
    }

    fn set_threads(&self, ino: Ino, value: &[u8], uid: u32) -> Result<(), i32> {
        let policy = match self.text_of_owner(ino, value, uid)? {
            "inherit" => None,
            word => Some(word.parse().map_err(|_| libc::EINVAL)?),
        };
        let set = self.mounted.set_threads(ino, policy);
        set.map_err(|e| e.errno())
    }

    /// Returns the value as text. Fails unless the caller may set attributes of the inode.
    fn text_of_owner<'a>(&self, ino: Ino, value: &'a [u8], uid: u32) -> Result<&'a str, i32> {
        self.refuse_others(ino, uid)?;
        text(value)
    }

    /// Fails with EPERM for callers that may set nothing on an inode.
    fn refuse_others(&self, ino: Ino, uid: u32) -> Result<(), i32> {
        if uid != 0 && self.mounted.fs().getattr(ino).map_err(|e| e.errno())?.uid != uid {
            return Err(libc::EPERM);
        }
        Ok(())
    }

    /// Returns the slice that the value names. Fails unless the caller may ask for it.
    fn checked(&self, ino: Ino, name: &str, value: &[u8], uid: u32) -> Result<SliceId, i32> {
        if name != PLACE && name != MOVE {
            return Err(libc::EOPNOTSUPP);
        }
        self.refuse_others(ino, uid)?;
        // A slice that is just being added is not for files yet.
        let slices = self.mounted.fs().place_count();
        let node = match Target::parse(value)? {
            Target::Slice(slice) if slice < slices => return Ok(slice),
            Target::Slice(_) => return Err(libc::EINVAL),
            Target::Node(node) => node,
        };
        let on_node: Vec<SliceId> = (0..slices)
            .filter(|s| self.mounted.node_of_slice(*s).0 == node)
            .collect();
        // Several slices of a node share the load by inode number. An inode that is on the node already stays in its slice.
        let current = self.mounted.fs().placement(ino).map_err(|e| e.errno())?.0;
        match on_node.len() {
            0 => Err(libc::EINVAL),
            _ if on_node.contains(&current) => Ok(current),
            n => Ok(on_node[(ino % n as u64) as usize]),
        }
    }
}

/// A thread that starts with its first job.
struct Worker {
    name: &'static str,
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Worker {
    fn new(name: &'static str) -> Worker {
        Worker {
            name,
            jobs: Mutex::new(None),
        }
    }

    fn run(&self, job: Job) {
        let name = self.name;
        let mut sender = self.jobs.lock();
        let jobs = sender.get_or_insert_with(|| {
            let (sender, jobs) = channel::<Job>();
            let work = move || {
                while let Ok(job) = jobs.recv() {
                    // A panic drops the job's reply, and the caller gets EIO.
                    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err() {
                        tracing::error!(thread = name, "a job panicked");
                    }
                }
            };
            let started = std::thread::Builder::new().name(name.into()).spawn(work);
            if let Err(error) = started {
                tracing::error!(thread = name, %error, "cannot start a thread for jobs that wait");
            }
            sender
        });
        // If the thread could not be started, the job is dropped and the caller gets EIO. The next job tries again.
        if jobs.send(job).is_err() {
            *sender = None;
        }
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, i32> {
    serde_json::to_vec(value).map_err(|error| {
        tracing::error!(%error, "cannot write JSON");
        libc::EIO
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trim_names_where_it_begins_and_the_shortest_run() {
        let range = TrimRange {
            start: 8192,
            len: u64::MAX,
            least: 65536,
        };
        assert_eq!(TrimRange::parse("+8192+65536"), Ok(range));
        for wrong in [
            "",
            "+1",
            "1+2",
            "+1+2+3",
            "+-1+2",
            "+1+x",
            "x+1+2",
            "+1+99999999999999999999",
        ] {
            assert_eq!(TrimRange::parse(wrong), Err(libc::ENODATA), "{wrong}");
        }
    }

    #[test]
    fn the_name_of_a_growth_has_the_size_and_the_device() {
        let mut request = GrowRequest::default();
        assert_eq!(grow_name(&request), "jericho.grow+0+all");
        assert_eq!(grow_request("jericho.grow+0+all"), Ok(request));
        request.size_bytes = Some(1 << 40);
        request.device = Some(std::array::from_fn(|i| i as u8));
        assert_eq!(grow_request(&grow_name(&request)), Ok(request));
        for wrong in [
            "jericho.grow",
            "jericho.grow+1",
            "jericho.grow+-1+all",
            "jericho.grow+01+all",
            "jericho.grow+1+",
            "jericho.grow+1+12",
            "jericho.grow+1+all+all",
            "jericho.grow+1+0000000000000000000000000000000g",
            "jericho.grow+1+000102030405060708090A0b0c0d0e0f",
        ] {
            assert_eq!(grow_request(wrong), Err(libc::ENODATA), "{wrong}");
        }
    }
}
