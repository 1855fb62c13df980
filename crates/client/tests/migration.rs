//! A real thread is placed. A process of its own, as the nodes of a process are said once.
#![forbid(unsafe_code)]

use jericho_client::migration::migrator::NODES;
use jericho_client::migration::nodes::Nodes;
use jericho_client::migration::{account, held_on, learn, migrate_if_due, release, tick};
use jericho_format::threads::ThreadPolicy;
use jericho_sys::affinity::{self, CpuMask};

/// On this very machine, of which each CPU is made a node, as there may be one real one only.
#[test]
fn a_real_thread_goes_where_its_data_is_and_gets_its_mask_back() {
    assert!(learn(Nodes::new(|cpu| cpu as u16)));
    assert!(!learn(Nodes::new(|cpu| cpu as u16 / 2)), "another topology");
    let cpus = affinity::get(None).unwrap();
    let own = affinity::mask(None).unwrap();
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
            release();
            assert_eq!((held_on(), affinity::mask(None).unwrap()), (None, own));
        })
        .join()
        .unwrap();
    }
}
