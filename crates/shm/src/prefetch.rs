//! Prefetch hints for the CPU. They change nothing but the time.

/// Number of cache lines that a CPU can load at the same time.
const LINES: usize = 16;
const LINE_BYTES: usize = 64;

/// Has the CPU fetch the first of the `len` bytes at `at`: one cache line, or `LINES` lines if the bytes fill that many. The
/// address may be invalid.
#[inline(always)]
pub(crate) fn bytes(at: *const u8, len: usize) {
    line(at);
    if len >= LINES * LINE_BYTES {
        for n in 1..LINES {
            line(at.wrapping_add(n * LINE_BYTES));
        }
    }
}

#[inline(always)]
fn line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect that a program could see, and no address makes it fail. Every processor of this
    // architecture has the instruction.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Returns the same number. The compiler does not know that it is the same.
#[inline(always)]
pub(crate) fn unrelated(number: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut number = number;
        // SAFETY: the assembly is empty.
        unsafe {
            std::arch::asm!("/* {0:e} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags));
        }
        number
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(number)
}
