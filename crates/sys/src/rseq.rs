//! The CPU on which the calling thread runs, without a system call.
//!
//! The kernel keeps the number current in a small area of each thread, which the C library registers (rseq(2), glibc 2.35 and
//! later). Reading it costs two loads. The callers need it at each access, to count the access as local or remote. A system call,
//! or even the vDSO, would cost more than the rest of the counting.

use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

/// Value of `AREA` before the first search. No area is at offset 0, because the thread pointer's own words are there.
const UNKNOWN: isize = 0;
/// Value of `AREA` if this C library, kernel or processor has no area.
const ABSENT: isize = isize::MIN;

/// Offset of the area from the thread pointer in bytes. The same in all threads.
static AREA: AtomicIsize = AtomicIsize::new(UNKNOWN);

/// Returns the CPU on which the calling thread runs. It may run on another one when this returns.
#[inline]
pub fn current_cpu() -> u32 {
    let area = AREA.load(Relaxed);
    if area != UNKNOWN && area != ABSENT {
        // SAFETY: `find` got the offset from the C library, which guarantees an area there in every thread.
        let cpu = unsafe { cpu_id(area) };
        // Negative: this thread is not registered (for example one that was not created by the C library).
        if cpu >= 0 {
            return cpu as u32;
        }
    }
    ask()
}

/// Asks the kernel. Used without an area, or before the search for it.
#[cold]
fn ask() -> u32 {
    if AREA.load(Relaxed) == UNKNOWN {
        // Two threads may do this at the same time: both find the same.
        AREA.store(find().unwrap_or(ABSENT), Relaxed);
    }
    rustix::thread::sched_getcpu() as u32
}

/// Asks the C library where it registered the areas. Looks the symbols up by name: an older C library does not have them, and a
/// program linked to them would not start there.
#[cfg(all(
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
fn find() -> Option<isize> {
    /// Size of the first two words of the area. Only these are read.
    const BYTES_MIN: u32 = 8;
    // SAFETY: the names are strings with their NUL; looking a name up has no other precondition.
    let (offset, size) = unsafe {
        (
            libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>(),
            libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>(),
        )
    };
    if offset.is_null() || size.is_null() {
        // SAFETY: takes no arguments. It clears the error message of the failed lookup, which the program could take for an error
        // of its own. The result is ignored.
        unsafe { libc::dlerror() };
        return None;
    }
    // SAFETY: glibc documents them as constants of these types, set before any code of a program or of a preloaded library runs.
    let (offset, size) = unsafe { (offset.read(), size.read()) };
    // Size 0: the kernel does not support rseq, or the user disabled it.
    (size >= BYTES_MIN && offset != UNKNOWN && offset != ABSENT).then_some(offset)
}

#[cfg(not(all(
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
fn find() -> Option<isize> {
    None
}

/// Returns `cpu_id`, the second word of the calling thread's area.
///
/// # Safety
/// `area` must be the offset of an area of at least 8 bytes from the thread pointer in every thread.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn cpu_id(area: isize) -> i32 {
    let cpu: i32;
    // SAFETY: loads four bytes of this thread's own area, which lives as long as the thread. Uses assembly, because the kernel
    // changes the word when it moves the thread, and Rust cannot name the segment register.
    unsafe {
        std::arch::asm!(
            "mov {cpu:e}, dword ptr fs:[{area} + 4]",
            area = in(reg) area,
            cpu = lateout(reg) cpu,
            options(nostack, preserves_flags, readonly),
        );
    }
    cpu
}

/// Returns `cpu_id`, the second word of the calling thread's area.
///
/// # Safety
/// `area` must be the offset of an area of at least 8 bytes from the thread pointer in every thread.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn cpu_id(area: isize) -> i32 {
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags));
    }
    let word = pointer.wrapping_add_signed(area).wrapping_add(4) as *const i32;
    // SAFETY: reads four aligned bytes of this thread's own area, which lives as long as the thread; volatile, because the kernel
    // changes them.
    unsafe { word.read_volatile() }
}

/// Never called, because `find` returns `None`.
///
/// # Safety
/// None.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn cpu_id(_area: isize) -> i32 {
    -1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::affinity;

    #[test]
    fn every_pinned_thread_sees_its_cpu() {
        let all = affinity::get(None).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let all = all.clone();
                std::thread::spawn(move || {
                    for cpu in all {
                        affinity::set(None, &[cpu]).unwrap();
                        assert_eq!(rustix::thread::sched_getcpu() as u32, cpu);
                        // The first call in a process may ask the kernel.
                        assert_eq!((current_cpu(), current_cpu()), (cpu, cpu));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    #[test]
    fn the_area_is_used_where_the_c_library_has_one() {
        current_cpu();
        let area = AREA.load(Relaxed);
        assert_eq!(area, find().unwrap_or(ABSENT));
        if area != ABSENT {
            // SAFETY: `find` returned it.
            assert!(unsafe { cpu_id(area) } >= 0);
        }
    }
}
