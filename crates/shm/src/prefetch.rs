//! What is told to the CPU and changes nothing but the time.

/// As many lines as a CPU waits for at a time.
const LINES: usize = 16;
const LINE_BYTES: usize = 64;

/// Has the CPU fetch the beginning of the `len` bytes at `at`: a line of memory, or of that many lines all. The address may be
/// any.
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
    // SAFETY: a prefetch touches nothing that a program could see, and no address makes it fail. The instruction is
    // part of every processor of this architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The same number, of which the compiler does not know that it is.
#[inline(always)]
pub(crate) fn unrelated(number: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut number = number;
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0:e} */", inout(reg) number, options(pure, nomem, nostack, preserves_flags));
        }
        number
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(number)
}
