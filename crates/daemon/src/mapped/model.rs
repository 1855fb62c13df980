//! Checks every order in which a mapped page can be stored to, written directly, written back, dropped and read again.
//!
//! The page has three bytes. One program stores to the first byte through a mapping. Two others write the other bytes by system
//! calls, one of them asynchronously: the kernel then drops the page before the write, but not after it. The search visits every
//! reachable state. It uses the real records of `changes.rs`; the other steps of the kernel and the daemon follow
//! docs/internals/fuse.md.

use std::collections::HashSet;

use super::changes::{Changes, Recorded};

const CELLS: usize = 3;
const STORES: u8 = 2;
/// Writes of each writer, to the cells after the first.
const WRITES: [u8; 2] = [2, 1];
/// The writer whose writes also drop the kernel's page afterwards.
const SYNCHRONOUS: usize = 0;

type Page = [u8; CELLS];

/// The part of the daemon that the model leaves out. Each omission must lose a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    NoRecords,
    AFillLeavesRecords,
    ADropEndsLaterRecords,
    AFillDoesNotWaitForWriters,
    FillsDuringADropDoNotCount,
}

/// A read of the page for the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Fill {
    None,
    Sent,
    Begun,
    Answered(Page),
}

/// The progress of a direct write.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Write {
    None,
    DropsBefore,
    Sent,
    Begun { watched: bool },
    DropsAfter,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    /// The kernel's page, and whether it is dirty. The kernel allows no store to a page under write-back.
    kernel: Option<(Page, bool)>,
    write_back: Option<Page>,
    fill: Fill,
    stores: u8,
    writes: [(u8, Write); 2],
    daemon: Page,
    changes: Changes<CELLS>,
    watched: bool,
    /// A fill has begun since the dropping thread began.
    filled: bool,
    /// The records that the dropping thread saw, whether it drops the whole file, and whether it has done so.
    drops: Option<(Vec<Recorded>, bool, bool)>,
}

impl World {
    fn new() -> World {
        World {
            kernel: None,
            write_back: None,
            fill: Fill::None,
            stores: 0,
            writes: [(0, Write::None); 2],
            daemon: [0; CELLS],
            changes: Changes::default(),
            watched: false,
            filled: false,
            drops: None,
        }
    }

    /// Returns the violated property, if any.
    fn wrong(&self) -> Option<&'static str> {
        for (writer, (done, _)) in self.writes.iter().enumerate() {
            if self.daemon[writer + 1] < *done {
                return Some("a write is lost");
            }
        }
        let (done, write) = self.writes[SYNCHRONOUS];
        let kernel = self
            .kernel
            .map_or(u8::MAX, |(page, _)| page[SYNCHRONOUS + 1]);
        if write == Write::None && kernel < done {
            return Some("a mapping sees old bytes");
        }
        let clean = self.write_back.is_none() && self.kernel.is_none_or(|(_, dirty)| !dirty);
        if clean && self.daemon[0] < self.stores {
            return Some("a store is lost");
        }
        None
    }

    /// Advances a drop of the kernel's page. Returns `None` while the drop has to wait, and true when the page is
    /// dropped.
    fn drop_page(&mut self) -> Option<bool> {
        if self.write_back.is_some() || self.fill != Fill::None {
            return None;
        }
        let Some((page, dirty)) = self.kernel else {
            return Some(true);
        };
        if dirty {
            self.write_back = Some(page);
            self.kernel = Some((page, false));
            return Some(false);
        }
        self.kernel = None;
        Some(true)
    }

    /// Returns the states after each possible next step.
    fn next(&self, fault: Fault) -> Vec<World> {
        let mut next = vec![];
        let mut step = |change: &dyn Fn(&mut World) -> bool| {
            let mut world = self.clone();
            if change(&mut world) {
                next.push(world);
            }
        };
        step(&|w| w.fault());
        step(&|w| w.store());
        step(&|w| w.begin_write_back());
        step(&|w| w.take_write_back());
        step(&|w| w.reclaim());
        step(&|w| w.go_on_filling(fault));
        step(&|w| w.go_on_writing(0, fault));
        step(&|w| w.go_on_writing(1, fault));
        step(&|w| w.go_on_dropping(fault, false));
        step(&|w| w.go_on_dropping(fault, true));
        next
    }

    fn fault(&mut self) -> bool {
        let missing = self.kernel.is_none() && self.fill == Fill::None;
        if missing {
            self.fill = Fill::Sent;
        }
        missing
    }

    fn store(&mut self) -> bool {
        let Some((page, _)) = &mut self.kernel else {
            return false;
        };
        if self.stores == STORES || self.write_back.is_some() {
            return false;
        }
        self.stores += 1;
        page[0] = self.stores;
        self.kernel = Some((*page, true));
        true
    }

    fn begin_write_back(&mut self) -> bool {
        let Some((page, true)) = self.kernel else {
            return false;
        };
        if self.write_back.is_some() {
            return false;
        }
        self.kernel = Some((page, false));
        self.write_back = Some(page);
        true
    }

    fn take_write_back(&mut self) -> bool {
        let Some(data) = self.write_back.take() else {
            return false;
        };
        let mut merged = data;
        self.changes.merge(0, 0, &mut merged, &self.daemon);
        self.changes.written_back(0, 0, &data);
        self.daemon = merged;
        true
    }

    fn reclaim(&mut self) -> bool {
        let clean = matches!(self.kernel, Some((_, false))) && self.write_back.is_none();
        if clean {
            self.kernel = None;
        }
        clean
    }

    fn go_on_filling(&mut self, fault: Fault) -> bool {
        match self.fill {
            Fill::None => return false,
            Fill::Sent => {
                self.filled = true;
                self.watched = true;
                self.fill = Fill::Begun;
            }
            Fill::Begun => {
                let unwatched = Write::Begun { watched: false };
                let waits = self.writes.iter().any(|(_, write)| *write == unwatched);
                if waits && fault != Fault::AFillDoesNotWaitForWriters {
                    return false;
                }
                if fault != Fault::AFillLeavesRecords {
                    self.changes.give(0, CELLS, &self.daemon);
                }
                self.fill = Fill::Answered(self.daemon);
            }
            Fill::Answered(page) => {
                self.kernel = Some((page, false));
                self.fill = Fill::None;
            }
        }
        true
    }

    fn go_on_writing(&mut self, writer: usize, fault: Fault) -> bool {
        let (done, write) = self.writes[writer];
        let (mut acknowledged, cell) = (done, writer + 1);
        let write = match write {
            Write::None if done == WRITES[writer] => return false,
            Write::None => Write::DropsBefore,
            Write::DropsBefore => match self.drop_page() {
                None => return false,
                Some(false) => Write::DropsBefore,
                Some(true) => Write::Sent,
            },
            Write::Sent => Write::Begun {
                watched: self.watched,
            },
            Write::Begun { watched } => {
                let old = self.daemon[cell];
                self.daemon[cell] = done + 1;
                if watched && fault != Fault::NoRecords {
                    self.changes.change(0, cell, &[old], &[done + 1]);
                }
                match writer {
                    SYNCHRONOUS => Write::DropsAfter,
                    _ => {
                        acknowledged += 1;
                        Write::None
                    }
                }
            }
            Write::DropsAfter => match self.drop_page() {
                None => return false,
                Some(false) => Write::DropsAfter,
                Some(true) => {
                    acknowledged += 1;
                    Write::None
                }
            },
        };
        self.writes[writer] = (acknowledged, write);
        true
    }

    fn go_on_dropping(&mut self, fault: Fault, all: bool) -> bool {
        let Some((seen, whole, has_dropped)) = self.drops.take() else {
            self.drops = Some((self.changes.all(), all, false));
            self.filled = false;
            return self.watched;
        };
        if whole != all {
            return false;
        }
        if !has_dropped {
            let dropped = self.drop_page();
            self.drops = Some((seen, whole, dropped == Some(true)));
            return dropped.is_some();
        }
        let ended = match fault {
            Fault::ADropEndsLaterRecords => self.changes.all(),
            _ => seen,
        };
        for record in ended {
            self.changes.dropped(record);
        }
        if whole && (!self.filled || fault == Fault::FillsDuringADropDoNotCount) {
            self.watched = false;
        }
        true
    }
}

/// Visits all states. Returns their number, or the violated property of one of them.
fn search(fault: Fault) -> Result<usize, &'static str> {
    let mut known = HashSet::from([World::new()]);
    let mut open = vec![World::new()];
    while let Some(world) = open.pop() {
        if let Some(wrong) = world.wrong() {
            return Err(wrong);
        }
        for next in world.next(fault) {
            if known.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    Ok(known.len())
}

#[test]
fn no_byte_that_was_stored_or_written_is_lost_in_any_order() {
    let states = search(Fault::Nothing).expect("nothing is lost");
    println!("{states} states");
    assert!(states > 10_000, "{states} states");
}

#[test]
fn each_part_of_the_daemon_is_needed() {
    for (fault, wrong) in [
        (Fault::NoRecords, "a write is lost"),
        (Fault::AFillLeavesRecords, "a write is lost"),
        (Fault::ADropEndsLaterRecords, "a write is lost"),
        (Fault::AFillDoesNotWaitForWriters, "a write is lost"),
        (Fault::FillsDuringADropDoNotCount, "a write is lost"),
    ] {
        assert_eq!(search(fault), Err(wrong), "{fault:?}");
    }
}
