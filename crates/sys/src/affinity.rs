//! On which CPUs a thread may run.
//!
//! Threads are named by their kernel id, so that a thread of another process can be asked and moved
//! too, where the kernel permits. CPUs beyond number 1023 are not supported.

use std::io;

use rustix::thread::{CpuSet, Pid};

/// The kernel's id of the calling thread.
pub fn current_tid() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// The CPUs on which a thread (`None`: the calling one) may run, ascending. Errors: ESRCH.
pub fn get(tid: Option<u32>) -> io::Result<Vec<u32>> {
    let set = rustix::thread::sched_getaffinity(pid(tid)?)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .map(|cpu| cpu as u32)
        .collect())
}

/// Lets a thread (`None`: the calling one) run on `cpus` only; those that do not exist are left
/// out. Errors: EINVAL when none is left or a number is above 1023; ESRCH; EPERM for somebody
/// else's thread.
pub fn set(tid: Option<u32>, cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu as usize >= CpuSet::MAX_CPU {
            return Err(rustix::io::Errno::INVAL.into());
        }
        set.set(*cpu as usize);
    }
    Ok(rustix::thread::sched_setaffinity(pid(tid)?, &set)?)
}

fn pid(tid: Option<u32>) -> io::Result<Option<Pid>> {
    let Some(tid) = tid else { return Ok(None) };
    match i32::try_from(tid).ok().and_then(Pid::from_raw) {
        Some(pid) => Ok(Some(pid)),
        // 0 would mean the calling thread to the kernel.
        None => Err(rustix::io::Errno::SRCH.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_be_pinned_by_itself_and_by_another() {
        let all = get(None).unwrap();
        let first = all[0];
        let (send_tid, tid) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            set(None, &[first]).unwrap();
            assert_eq!(get(None).unwrap(), [first]);
            assert_eq!(crate::rseq::current_cpu(), first);
            send_tid.send(current_tid()).unwrap();
            wait.recv().unwrap();
            get(None).unwrap()
        });
        let tid = tid.recv().unwrap();
        assert_eq!(get(Some(tid)).unwrap(), [first]);
        set(Some(tid), &all).unwrap();
        done.send(()).unwrap();
        assert_eq!(thread.join().unwrap(), all);
        assert_eq!(get(None).unwrap(), all, "others stay as they were");
    }

    #[test]
    fn no_cpu_and_no_thread_are_errors() {
        let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        assert_eq!(errno(set(None, &[])), Some(libc::EINVAL));
        assert_eq!(errno(set(None, &[5000])), Some(libc::EINVAL));
        assert_eq!(errno(set(Some(0), &[0])), Some(libc::ESRCH));
        assert_eq!(errno(get(Some(u32::MAX)).map(drop)), Some(libc::ESRCH));
    }
}
