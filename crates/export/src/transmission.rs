//! The transmission phase of a connection: reads requests, runs them concurrently, and sends replies as they end.
//!
//! # Invariants
//! - A request in the queue or in a worker has taken its share of the budget, and its reply is sent before the share is given back. So
//!   a client that does not read its replies cannot make the server hold more than the budget.
//! - A worker that sends a reply holds no range of the device, so a client that does not read delays no other client.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;

use jericho_storage::{AlignedBuffer, BLOCK_BYTES, IoError};
use parking_lot::{Condvar, Mutex};

use crate::budget::Budget;
use crate::disk::Zeroed;
use crate::ended::Ended;
use crate::export::Export;
use crate::negotiation::Agreed;
use crate::protocol::{EIO, ENOTSUP, PAYLOAD_BYTES_MAX};
use crate::reply;
use crate::request::{Command, REQUEST_BYTES, Request};
use crate::span::Span;

/// Maximum number of threads of a connection that call the device.
const WORKERS_MAX: usize = 16;
/// Space before the data of a read, for the reply's header. A block, so that the data stays aligned.
const HEADER_SPACE: usize = BLOCK_BYTES as usize;
/// Maximum size of the buffers of a connection: the largest read has the header's space and a part of a block more than its data.
const BUFFER_BYTES_MAX: usize = PAYLOAD_BYTES_MAX as usize + HEADER_SPACE + BLOCK_BYTES as usize;
/// Maximum number of runs in a reply about the block status. The client asks again for the rest.
const STATUS_RUNS_MAX: usize = 1024;

const _: () = assert!(reply::READ_HEADER_BYTES_MAX <= HEADER_SPACE);

const IN_A_REQUEST: &str = "in the middle of a request";

/// A request with its memory.
struct Job {
    cookie: u64,
    command: Command,
    /// The blocks of a read or write. A read has `HEADER_SPACE` before them.
    buffer: Option<(Span, AlignedBuffer)>,
    /// Bytes taken from the budget.
    taken_bytes: usize,
}

/// The result of a request.
enum Outcome {
    Reply(Vec<u8>),
    /// The blocks of the job's buffer are read.
    BlocksRead,
    Failed {
        error: u32,
        why: String,
    },
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    workers: usize,
    /// Workers that wait for a job.
    idle: usize,
    is_closed: bool,
}

struct Output<W> {
    stream: W,
    /// Why the first failed reply failed. Later replies are not sent.
    failure: Option<Ended>,
}

struct Transmission<'e, W> {
    export: &'e Export,
    agreed: Agreed,
    output: Mutex<Output<W>>,
    budget: Budget,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// One message about failures of the device is enough for a connection.
    has_logged: AtomicBool,
    client: &'e str,
}

/// Serves requests until the client disconnects or the connection breaks. All requests have ended when it returns.
pub(crate) fn transmit<W: Write + Send>(
    export: &Export,
    agreed: Agreed,
    client: &str,
    input: &mut impl Read,
    output: W,
) -> Result<(), Ended> {
    let transmission = Transmission {
        export,
        agreed,
        output: Mutex::new(Output {
            stream: output,
            failure: None,
        }),
        budget: Budget::new(BUFFER_BYTES_MAX),
        queue: Mutex::default(),
        arrived: Condvar::new(),
        has_logged: AtomicBool::new(false),
        client,
    };
    let read = std::thread::scope(|scope| {
        let read = transmission.read_requests(scope, input);
        transmission.queue.lock().is_closed = true;
        transmission.arrived.notify_all();
        read
    });
    read?;
    match transmission.output.into_inner().failure {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// Reads the fixed part of a request. Returns `None` at the end of the connection.
fn read_request(input: &mut impl Read) -> Result<Option<Request>, Ended> {
    let mut bytes = [0; REQUEST_BYTES];
    let first = loop {
        match input.read(&mut bytes) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            first => break first.map_err(Ended::reading(IN_A_REQUEST))?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    input
        .read_exact(&mut bytes[first..])
        .map_err(Ended::reading(IN_A_REQUEST))?;
    let request = Request::parse(&bytes).map_err(|magic| {
        Ended::Protocol(format!("{magic:#x} instead of a request's magic number"))
    })?;
    if request.payload_bytes() > PAYLOAD_BYTES_MAX {
        return Err(Ended::Protocol(format!(
            "a write of {} bytes; at most {PAYLOAD_BYTES_MAX} are accepted",
            request.length_bytes
        )));
    }
    Ok(Some(request))
}

/// Reads the payload of a refused request.
fn skip(input: &mut impl Read, length_bytes: u32) -> Result<(), Ended> {
    let length_bytes = u64::from(length_bytes);
    let skipped = std::io::copy(&mut input.take(length_bytes), &mut std::io::sink());
    match skipped.map_err(Ended::reading(IN_A_REQUEST))? == length_bytes {
        true => Ok(()),
        false => Err(Ended::Closed(IN_A_REQUEST)),
    }
}

impl<W: Write + Send> Transmission<'_, W> {
    fn read_requests<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        input: &mut impl Read,
    ) -> Result<(), Ended> {
        while let Some(request) = read_request(input)? {
            if request.is_disconnect() {
                return Ok(());
            }
            match request.check(self.export, self.agreed) {
                Err(refusal) => {
                    skip(input, request.payload_bytes())?;
                    self.fail(request.cookie, refusal.error, refusal.why);
                }
                Ok(command) => {
                    let job = self.prepare(input, request.cookie, command)?;
                    self.submit(scope, job)?;
                }
            }
            if self.output.lock().failure.is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes a request's share of the budget, and reads its payload.
    fn prepare(&self, input: &mut impl Read, cookie: u64, command: Command) -> Result<Job, Ended> {
        let (bytes, header_space) = match &command {
            Command::Read(bytes) => (bytes, HEADER_SPACE),
            Command::Write { bytes, .. } => (bytes, 0),
            _ => {
                self.budget.take(0);
                return Ok(Job {
                    cookie,
                    command,
                    buffer: None,
                    taken_bytes: 0,
                });
            }
        };
        let span = Span::of(bytes.clone());
        let taken_bytes = header_space + span.size();
        self.budget.take(taken_bytes);
        let mut buffer = AlignedBuffer::new(taken_bytes);
        if let Command::Write { .. } = &command {
            let payload = &mut buffer.as_mut_slice()[span.inside.clone()];
            // The budget is not given back after a failure: it ends with the connection.
            input
                .read_exact(payload)
                .map_err(Ended::reading(IN_A_REQUEST))?;
        }
        Ok(Job {
            cookie,
            command,
            buffer: Some((span, buffer)),
            taken_bytes,
        })
    }

    /// Queues a request, and starts a worker if all are busy and there may be more.
    fn submit<'s>(&'s self, scope: &'s Scope<'s, '_>, job: Job) -> Result<(), Ended> {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(job);
        if queue.jobs.len() > queue.idle && queue.workers < WORKERS_MAX {
            let worker = std::thread::Builder::new().name("nbd-worker".into());
            match worker.spawn_scoped(scope, || self.work()) {
                Ok(_) => queue.workers += 1,
                Err(source) if queue.workers == 0 => {
                    return Err(Ended::Io {
                        action: "start a thread for it",
                        source,
                    });
                }
                // The others do the work.
                Err(_) => {}
            }
        }
        drop(queue);
        self.arrived.notify_one();
        Ok(())
    }

    /// Runs requests until the queue is closed and empty.
    fn work(&self) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None if queue.is_closed => return,
                    None => {
                        queue.idle += 1;
                        self.arrived.wait(&mut queue);
                        queue.idle -= 1;
                    }
                }
            };
            drop(queue);
            let taken_bytes = job.taken_bytes;
            self.run(job);
            self.budget.give_back(taken_bytes);
        }
    }

    /// Executes a request and sends its reply. A panic costs only this request.
    fn run(&self, mut job: Job) {
        let is_structured = self.agreed.has_structured_replies;
        let executed = catch_unwind(AssertUnwindSafe(|| self.execute(&mut job)));
        let outcome = match executed {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                if !self.has_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(client = self.client, %error, "a request failed on the device");
                }
                Outcome::Failed {
                    error: reply::error_of(&error),
                    why: error.to_string(),
                }
            }
            // The panic's message is on standard error.
            Err(_) => Outcome::Failed {
                error: EIO,
                why: "a defect in the server ended the request".into(),
            },
        };
        match (outcome, &mut job.buffer) {
            (Outcome::BlocksRead, Some((span, buffer))) => {
                let length = span.inside.len();
                let offset = span.blocks.start + span.inside.start as u64;
                let header = reply::read_header(is_structured, job.cookie, offset, length);
                // One message, without a copy of the data: the header goes before it.
                let data = HEADER_SPACE + span.inside.start;
                let message = &mut buffer.as_mut_slice()[data - header.len()..data + length];
                message[..header.len()].copy_from_slice(&header);
                self.send(message);
            }
            (Outcome::BlocksRead, None) => unreachable!("a read has a buffer"),
            (Outcome::Reply(message), _) => self.send(&message),
            (Outcome::Failed { error, why }, _) => self.fail(job.cookie, error, &why),
        }
    }

    fn execute(&self, job: &mut Job) -> Result<Outcome, IoError> {
        let (export, disk) = (self.export, &self.export.disk);
        match (&job.command, &mut job.buffer) {
            (Command::Read(_), Some((span, buffer))) => {
                disk.read(span, &mut buffer.as_mut_slice()[HEADER_SPACE..])?;
                return Ok(Outcome::BlocksRead);
            }
            (Command::Write { is_durable, .. }, Some((span, buffer))) => {
                disk.write(span, buffer.as_mut_slice(), *is_durable)?;
            }
            (Command::Read(_) | Command::Write { .. }, None) => {
                unreachable!("reads and writes have a buffer")
            }
            (Command::Flush, _) => disk.flush()?,
            (Command::Trim { bytes, is_durable }, _) => disk.trim(bytes.clone(), *is_durable)?,
            (Command::WriteZeroes { bytes, how }, _) => {
                if disk.write_zeroes(bytes.clone(), *how)? == Zeroed::NotFast {
                    return Ok(Outcome::Failed {
                        error: ENOTSUP,
                        why: "zeros are not faster than writes here".into(),
                    });
                }
            }
            (Command::BlockStatus { bytes, wants_one }, _) => {
                let runs_max = if *wants_one { 1 } else { STATUS_RUNS_MAX };
                let runs = export.status(bytes.clone(), runs_max)?;
                return Ok(Outcome::Reply(reply::block_status(job.cookie, &runs)));
            }
        }
        Ok(Outcome::Reply(reply::simple(job.cookie, 0)))
    }

    /// Sends the reply of a failed request.
    fn fail(&self, cookie: u64, error: u32, why: &str) {
        let is_structured = self.agreed.has_structured_replies;
        self.send(&reply::error(is_structured, cookie, error, why));
    }

    fn send(&self, message: &[u8]) {
        let mut output = self.output.lock();
        if output.failure.is_none()
            && let Err(error) = output.stream.write_all(message)
        {
            output.failure = Some(Ended::writing(error));
        }
    }
}
