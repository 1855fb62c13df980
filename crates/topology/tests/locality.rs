//! The home nodes of block devices and network interfaces.

mod common;

use std::path::Path;

use common::{FakeMachine, cpus};
use jericho_topology::{NodeId, Topology};

const SLOT_A: &str = "sys/devices/pci0000:00/0000:00:01.0";
const SLOT_B: &str = "sys/devices/pci0000:80/0000:80:01.0";

/// Returns a machine of four sockets, with a PCI slot on node 1 and another on node 2.
fn server() -> FakeMachine {
    let machine = FakeMachine::four_sockets();
    machine.write(&format!("{SLOT_A}/numa_node"), "1\n");
    machine.write(&format!("{SLOT_B}/numa_node"), "2\n");
    machine
}

fn home(machine: &FakeMachine, path: &Path) -> Option<NodeId> {
    machine.detect(&cpus(0..16)).node_of_block_device(path)
}

#[test]
fn a_file_is_at_home_with_the_disk_of_its_filesystem() {
    let machine = server();
    let file = machine.file_on(&format!("{SLOT_A}/ata1/host0/block/sda"));
    assert_eq!(home(&machine, &file), Some(NodeId(1)));
    assert_eq!(
        home(&machine, machine.root()),
        Some(NodeId(1)),
        "its directory too"
    );
    let unmade = machine.root().join("yet to be made");
    assert_eq!(home(&machine, &unmade), Some(NodeId(1)));
    assert_eq!(home(&machine, Path::new("/nowhere/at/all")), None);
}

#[test]
fn a_partition_is_at_home_with_its_disk() {
    let machine = server();
    let file = machine.file_on(&format!("{SLOT_B}/nvme/nvme0/nvme0n1/nvme0n1p3"));
    machine.write(
        &format!("{SLOT_B}/nvme/nvme0/nvme0n1/nvme0n1p3/partition"),
        "3\n",
    );
    assert_eq!(home(&machine, &file), Some(NodeId(2)));
}

#[test]
fn a_device_whose_node_the_kernel_does_not_know_has_no_home() {
    let machine = server();
    let slot = "sys/devices/pci0000:40/0000:40:01.0";
    machine.write(&format!("{slot}/numa_node"), "-1\n");
    let file = machine.file_on(&format!("{slot}/virtio1/block/vda"));
    assert_eq!(home(&machine, &file), None);
}

fn mapped(slaves: &[(&str, &str)]) -> (FakeMachine, std::path::PathBuf) {
    let machine = server();
    let file = machine.file_on("sys/devices/virtual/block/dm-0");
    for (name, dir) in slaves {
        machine.link(
            &format!("sys/devices/virtual/block/dm-0/slaves/{name}"),
            dir,
        );
    }
    (machine, file)
}

#[test]
fn a_mapped_device_is_at_home_with_all_devices_below_it() {
    let a1 = format!("{SLOT_A}/ata1/block/sda");
    let a2 = format!("{SLOT_A}/ata2/block/sdb");
    let b = format!("{SLOT_B}/ata3/block/sdc");
    let (machine, file) = mapped(&[("sda", &a1), ("sdb", &a2)]);
    assert_eq!(home(&machine, &file), Some(NodeId(1)));
    let (machine, file) = mapped(&[("sda", &a1), ("sdc", &b)]);
    assert_eq!(home(&machine, &file), None);
}

#[test]
fn mapped_devices_in_a_cycle_have_no_home() {
    let (machine, file) = mapped(&[("dm-0", "sys/devices/virtual/block/dm-0")]);
    assert_eq!(home(&machine, &file), None);
}

#[test]
fn an_nvme_disk_with_several_paths_is_at_home_if_its_controllers_agree() {
    for (second_slot, expected) in [(SLOT_A, Some(NodeId(1))), (SLOT_B, None)] {
        let machine = server();
        let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
        let file = machine.file_on(&format!("{subsystem}/nvme0n1"));
        machine.link(
            &format!("{subsystem}/nvme0"),
            &format!("{SLOT_A}/nvme/nvme0"),
        );
        machine.link(
            &format!("{subsystem}/nvme1"),
            &format!("{second_slot}/nvme/nvme1"),
        );
        assert_eq!(home(&machine, &file), expected);
    }
}

#[test]
fn a_filesystem_with_its_own_device_numbers_is_found_through_its_mount() {
    let machine = server();
    machine.link(
        "sys/class/block/fake0",
        &format!("{SLOT_B}/ata1/block/fake0"),
    );
    let file = machine.write("a volume", "");
    let point = machine.root().canonicalize().expect("the root");
    let mounts = format!(
        "20 1 0:30 / / rw - overlay overlay rw\n\
         21 20 0:31 /@ {} rw,noatime shared:1 - btrfs /dev/fake0 rw\n",
        point.display()
    );
    machine.write("proc/self/mountinfo", &mounts);
    assert_eq!(home(&machine, &file), Some(NodeId(2)));
}

#[test]
fn a_device_on_an_omitted_node_is_at_home_on_the_nearest_kept_node() {
    let machine = server();
    machine.write("proc/self/status", "Mems_allowed_list:\t0,3\n");
    let file = machine.file_on(&format!("{SLOT_B}/ata1/block/sda"));
    let topology = machine.detect(&[0, 1, 12, 13]);
    assert_eq!(topology.nodes.len(), 2);
    assert_eq!(
        topology.node_of_block_device(&file),
        Some(NodeId(1)),
        "kernel node 3"
    );
}

#[test]
fn a_network_interface_is_at_home_with_its_card() {
    let machine = server();
    machine.link("sys/class/net/eth0", &format!("{SLOT_A}/net/eth0"));
    machine.link("sys/class/net/eth1", &format!("{SLOT_B}/net/eth1"));
    machine.link("sys/class/net/lo", "sys/devices/virtual/net/lo");
    for (bond, lower) in [("bond0", &["eth0"][..]), ("bond1", &["eth0", "eth1"][..])] {
        machine.link(
            &format!("sys/class/net/{bond}"),
            &format!("sys/devices/virtual/net/{bond}"),
        );
        for name in lower {
            let slot = if *name == "eth0" { SLOT_A } else { SLOT_B };
            let link = format!("sys/devices/virtual/net/{bond}/lower_{name}");
            machine.link(&link, &format!("{slot}/net/{name}"));
        }
    }
    let topology = machine.detect(&cpus(0..16));
    assert_eq!(topology.node_of_nic("eth0"), Some(NodeId(1)));
    assert_eq!(topology.node_of_nic("eth1"), Some(NodeId(2)));
    assert_eq!(topology.node_of_nic("bond0"), Some(NodeId(1)));
    assert_eq!(
        topology.node_of_nic("bond1"),
        None,
        "the bond is on two nodes"
    );
    for name in ["lo", "missing", "", "..", "../net/eth0"] {
        assert_eq!(topology.node_of_nic(name), None, "{name:?}");
    }
}

fn given(machine: &FakeMachine, lines: &str) -> Topology {
    let text = format!("node 0 cpus=0\nnode 1 cpus=1\nnode 2 cpus=2\n{lines}");
    machine.file(&text, &cpus(0..4)).expect("a good file")
}

#[test]
fn a_virtual_topology_has_only_the_homes_of_its_file() {
    let machine = server();
    machine.link("sys/class/net/eth0", &format!("{SLOT_A}/net/eth0"));
    let file = machine.file_on(&format!("{SLOT_A}/ata1/block/sda"));
    let made_up = machine.spec("virtual:2", &cpus(0..4)).expect("two nodes");
    assert_eq!(made_up.node_of_block_device(&file), None);
    assert_eq!(made_up.node_of_nic("eth0"), None);
    let topology = given(&machine, "device sda node=2\nnic eth0 node=1\n");
    assert_eq!(topology.node_of_block_device(&file), Some(NodeId(2)));
    assert_eq!(topology.node_of_nic("eth0"), Some(NodeId(1)));
}

#[test]
fn the_home_of_a_device_applies_to_its_partitions() {
    let machine = server();
    let disk = format!("{SLOT_A}/nvme/nvme9/fake9n1");
    let file = machine.file_on(&format!("{disk}/fake9n1p1"));
    machine.write(&format!("{disk}/fake9n1p1/partition"), "1\n");
    let topology = given(&machine, "device /dev/fake9n1 node=1\n");
    assert_eq!(topology.node_of_block_device(&file), Some(NodeId(1)));
}

#[test]
fn files_and_directories_can_have_homes_and_the_longest_path_wins() {
    let machine = server();
    let outer = machine.write("volumes/a b/0.img", "");
    let inner = machine.write("volumes/a b/1.img", "");
    let elsewhere = machine.write("volumes/a bc", "");
    let root = machine.root().display();
    let lines = format!(
        "device \"{root}/volumes/a b\" node=1\ndevice \"{root}/volumes/a b/1.img\" node=2\n"
    );
    let topology = given(&machine, &lines);
    assert_eq!(topology.node_of_block_device(&outer), Some(NodeId(1)));
    assert_eq!(topology.node_of_block_device(&inner), Some(NodeId(2)));
    assert_eq!(topology.node_of_block_device(&elsewhere), None);
    let unmade = machine.root().join("volumes/a b/2.img");
    assert_eq!(topology.node_of_block_device(&unmade), Some(NodeId(1)));
}

#[test]
fn a_loop_device_is_at_home_with_the_file_behind_it() {
    let machine = server();
    let loop_dir = "sys/devices/virtual/block/loop0";
    let file = machine.file_on(loop_dir);
    let backing = machine.write("behind/the.img", "");
    machine.write(
        &format!("{loop_dir}/loop/backing_file"),
        &format!("{}\n", backing.display()),
    );
    let lines = format!("device {}/behind node=2\n", machine.root().display());
    assert_eq!(
        given(&machine, &lines).node_of_block_device(&file),
        Some(NodeId(2))
    );
    // The backing file is on the loop device itself.
    assert_eq!(home(&machine, &file), None);
}
