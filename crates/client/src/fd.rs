//! Reads and writes by fd, as a program makes them.
//!
//! Each function that returns an `Option` returns `None` when the caller must make the ordinary libc call: the fd is not on a
//! Jericho mount, or takes the kernel path, or the kernel keeps its offset. `Some` is the result of the call, made here: without
//! the kernel where that is possible, otherwise by the same system call at the right offset.
//!
//! An fd gets a description when its calls have cost enough (`early`). The library keeps its offset if this process opened it and
//! has not shared it with another process (`share`, `share_all`). Otherwise the kernel keeps the offset, and only calls with an
//! offset of their own go inline.

use std::io::{IoSlice, IoSliceMut, Write};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use jericho_format::PAGE_BYTES;
use jericho_shm::{Ahead, Call, ClientThread, Refusal};
use jericho_sys::{errno, files, signals};

use crate::ask::ask;
use crate::death;
use crate::description::{
    self, APPEND, Facts, FdState, Identity, NO_INLINE_WRITE, Open, READ, SYNC, TO_KERNEL, WRITE,
};
use crate::devices;
use crate::early::{self, Access, CallPath};
use crate::fast::{Failed, File, Kept, WRITE_MAX, Why};
use crate::hit::LOWEST_ADDRESS;
use crate::offset::{OFFSET_MAX, Position};
use crate::reentrancy::{self, Doing, Thread};
use crate::report;
pub use crate::report::Reason;
use crate::session::{self, Session};
use crate::source::Source;
use crate::wish::WrittenTo;

/// The result of a call, or its errno.
pub type Result<T> = std::result::Result<T, i32>;

/// Most bytes that the kernel moves in one call.
const BYTES_MAX: usize = 0x7fff_f000;
/// Most parts of a vectored call.
const PARTS_MAX: usize = 1024;
/// Most parts of a rest that is written alone. With more parts, the whole write is made again.
const REST_PARTS_MAX: usize = 64;
/// Largest window of read-ahead: 4 MiB.
const WINDOW_PAGES_MAX: u32 = 1024;
/// Pages reserved beyond the end for a writer that goes on: the number doubles from the first to the second.
const RESERVE_MIN: u32 = 16;
const RESERVE_MAX: u32 = 1024;
/// End of a description's last extending write, if there was none.
pub(crate) const NEVER: u64 = u64::MAX;
/// Reservations that an append makes before it goes through the kernel, if other writers use up the pages each time.
const APPEND_TRIES: u32 = 4;
/// Number of extending writes that ask for no pages after the daemon has refused a reservation.
const RESERVE_PAUSE: u32 = 64;
/// The same after other writers repeatedly took the pages.
const BUSY_PAUSE: u32 = 4;
/// Requests of a writer for pages that the daemon is reserving for another request at the same time.
const ASK_TRIES: u32 = 4;
/// Attempts to read without the offset's lock, which fail when another thread moves the offset.
const READ_TRIES: u32 = 3;
/// Attempts to look an fd up, which fail when its state changes meanwhile.
const LOOKUPS: u32 = 3;

/// Most pages that the daemon checks in one call: 1 GiB.
const WAY_PAGES: u32 = 1 << 18;
/// Polls, each followed by a pause, for which a signal handler waits until the daemon has taken away a latch of the handler's own
/// thread. After that the handler continues and the daemon waits for the latch. The page may have to be written back first.
const WAY_POLLS: u32 = 1000;
const WAY_POLL: Duration = Duration::from_millis(1);

/// This process has created a thread.
static THREADS: AtomicBool = AtomicBool::new(false);
/// The size of this process's files is limited (RLIMIT_FSIZE). Only the kernel knows the outcome of an extending write then.
static SIZE_LIMITED: AtomicBool = AtomicBool::new(false);

const SEEK_SET: i32 = 0;
const SEEK_CUR: i32 = 1;
const SEEK_END: i32 = 2;

// ---- the state of an fd ----

/// Returns the state of an fd, unless it takes the kernel path.
#[inline]
fn fast_state(fd: i32) -> Option<FdState> {
    description::state(fd).filter(|state| *state != FdState::Kernel)
}

/// Returns the description of an fd that may go inline. Looks an unknown fd up.
#[inline]
fn described(fd: i32, state: FdState) -> Option<Open> {
    match state {
        FdState::Described(open) => Some(open),
        FdState::Kernel => None,
        FdState::Unknown { opened, word } => described_unknown(fd, opened, word),
    }
}

#[cold]
fn described_unknown(fd: i32, opened: bool, word: u64) -> Option<Open> {
    let (mut opened, mut word) = (opened, word);
    for _ in 0..LOOKUPS {
        classify(fd, opened, word)?;
        match description::state(fd)? {
            FdState::Kernel => return None,
            FdState::Described(open) => return Some(open),
            FdState::Unknown { opened: o, word: w } => (opened, word) = (o, w),
        }
    }
    None
}

/// Looks an fd up, and gives it a description or puts it on the kernel path. Returns `None` when that is not possible now.
#[cold]
fn classify(fd: i32, opened: bool, word: u64) -> Option<()> {
    let kernel = |why: Option<Reason>| {
        why.into_iter().for_each(report::to_kernel);
        description::set_kernel(fd, word);
        Some(())
    };
    if opened && description::is_in_use(word) {
        return None;
    }
    let stat = files::identify(fd).ok()?;
    if !devices::is_ours(stat.device) {
        return kernel(None);
    }
    if !stat.is_regular {
        return kernel(Some(Reason::NotRegular));
    }
    let mode = files::mode(fd).ok()?;
    if mode.direct || mode.path {
        return kernel(Some(Reason::Direct));
    }
    let (session, slot) = match ask_for_slot(fd, stat.device, flags_of(&mode)) {
        Ok(granted) => granted,
        Err(why) => return kernel(Some(why)),
    };
    let identity = Identity::from(&stat);
    if describe(fd, opened, word, session, &slot, &mode, identity).is_none() {
        // If the fd has changed its meaning, this does nothing. Otherwise the table is full.
        kernel(Some(Reason::Table))?;
    }
    Some(())
}

/// Asks the daemon of a mount for a slot for an open file, and attaches to that daemon. `flags`: the file's, as in its
/// description. Fails with the reason why the file takes the kernel path.
fn ask_for_slot(
    fd: i32,
    device: u64,
    flags: u32,
) -> std::result::Result<(&'static Session, Slot), Reason> {
    let write = flags & (WRITE | SYNC) == WRITE;
    let thread = client_thread(session::of_device(device));
    let answer = ask(fd, Call::Fast { write, thread }).ok();
    let answer = answer.filter(|answer| answer.status == 0);
    let answer = answer.ok_or(Reason::Refused)?;
    // The first write asks for write access to the segments.
    let session = session::attach(answer.instance).map_err(|_| Reason::Attach)?;
    session.serves(device);
    let slot = Slot {
        slot: answer.slot,
        generation: answer.generation,
        object: answer.object,
    };
    Ok((session, slot))
}

/// A slot that the daemon has granted for a file.
pub(crate) struct Slot {
    pub slot: u32,
    pub generation: u32,
    pub object: u64,
}

/// Gives an unknown fd a description, if its word is still `word`: no call that moves the kernel's offset has begun since that
/// word was loaded. Returns `None` otherwise, and when no description is free.
pub(crate) fn describe(
    fd: i32,
    opened: bool,
    word: u64,
    session: &Session,
    slot: &Slot,
    mode: &files::Mode,
    identity: Identity,
) -> Option<Open> {
    // Another process may have changed the limit.
    size_limit_changed();
    let facts = Facts {
        session: session.index,
        slot: slot.slot,
        slot_generation: slot.generation,
        object: slot.object,
        flags: flags_of(mode),
    };
    let offset = match opened.then(|| files::lseek(fd, 0, SEEK_CUR)) {
        Some(Ok(offset)) => u64::try_from(offset).ok(),
        _ => None,
    };
    let open = description::describe(fd, word, &facts, identity, offset)?;
    report::descriptor();
    Some(open)
}

/// Returns where the daemon finds the wishes of the calling thread, which is in an inline call.
fn client_thread(session: Option<&Session>) -> Option<ClientThread> {
    let session = session?;
    let block = reentrancy::thread(|thread| session.own_block(thread))?;
    Some(ClientThread {
        owner: session.owner,
        block,
        instance: session.instance,
    })
}

/// Notes the end of the write that came with a description's wish, and the page up to which the daemon has reserved pages (0:
/// none), for the next write.
pub(crate) fn described_with_write(open: &Open, written: WrittenTo, reserved_to: u64) {
    let end = match written {
        WrittenTo::Nothing => return,
        WrittenTo::Offset(end) => end,
        WrittenTo::Here => match open.description().offset.get(open.tag()) {
            Position::At(at) => at,
            _ => return,
        },
    };
    open.description().extended_to.store(end, Relaxed);
    let Some(facts) = open.facts() else { return };
    let session = session::get(facts.session).filter(|session| session.is_writable());
    let Some(Ok(file)) = session.map(|session| file(session, &facts)) else {
        return;
    };
    let (ahead, pages) = (file.ahead(), reserved_to.saturating_sub(end / PAGE_BYTES));
    // The file's other writers may have more pages reserved.
    if pages > 0 && ahead.to() < reserved_to {
        let pages = u32::try_from(pages).unwrap_or(RESERVE_MAX);
        ahead.tell(reserved_to, pages.min(RESERVE_MAX));
    }
}

fn flags_of(mode: &files::Mode) -> u32 {
    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
    flag(mode.read, READ)
        | flag(mode.write, WRITE)
        | flag(mode.append, APPEND)
        | flag(mode.sync, SYNC)
}

/// Returns the facts of a description; `None` when it takes the kernel path or is gone.
#[inline]
fn facts(open: &Open) -> Option<Facts> {
    open.facts().filter(|facts| facts.flags & TO_KERNEL == 0)
}

/// The way to access a file, after the lookup of its slot.
enum Route {
    /// Inline.
    Inline(&'static Session, File<'static>),
    /// Through the kernel for this call.
    Kernel(Why),
    /// By the ordinary call: the fd refers to another file, or takes the kernel path for good.
    Ordinary,
}

fn route(open: &Open, facts: &Facts) -> Route {
    match session::get(facts.session) {
        Some(session) => match file(session, facts) {
            Ok(file) => Route::Inline(session, file),
            Err(why) => route_again(open, facts, why),
        },
        None => route_again(open, facts, Why::Stale),
    }
}

#[inline]
fn file(session: &'static Session, facts: &Facts) -> std::result::Result<File<'static>, Why> {
    File::of(session, facts.slot, facts.slot_generation, facts.object)
}

/// Asks for a new slot: the slot no longer is the file's, or this is a child and the session its parent's.
#[cold]
fn route_again(open: &Open, facts: &Facts, why: Why) -> Route {
    if let Some(session) = session::get(facts.session) {
        if session.area.is_cut_off() {
            give_up(open, Reason::CutOff);
            return Route::Ordinary;
        }
        if why != Why::Stale {
            return Route::Kernel(why);
        }
    }
    // The fd may refer to another file now.
    let now = files::fstat(open.fd).map(|stat| Identity::from(&stat));
    let Some(now) = now.ok().filter(|now| open.identity() == Some(*now)) else {
        description::disown(open);
        return Route::Ordinary;
    };
    let granted = match ask_for_slot(open.fd, now.device, facts.flags) {
        Ok((_, slot)) if slot.object != facts.object => Err(Reason::Refused),
        granted => granted,
    };
    let (session, slot) = match granted {
        Ok(granted) => granted,
        Err(why) => {
            give_up(open, why);
            return Route::Ordinary;
        }
    };
    let facts = Facts {
        session: session.index,
        slot: slot.slot,
        slot_generation: slot.generation,
        ..*facts
    };
    open.set_slot(&facts);
    match file(session, &facts) {
        Ok(file) => Route::Inline(session, file),
        Err(why) => Route::Kernel(why),
    }
}

/// Puts the description on the kernel path for good.
fn give_up(open: &Open, why: Reason) {
    if !is_given_up(open) {
        open.add_flags(TO_KERNEL);
        report::to_kernel(why);
    }
    move_offset_to_kernel(open);
}

#[inline]
fn is_given_up(open: &Open) -> bool {
    open.flags().is_some_and(|flags| flags & TO_KERNEL != 0)
}

/// Moves the description's offset to the kernel, if it is here. If this thread has it locked, `with_offset` moves it afterwards.
fn move_offset_to_kernel(open: &Open) {
    let offset = &open.description().offset;
    if offset.is_in_kernel(open.tag())
        || reentrancy::thread(|thread| thread.has_offset(open.index, offset))
    {
        return;
    }
    // Blocks signals: a handler of this thread would wait for the offset.
    signals::blocked(|| {
        if let Position::At(at) = offset.lock(open.tag()) {
            // Fails only if the fd was closed meanwhile.
            let _ = files::lseek(open.fd, at as i64, SEEK_SET);
            offset.unlock(open.tag(), None);
        }
    });
}

/// Returns the errno to report for a call on `fd` that the kernel failed with `errno`. The result is ENOTCONN when the mount's
/// daemon has died, also for calls that were in progress at that moment. After such a death, no inline call uses that daemon's
/// memory.
#[cold]
pub fn errno_after(fd: i32, errno: i32) -> i32 {
    if !death::may_be(errno) {
        return errno;
    }
    let open = match description::state(fd) {
        Some(FdState::Described(open)) => Some(open),
        _ => None,
    };
    // An empty request, which a living daemon answers.
    let nothing = Call::ReadAhead { first: 0, pages: 0 };
    let asked = match &open {
        Some(_) => ask(fd, nothing).map(|_| ()),
        // This fd may not belong to a Jericho mount, so it gets no Jericho ioctl.
        None => files::ask_filesystem(fd),
    };
    if !death::is_sure(asked) {
        return errno;
    }
    // The keeper does the same, unless it was killed, too.
    let session = open.and_then(|open| session::get(open.facts()?.session));
    if let Some(session) = session {
        session.area.cut_off();
    }
    errno::ENOTCONN
}

/// Returns the result of a kernel call as the program sees it.
fn from_kernel<T>(open: &Open, result: Result<T>) -> Result<T> {
    result.map_err(|errno| errno_after(open.fd, errno))
}

// ---- reading ----

#[inline]
fn is_fit(buffer: &[u8]) -> bool {
    buffer.as_ptr().addr() >= LOWEST_ADDRESS && !buffer.is_empty() && buffer.len() <= BYTES_MAX
}

/// Reads at an offset: inline as far as pages hit, and the rest through the kernel.
fn read_at(
    thread: &Thread,
    open: &Open,
    facts: &Facts,
    out: &mut [u8],
    at: u64,
) -> Option<Result<usize>> {
    if facts.flags & READ == 0 || !is_fit(out) {
        return read_by_kernel(open, out, at, 0);
    }
    let (done, why) = match route(open, facts) {
        Route::Ordinary => return None,
        Route::Kernel(why) => (0, why),
        Route::Inline(session, file) => {
            let read = file.read(at, out);
            let calls = u64::from(read.rest.is_none());
            file.account(thread, false, at..at + read.done as u64, calls);
            read_ahead(open, session, &file, at, out.len(), &read);
            match read.rest {
                None => return Some(Ok(read.done)),
                Some(why) => {
                    report::kernel(false, why);
                    let result = read_by_kernel(open, out, at, read.done);
                    if read.done == 0 || file.is_of_one_instant(&read) {
                        return result;
                    }
                    // A write over several pages interfered between the two parts.
                    return read_by_kernel(open, out, at, 0);
                }
            }
        }
    };
    report::kernel(false, why);
    read_by_kernel(open, out, at, done)
}

/// Reads the rest through the kernel after `done` bytes.
#[cold]
fn read_by_kernel(open: &Open, out: &mut [u8], at: u64, done: usize) -> Option<Result<usize>> {
    Some(
        match files::pread(open.fd, &mut out[done..], (at + done as u64) as i64) {
            Ok(n) => Ok(done + n),
            Err(_) if done > 0 => Ok(done),
            Err(errno) => Err(errno_after(open.fd, errno)),
        },
    )
}

/// Asks for the pages that a sequential reader will read next.
fn read_ahead(
    open: &Open,
    session: &Session,
    file: &File<'_>,
    at: u64,
    len: usize,
    read: &crate::fast::Read,
) {
    if at >= read.size {
        return;
    }
    let reader = &open.description().read_ahead;
    let first = at / PAGE_BYTES;
    let end = (at + len as u64).min(read.size).div_ceil(PAGE_BYTES);
    if read.rest.is_none() && reader.is_quiet(first, end) {
        return;
    }
    let window = WINDOW_PAGES_MAX.min(session.control.frames_of(file.home()) / 16);
    let pages = reader.advance(first, end, read.size.div_ceil(PAGE_BYTES), window);
    let Some(pages) = pages else { return };
    // A cached file needs no request. This checks the first, the middle and the last page.
    let middle = (pages.start + pages.end) / 2;
    if [pages.start, middle, pages.end - 1]
        .into_iter()
        .all(|page| file.has_page(page))
    {
        return;
    }
    let call = Call::ReadAhead {
        first: pages.start,
        pages: (pages.end - pages.start) as u32,
    };
    // If the request fails, the reader only waits longer.
    let _ = ask(open.fd, call);
}

/// Reads into parts of `len` bytes in all at an offset, as if into one: all inline, or all through the kernel.
fn read_parts_at(
    thread: &Thread,
    open: &Open,
    facts: &Facts,
    parts: &mut [IoSliceMut<'_>],
    len: usize,
    at: u64,
) -> Option<Result<usize>> {
    let fits = |part: &IoSliceMut<'_>| part.is_empty() || is_fit(part);
    if facts.flags & READ != 0 && parts.iter().all(fits) {
        let why = match route(open, facts) {
            Route::Ordinary => return None,
            Route::Kernel(why) => why,
            Route::Inline(session, file) => {
                let read = file.read_parts(at, len, parts);
                file.account(
                    thread,
                    false,
                    at..at + read.done as u64,
                    u64::from(read.rest.is_none()),
                );
                read_ahead(open, session, &file, at, len, &read);
                match read.rest {
                    None => return Some(Ok(read.done)),
                    Some(why) => why,
                }
            }
        };
        report::kernel(false, why);
    }
    let result = files::preadv(open.fd, parts, at as i64);
    Some(from_kernel(open, result))
}

/// Reads at the description's offset with `read`, and advances it.
#[inline]
fn read_here(
    fd: i32,
    len: usize,
    mut read: impl FnMut(&Thread, &Open, &Facts, u64) -> Option<Result<usize>>,
) -> Option<Result<usize>> {
    let Some(state) = fast_state(fd) else {
        return by_kernel(fd, None, len, false);
    };
    let result = reentrancy::enter(Doing::Reading, |thread| {
        let open = described(fd, state)?;
        let (offset, tag) = (&open.description().offset, open.tag());
        if offset.is_in_kernel(tag) {
            return None;
        }
        let facts = facts(&open)?;
        for _ in 0..READ_TRIES {
            let Position::At(at) = offset.get(tag) else {
                return None;
            };
            match read(thread, &open, &facts, at)? {
                Ok(0) => return Some(Ok(0)),
                Ok(n) if offset.advance(tag, at, at + n as u64) => return Some(Ok(n)),
                // Another thread advanced the offset, so these bytes are its. Reads again.
                Ok(_) => {}
                Err(errno) => return Some(Err(errno)),
            }
        }
        with_offset(
            thread,
            &open,
            0,
            |at| read(thread, &open, &facts, at),
            |n, at, written| at + n.and_then(|n| n.ok()).unwrap_or(0) as u64 + written,
        )?
    });
    match result {
        Some(result) => result,
        None => interrupted(fd, len, false, read),
    }
}

/// Calls `act` with the description's offset locked, for example to write `len` bytes there. `end` returns the new offset from
/// the result, the offset of the access, and the bytes that signal handlers have written behind it. It is called again if a
/// handler comes meanwhile. Returns `None` when the kernel has the offset.
#[inline]
pub(crate) fn with_offset<T>(
    thread: &Thread,
    open: &Open,
    len: usize,
    act: impl FnOnce(u64) -> T,
    mut end: impl FnMut(&mut T, u64, u64) -> u64,
) -> Option<T> {
    let (offset, tag) = (&open.description().offset, open.tag());
    thread.locking(open.index);
    let Position::At(at) = offset.lock_as(tag, |word| thread.about_to_lock(word)) else {
        thread.unlocked();
        return None;
    };
    let at = thread.has_locked(at, len as u64);
    let mut result = act(at);
    loop {
        let (locked, written) = thread.unlocking();
        let end = end(&mut result, at, written);
        if end > OFFSET_MAX {
            let _ = files::lseek(open.fd, end as i64, SEEK_SET);
        }
        // Otherwise a handler came in between, or the offset was taken away.
        if offset.release(tag, locked, end) || thread.unlocking().0 == locked {
            break;
        }
    }
    thread.unlocked();
    if is_given_up(open) {
        move_offset_to_kernel(open);
    }
    Some(result)
}

/// Makes way for the ordinary call, and returns `None` for it.
#[inline]
fn by_kernel<T>(fd: i32, at: Option<u64>, len: usize, write: bool) -> Option<T> {
    if reentrancy::is_writing() {
        make_way(fd, at, len, write);
    }
    None
}

/// Makes way for a signal handler that has interrupted an inline write of its own thread. The handler is about to access `len`
/// bytes at `at` (`None`: at the kernel's offset) through the kernel, and the daemon would wait for the latch that the write may
/// hold. So this asks the daemon to take that latch away. After the handler has returned, the interrupted write finds its latch
/// lost and repeats itself.
#[cold]
fn make_way(fd: i32, at: Option<u64>, len: usize, write: bool) {
    let Ok(stat) = files::fstat(fd) else { return };
    if !stat.is_regular || !devices::is_ours(stat.device) {
        return;
    }
    let append = write && files::mode(fd).is_ok_and(|mode| mode.append);
    let here = || files::lseek(fd, 0, SEEK_CUR).ok()?.try_into().ok();
    // The kernel's size may be older than the latest inline appends.
    let file = described_file(fd);
    let size = file.as_ref().and_then(|file| file.size().ok());
    let (at, len) = match (append, size) {
        (false, _) => (at.or_else(here).unwrap_or(0), len),
        (true, Some(end)) => (end, len),
        // Only the daemon knows the end, so this names every page from the kernel's size on.
        (true, None) => (stat.size, usize::MAX),
    };
    let first = at / PAGE_BYTES;
    let end = at.saturating_add(len as u64).div_ceil(PAGE_BYTES);
    if file.is_some_and(|file| is_clear(&file, at, len, write)) {
        return;
    }
    ask_for_way(fd, first, u32::try_from(end - first).unwrap_or(u32::MAX));
}

/// Makes way before a kernel call on all pages of a file, such as fsync, ftruncate or fallocate. Otherwise a signal handler would
/// wait for the inline write that it has interrupted. See `make_way`.
#[inline]
pub fn make_way_everywhere(fd: i32) {
    if reentrancy::is_writing() {
        ask_for_way_everywhere(fd);
    }
}

/// Does the same for all files that this process uses inline, before a call that names none of its fds, such as sync or truncate.
#[inline]
pub fn make_way_in_all_files() {
    if reentrancy::is_writing() {
        ask_for_way_in_all_files();
    }
}

#[cold]
fn ask_for_way_in_all_files() {
    let is_inline = |fd: &i32| matches!(description::state(*fd), Some(FdState::Described(_)));
    description::fds()
        .filter(is_inline)
        .for_each(ask_for_way_everywhere);
}

#[cold]
fn ask_for_way_everywhere(fd: i32) {
    let Ok(stat) = files::fstat(fd) else { return };
    if !stat.is_regular || !devices::is_ours(stat.device) {
        return;
    }
    // The kernel's size may be older than the latest inline writes.
    let known = described_file(fd).and_then(|file| file.size().ok());
    let end = known.unwrap_or(0).max(stat.size) / PAGE_BYTES;
    let mut first = 0;
    // The last range also covers bytes beyond the end of the file.
    while first <= end {
        ask_for_way(fd, first, WAY_PAGES);
        first += u64::from(WAY_PAGES);
    }
}

/// Asks the daemon to take away this process's latches on some pages of a file, and its locks of the file.
fn ask_for_way(fd: i32, first: u64, pages: u32) {
    for session in session::all().filter(|session| session.is_own() && session.is_writable()) {
        let call = Call::Interrupted {
            first,
            pages,
            owner: session.owner,
            instance: session.instance,
        };
        for _ in 0..WAY_POLLS {
            match ask(fd, call) {
                Ok(answer) if answer.status == 0 && answer.pages > 0 => {
                    std::thread::sleep(WAY_POLL);
                }
                _ => break,
            }
        }
    }
}

/// Returns the file of an fd that is used inline.
fn described_file(fd: i32) -> Option<File<'static>> {
    let Some(FdState::Described(open)) = description::state(fd) else {
        return None;
    };
    let facts = open.facts()?;
    file(session::get(facts.session)?, &facts).ok()
}

/// Returns whether this process holds no latch and no lock for which the access would wait, as far as the library can tell.
fn is_clear(file: &File<'_>, at: u64, len: usize, write: bool) -> bool {
    let pages = at / PAGE_BYTES..at.saturating_add(len as u64).div_ceil(PAGE_BYTES);
    let Ok(size) = file.size() else {
        return false;
    };
    let beyond = size.div_ceil(PAGE_BYTES);
    if file.is_locked_here(at, len, write && at.saturating_add(len as u64) > size) {
        return false;
    }
    // Before a write that may go beyond the end, the daemon zeroes the bytes that an interrupted write left there.
    let left = match write && pages.end >= beyond {
        true => beyond.saturating_sub(1)..beyond + WRITE_MAX as u64 / PAGE_BYTES,
        false => 0..0,
    };
    let pages = pages.start..pages.end.min(beyond + 1);
    pages.end.saturating_sub(pages.start) <= u64::from(WINDOW_PAGES_MAX)
        && !pages.chain(left).any(|page| file.is_latched_here(page))
}

/// Reports frames into which writers of this process copied after they had lost a page's latch. The daemon may reuse them.
#[inline]
fn give_back_copied(open: &Open, session: &Session) {
    for (slice, memory) in session.slices.iter().enumerate() {
        while let Some(frame) = memory.take_copied() {
            let call = Call::Copied {
                slice: slice as u16,
                frame,
                owner: session.owner,
                instance: session.instance,
            };
            // If the call fails, the frame stays out of use until this process ends.
            let _ = ask(open.fd, call);
        }
    }
}

/// Makes a call of a signal handler that has interrupted an inline call of its thread. Waits for nothing that the thread may
/// hold.
#[cold]
fn interrupted(
    fd: i32,
    len: usize,
    write: bool,
    mut io: impl FnMut(&Thread, &Open, &Facts, u64) -> Option<Result<usize>>,
) -> Option<Result<usize>> {
    let Some(FdState::Described(open)) = description::state(fd) else {
        return by_kernel(fd, None, len, write);
    };
    let (offset, tag) = (&open.description().offset, open.tag());
    // Without flags, all I/O goes through the kernel, at the given offset.
    let facts = Facts {
        flags: 0,
        ..open.facts()?
    };
    let mut io_at = |at| {
        let _: Option<()> = by_kernel(fd, Some(at), len, write);
        reentrancy::thread(|thread| io(thread, &open, &facts, at))
    };
    // Blocks signals: another handler could come between this one's write and its note of it, or wait for the offset.
    let result = signals::blocked(|| {
        reentrancy::thread(|thread| {
            if thread.has_offset(open.index, offset) {
                let at = thread.behind(offset);
                let result = io_at(at)?;
                thread.displace(offset, tag, at, result.unwrap_or(0) as u64);
                return Some(Some(result));
            }
            let Position::At(at) = offset.lock(tag) else {
                return None;
            };
            let result = io_at(at);
            let n = result.and_then(|result| result.ok()).unwrap_or(0);
            offset.unlock(tag, Some(at + n as u64));
            Some(result)
        })
    });
    match result {
        Some(result) => result,
        None => by_kernel(fd, None, len, write),
    }
}

/// Makes a read(2).
#[inline]
pub fn read(fd: i32, out: &mut [u8]) -> Option<Result<usize>> {
    let (len, mut tries) = (out.len(), 0);
    loop {
        match early::begin(fd, Access::Read, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, len, false),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, len, false);
                return Some(call.has_read(files::read(fd, out)));
            }
        }
        let result = read_here(fd, len, |thread, open, facts, at| {
            read_at(thread, open, facts, out, at)
        });
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Makes a pread(2).
#[inline]
pub fn pread(fd: i32, out: &mut [u8], offset: i64) -> Option<Result<usize>> {
    let at = u64::try_from(offset).ok()?;
    let len = out.len();
    let mut inline = || {
        let state = fast_state(fd)?;
        if !is_fit(out) {
            return None;
        }
        if let Some(call) = ordinary(fd, Access::Read)? {
            let _: Option<()> = by_kernel(fd, Some(at), len, false);
            return Some(call.has_read(files::pread(fd, out, offset)));
        }
        reentrancy::enter(Doing::Reading, |thread| {
            let open = described(fd, state)?;
            read_at(thread, &open, &facts(&open)?, out, at)
        })?
    };
    inline().or_else(|| by_kernel(fd, Some(at), len, false))
}

/// Makes a readv(2), or with `at` a preadv(2).
pub fn readv(fd: i32, parts: &mut [IoSliceMut<'_>], at: Option<i64>) -> Option<Result<usize>> {
    let len = total(parts.iter().map(|part| part.len())).unwrap_or(0);
    let fits = parts.len() <= PARTS_MAX && len > 0;
    match at {
        Some(offset) => {
            let at = u64::try_from(offset).ok()?;
            let mut inline = || {
                let state = fast_state(fd).filter(|_| fits)?;
                if let Some(call) = ordinary(fd, Access::Read)? {
                    let _: Option<()> = by_kernel(fd, Some(at), len, false);
                    return Some(call.has_read(files::preadv(fd, parts, offset)));
                }
                reentrancy::enter(Doing::Reading, |thread| {
                    let open = described(fd, state)?;
                    read_parts_at(thread, &open, &facts(&open)?, parts, len, at)
                })?
            };
            inline().or_else(|| by_kernel(fd, Some(at), len, false))
        }
        None => readv_here(fd, parts, len, fits),
    }
}

fn readv_here(
    fd: i32,
    parts: &mut [IoSliceMut<'_>],
    len: usize,
    fits: bool,
) -> Option<Result<usize>> {
    let mut tries = 0;
    loop {
        match early::begin(fd, Access::Read, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, len, false),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, len, false);
                return Some(call.has_read(files::readv(fd, parts)));
            }
        }
        let result = read_here(fd, len, |thread, open, facts, at| match fits {
            true => read_parts_at(thread, open, facts, parts, len, at),
            // The kernel reports the error of the buffers; it moves no bytes.
            false => Some(from_kernel(open, files::preadv(open.fd, parts, at as i64))),
        });
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Decides how to make a call with an offset of its own. `None`: the caller makes the ordinary call, which is counted.
/// `Some(Some)`: the library makes the ordinary call. `Some(None)`: the call may go inline.
#[inline]
fn ordinary(fd: i32, access: Access) -> Option<Option<early::Counted>> {
    match early::begin(fd, access, false) {
        CallPath::Inline => Some(None),
        CallPath::Counted(call) => Some(Some(call)),
        CallPath::Ordinary => None,
    }
}

/// Returns the bytes of a vectored call; `None` when the kernel would not move them all.
fn total(lens: impl Iterator<Item = usize>) -> Option<usize> {
    let mut total = 0usize;
    for len in lens {
        total = total.checked_add(len).filter(|n| *n <= BYTES_MAX)?;
    }
    Some(total)
}

// ---- writing ----

/// The bytes of a write.
#[derive(Clone, Copy)]
struct Data<'a, 'b> {
    parts: &'a [IoSlice<'b>],
    len: usize,
    /// Whether the library may read the bytes. Otherwise the kernel reports the error.
    is_fit: bool,
}

impl<'a, 'b> Data<'a, 'b> {
    fn new(parts: &'a [IoSlice<'b>]) -> Data<'a, 'b> {
        let len = total(parts.iter().map(|part| part.len()));
        let fits = |part: &IoSlice<'_>| part.is_empty() || is_fit(part);
        Data {
            parts,
            len: len.unwrap_or(0),
            is_fit: parts.len() <= PARTS_MAX
                && len.is_some_and(|len| len > 0)
                && parts.iter().all(fits),
        }
    }
}

/// The result of a write, and the offset after it.
struct Written {
    result: Result<usize>,
    end: u64,
}

/// Returns the file through a writable session. Attaches one at the first write.
#[inline]
fn writable(
    open: &Open,
    facts: &Facts,
    session: &'static Session,
    file_seen: File<'static>,
) -> std::result::Result<File<'static>, Why> {
    if session.is_writable() {
        return Ok(file_seen.for_writing());
    }
    attach_writable(open, facts, session)
}

#[cold]
fn attach_writable(
    open: &Open,
    facts: &Facts,
    session: &Session,
) -> std::result::Result<File<'static>, Why> {
    let token = || {
        let answer = ask(open.fd, Call::Token).ok();
        answer.filter(|a| a.status == 0).map(|a| a.token)
    };
    let Ok(session) = session::attach_writable(session.instance, token) else {
        open.add_flags(NO_INLINE_WRITE);
        return Err(Why::Withheld);
    };
    // Changes only the session: another thread may have stored a new slot since `facts`.
    let facts = Facts {
        session: session.index,
        ..open.facts().unwrap_or(*facts)
    };
    open.set_slot(&facts);
    file(session, &facts).map(File::for_writing)
}

/// Writes at an offset, or at the end if the description appends. Returns `None` when the caller must make the ordinary call.
fn write_at(
    thread: &Thread,
    open: &Open,
    facts: &Facts,
    data: Data<'_, '_>,
    at: u64,
) -> Option<Written> {
    let inline = facts.flags & (WRITE | SYNC | NO_INLINE_WRITE) == WRITE && data.is_fit;
    let mut kept = None;
    if inline {
        let why = match route(open, facts) {
            Route::Ordinary => return None,
            Route::Kernel(why) => why,
            Route::Inline(session, file) => {
                give_back_copied(open, session);
                let written = writable(open, facts, session, file)
                    .map_err(Failed::from)
                    .and_then(|file| write_inline(thread, open, facts, &file, data, at));
                match written {
                    Ok(written) => return Some(written),
                    Err(failed) => {
                        kept = failed.kept;
                        failed.why
                    }
                }
            }
        };
        report::kernel(true, why);
    }
    Some(write_by_kernel(open, facts, data, at, inline, kept))
}

fn write_inline<'a>(
    thread: &Thread,
    open: &Open,
    facts: &Facts,
    file: &File<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<Written, Failed<'a>> {
    let end = if facts.flags & APPEND != 0 {
        append_inline(open, file, data)?
    } else if data.len <= WRITE_MAX {
        write_piece(open, file, data, at)?
    } else {
        return write_pieces(thread, open, facts, file, data, at);
    };
    file.account(thread, true, end - data.len as u64..end, 1);
    Ok(Written {
        result: Ok(data.len),
        end,
    })
}

/// Makes several inline writes of one that would hold the locks for too long, as the kernel does.
#[cold]
fn write_pieces<'a>(
    thread: &Thread,
    open: &Open,
    facts: &Facts,
    file: &File<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<Written, Failed<'a>> {
    let [part] = data.parts else {
        return Err(Why::Far.into());
    };
    let (mut end, mut rest) = (at, None);
    for piece in part.chunks(WRITE_MAX) {
        let parts = [IoSlice::new(piece)];
        match write_piece(open, file, Data::new(&parts), end) {
            Ok(to) => end = to,
            Err(failed) if end == at => return Err(failed),
            Err(failed) => {
                rest = Some(failed);
                break;
            }
        }
    }
    let mut done = (end - at) as usize;
    file.account(thread, true, at..end, u64::from(rest.is_none()));
    if let Some(Failed { why, kept }) = rest {
        report::kernel(true, why);
        let rest = [IoSlice::new(&part[done..])];
        let rest = write_by_kernel(open, facts, Data::new(&rest), end, true, kept);
        // The first part counts, even if the rest failed.
        done += rest.result.unwrap_or(0);
    }
    Ok(Written {
        result: Ok(done),
        end: at + done as u64,
    })
}

/// Writes at most `WRITE_MAX` bytes. Returns the end of the write.
fn write_piece<'a>(
    open: &Open,
    file: &File<'a>,
    data: Data<'_, '_>,
    at: u64,
) -> std::result::Result<u64, Failed<'a>> {
    let end = at.checked_add(data.len as u64).ok_or(Why::Far)?;
    if end <= file.size()? {
        file.write(at, data.len, Source::new(data.parts))?;
        return Ok(end);
    }
    write_beyond(open, file, data, at, end)
}

/// Makes a write that seems to extend the file.
#[inline(never)]
fn write_beyond<'a>(
    open: &Open,
    file: &File<'a>,
    data: Data<'_, '_>,
    at: u64,
    end: u64,
) -> std::result::Result<u64, Failed<'a>> {
    if SIZE_LIMITED.load(Relaxed) {
        return Err(Why::Withheld.into());
    }
    let write = || file.write(at, data.len, Source::new(data.parts));
    let mut result = write();
    let d = open.description();
    // A write that stopped half-way is not repeated here.
    let misses = |failed: &Failed<'_>| failed.kept.is_none() && is_missing(failed.why);
    if result.as_ref().is_err_and(misses)
        && d.extended_to.load(Relaxed) == at
        && reserve(open, file, data.len, || Ok(at))?
    {
        result = write();
    }
    if result.is_ok() {
        extended(open, file, end);
    }
    result.map(|()| end)
}

#[inline(never)]
fn append_inline(
    open: &Open,
    file: &File<'_>,
    data: Data<'_, '_>,
) -> std::result::Result<u64, Why> {
    if SIZE_LIMITED.load(Relaxed) {
        return Err(Why::Withheld);
    }
    if data.len > WRITE_MAX {
        return Err(Why::Far);
    }
    let append = || file.append(data.len, Source::new(data.parts));
    let mut result = append();
    for _ in 0..APPEND_TRIES {
        if !result.is_err_and(is_missing) || !reserve_for_append(open, file, data.len)? {
            break;
        }
        result = append();
    }
    if let Ok(end) = result {
        extended(open, file, end);
    }
    result
}

/// Returns whether a write lacks a cached page with space reserved.
#[inline]
fn is_missing(why: Why) -> bool {
    matches!(why, Why::Absent | Why::Unbacked)
}

/// Has pages reserved after an append that found no page at the end. The first append of a file reserves none, because it may be
/// the only one. Returns true if the append is worth another try.
#[cold]
fn reserve_for_append(open: &Open, file: &File<'_>, len: usize) -> std::result::Result<bool, Why> {
    let extends = open.description().extended_to.load(Relaxed) != NEVER;
    if !extends && file.ahead().to() == 0 {
        return Ok(false);
    }
    // Other writers may have moved the end meanwhile.
    reserve(open, file, len, || file.size())
}

fn extended(open: &Open, file: &File<'_>, end: u64) {
    let d = open.description();
    d.extended_to.store(end, Relaxed);
    let ahead = file.ahead();
    let (to, pages) = (ahead.to(), ahead.pages());
    // Half of the pages are used, so more are requested in time.
    if end / PAGE_BYTES + u64::from(pages / 2) >= to && to > 0 {
        reserve_soon(open, ahead, end, to, pages);
    }
}

/// Does the same as `extended` after a write through the kernel.
fn extended_by_kernel(open: &Open, end: u64) {
    open.description().extended_to.store(end, Relaxed);
    // The session may have been replaced by a writable one since the write began.
    let Some(facts) = open.facts() else { return };
    let session = session::get(facts.session).filter(|session| session.is_writable());
    if let Some(file) = session.and_then(|session| file(session, &facts).ok()) {
        extended(open, &file, end);
    }
}

/// Has more pages reserved behind the present ones before they are needed.
#[cold]
fn reserve_soon(open: &Open, ahead: &Ahead, end: u64, first: u64, pages: u32) {
    // The end has moved past the reserved pages by other means, so their state is unknown.
    if first < end.div_ceil(PAGE_BYTES) {
        ahead.claim(first, 0);
        return;
    }
    let pages = pages.saturating_mul(2).clamp(RESERVE_MIN, RESERVE_MAX);
    let claimed = first.saturating_add(u64::from(pages));
    if !ahead.claim(first, claimed) {
        return;
    }
    let call = Call::Reserve {
        first,
        pages,
        soon: true,
    };
    match ask(open.fd, call) {
        Ok(answer) if answer.status == 0 && answer.pages >= pages => ahead.tell_pages(pages),
        Ok(answer) if answer.status == 0 && answer.pages > 0 => {
            ahead.tell_pages(answer.pages);
            ahead.claim(claimed, first + u64::from(answer.pages));
        }
        // The next write that lacks a page asks again.
        _ => {
            ahead.claim(claimed, 0);
        }
    }
}

/// Has pages reserved after a write beyond the end found none there. Of several writers that need pages, one asks at a time.
/// Returns true if the write is worth another try.
#[cold]
fn reserve(
    open: &Open,
    file: &File<'_>,
    len: usize,
    at: impl Fn() -> std::result::Result<u64, Why>,
) -> std::result::Result<bool, Why> {
    let d = open.description();
    let _asking = file.begin_asking();
    let begin = at()?;
    // Another writer has had them reserved meanwhile.
    if file.is_writable(begin, len) {
        return Ok(true);
    }
    let pause = d.reserve_pause.load(Relaxed);
    if pause > 0 {
        d.reserve_pause.store(pause - 1, Relaxed);
        return Ok(false);
    }
    let first = begin / PAGE_BYTES;
    let needed = (begin + len as u64).div_ceil(PAGE_BYTES) - first;
    if needed > u64::from(RESERVE_MAX) {
        return Ok(false);
    }
    let ahead = file.ahead();
    let pages = (ahead.pages().saturating_mul(2))
        .clamp(RESERVE_MIN, RESERVE_MAX)
        .max(needed as u32);
    let call = Call::Reserve {
        first,
        pages,
        soon: false,
    };
    for _ in 0..ASK_TRIES {
        let answer = ask(open.fd, call);
        if let Ok(answer) = answer
            && answer.status == 0
            && u64::from(answer.pages) >= needed
        {
            ahead.tell(first + u64::from(answer.pages), pages);
            return Ok(true);
        }
        // Another writer has had the pages reserved, or the end has moved.
        if file.is_writable(begin, len) || at()? != begin {
            return Ok(true);
        }
        if !answer.is_ok_and(|answer| answer.status == Refusal::Busy as u32) {
            ahead.forget();
            d.reserve_pause.store(RESERVE_PAUSE, Relaxed);
            return Ok(false);
        }
        // The daemon's thread that reserves pages in advance has these in hand now.
        std::thread::yield_now();
    }
    d.reserve_pause.store(BUSY_PAUSE, Relaxed);
    Ok(false)
}

/// Writes the bytes through the kernel. `tried`: an inline write came before, and the writes after it may need pages beyond the
/// end. `kept`: the locks of the inline write, if it wrote a part.
#[cold]
fn write_by_kernel(
    open: &Open,
    facts: &Facts,
    data: Data<'_, '_>,
    at: u64,
    tried: bool,
    kept: Option<Kept<'_>>,
) -> Written {
    let append = facts.flags & APPEND != 0;
    if append && SIZE_LIMITED.load(Relaxed) {
        // The kernel compares the limit with its own size of the file.
        refresh_size(open.fd);
    }
    let result = match kept {
        Some(kept) => end_by_kernel(open, data, at, &kept),
        None => write_parts(open, data.parts, at),
    };
    let mut end = at + result.unwrap_or(0) as u64;
    if append && result.is_ok_and(|n| n > 0) {
        // The kernel has written at the end, wherever that was. The size now covers the write.
        end = end_of(open).unwrap_or(end);
    }
    if tried && result.is_ok() {
        extended_by_kernel(open, end);
    }
    Written { result, end }
}

/// Ends a write whose first part is written. Writes the rest only, so that newer bytes of other writers in the first part stay.
/// Writes all bytes again if others may have written over both parts or removed the first part.
#[cold]
fn end_by_kernel(open: &Open, data: Data<'_, '_>, at: u64, kept: &Kept<'_>) -> Result<usize> {
    let whole = || write_parts(open, data.parts, at);
    let done = kept.done();
    let mut room = [IoSlice::new(&[]); REST_PARTS_MAX];
    // At a file size limit, a write of the rest alone would end differently than the whole write: with a signal.
    let Some((rest, own)) = rest_of(data.parts, done, &mut room)
        .zip(kept.own_borrows(data.len - done))
        .filter(|_| !SIZE_LIMITED.load(Relaxed) && kept.is_one_write(0))
    else {
        return whole();
    };
    match write_parts(open, rest, at + done as u64) {
        // The daemon's memory, which has the first part, is gone, too.
        Err(errno::ENOTCONN) => Err(errno::ENOTCONN),
        Err(_) => Ok(done),
        Ok(n) if done + n < data.len || kept.is_one_write(own) => Ok(done + n),
        Ok(_) => whole(),
    }
}

fn write_parts(open: &Open, parts: &[IoSlice<'_>], at: u64) -> Result<usize> {
    let result = match parts {
        [part] => files::pwrite(open.fd, part, at as i64),
        parts => files::pwritev(open.fd, parts, at as i64),
    };
    from_kernel(open, result)
}

/// Returns the parts without their first `done` bytes; `None` if `room` has too few entries.
fn rest_of<'r, 'b>(
    parts: &[IoSlice<'b>],
    done: usize,
    room: &'r mut [IoSlice<'b>; REST_PARTS_MAX],
) -> Option<&'r [IoSlice<'b>]> {
    let (mut skip, mut first) = (done, 0);
    while skip >= parts.get(first)?.len() {
        skip -= parts[first].len();
        first += 1;
    }
    let rest = room.get_mut(..parts.len() - first)?;
    rest.copy_from_slice(&parts[first..]);
    rest[0].advance(skip);
    Some(rest)
}

#[inline]
fn write_data(fd: i32, data: Data<'_, '_>, offset: Option<i64>) -> Option<Result<usize>> {
    if let Some(offset) = offset {
        let at = u64::try_from(offset).ok()?;
        let inline = || {
            let state = fast_state(fd).filter(|_| data.is_fit)?;
            if let Some(call) = ordinary(fd, Access::Write(data.len))? {
                let _: Option<()> = by_kernel(fd, Some(at), data.len, true);
                let result = match data.parts {
                    [part] => files::pwrite(fd, part, offset),
                    parts => files::pwritev(fd, parts, offset),
                };
                return Some(call.has_written(result, Some(at)));
            }
            reentrancy::enter(Doing::Writing, |thread| {
                let open = described(fd, state)?;
                Some(write_at(thread, &open, &facts(&open)?, data, at)?.result)
            })?
        };
        return inline().or_else(|| by_kernel(fd, Some(at), data.len, true));
    }
    let mut tries = 0;
    loop {
        match early::begin(fd, Access::Write(data.len), true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return by_kernel(fd, None, data.len, true),
            CallPath::Counted(call) => {
                let _: Option<()> = by_kernel(fd, None, data.len, true);
                let result = match data.parts {
                    [part] => files::write(fd, part),
                    parts => files::writev(fd, parts),
                };
                return Some(call.has_written(result, None));
            }
        }
        let result = write_here(fd, data);
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

/// Makes the kernel refresh a file's size before it appends to the file or copies from it. Otherwise the kernel uses the
/// size from before the inline writes of this program or another: for the new offset, for RWF_APPEND, and as the end of the copy,
/// without an error.
pub fn refresh_size(fd: i32) {
    let _ = files::fstat(fd);
}

/// Writes at the description's offset and advances it.
#[inline]
fn write_here(fd: i32, data: Data<'_, '_>) -> Option<Result<usize>> {
    let Some(state) = fast_state(fd) else {
        return by_kernel(fd, None, data.len, true);
    };
    let result = reentrancy::enter(Doing::Writing, |thread| {
        let open = described(fd, state)?;
        if open.description().offset.is_in_kernel(open.tag()) {
            if facts(&open).is_some_and(|facts| facts.flags & APPEND != 0) {
                refresh_size(fd);
            }
            return None;
        }
        let facts = facts(&open)?;
        let written = with_offset(
            thread,
            &open,
            data.len,
            |at| write_at(thread, &open, &facts, data, at),
            |written, at, behind| match written {
                Some(written) if behind == 0 || written.result == Ok(data.len) => {
                    written.end + behind
                }
                Some(written) => written.end.max(at + data.len as u64) + behind,
                None => at + behind,
            },
        )?;
        Some(written?.result)
    });
    match result {
        Some(result) => result,
        None => interrupted(fd, data.len, true, |_, open, facts, at| {
            Some(write_by_kernel(open, facts, data, at, false, None).result)
        }),
    }
}

/// Makes a write(2).
#[inline]
pub fn write(fd: i32, data: &[u8]) -> Option<Result<usize>> {
    write_data(fd, Data::new(&[IoSlice::new(data)]), None)
}

/// Makes a pwrite(2).
#[inline]
pub fn pwrite(fd: i32, data: &[u8], offset: i64) -> Option<Result<usize>> {
    write_data(fd, Data::new(&[IoSlice::new(data)]), Some(offset))
}

/// Makes a writev(2), or with `at` a pwritev(2).
pub fn writev(fd: i32, parts: &[IoSlice<'_>], at: Option<i64>) -> Option<Result<usize>> {
    write_data(fd, Data::new(parts), at)
}

// ---- offset and size ----

/// Makes an lseek(2).
pub fn lseek(fd: i32, offset: i64, whence: i32) -> Option<Result<i64>> {
    let mut tries = 0;
    loop {
        match early::begin(fd, Access::Seek, true) {
            CallPath::Inline => {}
            CallPath::Ordinary => return None,
            CallPath::Counted(_call) => return Some(files::lseek(fd, offset, whence)),
        }
        let result = lseek_here(fd, offset, whence);
        if result.is_some() || !early::is_undecided(fd, &mut tries) {
            return result;
        }
    }
}

fn lseek_here(fd: i32, offset: i64, whence: i32) -> Option<Result<i64>> {
    let state = fast_state(fd)?;
    reentrancy::enter(Doing::Reading, |thread| {
        let open = described(fd, state)?;
        if open.description().offset.is_in_kernel(open.tag()) {
            return None;
        }
        with_offset(
            thread,
            &open,
            0,
            |at| seek(&open, at, offset, whence),
            |to, at, written| {
                // Bytes that a handler has written meanwhile count as written before the seek.
                if written > 0 {
                    *to = seek(&open, at + written, offset, whence);
                }
                to.map_or(at + written, |to| to as u64)
            },
        )
    })?
}

/// Returns the offset to which an lseek leads from `at`.
fn seek(open: &Open, at: u64, offset: i64, whence: i32) -> Result<i64> {
    let to = match whence {
        SEEK_SET => offset,
        SEEK_CUR => at.checked_add_signed(offset).ok_or(errno::EINVAL)? as i64,
        SEEK_END => end_of(open)?
            .checked_add_signed(offset)
            .ok_or(errno::EINVAL)? as i64,
        // For data, holes and unknown kinds, the kernel finds the offset.
        _ => files::lseek(open.fd, offset, whence)?,
    };
    // The kernel knows the largest offset of its filesystems' files.
    match u64::try_from(to) {
        Ok(far) if far > OFFSET_MAX => files::lseek(open.fd, to, SEEK_SET),
        Ok(_) => Ok(to),
        Err(_) => Err(errno::EINVAL),
    }
}

fn end_of(open: &Open) -> Result<u64> {
    match inline_size(open) {
        Some(size) => Ok(size),
        None => files::fstat(open.fd).map(|stat| stat.size),
    }
}

fn inline_size(open: &Open) -> Option<u64> {
    match route(open, &facts(open)?) {
        Route::Inline(_, file) => file.size().ok(),
        _ => None,
    }
}

/// Returns the size of a file that is used inline, for fstat(2). It may be newer than the kernel's.
pub fn size(fd: i32) -> Option<u64> {
    let Some(FdState::Described(open)) = description::state(fd) else {
        return None;
    };
    reentrancy::enter(Doing::Reading, |_| inline_size(&open))?
}

// ---- changes of an fd's meaning ----

/// Notes that this process creates a thread.
pub fn has_threads() {
    THREADS.store(true, Relaxed);
}

/// Forgets an fd that is about to be closed. Until it is closed, other threads make ordinary calls on it, so this moves the
/// offset to the kernel. If the description has other fds, the offset stays here for them, and `Closing::has_closed` forgets the
/// fd.
pub fn closing(fd: i32) -> Closing {
    let word = match THREADS.load(Relaxed) {
        true => description::begin_close(fd),
        false => None,
    };
    if word.is_some() {
        crate::migration::tick();
    } else {
        move_offset_for_close(fd);
        forget(fd);
    }
    Closing { fd, word }
}

/// An fd that is being closed. A thread that is cancelled in close(2) drops it without `has_closed`; later calls on the fd then
/// ask the kernel for its meaning.
#[must_use]
#[derive(Clone, Copy, Debug)]
pub struct Closing {
    fd: i32,
    word: Option<u64>,
}

impl Closing {
    /// Notes that the fd was closed.
    #[inline]
    pub fn has_closed(self) {
        if let Some(word) = self.word {
            description::has_closed(self.fd, word);
        }
    }
}

/// Forgets all fds from `first` to `last`. With threads, first moves their offsets to the kernel, also offsets that other fds
/// share.
pub fn closing_range(first: u32, last: u32) {
    if THREADS.load(Relaxed) {
        let closed = |fd: &i32| (first..=last).contains(&(*fd as u32));
        description::fds()
            .filter(closed)
            .for_each(move_offset_for_close);
    }
    forget_range(first, last);
}

fn move_offset_for_close(fd: i32) {
    if THREADS.load(Relaxed)
        && let Some(FdState::Described(open)) = description::state(fd)
    {
        move_offset_to_kernel(&open);
    }
}

/// Notes a successful open(2) of this process, with these flags.
pub fn opened(fd: i32, _flags: i32) {
    crate::migration::tick();
    description::opened(fd);
}

/// Forgets an fd that has changed its meaning, or is about to be closed.
pub fn forget(fd: i32) {
    crate::migration::tick();
    description::forget(fd);
}

/// Does the same for all fds from `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    description::forget_range(first, last);
}

/// Notes that `new` is a duplicate of `old`: after dup(2), dup2(2), dup3(2) or F_DUPFD.
pub fn duplicated(old: i32, new: i32) {
    if let Some(state @ FdState::Unknown { opened: true, .. }) = description::state(old) {
        // Describes `old` now, so that both fds share one offset. If that fails, the offset stays in the kernel.
        let known = reentrancy::enter(Doing::Reading, |_| described(old, state));
        if known.flatten().is_none() {
            description::unopened(old);
        }
    }
    description::duplicated(old, new);
}

/// Reads an fd's flags again after F_SETFL.
pub fn flags_changed(fd: i32) {
    let Some(FdState::Described(open)) = description::state(fd) else {
        // F_SETFL may have cleared O_DIRECT, for example.
        if fast_state(fd).is_none() {
            description::forget(fd);
        }
        return;
    };
    match files::mode(fd) {
        Ok(mode) if mode.direct => give_up(&open, Reason::Direct),
        Ok(mode) => {
            let set = flags_of(&mode) & (APPEND | SYNC);
            open.change_flags(set, APPEND | SYNC);
        }
        Err(_) => {}
    }
}

/// Puts the fd's open file on the kernel path, and moves its offset to the kernel.
pub fn to_kernel(fd: i32, why: Reason) {
    match description::state(fd) {
        Some(FdState::Described(open)) => give_up(&open, why),
        Some(FdState::Unknown { word, .. }) => description::set_kernel(fd, word),
        _ => {}
    }
}

/// Prepares an fd for mmap. The daemon makes the kernel's pages and its own the same. Fails with an errno when the daemon cannot:
/// the mapping would show other bytes than a read.
pub fn mapped(fd: i32) -> Result<()> {
    let ours = files::fstat(fd).is_ok_and(|stat| stat.is_regular && devices::is_ours(stat.device));
    if !ours {
        return Ok(());
    }
    to_kernel(fd, Reason::Mapped);
    let _: Option<()> = by_kernel(fd, Some(0), usize::MAX, false);
    match ask(fd, Call::Mapped) {
        Ok(answer) if answer.status == 0 => Ok(()),
        // Without a fast path, only the kernel caches pages.
        Ok(answer) if answer.status == Refusal::Off as u32 => Ok(()),
        Err(errno::ENOTTY) => Ok(()),
        Ok(_) => Err(errno::EBUSY),
        Err(errno) => Err(errno),
    }
}

/// Reads the limit of file sizes again, after setrlimit(2) or prlimit(2) may have changed it.
pub fn size_limit_changed() {
    SIZE_LIMITED.store(files::size_is_limited(), Relaxed);
}

/// Reads the environment, before main, while the process has one thread.
pub fn prepare() {
    devices::prepare();
    crate::migration::policy_of_run();
}

/// Keeps other threads from attaching while this one forks. The child would have no thread to finish an attachment in progress.
pub fn before_fork() -> Forking {
    Forking {
        may_attach: session::may_attach(),
        _attach_lock: session::lock_attaching(),
    }
}

/// A fork in progress.
pub struct Forking {
    may_attach: bool,
    _attach_lock: session::AttachLock,
}

impl Forking {
    /// Allows the child to attach, if the parent may.
    pub fn in_child(&self) {
        if self.may_attach {
            session::allow_attaching();
        }
    }
}

/// Prepares for a child that is made other than by the C library's fork. All the child's I/O goes through the kernel.
pub fn before_bare_fork() {
    session::before_bare_fork();
}

/// Moves all offsets to the kernel, before fork(2), exec or posix_spawn.
pub fn share_all() {
    description::fds().for_each(share_offset);
}

/// Moves the fd's offset to the kernel for good, before another process gets the open file (SCM_RIGHTS), or the kernel uses its
/// offset (sendfile(2) ...).
pub fn share(fd: i32) {
    share_offset(fd);
    // The library does not know which bytes will be accessed.
    let _: Option<()> = by_kernel(fd, Some(0), usize::MAX, false);
}

fn share_offset(fd: i32) {
    match description::state(fd) {
        Some(FdState::Described(open)) => move_offset_to_kernel(&open),
        Some(FdState::Unknown { opened: true, .. }) => description::unopened(fd),
        _ => {}
    }
}

/// Writes a report of this process's calls: some lines of text, none when it has used no file of a mount. Fails with the errors
/// of `out`.
pub fn report(out: &mut impl Write) -> std::io::Result<()> {
    if report::is_empty() {
        return Ok(());
    }
    report::write_to(out)
}

#[cfg(test)]
mod tests;
