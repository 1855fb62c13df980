//! A queue on io_uring.
//!
//! `submit` checks a transfer and puts it into the backlog. `wait`, or `submit` for every fourth transfer, moves as many
//! transfers as fit from the backlog into the ring and enters the kernel. Devices that need stable writes get a copy. `complete`
//! handles each result: it makes a completion, or puts the rest of a short transfer back at the front of the backlog.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use jericho_sys::doorbell::{Doorbell, Signal};
use jericho_sys::errno;
use jericho_sys::memory::Mapping;
use jericho_sys::uring::{Completed, Operation, PushError, Request, Ring};

use crate::bounce::Bounce;
use crate::elsewhere::Elsewhere;
use crate::handle::{SECTOR_BYTES, stopped_error};
use crate::transfer::{check, length_bytes, operation};
use crate::{Cause, Completion, Device, Devices, Direction, IoError, Queue, Transfer, Wake};

/// Number of transfers that `submit` collects before it starts them. Starting each alone costs a system call each. Leaving all to
/// `wait` lets the device run dry while the owner handles completions, which costs a tenth of the random reads per second at depth
/// 32.
const START_BATCH: u32 = 4;
/// Transfers of other devices that are begun before the owner waits.
const SEND_BATCH: usize = 16;

pub(crate) struct RingQueue {
    ring: Ring,
    /// The thread that has entered the ring. The kernel may allow no other.
    owner: Option<ThreadId>,
    devices: Devices,
    buffers: Vec<Arc<Mapping>>,
    registration: Result<(), io::Error>,
    depth: u32,
    doorbell: Arc<Doorbell>,
    bounce: Bounce,
    backlog: VecDeque<Request>,
    /// Completions of transfers that did not reach the kernel.
    completed_early: Vec<Completion>,
    in_flight: usize,
    /// Number of transfers submitted since the ring was last entered.
    unstarted: u32,
    /// Empty between calls; kept for its allocation.
    completed: Vec<Completed>,
    /// The transfers of devices without a descriptor.
    elsewhere: Elsewhere,
    /// Transfers for it that are not begun yet: runs of one device, in order.
    unsent: Vec<(Arc<dyn Device>, Vec<Transfer>)>,
    unsent_count: usize,
}

impl RingQueue {
    /// Fails as `Ring::new` does.
    pub(crate) fn open(
        devices: &Devices,
        buffers: &[Arc<Mapping>],
        depth: u32,
    ) -> io::Result<RingQueue> {
        RingQueue::new(devices, buffers, depth, None)
    }

    fn new(
        devices: &Devices,
        buffers: &[Arc<Mapping>],
        depth: u32,
        signal: Option<Signal>,
    ) -> io::Result<RingQueue> {
        let doorbell = Arc::new(Doorbell::new()?);
        let (ring, registration) = open_ring(devices, buffers, depth, &doorbell)?;
        if let Err(error) = &registration {
            tracing::info!(
                %error,
                "the kernel does not register the cache for I/O, which costs some CPU; a higher \
                 limit on locked memory (ulimit -l) may help"
            );
        }
        Ok(RingQueue {
            ring,
            owner: None,
            devices: devices.clone(),
            buffers: buffers.to_vec(),
            registration,
            depth,
            unsent: Vec::new(),
            unsent_count: 0,
            elsewhere: Elsewhere::new(Arc::clone(&doorbell), signal),
            doorbell,
            bounce: Bounce::default(),
            backlog: VecDeque::new(),
            completed_early: Vec::new(),
            in_flight: 0,
            unstarted: 0,
            completed: Vec::new(),
        })
    }

    /// See `open_signalling_queue`.
    pub(crate) fn open_signalling(
        devices: &Devices,
        depth: u32,
        doorbell: &Doorbell,
    ) -> io::Result<RingQueue> {
        let signal = Some(doorbell.signal()?);
        let queue = RingQueue::new(devices, &[], depth, signal)?;
        queue.ring.signal(doorbell)?;
        Ok(queue)
    }

    /// Makes the calling thread the owner of the ring. If another thread has entered a single-issuer ring, replaces the ring, because
    /// the kernel lets no other thread enter it. Nothing may be in flight then.
    fn adopt(&mut self) -> io::Result<()> {
        let this = std::thread::current().id();
        if self.owner == Some(this) {
            return Ok(());
        }
        if self.owner.is_some() && self.ring.is_single_issuer() {
            assert_eq!(
                self.ring.in_flight(),
                0,
                "a queue was moved to another thread with transfers in flight"
            );
            let (ring, registration) =
                open_ring(&self.devices, &self.buffers, self.depth, &self.doorbell)?;
            self.ring = ring;
            self.registration = registration;
        }
        self.owner = Some(this);
        Ok(())
    }

    /// Starts the submitted transfers if that is possible now. After a failure, `wait` tries again and reports it.
    fn start_early(&mut self) {
        self.unstarted = 0;
        if self.adopt().is_ok() {
            self.refill();
            if let Err(error) = self.ring.start() {
                tracing::debug!(%error, "transfers start later");
            }
        }
    }

    /// Moves transfers from the backlog into the ring, as many as fit.
    fn refill(&mut self) {
        while let Some(mut request) = self.backlog.pop_front() {
            if request.operation == Operation::Write && self.device(&request).needs_stable_writes()
            {
                match self.bounce.copy(&mut request.segments) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.backlog.push_front(request);
                        break;
                    }
                    Err(error) => {
                        let cause = Cause::Errno(error.raw_os_error().unwrap_or(errno::ENOMEM));
                        let completion = self.stopped(&request, cause);
                        self.completed_early.push(completion);
                        continue;
                    }
                }
            }
            match self.ring.push(request) {
                Ok(()) => {}
                Err(PushError::Full(request)) => {
                    self.backlog.push_front(request);
                    break;
                }
                Err(PushError::Invalid(request)) => {
                    let completion = self.stopped(&request, Cause::Errno(errno::EINVAL));
                    self.completed_early.push(completion);
                }
            }
        }
    }

    /// Returns the completion of a request, or `None` when the rest of it goes back to the backlog.
    fn complete(&mut self, completed: Completed) -> Option<Completion> {
        let Completed {
            mut request,
            result,
        } = completed;
        let moved = match result {
            Ok(moved) => moved,
            Err(errno::EINTR) => {
                self.backlog.push_front(request);
                return None;
            }
            Err(errno) => return Some(self.stopped(&request, Cause::Errno(errno))),
        };
        request.done_bytes += moved;
        let total: usize = request.segments.iter().map(|segment| segment.len).sum();
        if request.done_bytes >= total {
            return Some(Completion {
                tag: request.tag,
                result: Ok(()),
            });
        }
        // As in the blocking calls: a read that ends inside a sector met the end of the file, and direct I/O would answer EINVAL
        // to a request for the rest.
        let ends = request.operation == Operation::Read
            && !(request.done_bytes as u64).is_multiple_of(SECTOR_BYTES);
        if moved == 0 || ends {
            return Some(self.stopped(&request, Cause::Short { done_bytes: 0 }));
        }
        self.backlog.push_front(request);
        None
    }

    /// Returns the device of a request that `check` has passed.
    fn device(&self, request: &Request) -> &Arc<dyn Device> {
        let device = self.devices.get(request.file as usize);
        device.expect("a device that `check` has found")
    }

    /// Gives the ring the devices that were appended to the list since it was opened, up to the one with this index.
    fn add_files(&mut self, index: usize) -> io::Result<()> {
        while self.ring.files() <= index {
            let device = self.devices.get(self.ring.files());
            let fd = device.and_then(|device| device.queue_fd());
            self.ring.add_file(fd)?;
        }
        Ok(())
    }

    /// Returns the device of a checked transfer if it has no descriptor.
    fn without_descriptor(&self, transfer: &Transfer) -> Option<Arc<dyn Device>> {
        let device = self.devices.get(usize::from(transfer.device))?;
        device.queue_fd().is_none().then(|| Arc::clone(device))
    }

    /// Has devices without a descriptor perform the checked transfers that wait for this.
    fn begin_elsewhere(&mut self) {
        self.unsent_count = 0;
        for (device, transfers) in self.unsent.drain(..) {
            if let Some(device) = device.asynchronous() {
                self.elsewhere.begin(device, transfers);
                continue;
            }
            // A device that was appended to the list later may have only blocking calls.
            let failed = |transfer: Transfer| Completion {
                tag: transfer.tag,
                result: Err(IoError {
                    operation: operation(transfer.direction),
                    device: device.name(),
                    offset_bytes: transfer.offset_bytes,
                    length_bytes: length_bytes(&transfer),
                    cause: Cause::Errno(errno::EOPNOTSUPP),
                }),
            };
            self.completed_early
                .extend(transfers.into_iter().map(failed));
        }
    }

    fn stopped(&self, request: &Request, cause: Cause) -> Completion {
        let operation = if request.operation == Operation::Read {
            "read"
        } else {
            "write"
        };
        let total = request
            .segments
            .iter()
            .map(|segment| segment.len as u64)
            .sum();
        let error = stopped_error(
            operation,
            &self.device(request).name(),
            request.offset_bytes,
            total,
            request.done_bytes as u64,
            cause,
        );
        Completion {
            tag: request.tag,
            result: Err(error),
        }
    }

    /// Fails all transfers of the backlog with the error that stopped the queue.
    fn fail_backlog(&mut self, error: &io::Error) {
        let cause = Cause::Errno(error.raw_os_error().unwrap_or(errno::EIO));
        while let Some(request) = self.backlog.pop_front() {
            let completion = self.stopped(&request, cause);
            self.completed_early.push(completion);
        }
    }
}

type Registration = io::Result<()>;

fn open_ring(
    devices: &Devices,
    buffers: &[Arc<Mapping>],
    depth: u32,
    doorbell: &Arc<Doorbell>,
) -> io::Result<(Ring, Registration)> {
    // The list may grow meanwhile: the ring gets later devices when a transfer needs them.
    let files: Vec<Option<BorrowedFd<'_>>> = devices.iter().map(|d| d.queue_fd()).collect();
    let mut ring = Ring::new(depth, &files, Arc::clone(doorbell))?;
    let registration = ring.register_buffers(buffers);
    Ok((ring, registration))
}

impl Queue for RingQueue {
    fn submit(&mut self, transfer: Transfer) {
        self.in_flight += 1;
        let tag = transfer.tag;
        if let Err(error) = check(&transfer, &self.devices) {
            self.completed_early.push(Completion {
                tag,
                result: Err(error),
            });
        } else if length_bytes(&transfer) == 0 {
            self.completed_early.push(Completion {
                tag,
                result: Ok(()),
            });
        } else if let Some(device) = self.without_descriptor(&transfer) {
            match self.unsent.last_mut() {
                Some((last, transfers)) if Arc::ptr_eq(last, &device) => transfers.push(transfer),
                _ => self.unsent.push((device, vec![transfer])),
            }
            self.unsent_count += 1;
            if self.unsent_count == SEND_BATCH {
                self.begin_elsewhere();
            }
        } else {
            let request = Request {
                tag,
                file: u32::from(transfer.device),
                operation: match transfer.direction {
                    Direction::Read => Operation::Read,
                    Direction::Write => Operation::Write,
                },
                offset_bytes: transfer.offset_bytes,
                segments: transfer.segments,
                done_bytes: 0,
            };
            if let Err(error) = self.add_files(usize::from(transfer.device)) {
                let cause = Cause::Errno(error.raw_os_error().unwrap_or(errno::EIO));
                let completion = self.stopped(&request, cause);
                self.completed_early.push(completion);
                return;
            }
            self.backlog.push_back(request);
            self.unstarted += 1;
            if self.unstarted == START_BATCH {
                self.start_early();
            }
        }
    }

    fn wait(&mut self, completions: &mut Vec<Completion>, timeout: Option<Duration>) {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let before = completions.len();
        self.unstarted = 0;
        self.begin_elsewhere();
        let adopted = self.adopt();
        if let Err(error) = &adopted {
            self.fail_backlog(error);
        }
        loop {
            self.refill();
            completions.append(&mut self.completed_early);
            self.elsewhere.take(completions);
            let left = if completions.len() > before {
                Some(Duration::ZERO)
            } else {
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
            };
            let rung = if adopted.is_ok() {
                let mut completed = std::mem::take(&mut self.completed);
                let rung = self.ring.wait(&mut completed, left);
                for completed in completed.drain(..) {
                    completions.extend(self.complete(completed));
                }
                self.completed = completed;
                rung
            } else {
                self.doorbell.sleep(left).or_else(|_| {
                    // The kernel lacks memory to put the thread to sleep.
                    std::thread::sleep(Duration::from_millis(1));
                    Ok(false)
                })
            };
            let rung = rung.unwrap_or_else(|error| {
                // `Ring::wait` returns no temporary error. Continuing would spin. Returning would give back memory that the
                // kernel still writes to.
                panic!("an I/O queue cannot enter the kernel: {error}")
            });
            self.elsewhere.take(completions);
            if completions.len() > before || rung || left == Some(Duration::ZERO) {
                break;
            }
        }
        self.in_flight -= completions.len() - before;
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.doorbell) as Arc<dyn Wake>
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn describe(&self) -> String {
        let buffers = match &self.registration {
            Ok(()) if self.buffers.is_empty() => "no registered buffers".to_string(),
            Ok(()) => format!("{} registered buffers", self.buffers.len()),
            Err(error) => format!("no registered buffers ({error})"),
        };
        format!("io_uring of depth {}, {buffers}", self.depth)
    }
}
