//! What the background check of the data writes into the log.

mod mount;

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jericho_cache::PagePlace;
use jericho_storage::Device;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use mount::{Mount, PAGE};

/// The messages of the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").unwrap();
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Log {
    /// Returns the lines about damaged data so far, and forgets them.
    fn take_damage(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.0.lock().unwrap());
        let is_damage = |line: &String| line.contains("damaged");
        all.into_iter().filter(is_damage).collect()
    }
}

/// Makes a pass over all data. Returns the number of damaged pages that it has found.
fn pass(mount: &Mount, pages: u64) -> u64 {
    let slices = || mount.slices.iter().map(|slice| slice.counters());
    let bytes = || slices().map(|counts| counts.scrubbed_bytes).sum::<u64>();
    let until = bytes() + pages * PAGE;
    mount.fs().set_scrub_rate(1 << 50);
    mount.fs().begin_scrub();
    let begun = Instant::now();
    let has_ended = || bytes() >= until && !mount.fs().scrub_status().unwrap().is_in_pass;
    while !has_ended() {
        assert!(begun.elapsed() < Duration::from_secs(60), "a pass ends");
        std::thread::yield_now();
    }
    mount.fs().scrub_status().unwrap().last_found
}

#[test]
fn damaged_pages_in_a_row_are_one_line_of_the_log_and_only_the_first_time() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let mount = Mount::summed(64 << 20);
    let file = mount.durable("f", 600 * PAGE as usize);
    let damage = |page: u64| {
        let mut runs = Vec::new();
        file.object().resolve(page, 1, &mut runs).unwrap();
        let PagePlace::Device { offset_bytes, .. } = runs[0].place else {
            panic!("page {page} is at {:?}", runs[0].place);
        };
        let mut block = vec![0; PAGE as usize];
        mount.device.read_at(offset_bytes, &mut block).unwrap();
        block[7] ^= 1;
        mount.device.write_at(offset_bytes, &block).unwrap();
    };
    // The first run crosses the end of a read of the background check.
    (200..300).chain([400]).for_each(damage);
    assert_eq!(pass(&mount, 600), 101);
    let lines = log.take_damage();
    assert_eq!(lines.len(), 2, "{lines:?}");
    let (from, to) = (200 * PAGE, 300 * PAGE);
    let run = format!("offset {from} to {to} (100 pages)");
    assert!(lines[0].contains(&run), "{lines:?}");
    let one = format!("inode {}, offset {}: ", file.ino(), 400 * PAGE);
    assert!(lines[1].starts_with(&one), "{lines:?}");
    for _ in 0..2 {
        assert_eq!(pass(&mount, 600), 101);
        assert_eq!(log.take_damage(), [""; 0], "nothing has changed");
    }
    damage(401);
    assert_eq!(pass(&mount, 600), 102);
    let lines = log.take_damage();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("(2 pages)"), "{lines:?}");
}
