//! On which CPU the calling thread is, without asking the kernel.
//!
//! The kernel keeps the number current in a small area of each thread that the C library registered with
//! it (rseq(2), glibc from 2.35 on). Reading it is two loads; a system call, or even the vDSO's answer, would cost more than
//! what is counted with it.

use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

/// `AREA`: nobody has looked yet. No area is there, as the thread pointer's own words are.
const UNKNOWN: isize = 0;
/// `AREA`: this C library, kernel or processor has none.
const ABSENT: isize = isize::MIN;

/// Where the area is, in bytes from the thread pointer. The same in all threads.
static AREA: AtomicIsize = AtomicIsize::new(UNKNOWN);

/// The CPU on which the calling thread runs; it may be another one by the time this returns.
#[inline]
pub fn current_cpu() -> u32 {
    let area = AREA.load(Relaxed);
    if area != UNKNOWN && area != ABSENT {
        // SAFETY: `find` got the offset from the C library, which promises an area there in every thread.
        let cpu = unsafe { cpu_id(area) };
        // Negative: this thread is not registered (one that was made behind the C library's back, say).
        if cpu >= 0 {
            return cpu as u32;
        }
    }
    ask()
}

/// Without an area, or before it was looked for.
#[cold]
fn ask() -> u32 {
    if AREA.load(Relaxed) == UNKNOWN {
        // Twice by two threads at once does no harm: both find the same.
        AREA.store(find().unwrap_or(ABSENT), Relaxed);
    }
    rustix::thread::sched_getcpu() as u32
}

/// Asks the C library where it registered the areas. By name, as an older one does not know it and a program
/// that needed it could not be started there.
#[cfg(all(
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
fn find() -> Option<isize> {
    /// The first two words of the area, which is all that is read.
    const BYTES_MIN: u32 = 8;
    // SAFETY: the names are strings with their NUL; looking a name up has no other precondition.
    let (offset, size) = unsafe {
        (
            libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>(),
            libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>(),
        )
    };
    if offset.is_null() || size.is_null() {
        // SAFETY: takes nothing. It takes away the message that a look-up in vain leaves, which a program would take for
        // one of its own; what it returns is not looked at.
        unsafe { libc::dlerror() };
        return None;
    }
    // SAFETY: glibc documents them as constants of these types, set before any code of a program or of a
    // preloaded library runs.
    let (offset, size) = unsafe { (offset.read(), size.read()) };
    // Size 0: the kernel knows no rseq, or the user switched it off.
    (size >= BYTES_MIN && offset != UNKNOWN && offset != ABSENT).then_some(offset)
}

#[cfg(not(all(
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
fn find() -> Option<isize> {
    None
}

/// `cpu_id` of the calling thread's area, the second word of it.
///
/// # Safety
/// `area` must be the offset of an area of at least 8 bytes from the thread pointer in every thread.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn cpu_id(area: isize) -> i32 {
    let cpu: i32;
    // SAFETY: loads four bytes of this thread's own area, which stays as long as the thread. Assembly, as the
    // kernel changes the word whenever the thread is moved, and the segment register has no name in Rust.
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

/// `cpu_id` of the calling thread's area, the second word of it.
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
    // SAFETY: four aligned bytes of this thread's own area, which stays as long as the thread; volatile, as
    // the kernel changes them.
    unsafe { word.read_volatile() }
}

/// Never called: `find` has found nothing.
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
    fn a_pinned_thread_is_where_it_was_pinned_in_every_thread() {
        let all = affinity::get(None).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let all = all.clone();
                std::thread::spawn(move || {
                    for cpu in all {
                        affinity::set(None, &[cpu]).unwrap();
                        assert_eq!(rustix::thread::sched_getcpu() as u32, cpu);
                        // The first call of a process may be one that asks the kernel.
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
