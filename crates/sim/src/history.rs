//! The recorded changes of a device, from which its contents at any moment are made again.

use crate::image::Image;

/// A change of a device.
#[derive(Debug)]
pub(crate) enum Entry {
    Write {
        offset_bytes: u64,
        data: Box<[u8]>,
        is_durable: bool,
    },
    Discard {
        offset_bytes: u64,
        length_bytes: u64,
    },
    Flush,
}

/// What a device held when the recording began, and its changes since, with their numbers in the supply's order.
#[derive(Debug)]
pub(crate) struct History {
    base: Image,
    entries: Vec<(u64, Entry)>,
}

impl History {
    pub(crate) fn new(base: Image) -> History {
        History {
            base,
            entries: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, number: u64, entry: Entry) {
        self.entries.push((number, entry));
    }

    /// Returns the contents at the moment of change `cut`, with this change in the cache.
    pub(crate) fn image_at(&self, cut: u64) -> Image {
        let mut image = self.base.clone();
        for (number, entry) in self.entries.iter().take_while(|(number, _)| *number <= cut) {
            entry.apply(&mut image, *number < cut);
        }
        image
    }

    /// Returns the durable contents after flush `nth` (0: at the beginning).
    pub(crate) fn as_of_flush(&self, nth: u64) -> Image {
        let mut image = self.base.clone();
        let mut flushes = 0;
        for (_, entry) in &self.entries {
            if flushes == nth {
                break;
            }
            entry.apply(&mut image, true);
            flushes += u64::from(matches!(entry, Entry::Flush));
        }
        assert!(flushes == nth, "there were only {flushes} flushes");
        image.durable()
    }
}

impl Entry {
    /// Applies the change. A change that was not `completed` reaches the cache at most.
    fn apply(&self, image: &mut Image, completed: bool) {
        match self {
            Entry::Write {
                offset_bytes,
                data,
                is_durable,
            } => {
                image.write(*offset_bytes, data, None);
                if *is_durable && completed {
                    image.harden(*offset_bytes, data.len() as u64);
                }
            }
            Entry::Discard {
                offset_bytes,
                length_bytes,
            } => image.discard(*offset_bytes, *length_bytes),
            Entry::Flush if completed => image.flush(),
            Entry::Flush => {}
        }
    }
}
