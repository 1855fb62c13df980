//! Search, as psearchy: threads take files of a corpus from a shared list, read them 2 KiB at a time, and note where each word is. A thread
//! that has noted enough writes its table to a file.

use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::Topology;

use super::files::{drop_pages, has_transfers};
use crate::buffer;
use crate::case::{Case, Scale};
use crate::error::{Context, Error, Result};
use crate::frames::Frames;
use crate::meter::{Done, Meter};
use crate::random::Random;
use crate::reach::{Appender, Files, OpenFile, Opening};
use crate::resident::confirm;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;
use crate::target::Scratch;

/// *Implications*, IV.C.5: 100 directories of 100 files of 10 MB, and tables of 128 MB.
const CORPUS_BYTES: u64 = 100 << 30;
const FILES_PER_DIR: usize = 100;
const FILE_BYTES: u64 = 10 << 20;
const TABLE_BYTES: usize = 128 << 20;
/// Tables of a thread that are kept on the device; the next one takes the place of the oldest.
const TABLES: usize = 4;
/// Number of different words of the corpus.
const WORDS: u64 = 50_000;
/// Memory of a word in a table besides its letters and places: an entry of the hash table with two vectors, and their allocations.
const ENTRY_BYTES: usize = 96;
/// Memory of a place.
const PLACE_BYTES: usize = 8;
/// Texts of each thread about which the kernel is asked after the run.
const TEXTS_ASKED: usize = 8;

/// Memory of a table for each byte that is counted for it, about: the allocator's and the map's own.
const MEMORY_PER_BYTE: u64 = 2;

/// The sizes of a run.
struct Sizes {
    corpus_bytes: u64,
    file_bytes: u64,
    table_bytes: usize,
}

impl Sizes {
    fn of(threads: usize, scale: Scale) -> Sizes {
        let threads = threads.max(1) as u64;
        let (corpus_bytes, table_bytes) = match scale.as_paper {
            true => (CORPUS_BYTES, TABLE_BYTES),
            false => {
                // In proportion to the corpus, so that tables are written here, too. All tables together have a quarter of the run's data at most.
                let most = scale.data_bytes / 4 / threads / TABLES as u64;
                let table = (scale.data_bytes / 800).max(64 << 10).min(most).max(4096);
                let corpus = (scale.data_bytes * 3 / 4) >> 20 << 20;
                (corpus.max(1 << 20), table as usize)
            }
        };
        Sizes {
            corpus_bytes,
            // A small corpus has as many files as there are threads, at least, so that all have work.
            file_bytes: (corpus_bytes / threads).clamp(64 << 10, FILE_BYTES),
            table_bytes,
        }
    }
}

/// Returns the bytes of all files: the corpus, and the tables that are written.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    let sizes = Sizes::of(threads, scale);
    sizes.corpus_bytes + (threads * TABLES * sizes.table_bytes) as u64
}

/// Returns the memory that a thread takes for its table.
pub fn memory_bytes(threads: usize, scale: Scale) -> u64 {
    Sizes::of(threads, scale).table_bytes as u64 * MEMORY_PER_BYTE
}

/// The part of a run in one target: as in the paper, instances of different devices share nothing.
struct Instance {
    paths: Arc<[PathBuf]>,
    /// The next file of the list that its threads share.
    next: Arc<AtomicUsize>,
    /// The seats of its threads.
    seats: Arc<[Seat]>,
}

impl Instance {
    /// Returns the instance of target `target` of `targets`, with `count` files.
    fn new(
        case: &Case,
        scratch: &Scratch,
        (target, targets): (usize, usize),
        count: usize,
    ) -> Self {
        let own = || (target..case.seats.len()).step_by(targets);
        let dirs: Vec<usize> = own().collect();
        let path = |number: usize| {
            let dir = scratch.dir(dirs[number % dirs.len()]);
            dir.join(format!("corpus.{}", number / FILES_PER_DIR))
                .join(format!("text.{number}"))
        };
        Instance {
            paths: (0..count).map(path).collect(),
            next: Arc::default(),
            seats: own().map(|index| case.seats[index].clone()).collect(),
        }
    }
}

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    let Sizes {
        corpus_bytes,
        file_bytes,
        table_bytes,
    } = Sizes::of(case.seats.len(), case.scale);
    let targets = case.targets.len().min(case.seats.len());
    let count = (corpus_bytes / file_bytes / targets as u64).max(1) as usize;
    let instances: Vec<Instance> = (0..targets)
        .map(|target| Instance::new(case, scratch, (target, targets), count))
        .collect();
    Ok(case.each(move |index, seat| {
        let instance = &instances[index % targets];
        let own = (index / targets..count).step_by(instance.seats.len());
        for number in own {
            let seed = case.seed ^ (number * targets + index % targets) as u64;
            write_text(case, &instance.paths[number], file_bytes, seed)?;
        }
        // The tables are memory of the program. Those of the paper are local to its threads, also where copies are remote.
        seat.unbind_pages()?;
        Ok(Box::new(Search {
            topology: case.topology.clone(),
            seat: seat.clone(),
            files: case.files.clone(),
            // Any thread of the instance may read any of its files.
            frames: Frames::of_all(&instance.seats),
            paths: instance.paths.clone(),
            next: instance.next.clone(),
            reading: None,
            has_transfers: has_transfers(case),
            buffer: buffer::on(case.topology, seat.thread, case.variant.request_bytes)?,
            request_bytes: case.variant.request_bytes,
            word: Vec::new(),
            table: HashMap::new(),
            table_bytes: 0,
            table_bytes_max: table_bytes,
            tables: 0,
            dir: scratch.dir(index).to_owned(),
            index,
            own: index / targets..count,
            threads: instance.seats.len(),
            kernel_node: seat
                .kernel_node(case.topology)
                .filter(|_| !case.is_jericho()),
        }) as Box<dyn Worker>)
    }))
}

/// Writes a file of words. Of two words, the one with the smaller number is more frequent. Fails early if the run ends.
fn write_text(case: &Case, path: &Path, bytes: u64, seed: u64) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    case.files.make_dir(dir).at(dir, "make it")?;
    let mut out = create(&*case.files, path)?;
    let mut random = Random::new(seed);
    let mut written = 0;
    while written < bytes {
        if case.stopping.load(Ordering::Relaxed) {
            return Err(Error::interrupted());
        }
        let word = random.below(random.clone().below(WORDS) + 1);
        let text = format!("w{word:x} ");
        out.write_all(text.as_bytes()).at(path, "write it")?;
        written += text.len() as u64;
    }
    out.flush().at(path, "write it")?;
    match has_transfers(case) {
        true => drop_pages(out.get_ref().file(), path, 0..written, true),
        // Its write-back ends before a measurement begins.
        false => out.get_ref().file().sync().at(path, "make it durable"),
    }
}

/// Creates a file for writing in order.
fn create(files: &dyn Files, path: &Path) -> Result<BufWriter<Appender>> {
    let file = files.open(path, Opening::Empty).at(path, "create it")?;
    Ok(BufWriter::new(Appender::new(file)))
}

/// A file that a thread reads.
struct Reading {
    file: Box<dyn OpenFile>,
    /// Its number in the list.
    number: usize,
    /// Offset of the next piece.
    at: u64,
}

/// Where a word ends.
#[derive(Clone, Copy)]
struct Place {
    /// Number of the text in the list.
    file: u32,
    at: u32,
}

struct Search {
    files: Arc<dyn Files>,
    frames: Frames,
    topology: Topology,
    seat: Seat,
    /// The corpus of the thread's instance.
    paths: Arc<[PathBuf]>,
    /// The next file of the list that the threads of the instance share.
    next: Arc<AtomicUsize>,
    reading: Option<Reading>,
    /// Whether texts and tables leave the page cache when they have been used.
    has_transfers: bool,
    /// A whole page at least, so longer than a request.
    buffer: NodeBuffer,
    request_bytes: usize,
    /// The begin of a word whose end is in the next piece.
    word: Vec<u8>,
    /// The places of each word.
    table: HashMap<Box<[u8]>, Vec<Place>>,
    table_bytes: usize,
    table_bytes_max: usize,
    tables: usize,
    dir: PathBuf,
    index: usize,
    /// The first of the texts that the thread has made, up to the last one of all. Its own ones follow in steps of `threads`.
    own: Range<usize>,
    threads: usize,
    /// The kernel's node on which the cached pages of the thread's own texts must be.
    kernel_node: Option<u32>,
}

impl Search {
    /// Notes that the word ends here.
    fn note(&mut self, place: Place) {
        if self.word.is_empty() {
            return;
        }
        self.table_bytes += PLACE_BYTES;
        match self.table.get_mut(self.word.as_slice()) {
            Some(places) => places.push(place),
            None => {
                self.table_bytes += self.word.len() + ENTRY_BYTES;
                self.table.insert(self.word.clone().into(), vec![place]);
            }
        }
        self.word.clear();
    }

    /// Writes the table to a file and empties it. Returns the number of bytes.
    fn write_table(&mut self) -> Result<u64> {
        let (topology, seat) = (self.topology.clone(), self.seat.clone());
        seat.with_bound_pages(&topology, || self.write_table_bound())
    }

    fn write_table_bound(&mut self) -> Result<u64> {
        let path = self
            .dir
            .join(format!("index.{}.{}", self.index, self.tables % TABLES));
        let mut out = create(&*self.files, &path)?;
        let mut bytes = 0;
        for (word, places) in self.table.drain() {
            out.write_all(&word).at(&path, "write it")?;
            for Place { file, at } in &places {
                let place = u64::from(*file) << 32 | u64::from(*at);
                out.write_all(&place.to_le_bytes()).at(&path, "write it")?;
            }
            bytes += word.len() + places.len() * PLACE_BYTES;
        }
        out.flush().at(&path, "write it")?;
        if self.has_transfers {
            drop_pages(out.get_ref().file(), &path, 0..bytes as u64, true)?;
        }
        self.table_bytes = 0;
        self.tables += 1;
        Ok(bytes as u64)
    }
}

impl Worker for Search {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let began = Instant::now();
        let mut reading = match self.reading.take() {
            Some(reading) => reading,
            None => {
                // After the last file, the list begins again: the run ends by time.
                let number = self.next.fetch_add(1, Ordering::Relaxed) % self.paths.len();
                let path = &self.paths[number];
                Reading {
                    file: self.files.open(path, Opening::Read).at(path, "open it")?,
                    number,
                    at: 0,
                }
            }
        };
        let (number, begin) = (reading.number, reading.at);
        let request = &mut self.buffer[..self.request_bytes];
        let path = &self.paths[number];
        let mut access = || reading.file.read_at(request, begin).at(path, "read it");
        let read = match self.has_transfers {
            // The read takes new pages.
            true => self.seat.with_bound_pages(&self.topology, access)?,
            false => access()?,
        };
        if read == 0 && self.has_transfers {
            drop_pages(&*reading.file, path, 0..u64::MAX, false)?;
        }
        let place = |at: usize| Place {
            file: number as u32,
            at: (begin + at as u64) as u32,
        };
        for at in 0..read {
            match self.buffer[at] {
                b' ' => self.note(place(at)),
                byte => self.word.push(byte),
            }
        }
        reading.at += read as u64;
        match read {
            0 => self.note(place(0)),
            _ => self.reading = Some(reading),
        }
        let written_bytes = match self.table_bytes >= self.table_bytes_max {
            true => self.write_table()?,
            false => 0,
        };
        meter.count(Done {
            read_bytes: read as u64,
            written_bytes,
            began,
        });
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        &self.frames
    }

    fn confirm(&self) -> Result<Option<bool>> {
        let Some(node) = self.kernel_node else {
            return Ok(None);
        };
        let own = self.own.clone().step_by(self.threads);
        let ask = |number: usize| {
            let path = &self.paths[number];
            let file = self.files.open(path, Opening::Read).at(path, "open it")?;
            confirm((&*file, 0..u64::MAX), path, node)
        };
        // The kernel reads pages again that have left the cache.
        let asked = self.seat.with_bound_pages(&self.topology, || {
            let asked = own.take(TEXTS_ASKED).map(ask);
            asked.collect::<Result<Vec<bool>>>()
        })?;
        Ok(Some(asked.into_iter().all(|told| told)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::case::tests::Story;
    use crate::kind::Kind;

    /// Runs some steps of each thread, in its seat. Returns what all of them counted, and calls `look` in each thread.
    fn steps(story: &Story, count: usize, look: impl Fn() + Sync) -> Meter {
        let case = story.case();
        let mut all = Meter::new().unwrap();
        let topology = case.topology;
        for thread in threads(&case).unwrap() {
            let look = &look;
            let run = move || {
                thread.seat.bind_pages(topology).unwrap();
                let mut worker = (thread.make)().unwrap();
                let mut meter = Meter::new().unwrap();
                for _ in 0..count {
                    worker.step(&mut meter).unwrap();
                }
                look();
                meter
            };
            let meter = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
            all.add(&meter).unwrap();
        }
        all
    }

    #[test]
    fn a_read_is_2_kib_although_the_buffer_is_a_page() {
        let meter = steps(&Story::new(Kind::Search, "best"), 10, || ());
        assert_eq!(meter.operations, 10);
        assert_eq!(meter.read_bytes, 10 * 2048);
    }

    #[test]
    fn tables_are_on_the_node_of_the_thread_whatever_the_policy_of_cached_pages() {
        // Without NUMA in the kernel there are no policies. The heap has none of its own, so the kernel shows that of the thread that asks.
        let heap_policy = || {
            let maps = std::fs::read_to_string("/proc/thread-self/numa_maps").ok()?;
            let heap = maps.lines().find(|line| line.contains(" heap"));
            let policy = heap.and_then(|heap| heap.split(' ').nth(1));
            Some(policy.expect("a heap and its policy").to_owned())
        };
        let Some(policy) = heap_policy() else {
            return;
        };
        assert_eq!(policy, "default");
        let story = Story::new(Kind::Search, "best").on_this_machine();
        steps(&story, 1, || assert_eq!(heap_policy().unwrap(), "default"));
    }

    #[test]
    fn instances_of_different_devices_share_no_files() {
        let story = Story::with(Kind::Search, "best", 5, 2);
        let case = story.case();
        let scratch = case.scratch.unwrap();
        let of = |target| Instance::new(&case, scratch, (target, 2), 6);
        for target in 0..2 {
            let instance = of(target);
            let roots: BTreeSet<PathBuf> = instance
                .paths
                .iter()
                .map(|file| file.ancestors().nth(2).unwrap().to_owned())
                .collect();
            let own: BTreeSet<PathBuf> = (target..5)
                .step_by(2)
                .map(|index| scratch.dir(index).to_owned())
                .collect();
            assert_eq!(roots, own);
            assert_eq!(instance.seats.len(), own.len());
        }
    }
}
