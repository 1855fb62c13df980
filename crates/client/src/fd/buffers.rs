//! Checks which buffers of a program the library may use itself.

/// Lowest address that a buffer of a program can have. The kernel fails with EFAULT for a lower one.
pub const LOWEST_ADDRESS: usize = 4096;
/// Most bytes that the kernel moves in one call.
const BYTES_MAX: usize = 0x7fff_f000;
/// Most parts of a vectored call.
pub(super) const PARTS_MAX: usize = 1024;

#[inline]
pub(super) fn is_fit(buffer: &[u8]) -> bool {
    buffer.as_ptr().addr() >= LOWEST_ADDRESS && !buffer.is_empty() && buffer.len() <= BYTES_MAX
}

/// Returns the bytes of a vectored call; `None` when the kernel would not move them all.
pub(super) fn total(lens: impl Iterator<Item = usize>) -> Option<usize> {
    let mut total = 0usize;
    for len in lens {
        total = total.checked_add(len).filter(|n| *n <= BYTES_MAX)?;
    }
    Some(total)
}
