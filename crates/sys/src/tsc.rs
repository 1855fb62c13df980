//! The time stamp counter of the processor.

/// Returns the counter. `None` on a processor without a counter that programs may read. It counts at a constant rate on every processor of
/// the last fifteen years, whatever the clock of the CPU is (Intel SDM, volume 3, *Invariant TSC*).
#[cfg(target_arch = "x86_64")]
pub fn now() -> Option<u64> {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it (prctl(2), PR_SET_TSC, is per process and not used here).
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

/// Returns the counter: `None`, because this processor has none that is used here.
#[cfg(not(target_arch = "x86_64"))]
pub fn now() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn the_counter_grows() {
        let first = super::now();
        assert!(super::now() >= first);
    }
}
