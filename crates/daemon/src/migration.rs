//! Migrates threads that use a file through the kernel to the node of its data. The daemon changes the CPU affinity of threads of
//! other processes, by thread id. The kernel permits a daemon of root to do so for all threads, and another daemon for threads of
//! its own user.
//!
//! A worker samples one request in [`SAMPLE_EVERY`] and adds it to a table of its own. When most of a thread's bytes were on one
//! node, and the amount justifies a migration, the worker sends an order to one thread, `placer`, which does everything that takes time.
//!
//! Programs on the fast path migrate their own threads. They ask the `placer` only for the companions of these threads.

mod companions;
mod laps;
mod placer;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_client::migration::migrator::NODES;
use jericho_client::migration::nodes::Nodes;
use jericho_format::threads::ThreadPolicy;
use jericho_topology::Topology;
use parking_lot::Mutex;

use self::placer::{LeftOut, Order, Placer, PlacerContext};
use crate::counters::MountCounts;
#[cfg(test)]
use crate::move_costs::BYTES_MIN;
use crate::move_costs::MoveCosts;
use crate::narrow_masks::MaskNotes;
use crate::tasks;

/// Number of requests of which a worker samples one. It is a prime, so that the samples include all threads that send requests in
/// turn.
const SAMPLE_EVERY: u32 = 17;
/// Threads for which a worker keeps separate sums.
const SEEN_MAX: usize = 64;
/// Longest period over which a thread's use is summed up.
const WINDOW: Duration = Duration::from_secs(1);
/// Fewest samples of a thread that justify a migration.
const SAMPLES_MIN: u32 = 4;
/// Shortest time between two requests of a client for companions on one node.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// Most waiting orders. Further orders are dropped, because workers sample their threads again.
const ORDERS_MAX: usize = 64;

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

/// Returns the policy for the companions of a thread, from the policy of the file that it uses and its program's word. The word restricts the file's policy and never
/// extends it. `None`: they stay.
pub(crate) fn policy_for_companions(file: ThreadPolicy, always: bool) -> Option<ThreadPolicy> {
    match file {
        ThreadPolicy::Never => None,
        ThreadPolicy::Always if always => Some(ThreadPolicy::Always),
        ThreadPolicy::Always | ThreadPolicy::Adaptive => Some(ThreadPolicy::Adaptive),
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
    /// When a client's last request for companions on a node was accepted, by owner number and node.
    asked: Mutex<HashMap<(u16, u16), Instant>>,
    closed: AtomicBool,
}

impl Migrator {
    /// Returns the migrator of a machine that nobody has measured.
    #[cfg(test)]
    pub fn new(topology: &Topology, counts: Arc<MountCounts>) -> Migrator {
        let masks = Arc::new(MaskNotes::new().expect("memory"));
        Migrator::with_costs(topology, &MoveCosts::default(), counts, masks, false)
    }

    /// Returns the migrator of a mount. `with_parent`: the companions of the threads that it migrates come with them.
    pub fn with_costs(
        topology: &Topology,
        costs: &MoveCosts,
        counts: Arc<MountCounts>,
        masks: Arc<MaskNotes>,
        with_parent: bool,
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
            context: Arc::new(PlacerContext::new(nodes, costs, counts, masks, with_parent)),
            migrations: Mutex::new(None),
            asked: Mutex::default(),
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
                    self.order(Order {
                        tid,
                        at_ticks: tasks::now_ticks(),
                        node,
                        policy,
                        inline: false,
                        bytes: usage.here,
                    });
                }
            }
        });
    }

    /// Returns whether a client may ask now for companions on a node: the last time was long enough ago. `asks`: the client's owner number, and the node. The limit
    /// is for each node, so that the `placer` learns that a program uses several nodes.
    pub fn may_ask(&self, asks: (u16, u16), now: Instant) -> bool {
        let is_node = usize::from(asks.1) < self.thread_nodes.len();
        is_node
            && self
                .asked
                .lock()
                .get(&asks)
                .is_none_or(|at| now >= *at + ASK_EVERY)
    }

    /// Does the same, and counts the request.
    pub fn accepts(&self, asks: (u16, u16), now: Instant) -> bool {
        if usize::from(asks.1) >= self.thread_nodes.len() {
            return false;
        }
        let mut asked = self.asked.lock();
        asked.retain(|_, at| now < *at + ASK_EVERY);
        if asked.contains_key(&asks) {
            return false;
        }
        asked.insert(asks, now);
        true
    }

    /// Moves the companions of a thread of a program on the fast path, which works on `node`, to that node. Call it only if the mount moves companions.
    /// `at_ticks`: a moment before it was certain that the program has this thread.
    pub fn bring_companions(&self, tid: u32, at_ticks: u64, node: u16, policy: ThreadPolicy) {
        if self.has_several_nodes && tid != 0 {
            self.order(Order {
                tid,
                at_ticks,
                node,
                policy,
                inline: true,
                bytes: 0,
            });
        }
    }

    /// Returns the number of threads that access their data through the kernel and work on other nodes because their data's have too few CPUs.
    pub fn count_away(&self) -> u64 {
        self.context.count_away(Instant::now())
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
                .spawn(move || Placer::new(context).run(&orders));
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
        self.context.leave_out(is_left_out);
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

#[cfg(test)]
mod tests;
