//! The congestion window of a channel: rule 5 of a channel in `docs/formats/wire.md`.

const INITIAL: f64 = 32.0;
const MIN: f64 = 2.0;
/// Less than the numbers that a receiver remembers, so that an acknowledgement reaches all frames in flight.
const MAX: f64 = 896.0;

/// Frames that the network takes, as far as is known.
#[derive(Debug)]
pub(crate) struct Window {
    frames: f64,
    /// Below it, the window grows by a frame for each acknowledged frame.
    slow_start_end: f64,
    /// Frames below this number were in flight when the window was last halved.
    halved_at: u64,
    /// What `frames` and `slow_start_end` were before that.
    before: Option<(f64, f64)>,
}

impl Window {
    /// Returns the window of a new channel.
    pub fn new() -> Window {
        Window {
            frames: INITIAL,
            slow_start_end: MAX,
            halved_at: 0,
            before: None,
        }
    }

    /// Returns the number of frames that may be in flight.
    pub fn frames(&self) -> u32 {
        self.frames as u32
    }

    /// Grows after the acknowledgement of a frame. `in_flight`: frames in flight before it.
    pub fn acknowledged(&mut self, in_flight: u32) {
        // A window that is not used says nothing about the network.
        if f64::from(in_flight) * 2.0 < self.frames {
            return;
        }
        self.frames += match self.frames < self.slow_start_end {
            true => 1.0,
            false => 1.0 / self.frames,
        };
        self.frames = self.frames.min(MAX);
    }

    /// Shrinks after the loss of a frame. `next` is the number of the next frame.
    pub fn lost(&mut self, number: u64, next: u64) {
        if number < self.halved_at {
            return;
        }
        self.before = Some((self.frames, self.slow_start_end));
        self.frames = (self.frames / 2.0).max(MIN);
        self.slow_start_end = self.frames;
        self.halved_at = next;
    }

    /// Takes back the last halving: a frame that caused it was not lost.
    pub fn restore(&mut self, number: u64) {
        if number < self.halved_at
            && let Some((frames, slow_start_end)) = self.before.take()
        {
            self.frames = self.frames.max(frames);
            self.slow_start_end = slow_start_end;
        }
    }

    /// Begins again, after the channel was suspect.
    pub fn collapse(&mut self) {
        self.slow_start_end = (self.frames / 2.0).max(MIN);
        self.frames = MIN;
        self.before = None;
    }
}
