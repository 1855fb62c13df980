//! The interface of a slice: start, requests, stop.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_format::PAGE_BYTES;
use jericho_shm::{Flags, Geometry, PageState, PageState as Word, SPILL_FRAMES, SliceMemory};
use jericho_storage::Devices;
use parking_lot::Mutex;

use crate::context::{Limits, SliceContext};
use crate::counters::{Counters, Usage};
use crate::effects::Effects;
use crate::evictor::Evictor;
use crate::grant::{self, Grant};
use crate::invalidate::resident;
use crate::object::{Error, Object};
use crate::requests::{Done, GetRequest, Intent, Latched, SyncJob};
use crate::scheduler::{self, perform};
use crate::shared::{Observer, SliceShared};
use crate::small_sync::SmallSync;
use crate::{operations, outage, pipeline, small_sync, waiting, write_back};

/// Frames of the smallest slice: 4 MiB. A few large requests could take all frames of a smaller one.
pub const FRAMES_MIN: u32 = 1024;
/// Maximum number of transfers that a queue keeps in flight.
const QUEUE_DEPTH: u32 = 128;

/// Settings of a slice.
#[derive(Clone, Debug)]
pub struct Config {
    /// Index of the slice in the volume; names its threads and segments.
    pub id: u16,
    /// Frames of 4096 bytes on the home node: `FRAMES_MIN`..=`jericho_shm::PageState::FRAMES_MAX`.
    pub frames: u32,
    /// The kernel's node that the memory of the slice is bound to, except for spill ranges; `None` if the kernel has no nodes.
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
         give a smaller --cache, free memory on that node, or allow memory of other nodes with --spill"
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

/// Returns the geometry of a slice with spill ranges.
fn spilling_geometry(frames: u32, spill_frames: u32) -> Geometry {
    let home = (frames / SPILL_FRAMES).max(1) * SPILL_FRAMES;
    let all = home.saturating_add(spill_frames).min(PageState::FRAMES_MAX);
    Geometry::new(all, home).expect("the frames at home are whole ranges, and not more than all")
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
    pub(crate) shared: Arc<SliceShared>,
    pub(crate) devices: Devices,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Slice {
    /// Creates the memory, bound to its node and populated, and starts the two threads.
    ///
    /// Pages may also be on devices that are appended to `devices` later.
    pub fn start(config: &Config, devices: impl Into<Devices>) -> Result<Arc<Slice>, StartError> {
        Slice::start_spilling(config, 0, devices)
    }

    /// Does the same as `start` for a slice that has up to `spill_frames` further frames in spill ranges, which have no memory at first. If
    /// there are any, `config.frames` is rounded down to a multiple of `SPILL_FRAMES`.
    pub fn start_spilling(
        config: &Config,
        spill_frames: u32,
        devices: impl Into<Devices>,
    ) -> Result<Arc<Slice>, StartError> {
        let devices = devices.into();
        let geometry = match spill_frames {
            0 => Geometry::for_frames(config.frames),
            _ => spilling_geometry(config.frames, spill_frames),
        };
        let slice = config.id;
        let memory = SliceMemory::create(&format!("slice{slice}"), geometry, config.kernel_node)
            .map_err(|cause| StartError::Memory {
                slice,
                bytes: u64::from(geometry.home_frames) * PAGE_BYTES,
                node: config.kernel_node,
                cause,
            })?;
        let open = || {
            jericho_storage::open_queue(
                &devices,
                std::slice::from_ref(memory.frames()),
                QUEUE_DEPTH,
            )
            .map_err(|cause| StartError::Queue { slice, cause })
        };
        let (read_queue, write_queue) = (open()?, open()?);
        let limits = Limits::new(geometry.home_frames, config.dirty_age);
        let context = SliceContext::new(slice, memory, limits);
        let (read_waker, evict_waker) = (read_queue.waker(), write_queue.waker());
        let shared = Arc::new(SliceShared::new(context, read_waker, evict_waker));
        let this = Slice {
            shared: shared.clone(),
            devices,
            threads: Mutex::new(vec![]),
        };
        this.spawn("pipeline", &config.cpus, {
            let shared = shared.clone();
            move || pipeline::run(&shared, read_queue)
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
        let slice = self.shared.context.id;
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
        self.shared.context.id
    }

    /// Returns the memory, for inline hits.
    pub fn memory(&self) -> &SliceMemory {
        &self.shared.context.memory
    }

    /// Returns the current epoch, for reference marks.
    pub fn epoch(&self) -> u8 {
        self.shared.context.epoch()
    }

    /// Counts bytes that the owner of pages has read from a device to compare them with their checksums.
    pub fn count_scrubbed(&self, bytes: u64) {
        let counts = &self.shared.context.counts;
        counts.scrubbed_bytes.fetch_add(bytes, Relaxed);
    }

    /// Counts a page that the owner of pages found damaged.
    pub fn count_checksum_error(&self) {
        let counts = &self.shared.context.counts;
        counts.checksum_errors.fetch_add(1, Relaxed);
    }

    /// Counts pages that inline lookups found and did not find.
    pub fn count(&self, hits: u64, misses: u64) {
        if hits > 0 {
            self.shared.context.counts.hits.add(hits);
        }
        if misses > 0 {
            self.shared.context.counts.misses.add(misses);
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
        let request = GetRequest {
            object: object.clone(),
            first,
            count,
            intent,
        };
        let pages = scheduler::try_get(&self.shared, request)?;
        Ok(pages.map(|pages| Grant::new(self.shared.clone(), pages)))
    }

    /// Gets pages. `done` runs when the pages are in the cache: in this thread, in a thread of the slice, or in another caller of the
    /// slice that takes the last step. It may copy and call the slice, but must not wait.
    pub fn get(
        &self,
        object: &Arc<dyn Object>,
        first: u64,
        count: u32,
        intent: Intent,
        done: impl FnOnce(Result<Grant, Error>) + Send + 'static,
    ) {
        let request = GetRequest {
            object: object.clone(),
            first,
            count,
            intent,
        };
        grant::get(&self.shared, request, done);
    }

    /// Reads pages ahead of their use. Reports no failure.
    pub fn prefetch(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        let request = GetRequest {
            object: object.clone(),
            first,
            count,
            intent: Intent::Read,
        };
        scheduler::get(&self.shared, request, None);
    }

    /// Reports pages that were made dirty inline. For each of them `SliceMemory::write` returned that it was clean before.
    pub fn dirtied(&self, object: &Arc<dyn Object>, first: u64, count: u32) {
        self.shared.report(object, first, count);
    }

    /// Returns whether writers should wait because too many pages are dirty.
    #[inline]
    pub fn is_throttling(&self) -> bool {
        self.shared.context.dirty() >= u64::from(self.shared.context.limits.dirty_max)
    }

    /// Runs `resume` once there are fewer dirty pages than the limit. Passes it an error when failed pages prevent that.
    pub fn when_not_throttling(&self, resume: impl FnOnce(Result<(), Error>) + Send + 'static) {
        self.shared.context.counts.throttled.fetch_add(1, Relaxed);
        let (shared, context) = (&self.shared, &self.shared.context);
        let mut effects = Effects {
            wake_evictor: true,
            ..Effects::default()
        };
        let mut state = shared.lock();
        let now = Instant::now();
        if state.throttled.is_empty() {
            state.throttled_since = now;
        }
        state.throttled.push_back(Box::new(resume));
        // Checks again under the lock, because the last write-back may have ended just before.
        waiting::retry(&mut state, context, &mut effects);
        outage::fail_throttled_if_hopeless(&mut state, context, now, &mut effects);
        drop(state);
        perform(shared, effects);
    }

    /// Runs `resume` once the latch has changed hands: in the pipeline thread, or in the thread that closes the slice. The wait is
    /// bounded, because the slice takes away a latch that is held for too long.
    pub fn when_unlatched(&self, latched: Latched, resume: impl FnOnce() + Send + 'static) {
        scheduler::park(&self.shared, latched, Box::new(resume));
    }

    /// Sets the observer, which learns of the beginning and end of each outage. The observer must not wait for the
    /// slice. Set once.
    pub fn set_on_outage(&self, observer: Observer) {
        let _ = self.shared.on_outage.set(observer);
    }

    /// Returns why new pages should not be written now: there is no space to write them back to. Pages that have space
    /// on the device may still be overwritten.
    pub fn no_room(&self) -> Option<Error> {
        if self.shared.context.no_room.load(Relaxed) == 0 {
            return None;
        }
        let state = self.shared.lock();
        state.outage.as_ref().map(|outage| outage.error.clone())
    }

    /// Returns the objects that have pages newer than the device.
    pub fn dirty_objects(&self) -> Vec<u64> {
        let mut state = self.shared.lock();
        state.drain_reports(&self.shared.context);
        state.dirty.ids()
    }

    /// Returns the number of bytes that are newer than the device.
    pub fn dirty_bytes(&self) -> u64 {
        self.shared.context.dirty() * PAGE_BYTES
    }

    /// Writes back the dirty pages of an object in the range. `done` runs when they are written to the device, which is not
    /// flushed. It does not wait for pages that became dirty after the call.
    pub fn sync(&self, object: &Arc<dyn Object>, pages: Range<u64>, done: Done) {
        self.job(SyncJob::Pages {
            object: object.id(),
            pages,
            done,
        });
    }

    /// Does the same as `sync` in the calling thread, which may have to wait for a device, if that takes few writes. Returns `None`
    /// if not; the caller then calls `sync`, which leaves out what this call has written. The caller holds no lock that
    /// the object takes. Instead of being written, pages may be in the object's next commit (`Object::log`).
    pub fn sync_small(
        &self,
        object: &Arc<dyn Object>,
        pages: &Range<u64>,
        how: SmallSync,
    ) -> Option<Result<(), Error>> {
        small_sync::sync(&self.shared, &self.devices, object, pages, how)
    }

    /// Writes back all pages that are dirty at the time of the call.
    pub fn sync_all(&self, done: Done) {
        self.job(SyncJob::All { done });
    }

    fn job(&self, job: SyncJob) {
        if self.shared.context.closing.load(SeqCst) {
            return job.close();
        }
        self.shared.jobs.push(job);
        self.shared.wake_evictor();
    }

    /// Drops the object's pages in the range, dirty or not, after any I/O on them has ended. A page that is fetched after `done`
    /// comes from the place that `Object::resolve` returns then.
    pub fn invalidate(&self, object: u64, pages: Range<u64>, done: Done) {
        operations::invalidate(&self.shared, object, pages, done);
    }

    /// Fetches a page, zeroes the bytes `range` within it and makes it dirty. The caller has reserved space, or the page is on
    /// the device.
    pub fn zero_part(&self, object: &Arc<dyn Object>, page: u64, range: Range<usize>, done: Done) {
        operations::zero_part(&self.shared, object, page, range, done);
    }

    /// Fetches the object's pages in the range and makes them dirty, so that write-back allocates new places for them. The caller
    /// has reserved space. Takes at most `PAGES_PER_GET_MAX` pages.
    pub fn touch(&self, object: &Arc<dyn Object>, pages: Range<u64>, done: Done) {
        operations::touch(&self.shared, object, pages, done);
    }

    /// Returns the first page >= `from` of the object that is dirty or being written back.
    pub fn first_dirty(&self, object: u64, from: u64) -> Option<u64> {
        let shared = &self.shared;
        shared.drain_clients();
        write_back::first_dirty(&mut shared.lock(), &shared.context, object, from)
    }

    /// Calls `each` with the object of each page in the table, in no order, and once for each of its pages. Does not see pages that
    /// enter the table meanwhile. Returns the number of entries that the table has.
    pub fn each_object(&self, mut each: impl FnMut(u64)) -> usize {
        let memory = &self.shared.context.memory;
        let entries = memory.geometry().entries();
        let keys = (0..entries).filter_map(|index| memory.entry(index).key());
        keys.for_each(|key| each(key.object()));
        entries as usize
    }

    /// Returns the object's resident pages with the kernel's node of each, from move_pages(2).
    pub fn resident_of(&self, object: u64, pages: Range<u64>) -> Vec<Resident> {
        let memory = &self.shared.context.memory;
        let found = resident(&self.shared.context, object, &pages).into_iter();
        let found: Vec<(u64, Word)> = found
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
        let resident = |((page, word), kernel_node): ((u64, Word), _)| Resident {
            page,
            dirty: word.any(newer),
            kernel_node,
        };
        found.into_iter().zip(nodes).map(resident).collect()
    }

    /// Returns the counters since the slice was started.
    pub fn counters(&self) -> Counters {
        self.shared.context.counts.values()
    }

    /// Returns how many frames are used now.
    pub fn usage(&self) -> Usage {
        let context = &self.shared.context;
        let state = self.shared.lock();
        let present = state.frames.present();
        Usage {
            frames: present.into(),
            // All frames at home are present.
            spilled: (present - context.limits.home_frames).into(),
            resident: (present - state.frames.free()).into(),
            dirty: context.dirty(),
        }
    }

    /// Stops the threads after all transfers in flight have ended. Pages that are dirty then are lost, so call `sync_all` first.
    /// Later requests fail with `Closed`.
    pub fn close(&self) {
        self.shared.context.closing.store(true, SeqCst);
        self.shared.read_waker.wake();
        self.shared.wake_evictor();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A callback in a thread of the slice may drop the last reference. A thread must not join itself.
            let own = thread.thread().id() == std::thread::current().id();
            if !own && thread.join().is_err() {
                tracing::error!(
                    slice = self.shared.context.id,
                    "a thread of the slice panicked"
                );
            }
        }
        // The threads have ended, so the remaining callbacks run here.
        let mut effects = Effects::default();
        let mut state = self.shared.lock();
        waiting::retry(&mut state, &self.shared.context, &mut effects);
        let waiting = state.throttled.drain(..);
        effects
            .done
            .extend(waiting.map(|resume| (resume, Err(Error::Closed))));
        drop(state);
        effects.wake_evictor = false;
        perform(&self.shared, effects);
        scheduler::retry_parked(&self.shared);
        while let Some(job) = self.shared.jobs.pop() {
            job.close();
        }
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        self.close();
    }
}
