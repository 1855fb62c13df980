//! Files are moved to another slice while programs use them.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::fio::verify;
use crate::program::succeed;
use crate::volume::{Volume, jericho};

#[test]
fn files_in_use_are_rehomed_without_a_wrong_byte() {
    let volume = Volume::mounted("1G", 2, "32M");
    let dir = volume.make_dir("moving");
    let steady = dir.join("steady");
    let bytes: Vec<u8> = (0..20_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    std::fs::write(&steady, &bytes).expect("write");
    let moves_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let fio = scope.spawn(|| {
            // At least one whole run of fio overlaps the moves, at any speed of both.
            while !moves_over.load(Ordering::SeqCst) {
                verify(
                    &dir,
                    &[
                        "--rw=randwrite",
                        "--bsrange=4k-32k",
                        "--size=24M",
                        "--numjobs=2",
                    ],
                );
            }
        });
        let moving = scope.spawn(|| {
            for n in 0..6 {
                let node = (1 - n % 2).to_string();
                succeed(
                    jericho()
                        .arg("place")
                        .arg(&dir)
                        .args(["--node", &node, "--move"]),
                );
                let home = volume.where_is(&steady)["home_node"].as_u64();
                assert_eq!(home, node.parse().ok(), "after the move to node {node}");
                assert!(
                    std::fs::read(&steady).expect("read") == bytes,
                    "bytes changed by the move to node {node}"
                );
            }
        });
        let moved = moving.join();
        // Ends the other thread, also when a move failed.
        moves_over.store(true, Ordering::SeqCst);
        moved.expect("every move");
        fio.join().expect("fio");
    });
    volume.remount();
    assert!(std::fs::read(&steady).expect("read") == bytes);
    volume.finish();
}

#[test]
fn files_created_in_a_placed_directory_lie_on_its_node() {
    let volume = Volume::mounted("512M", 2, "32M");
    for node in ["0", "1"] {
        let dir = volume.make_dir(&format!("on-{node}"));
        succeed(jericho().arg("place").arg(&dir).args(["--node", node]));
        let deep = volume.make_dir(&format!("on-{node}/a/b"));
        let file = deep.join("file");
        std::fs::write(&file, vec![7; 1_000_000]).expect("write");
        assert_eq!(
            volume.where_is(&file)["home_node"].as_u64(),
            node.parse().ok()
        );
    }
    volume.remount();
    for node in ["0", "1"] {
        let file = volume.at(&format!("on-{node}/a/b/file"));
        assert_eq!(
            volume.where_is(&file)["home_node"].as_u64(),
            node.parse().ok()
        );
    }
    volume.finish();
}

#[test]
fn directories_in_the_root_go_round_robin_over_the_slices() {
    let volume = Volume::mounted("512M", 2, "32M");
    let mut slices: Vec<u64> = Vec::new();
    for n in 0..4 {
        let file = volume.make_dir(&format!("dir{n}")).join("file");
        std::fs::write(&file, b"x").expect("write");
        slices.push(
            volume.where_is(&file)["slice"]
                .as_u64()
                .expect("where tells the slice"),
        );
    }
    assert_eq!(slices[0], slices[2]);
    assert_eq!(slices[1], slices[3]);
    assert_ne!(slices[0], slices[1]);
    volume.finish();
}
