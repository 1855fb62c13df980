//! The sessions of this process. One thread at a time adds a session.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use jericho_shm::Request;
use jericho_sys::files::ForkMark;
use jericho_sys::signals;

use super::handshake::receive;
use super::segments::{FIRST, SESSIONS_MAX, Session};

/// Polls that wait for a thread that is attaching. Attaching usually takes a moment. The polls take as long as one timeout of
/// the handshake.
const ATTACHING_POLLS: u32 = 2000;
const ATTACHING_POLL: Duration = Duration::from_millis(1);

static SESSIONS: [OnceLock<Session>; SESSIONS_MAX] = [const { OnceLock::new() }; SESSIONS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);
static MARK: OnceLock<ForkMark> = OnceLock::new();
/// Word of the mark: a thread is attaching. The word is in the mark, so that a child never waits for a thread that it does not
/// have.
const ATTACHING: usize = 1;
/// Word of the mark: not zero if this process may attach although `BARE` is set.
const MAY_ATTACH: usize = 2;
/// This process or an ancestor has made a child by other means than the C library's fork. Locks of the C library that other
/// threads held then are never opened in that child. Those of malloc are among them, and attaching allocates memory.
static BARE: AtomicBool = AtomicBool::new(false);

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
    let serves = |session: &&Session| session.is_of_device(device);
    // A later mount may have the same device number, so this takes the latest session.
    all()
        .filter(serves)
        .last()
        .filter(|session| !session.area.is_revoked())
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

/// Allows this process to attach, after the C library's fork of a parent that was allowed to: that fork leaves no lock closed in
/// the child.
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

/// Waits until no thread is attaching, and keeps other threads from attaching while the result lives. Gives up after
/// `ATTACHING_POLLS` polls.
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

/// Returns the mark that tells this process from its children. Makes it at the first call.
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
