//! Threads of programs that come through the kernel are moved to their data too, by their thread id, where the
//! kernel permits (a daemon of root: all; else those of the same user).
//!
//! A worker looks at one request in [`SAMPLE`] and adds it up in a table of its own. When a thread has used mostly one
//! node, and enough of it to be worth a move, it sends an order to one thread, the *placer*, which does all that takes
//! time: it reads where the thread is, narrows its mask, and puts the mask back once the thread was seen on its new CPUs.
//! (It waits for our answer at that moment and is moved when it wakes up: narrowing and widening at once would do nothing.)
//!
//! Invariants:
//! - A mask that is set is a part of the one that was found. One that is not ours any more when it is looked at again was set by
//!   the program: that thread is left alone for good.
//! - Every mask that was narrowed is put back after [`LEASE`] at the latest, and that of threads and processes which were
//!   started meanwhile and inherited it. One of those that chose the very same mask for itself in that time can't be told
//!   from one that inherited it: that is why the time is short.
//! - Threads of programs that are on the fast path place themselves: they are left alone here.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_client::migration::migrator::NODES;
use jericho_client::migration::nodes::{Idle, Nodes};
use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};
use jericho_topology::Topology;
use parking_lot::Mutex;

use crate::counters::MountCounts;
use crate::mounted::Mounted;
use crate::tasks::{self, Task};

/// One request in so many is looked at. A prime, so that threads that take turns are all met.
const SAMPLE: u32 = 17;
/// Threads that a worker keeps apart.
const SEEN: usize = 64;
/// A thread's use is added up for at most this long.
const WINDOW: Duration = Duration::from_secs(1);
/// Bytes in a window that are worth a move: a call through the kernel costs so much more than the distance that it takes
/// more of them than inline.
const WORTH: u64 = 16 << 20;
/// Requests of a thread that must have been looked at before anything is said about it.
const SAMPLES_MIN: u32 = 4;
/// A mask stays narrow for at most this long: longer than a read takes that has to wait for a device.
const LEASE: Duration = Duration::from_millis(20);
/// How often it is looked whether the thread has moved.
const LOOK: Duration = Duration::from_millis(1);
/// A thread that was placed is not placed again before this is over; doubled, four times at most, each time that it was
/// taken away from there.
const REST: Duration = Duration::from_millis(250);
/// How long it is remembered that a thread was placed.
const MEMORY: Duration = Duration::from_secs(4);
/// Threads that the placer keeps in mind; further ones are not placed.
const PLACED_MAX: usize = 1024;
/// Orders that wait; further ones are dropped, as the threads will be met again.
const ORDERS: usize = 64;
/// A node of whose CPUs' time less than this was idle takes nobody.
const FULL: f32 = 0.05;

/// A wish of a worker.
struct Order {
    tid: u32,
    node: u16,
}

/// What a worker has seen of a thread.
#[derive(Clone, Copy)]
struct Seen {
    tid: u32,
    node: u16,
    here: u64,
    elsewhere: u64,
    samples: u32,
    since: Option<Instant>,
}

const NOTHING: Seen = Seen {
    tid: 0,
    node: 0,
    here: 0,
    elsewhere: 0,
    samples: 0,
    since: None,
};

impl Seen {
    /// Adds an access; true when the thread should be on `node`.
    fn add(&mut self, tid: u32, node: u16, bytes: u64, policy: ThreadPolicy, now: Instant) -> bool {
        let is_over = self.since.is_none_or(|since| now - since > WINDOW);
        if self.tid != tid || is_over {
            *self = Seen {
                tid,
                node,
                since: Some(now),
                ..NOTHING
            };
        }
        self.samples += 1;
        if self.node == node {
            self.here += bytes;
        } else {
            self.elsewhere += bytes;
        }
        if self.elsewhere > self.here {
            (self.node, self.here, self.elsewhere) = (node, self.elsewhere, self.here);
        }
        let is_dominant = self.here / 4 * 3 >= self.elsewhere * 3;
        let is_enough = self.here >= WORTH && self.samples >= SAMPLES_MIN;
        let worth = policy == ThreadPolicy::Always || is_enough && is_dominant;
        if worth && self.node == node {
            self.since = None;
            return true;
        }
        false
    }
}

struct Samples {
    turn: u32,
    seen: [Seen; SEEN],
}

thread_local! {
    static SAMPLES: RefCell<Samples> = const {
        RefCell::new(Samples {
            turn: 0,
            seen: [NOTHING; SEEN],
        })
    };
}

/// Says of a process whether its threads place themselves.
pub(crate) type LeftOut = Box<dyn Fn(u32) -> bool + Send + Sync>;

/// What workers and placer share.
struct Shared {
    nodes: Nodes,
    node_of_cpu: Vec<u16>,
    idle: Idle,
    /// Whose threads place themselves.
    is_left_out: OnceLock<LeftOut>,
    counts: Arc<MountCounts>,
    start: Instant,
}

/// Moves the threads of one mount.
pub(crate) struct Follow {
    /// There is more than one node that threads could be on.
    is_wanted: bool,
    /// For each node the one whose CPUs are local to it.
    thread_nodes: Vec<u16>,
    shared: Arc<Shared>,
    /// Started by the first order.
    placer: Mutex<Option<(SyncSender<Order>, JoinHandle<()>)>>,
    closed: AtomicBool,
}

impl Follow {
    pub fn new(topology: &Topology, counts: Arc<MountCounts>) -> Follow {
        let node_of = |cpu| topology.node_of_cpu(cpu).map_or(u16::MAX, |node| node.0);
        let nodes = Nodes::new(node_of);
        let with_cpus = (0..NODES).filter(|n| !nodes.cpus_of(*n).is_empty());
        Follow {
            is_wanted: with_cpus.count() > 1,
            thread_nodes: (topology.nodes.iter())
                .map(|node| topology.thread_node(node.id).0)
                .collect(),
            shared: Arc::new(Shared {
                nodes,
                node_of_cpu: (0..=CpuMask::CPU_MAX).map(node_of).collect(),
                idle: Idle::new(),
                is_left_out: OnceLock::new(),
                counts,
                start: Instant::now(),
            }),
            placer: Mutex::new(None),
            closed: AtomicBool::new(false),
        }
    }

    /// A request of thread `tid` (0: nobody's) for `bytes` bytes whose home is `node`.
    #[inline]
    pub fn requested(&self, tid: u32, node: u16, bytes: u64, policy: ThreadPolicy) {
        if !self.is_wanted || tid == 0 || policy == ThreadPolicy::Never {
            return;
        }
        SAMPLES.with_borrow_mut(|samples| {
            samples.turn += 1;
            if samples.turn >= SAMPLE {
                samples.turn = 0;
                let node = *self.thread_nodes.get(usize::from(node)).unwrap_or(&node);
                let seen = &mut samples.seen[tid as usize % SEEN];
                if seen.add(tid, node, bytes * u64::from(SAMPLE), policy, Instant::now()) {
                    self.order(Order { tid, node });
                }
            }
        });
    }

    #[cold]
    fn order(&self, order: Order) {
        // Held for long by nobody but whoever starts or ends the placer.
        let Some(mut placer) = self.placer.try_lock() else {
            return;
        };
        if self.closed.load(Relaxed) {
            return;
        }
        if placer.is_none() {
            let (sender, orders) = sync_channel(ORDERS);
            let shared = self.shared.clone();
            let started = std::thread::Builder::new()
                .name("placer".into())
                .spawn(move || Placer::new(shared).run(&orders));
            match started {
                Ok(thread) => *placer = Some((sender, thread)),
                Err(error) => {
                    tracing::warn!(%error, "cannot start the thread that moves threads");
                    return;
                }
            }
        }
        if let Some((sender, _)) = &*placer
            && let Err(TrySendError::Disconnected(_)) = sender.try_send(order)
        {
            tracing::error!("the thread that moves threads is gone");
        }
    }

    /// Processes of which this is true are left alone: their threads place themselves. Said once.
    pub fn leave_out(&self, is_left_out: LeftOut) {
        let _ = self.shared.is_left_out.set(is_left_out);
    }

    /// Puts all masks back and ends the placer.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        let placer = self.placer.lock().take();
        if let Some((sender, thread)) = placer {
            drop(sender);
            if thread.join().is_err() {
                tracing::error!("the thread that moves threads had panicked");
            }
        }
    }
}

impl Mounted {
    /// A request for bytes of a file by thread `tid` (as the kernel names it in the request; 0: nobody's). Moves the
    /// thread, perhaps.
    #[inline]
    pub fn requested(&self, handle: &crate::Handle, tid: u32, bytes: usize) {
        let policy = handle.file.threads().policy().unwrap_or(self.threads());
        let node = self.node_of_slice(handle.file.slice()).0;
        self.follow.requested(tid, node, bytes as u64, policy);
    }
}

/// A thread that was placed.
struct Placed {
    task: Task,
    node: u16,
    found: CpuMask,
    set: CpuMask,
    at: Instant,
    /// When it was narrowed, in ticks since boot.
    since: u64,
    /// It is not placed again before.
    rest: Instant,
    /// How often it was placed there without staying.
    again: u32,
    /// The mask is narrow now.
    narrow: bool,
    /// Its program has set another mask meanwhile.
    hands_off: bool,
}

struct Placer {
    shared: Arc<Shared>,
    placed: Vec<Placed>,
    /// When those that need not be remembered were last forgotten.
    swept: Instant,
}

impl Placer {
    fn new(shared: Arc<Shared>) -> Placer {
        Placer {
            shared,
            placed: Vec::new(),
            swept: Instant::now(),
        }
    }

    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let order = match self.placed.iter().any(|p| p.narrow) {
                false => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
                true => orders.recv_timeout(LOOK),
            };
            let now = Instant::now();
            self.put_back(|placed| placed.has_moved() || now >= placed.at + LEASE);
            match order {
                Ok(order) => self.consider(&order, now),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.put_back(|_| true);
    }

    fn consider(&mut self, order: &Order, now: Instant) {
        self.forget(now);
        let node = usize::from(order.node);
        let Some((task, cpu)) = Task::find(order.tid) else {
            return;
        };
        let is_left_out = |pid| self.shared.is_left_out.get().is_some_and(|is| is(pid));
        let is_there = self.shared.node_of_cpu.get(cpu as usize) == Some(&order.node);
        if is_there || task.pid == std::process::id() || is_left_out(task.pid) {
            return;
        }
        let known = self.placed.iter().position(|p| p.task == task);
        let mut again = 0;
        if let Some(known) = known.and_then(|at| self.placed.get(at)) {
            if known.hands_off || known.narrow || now < known.rest {
                return;
            }
            if known.node == order.node {
                again = known.again + 1;
            }
        }
        if known.is_none() && self.placed.len() >= PLACED_MAX {
            return;
        }
        let ns = self.shared.start.elapsed().as_nanos() as u64 + 1;
        let idle = self.shared.idle.share(ns, &self.shared.nodes, node);
        if idle.is_some_and(|idle| idle < FULL) {
            return;
        }
        // Gone, or somebody else's whom we may not move: both are no news.
        let Ok(found) = affinity::mask(Some(task.tid)) else {
            return;
        };
        let set = found.and(&self.shared.nodes.cpus_of(node));
        // Before the mask is narrow: from then on it may be inherited.
        let Some(since) = tasks::now_ticks() else {
            return;
        };
        if set.is_empty() || set == found || affinity::set_mask(Some(task.tid), &set).is_err() {
            return;
        }
        self.shared.counts.threads_moved.fetch_add(1, Relaxed);
        tracing::debug!(tid = task.tid, node, "a thread was moved to its data");
        if let Some(at) = known {
            self.placed.swap_remove(at);
        }
        self.placed.push(Placed {
            task,
            node: order.node,
            found,
            set,
            at: now,
            since,
            rest: now + REST * (1 << again.min(4)),
            again,
            narrow: true,
            hands_off: false,
        });
    }

    /// Forgets, now and then, threads that were not placed for a while, and those that are gone.
    fn forget(&mut self, now: Instant) {
        if now - self.swept < WINDOW {
            return;
        }
        self.swept = now;
        self.placed
            .retain(|p| p.narrow || now < p.rest + MEMORY || p.hands_off && p.task.is_alive());
    }

    fn put_back(&mut self, is_over: impl Fn(&Placed) -> bool) {
        for placed in self.placed.iter_mut().filter(|p| p.narrow && is_over(p)) {
            placed.put_back();
        }
    }
}

impl Placed {
    /// Whether it has run on the CPUs that were left to it, or is gone.
    fn has_moved(&self) -> bool {
        match Task::find(self.task.tid) {
            Some((task, cpu)) => task != self.task || self.set.contains(cpu),
            None => true,
        }
    }

    /// Puts the mask back, here and where it was inherited.
    fn put_back(&mut self) {
        self.narrow = false;
        // The number may be another thread's by now.
        if self.task.is_alive() {
            match affinity::mask(Some(self.task.tid)) {
                Ok(mask) if mask == self.set => self.restore(self.task.tid),
                Ok(_) => self.hands_off = true,
                Err(_) => {}
            }
        }
        // Also when it has ended itself: what it has started goes on.
        for task in tasks::started_since(&self.task, self.since) {
            if affinity::mask(Some(task.tid)).is_ok_and(|mask| mask == self.set) && task.is_alive()
            {
                self.restore(task.tid);
            }
        }
    }

    fn restore(&self, tid: u32) {
        // Fails only when it has just ended.
        let _ = affinity::set_mask(Some(tid), &self.found);
    }
}

#[cfg(test)]
mod tests;
