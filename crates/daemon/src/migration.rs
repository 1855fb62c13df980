//! Migrates threads that use a file through the kernel to the node of its data. The daemon changes the CPU affinity of threads of
//! other processes, by thread id. The kernel permits a daemon of root to do so for all threads, and another daemon for threads of
//! its own user.
//!
//! A worker samples one request in [`SAMPLE_EVERY`] and adds it to a table of its own. When most of a thread's bytes were on one
//! node, and the amount justifies a migration, the worker sends an order to one thread, `placer`. The `placer` does everything
//! that takes time: it reads on which CPU the thread ran last, narrows the thread's mask, and restores the mask when the thread
//! has run on its new CPUs. The thread sleeps when its mask is narrowed, because it waits for the daemon's answer, and the kernel
//! moves it when it wakes up. So the `placer` cannot restore the mask at once.
//!
//! Invariants:
//! - A narrowed mask is a subset of the original mask. If the `placer` finds another mask when it is about to restore one, the
//!   program has set that mask. The `placer` then never changes that thread's mask again.
//! - The `placer` restores every narrowed mask after at most [`NARROW_MAX`]. It also restores the masks of threads and processes
//!   that inherited it. It cannot tell an inherited mask from an equal mask that such a thread has set itself in that time: the
//!   time is short for that reason.
//! - This module leaves programs on the fast path alone: they migrate their own threads.

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
#[cfg(test)]
use crate::move_costs::BYTES_MIN;
use crate::move_costs::MoveCosts;
use crate::tasks::{self, Task};

/// Number of requests of which a worker samples one. It is a prime, so that the samples include all threads that send requests in
/// turn.
const SAMPLE_EVERY: u32 = 17;
/// Threads for which a worker keeps separate sums.
const SEEN_MAX: usize = 64;
/// Longest period over which a thread's use is summed up.
const WINDOW: Duration = Duration::from_secs(1);
/// Fewest samples of a thread that justify a migration.
const SAMPLES_MIN: u32 = 4;
/// Longest time that a mask stays narrow. A read that waits for a device takes less.
const NARROW_MAX: Duration = Duration::from_millis(20);
/// Time between two checks whether a thread has moved.
const POLL: Duration = Duration::from_millis(1);
/// Time before a thread is migrated again. Doubles, up to four times, with each migration to the same node.
const PAUSE: Duration = Duration::from_millis(250);
/// Time for which the `placer` remembers a thread after the thread's pause.
const REMEMBERED: Duration = Duration::from_secs(4);
/// Most threads that the `placer` remembers. It does not migrate further threads.
const MIGRATED_MAX: usize = 1024;
/// Most waiting orders. Further orders are dropped, because workers sample their threads again.
const ORDERS_MAX: usize = 64;
/// Smallest idle share of a node's CPUs with which the node accepts threads.
const IDLE_MIN: f32 = 0.05;

/// A worker's order to migrate a thread.
struct Order {
    tid: u32,
    node: u16,
}

/// A worker's samples of a thread: the bytes on the node that it used most, and on all others.
#[derive(Clone, Copy)]
struct Usage {
    tid: u32,
    node: u16,
    here: u64,
    elsewhere: u64,
    samples: u32,
    since: Option<Instant>,
}

const NO_USAGE: Usage = Usage {
    tid: 0,
    node: 0,
    here: 0,
    elsewhere: 0,
    samples: 0,
    since: None,
};

impl Usage {
    /// Adds an access. Returns true when the thread should run on `node`, for which `bytes_min` bytes on one node are needed.
    fn add_above(
        &mut self,
        bytes_min: u64,
        (tid, node, bytes): (u32, u16, u64),
        policy: ThreadPolicy,
        now: Instant,
    ) -> bool {
        let is_over = self.since.is_none_or(|since| now - since > WINDOW);
        if self.tid != tid || is_over {
            *self = Usage {
                tid,
                node,
                since: Some(now),
                ..NO_USAGE
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
        let is_enough = self.here >= bytes_min && self.samples >= SAMPLES_MIN;
        let worth = policy == ThreadPolicy::Always || is_enough && is_dominant;
        if worth && self.node == node {
            self.since = None;
            return true;
        }
        false
    }

    /// Adds an access, with the default costs.
    #[cfg(test)]
    fn add(&mut self, tid: u32, node: u16, bytes: u64, policy: ThreadPolicy, now: Instant) -> bool {
        self.add_above(BYTES_MIN, (tid, node, bytes), policy, now)
    }
}

struct Samples {
    since_sample: u32,
    threads: [Usage; SEEN_MAX],
}

thread_local! {
    static SAMPLES: RefCell<Samples> = const {
        RefCell::new(Samples {
            since_sample: 0,
            threads: [NO_USAGE; SEEN_MAX],
        })
    };
}

/// Tells whether the threads of a process migrate themselves.
pub(crate) type LeftOut = Box<dyn Fn(u32) -> bool + Send + Sync>;

/// What workers and the `placer` share.
struct PlacerContext {
    nodes: Nodes,
    node_of_cpu: Vec<u16>,
    idle: Idle,
    /// Tells which processes migrate their own threads.
    is_left_out: OnceLock<LeftOut>,
    counts: Arc<MountCounts>,
    start: Instant,
}

/// Migrates the threads of one mount.
pub(crate) struct Migrator {
    /// Threads can run on more than one node.
    has_several_nodes: bool,
    /// For each node, the node whose CPUs are nearest to it.
    thread_nodes: Vec<u16>,
    /// For each node, the bytes in a window that justify a migration to it.
    bytes_min: Vec<u64>,
    context: Arc<PlacerContext>,
    /// The `placer` thread and its queue. The first order starts the thread.
    migrations: Mutex<Option<(SyncSender<Order>, JoinHandle<()>)>>,
    closed: AtomicBool,
}

impl Migrator {
    /// Returns the migrator of a machine that nobody has measured.
    #[cfg(test)]
    pub fn new(topology: &Topology, counts: Arc<MountCounts>) -> Migrator {
        Migrator::with_costs(topology, &MoveCosts::default(), counts)
    }

    pub fn with_costs(
        topology: &Topology,
        costs: &MoveCosts,
        counts: Arc<MountCounts>,
    ) -> Migrator {
        let node_of = |cpu| topology.node_of_cpu(cpu).map_or(u16::MAX, |node| node.0);
        let nodes = Nodes::new(node_of);
        let with_cpus = (0..NODES).filter(|n| !nodes.cpus_of(*n).is_empty());
        Migrator {
            has_several_nodes: with_cpus.count() > 1,
            thread_nodes: (topology.nodes.iter())
                .map(|node| topology.thread_node(node.id).0)
                .collect(),
            bytes_min: (0..topology.nodes.len())
                .map(|node| costs.bytes_min(node))
                .collect(),
            context: Arc::new(PlacerContext {
                nodes,
                node_of_cpu: (0..=CpuMask::CPU_MAX).map(node_of).collect(),
                idle: Idle::new(),
                is_left_out: OnceLock::new(),
                counts,
                start: Instant::now(),
            }),
            migrations: Mutex::new(None),
            closed: AtomicBool::new(false),
        }
    }

    /// Records a request of thread `tid` for `bytes` bytes on `node`. `tid` 0: the thread is unknown.
    #[inline]
    pub fn requested(&self, tid: u32, node: u16, bytes: u64, policy: ThreadPolicy) {
        if !self.has_several_nodes || tid == 0 || policy == ThreadPolicy::Never {
            return;
        }
        SAMPLES.with_borrow_mut(|samples| {
            samples.since_sample += 1;
            if samples.since_sample >= SAMPLE_EVERY {
                samples.since_sample = 0;
                let node = *self.thread_nodes.get(usize::from(node)).unwrap_or(&node);
                let bytes_min = *self.bytes_min.get(usize::from(node)).unwrap_or(&u64::MAX);
                let usage = &mut samples.threads[tid as usize % SEEN_MAX];
                let sample = (tid, node, bytes * u64::from(SAMPLE_EVERY));
                if usage.add_above(bytes_min, sample, policy, Instant::now()) {
                    self.order(Order { tid, node });
                }
            }
        });
    }

    #[cold]
    fn order(&self, order: Order) {
        // Only the start and the end of the `placer` hold the lock for long.
        let Some(mut migrations) = self.migrations.try_lock() else {
            return;
        };
        if self.closed.load(Relaxed) {
            return;
        }
        if migrations.is_none() {
            let (sender, orders) = sync_channel(ORDERS_MAX);
            let context = self.context.clone();
            let started = std::thread::Builder::new()
                .name("placer".into())
                .spawn(move || Migrations::new(context).run(&orders));
            match started {
                Ok(thread) => *migrations = Some((sender, thread)),
                Err(error) => {
                    tracing::warn!(%error, "cannot start the thread that migrates threads");
                    return;
                }
            }
        }
        if let Some((sender, _)) = &*migrations
            && let Err(TrySendError::Disconnected(_)) = sender.try_send(order)
        {
            tracing::error!("the thread that migrates threads has ended");
        }
    }

    /// Sets the function that tells which processes are left alone, because their threads migrate themselves. Only the first call
    /// counts.
    pub fn leave_out(&self, is_left_out: LeftOut) {
        let _ = self.context.is_left_out.set(is_left_out);
    }

    /// Restores all masks and ends the `placer`.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        let migrations = self.migrations.lock().take();
        if let Some((sender, thread)) = migrations {
            drop(sender);
            if thread.join().is_err() {
                tracing::error!("the thread that migrates threads has panicked");
            }
        }
    }
}

/// A thread that was migrated.
struct Migrated {
    task: Task,
    node: u16,
    original: CpuMask,
    narrowed: CpuMask,
    begun: Instant,
    /// When the mask was narrowed, in ticks since boot.
    narrowed_ticks: u64,
    /// The `placer` does not migrate the thread again before this time.
    not_before: Instant,
    /// Number of times that the thread was migrated to this node and left it again.
    repeats: u32,
    /// The mask is narrow now.
    is_narrow: bool,
    /// The program has set another mask, so the `placer` leaves the thread alone.
    left_alone: bool,
}

/// The threads that the `placer` has migrated.
struct Migrations {
    context: Arc<PlacerContext>,
    threads: Vec<Migrated>,
    /// When `forget` last ran.
    swept: Instant,
}

impl Migrations {
    fn new(context: Arc<PlacerContext>) -> Migrations {
        Migrations {
            context,
            threads: Vec::new(),
            swept: Instant::now(),
        }
    }

    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            let order = match self.threads.iter().any(|p| p.is_narrow) {
                false => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
                true => orders.recv_timeout(POLL),
            };
            let now = Instant::now();
            self.restore_masks(|thread| thread.has_moved() || now >= thread.begun + NARROW_MAX);
            match order {
                Ok(order) => self.migrate(&order, now),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.restore_masks(|_| true);
    }

    fn migrate(&mut self, order: &Order, now: Instant) {
        self.forget(now);
        let node = usize::from(order.node);
        let Some((task, cpu)) = Task::find(order.tid) else {
            return;
        };
        let is_left_out = |pid| self.context.is_left_out.get().is_some_and(|is| is(pid));
        let is_there = self.context.node_of_cpu.get(cpu as usize) == Some(&order.node);
        if is_there || task.pid == std::process::id() || is_left_out(task.pid) {
            return;
        }
        let known = self.threads.iter().position(|p| p.task == task);
        let mut repeats = 0;
        if let Some(known) = known.and_then(|at| self.threads.get(at)) {
            if known.left_alone || known.is_narrow || now < known.not_before {
                return;
            }
            if known.node == order.node {
                repeats = known.repeats + 1;
            }
        }
        if known.is_none() && self.threads.len() >= MIGRATED_MAX {
            return;
        }
        let ns = self.context.start.elapsed().as_nanos() as u64 + 1;
        let idle = self.context.idle.share(ns, &self.context.nodes, node);
        if idle.is_some_and(|idle| idle < IDLE_MIN) {
            return;
        }
        // Fails when the thread has ended, or belongs to a user whose threads the daemon may not move.
        let Ok(original) = affinity::mask(Some(task.tid)) else {
            return;
        };
        let narrowed = original.and(&self.context.nodes.cpus_of(node));
        // Reads the time before it narrows the mask, because new threads inherit the mask from then on.
        let Some(since) = tasks::now_ticks() else {
            return;
        };
        if narrowed.is_empty()
            || narrowed == original
            || affinity::set_mask(Some(task.tid), &narrowed).is_err()
        {
            return;
        }
        self.context.counts.threads_moved.fetch_add(1, Relaxed);
        tracing::debug!(tid = task.tid, node, "migrated a thread to its data");
        if let Some(at) = known {
            self.threads.swap_remove(at);
        }
        self.threads.push(Migrated {
            task,
            node: order.node,
            original,
            narrowed,
            begun: now,
            narrowed_ticks: since,
            not_before: now + PAUSE * (1 << repeats.min(4)),
            repeats,
            is_narrow: true,
            left_alone: false,
        });
    }

    /// Forgets, at most once per window, threads that were not migrated for a while. Remembers threads that are left alone until
    /// they end.
    fn forget(&mut self, now: Instant) {
        if now - self.swept < WINDOW {
            return;
        }
        self.swept = now;
        self.threads.retain(|p| {
            p.is_narrow || now < p.not_before + REMEMBERED || p.left_alone && p.task.is_alive()
        });
    }

    fn restore_masks(&mut self, is_over: impl Fn(&Migrated) -> bool) {
        for thread in self
            .threads
            .iter_mut()
            .filter(|p| p.is_narrow && is_over(p))
        {
            thread.restore_masks();
        }
    }
}

impl Migrated {
    /// Returns whether the thread has run on the CPUs of its narrowed mask, or has ended.
    fn has_moved(&self) -> bool {
        match Task::find(self.task.tid) {
            Some((task, cpu)) => task != self.task || self.narrowed.contains(cpu),
            None => true,
        }
    }

    /// Restores the thread's mask, and the masks of the threads that inherited it.
    fn restore_masks(&mut self) {
        self.is_narrow = false;
        // The id may belong to another thread by now.
        if self.task.is_alive() {
            match affinity::mask(Some(self.task.tid)) {
                Ok(mask) if mask == self.narrowed => self.restore(self.task.tid),
                Ok(_) => self.left_alone = true,
                Err(_) => {}
            }
        }
        // Threads that this one has started run on after its end.
        for task in tasks::started_since(&self.task, self.narrowed_ticks) {
            if affinity::mask(Some(task.tid)).is_ok_and(|mask| mask == self.narrowed)
                && task.is_alive()
            {
                self.restore(task.tid);
            }
        }
    }

    fn restore(&self, tid: u32) {
        // Fails only if the thread has just ended.
        let _ = affinity::set_mask(Some(tid), &self.original);
    }
}

#[cfg(test)]
mod tests;
