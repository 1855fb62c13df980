//! Checksums of the data of files: values of table `sums`, and changes of them in a batch. docs/formats/volume.md describes the bytes.
//!
//! A row has the checksums of a *group* of pages of a file. Its value is a sequence of runs of pages in order, each followed by the
//! checksums of its pages. A change has the same form, and may also take pages out.

use crate::PAGE_BYTES;

/// Number of neighbouring pages of a file whose checksums are in one row.
pub const GROUP_PAGES: u64 = 256;
const GROUP: usize = GROUP_PAGES as usize;

/// Kinds of runs.
mod kind {
    /// Only in changes: the pages have no data any more.
    pub const GONE: u8 = 0;
    /// The checksum of each page follows.
    pub const SUMS: u8 = 1;
    /// The pages have data without checksums.
    pub const BARE: u8 = 2;
}

/// What a group has of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sum {
    /// Nothing: the page has no data.
    #[default]
    None,
    /// The checksum of its block.
    Of(u32),
    /// The page has data, and its checksum was given up.
    Bare,
}

impl Sum {
    fn kind(self) -> u8 {
        match self {
            Sum::None => kind::GONE,
            Sum::Of(_) => kind::SUMS,
            Sum::Bare => kind::BARE,
        }
    }
}

/// Returns the checksum of the contents of a block.
pub fn checksum(block: &[u8]) -> u32 {
    debug_assert_eq!(block.len() as u64, PAGE_BYTES);
    crc32c::crc32c(block)
}

/// Splits a page number into the number of its group and its place there.
pub fn place_of(page: u64) -> (u64, usize) {
    (page / GROUP_PAGES, (page % GROUP_PAGES) as usize)
}

/// The checksums of a group of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group([Sum; GROUP]);

impl Default for Group {
    fn default() -> Self {
        Group([Sum::None; GROUP])
    }
}

impl Group {
    /// Returns the group of a row. Returns `None` if a correct writer cannot have written the bytes.
    pub fn decode(bytes: &[u8]) -> Option<Group> {
        let mut group = Group::default();
        let is_row = group.apply_runs(bytes)? != Form::HasGone;
        is_row.then_some(group)
    }

    /// Returns the value of the row, which is empty if no page has data.
    pub fn encode(&self) -> Vec<u8> {
        let all = self.0.iter().copied().enumerate();
        encode(all.filter(|(_, sum)| *sum != Sum::None))
    }

    /// Applies a change. Returns `None` if the bytes make no sense; the group is then changed in part.
    pub fn apply(&mut self, change: &[u8]) -> Option<()> {
        self.apply_runs(change).map(drop)
    }

    /// Returns what the group has of the page at a place.
    pub fn get(&self, at: usize) -> Sum {
        self.0[at]
    }

    /// Sets what the group has of the page at a place.
    pub fn set(&mut self, at: usize, sum: Sum) {
        self.0[at] = sum;
    }

    /// Returns the places of the pages that have data, and what the group has of them.
    pub fn pages(&self) -> impl Iterator<Item = (usize, Sum)> + '_ {
        let all = self.0.iter().copied().enumerate();
        all.filter(|(_, sum)| *sum != Sum::None)
    }

    fn apply_runs(&mut self, mut bytes: &[u8]) -> Option<Form> {
        let mut form = Form::Row;
        let mut next = 0;
        while !bytes.is_empty() {
            let ([first, last, run, reserved], rest) = bytes.split_first_chunk::<4>()?;
            let (first, last) = (usize::from(*first), usize::from(*last));
            if first < next || last < first || *reserved != 0 {
                return None;
            }
            bytes = rest;
            for at in first..=last {
                self.0[at] = match *run {
                    kind::GONE => Sum::None,
                    kind::BARE => Sum::Bare,
                    kind::SUMS => {
                        let (sum, rest) = bytes.split_first_chunk::<4>()?;
                        bytes = rest;
                        Sum::Of(u32::from_le_bytes(*sum))
                    }
                    _ => return None,
                };
            }
            if *run == kind::GONE {
                form = Form::HasGone;
            }
            next = last + 1;
        }
        Some(form)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Row,
    /// Only a change has such a run.
    HasGone,
}

/// Returns the bytes of a change: the new state of pages, by their places in the group, in order.
pub fn encode(pages: impl Iterator<Item = (usize, Sum)>) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::new();
    // The start of the last run in `out`, and the place after it.
    let mut run: Option<(usize, usize, u8)> = None;
    for (at, sum) in pages {
        run = match run {
            Some((start, next, kind)) if next == at && kind == sum.kind() => {
                out[start + 1] = at as u8;
                Some((start, at + 1, kind))
            }
            _ => {
                out.extend_from_slice(&[at as u8, at as u8, sum.kind(), 0]);
                Some((out.len() - 4, at + 1, sum.kind()))
            }
        };
        if let Sum::Of(sum) = sum {
            out.extend_from_slice(&sum.to_le_bytes());
        }
    }
    out
}

/// The change that removes the row of a group.
pub const WHOLE_GONE: [u8; 4] = [0, (GROUP - 1) as u8, kind::GONE, 0];

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Group {
        let mut group = Group::default();
        for at in (3..9).chain(20..21).chain(250..256) {
            group.set(at, Sum::Of(at as u32 * 77));
        }
        group.set(9, Sum::Bare);
        group.set(21, Sum::Bare);
        group
    }

    #[test]
    fn a_group_comes_back_as_it_was() {
        let group = sample();
        let bytes = group.encode();
        assert_eq!(bytes.len(), 5 * 4 + 13 * 4, "five runs and 13 checksums");
        assert_eq!(Group::decode(&bytes), Some(group));
        assert_eq!(Group::default().encode(), []);
    }

    #[test]
    fn a_row_of_one_page_has_eight_bytes() {
        let change = encode([(255, Sum::Of(1))].into_iter());
        assert_eq!(change, [255, 255, 1, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn a_change_replaces_adds_and_removes() {
        let mut group = sample();
        let change = [(4, Sum::None), (9, Sum::Of(9)), (100, Sum::Bare)];
        group.apply(&encode(change.into_iter())).unwrap();
        let mut expected = sample();
        change
            .into_iter()
            .for_each(|(at, sum)| expected.set(at, sum));
        assert_eq!(group, expected);
        group.apply(&WHOLE_GONE).unwrap();
        assert_eq!(group, Group::default());
    }

    #[test]
    fn rows_that_make_no_sense_are_refused() {
        let good = sample().encode();
        for end in 0..good.len() {
            if let Some(group) = Group::decode(&good[..end]) {
                assert_ne!(group, sample(), "{end} bytes");
            }
        }
        let bad: [&[u8]; 6] = [
            &[1],
            &[5, 4, 2, 0],
            &[5, 5, 3, 0],
            &[5, 5, 2, 1],
            &[5, 6, 2, 0, 6, 7, 2, 0],
            &[5, 5, 1, 0, 1, 2, 3],
        ];
        for bytes in bad {
            assert_eq!(Group::decode(bytes), None, "{bytes:?}");
        }
        assert_eq!(Group::decode(&WHOLE_GONE), None, "only in changes");
    }
}
