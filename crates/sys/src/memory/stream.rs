//! Loops that do nothing but access memory, to measure it: streams of reads, streams of writes, and a chain of dependent reads.
//!
//! Each accesses the bytes as [`Mapping::copy_out`] does, through raw pointers and without a reference. A caller that wants defined
//! contents accesses bytes that no one else writes.

use std::ops::Range;

use super::{Mapping, check_bounds};

/// Bytes of one step of a stream. The machine reads or writes each as a few wide words.
const STEP_BYTES: usize = 64;

/// How [`Mapping::stream_write`] stores.
pub const STREAM_WRITES: &str = match cfg!(target_arch = "x86_64") {
    true => "non-temporal stores",
    false => "ordinary stores",
};

impl Mapping {
    /// Reads a byte range once, in ascending order, and returns a sum of its words, so that no read can be left out. Reads whole steps of
    /// 64 bytes only. Panics when the range is out of bounds.
    pub fn stream_read(&self, range: Range<usize>) -> u64 {
        let len = range.end.saturating_sub(range.start) / STEP_BYTES * STEP_BYTES;
        check_bounds(range.start, len, self.len);
        let mut sums = [0u64; STEP_BYTES / 8];
        for at in (range.start..range.start + len).step_by(STEP_BYTES) {
            // SAFETY: the step lies inside the mapping (checked), which lives as long as `self`. The read needs no alignment, and each
            // bit pattern is a valid integer.
            let words = unsafe {
                let first = self.base.as_ptr().add(at);
                first.cast::<[u64; STEP_BYTES / 8]>().read_unaligned()
            };
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum = sum.wrapping_add(word);
            }
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    }

    /// Writes `byte` to a byte range, in ascending order and in whole steps of 64 bytes, with the stores of [`STREAM_WRITES`]. On x86-64
    /// they go past the caches, so no line is read before it is written. The start of the range must be a multiple of 64. Panics when it is
    /// not, when the range is out of bounds, or when the mapping is read-only.
    pub fn stream_write(&self, range: Range<usize>, byte: u8) {
        let len = range.end.saturating_sub(range.start) / STEP_BYTES * STEP_BYTES;
        check_bounds(range.start, len, self.writable_len);
        assert!(range.start.is_multiple_of(STEP_BYTES), "a step is split");
        for at in (range.start..range.start + len).step_by(STEP_BYTES) {
            // SAFETY: the step lies inside the mapping (checked), is writable (`writable_len`), and begins at a multiple of 64, because
            // the mapping begins at a page.
            unsafe { write_step(self.base.as_ptr().add(at), byte) };
        }
        end_writes();
    }

    /// Follows a chain for `steps` steps from the byte offset `first`, and returns the last offset. At each offset of the chain, the bytes
    /// hold the next offset, as a native-endian `u64`. A read begins when the one before has ended, so the time of a step is the latency
    /// of the memory. Panics at an offset that is out of bounds.
    pub fn chase(&self, first: usize, steps: u64) -> usize {
        let mut at = first;
        for _ in 0..steps {
            check_bounds(at, size_of::<u64>(), self.len);
            // SAFETY: the word lies inside the mapping (checked), which lives as long as `self`. The read needs no alignment, and each bit
            // pattern is a valid integer.
            let next = unsafe { self.base.as_ptr().add(at).cast::<u64>().read_unaligned() };
            at = next as usize;
        }
        at
    }
}

/// Stores `byte` in 64 bytes past the caches.
///
/// # Safety
/// `to` is valid for writes of 64 bytes and a multiple of 16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn write_step(to: *mut u8, byte: u8) {
    use std::arch::x86_64::{__m128i, _mm_set1_epi8, _mm_stream_si128};
    // SAFETY: SSE2 is part of x86-64.
    let wide = unsafe { _mm_set1_epi8(byte.cast_signed()) };
    for part in 0..STEP_BYTES / size_of::<__m128i>() {
        // SAFETY: as above; the caller vouches for 64 bytes and the alignment, and `end_writes` orders the stores.
        unsafe { _mm_stream_si128(to.cast::<__m128i>().add(part), wide) };
    }
}

/// Makes the stores of `write_step` visible before later ones.
#[cfg(target_arch = "x86_64")]
fn end_writes() {
    // SAFETY: SSE is part of x86-64; a fence changes no memory.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// Stores `byte` in 64 bytes.
///
/// # Safety
/// `to` is valid for writes of 64 bytes.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn write_step(to: *mut u8, byte: u8) {
    // SAFETY: the caller vouches for 64 bytes.
    unsafe { to.write_bytes(byte, STEP_BYTES) };
}

#[cfg(not(target_arch = "x86_64"))]
fn end_writes() {}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping() -> Mapping {
        Mapping::create("stream", 64 << 10, false).unwrap()
    }

    #[test]
    fn a_stream_of_reads_sums_exactly_the_words_of_its_range() {
        let mapping = mapping();
        for at in (0..mapping.len()).step_by(8) {
            mapping.copy_in(at, &(at as u64).to_ne_bytes());
        }
        let sum = |range: Range<usize>| range.step_by(8).map(|at| at as u64).sum::<u64>();
        for range in [0..mapping.len(), 64..4096, 8..72, 128..128] {
            assert_eq!(mapping.stream_read(range.clone()), sum(range.clone()));
        }
        assert_eq!(mapping.stream_read(0..100), sum(0..64), "whole steps only");
    }

    #[test]
    fn a_stream_of_writes_changes_exactly_its_range() {
        let mapping = mapping();
        mapping.stream_write(64..4096 + 10, 7);
        let mut bytes = vec![0; 8192];
        mapping.copy_out(0, &mut bytes);
        let expected = |at: usize| if (64..4096).contains(&at) { 7 } else { 0 };
        assert!((0..8192).all(|at| bytes[at] == expected(at)));
    }

    #[test]
    fn a_chase_follows_the_chain() {
        let mapping = mapping();
        for (at, next) in [(0, 4096u64), (4096, 24), (24, 0)] {
            mapping.copy_in(at, &next.to_ne_bytes());
        }
        let offsets = [0, 1, 2, 3, 4].map(|steps| mapping.chase(0, steps));
        assert_eq!(offsets, [0, 4096, 24, 0, 4096]);
    }

    #[test]
    fn no_loop_leaves_the_mapping() {
        let mapping = mapping();
        let len = mapping.len();
        mapping.copy_in(0, &(len as u64 - 4).to_ne_bytes());
        let panics = |access: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err()
        };
        assert!(panics(&|| assert_eq!(mapping.chase(0, 2), 0)));
        assert!(panics(&|| assert_eq!(mapping.stream_read(0..len + 64), 0)));
        assert!(panics(&|| mapping.stream_write(len - 64..len + 64, 1)));
        assert!(panics(&|| mapping.stream_write(8..72, 1)), "not aligned");
    }
}
