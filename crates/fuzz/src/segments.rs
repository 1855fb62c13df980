//! Reads memory that programs can write: areas, slots, page tables.

use std::cell::OnceCell;
use std::sync::atomic::Ordering;

use jericho_shm::{Area, Draining, Geometry, RingReader, SliceMemory, Slots};

use crate::input::Input;

const FRAMES: u32 = 1024;
const SLOTS: u32 = 64;

struct Segments {
    area: Area,
    slots: Slots,
    slice: SliceMemory,
}

/// Changes bytes anywhere in a client's area, in the slots and in a slice's segments, and reads them as the daemon does.
pub fn segments(data: &[u8]) {
    thread_local! {
        // The segments are kept, as in a daemon: each input finds what the previous one has stored.
        static SEGMENTS: OnceCell<Segments> = const { OnceCell::new() };
    }
    SEGMENTS.with(|segments| {
        let segments = segments.get_or_init(|| Segments {
            area: Area::create("fuzz", 7).expect("an area"),
            slots: Slots::create("fuzz", SLOTS).expect("slots"),
            slice: SliceMemory::create("fuzz", Geometry::for_frames(FRAMES), None)
                .expect("a slice"),
        });
        segments.corrupt(data);
        segments.read();
    });
}

impl Segments {
    fn corrupt(&self, data: &[u8]) {
        let mut input = Input(data);
        while !input.is_empty() {
            let [table, marks, frames] = self.slice.segments();
            let mapping = match input.number(1) % 8 {
                0..3 => self.area.mapping(),
                3..5 => self.slots.mapping(),
                5 => table,
                6 => marks,
                _ => frames,
            };
            let at = input.below(mapping.len());
            let count = (input.number(1) as usize).min(mapping.len() - at);
            let bytes = input.take(count);
            mapping.copy_in(at, bytes);
        }
    }

    fn read(&self) {
        let (mut reader, draining) = (RingReader::default(), Draining::default());
        let mut keys = vec![];
        for _ in 0..3 {
            let owners: Vec<u16> = self.slots.reporters(&draining).collect();
            for owner in owners {
                self.slots.begin_drain(&draining, owner);
                self.slots.end_drain(&draining, owner);
            }
            self.area.drain(&mut reader, |key| keys.push(key));
        }
        self.area.take_touched(|_, _| {});
        for slice in [0, 1, u16::MAX] {
            for counter in self.area.counters_of(slice) {
                let _ = counter.local_pages.load(Ordering::Relaxed);
            }
        }
        let _ = self.area.owner();
        for index in [0, SLOTS - 1, SLOTS, u32::MAX] {
            if let Some(slot) = self.slots.slot(index) {
                let _ = slot.size().bytes();
                let _ = slot.take_modified();
                slot.open_dead(7);
                slot.open_all(1);
            }
        }
        self.slice.scan(|_, key, _| keys.push(key));
        let mut page = [0; 64];
        for key in keys.into_iter().take(2 * FRAMES as usize) {
            let _ = (key.object(), key.page());
            let _ = self.slice.lookup(key);
            let _ = self.slice.read(key, 0, &mut page, self.slice.epoch());
        }
    }
}
