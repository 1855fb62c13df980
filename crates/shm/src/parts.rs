//! A range of bytes, cut at the borders of pages: the pieces, the parts of a write that they come from, and the buffers of a read
//! that they go to.

use std::io::{IoSlice, IoSliceMut};

use jericho_format::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;

/// Splits a byte range into (page, offset in page, length) pieces.
pub fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == len {
            return None;
        }
        let byte = offset + at as u64;
        let within = (byte % PAGE_BYTES) as usize;
        let piece = (PAGE - within).min(len - at);
        at += piece;
        Some((byte / PAGE_BYTES, within, piece))
    })
}

/// Returns whether the bytes are within one page.
#[inline]
pub fn is_in_page(at: u64, len: usize) -> bool {
    (at % PAGE_BYTES) as usize + len <= PAGE
}

/// The bytes of a write.
#[derive(Clone, Copy)]
pub struct SourceParts<'a, 'b> {
    parts: &'a [IoSlice<'b>],
    /// Bytes of the first part that are used already.
    taken: usize,
}

impl<'a, 'b> SourceParts<'a, 'b> {
    /// Returns the bytes of all `parts`, in order.
    pub fn new(parts: &'a [IoSlice<'b>]) -> SourceParts<'a, 'b> {
        SourceParts { parts, taken: 0 }
    }

    /// Calls `put` with the next `len` bytes, at most a page and no more than remain. Copies them together first if they lie in
    /// several parts.
    #[inline]
    pub fn next<T>(&mut self, len: usize, put: impl FnOnce(&[u8]) -> T) -> T {
        while self
            .parts
            .first()
            .is_some_and(|part| self.taken == part.len())
        {
            self.parts = &self.parts[1..];
            self.taken = 0;
        }
        match self.parts.first() {
            Some(part) if part.len() - self.taken >= len => {
                let bytes = &part[self.taken..self.taken + len];
                self.taken += len;
                put(bytes)
            }
            _ => self.next_gathered(len, put),
        }
    }

    /// Does the same as `next` for bytes in several parts. Never inlined, because it has a page on its stack: a signal handler may
    /// have a small stack, and its write from one part must not need that page.
    #[inline(never)]
    fn next_gathered<T>(&mut self, len: usize, put: impl FnOnce(&[u8]) -> T) -> T {
        let mut gathered = [0; PAGE];
        self.gather(&mut gathered[..len]);
        put(&gathered[..len])
    }

    #[cold]
    fn gather(&mut self, mut out: &mut [u8]) {
        while let (Some(part), false) = (self.parts.first(), out.is_empty()) {
            let len = (part.len() - self.taken).min(out.len());
            let (head, rest) = std::mem::take(&mut out).split_at_mut(len);
            head.copy_from_slice(&part[self.taken..self.taken + len]);
            out = rest;
            self.taken += len;
            if self.taken == part.len() {
                self.parts = &self.parts[1..];
                self.taken = 0;
            }
        }
    }
}

/// The buffers of a read, filled piece by piece.
pub struct TargetParts<'a, 'b> {
    parts: &'a mut [IoSliceMut<'b>],
    /// Part to which the next bytes belong, and the bytes of it that are filled.
    part: usize,
    filled: usize,
}

impl<'a, 'b> TargetParts<'a, 'b> {
    /// Returns the buffers of all `parts`, in order.
    pub fn new(parts: &'a mut [IoSliceMut<'b>]) -> TargetParts<'a, 'b> {
        TargetParts {
            parts,
            part: 0,
            filled: 0,
        }
    }

    /// Calls `get` with a buffer for the next `len` bytes, at most a page. If the bytes belong to several parts, copies them
    /// there afterwards.
    pub fn next<T, E>(
        &mut self,
        len: usize,
        get: impl FnOnce(&mut [u8]) -> Result<T, E>,
    ) -> Result<T, E> {
        while (self.parts.get(self.part)).is_some_and(|part| self.filled == part.len()) {
            self.part += 1;
            self.filled = 0;
        }
        match self.parts.get_mut(self.part) {
            Some(part) if part.len() - self.filled >= len => {
                let result = get(&mut part[self.filled..self.filled + len])?;
                self.filled += len;
                Ok(result)
            }
            _ => self.next_scattered(len, get),
        }
    }

    /// Does the same as `next` for bytes in several parts. Never inlined, because it has a page on its stack: a signal handler may
    /// have a small stack, and its read into one part must not need that page.
    #[inline(never)]
    fn next_scattered<T, E>(
        &mut self,
        len: usize,
        get: impl FnOnce(&mut [u8]) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut gathered = [0; PAGE];
        let result = get(&mut gathered[..len])?;
        self.scatter(&gathered[..len]);
        Ok(result)
    }

    fn scatter(&mut self, mut bytes: &[u8]) {
        while let (Some(part), false) = (self.parts.get_mut(self.part), bytes.is_empty()) {
            let (head, rest) = bytes.split_at((part.len() - self.filled).min(bytes.len()));
            part[self.filled..self.filled + head.len()].copy_from_slice(head);
            self.filled += head.len();
            bytes = rest;
            if self.filled == part.len() {
                self.part += 1;
                self.filled = 0;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once_and_end_at_page_borders() {
        let got: Vec<_> = pieces(4000, 8300).collect();
        assert_eq!(got, [(0, 4000, 96), (1, 0, 4096), (2, 0, 4096), (3, 0, 12)]);
        assert_eq!(pieces(4096, 0).count(), 0);
    }

    #[test]
    fn a_read_fills_its_parts_in_order() {
        let bytes: Vec<u8> = (0..200).collect();
        for len in [1, 8, 40, 100, 200] {
            let mut parts = [0, 7, 0, 43, 1, 149, 0].map(|len| vec![0; len]);
            let mut slices = parts.each_mut().map(|part| IoSliceMut::new(part));
            let mut target = TargetParts::new(&mut slices);
            for piece in bytes.chunks(len) {
                let get = |out: &mut [u8]| {
                    out.copy_from_slice(piece);
                    Ok::<(), ()>(())
                };
                target.next(len, get).unwrap();
            }
            assert_eq!(parts.concat(), bytes, "by {len}");
        }
    }

    #[test]
    fn a_write_takes_its_parts_in_order() {
        let bytes: Vec<u8> = (0..200).collect();
        let cuts = [0, 0, 7, 50, 50, 51, 200, 200];
        let parts: Vec<_> = cuts
            .windows(2)
            .map(|w| IoSlice::new(&bytes[w[0]..w[1]]))
            .collect();
        for len in [1, 8, 40, 100, 200] {
            let (mut source, mut out) = (SourceParts::new(&parts), vec![]);
            for _ in 0..bytes.len() / len {
                source.next(len, |piece| out.extend_from_slice(piece));
            }
            assert_eq!(out, bytes, "by {len}");
        }
    }
}
