//! The CPUs on which a thread may run.
//!
//! Threads are named by their kernel id, so that threads of other processes can be queried and moved too, where the kernel
//! permits it. CPUs above number 1023 are not supported.

use std::io;

use rustix::thread::{CpuSet, Pid};

/// Returns the kernel's id of the calling thread.
pub fn current_tid() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

/// Returns whether no thread has this thread id now. Preserves errno and allocates nothing.
pub fn has_ended(tid: u32) -> bool {
    let asked = pid(Some(tid)).and_then(|tid| Ok(rustix::thread::sched_getaffinity(tid)?));
    asked.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

/// Returns the CPUs on which a thread (`None`: the calling one) may run, ascending. Fails with ESRCH.
pub fn get(tid: Option<u32>) -> io::Result<Vec<u32>> {
    let set = rustix::thread::sched_getaffinity(pid(tid)?)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .map(|cpu| cpu as u32)
        .collect())
}

/// Lets a thread (`None`: the calling one) run on `cpus` only. Ignores CPUs that do not exist. Fails with EINVAL when none exists
/// or a number is above 1023, with ESRCH, and with EPERM for a thread of another user.
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

/// A set of CPUs 0 to 1023 as a plain value, for code that must not allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuMask([u64; CpuMask::WORDS]);

impl CpuMask {
    const WORDS: usize = 16;
    /// Length of a mask in bytes.
    pub const BYTES: usize = 8 * CpuMask::WORDS;
    /// Largest CPU number of a mask.
    pub const CPU_MAX: u32 = 1023;
    /// No CPU.
    pub const EMPTY: CpuMask = CpuMask([0; CpuMask::WORDS]);
    /// All CPUs.
    pub const ALL: CpuMask = CpuMask([u64::MAX; CpuMask::WORDS]);

    /// Adds a CPU. Ignores a number above [`CpuMask::CPU_MAX`].
    pub fn insert(&mut self, cpu: u32) {
        if let Some(word) = self.0.get_mut(cpu as usize / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    /// Returns whether the mask contains a CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0
            .get(cpu as usize / 64)
            .is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    /// Returns the CPUs that are in both masks.
    pub fn and(&self, other: &CpuMask) -> CpuMask {
        CpuMask(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// Returns the CPUs that are in one of the masks or in both.
    pub fn or(&self, other: &CpuMask) -> CpuMask {
        CpuMask(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// Returns the mask as bytes, native-endian.
    pub fn to_bytes(&self) -> [u8; CpuMask::BYTES] {
        let mut bytes = [0; CpuMask::BYTES];
        for (word, bytes) in self.0.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = word.to_ne_bytes();
        }
        bytes
    }

    /// Returns the mask with these bytes.
    pub fn from_bytes(bytes: &[u8; CpuMask::BYTES]) -> CpuMask {
        let words = bytes.as_chunks().0;
        CpuMask(std::array::from_fn(|at| u64::from_ne_bytes(words[at])))
    }

    /// Returns whether the mask contains no CPU.
    pub fn is_empty(&self) -> bool {
        *self == CpuMask::EMPTY
    }

    /// Returns whether `other` contains all CPUs of this mask.
    pub fn is_subset(&self, other: &CpuMask) -> bool {
        self.and(other) == *self
    }
}

impl FromIterator<u32> for CpuMask {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> CpuMask {
        let mut mask = CpuMask::EMPTY;
        cpus.into_iter().for_each(|cpu| mask.insert(cpu));
        mask
    }
}

/// Does the same as [`get`] without allocating.
pub fn mask(tid: Option<u32>) -> io::Result<CpuMask> {
    let set = rustix::thread::sched_getaffinity(pid(tid)?)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .map(|cpu| cpu as u32)
        .collect())
}

/// Does the same as [`set`] without allocating.
pub fn set_mask(tid: Option<u32>, mask: &CpuMask) -> io::Result<()> {
    let mut set = CpuSet::new();
    (0..=CpuMask::CPU_MAX)
        .filter(|cpu| mask.contains(*cpu))
        .for_each(|cpu| set.set(cpu as usize));
    Ok(rustix::thread::sched_setaffinity(pid(tid)?, &set)?)
}

fn pid(tid: Option<u32>) -> io::Result<Option<Pid>> {
    let Some(tid) = tid else { return Ok(None) };
    match i32::try_from(tid).ok().and_then(Pid::from_raw) {
        Some(pid) => Ok(Some(pid)),
        // The kernel would take 0 as the calling thread.
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
        assert_eq!(get(None).unwrap(), all, "other threads are unchanged");
    }

    #[test]
    fn a_mask_equals_a_list() {
        let all = get(None).unwrap();
        std::thread::spawn(move || {
            assert_eq!(mask(None).unwrap(), all.iter().copied().collect());
            let last = all[all.len() - 1];
            let only: CpuMask = [last, CpuMask::CPU_MAX + 1].into_iter().collect();
            set_mask(None, &only).unwrap();
            assert_eq!(
                (get(None).unwrap(), mask(None).unwrap()),
                (vec![last], only)
            );
            assert!(only.contains(last) && !only.is_empty());
            assert!(only.is_subset(&all.into_iter().collect()));
            assert!(!only.is_subset(&CpuMask::EMPTY) && CpuMask::EMPTY.is_subset(&only));
            assert_eq!(CpuMask::from_bytes(&only.to_bytes()), only);
        })
        .join()
        .unwrap();
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
