//! The plan of a mount, and rounds without their thread.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc;

use jericho_cache::{Config, Error, Grant, Intent, Object, PagePlace, PageRun};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::policy::RANGE_BYTES;
use super::*;

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// An object of zeros.
struct Zeros;

impl Object for Zeros {
    fn id(&self) -> u64 {
        1
    }
    fn slice_of(&self, _page: u64) -> u16 {
        0
    }
    fn resolve(&self, _first: u64, count: u32, out: &mut Vec<PageRun>) -> Result<(), Error> {
        out.push(PageRun {
            pages: count,
            place: PagePlace::Hole,
        });
        Ok(())
    }
    fn allocate(&self, _: u64, _: u32, _: &mut Vec<PageRun>) -> Result<(), Error> {
        panic!("no page is dirty");
    }
    fn written(&self, _: u64, _: u32) {}
    fn write_failed(&self, _: u64, _: u32, _: &Error) {}
}

/// A slice at home on node 0, which has 64 MiB, and the rounds for it.
struct Bed {
    slice: Arc<Slice>,
    spiller: Spiller,
}

impl Bed {
    /// Returns a slice with the smallest number of frames at home, and `ranges` ranges. `others`: the nodes beside node 0, as in a topology file.
    /// `change` changes the topology for the rounds.
    fn new(ranges: u32, others: &str, change: impl FnOnce(&mut Topology)) -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("topology");
        let nodes = format!("node 0 cpus=0 memory=64M\n{others}");
        std::fs::write(&file, nodes).unwrap();
        let mut topology = Topology::from_spec(file.to_str().unwrap()).unwrap();
        let config = Config {
            id: 0,
            frames: FRAMES_MIN,
            kernel_node: topology.nodes[0].kernel_node,
            cpus: vec![],
            dirty_age: Duration::from_secs(3600),
        };
        let slice = Slice::start_spilling(&config, ranges * SPILL_FRAMES, &[]).unwrap();
        change(&mut topology);
        let spiller = Spiller::new([(slice.clone(), NodeId(0))], &topology);
        Bed { slice, spiller }
    }

    /// Gives a range memory of a node.
    fn take(&self, range: usize, node: usize) {
        let rounds = &mut *self.spiller.rounds.lock();
        let taken = self.spiller.take(&mut rounds.slices[0], range, node);
        assert!(taken.unwrap());
    }

    /// Says how much of node 0 is available from now on, while no range has memory of it.
    fn leave_at_home(&self, available_bytes: u64) {
        self.spiller.home_bytes.lock()[0] = 64 * MIB - available_bytes;
    }

    fn get(&self, page: u64) -> Grant {
        let (tx, rx) = mpsc::channel();
        let done = move |grant: Result<Grant, Error>| tx.send(grant).unwrap_or(());
        let object: Arc<dyn Object> = Arc::new(Zeros);
        self.slice.get(&object, page, 1, Intent::Read, done);
        rx.recv_timeout(LONG).expect("an answer").expect("a page")
    }

    /// Returns the memory that the ranges have.
    fn ranges(&self) -> Vec<Option<Held>> {
        self.spiller.rounds.lock().slices[0].ranges.clone()
    }
}

#[test]
fn a_range_comes_home_also_when_a_page_in_use_has_kept_it_for_a_round() {
    let bed = Bed::new(1, "node 1 memory=1G\n", |_| {});
    bed.leave_at_home(0);
    bed.take(0, 1);
    // The last page is in the range. All frames at home become free again, so that the slice needs none.
    let last = u64::from(FRAMES_MIN);
    let grants: Vec<Grant> = (0..=last).map(|page| bed.get(page)).collect();
    let grant = grants.into_iter().next_back();
    let (tx, rx) = mpsc::channel();
    let done = Box::new(move |done| tx.send(done).unwrap_or(()));
    bed.slice.invalidate(Zeros.id(), 0..last, done);
    rx.recv_timeout(LONG).expect("an answer").expect("no pages");
    bed.leave_at_home(56 * MIB);
    assert!(bed.spiller.round());
    let one_page = Held {
        node: 1,
        is_leaving: true,
        bytes: PAGE_BYTES,
    };
    assert_eq!(bed.ranges(), [Some(one_page)]);
    drop(grant);
    let begun = Instant::now();
    while bed.ranges() == [Some(one_page)] {
        assert!(begun.elapsed() < LONG, "the page never leaves");
        assert!(!bed.slice.take_wish(), "it needs frames");
        bed.spiller.round();
    }
    let at_home = Held {
        node: 0,
        is_leaving: false,
        bytes: RANGE_BYTES,
    };
    assert_eq!(bed.ranges(), [Some(at_home)]);
}

#[test]
fn a_range_does_not_leave_again_for_a_home_node_that_has_refused_memory() {
    // The kernel knows no such node, and refuses its memory.
    let bed = Bed::new(1, "node 1 memory=1G\n", |topology| {
        topology.nodes[0].kernel_node = Some(1000);
    });
    bed.take(0, 1);
    bed.leave_at_home(56 * MIB);
    for _ in 0..5 {
        assert!(bed.spiller.round());
        assert_eq!(bed.ranges()[0].map(|held| held.node), Some(1));
        bed.spiller.rounds.lock().refused.clear();
    }
    assert_eq!(bed.slice.counters().spill_given_back, 512);
    // After the pause, the slice tries once more.
    let paused = |bed: &Bed| bed.spiller.rounds.lock().pauses[&0].length;
    assert_eq!(paused(&bed), PAUSE_MIN);
    let over = Instant::now();
    bed.spiller.rounds.lock().pauses.get_mut(&0).unwrap().until = over;
    bed.spiller.round();
    assert_eq!(bed.slice.counters().spill_given_back, 2 * 512);
    assert_eq!(paused(&bed), 2 * PAUSE_MIN);
}

#[test]
fn the_pause_of_coming_home_doubles_up_to_its_longest() {
    let now = Instant::now();
    let mut pause = Pause::after(None, now);
    for seconds in [5, 10, 20, 40, 80, 160, 320, 640, 640] {
        assert_eq!(pause.length, Duration::from_secs(seconds));
        assert_eq!(pause.until, now + pause.length);
        pause = Pause::after(Some(&pause), now);
    }
}

#[test]
fn a_slice_takes_no_more_in_a_round_when_a_node_refuses() {
    let others = "node 1 memory=1G\nnode 2 memory=1G\n";
    // The kernel knows no such node, and refuses its memory.
    let mut bed = Bed::new(40, others, |topology| {
        topology.nodes[1].kernel_node = Some(1000);
    });
    bed.spiller.take_max = LONG;
    for page in 0..2 * u64::from(FRAMES_MIN) {
        drop(bed.get(page));
    }
    let begun = Instant::now();
    while !bed.spiller.bell.signals.lock().is_wanted {
        assert!(begun.elapsed() < LONG, "the slice never needs frames");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Its node has room for eight ranges, beside the three thirty-seconds that it keeps.
    bed.leave_at_home((6 + 8 * 2 + 1) * MIB);
    assert!(bed.spiller.round());
    let nodes: Vec<usize> = bed
        .ranges()
        .iter()
        .flatten()
        .map(|held| held.node)
        .collect();
    assert_eq!(nodes, [[0; 8], [2; 8]].concat());
}

#[test]
fn no_further_range_leaves_while_the_memory_of_one_is_not_free_yet() {
    // One search of the table, in three parts, takes more than a round.
    let mut bed = Bed::new(200, "node 1 memory=16M\n", |_| {});
    bed.spiller.leave_max = Duration::ZERO;
    bed.leave_at_home(0);
    (0..4).for_each(|range| bed.take(range, 1));
    // The last range has pages in use and unused frames.
    let before = u64::from(FRAMES_MIN + 3 * SPILL_FRAMES);
    (0..before).for_each(|page| drop(bed.get(page)));
    let grants: Vec<Grant> = (before..before + 300).map(|page| bed.get(page)).collect();
    // Node 1 lacks 2 MiB to have plenty, also with the unused frames of one range.
    bed.spiller.home_bytes.lock()[1] = 12 * MIB;
    for _ in 0..2 {
        bed.spiller.round();
        let ranges = bed.ranges();
        let staying = ranges.iter().flatten().filter(|held| !held.is_leaving);
        assert_eq!(staying.count(), 3);
    }
    drop(grants);
}

#[test]
fn a_round_without_time_takes_one_range_and_the_next_goes_on() {
    let mut bed = Bed::new(3, "node 1 memory=1G\n", |_| {});
    bed.spiller.take_max = Duration::ZERO;
    bed.leave_at_home(0);
    bed.spiller.rounds.lock().slices[0].rest = AT_ONCE;
    for count in [1, 2, 3] {
        assert!(bed.spiller.round());
        assert_eq!(bed.ranges().iter().flatten().count(), count);
        let is_rung = std::mem::take(&mut bed.spiller.bell.signals.lock().is_wanted);
        assert_eq!(is_rung, count < 3);
    }
    assert_eq!(bed.spiller.rounds.lock().slices[0].rest, 0);
    // However often it goes on, the slice takes no more than for one need of frames.
    let mut bed = Bed::new(3, "node 1 memory=1G\n", |_| {});
    bed.spiller.take_max = Duration::ZERO;
    bed.spiller.rounds.lock().slices[0].rest = 2;
    for count in [1, 2, 2] {
        bed.spiller.round();
        assert_eq!(bed.ranges().iter().flatten().count(), count);
    }
    // An unmount waits for no range.
    let bed = Bed::new(3, "node 1 memory=1G\n", |_| {});
    bed.spiller.rounds.lock().slices[0].rest = AT_ONCE;
    bed.spiller.close();
    assert!(!bed.spiller.round());
    assert_eq!(bed.ranges(), [None; 3]);
}

#[test]
fn a_range_comes_home_also_after_a_round_without_time_for_it() {
    let mut bed = Bed::new(1, "node 1 memory=1G\n", |_| {});
    bed.spiller.take_max = Duration::ZERO;
    bed.leave_at_home(56 * MIB);
    {
        let rounds = &mut *bed.spiller.rounds.lock();
        rounds.slices[0].comes_home = Some(0);
    }
    // The range has left, and the round ends before the slice takes memory for it.
    bed.spiller.bell.signals.lock().is_closing = true;
    assert!(!bed.spiller.round());
    bed.spiller.bell.signals.lock().is_closing = false;
    assert!(bed.spiller.round());
    assert_eq!(bed.ranges()[0].map(|held| held.node), Some(0));
}

/// Counts the warnings in the log.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU32>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_lasting_failure_is_logged_once() {
    // The kernel knows no such node, and refuses its memory.
    let mut bed = Bed::new(1, "node 1 memory=1G\n", |topology| {
        topology.nodes[1].kernel_node = Some(1000);
    });
    bed.leave_at_home(0);
    let warnings = Warnings::default();
    let attempt = |bed: &Bed| {
        bed.spiller.rounds.lock().refused.clear();
        bed.spiller.rounds.lock().slices[0].rest = AT_ONCE;
        tracing::subscriber::with_default(warnings.clone(), || {
            bed.spiller.round();
            // A round that leaves the node out.
            bed.spiller.round();
        });
        warnings.0.load(Relaxed)
    };
    assert_eq!([(); 3].map(|()| attempt(&bed)), [1, 1, 1]);
    // The node gives memory, and takes it back.
    bed.spiller.topology.nodes[1].kernel_node = None;
    assert_eq!(attempt(&bed), 1);
    assert_eq!(bed.ranges()[0].map(|held| held.node), Some(1));
    bed.spiller.rounds.lock().slices[0].ranges[0]
        .as_mut()
        .unwrap()
        .is_leaving = true;
    bed.spiller.round();
    assert_eq!(bed.ranges(), [None]);
    bed.spiller.topology.nodes[1].kernel_node = Some(1000);
    assert_eq!([(); 2].map(|()| attempt(&bed)), [2, 2]);
}

#[test]
fn a_node_lends_nothing_to_slices_whose_home_has_its_memory_from_it() {
    let others = "node 1 memory=1G\nnode 2 memory=1G\n";
    let mut bed = Bed::new(2, others, |topology| {
        topology.nodes[1].memory_bytes = 0;
        topology.nodes[1].kernel_node = topology.nodes[0].kernel_node;
        topology.nodes[2].kernel_node = None;
    });
    let slices = [(bed.slice.clone(), NodeId(1))];
    bed.spiller = Spiller::new(slices, &bed.spiller.topology);
    bed.take(0, 0);
    bed.take(1, 2);
    // Node 0 is not low, and has not plenty.
    bed.leave_at_home(8 * MIB);
    bed.spiller.round();
    assert_eq!(bed.spiller.frames_of(0), [(0, 512), (2, 512)]);
    assert_eq!(bed.spiller.lent_to(0), [(2, 512)]);
}

#[test]
fn slices_take_ranges_in_turn() {
    let ranges = [
        ((0, 5), 1),
        ((0, 6), 1),
        ((0, 7), 2),
        ((2, 0), 0),
        ((2, 3), 1),
    ];
    let taken = in_turn(ranges.to_vec());
    let expected = [
        ((0, 5), 1),
        ((2, 0), 0),
        ((0, 6), 1),
        ((2, 3), 1),
        ((0, 7), 2),
    ];
    assert_eq!(taken, expected);
}

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
fn all_slices_share_the_room_of_a_control_group() {
    // Eight slices on eight nodes, of which each has as much as the group.
    let mut group_bytes = 128 * MIB;
    for everywhere in (1..=8).rev() {
        let share = share_of_room(128 * MIB, Some(group_bytes), 1, everywhere);
        assert_eq!(share, 16 * MIB);
        group_bytes -= share;
    }
    // A slice whose node has less leaves more to others.
    assert_eq!(share_of_room(10 * MIB, Some(100 * MIB), 2, 4), 5 * MIB);
    assert_eq!(share_of_room(10 * MIB, Some(95 * MIB), 1, 3), 10 * MIB);
    // Without a group, nodes share nothing.
    assert_eq!(share_of_room(128 * MIB, None, 1, 8), 128 * MIB);
    assert_eq!(share_of_room(128 * MIB, None, 0, 0), 128 * MIB);
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
