//! Cases for the machine `controllers`: two nodes with two storage controllers each. The serial number of a disk, such as `n1-c0`, tells its node.

use std::fs;
use std::path::{Path, PathBuf};

use jericho_topology::Topology;

use crate::guest::{self, ask, jericho};
use crate::nvdimm::mount;

const MNT: &str = "/mnt";
pub const DISKS: [&str; 4] = ["vda", "vdb", "vdc", "vdd"];
const FILE_BYTES: u64 = 4 << 20;

/// Returns the node of a disk, by its serial number.
pub fn node_of(disk: &str) -> usize {
    let serial = fs::read_to_string(format!("/sys/block/{disk}/serial")).expect("a serial number");
    let node = serial
        .strip_prefix('n')
        .and_then(|rest| rest.split_once('-'));
    node.expect("a node").0.parse().expect("a node")
}

/// Returns the sectors that were written to the disks of each node.
fn sectors_written() -> [u64; 2] {
    let mut sums = [0; 2];
    for disk in DISKS {
        sums[node_of(disk)] += guest::sectors_written(disk);
    }
    sums
}

#[test]
#[ignore = "for the guest of make lab"]
fn each_disk_is_on_the_node_of_its_controller() {
    let topology = Topology::detect().expect("nodes");
    for disk in DISKS {
        let device = fs::canonicalize(format!("/sys/block/{disk}/device")).expect("a device");
        let mut above = device.ancestors().map(|path| path.join("numa_node"));
        let attribute = above.find(|path| path.exists()).expect("an attribute");
        let kernel = fs::read_to_string(attribute).expect("a node");
        let node = node_of(disk);
        assert_eq!(kernel.trim(), node.to_string(), "{disk}");
        let found = topology.node_of_block_device(&PathBuf::from(format!("/dev/{disk}")));
        assert_eq!(found.map(|node| usize::from(node.0)), Some(node), "{disk}");
    }
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_bytes_of_a_file_go_to_the_controllers_of_its_node() {
    let devices = DISKS.map(|disk| format!("/dev/{disk}")).join(" ");
    jericho(&format!("format {devices} --force"));
    let _mounted = mount("/dev/vda", "");
    let mut written_on = [0; 2];
    for number in 0..4 {
        let dir = Path::new(MNT).join(number.to_string());
        fs::create_dir(&dir).expect("mkdir");
        let file = dir.join("file");
        fs::write(&file, []).expect("create");
        // The commit of the new file may write to any disk.
        jericho(&format!("sync {MNT}"));
        let before = sectors_written();
        fs::write(&file, vec![b'j'; FILE_BYTES as usize]).expect("write");
        fs::File::open(&file)
            .and_then(|file| file.sync_all())
            .expect("fsync");
        let after = sectors_written();
        let found = ask(&format!("where {} --json", file.display()));
        let home = found["home_node"].as_u64().expect("a node") as usize;
        written_on[home] += 1;
        let sectors = [0, 1].map(|node| after[node] - before[node]);
        println!(
            "lab: a file of 4 MiB on node {home}: sectors written to the disks of each node {sectors:?}"
        );
        assert!(sectors[home] >= FILE_BYTES / 512, "{sectors:?}");
        assert!(sectors[1 - home] < FILE_BYTES / 512 / 8, "{sectors:?}");
    }
    assert!(written_on.iter().all(|files| *files > 0), "{written_on:?}");
}
