//! The kernel's evidence of where accesses went: the CPU on which the thread was during an access, and the node of the page.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use jericho_sys::node_memory::nodes_of_file;

use crate::accesses::{Access, Done};
use crate::kernel_trace::Stay;
use crate::shape::Shape;

const PAGE_BYTES: usize = 4096;

/// The node of each page of each file.
pub struct Frames(pub Vec<Vec<usize>>);

impl Frames {
    /// Asks the kernel where its page cache has the pages of files.
    pub fn of_page_cache(files: &[impl AsRef<Path>], bytes: usize) -> Frames {
        let offsets: Vec<usize> = (0..bytes).step_by(PAGE_BYTES).collect();
        let nodes_of = |path: &Path| {
            let file = File::open(path).expect("a file");
            let nodes = nodes_of_file(file.as_fd(), bytes, &offsets).expect("move_pages");
            let nodes = nodes.into_iter().map(|node| node.expect("a page") as usize);
            nodes.collect()
        };
        Frames(files.iter().map(|path| nodes_of(path.as_ref())).collect())
    }
}

/// Where accesses went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Places {
    pass: u16,
    thread: u32,
    /// Node of the CPU on which the thread was.
    cpu: usize,
    /// Node of the page.
    frame: usize,
}

/// The accesses of a program, by where they went.
pub struct Evidence {
    /// Pages. An access during which the thread was on several nodes counts in parts, by the time on each.
    pages: BTreeMap<Places, f64>,
    /// Pages of accesses during which the thread was on no CPU.
    lost: f64,
    buffers: BTreeMap<u32, usize>,
}

impl Evidence {
    /// Joins the program's log of accesses, the kernel's record of where its threads ran, and the nodes of the pages.
    pub fn join(mut done: Done, frames: &Frames, shape: &Shape) -> Evidence {
        done.accesses.sort_by_key(|a| (a.thread, a.begin));
        let mut evidence = Evidence {
            pages: BTreeMap::new(),
            lost: 0.0,
            buffers: done.buffers,
        };
        for accesses in done.accesses.chunk_by(|a, b| a.thread == b.thread) {
            let mut stays = match done.stays.get(&accesses[0].thread) {
                Some(stays) => &stays[..],
                None => &[],
            };
            for access in accesses {
                // The stays before this access are before all further ones of the thread.
                while stays.first().is_some_and(|stay| stay.until < access.begin) {
                    stays = &stays[1..];
                }
                evidence.add(access, stays, frames, shape);
            }
        }
        let (all, lost) = (evidence.all_pages(), evidence.lost);
        assert!(lost <= all * 0.001, "{lost} of {all} pages: on no CPU");
        evidence
    }

    fn add(&mut self, access: &Access, stays: &[Stay], frames: &Frames, shape: &Shape) {
        let during = stays.iter().take_while(|stay| stay.from < access.end);
        let times = during.map(|stay| {
            let time = stay.until.min(access.end) - stay.from.max(access.begin);
            (shape.node_of(stay.cpu), time as f64)
        });
        let times: Vec<(usize, f64)> = times.collect();
        let all: f64 = times.iter().map(|(_, time)| time).sum();
        if all == 0.0 {
            self.lost += f64::from(access.pages);
            return;
        }
        let first = access.page as usize;
        for frame in &frames.0[usize::from(access.file)][first..first + access.pages as usize] {
            for (cpu, time) in &times {
                let places = Places {
                    pass: access.pass,
                    thread: access.thread,
                    cpu: *cpu,
                    frame: *frame,
                };
                *self.pages.entry(places).or_default() += time / all;
            }
        }
    }

    fn all_pages(&self) -> f64 {
        self.pages.values().sum::<f64>() + self.lost
    }

    /// Returns the pages that were accessed from their own node and from other nodes, in pass `first` and later.
    pub fn pages_since(&self, first: u16, shape: &Shape) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for (places, pages) in self.pages.range(Places::first_of(first)..) {
            let is_remote = shape.node_of_threads(places.frame) != places.cpu;
            sums[usize::from(is_remote)] += pages;
        }
        sums
    }

    /// Writes a placement trace of the reads in pass `first` and later.
    pub fn write_trace(&self, name: &str, first: u16) {
        let mut sums: BTreeMap<(u32, usize, usize), f64> = BTreeMap::new();
        for (places, pages) in self.pages.range(Places::first_of(first)..) {
            let key = (places.thread, places.cpu, places.frame);
            *sums.entry(key).or_default() += pages;
        }
        let mut text = String::new();
        for ((thread, cpu, frame), pages) in sums {
            let (bytes, buffer) = (pages * PAGE_BYTES as f64, self.buffers[&thread]);
            if bytes >= 1.0 {
                let line = serde_json::json!({
                    "thread": thread, "cpu": cpu, "buffer": buffer, "frame": frame, "device": null,
                    "bytes": bytes as u64, "op": "read",
                });
                writeln!(text, "{line}").expect("a line");
            }
        }
        std::fs::write(format!("/traces/{name}.jsonl"), text).expect("a trace");
    }
}

impl Places {
    fn first_of(pass: u16) -> Places {
        Places {
            pass,
            thread: 0,
            cpu: 0,
            frame: 0,
        }
    }
}
