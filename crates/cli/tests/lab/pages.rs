//! Pages lie on the home node of their file, as the kernel reports, and keep their bytes.

use std::path::Path;

use crate::guest::{NODES, Volume, content};

/// Asserts that all cached pages of a file lie on this node.
fn assert_lies_on(volume: &Volume, node: usize, file: &Path) -> u64 {
    let found = volume.where_is(file);
    let resident = found["resident_bytes"].as_u64().expect("bytes");
    assert_eq!(found["home_node"], node, "{found}");
    let by_node = serde_json::json!([[node, resident]]);
    assert_eq!(
        found["resident_bytes_by_kernel_node"],
        by_node,
        "{}: {found}",
        file.display()
    );
    resident
}

#[test]
#[ignore = "for the guest of make lab"]
fn every_page_lies_on_the_home_node_of_its_file() {
    let volume = Volume::new();
    for (node, file) in volume.file_on_each_node(4).iter().enumerate() {
        assert_eq!(assert_lies_on(&volume, node, file), 4 << 20);
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn pages_in_reused_frames_lie_on_the_home_node() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    for (node, file) in files.iter().enumerate() {
        // The file has twice as many pages as the slice has frames.
        let large = file.with_file_name("large");
        std::fs::write(&large, content(node, 32)).expect("write");
        assert_lies_on(&volume, node, &large);
    }
    let stat = volume.stat();
    for slice in stat["slices"].as_array().expect("slices") {
        assert_ne!(slice["evictions"], 0, "nothing was evicted: {slice}");
    }
    for (node, file) in files.iter().enumerate() {
        std::fs::read(file).expect("read");
        assert_eq!(assert_lies_on(&volume, node, file), 4 << 20);
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn a_file_that_is_moved_takes_its_pages_along() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(4);
    for (node, file) in files.iter().enumerate() {
        let to = (node + 2) % NODES;
        crate::guest::jericho(&format!("place {} --node {to} --move", file.display()));
        std::fs::read(file).expect("read");
        assert_eq!(assert_lies_on(&volume, to, file), 4 << 20);
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_bytes_are_the_same_after_unmount_check_and_mount() {
    let volume = Volume::new();
    let files = volume.file_on_each_node(24);
    let before: Vec<Vec<u8>> = files
        .iter()
        .map(|f| std::fs::read(f).expect("read"))
        .collect();
    volume.umount();
    volume.check();
    volume.mount();
    for (node, (file, before)) in files.iter().zip(before).enumerate() {
        assert!(
            std::fs::read(file).expect("read") == before,
            "{}",
            file.display()
        );
        assert_lies_on(&volume, node, file);
    }
    let numbers = files.iter().map(|file| {
        let bytes = std::fs::read(file).expect("read");
        u64::from_le_bytes(*bytes.first_chunk().expect("the page is not empty"))
    });
    let mut numbers: Vec<u64> = numbers.collect();
    numbers.sort();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
}
