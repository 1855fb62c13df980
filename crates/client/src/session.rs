//! A volume's segments, as this process has mapped them.
//!
//! A session stays mapped for the life of the process, because any thread may read it at any time. Its memory is freed together
//! with its daemon (docs/internals/keeper.md). The process adds a session for each daemon, and another when it needs a writable
//! one. A child of fork(2) adds its own, because it is a different client than its parent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use jericho_format::threads::ThreadPolicy;
use jericho_shm::{
    Access, Area, Control, HANDSHAKE_BYTES, Key, Lent, Reply, Request, SliceMemory, Slots, Writer,
    socket_name,
};
use jericho_sys::files::ForkMark;
use jericho_sys::handshake::Connection;
use jericho_sys::signals;

use crate::migration;
use crate::migration::nodes::Nodes;
use crate::recent_hits::Place;
use crate::reentrancy::{SESSIONS_MAX, Thread};

/// Time that the daemon may take for each message of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Polls for a thread that is attaching: that may take a moment or a whole timeout.
const ATTACHING_POLLS: u32 = 2000;
const ATTACHING_POLL: Duration = Duration::from_millis(1);

static SESSIONS: [OnceLock<Session>; SESSIONS_MAX] = [const { OnceLock::new() }; SESSIONS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);
static MARK: OnceLock<ForkMark> = OnceLock::new();
/// Word of the mark: one more than the index of the first session that is this process's own. Zero: none is.
const FIRST: usize = 0;
/// Word of the mark: a thread is attaching. The word is in the mark, so that a child never waits for a thread that it does not
/// have.
const ATTACHING: usize = 1;
/// Word of the mark: not zero if this process may attach although `BARE` is set.
const MAY_ATTACH: usize = 2;
/// A child was made, by this process or by an ancestor, other than by the C library's fork. Locks of the C library that other
/// threads held then are never opened in that child. Those of malloc are among them, and attaching allocates memory.
static BARE: AtomicBool = AtomicBool::new(false);

/// The segments of a volume's daemon, mapped by this process.
#[derive(Debug)]
pub struct Session {
    /// Index among this process's sessions.
    pub index: usize,
    /// The daemon's instance number.
    pub instance: u64,
    /// State that the daemon shows to all clients.
    pub control: Control,
    /// State that writers share.
    pub slots: Slots,
    /// This process's own area.
    pub area: Area,
    /// The pages of each slice.
    pub slices: Vec<SliceMemory>,
    /// The owner number with which this process latches and locks.
    pub owner: u16,
    /// The volume's nodes are those by which this process's threads migrate.
    may_migrate: bool,
    /// The thread policy of this run, if it has one. It takes precedence over that of a file, and that one over the volume's.
    policy_of_run: Option<ThreadPolicy>,
    /// The word `FIRST` of the mark, which tells whether the session is this process's own.
    first: &'static AtomicU64,
    /// Device number of the mount, once a file of it was found to be this daemon's; 0 before.
    device: AtomicU64,
}

impl Session {
    /// Makes a session of the segments that the handshake has brought.
    pub fn new(
        index: usize,
        mark: &'static ForkMark,
        control: Control,
        slots: Slots,
        area: Area,
        slices: Vec<SliceMemory>,
    ) -> Session {
        // Sets rseq up now, where time does not matter, rather than in an access.
        jericho_sys::rseq::current_cpu();
        let nodes = Nodes::new(|cpu| control.node_of_cpu(cpu));
        Session {
            may_migrate: migration::learn(nodes),
            policy_of_run: migration::policy_of_run(),
            first: mark.word(FIRST),
            device: AtomicU64::new(0),
            index,
            instance: control.instance(),
            owner: area.owner(),
            control,
            slots,
            area,
            slices,
        }
    }

    /// Returns whether the session is this process's own, and not its parent's.
    #[inline(always)]
    pub fn is_own(&self) -> bool {
        let first = self.first.load(Ordering::Acquire);
        // `first` is one more than an index. If it is zero, this subtracts to the largest number, which no index reaches.
        self.index as u64 >= first.wrapping_sub(1)
    }

    /// Makes the session this process's own, or its parent's.
    #[cfg(test)]
    pub fn set_own(&mut self, own: bool) {
        static NONE: AtomicU64 = AtomicU64::new(0);
        static ALL: AtomicU64 = AtomicU64::new(1);
        self.first = if own { &ALL } else { &NONE };
    }

    /// Returns whether this process may write inline.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.slices.first().is_some_and(SliceMemory::is_writable)
    }

    /// Counts an access of this thread to a file of a slice, as local when the thread is on the slice's node. `file`: the file's
    /// own thread policy, if it has one.
    pub fn account(&self, thread: &Thread, slice: u16, file: Option<ThreadPolicy>, access: Access) {
        let place = self.place(thread, slice, file);
        if let Some(cell) = place.used {
            thread.migration.add(cell, 1, access.bytes as usize);
        }
        let access = Access {
            local: place.local,
            ..access
        };
        place.counter.add(access, place.alone);
    }

    /// Returns the index of this thread's block, and whether the thread has it for itself.
    #[inline]
    fn block(&self, thread: &Thread) -> (u32, bool) {
        let take = || {
            let tid = jericho_sys::affinity::current_tid();
            self.area.take_block(tid, jericho_sys::affinity::has_ended)
        };
        thread.block(self.index, take)
    }

    /// Returns the index of this thread's block. Returns `None` when the thread has none for itself.
    #[inline]
    pub fn own_block(&self, thread: &Thread) -> Option<u32> {
        let (block, alone) = self.block(thread);
        alone.then_some(block)
    }

    /// Records the device number of the daemon's mount.
    pub fn serves(&self, device: u64) {
        self.device.store(device, Ordering::Relaxed);
    }

    /// Returns the identity under which this thread writes to a slice. Returns `None` when the thread has no block of its own; it
    /// then writes through the kernel.
    #[inline]
    pub fn writer(&self, thread: &Thread, slice: u16) -> Option<Writer<'_>> {
        let block = self.own_block(thread)?;
        Some(self.area.writer(self.owner, block, slice))
    }

    /// Returns the words in which this thread notes the locks that it lends, if it has a block of its own.
    #[cold]
    pub fn lent(&self, thread: &Thread) -> Option<Lent<'_>> {
        Some(self.area.lent(self.own_block(thread)?))
    }

    /// Reports a page that became dirty. Returns true if the caller must ring the doorbell.
    #[inline]
    pub fn report(&self, key: Key) -> bool {
        self.area.report(key, &self.slots)
    }

    /// Marks an entry of a slice as used by this thread, when the slice's memory is mapped read-only.
    pub fn touch(&self, thread: &Thread, slice: u16, entry: u32) {
        self.area.touch(self.block(thread).0, slice, entry);
    }

    /// Returns where an access of this thread counts now.
    pub fn place(&self, thread: &Thread, slice: u16, file: Option<ThreadPolicy>) -> Place<'_> {
        let home = self.control.node_of_slice(slice);
        let node = self.control.node_of_cpu(jericho_sys::rseq::current_cpu());
        let used = self.may_migrate.then(|| {
            let policy = self.policy_of_run.or(file);
            let policy = policy.unwrap_or_else(|| self.control.policy());
            thread.migration.cell(policy, home, node)
        });
        let (block, alone) = self.block(thread);
        Place {
            counter: self.area.counter(block, slice),
            alone,
            local: node == home,
            used: used.flatten(),
        }
    }
}

/// Returns the session with this index, if it is this process's own. Returns `None` in a child for its parent's sessions.
#[inline]
pub fn get(index: usize) -> Option<&'static Session> {
    let session = SESSIONS.get(index)?.get()?;
    session.is_own().then_some(session)
}

/// Returns the sessions of this process.
pub fn all() -> impl Iterator<Item = &'static Session> {
    (0..COUNT.load(Ordering::Acquire).min(SESSIONS_MAX)).filter_map(get)
}

/// Returns a session with a daemon instance, if there is one. `write`: the session must be writable.
pub fn find(instance: u64, write: bool) -> Option<&'static Session> {
    all().find(|session| session.instance == instance && (!write || session.is_writable()))
}

/// Returns the session that was last found to serve the mount with this device number.
pub fn of_device(device: u64) -> Option<&'static Session> {
    let serves = |session: &&Session| session.device.load(Ordering::Relaxed) == device;
    // A later mount may have the same device number, so this takes the latest session.
    all()
        .filter(serves)
        .last()
        .filter(|session| !session.area.is_cut_off())
}

/// Returns the session with a daemon instance; attaches if there is none yet. Fails when the daemon is gone or refuses, or when
/// this process lacks fds, address space or room for another session.
pub fn attach(instance: u64) -> io::Result<&'static Session> {
    match find(instance, false) {
        Some(session) => Ok(session),
        None => attach_with(instance, 0),
    }
}

/// Returns a writable session; attaches if there is none. `token` asks the daemon for the right to write. Fails as `attach`, and
/// when the daemon gives no token.
pub fn attach_writable(
    instance: u64,
    token: impl FnOnce() -> Option<u64>,
) -> io::Result<&'static Session> {
    if let Some(session) = find(instance, true) {
        return Ok(session);
    }
    match token() {
        None | Some(0) => Err(io::ErrorKind::PermissionDenied.into()),
        Some(token) => attach_with(instance, token),
    }
}

fn attach_with(instance: u64, token: u64) -> io::Result<&'static Session> {
    if !may_attach() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    // Blocks signals. A signal would end the wait for the daemon with an error, even with SA_RESTART. A handler that leaves by
    // longjmp would leave `ATTACHING` set.
    signals::blocked(|| attach_locked(instance, token))
}

fn attach_locked(instance: u64, token: u64) -> io::Result<&'static Session> {
    let mark = mark()?;
    let attaching = mark.word(ATTACHING);
    let mut polls = 0;
    while attaching.swap(1, Ordering::Acquire) != 0 {
        if polls == ATTACHING_POLLS {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        polls += 1;
        std::thread::sleep(ATTACHING_POLL);
    }
    let session = attach_alone(mark, instance, token);
    attaching.store(0, Ordering::Release);
    session
}

/// Keeps other threads from attaching while it lives. In the child of a fork the word is zero anyway.
pub struct AttachLock(Option<&'static AtomicU64>);

impl Drop for AttachLock {
    fn drop(&mut self) {
        if let Some(attaching) = self.0 {
            attaching.store(0, Ordering::Release);
        }
    }
}

/// Returns whether this process may attach. The child of a bare fork may not, nor may that child's children.
pub fn may_attach() -> bool {
    let allowed = |mark: &ForkMark| mark.word(MAY_ATTACH).load(Ordering::Acquire) != 0;
    !BARE.load(Ordering::Acquire) || MARK.get().is_some_and(allowed)
}

/// Allows this process to attach, after the C library's fork of a parent that might: that fork leaves no lock closed in the child.
pub fn allow_attaching() {
    if let Some(mark) = MARK.get() {
        mark.word(MAY_ATTACH).store(1, Ordering::Release);
    }
}

/// Prepares for a child that is made other than by the C library's fork. The child may not attach.
pub fn before_bare_fork() {
    if may_attach() && mark().is_ok() {
        allow_attaching();
        BARE.store(true, Ordering::Release);
    }
}

/// Waits until no thread is attaching, and keeps other threads from it while the result lives. Gives up after the longest time
/// that attaching takes.
pub fn lock_attaching() -> AttachLock {
    let Some(mark) = MARK.get() else {
        return AttachLock(None);
    };
    let attaching = mark.word(ATTACHING);
    for _ in 0..ATTACHING_POLLS {
        if attaching.swap(1, Ordering::Acquire) == 0 {
            return AttachLock(Some(attaching));
        }
        std::thread::sleep(ATTACHING_POLL);
    }
    AttachLock(None)
}

pub fn mark() -> io::Result<&'static ForkMark> {
    if MARK.get().is_none() {
        let mark = ForkMark::new().map_err(io::Error::from_raw_os_error)?;
        // If another thread has set a mark first, that one is used.
        let _ = MARK.set(mark);
    }
    MARK.get().ok_or(io::ErrorKind::Other.into())
}

fn attach_alone(
    mark: &'static ForkMark,
    instance: u64,
    token: u64,
) -> io::Result<&'static Session> {
    let index = COUNT.load(Ordering::Acquire);
    if mark.word(FIRST).load(Ordering::Acquire) == 0 {
        mark.word(FIRST).store(index as u64 + 1, Ordering::Release);
    }
    if let Some(session) = find(instance, token != 0) {
        return Ok(session);
    }
    let room = SESSIONS
        .get(index)
        .ok_or(io::Error::from(io::ErrorKind::StorageFull))?;
    let owner = find(instance, false).map_or(0, |session| session.owner);
    let session = receive(index, mark, instance, Request { token, owner })?;
    // No other thread sets it: this thread holds `ATTACHING`.
    let session = room.get_or_init(|| session);
    COUNT.store(index + 1, Ordering::Release);
    Ok(session)
}

/// Asks the daemon for its segments and maps them.
fn receive(
    index: usize,
    mark: &'static ForkMark,
    instance: u64,
    request: Request,
) -> io::Result<Session> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let connection = Connection::connect(&socket_name(instance), HANDSHAKE_TIMEOUT)?;
    connection.send(&request.encode(), &[])?;
    let write = request.token != 0;
    let mut fds = VecDeque::new();
    let next = || -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let (len, fds) = connection.receive(&mut bytes)?;
        let reply = Reply::decode(&bytes[..len]);
        let reply = reply.ok_or_else(|| bad("the daemon's answer is not of this version"))?;
        match i32::try_from(reply.error) {
            Ok(0) => Ok((reply, fds)),
            errno => Err(io::Error::from_raw_os_error(errno.unwrap_or(0))),
        }
    };
    let few = || bad("the daemon handed over too few segments");
    let (reply, first) = next()?;
    fds.extend(first);
    let mut head = || fds.pop_front().ok_or_else(few);
    let (control, slots, area) = (head()?, head()?, head()?);
    let control = Control::attach(control)?;
    let slots = Slots::attach(slots, control.slot_count(), write)?;
    let area = Area::attach(area)?;
    if control.slice_count() != reply.slices || control.instance() != instance {
        return Err(bad("the daemon's control segment is another's"));
    }
    let mut slices = Vec::with_capacity(usize::from(reply.slices));
    for slice in 0..reply.slices {
        let mut segments = Vec::with_capacity(3);
        while segments.len() < 3 {
            match fds.pop_front() {
                Some(fd) => segments.push(fd),
                // The fds of mapped segments are closed already, so that a process with few fds can attach.
                None => match next()?.1 {
                    more if more.is_empty() => return Err(few()),
                    more => fds.extend(more),
                },
            }
        }
        let segments = <[OwnedFd; 3]>::try_from(segments).map_err(|_| few())?;
        let frames = control.frames_of(slice);
        slices.push(SliceMemory::attach(frames, segments, write)?);
    }
    Ok(Session::new(index, mark, control, slots, area, slices))
}
