//! The free frames, in a bitmap. Each search starts where the last search ended, so that frames taken together tend to be
//! neighbours and their I/O needs few segments.

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

    /// Takes a frame. The caller has checked that one is free.
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

    /// Marks all frames but the `used` ones as free.
    pub fn rebuild(&mut self, frames: u32, used: impl IntoIterator<Item = u32>) {
        *self = Frames::new(frames);
        for frame in used {
            let (word, bit) = (frame as usize / 64, 1 << (frame % 64));
            if self.words[word] & bit != 0 {
                self.words[word] &= !bit;
                self.free -= 1;
            }
        }
    }

    /// Takes a frame back. Returns false, without effect, if the number is invalid or the frame is free already: a client has
    /// corrupted the table.
    pub fn release(&mut self, frame: u32) -> bool {
        let bit = 1 << (frame % 64);
        match self.words.get_mut(frame as usize / 64) {
            Some(word) if *word & bit == 0 => {
                *word |= bit;
                self.free += 1;
                true
            }
            _ => false,
        }
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
            frames.release(f);
        }
        taken = (0..3).map(|_| frames.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [7, 64, 129]);
    }

    #[test]
    fn a_frame_that_is_free_or_none_at_all_is_not_taken_back() {
        let mut frames = Frames::new(100);
        let taken = frames.take();
        frames.release(taken);
        frames.release(taken);
        frames.release(100_000);
        assert_eq!(frames.free(), 100);
    }
}
