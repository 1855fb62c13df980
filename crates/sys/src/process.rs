//! Other processes, signals, sessions and identities.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// A reference to a process that stays valid when its id is used again.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
}

impl Process {
    /// Opens the process that has this id now. Fails with ESRCH when there is none.
    pub fn open(pid: u32) -> io::Result<Process> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::Error::from(rustix::io::Errno::SRCH))?;
        Ok(Process {
            pidfd: rustix::process::pidfd_open(pid, PidfdFlags::empty())?,
        })
    }

    /// Waits until the process has ended, for at most `timeout` (`None`: no limit). Returns whether it has ended. A child of this
    /// process must still be reaped.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        wait_readable(self.pidfd.as_fd(), timeout)
    }

    /// Sends a signal. Fails with ESRCH when the process has ended, and with EPERM.
    pub fn send(&self, signal: Signal) -> io::Result<()> {
        // SAFETY: the call takes no memory; with a null siginfo it acts as kill(2).
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal.number(),
                std::ptr::null::<libc::siginfo_t>(),
                0 as libc::c_uint,
            )
        };
        if sent == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl AsFd for Process {
    /// Returns the pidfd, which is readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Signals that the daemon and the commands handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM
    Terminate,
    /// SIGINT
    Interrupt,
    /// SIGHUP
    HangUp,
    /// SIGQUIT
    Quit,
    /// SIGKILL; can only be sent.
    Kill,
}

impl Signal {
    const ALL: [Signal; 5] = [
        Signal::Terminate,
        Signal::Interrupt,
        Signal::HangUp,
        Signal::Quit,
        Signal::Kill,
    ];

    /// Returns the kernel's number.
    pub fn number(self) -> i32 {
        match self {
            Signal::Terminate => libc::SIGTERM,
            Signal::Interrupt => libc::SIGINT,
            Signal::HangUp => libc::SIGHUP,
            Signal::Quit => libc::SIGQUIT,
            Signal::Kill => libc::SIGKILL,
        }
    }
}

/// Signals that are read from a descriptor instead of being delivered: signalfd(2).
///
/// Create it first in `main`. Signals are blocked in the calling thread and in threads that it starts later; they would still
/// kill an older thread. Programs that a thread starts inherit the blocked signals unless [`unblock_signals`] prevents that. The
/// signals stay blocked after drop.
#[derive(Debug)]
pub struct Signals {
    signalfd: OwnedFd,
}

impl Signals {
    /// Blocks `signals` and collects them from now on. Fails with EMFILE or ENOMEM.
    pub fn block(signals: &[Signal]) -> io::Result<Signals> {
        // SAFETY: sigset_t is plain integers, for which zeros are valid; sigemptyset then initialises it as POSIX requires.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a valid sigset_t, and the numbers are those of existing signals.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, signal.number());
            }
        }
        // SAFETY: `set` is initialised; the old mask is not requested.
        let failed =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        // SAFETY: `set` is initialised; -1 requests a new descriptor.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and no other code knows it.
        let signalfd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals { signalfd })
    }

    /// Returns the next signal. Waits for at most `timeout` (`None`: no limit).
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<Signal>> {
        if !wait_readable(self.signalfd.as_fd(), timeout)? {
            return Ok(None);
        }
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.signalfd, &mut info) {
            Ok(_) => {
                // ssi_signo is the first field.
                let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
                Ok(Signal::ALL
                    .into_iter()
                    .find(|signal| signal.number() == number))
            }
            // Another thread has read the signal.
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Signals {
    /// Returns the signalfd, which is readable when a signal is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signalfd.as_fd()
    }
}

/// Waits until a descriptor is readable, for at most `timeout` (`None`: no limit). Returns whether it is.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes a program start with no signal blocked. A program that inherits a blocked SIGTERM could not be stopped with it.
pub fn unblock_signals(command: &mut Command) -> &mut Command {
    let unblock = || {
        // SAFETY: as in `Signals::block`: zeros are a valid sigset_t, then made empty.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a valid sigset_t; the old mask is not requested.
        let failed = unsafe {
            libc::sigemptyset(&raw mut set);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut())
        };
        if failed == 0 {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(failed))
        }
    };
    // SAFETY: between fork and exec only sigemptyset and pthread_sigmask are called, which are
    // async-signal-safe and allocate nothing.
    unsafe { command.pre_exec(unblock) }
}

/// Starts a program in a session of its own, with no signal blocked. Signals from this terminal do not reach it, and it outlives
/// the terminal. `command` sets its standard streams.
pub fn spawn_in_new_session(command: &mut Command) -> io::Result<Child> {
    unblock_signals(command);
    // SAFETY: between fork and exec only setsid(2) is called, which is async-signal-safe and
    // allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?));
    }
    command.spawn()
}

/// Starts a program with its standard streams and no other descriptor of this process, in a session of its own and with no
/// signal blocked.
pub fn spawn_with_standard_streams(command: &mut Command) -> io::Result<Child> {
    let close = || {
        // SAFETY: the call takes no memory; it marks descriptors of the new process, which has no other thread, and closes none
        // before exec.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                3 as libc::c_uint,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            _ if failed == 0 => Ok(()),
            // Linux before 5.11, or a container that forbids the call. This program's own descriptors are close-on-exec anyway.
            Some(libc::ENOSYS | libc::EINVAL | libc::EPERM) => Ok(()),
            _ => Err(error),
        }
    };
    // SAFETY: between fork and exec only close_range(2) is called, which is async-signal-safe and allocates nothing.
    unsafe { command.pre_exec(close) };
    spawn_in_new_session(command)
}

/// Makes the kernel kill a program when the thread that starts it ends, so also when this process is killed.
pub fn kill_with_parent(command: &mut Command) -> &mut Command {
    let parent = i32::try_from(std::process::id())
        .ok()
        .and_then(Pid::from_raw);
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The parent may have ended before the call. The program then has another parent already.
        match rustix::process::getppid() == parent {
            true => Ok(()),
            false => Err(io::Error::from(rustix::io::Errno::SRCH)),
        }
    };
    // SAFETY: between fork and exec only prctl(2) and getppid(2) are called, which are async-signal-safe and allocate nothing.
    unsafe { command.pre_exec(ask) }
}

/// Makes this process the leader of a new session. Fails with EPERM when it leads a process group.
pub fn become_session_leader() -> io::Result<()> {
    Ok(rustix::process::setsid().map(drop)?)
}

/// Sets the mode bits that new files of this process do not get. Returns the old ones.
pub fn set_umask(mask: u32) -> u32 {
    rustix::process::umask(Mode::from_raw_mode(mask & 0o777)).as_raw_mode()
}

/// Gives up all capabilities of this thread. It gets none back, unless it executes a program that has some.
pub fn drop_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    Ok(set_capabilities(None, sets)?)
}

/// Says that the calling thread, and threads that it starts later, carry out I/O of block devices: PR_SET_IO_FLUSHER. If the kernel
/// needs memory for such a thread, it waits for no I/O, which may need the thread. Fails with EPERM without CAP_SYS_RESOURCE.
pub fn become_io_flusher() -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(true)?)
}

/// Returns the user that started this process.
pub fn uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Returns the user whose rights this process has.
pub fn effective_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the name of this host: uname(2).
pub fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Returns the version of the kernel: uname(2).
pub fn kernel_release() -> String {
    let name = rustix::system::uname();
    name.release().to_string_lossy().into_owned()
}

/// Returns the model of the CPU, from /proc/cpuinfo. Some architectures give none there; then returns `unknown` with the architecture.
pub fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| {
        let (key, model) = line.split_once(':')?;
        (key.trim() == "model name").then(|| model.trim().to_owned())
    });
    named.unwrap_or_else(|| format!("unknown ({})", std::env::consts::ARCH))
}

/// Returns the group that started this process.
pub fn gid() -> u32 {
    rustix::process::getgid().as_raw()
}

/// Returns the CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

/// Returns an unguessable number: getrandom(2). Fails with ENOSYS.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    let mut have = 0;
    while have < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[have..], flags) {
            Ok(count) => have += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_noticed_and_a_running_one_times_out() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(!process.wait(Some(Duration::from_millis(5))).unwrap());
        process.send(Signal::Kill).unwrap();
        assert!(process.wait(None).unwrap());
        assert!(!child.wait().unwrap().success());
        let gone = process.send(Signal::Kill).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_program_that_asks_for_it_is_killed_with_the_thread_that_started_it() {
        let started = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            kill_with_parent(command.arg("30")).spawn().unwrap()
        });
        let status = started.join().unwrap().wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(libc::SIGKILL));
    }

    #[test]
    fn no_process_has_id_0() {
        assert_eq!(
            Process::open(0).unwrap_err().raw_os_error(),
            Some(libc::ESRCH)
        );
    }

    #[test]
    fn a_blocked_signal_can_be_read_and_kills_no_thread() {
        // Sends the signal to this thread only, because threads of the test runner have not blocked it.
        std::thread::spawn(|| {
            let signals = Signals::block(&[Signal::HangUp, Signal::Terminate]).unwrap();
            assert_eq!(signals.wait(Some(Duration::from_millis(5))).unwrap(), None);
            // SAFETY: the call takes no memory; the thread is this one.
            let sent = unsafe {
                libc::syscall(
                    libc::SYS_tgkill,
                    std::process::id(),
                    crate::affinity::current_tid(),
                    libc::SIGHUP,
                )
            };
            assert_eq!(sent, 0);
            assert_eq!(signals.wait(None).unwrap(), Some(Signal::HangUp));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_program_in_a_new_session_leads_it_and_has_no_signal_blocked() {
        let script = "read -r stat < /proc/self/stat; echo ${stat##*) } $$; \
                      while read -r line; do case $line in SigBlk*) echo $line;; esac; \
                      done < /proc/self/status";
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .stdout(std::process::Stdio::piped());
        let (child, session) = std::thread::spawn(move || {
            let _signals = Signals::block(&[Signal::Terminate]).unwrap();
            let child = spawn_in_new_session(&mut command).unwrap();
            let id = child.id();
            (child, id)
        })
        .join()
        .unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        // The fields are: state ppid pgrp session ...
        assert_eq!(
            lines[0].split_whitespace().nth(3),
            Some(session.to_string().as_str())
        );
        assert!(lines[1].ends_with("0000000000000000"), "{}", lines[1]);
    }
}
