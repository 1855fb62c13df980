//! Memory that direct I/O accepts.

use crate::BLOCK_BYTES;

/// A zeroed buffer that begins at a multiple of `BLOCK_BYTES`, so that O_DIRECT transfers need no copy.
#[derive(Debug)]
pub struct AlignedBuffer {
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Creates a buffer of `len` bytes.
    pub fn new(len: usize) -> AlignedBuffer {
        let align = BLOCK_BYTES as usize;
        let storage = vec![0u8; len + align];
        // A Vec moves its storage only when it grows, and this one never grows.
        let start = storage.as_ptr().align_offset(align).min(align);
        AlignedBuffer {
            storage,
            start,
            len,
        }
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.len]
    }

    /// Returns the bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// Returns whether direct I/O accepts the buffer without a copy.
pub(crate) fn is_aligned(buffer: &[u8]) -> bool {
    (buffer.as_ptr() as usize).is_multiple_of(BLOCK_BYTES as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_has_the_requested_length() {
        for len in [0, 1, 4096, 12_288, 1 << 20] {
            let mut buffer = AlignedBuffer::new(len);
            assert!(is_aligned(buffer.as_slice()));
            assert_eq!(buffer.as_mut_slice().len(), len);
        }
    }
}
