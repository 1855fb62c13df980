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

/// A window that has become longer has time without requests, and decides nothing.
const WINDOW_MAX: Duration = Duration::from_secs(2);

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
    /// When the present window began, and the times then.
    window: Option<(Instant, Times)>,
    /// The thread may change its CPUs.
    is_managed: bool,
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
            window: None,
            is_managed: node.len() > 1,
        };
        // If it cannot be bound once, it cannot be bound later.
        binding.is_managed &= binding.apply();
        binding
    }

    /// Counts a request of the calling thread. Changes the thread's CPUs if the last windows call for it. `syncs`: one of the last requests was
    /// a sync.
    pub(crate) fn has_come(&mut self, syncs: bool) {
        self.requests += 1;
        if self.requests < REQUESTS {
            return;
        }
        self.requests = 0;
        if self.is_managed {
            self.decide(syncs);
        }
    }

    fn decide(&mut self, syncs: bool) {
        // Without syncs nothing has to be measured.
        if !syncs {
            self.window = None;
            return self.stay_bound();
        }
        let begun = self.window.map(|(begun, _)| begun.elapsed());
        if begun.is_some_and(|length| length < WINDOW) {
            return;
        }
        let Ok(now) = Times::now(self.cpu, &self.helped) else {
            // There is no /proc, or the CPU is offline.
            self.stay_bound();
            self.is_managed = false;
            return;
        };
        let before = self.window.replace((Instant::now(), now));
        let Some((_, before)) = before.filter(|_| begun.is_some_and(|l| l < WINDOW_MAX)) else {
            return;
        };
        let own = now.own.saturating_sub(before.own);
        let busy = now.busy.saturating_sub(before.busy);
        if takes_much(own, busy, self.is_bound) {
            return self.stay_bound();
        }
        self.free_windows = self.free_windows.saturating_add(1);
        if self.free_windows >= FREE_WINDOWS {
            self.bind(false);
        }
    }

    /// Binds the calling thread to its CPU for at least `FREE_WINDOWS`.
    fn stay_bound(&mut self) {
        self.free_windows = 0;
        self.bind(true);
    }

    /// Binds the calling thread to its CPU, or to its node.
    fn bind(&mut self, is_bound: bool) {
        if is_bound == self.is_bound {
            return;
        }
        // If somebody else has set other CPUs, the thread keeps these.
        self.is_managed = affinity::get(None).is_ok_and(|cpus| cpus == self.cpus());
        if self.is_managed {
            self.is_bound = is_bound;
            self.is_managed = self.apply();
        }
    }

    /// Returns the CPUs that the thread should have.
    fn cpus(&self) -> &[u32] {
        match self.is_bound {
            true => std::slice::from_ref(&self.cpu),
            false => &self.node,
        }
    }

    /// Gives the calling thread its CPUs. Returns whether the kernel accepted them.
    fn apply(&self) -> bool {
        let cpus = self.cpus();
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

    /// Has the binding decide, as if only others had used the CPU in the window.
    fn decide(binding: &mut Binding, syncs: bool) {
        if let Some((begun, times)) = &mut binding.window {
            *begun -= WINDOW;
            (times.own, times.busy) = (load::ran(), Duration::ZERO);
        }
        (0..REQUESTS).for_each(|_| binding.has_come(syncs));
    }

    /// Runs a test in a thread that may use all CPUs of the process. Gives it the binding and these CPUs.
    fn with_binding(test: impl FnOnce(Binding, &[u32]) + Send + 'static) {
        let node = affinity::get(None).unwrap();
        if node.len() < 2 {
            println!("not tested: the process may use one CPU only");
            return;
        }
        let body = move || {
            let binding = Binding::new(node[0], &node, Helped::default());
            test(binding, &node);
        };
        std::thread::spawn(body).join().unwrap();
    }

    #[test]
    fn a_thread_is_freed_while_programs_sync_and_bound_again_when_they_do_not() {
        with_binding(|mut binding, node| {
            for (syncs, is_free) in [
                (false, false),
                // A window begins.
                (true, false),
                (true, false),
                (true, true),
                (true, true),
                (false, false),
                (true, false),
                (true, false),
                (true, true),
            ] {
                decide(&mut binding, syncs);
                let expected = if is_free { node } else { &node[..1] };
                assert_eq!(affinity::get(None).unwrap(), expected);
            }
        });
    }

    #[test]
    fn a_window_with_time_without_requests_decides_nothing() {
        with_binding(|mut binding, node| {
            for _ in 0..5 {
                decide(&mut binding, true);
                binding.window.as_mut().unwrap().0 -= WINDOW_MAX;
            }
            assert_eq!(affinity::get(None).unwrap(), &node[..1]);
        });
    }

    #[test]
    fn a_thread_keeps_cpus_that_somebody_else_has_set() {
        with_binding(|mut binding, node| {
            affinity::set(None, &node[1..2]).unwrap();
            (0..4).for_each(|_| decide(&mut binding, true));
            assert_eq!(affinity::get(None).unwrap(), &node[1..2]);
        });
    }
}
