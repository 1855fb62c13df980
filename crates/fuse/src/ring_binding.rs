//! On which CPUs a thread of the FUSE ring runs.
//!
//! The thread is bound to the CPU of its queue: program and thread alternate on one CPU, and no other CPU has to be woken. That is
//! right for programs that do little between their requests.
//!
//! A database computes between its requests, in several processes that wake each other. A bound thread wakes all of them on its own CPU, where they
//! queue while another CPU is idle. So the thread may run on all CPUs of its node while both hold:
//!
//! - One of the last requests was a sync. Without syncs the thread polls (`ring_polling`), and should do so on the program's CPU.
//! - Its requests take a small part of the time in which its CPU is busy: less than a third. It is bound again when they take half of it. The
//!   time of the helpers counts, too: the thread itself takes little time if helpers perform most syncs.
//!
//! The numbers are in docs/performance/journal.md.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jericho_sys::{affinity, load};

/// Number of requests between two looks at the clock.
const REQUESTS: u32 = 64;

/// Minimum time between two decisions. The kernel counts a CPU's busy time in ticks of 10 ms, and each read of it visits all CPUs.
const WINDOW: Duration = Duration::from_millis(500);

/// Number of windows, one after the other, after which a thread is free. A program that only makes its files, or starts, is past by then.
const FREE_WINDOWS: u32 = 2;

thread_local! {
    /// CPU time of the thread at the end of its last job for a ring's thread.
    static CHARGED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// CPU time that helpers have taken for the requests of a ring's thread.
#[derive(Clone, Default)]
pub(crate) struct Helped(Arc<AtomicU64>);

impl Helped {
    /// Adds the CPU time of the calling thread since its last job.
    pub(crate) fn charge(&self) {
        let now = load::ran();
        let taken = now.saturating_sub(CHARGED.replace(now));
        // Relaxed: a number for a decision, which orders nothing.
        self.0.fetch_add(taken.as_nanos() as u64, Ordering::Relaxed);
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Times since the start of the thread and of the machine.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// CPU time of the thread, and of helpers for its requests.
    own: Duration,
    /// Time in which the CPU of the thread's queue had something to run.
    busy: Duration,
}

impl Times {
    fn now(cpu: u32, helped: &Helped) -> std::io::Result<Times> {
        Ok(Times {
            own: load::ran() + helped.time(),
            busy: load::busy(cpu)?,
        })
    }
}

/// The binding of a thread.
pub(crate) struct Binding {
    /// The CPU of the thread's queue.
    cpu: u32,
    /// The CPUs of its node.
    node: Vec<u32>,
    helped: Helped,
    is_bound: bool,
    /// Number of windows, one after the other, in which the thread should have been free.
    free_windows: u32,
    /// Requests since the last look at the clock.
    requests: u32,
    /// When the last decision was made, and the times then. `None` if there is nothing to decide.
    last: Option<(Instant, Times)>,
}

impl Binding {
    /// Binds the calling thread to `cpu`. `node`: the CPUs of the CPU's node that the process may use.
    pub(crate) fn new(cpu: u32, node: &[u32], helped: Helped) -> Binding {
        let mut binding = Binding {
            cpu,
            node: node.to_vec(),
            helped,
            is_bound: true,
            free_windows: 0,
            requests: 0,
            last: None,
        };
        // If it cannot be bound once, it cannot be bound later.
        if binding.apply() && node.len() > 1 {
            // Without /proc the thread stays bound.
            binding.last = Times::now(cpu, &binding.helped)
                .ok()
                .map(|times| (Instant::now(), times));
        }
        binding
    }

    /// Records a request, and decides anew when it is time. `syncs`: one of the last requests was a sync.
    pub(crate) fn has_come(&mut self, syncs: bool) {
        self.requests += 1;
        if self.requests < REQUESTS {
            return;
        }
        self.requests = 0;
        let Some((at, before)) = self.last else {
            return;
        };
        if at.elapsed() < WINDOW {
            return;
        }
        let Ok(now) = Times::now(self.cpu, &self.helped) else {
            return;
        };
        self.last = Some((Instant::now(), now));
        let own = now.own.saturating_sub(before.own);
        let busy = now.busy.saturating_sub(before.busy);
        self.free_windows = match !syncs || takes_much(own, busy, self.is_bound) {
            true => 0,
            false => self.free_windows.saturating_add(1),
        };
        let is_bound = self.free_windows < FREE_WINDOWS;
        if is_bound != self.is_bound {
            self.is_bound = is_bound;
            self.apply();
        }
    }

    /// Gives the calling thread its CPUs. Returns whether the kernel accepted them.
    fn apply(&self) -> bool {
        let cpus = match self.is_bound {
            true => std::slice::from_ref(&self.cpu),
            false => &self.node,
        };
        let set = affinity::set(None, cpus);
        if let Err(error) = &set {
            // The thread then runs on other CPUs, which is slower but correct.
            tracing::warn!(%error, ?cpus, "cannot bind a thread of the ring to its CPUs");
        }
        set.is_ok()
    }
}

/// Returns whether a thread's requests take much of its CPU's busy time. The bounds for a bound thread and for a free one differ, so that the
/// binding does not change all the time.
fn takes_much(own: Duration, busy: Duration, is_bound: bool) -> bool {
    match is_bound {
        true => own * 3 >= busy,
        false => own * 2 >= busy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_bound(own_ms: u64, busy_ms: u64, was_bound: bool) -> bool {
        takes_much(
            Duration::from_millis(own_ms),
            Duration::from_millis(busy_ms),
            was_bound,
        )
    }

    #[test]
    fn a_thread_whose_requests_take_little_of_its_cpu_is_freed_and_one_whose_take_much_is_bound() {
        assert!(!is_bound(330, 1000, true));
        assert!(is_bound(340, 1000, true));
        assert!(!is_bound(490, 1000, false));
        assert!(is_bound(500, 1000, false));
        assert!(is_bound(0, 0, true));
    }

    #[test]
    fn a_helper_charges_its_time_since_its_last_job() {
        let helped = Helped::default();
        helped.charge();
        let begun = (load::ran(), helped.time());
        while load::ran() - begun.0 < Duration::from_millis(2) {}
        helped.charge();
        assert!(helped.time() - begun.1 >= Duration::from_millis(2));
        // Not the time of the last job again.
        assert!(helped.time() <= load::ran());
    }

    /// Has the binding decide, as if only others had used the CPU since the last time.
    fn decide(binding: &mut Binding, syncs: bool) {
        let (at, times) = binding.last.as_mut().unwrap();
        *at -= WINDOW;
        (times.own, times.busy) = (load::ran(), Duration::ZERO);
        (0..REQUESTS).for_each(|_| binding.has_come(syncs));
    }

    #[test]
    fn a_thread_is_freed_while_programs_sync_and_bound_again_when_they_do_not() {
        let node = affinity::get(None).unwrap();
        let cpu = node[0];
        if node.len() < 2 {
            println!("not tested: the process may use one CPU only");
            return;
        }
        std::thread::spawn(move || {
            let mut binding = Binding::new(cpu, &node, Helped::default());
            for (syncs, is_free) in [
                (false, false),
                (true, false),
                (true, true),
                (true, true),
                (false, false),
                (true, false),
                (true, true),
            ] {
                decide(&mut binding, syncs);
                let expected = if is_free { &node[..] } else { &node[..1] };
                assert_eq!(affinity::get(None).unwrap(), expected);
            }
        })
        .join()
        .unwrap();
    }
}
