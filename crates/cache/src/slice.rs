//! The interface of a slice: start, requests, stop.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, SliceMemory};
use jericho_storage::{Completion, Device, Queue};
use parking_lot::Mutex;

use crate::counters::Counts;
use crate::evictor::{Evictor, Job};
use crate::get::{self, GetDone, Grant};
use crate::latched::{self, Rounds};
use crate::object::{Error, Object};
use crate::state::{After, Shared, State, run};
use crate::{Counters, Done, Intent, Limits, PAGES_PER_GET_MAX, Usage, invalidate};

/// Frames of the smallest slice: 4 MiB. A few large requests could take all frames of a smaller one.
pub const FRAMES_MIN: u32 = 1024;
/// Maximum number of transfers that a queue keeps in flight.
const QUEUE_DEPTH: u32 = 128;

/// Settings of a slice.
#[derive(Clone, Debug)]
pub struct Config {
    /// Index of the slice in the volume; names its threads and segments.
    pub id: u16,
    /// Frames of 4096 bytes: `FRAMES_MIN`..=`jericho_shm::State::FRAMES_MAX`.
    pub frames: u32,
    /// The kernel's node that all memory of the slice is bound to; `None` if the kernel has no nodes.
    pub kernel_node: Option<u32>,
    /// CPUs of the home node, where the slice's threads run; empty means any CPU.
    pub cpus: Vec<u32>,
    /// Age at which a dirty page is written back.
    pub dirty_age: Duration,
}

/// Why a slice could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The node could not provide the memory.
    #[error(
        "slice {slice}: cannot get {bytes} bytes of cache on node {node:?}: {cause}; \
         give a smaller --cache or free memory on that node"
    )]
    Memory {
        /// The slice.
        slice: u16,
        /// Requested size.
        bytes: u64,
        /// Requested node.
        node: Option<u32>,
        /// The kernel's answer.
        cause: std::io::Error,
    },
    /// The devices' transfer queues could not be opened.
    #[error("slice {slice}: cannot start I/O: {cause}")]
    Queue {
        /// The slice.
        slice: u16,
        /// The cause.
        cause: jericho_storage::QueueError,
    },
    /// A thread could not be started.
    #[error("slice {slice}: cannot start a thread: {cause}")]
    Thread {
        /// The slice.
        slice: u16,
        /// The kernel's answer.
        cause: std::io::Error,
    },
}

/// A resident page of an object.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// Page number in the object.
    pub page: u64,
    /// The page is newer than the device.
    pub dirty: bool,
    /// The kernel's node that holds the frame, as reported by the kernel.
    pub kernel_node: Option<u32>,
}

/// A slice of the cache. All calls are thread-safe.
pub struct Slice {
    pub(crate) shared: Arc<Shared>,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Slice {
    /// Creates the memory, bound to its node and populated, and starts the two threads.
    pub fn start(config: &Config, devices: &[Arc<dyn Device>]) -> Result<Arc<Slice>, StartError> {
        let slice = config.id;
        let memory =
            SliceMemory::create(&format!("slice{slice}"), config.frames, config.kernel_node)
                .map_err(|cause| StartError::Memory {
                    slice,
                    bytes: u64::from(config.frames) * PAGE_BYTES,
                    node: config.kernel_node,
                    cause,
                })?;
        let open = || {
            jericho_storage::open_queue(devices, std::slice::from_ref(memory.frames()), QUEUE_DEPTH)
                .map_err(|cause| StartError::Queue { slice, cause })
        };
        let (read_queue, write_queue) = (open()?, open()?);
        let frames = config.frames;
        let free_low = (frames / 64).max(PAGES_PER_GET_MAX / 2);
        let limits = Limits {
            frames,
            free_low,
            free_high: (frames / 32).max(free_low + PAGES_PER_GET_MAX),
            dirty_background: frames / 10,
            dirty_max: frames * 3 / 10,
            dirty_age: config.dirty_age,
        };
        let shared = Arc::new(Shared {
            id: slice,
            memory,
            limits,
            state: Mutex::new(State::new(frames)),
            dirty_pages: 0.into(),
            reports: SegQueue::new(),
            reads: SegQueue::new(),
            read_waker: read_queue.waker(),
            jobs: SegQueue::new(),
            evict_waker: write_queue.waker(),
            closing: AtomicBool::new(false),
            parked: 0.into(),
            report_drain: OnceLock::new(),
            collector: OnceLock::new(),
            on_broken: OnceLock::new(),
            on_outage: OnceLock::new(),
            no_room: 0.into(),
            counts: Counts::default(),
        });
        let this = Slice {
            shared: shared.clone(),
            devices: devices.to_vec(),
            threads: Mutex::new(vec![]),
        };
        this.spawn("pipeline", &config.cpus, {
            let shared = shared.clone();
            move || pipeline(&shared, read_queue)
        })?;
        this.spawn("evictor", &config.cpus, move || {
            Evictor::new(shared, write_queue).run()
        })?;
        Ok(Arc::new(this))
    }

    fn spawn(
        &self,
        role: &str,
        cpus: &[u32],
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let slice = self.shared.id;
        let cpus = cpus.to_vec();
        let name = format!("{role}-{slice}");
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            if !cpus.is_empty()
                && let Err(error) = jericho_sys::affinity::set(None, &cpus)
            {
                tracing::warn!(slice, %error, "cannot keep the slice's thread on its node's CPUs");
            }
            jericho_sys::service::run(body);
        });
        self.threads
            .lock()
            .push(thread.map_err(|cause| StartError::Thread { slice, cause })?);
        Ok(())
    }

    /// Returns the index of the slice.
    pub fn id(&self) -> u16 {
        self.shared.id
    }

    /// Returns the memory, for inline hits.
    pub fn memory(&self) -> &SliceMemory {
        &self.shared.memory
    }

    /// Returns the current epoch, for reference marks.
    pub fn epoch(&self) -> u8 {
        self.shared.epoch()
    }

    /// Counts pages that inline lookups found and did not find.
    pub fn count(&self, hits: u64, misses: u64) {
        if hits > 0 {
            self.shared.counts.hits.add(hits);
        }
        if misses > 0 {
            self.shared.counts.misses.add(misses);
        }
    }

    /// Gets pages. Returns `None`, without any effect, when that needs waiting. `count` is 1..=`PAGES_PER_GET_MAX`.
    pub fn try_get(
        &self,
        object: &Arc<dyn Object>,
        first: u64,
        count: u32,
        intent: Intent,
    ) -> Result<Option<Grant>, Error> {
        get::try_get(&self.shared, object, first, count, intent)
    }

    /// Gets pages. `done` runs when the pages are in the cache, in this thread or in a thread of the slice. It may copy and call
    /// the slice, but must not wait.
    pub fn get(
        &self,
        object: &Arc<dyn Object>,
        first: u64,
        count: u32,
        intent: Intent,
        done: impl FnOnce(Result<Grant, Error>) + Send + 'static,
    ) {
        get::get(
            &self.shared,
            object,
            first,
            count,
            intent,
            Some(Box::new(done) as GetDone),
        );
    }

    /// Reads pages ahead of their use. Reports no failure.
    pub fn prefetch(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        get::get(&self.shared, object, first, count, Intent::Read, None);
    }

    /// Reports pages that were made dirty inline. For each of them `SliceMemory::write` returned that it was clean before.
    pub fn dirtied(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        get::report(&self.shared, object, first, count);
    }

    /// Returns whether writers should wait because too many pages are dirty.
    #[inline]
    pub fn is_throttling(&self) -> bool {
        self.shared.dirty() >= u64::from(self.shared.limits.dirty_max)
    }

    /// Runs `resume` once there are fewer dirty pages than the limit. Passes it an error when failed pages prevent that.
    pub fn when_not_throttling(&self, resume: impl FnOnce(Result<(), Error>) + Send + 'static) {
        self.shared.counts.throttled.fetch_add(1, Relaxed);
        let mut after = After {
            wake_evictor: true,
            ..After::default()
        };
        let mut state = self.shared.lock();
        let now = Instant::now();
        if state.throttled.is_empty() {
            state.throttled_since = now;
        }
        state.throttled.push_back(Box::new(resume));
        // Checks again under the lock, because the last write-back may have ended just before.
        state.retry_waiting(&self.shared, &mut after);
        state.fail_throttled(&self.shared, now, &mut after);
        drop(state);
        run(&self.shared, after);
    }

    /// Returns the objects that have pages newer than the device.
    pub fn dirty_objects(&self) -> Vec<u64> {
        let mut state = self.shared.lock();
        state.drain_reports(&self.shared);
        state.dirty.ids()
    }

    /// Returns the number of bytes that are newer than the device.
    pub fn dirty_bytes(&self) -> u64 {
        self.shared.dirty() * PAGE_BYTES
    }

    /// Writes back the dirty pages of an object in the range. `done` runs when they are written to the device, which is not
    /// flushed. It does not wait for pages that became dirty after the call.
    pub fn sync(&self, object: &Arc<dyn Object>, pages: Range<u64>, done: Done) {
        self.job(Job::Sync {
            object: object.id(),
            pages,
            done,
        });
    }

    /// Writes back all pages that are dirty at the time of the call.
    pub fn sync_all(&self, done: Done) {
        self.job(Job::SyncAll { done });
    }

    fn job(&self, job: Job) {
        if self.shared.closing.load(SeqCst) {
            let (Job::Sync { done, .. } | Job::SyncAll { done }) = job;
            return done(Err(Error::Closed));
        }
        self.shared.jobs.push(job);
        self.shared.evict_waker.wake();
    }

    /// Drops the object's pages in the range, dirty or not, after any I/O on them has ended. A page that is fetched after `done`
    /// comes from the place that `Object::resolve` returns then.
    pub fn invalidate(&self, object: u64, pages: Range<u64>, done: Done) {
        invalidate::invalidate(&self.shared, object, pages, done);
    }

    /// Fetches a page, zeroes the bytes `range` within it and makes it dirty. The caller has reserved space, or the page is on
    /// the device.
    pub fn zero_part(&self, object: &Arc<dyn Object>, page: u64, range: Range<usize>, done: Done) {
        zero_part(&self.shared, object, page, range, done);
    }

    /// Fetches the object's pages in the range and makes them dirty, so that write-back allocates new places for them. The caller
    /// has reserved space. Takes at most `PAGES_PER_GET_MAX` pages.
    pub fn touch(&self, object: &Arc<dyn Object>, pages: Range<u64>, done: Done) {
        touch(&self.shared, object, pages, done);
    }

    /// Returns the first page >= `from` of the object that is dirty or being written back.
    pub fn first_dirty(&self, object: u64, from: u64) -> Option<u64> {
        let shared = &self.shared;
        shared.drain_clients();
        let mut state = shared.lock();
        state.drain_reports(shared);
        let flight = state
            .writing
            .values()
            .filter_map(|w| w.first_of(object, from))
            .min();
        // The index may also name clean pages, so the state word decides. A page that is chosen but not yet in flight is in neither
        // `writing` nor the index; `chosen_first` finds it.
        let index = state
            .dirty
            .pages(object, from..u64::MAX)
            .into_iter()
            .find(|page| {
                let found = shared.memory.lookup(jericho_shm::Key::new(object, *page));
                found.is_some_and(|f| f.state.any(Flags::DIRTY.with(Flags::WRITE_BACK)))
            });
        [flight, index, state.chosen_first(object, from)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Returns the object's resident pages with the kernel's node of each, from move_pages(2).
    pub fn resident_of(&self, object: u64, pages: Range<u64>) -> Vec<Resident> {
        let memory = &self.shared.memory;
        let found: Vec<(u64, jericho_shm::State)> =
            invalidate::resident(&self.shared, object, &pages)
                .into_iter()
                .map(|(page, index)| (page, memory.entry(index).state()))
                .filter(|(_, word)| word.has(Flags::VALID))
                .collect();
        let offsets: Vec<usize> = found
            .iter()
            .map(|(_, word)| word.frame() as usize * PAGE_BYTES as usize)
            .collect();
        let nodes = memory.frames().nodes_of(&offsets).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot ask the kernel for the nodes of pages");
            vec![None; offsets.len()]
        });
        let newer = Flags::DIRTY.with(Flags::WRITE_BACK);
        let resident = |((page, word), kernel_node): ((u64, jericho_shm::State), _)| Resident {
            page,
            dirty: word.any(newer),
            kernel_node,
        };
        found.into_iter().zip(nodes).map(resident).collect()
    }

    /// Returns the counters since the slice was started.
    pub fn counters(&self) -> Counters {
        self.shared.counts.values()
    }

    /// Returns how many frames are used now.
    pub fn usage(&self) -> Usage {
        let shared = &self.shared;
        let frames = u64::from(shared.limits.frames);
        Usage {
            frames,
            resident: frames - u64::from(shared.lock().frames.free()),
            dirty: shared.dirty(),
        }
    }

    /// Stops the threads after all transfers in flight have ended. Pages that are dirty then are lost, so call `sync_all` first.
    /// Later requests fail with `Closed`.
    pub fn close(&self) {
        self.shared.closing.store(true, SeqCst);
        self.shared.read_waker.wake();
        self.shared.evict_waker.wake();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A callback in a thread of the slice may drop the last reference. A thread must not join itself.
            let own = thread.thread().id() == std::thread::current().id();
            if !own && thread.join().is_err() {
                tracing::error!(slice = self.shared.id, "a thread of the slice panicked");
            }
        }
        // The threads have ended, so the remaining callbacks run here.
        let mut after = After::default();
        let mut state = self.shared.lock();
        state.retry_waiting(&self.shared, &mut after);
        let waiting = state.throttled.drain(..);
        after
            .done
            .extend(waiting.map(|resume| (resume, Err(Error::Closed))));
        drop(state);
        after.wake_evictor = false;
        run(&self.shared, after);
        latched::retry(&self.shared);
        while let Some(Job::Sync { done, .. } | Job::SyncAll { done }) = self.shared.jobs.pop() {
            done(Err(Error::Closed));
        }
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.close();
    }
}

/// See `Slice::zero_part`.
fn zero_part(
    shared: &Arc<Shared>,
    object: &Arc<dyn Object>,
    page: u64,
    range: Range<usize>,
    done: Done,
) {
    let (again, of) = (shared.clone(), object.clone());
    let got: GetDone = Box::new(move |granted| {
        let mut grant = match granted {
            Ok(grant) => grant,
            Err(error) => return done(Err(error)),
        };
        let zeros = &[0; PAGE_BYTES as usize][..range.len()];
        let Err(latched) = grant.write(page, range.start, zeros) else {
            drop(grant);
            return done(Ok(()));
        };
        drop(grant);
        let shared = again.clone();
        let resume = Box::new(move || zero_part(&again, &of, page, range, done));
        latched::park(&shared, latched, resume);
    });
    get::get(shared, object, page, 1, Intent::Modify, Some(got));
}

/// See `Slice::touch`.
fn touch(shared: &Arc<Shared>, object: &Arc<dyn Object>, pages: Range<u64>, done: Done) {
    let (again, of) = (shared.clone(), object.clone());
    let (first, count) = (pages.start, (pages.end - pages.start) as u32);
    let got: GetDone = Box::new(move |granted| {
        let mut grant = match granted {
            Ok(grant) => grant,
            Err(error) => return done(Err(error)),
        };
        for page in pages.clone() {
            if let Err(latched) = grant.redirty(page) {
                drop(grant);
                let shared = again.clone();
                let resume = Box::new(move || touch(&again, &of, page..pages.end, done));
                return latched::park(&shared, latched, resume);
            }
        }
        drop(grant);
        done(Ok(()));
    });
    get::get(shared, object, first, count, Intent::Modify, Some(got));
}

/// How long the pipeline polls for more work before it sleeps, while reads are in flight. A sleep and the wake-up from it cost
/// more than a fast device needs for a block.
const POLL: Duration = Duration::from_micros(50);

/// Runs the pipeline thread: starts reads, ends them, and runs the callbacks of finished Gets.
fn pipeline(shared: &Arc<Shared>, mut queue: Box<dyn Queue>) {
    let mut completions = vec![];
    let mut rounds = Rounds::new();
    loop {
        rounds.check(shared);
        while let Some(transfer) = shared.reads.pop() {
            queue.submit(transfer);
        }
        let idle = queue.in_flight() == 0;
        if shared.closing.load(SeqCst) && idle && shared.reads.is_empty() {
            return;
        }
        if !idle {
            poll(shared, queue.as_mut(), &mut completions);
        }
        if completions.is_empty() && shared.reads.is_empty() {
            queue.wait(&mut completions, rounds.sleep(shared));
        }
        for completion in completions.drain(..) {
            get::read_ended(shared, completion);
            // Reads that the callback requested start before the other completions are handled.
            while let Some(transfer) = shared.reads.pop() {
                queue.submit(transfer);
            }
        }
    }
}

/// Starts submitted reads and polls briefly for completions and new reads. Yields the CPU between polls.
fn poll(shared: &Shared, queue: &mut dyn Queue, completions: &mut Vec<Completion>) {
    let begun = Instant::now();
    loop {
        queue.wait(completions, Some(Duration::ZERO));
        if !completions.is_empty() || !shared.reads.is_empty() || begun.elapsed() > POLL {
            return;
        }
        std::thread::yield_now();
    }
}
