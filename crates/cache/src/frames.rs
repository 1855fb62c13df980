//! Which frames are free: a bitmap, searched from where the last search ended, so that frames taken
//! together tend to be neighbours and their I/O needs few segments.

pub(crate) struct Frames {
    /// A set bit is a free frame.
    words: Vec<u64>,
    cursor: usize,
    free: u32,
}

impl Frames {
    pub fn new(frames: u32) -> Frames {
        let mut words = vec![u64::MAX; (frames as usize).div_ceil(64)];
        if !frames.is_multiple_of(64) {
            *words.last_mut().expect("at least one frame") = (1 << (frames % 64)) - 1;
        }
        Frames {
            words,
            cursor: 0,
            free: frames,
        }
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    /// Takes a frame; the caller has seen that one is free.
    pub fn take(&mut self) -> u32 {
        assert!(self.free > 0, "no free frame");
        while self.words[self.cursor] == 0 {
            self.cursor = (self.cursor + 1) % self.words.len();
        }
        let bit = self.words[self.cursor].trailing_zeros();
        self.words[self.cursor] &= !(1 << bit);
        self.free -= 1;
        self.cursor as u32 * 64 + bit
    }

    pub fn give(&mut self, frame: u32) {
        let (word, bit) = (frame as usize / 64, 1 << (frame % 64));
        assert!(self.words[word] & bit == 0, "frame {frame} was freed twice");
        self.words[word] |= bit;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::Frames;

    #[test]
    fn every_frame_is_taken_once_and_neighbours_come_together() {
        let mut frames = Frames::new(130);
        let mut taken: Vec<u32> = (0..130).map(|_| frames.take()).collect();
        assert_eq!(taken, (0..130).collect::<Vec<_>>());
        assert_eq!(frames.free(), 0);
        for f in [7, 129, 64] {
            frames.give(f);
        }
        taken = (0..3).map(|_| frames.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [7, 64, 129]);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_a_bug_that_stops_here() {
        let mut frames = Frames::new(4);
        frames.give(2);
    }
}
