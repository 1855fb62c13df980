//! Tells which slice holds which pages of a file.

use std::ops::Range;

use jericho_format::PAGE_BYTES;

use crate::types::SliceId;

/// Tells which slice caches and stores each page of a file: one slice holds all of them. `File::layout` returns a copy. The file
/// may move at any time; then a get in the old slice returns `Moved`, and the caller takes the layout again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    home: SliceId,
}

impl Layout {
    /// Returns the layout of a file whose pages are all in one slice.
    pub fn in_slice(home: SliceId) -> Layout {
        Layout { home }
    }

    /// Returns the home slice: the one in which the file was placed or to which it was moved.
    pub fn home(self) -> SliceId {
        self.home
    }

    /// Returns the slice of a page.
    #[inline]
    pub fn slice_of(self, _page: u64) -> SliceId {
        self.home
    }

    /// Returns every slice that may hold pages of the file, each once.
    pub fn slices(self) -> impl Iterator<Item = SliceId> {
        std::iter::once(self.home)
    }

    /// Returns the longest run of pages from the start of `pages` that is in one slice, and that slice. A get asks for pages of
    /// one run.
    #[inline]
    pub fn first_run(self, pages: Range<u64>) -> (SliceId, Range<u64>) {
        (self.slice_of(pages.start), pages)
    }

    /// Returns the runs of `pages` in order, each with its slice.
    #[inline]
    pub fn runs(self, pages: Range<u64>) -> impl Iterator<Item = (SliceId, Range<u64>)> {
        split(pages, move |pages| self.first_run(pages))
    }

    /// Does what `runs` does for a range of bytes: returns the parts of the range in order, each with its slice.
    #[inline]
    pub fn parts(self, bytes: Range<u64>) -> impl Iterator<Item = (SliceId, Range<u64>)> {
        split_bytes(bytes, move |pages| self.first_run(pages))
    }
}

/// Splits `pages` into runs. `first_run` returns the first run of a range.
#[inline]
fn split(
    pages: Range<u64>,
    first_run: impl Fn(Range<u64>) -> (SliceId, Range<u64>),
) -> impl Iterator<Item = (SliceId, Range<u64>)> {
    let mut rest = pages;
    std::iter::from_fn(move || {
        (!rest.is_empty()).then(|| {
            let (slice, run) = first_run(rest.clone());
            rest.start = run.end;
            (slice, run)
        })
    })
}

/// Splits `bytes` at the ends of runs. `first_run` returns the first run of a range of pages.
#[inline]
fn split_bytes(
    bytes: Range<u64>,
    first_run: impl Fn(Range<u64>) -> (SliceId, Range<u64>),
) -> impl Iterator<Item = (SliceId, Range<u64>)> {
    let pages = match bytes.is_empty() {
        true => 0..0,
        false => bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES),
    };
    split(pages, first_run).map(move |(slice, pages)| {
        let start = bytes.start.max(pages.start * PAGE_BYTES);
        let end = bytes.end.min(pages.end.saturating_mul(PAGE_BYTES));
        (slice, start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_one_slice_has_one_run_and_one_part() {
        let layout = Layout::in_slice(3);
        assert_eq!(layout.home(), 3);
        assert_eq!(layout.slices().collect::<Vec<_>>(), [3]);
        assert_eq!((layout.slice_of(0), layout.slice_of(u64::MAX)), (3, 3));
        assert_eq!(layout.first_run(5..90), (3, 5..90));
        assert_eq!(layout.runs(5..90).collect::<Vec<_>>(), [(3, 5..90)]);
        assert_eq!(layout.parts(1..9000).collect::<Vec<_>>(), [(3, 1..9000)]);
        let last = u64::MAX - 1..u64::MAX;
        assert_eq!(layout.parts(last.clone()).collect::<Vec<_>>(), [(3, last)]);
    }

    const SLICES: u64 = 3;
    const STRIPE: u64 = 16;

    /// Returns the slice of a page of a file whose stripes take turns.
    fn striped(page: u64) -> SliceId {
        (page / STRIPE % SLICES) as SliceId
    }

    fn first_striped(pages: Range<u64>) -> (SliceId, Range<u64>) {
        let end = (pages.start / STRIPE + 1) * STRIPE;
        (striped(pages.start), pages.start..end.min(pages.end))
    }

    #[test]
    fn a_range_over_several_runs_is_split_at_their_ends_in_order() {
        let runs = |pages| split(pages, first_striped).collect::<Vec<_>>();
        assert_eq!(runs(3..16), [(0, 3..16)]);
        assert_eq!(runs(16..17), [(1, 16..17)]);
        assert_eq!(
            runs(15..50),
            [(0, 15..16), (1, 16..32), (2, 32..48), (0, 48..50)]
        );
        assert_eq!(runs(16..16), []);
        for (start, end) in (0..100).flat_map(|start| (start..100).map(move |end| (start, end))) {
            // Each page occurs once, in order, and with its slice.
            let pages = runs(start..end)
                .into_iter()
                .flat_map(|(slice, pages)| pages.map(move |page| (slice, page)));
            assert!(pages.eq((start..end).map(|page| (striped(page), page))));
        }
    }

    #[test]
    fn bytes_over_several_runs_are_split_at_their_ends_and_keep_their_own() {
        let parts = |bytes| split_bytes(bytes, first_striped).collect::<Vec<_>>();
        let run = STRIPE * PAGE_BYTES;
        assert_eq!(parts(run - 1..run), [(0, run - 1..run)]);
        assert_eq!(parts(run..run + 1), [(1, run..run + 1)]);
        assert_eq!(
            parts(100..2 * run + 1),
            [(0, 100..run), (1, run..2 * run), (2, 2 * run..2 * run + 1)]
        );
        assert_eq!(parts(run + 5..run + 5), []);
        let (end, last) = (u64::MAX, u64::MAX - u64::MAX % run);
        let slices = [last - 1, last].map(|byte| striped(byte / PAGE_BYTES));
        assert_eq!(
            parts(last - 9..end),
            [(slices[0], last - 9..last), (slices[1], last..end)]
        );
    }

    #[test]
    fn nothing_has_no_run_and_no_part() {
        let layout = Layout::in_slice(0);
        assert_eq!(layout.runs(7..7).next(), None);
        assert_eq!(layout.parts(4097..4097).next(), None);
    }

    #[test]
    fn a_layout_changes_when_the_file_moves() {
        assert_ne!(Layout::in_slice(0), Layout::in_slice(1));
    }
}
