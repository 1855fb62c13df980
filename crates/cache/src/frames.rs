//! The frames of a slice, in bitmaps: which are free, and which have no memory. Each search starts where the last search ended, so that
//! frames taken together tend to be neighbours and their I/O needs few segments. Frames at home are taken first.
//!
//! ```text
//!            add                    take
//!   ABSENT ────────▶ FREE ◀───────────────────▶ USED
//!      ▲              │            release       │
//!      │ begin_leaving│                          │ release, while the frame's range leaves
//!      └──────────────┴──────────────────────────┘
//! ```

use foldhash::{HashMap, HashMapExt};
use jericho_shm::Geometry;

pub(crate) struct Frames {
    /// A set bit is a free frame.
    free_words: Vec<u64>,
    /// A set bit is a frame that has no memory, or is about to lose it.
    absent_words: Vec<u64>,
    /// Words of the frames at home, which come first.
    home_words: usize,
    /// Where the next search begins, at home and elsewhere.
    cursors: [usize; 2],
    free: u32,
    free_at_home: u32,
    absent: u32,
    geometry: Geometry,
    /// Spill ranges that are given back, and how many of their frames are still used.
    leaving: HashMap<u32, u32>,
    /// Leaving ranges that became empty after the last `take_emptied`.
    emptied: Vec<u32>,
}

impl Frames {
    /// Returns the frames of a slice. Those at home are free, and the others have no memory.
    pub fn new(geometry: Geometry) -> Frames {
        let words = (geometry.frames as usize).div_ceil(64);
        let home_words = match geometry.spill_ranges() {
            0 => words,
            _ => geometry.home_frames as usize / 64,
        };
        let mut frames = Frames {
            free_words: vec![0; words],
            absent_words: vec![0; words],
            home_words,
            cursors: [0, home_words],
            free: 0,
            free_at_home: 0,
            absent: 0,
            geometry,
            leaving: HashMap::new(),
            emptied: vec![],
        };
        (0..geometry.home_frames).for_each(|frame| frames.set_free(frame));
        for frame in geometry.home_frames..geometry.frames {
            frames.set_absent(frame);
        }
        frames
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns how many frames have memory, and are not about to lose it.
    pub fn present(&self) -> u32 {
        self.geometry.frames - self.absent
    }

    pub fn is_absent(&self, frame: u32) -> bool {
        is_set(&self.absent_words, frame)
    }

    /// Takes a frame. The caller has checked that one is free.
    pub fn take(&mut self) -> u32 {
        assert!(self.free > 0, "no free frame");
        let (part, words) = match self.free_at_home {
            0 => (1, self.home_words..self.free_words.len()),
            _ => (0, 0..self.home_words),
        };
        let mut at = self.cursors[part];
        while self.free_words[at] == 0 {
            at = if at + 1 == words.end {
                words.start
            } else {
                at + 1
            };
        }
        self.cursors[part] = at;
        let frame = at as u32 * 64 + self.free_words[at].trailing_zeros();
        self.unset_free(frame);
        frame
    }

    /// Marks all frames but the `used` ones and those without memory as free, or as absent in a leaving range. Returns how many frames are in another
    /// state than before.
    pub fn rebuild(&mut self, used: impl IntoIterator<Item = u32>) -> u32 {
        let mut is_used = vec![0; self.free_words.len()];
        for frame in used {
            set(&mut is_used, frame);
        }
        let mut changed = 0;
        for frame in 0..self.geometry.frames {
            let was_free = is_set(&self.free_words, frame);
            if was_free {
                self.unset_free(frame);
            }
            let is_used = is_set(&is_used, frame) || self.is_absent(frame);
            if !is_used {
                self.put(frame);
            }
            changed += u32::from(was_free == is_used);
        }
        changed
    }

    /// Takes a frame back. Returns false, without effect, if the number is invalid, or the frame is free already or has no memory: a client
    /// has corrupted the table.
    pub fn release(&mut self, frame: u32) -> bool {
        if frame >= self.geometry.frames || is_set(&self.free_words, frame) || self.is_absent(frame)
        {
            return false;
        }
        self.put(frame);
        true
    }

    /// Marks the frames of a spill range as free. The range must have memory.
    pub fn add(&mut self, range: u32) {
        for frame in self.geometry.spill_range(range) {
            if self.is_absent(frame) {
                unset(&mut self.absent_words, frame);
                self.absent -= 1;
                self.set_free(frame);
            }
        }
    }

    /// Returns whether a spill range has memory, or at least one of its frames may have some.
    pub fn has_memory(&self, range: u32) -> bool {
        // All frames of a range are absent, or none is, unless it leaves.
        let first = self.geometry.spill_range(range).start;
        self.leaving.contains_key(&range) || !self.is_absent(first)
    }

    /// Begins to empty a spill range. Its free frames become absent now, and its used frames when the slice releases them.
    pub fn begin_leaving(&mut self, range: u32) {
        if self.leaving.contains_key(&range) {
            return;
        }
        let mut used = 0;
        for frame in self.geometry.spill_range(range) {
            if is_set(&self.free_words, frame) {
                self.unset_free(frame);
                self.set_absent(frame);
            } else {
                used += u32::from(!self.is_absent(frame));
            }
        }
        self.leaving.insert(range, used);
        if used == 0 {
            self.emptied.push(range);
        }
    }

    /// Returns the leaving range of a frame; `None` for a frame elsewhere.
    pub fn leaving_range_of(&self, frame: u32) -> Option<u32> {
        let range = self.geometry.range_of(frame);
        range.filter(|range| self.leaving.contains_key(range))
    }

    /// Returns whether a frame is in a range that is leaving.
    pub fn is_leaving(&self, frame: u32) -> bool {
        self.leaving_range_of(frame).is_some()
    }

    /// Returns how many frames of a leaving range are used; 0 for another range.
    pub fn used_of_leaving(&self, range: u32) -> u32 {
        self.leaving.get(&range).copied().unwrap_or(0)
    }

    /// Returns the leaving ranges that became empty since the last call. The caller may free their memory.
    pub fn take_emptied(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.emptied)
    }

    /// Has `take_emptied` return ranges once more.
    pub fn put_emptied_back(&mut self, ranges: &[u32]) {
        self.emptied.extend_from_slice(ranges);
    }

    /// Notes that an emptied range has lost its memory.
    pub fn end_leaving(&mut self, range: u32) {
        let used = self.leaving.remove(&range);
        assert_eq!(used, Some(0), "a page is in the range");
    }

    /// Makes a used frame free, or absent.
    fn put(&mut self, frame: u32) {
        let range = self.geometry.range_of(frame);
        let used = range.and_then(|range| self.leaving.get_mut(&range));
        let (Some(range), Some(used)) = (range, used) else {
            return self.set_free(frame);
        };
        *used -= 1;
        if *used == 0 {
            self.emptied.push(range);
        }
        self.set_absent(frame);
    }

    fn is_at_home(&self, frame: u32) -> bool {
        (frame as usize / 64) < self.home_words
    }

    fn set_free(&mut self, frame: u32) {
        set(&mut self.free_words, frame);
        self.free += 1;
        self.free_at_home += u32::from(self.is_at_home(frame));
    }

    fn unset_free(&mut self, frame: u32) {
        unset(&mut self.free_words, frame);
        self.free -= 1;
        self.free_at_home -= u32::from(self.is_at_home(frame));
    }

    fn set_absent(&mut self, frame: u32) {
        set(&mut self.absent_words, frame);
        self.absent += 1;
    }
}

fn bit(frame: u32) -> (usize, u64) {
    (frame as usize / 64, 1 << (frame % 64))
}

fn is_set(words: &[u64], frame: u32) -> bool {
    let (word, bit) = bit(frame);
    words.get(word).is_some_and(|word| word & bit != 0)
}

fn set(words: &mut [u64], frame: u32) {
    let (word, bit) = bit(frame);
    words[word] |= bit;
}

fn unset(words: &mut [u64], frame: u32) {
    let (word, bit) = bit(frame);
    words[word] &= !bit;
}

#[cfg(test)]
mod tests {
    use jericho_shm::{Geometry, SPILL_FRAMES};

    use super::Frames;

    const HOME: u32 = SPILL_FRAMES;

    /// Returns frames at home, and two spill ranges, of which the second one has 100 frames.
    fn spilling() -> (Frames, std::ops::Range<u32>) {
        let geometry = Geometry::new(HOME + SPILL_FRAMES + 100, HOME).unwrap();
        (Frames::new(geometry), geometry.spill_range(1))
    }

    #[test]
    fn every_frame_is_taken_once_and_neighbours_come_together() {
        let mut frames = Frames::new(Geometry::for_frames(130));
        let mut taken: Vec<u32> = (0..130).map(|_| frames.take()).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        assert_eq!(frames.free(), 0);
        for f in [7, 129, 64] {
            frames.release(f);
        }
        taken = (0..3).map(|_| frames.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [7, 64, 129]);
    }

    #[test]
    fn a_frame_that_is_free_or_none_at_all_is_not_taken_back() {
        let mut frames = Frames::new(Geometry::for_frames(100));
        let taken = frames.take();
        frames.release(taken);
        frames.release(taken);
        frames.release(100);
        frames.release(100_000);
        assert_eq!(frames.free(), 100);
    }

    #[test]
    fn frames_elsewhere_are_taken_when_they_have_memory_and_none_is_free_at_home() {
        let (mut frames, second) = spilling();
        assert_eq!((frames.free(), frames.present()), (HOME, HOME));
        assert!(!frames.release(HOME), "it has no memory");
        frames.add(1);
        assert_eq!([0, 1].map(|range| frames.has_memory(range)), [false, true]);
        assert_eq!((frames.free(), frames.present()), (HOME + 100, HOME + 100));
        let taken: Vec<u32> = (0..HOME + 100).map(|_| frames.take()).collect();
        let expected = (0..HOME).chain(second.clone());
        assert_eq!(taken, expected.collect::<Vec<_>>());
        let first_elsewhere = second.start;
        for frame in [first_elsewhere, 5] {
            assert!(frames.release(frame));
        }
        assert_eq!([frames.take(), frames.take()], [5, first_elsewhere]);
    }

    #[test]
    fn a_range_leaves_when_its_last_page_has_left_it() {
        let (mut frames, second) = spilling();
        frames.add(1);
        let taken: Vec<u32> = (0..HOME + 10).map(|_| frames.take()).collect();
        let last = taken.last().copied().unwrap();
        frames.begin_leaving(1);
        frames.begin_leaving(1);
        assert_eq!((frames.free(), frames.present()), (0, HOME + 10));
        assert_eq!(
            (frames.used_of_leaving(0), frames.used_of_leaving(1)),
            (0, 10)
        );
        for frame in &taken[HOME as usize..] {
            if *frame != last {
                assert!(frames.release(*frame));
                assert!(!frames.release(*frame), "it has left");
            }
        }
        // A repair does not bring frames of the range back.
        assert_eq!(frames.rebuild((0..HOME).chain([last])), 0);
        assert_eq!((frames.free(), frames.present()), (0, HOME + 1));
        assert!(frames.is_leaving(last) && frames.used_of_leaving(1) == 1);
        assert!(frames.take_emptied().is_empty());
        // It finds a frame that no page has.
        assert_eq!(frames.rebuild(0..HOME - 1), 2);
        assert_eq!((frames.free(), frames.present()), (1, HOME));
        assert_eq!(frames.take_emptied(), [1]);
        assert!(frames.take_emptied().is_empty() && frames.has_memory(1));
        frames.end_leaving(1);
        assert!(!frames.is_leaving(last) && !frames.has_memory(1));
        frames.add(1);
        assert_eq!((frames.free(), frames.present()), (101, HOME + 100));
        // A range without pages.
        frames.begin_leaving(1);
        assert_eq!(frames.take_emptied(), [1]);
        assert!(!frames.release(second.start));
    }
}
