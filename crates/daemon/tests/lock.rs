//! The lock of a volume outlives everything that could still use the volume's devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_daemon::{Mounted, OpenOptions};
use jericho_topology::Topology;
use jericho_volume::{FormatOptions, OpenMode, Volume};

const LONG: Duration = Duration::from_secs(60);
/// The order of two moments is seen by polling, so a wrong order shows in some of the rounds.
const ROUNDS: usize = 20;

#[test]
fn a_dropped_mount_gives_up_its_lock_after_its_filesystem() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let format = FormatOptions {
        size_bytes: Some(64 << 20),
        slices: Some(1),
        ..FormatOptions::default()
    };
    jericho_fs::format::format(std::slice::from_ref(&path), &format).unwrap();
    for round in 0..ROUNDS {
        let options = OpenOptions {
            volume: path.clone(),
            read_only: false,
            cache_bytes: Some(8 << 20),
            spill_bytes: 0,
            topology: Topology::from_spec("virtual:1").unwrap(),
            threads: Default::default(),
            with_parent: false,
            move_costs: Default::default(),
            fast_path: Default::default(),
            keeper: None,
            devices: vec![],
            force: false,
        };
        let mounted = Mounted::open(options).unwrap();
        let fs = Arc::downgrade(mounted.fs());
        mounted.close().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + LONG;
                let mode = OpenMode {
                    read_only: false,
                    force: false,
                };
                while let Err(error) = Volume::lock(&path, mode) {
                    assert!(Instant::now() < deadline, "{error}");
                }
                assert_eq!(
                    fs.strong_count(),
                    0,
                    "round {round}: the filesystem is open"
                );
            });
            drop(mounted);
        });
    }
}
