//! Reads and writes of cached pages.

use jericho_format::PAGE_BYTES;
use jericho_shm::{Key, SliceMemory};

const PAGE: usize = PAGE_BYTES as usize;

/// Splits a byte range into (page, offset in page, length) pieces.
pub(crate) fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize)> {
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
pub(crate) fn is_in_page(at: u64, len: usize) -> bool {
    (at % PAGE_BYTES) as usize + len <= PAGE
}

/// Copies bytes `[offset, offset + out.len())` of an object as far as its pages hit. Returns the number of bytes copied. Each
/// page's bytes are of one instant.
#[inline]
pub fn read(memory: &SliceMemory, object: u64, offset: u64, out: &mut [u8], epoch: u8) -> usize {
    let mut done = 0;
    for (page, within, len) in pieces(offset, out.len()) {
        let out = &mut out[done..done + len];
        if memory
            .read(Key::new(object, page), within, out, epoch)
            .is_err()
        {
            break;
        }
        done += len;
    }
    done
}

/// Writes `data` at `offset` of an object as far as its pages are cached and have space reserved. Returns the number of bytes
/// written. Calls `dirtied(first, count)` for pages that were clean before, neighbours together. The slice must learn of them
/// before the write is acknowledged.
#[inline]
pub fn write(
    memory: &SliceMemory,
    object: u64,
    offset: u64,
    data: &[u8],
    owner: u16,
    epoch: u8,
    mut dirtied: impl FnMut(u64, u32),
) -> usize {
    let (mut done, mut first, mut count) = (0, 0, 0u32);
    for (page, within, len) in pieces(offset, data.len()) {
        if done + len < data.len() {
            memory.fetch_page(Key::new(object, page + 1));
        }
        let data = &data[done..done + len];
        let Ok(was_clean) = memory.write(Key::new(object, page), within, data, owner, epoch) else {
            break;
        };
        done += len;
        if was_clean {
            if count > 0 && first + u64::from(count) == page {
                count += 1;
            } else {
                if count > 0 {
                    dirtied(first, count);
                }
                (first, count) = (page, 1);
            }
        }
    }
    if count > 0 {
        dirtied(first, count);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once_and_end_at_page_borders() {
        let got: Vec<_> = pieces(4000, 8300).collect();
        assert_eq!(got, [(0, 4000, 96), (1, 0, 4096), (2, 0, 4096), (3, 0, 12)]);
        assert_eq!(pieces(4096, 0).count(), 0);
    }
}
