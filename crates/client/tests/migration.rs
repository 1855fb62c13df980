//! Migrates a real thread. Needs a process of its own, because a process learns its nodes only once.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use jericho_client::migration::migrator::{IDLE, NODES};
use jericho_client::migration::nodes::Nodes;
use jericho_client::migration::{account, held_on, learn, migrate_if_due, release, tick};
use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};

/// Lets a thread that is held on `node` use little data beside other calls, for longer than a thread without use stays held, and then only make other calls.
fn slow_use_keeps_it_held(node: u16, narrowed: bool) {
    let idle = Duration::from_nanos(IDLE);
    let (begin, step) = (Instant::now(), idle / 10);
    while begin.elapsed() < 2 * idle {
        account(ThreadPolicy::Always, node, node, 4096);
        migrate_if_due();
        tick();
        assert_eq!(held_on().is_some(), narrowed, "it uses data");
        std::thread::sleep(step);
    }
    while held_on().is_some() {
        assert!(begin.elapsed() < 60 * idle, "it is never released");
        std::thread::sleep(step);
        tick();
    }
}

/// Treats each CPU of this machine as a node, because the machine may have only one real node.
#[test]
fn a_real_thread_moves_to_its_data_and_gets_its_mask_back() {
    assert!(learn(Nodes::new(|cpu| cpu as u16)));
    assert!(!learn(Nodes::new(|cpu| cpu as u16 / 2)), "another topology");
    let cpus = affinity::get(None).unwrap();
    let own = affinity::mask(None).unwrap();
    let first = cpus[0];
    for cpu in cpus.iter().copied().filter(|cpu| *cpu < NODES as u32) {
        std::thread::spawn(move || {
            account(ThreadPolicy::Always, cpu as u16, cpu as u16 + 1, 4096);
            assert_eq!(held_on(), None, "not in the middle of an access");
            migrate_if_due();
            let only: CpuMask = [cpu].into_iter().collect();
            // With one CPU there is nothing to narrow.
            let narrowed = only != own;
            assert_eq!(held_on(), narrowed.then_some(cpu as u16));
            assert_eq!(affinity::mask(None).unwrap(), only);
            assert_eq!(jericho_sys::rseq::current_cpu(), cpu);
            tick();
            assert_eq!(held_on().is_some(), narrowed, "used a moment ago");
            if cpu == first {
                slow_use_keeps_it_held(cpu as u16, narrowed);
            }
            release();
            assert_eq!((held_on(), affinity::mask(None).unwrap()), (None, own));
        })
        .join()
        .unwrap();
    }
}
