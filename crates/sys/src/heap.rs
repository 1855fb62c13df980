//! The heap of the process: malloc(3) of the GNU C library.
//!
//! The library has several *arenas*, so that threads allocate side by side. An arena keeps what is freed in it. So the process holds the
//! sum of what each arena has ever needed at once, also when most of it is free.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Minimum time between two returns of memory. Each visits all free blocks of all arenas, and holds the lock of an arena meanwhile, for some
/// milliseconds. A thread of that arena may wait for so long for a block that it does not have at hand.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns freed memory to the kernel, unless that was done in the last second. Call it after work that has freed much memory.
pub fn give_back() {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    // Milliseconds since `BEGUN`.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = BEGUN.get_or_init(Instant::now).elapsed().as_millis() as u64;
    let next = NEXT.load(Ordering::Relaxed);
    let later = now + PAUSE.as_millis() as u64;
    // Relaxed: the number orders nothing. One of several threads wins.
    if now >= next
        && NEXT
            .compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    {
        trim();
    }
}

#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: the call may be made at any time in any thread; it touches only free memory.
    unsafe { libc::malloc_trim(0) };
}

/// Other C libraries return memory themselves.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: usize = 16 << 10;
    const BLOCKS: usize = 4096;

    /// Returns the process's private memory in KiB.
    fn private_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let number = line.and_then(|l| l.split_whitespace().next());
        number.unwrap().parse().unwrap()
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn freed_memory_returns_to_the_kernel() {
        let mut blocks = vec![vec![1u8; BLOCK_BYTES]; BLOCKS];
        // Every other block stays, so that no free part is at an end of the heap, where the library returns it itself.
        let mut kept = Vec::new();
        while let (Some(block), Some(_freed)) = (blocks.pop(), blocks.pop()) {
            kept.push(block);
        }
        let before = private_kib();
        trim();
        let freed_kib = (BLOCK_BYTES * BLOCKS / 2 / 1024) as u64;
        let after = private_kib();
        assert!(
            after + freed_kib / 2 < before,
            "{before} KiB before, {after} KiB after"
        );
        assert_eq!(kept.len(), BLOCKS / 2);
    }
}
