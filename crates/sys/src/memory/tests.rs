use super::*;

const PAGE: usize = 4096;

fn segment(len: usize) -> Mapping {
    Mapping::create("jericho-test", len, false).expect("a small segment")
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.expect_err("an error").raw_os_error()
}

#[test]
fn a_new_segment_reads_as_zeros_and_keeps_copied_bytes() {
    let mapping = segment(3 * PAGE - 100);
    assert_eq!(mapping.len(), 3 * PAGE);
    let mut out = [1u8; 64];
    mapping.copy_out(PAGE - 32, &mut out);
    assert_eq!(out, [0; 64]);
    mapping.copy_in(PAGE - 32, &[7; 64]);
    mapping.zero(PAGE..PAGE + 8);
    mapping.copy_out(PAGE - 32, &mut out);
    assert_eq!(out[..32], [7; 32]);
    assert_eq!(out[32..40], [0; 8]);
    assert_eq!(out[40..], [7; 24]);
}

#[test]
fn copies_out_of_bounds_panic_and_touch_nothing() {
    let mapping = segment(PAGE);
    let panics =
        |f: &mut dyn FnMut()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    assert!(panics(&mut || mapping.copy_in(PAGE - 1, &[0; 2])));
    assert!(panics(&mut || mapping.copy_out(usize::MAX, &mut [0; 2])));
    assert!(panics(&mut || mapping.zero(PAGE..PAGE + 1)));
    assert!(panics(&mut || mapping.copy_to(0, &segment(PAGE), 1, PAGE)));
    mapping.copy_in(PAGE, &[]);
}

#[test]
fn a_policy_applies_to_exactly_the_bound_range() {
    let mapping = segment(4 * PAGE);
    mapping
        .bind(PAGE..3 * PAGE, 0)
        .expect("node 0 exists everywhere");
    let nodes: Vec<_> = (0..4)
        .map(|page| mapping.bound_node(page * PAGE).unwrap())
        .collect();
    assert_eq!(nodes, [None, Some(0), Some(0), None]);
}

#[test]
fn binding_to_a_node_that_does_not_exist_is_an_error() {
    let mapping = segment(PAGE);
    assert_eq!(errno(mapping.bind(0..PAGE, 1000)), Some(libc::EINVAL));
    assert_eq!(errno(mapping.bind(0..PAGE, u32::MAX)), Some(libc::EINVAL));
    assert_eq!(mapping.bound_node(0).unwrap(), None);
}

#[test]
fn pages_are_on_their_node_once_populated_and_absent_before() {
    let mapping = segment(4 * PAGE);
    mapping.bind(0..4 * PAGE, 0).unwrap();
    let offsets = [0, PAGE, 2 * PAGE, 3 * PAGE];
    assert_eq!(mapping.nodes_of(&offsets).unwrap(), [None; 4]);
    mapping.populate(PAGE..3 * PAGE).unwrap();
    assert_eq!(
        mapping.nodes_of(&offsets).unwrap(),
        [None, Some(0), Some(0), None]
    );
}

#[test]
fn populating_keeps_contents_and_punching_drops_them() {
    let mapping = segment(2 * PAGE);
    mapping.copy_in(10, b"kept");
    mapping.populate(0..2 * PAGE).unwrap();
    let mut out = [0; 4];
    mapping.copy_out(10, &mut out);
    assert_eq!(&out, b"kept");
    let blocks = || rustix::fs::fstat(mapping.fd()).unwrap().st_blocks;
    assert_eq!(blocks() as usize * 512, 2 * PAGE);
    punch_all(mapping.fd()).unwrap();
    assert_eq!(blocks(), 0);
    mapping.copy_out(10, &mut out);
    assert_eq!(out, [0; 4]);
}

#[test]
fn populating_with_huge_pages_keeps_contents_and_populates_every_page() {
    let len = 2 * HUGE_PAGE_BYTES + PAGE;
    let mapping = Mapping::create("jericho-huge", len, true).unwrap();
    mapping.bind(0..len, 0).unwrap();
    mapping.copy_in(HUGE_PAGE_BYTES + 5 * PAGE, b"kept");
    let huge = mapping.populate_huge(0..len).unwrap();
    assert!(huge <= len && huge.is_multiple_of(HUGE_PAGE_BYTES));
    let mut out = [0; 4];
    mapping.copy_out(HUGE_PAGE_BYTES + 5 * PAGE, &mut out);
    assert_eq!(&out, b"kept");
    mapping.copy_out(len - 4, &mut out);
    assert_eq!(out, [0; 4]);
    let offsets: Vec<usize> = (0..len).step_by(PAGE).collect();
    let nodes = mapping.nodes_of(&offsets).unwrap();
    assert!(nodes.iter().all(|node| *node == Some(0)), "{nodes:?}");
}

#[test]
fn segments_are_in_no_core_dump() {
    let mapping = Mapping::create("jericho-undumped", 3 * PAGE, false).unwrap();
    let theirs = mapping.read_only_fd().unwrap();
    let theirs = Mapping::from_fd(theirs, 3 * PAGE, false).unwrap();
    for mapping in [&mapping, &theirs] {
        let first = format!("{:x}-", mapping.as_ptr() as usize);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.lines().skip_while(|line| !line.starts_with(&first));
        let flags = own.skip(1).find(|line| line.starts_with("VmFlags:"));
        // proc_pid_smaps(5): dd is "do not include area into core dump".
        let flags = flags.expect("flags of the mapping");
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }
    assert_eq!(mapping.allocated_bytes().unwrap(), 0);
    mapping.copy_in(PAGE, b"bytes");
    assert_eq!(mapping.allocated_bytes().unwrap(), PAGE as u64);
}

#[test]
fn a_released_range_gives_its_memory_back_and_the_rest_keeps_it() {
    let len = 3 * HUGE_PAGE_BYTES;
    let mut mapping = Mapping::create("jericho-release", len, true).unwrap();
    mapping.set_lasting(HUGE_PAGE_BYTES);
    assert_eq!(mapping.lasting_len(), HUGE_PAGE_BYTES);
    mapping.populate_huge(0..len).unwrap();
    let blocks = || rustix::fs::fstat(mapping.fd()).unwrap().st_blocks as usize * 512;
    let at = [HUGE_PAGE_BYTES - PAGE, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES];
    for at in at {
        mapping.copy_in(at, b"bytes");
    }
    let theirs = mapping.fd().try_clone_to_owned().unwrap();
    let theirs = Mapping::from_fd(theirs, len, true).unwrap();
    let read = |mapping: &Mapping, at| {
        let mut out = [9; 5];
        mapping.copy_out(at, &mut out);
        out
    };
    assert_eq!(read(&theirs, at[1]), *b"bytes");
    mapping
        .release(HUGE_PAGE_BYTES..2 * HUGE_PAGE_BYTES)
        .unwrap();
    assert_eq!(blocks(), len - HUGE_PAGE_BYTES);
    assert_eq!(
        mapping.nodes_of(&[at[0], at[1], at[2]]).unwrap(),
        [Some(0), None, Some(0)]
    );
    for mapping in [&theirs, &mapping] {
        let bytes = at.map(|at| read(mapping, at));
        assert_eq!(bytes, [*b"bytes", [0; 5], *b"bytes"]);
    }
    // A part of a huge page.
    let part = 2 * HUGE_PAGE_BYTES + 8 * PAGE;
    let before = blocks();
    mapping.release(part..part + 4 * PAGE).unwrap();
    assert!(blocks() <= before);
    assert_eq!(read(&theirs, at[2]), *b"bytes");
    for bad in [0..PAGE, len..len + PAGE, len - 1..len] {
        assert_eq!(errno(mapping.release(bad)), Some(libc::EINVAL));
    }
}

#[test]
fn populate_fails_without_a_signal_for_a_page_that_cannot_be_allocated() {
    // The mapping is longer than its segment. An access beyond the segment would be a SIGBUS.
    let fd = rustix::fs::memfd_create("jericho-short", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
    let mapping = Mapping::map(fd, 4 * PAGE, true, false).unwrap();
    mapping.populate(0..PAGE).unwrap();
    assert_eq!(errno(mapping.populate(0..4 * PAGE)), Some(libc::EFAULT));
}

#[test]
fn ranges_that_are_not_pages_of_the_mapping_are_refused() {
    let mapping = segment(2 * PAGE);
    assert_eq!(errno(mapping.populate(1..PAGE)), Some(libc::EINVAL));
    assert_eq!(errno(mapping.populate(0..3 * PAGE)), Some(libc::EINVAL));
    assert_eq!(errno(mapping.bind(PAGE..3 * PAGE, 0)), Some(libc::EINVAL));
    assert_eq!(errno(mapping.nodes_of(&[2 * PAGE])), Some(libc::EINVAL));
    assert_eq!(
        errno(Mapping::create("jericho-empty", 0, false)),
        Some(libc::EINVAL)
    );
    assert_eq!(
        errno(Mapping::create("jericho-vast", usize::MAX, false)),
        Some(libc::EINVAL)
    );
    mapping.populate(PAGE..PAGE).unwrap();
}

#[test]
fn a_large_segment_is_aligned_for_huge_pages() {
    let mapping = Mapping::create("jericho-huge", 2 * HUGE_PAGE_BYTES, true).unwrap();
    assert_eq!(mapping.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
    mapping.populate(0..mapping.len()).unwrap();
    mapping.copy_in(mapping.len() - 1, &[9]);
    let mut last = [0];
    mapping.copy_out(mapping.len() - 1, &mut last);
    assert_eq!(last, [9]);
}

#[test]
fn two_mappings_of_a_segment_share_its_bytes_and_its_policy() {
    let ours = segment(2 * PAGE);
    ours.bind(0..2 * PAGE, 0).unwrap();
    let fd = ours.fd().try_clone_to_owned().unwrap();
    let theirs = Mapping::from_fd(fd, 2 * PAGE, false).unwrap();
    ours.copy_in(PAGE, b"shared");
    let mut out = [0; 6];
    theirs.copy_out(PAGE, &mut out);
    assert_eq!(&out, b"shared");
    assert_eq!(theirs.bound_node(0).unwrap(), Some(0));
}

#[test]
#[should_panic(expected = "usable length is 0")]
fn writing_through_a_read_only_mapping_panics_before_it_faults() {
    let fd = segment(PAGE).fd().try_clone_to_owned().unwrap();
    Mapping::from_fd(fd, PAGE, false).unwrap().copy_in(0, &[1]);
}

#[test]
fn a_segment_that_is_too_short_or_could_be_truncated_is_refused() {
    let fd = segment(PAGE).fd().try_clone_to_owned().unwrap();
    let short = Mapping::from_fd(fd, 2 * PAGE, true).unwrap_err();
    assert_eq!(short.kind(), io::ErrorKind::InvalidData);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("jericho-unsealed", flags).unwrap();
    rustix::fs::ftruncate(&unsealed, PAGE as u64).unwrap();
    let unsealed = Mapping::from_fd(unsealed, PAGE, true).unwrap_err();
    assert_eq!(unsealed.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn a_segment_cannot_be_truncated() {
    let mapping = segment(2 * PAGE);
    let truncated = rustix::fs::ftruncate(mapping.fd(), PAGE as u64);
    assert_eq!(truncated, Err(rustix::io::Errno::PERM));
}
