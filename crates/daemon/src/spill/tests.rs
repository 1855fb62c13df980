use super::*;

#[test]
fn slices_at_home_on_one_node_share_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("topology");
    std::fs::write(&file, "node 0 cpus=0 memory=64M\n").unwrap();
    let topology = Topology::from_spec(file.to_str().unwrap()).unwrap();
    let home = NodeId(0);
    let frames_of_64_mib = 16384;
    let mut plan = Plan::new(&topology, 1 << 30, &[home, home]);
    let (first, elsewhere) = plan.divide(frames_of_64_mib, home);
    let (second, _) = plan.divide(frames_of_64_mib, home);
    // 60 MiB less the tables: whole ranges for each slice.
    assert!(first.abs_diff(second) <= SPILL_FRAMES, "{first} {second}");
    assert!((13 * SPILL_FRAMES..=15 * SPILL_FRAMES).contains(&first));
    assert_eq!(first + elsewhere, frames_of_64_mib);
    let mut none = Plan::new(&topology, 0, &[home, home]);
    assert_eq!(none.divide(frames_of_64_mib, home), (frames_of_64_mib, 0));
}

#[test]
fn a_slice_gets_what_fits_at_home_and_the_rest_up_to_its_bound_elsewhere() {
    let mib = |n: u64| n << 20;
    let frames = |mib: u32| mib << 8;
    for (promised, room, spill, divided_into) in [
        (64, 64, 100, (64, 0)),
        (64, 1000, 100, (64, 0)),
        (64, 33, 100, (32, 32)),
        (64, 33, 10, (32, 10)),
        // The smallest slice is at home in any case.
        (64, 1, 100, (4, 60)),
        (4, 1, 100, (4, 0)),
    ] {
        let (home, elsewhere) = divided(frames(promised), mib(room), mib(spill));
        let (of_home, of_elsewhere) = divided_into;
        assert_eq!(
            (home, elsewhere),
            (frames(of_home), frames(of_elsewhere)),
            "{promised} {room} {spill}"
        );
    }
}
