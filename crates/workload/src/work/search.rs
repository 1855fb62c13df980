//! Search, as psearchy: threads take files of a corpus from a shared list, read them 2 KiB at a time, and note in which file each word is. A thread
//! that has noted enough writes its table to a file.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use jericho_sys::node_memory::NodeBuffer;
use jericho_topology::{NodeId, Topology};

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::frames::mean_share;
use crate::meter::{Done, Meter};
use crate::random::Random;
use crate::run::{Progress, Thread, Worker};
use crate::seats::Seat;

/// *Implications*, IV.C.5: 100 directories of 100 files of 10 MB, and tables of 128 MB.
pub const CORPUS_BYTES: u64 = 100 << 30;
const FILES_PER_DIR: usize = 100;
const FILE_BYTES: u64 = 10 << 20;
pub const TABLE_BYTES: usize = 128 << 20;
/// Tables of a thread that are kept on the device; the next one takes the place of the oldest.
pub const TABLES: usize = 4;
/// Number of different words of the corpus.
const WORDS: u64 = 50_000;
/// Memory of an entry of a table besides its word, about.
const ENTRY_BYTES: usize = 16;

pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    let corpus = case.scale.file_bytes(CORPUS_BYTES, 1, 1 << 20);
    // A small corpus has as many files as there are threads, at least, so that all have work.
    let file_bytes = (corpus / case.seats.len() as u64).clamp(64 << 10, FILE_BYTES);
    let count = (corpus / file_bytes).max(1) as usize;
    let path = |number: usize| {
        let dir = scratch.dir(number % case.seats.len());
        dir.join(format!("corpus.{}", number / FILES_PER_DIR))
            .join(format!("text.{number}"))
    };
    let files: Arc<[PathBuf]> = (0..count).map(path).collect();
    let next = Arc::new(AtomicUsize::new(0));
    let table_bytes = match case.scale.as_paper {
        true => TABLE_BYTES,
        // In proportion to the corpus, so that tables are written here, too.
        false => ((corpus / 800) as usize).clamp(64 << 10, TABLE_BYTES),
    };
    let seats: Arc<[Seat]> = case.seats.into();
    Ok(case.each(move |index, seat| {
        for number in (index..files.len()).step_by(case.seats.len()) {
            write_text(&files[number], file_bytes, case.seed ^ number as u64)?;
        }
        Ok(Box::new(Search {
            topology: case.topology.clone(),
            seats: seats.clone(),
            files: files.clone(),
            next: next.clone(),
            reading: None,
            buffer: buffer::on(case.topology, seat.thread, case.variant.request_bytes)?,
            word: Vec::new(),
            table: HashMap::new(),
            table_bytes: 0,
            table_bytes_max: table_bytes,
            tables: 0,
            dir: scratch.dir(index).to_owned(),
            index,
        }) as Box<dyn Worker>)
    }))
}

/// Writes a file of words. Of two words, the one with the smaller number is more frequent.
fn write_text(path: &Path, bytes: u64, seed: u64) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    fs::create_dir_all(dir).at(dir, "make it")?;
    let mut out = BufWriter::new(File::create(path).at(path, "create it")?);
    let mut random = Random::new(seed);
    let mut written = 0;
    while written < bytes {
        let word = random.below(random.clone().below(WORDS) + 1);
        let text = format!("w{word:x} ");
        out.write_all(text.as_bytes()).at(path, "write it")?;
        written += text.len() as u64;
    }
    out.flush().at(path, "write it")
}

struct Search {
    topology: Topology,
    seats: Arc<[Seat]>,
    files: Arc<[PathBuf]>,
    /// The next file of the shared list.
    next: Arc<AtomicUsize>,
    /// The file that the thread reads, with its number.
    reading: Option<(File, usize)>,
    buffer: NodeBuffer,
    /// The begin of a word whose end is in the next piece.
    word: Vec<u8>,
    /// The files of each word, as numbers.
    table: HashMap<Box<[u8]>, Vec<u32>>,
    table_bytes: usize,
    table_bytes_max: usize,
    tables: usize,
    dir: PathBuf,
    index: usize,
}

impl Search {
    /// Notes that the word is in this file.
    fn note(&mut self, file: usize) {
        if self.word.is_empty() {
            return;
        }
        let file = file as u32;
        match self.table.get_mut(self.word.as_slice()) {
            Some(files) if files.last() == Some(&file) => {}
            Some(files) => {
                files.push(file);
                self.table_bytes += size_of::<u32>();
            }
            None => {
                self.table_bytes += self.word.len() + ENTRY_BYTES;
                self.table.insert(self.word.clone().into(), vec![file]);
            }
        }
        self.word.clear();
    }

    /// Writes the table to a file and empties it. Returns the number of bytes.
    fn write_table(&mut self) -> Result<u64> {
        let path = self
            .dir
            .join(format!("index.{}.{}", self.index, self.tables % TABLES));
        let mut out = BufWriter::new(File::create(&path).at(&path, "create it")?);
        let mut bytes = 0;
        for (word, files) in self.table.drain() {
            out.write_all(&word).at(&path, "write it")?;
            for file in &files {
                out.write_all(&file.to_le_bytes()).at(&path, "write it")?;
            }
            bytes += word.len() + files.len() * size_of::<u32>();
        }
        out.flush().at(&path, "write it")?;
        self.table_bytes = 0;
        self.tables += 1;
        Ok(bytes as u64)
    }
}

impl Worker for Search {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let began = Instant::now();
        let (mut file, number) = match self.reading.take() {
            Some(reading) => reading,
            None => {
                // After the last file, the list begins again: the run ends by time.
                let number = self.next.fetch_add(1, Ordering::Relaxed) % self.files.len();
                let path = &self.files[number];
                (File::open(path).at(path, "open it")?, number)
            }
        };
        let read = std::io::Read::read(&mut file, &mut self.buffer);
        let read = read.at(&self.files[number], "read it")?;
        for at in 0..read {
            match self.buffer[at] {
                b' ' => self.note(number),
                byte => self.word.push(byte),
            }
        }
        match read {
            0 => self.note(number),
            _ => self.reading = Some((file, number)),
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

    fn local_share(&self, thread: NodeId) -> Option<f64> {
        // Any thread may read any file.
        mean_share(&self.topology, &self.seats, thread)
    }
}
