//! Stream: a thread reads records of 64 KiB and puts their descriptors into a list of 128 Ki places. Another thread takes them out, changes the
//! record and stores it.
//!
//! The paper calls the thread that reads the *consumer* and the one that stores the *producer*; here they are the *reader* and the *writer*.

use std::sync::mpsc::{
    Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel,
};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use jericho_sys::node_memory::NodeBuffer;

use super::files::Cached;
use crate::buffer;
use crate::case::{Case, Scale};
use crate::error::{Error, Result};
use crate::frames::Frames;
use crate::kind::Variant;
use crate::meter::Meter;
use crate::run::{Progress, Thread, Worker};

/// *Implications*, IV.C.4.
const DESCRIPTORS: usize = 128 << 10;
const FILE_BYTES: u64 = 4 << 30;
/// Records in memory, unless the paper's list is wanted, whose records take 8 GiB.
const RECORDS: usize = 1024;
/// Longest wait for a record. Then the thread looks whether the run has ended.
const WAIT: Duration = Duration::from_millis(20);

/// What a thread of a pair takes when it is made.
struct Taken<T>(Mutex<Option<T>>);

impl<T> Taken<T> {
    fn new(value: T) -> Taken<T> {
        Taken(Mutex::new(Some(value)))
    }

    fn take(&self) -> Result<T> {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = place.take();
        taken.ok_or_else(|| Error::new("two threads of a stream have the same part"))
    }
}

/// The ends of the two lists between the threads of a pair: of records to store, and of records to fill again.
struct Ends {
    put: Taken<SyncSender<NodeBuffer>>,
    take: Taken<Receiver<NodeBuffer>>,
    give: Taken<Sender<NodeBuffer>>,
    reuse: Taken<Receiver<NodeBuffer>>,
}

impl Ends {
    fn new() -> Ends {
        let (put, take) = sync_channel(DESCRIPTORS);
        let (give, reuse) = channel();
        Ends {
            put: Taken::new(put),
            take: Taken::new(take),
            give: Taken::new(give),
            reuse: Taken::new(reuse),
        }
    }
}

/// Returns the bytes of a file. Each thread has one: a reader its source, a writer its sink.
fn file_bytes(threads: usize, scale: Scale) -> u64 {
    scale.file_bytes(FILE_BYTES, threads, 64 << 10)
}

/// Returns the bytes of all files.
pub fn bytes(threads: usize, scale: Scale) -> u64 {
    threads as u64 * file_bytes(threads, scale)
}

/// Returns the number of records in the memory of a pair.
fn records(threads: usize, scale: Scale) -> usize {
    let pairs = (threads / 2).max(1) as u64;
    match scale.as_paper {
        true => DESCRIPTORS,
        false => RECORDS.min(((scale.data_bytes / pairs) >> 16).max(2) as usize),
    }
}

/// Returns the memory that a thread takes: that of the records, which readers allocate.
pub fn memory_bytes(variant: Variant, threads: usize, scale: Scale, index: usize) -> u64 {
    match index.is_multiple_of(2) {
        true => (records(threads, scale) * variant.request_bytes) as u64,
        false => 0,
    }
}

/// Makes a reader and a writer for each pair of seats.
pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let scratch = case.scratch()?;
    if !case.seats.len().is_multiple_of(2) {
        return Err(Error::new(format!(
            "stream has pairs of threads, and {} is odd; use an even number of --threads",
            case.seats.len()
        )));
    }
    let pairs = case.seats.len() / 2;
    let ends: Vec<Ends> = (0..pairs).map(|_| Ends::new()).collect();
    let bytes = file_bytes(case.seats.len(), case.scale);
    let records = records(case.seats.len(), case.scale);
    Ok(case.each(move |index, seat| {
        let (pair, request_bytes) = (index / 2, case.variant.request_bytes);
        let ends = &ends[pair];
        let dir = scratch.dir(case.kind.directory_of(index, case.targets.len()));
        if index.is_multiple_of(2) {
            let source = dir.join(format!("source.{pair}"));
            let pool = (0..records).map(|_| buffer::on(case.topology, seat.thread, request_bytes));
            return Ok(Box::new(Reader {
                pool: pool.collect::<Result<_>>()?,
                file: Cached::create(case, seat, &source, bytes, request_bytes)?,
                put: ends.put.take()?,
                reuse: ends.reuse.take()?,
                waiting: None,
                bytes,
                next: 0,
            }) as Box<dyn Worker>);
        }
        let sink = dir.join(format!("sink.{pair}"));
        let mut file = Cached::open(case, seat, &sink, request_bytes)?;
        file.drop_if_named(case, 0..bytes)?;
        Ok(Box::new(Writer {
            file,
            take: ends.take.take()?,
            give: ends.give.take()?,
            bytes,
            next: 0,
        }) as Box<dyn Worker>)
    }))
}

struct Reader {
    pool: Vec<NodeBuffer>,
    file: Cached,
    put: SyncSender<NodeBuffer>,
    reuse: Receiver<NodeBuffer>,
    /// A record that the list had no place for.
    waiting: Option<NodeBuffer>,
    bytes: u64,
    next: u64,
}

impl Worker for Reader {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        if let Some(record) = self.waiting.take() {
            match self.put.try_send(record) {
                Ok(()) => {}
                Err(TrySendError::Full(record)) => {
                    self.waiting = Some(record);
                    std::thread::sleep(Duration::from_micros(50));
                    return Ok(Progress::More);
                }
                // The writer has ended: so does the run.
                Err(TrySendError::Disconnected(_)) => {
                    return Ok(Progress::Finished);
                }
            }
        }
        let record = match self.pool.pop() {
            Some(record) => Some(record),
            None => match self.reuse.recv_timeout(WAIT) {
                Ok(record) => Some(record),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(Progress::Finished),
            },
        };
        let Some(mut record) = record else {
            return Ok(Progress::More);
        };
        self.file.read_into(self.next, &mut record, meter)?;
        self.next = (self.next + record.len() as u64) % self.bytes;
        self.waiting = Some(record);
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        self.file.frames()
    }

    fn confirm(&self) -> Result<Option<bool>> {
        self.file.confirm()
    }
}

struct Writer {
    file: Cached,
    take: Receiver<NodeBuffer>,
    give: Sender<NodeBuffer>,
    bytes: u64,
    next: u64,
}

impl Worker for Writer {
    fn step(&mut self, meter: &mut Meter) -> Result<Progress> {
        let mut record = match self.take.recv_timeout(WAIT) {
            Ok(record) => record,
            Err(RecvTimeoutError::Timeout) => return Ok(Progress::More),
            Err(RecvTimeoutError::Disconnected) => return Ok(Progress::Finished),
        };
        let began = Instant::now();
        // The paper's *conditioning*.
        record
            .iter_mut()
            .for_each(|byte| *byte = byte.wrapping_add(1));
        self.file.write_from(self.next, &record, began, meter)?;
        self.next = (self.next + record.len() as u64) % self.bytes;
        // The reader may have ended.
        let _ = self.give.send(record);
        Ok(Progress::More)
    }

    fn frames(&self) -> &Frames {
        self.file.frames()
    }

    fn confirm(&self) -> Result<Option<bool>> {
        self.file.confirm()
    }
}
