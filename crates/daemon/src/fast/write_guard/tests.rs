use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Key};

use super::*;
use crate::fast::grants::tests::Bed;
use crate::simulated::{self, LONG, in_time, wait_until};
use crate::write_mode::WriteMode;

/// An owner number that no client has.
const STOPPED: u16 = 700;

#[test]
fn no_write_over_several_pages_comes_between_the_pages_that_a_fallocate_zeroes() {
    let keep_size = libc::FALLOC_FL_KEEP_SIZE;
    for mode in [libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE] {
        in_time(|| {
            let bed = Bed::new();
            let (mounted, handle) = (&bed.mounted, &bed.handle);
            let ones = [1; 2 * PAGE_BYTES as usize];
            let written = simulated::write(mounted, handle, 0, &ones, WriteMode::PLAIN);
            assert_eq!(written.recv_timeout(LONG), Ok(2 * PAGE_BYTES as u32));
            let (slot, both) = (
                mounted.fast.slot(&bed.file),
                Segments::of(0, 2 * PAGE_BYTES),
            );
            // The fallocate waits for the latch of the second page when it has zeroed a part of the first one.
            let memory = mounted.slice(handle.file.layout().home()).memory();
            let found = memory
                .lookup(Key::new(handle.file.object_id(), 1))
                .expect("just written");
            let entry = memory.entry(found.index);
            let latched = entry
                .try_latch(found.state, STOPPED)
                .expect("no other writer");
            let is_kept = std::thread::scope(|scope| {
                let zeroed = scope.spawn(|| {
                    mounted.try_fallocate(handle, mode | keep_size, 100, 2 * PAGE_BYTES - 200)
                });
                wait_until("it zeroes the first page", || {
                    let read = simulated::read(mounted, handle, (100, 1), false);
                    read.recv_timeout(LONG) == Ok(vec![0])
                });
                let is_kept = slot.range_counts(both).is_none();
                entry.unlatch(latched, Flags::DIRTY).expect("in time");
                zeroed.join().unwrap().unwrap();
                is_kept
            });
            assert!(is_kept, "a write of both pages may begin between them");
            assert!(slot.range_counts(both).is_some());
        });
    }
}
