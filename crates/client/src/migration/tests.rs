use jericho_sys::affinity::CpuMask;
use jericho_sys::load::ThreadTimes;
use proptest::prelude::*;

use super::crowding::Room;
use super::migrator::{
    CHECK_EVERY, HALF_LIFE, HOLD_MIN, IDLE, MOVE_COST, Migrator, NOWHERE, NUDGES, STAY_MIN, World,
};

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

fn mask(cpus: std::ops::Range<u32>) -> CpuMask {
    cpus.collect()
}

/// A thread on a machine of four nodes with four CPUs each.
struct Machine {
    now: u64,
    /// The mask that the program has set.
    own: CpuMask,
    mask: CpuMask,
    cpu: u32,
    /// The program has set a mask while the migrator's was there.
    interfered: bool,
    /// The masks that the migrator has set, with the time.
    sets: Vec<(u64, CpuMask)>,
    idle: [Option<f32>; 4],
    waited: u64,
    slept: u64,
    /// Number of reads of its times.
    time_reads: usize,
    /// Number of reads of the mask.
    mask_reads: usize,
    /// The nodes to which the migrator says that it has moved the thread.
    moved_to: Vec<usize>,
}

impl Machine {
    fn new() -> Machine {
        Machine {
            now: 1,
            own: mask(0..16),
            mask: mask(0..16),
            cpu: 0,
            interfered: false,
            sets: vec![],
            idle: [None; 4],
            waited: 0,
            slept: 0,
            time_reads: 0,
            mask_reads: 0,
            moved_to: vec![],
        }
    }

    fn node(&self) -> usize {
        self.cpu as usize / 4
    }

    /// Moves the thread to a CPU of its mask, as the kernel does.
    fn run_on_mask(&mut self) {
        if !self.mask.contains(self.cpu) {
            self.cpu = (0..16).find(|cpu| self.mask.contains(*cpu)).unwrap_or(0);
        }
    }

    fn program_sets(&mut self, mask: CpuMask, held: bool) {
        // A program may set the very mask that the migrator has set. The migrator cannot notice that.
        if self.sets.last().is_some_and(|(_, last)| *last == mask) {
            return;
        }
        self.interfered |= held && mask != self.mask;
        (self.own, self.mask) = (mask, mask);
        self.run_on_mask();
    }

    /// Uses `bytes` at `node` over `time`, then decides.
    fn uses(&mut self, migrator: &mut Migrator, node: usize, bytes: u64, time: u64) {
        self.now += time;
        migrator.advance(self.now, self);
        match node == self.node() {
            true => migrator.used(node, bytes, 0),
            false => migrator.used(node, 0, bytes),
        }
        migrator.decide(self.now, self);
    }

    /// Returns the number of moves to another node.
    fn moves(&self) -> usize {
        let narrow = self.sets.iter().filter(|(_, m)| *m != self.own);
        narrow.count()
    }
}

impl World for Machine {
    fn mask(&mut self) -> Option<CpuMask> {
        self.mask_reads += 1;
        Some(self.mask)
    }

    fn set_mask(&mut self, mask: &CpuMask) -> bool {
        assert!(mask.is_subset(&self.own), "{mask:?} widens {:?}", self.own);
        assert!(!mask.is_empty());
        assert!(!self.interfered, "the program has set its own mask");
        self.mask = *mask;
        self.sets.push((self.now, *mask));
        self.run_on_mask();
        true
    }

    fn cpus_of(&self, node: usize) -> CpuMask {
        match node {
            0..4 => mask(node as u32 * 4..node as u32 * 4 + 4),
            _ => CpuMask::EMPTY,
        }
    }

    fn here(&mut self) -> Option<usize> {
        Some(self.node())
    }

    fn room(&mut self, _now: u64, node: usize) -> Option<Room> {
        Some(Room {
            cpus: 4.0,
            spare: 4.0 * (*self.idle.get(node)?)?,
            lasting_spare: 4.0 * (*self.idle.get(node)?)?,
            ..Room::default()
        })
    }

    fn saw(&mut self, node: usize, crowd: f32, _is_guest: bool) {
        assert_eq!((node, crowd >= 1.0), (self.node(), true));
    }

    fn moves(&mut self, _now: u64, _from: Option<usize>, to: usize, cpus: f32) {
        assert!((0.0..=1.0).contains(&cpus));
        self.moved_to.push(to);
    }

    fn remote_ns(&mut self, at: usize, data: usize) -> f32 {
        if at == data { 0.0 } else { 0.05 }
    }

    /// The thread is ready to run unless it sleeps.
    fn times(&mut self) -> Option<ThreadTimes> {
        self.time_reads += 1;
        Some(ThreadTimes {
            ran_ns: self.now.saturating_sub(self.waited + self.slept),
            waited_ns: self.waited,
        })
    }

    /// What may happen, happens.
    fn random(&mut self) -> f32 {
        0.0
    }
}

#[test]
fn a_thread_that_uses_one_other_node_is_moved_there_and_keeps_its_mask() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..100 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.mask, m.moves()), (2, m.own, 1));
    assert_eq!(m.moved_to, [2]);
}

#[test]
fn use_that_does_not_outweigh_a_move_causes_none() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    // In a steady state, the window holds the use of 1/ln 2 half-lives: a little less than the cost of a move.
    let each = (MOVE_COST * 0.6) as u64 / 10;
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, each, HALF_LIFE / 10);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn a_lap_reads_the_times_of_the_thread_once() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.cpu = 8;
    for _ in 0..10 {
        m.uses(&mut migrator, 2, MIB, CHECK_EVERY);
    }
    assert_eq!(m.time_reads, 10);
}

#[test]
fn a_thread_that_is_already_local_is_not_moved() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..10_000 {
        m.uses(&mut migrator, 0, 4 * MIB, MS);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn a_thread_that_the_scheduler_keeps_moving_away_is_held_until_it_uses_other_data() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..(NUDGES + 1) * 3000 {
        m.uses(&mut migrator, 2, MIB, MS);
        if migrator.held_on().is_none() {
            m.cpu = 0;
        }
    }
    assert_eq!(migrator.held_on(), Some(2));
    assert_eq!(m.mask, mask(8..12));
    assert_eq!(m.moves(), NUDGES as usize + 1);
    // Its data moves to node 1.
    for _ in 0..3000 {
        m.uses(&mut migrator, 1, MIB, MS);
    }
    assert_eq!((migrator.held_on(), m.node(), m.mask), (None, 1, m.own));
}

#[test]
fn a_thread_that_mostly_waits_for_a_cpu_moves_after_as_many_bytes_as_another_one() {
    for (waits, moves) in [(0, 0), (90 * MS, 1)] {
        let (mut m, mut migrator) = (Machine::new(), Migrator::new());
        for _ in 0..100 {
            m.waited += waits;
            m.uses(&mut migrator, 2, MIB, 100 * MS);
        }
        assert_eq!(m.moves(), moves, "it waits for {waits} of 100 ms");
    }
}

/// Returns a migrator that holds the thread on node 2.
fn held(m: &mut Machine) -> Migrator {
    let mut migrator = Migrator::new();
    for _ in 0..20_000 {
        m.uses(&mut migrator, 2, MIB, MS);
        if migrator.held_on().is_some() {
            return migrator;
        }
        m.cpu = 0;
    }
    panic!("never held");
}

#[test]
fn a_held_thread_is_released_when_it_uses_nothing() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    m.now += IDLE;
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
    m.now += 1;
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn a_held_thread_that_waits_for_a_cpu_is_not_idle() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    m.now += 3 * IDLE;
    m.waited += 3 * IDLE;
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
    m.now += IDLE + 1;
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn a_held_thread_that_sleeps_between_two_uses_is_not_idle() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    for _ in 0..10 {
        // For example, it waits for the process's lock of its address space while others allocate memory.
        m.slept += 3 * IDLE;
        m.uses(&mut migrator, 2, MIB, 3 * IDLE + MS);
        assert_eq!(migrator.held_on(), Some(2));
    }
    // It computes.
    m.uses(&mut migrator, 2, MIB, IDLE + MS);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn a_held_thread_that_sleeps_and_then_does_something_else_is_released() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    (m.now, m.slept) = (m.now + IDLE, m.slept + IDLE);
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
    (m.now, m.slept) = (m.now + 1, m.slept + 1);
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

/// Lets the scheduler move a thread away from its data ten times, once in `every` nanoseconds. Returns whether the migrator holds the thread in the end.
fn is_held_when_moved_away(every: u64) -> bool {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..10 {
        if migrator.held_on().is_none() {
            m.cpu = 0;
        }
        for _ in 0..every / MS {
            m.uses(&mut migrator, 2, 2 * MIB, MS);
        }
        assert_eq!(m.node(), 2);
    }
    migrator.held_on().is_some()
}

#[test]
fn a_thread_that_the_scheduler_moves_away_each_second_is_held() {
    assert!(is_held_when_moved_away(1000 * MS));
}

#[test]
fn a_thread_that_the_scheduler_moves_away_each_ten_seconds_is_not_held() {
    const { assert!(10_000 * MS > 2 * STAY_MIN) };
    assert!(!is_held_when_moved_away(10_000 * MS));
}

#[test]
fn a_thread_that_the_kernel_has_brought_back_is_not_moved() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    // Its remote bytes outweigh a move before the first decision about one, and then it is on its node.
    migrator.advance(m.now, &mut m);
    migrator.used(2, 0, 64 * MIB);
    m.cpu = 8;
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((&m.sets[..], &m.moved_to[..]), (&[][..], &[][..]));
    // The next move is its first one.
    m.cpu = 0;
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.moves(), migrator.held_on()), (1, None));
}

#[test]
fn remote_use_counts_from_its_begin_when_a_thread_did_not_stay() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..=NUDGES {
        // It uses little data, too little for a move, for a long time.
        m.cpu = 0;
        for _ in 0..30 {
            m.uses(&mut migrator, 2, 2 * MIB, HALF_LIFE * 2);
        }
        for _ in 0..10 {
            m.uses(&mut migrator, 2, MIB, MS);
        }
        assert_eq!(m.node(), 2);
    }
    assert_eq!(migrator.held_on(), Some(2));
}

#[test]
fn a_thread_that_waits_for_seconds_between_decisions_sees_the_crowd() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    (m.cpu, m.idle) = (8, [Some(0.9), None, Some(0.0), None]);
    for _ in 0..10 {
        m.waited += 2 * IDLE;
        m.uses(&mut migrator, 2, 2 * MIB, 2 * IDLE + MS);
    }
    assert_eq!(m.node(), 0);
}

#[test]
fn a_held_thread_is_released_when_its_files_have_policy_never() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    for _ in 0..3000 {
        m.uses(&mut migrator, NOWHERE, MIB, MS);
    }
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

/// Lets the thread use data of node 2 for a second, of which it waits half while it is there.
fn crowded_second(m: &mut Machine, migrator: &mut Migrator) {
    for _ in 0..1000 {
        m.waited += if m.node() == 2 { MS / 2 } else { 0 };
        m.uses(migrator, 2, MIB, MS);
    }
}

#[test]
fn a_held_thread_that_waits_beside_idle_cpus_works_away_until_there_is_room() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    m.idle[2] = Some(0.0);
    crowded_second(&mut m, &mut migrator);
    assert_eq!(migrator.held_on(), Some(2), "no node is known to be idle");
    assert!(!migrator.works_away());
    m.idle[0] = Some(0.9);
    crowded_second(&mut m, &mut migrator);
    assert_eq!((migrator.held_on(), m.node(), m.mask), (None, 0, m.own));
    let moves = m.moves();
    for _ in 0..20 {
        crowded_second(&mut m, &mut migrator);
        assert!(migrator.works_away());
    }
    assert_eq!((m.node(), m.moves()), (0, moves), "its node stays full");
    m.idle[2] = Some(0.5);
    crowded_second(&mut m, &mut migrator);
    assert_eq!((m.node(), m.mask), (2, m.own));
    assert!(!migrator.works_away());
    assert_eq!(m.moved_to[m.moved_to.len() - 2..], [0, 2]);
}

#[test]
fn a_failed_attempt_to_come_home_does_not_keep_a_thread_from_leaving() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    // The node 2 of its data is full. Node 1 is idle. On its own node, it waits for half of the time.
    m.idle = [Some(0.5), Some(1.0), Some(0.0), None];
    for _ in 0..10_000 {
        m.waited += if m.node() == 0 { MS / 2 } else { 0 };
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.node(), 1);
}

#[test]
fn a_thread_that_waits_for_seconds_between_two_decisions_comes_to_its_data() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..10 {
        m.waited += 2 * IDLE;
        m.uses(&mut migrator, 2, 2 * MIB, 2 * IDLE + 10 * MS);
    }
    assert_eq!(m.node(), 2);
}

#[test]
fn the_times_of_a_parent_tell_nothing_about_a_child_of_fork() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.idle = [Some(0.5), None, Some(0.0), None];
    (m.now, m.waited) = (10_000 * MS, 5_000 * MS);
    migrator.advance(m.now, &mut m);
    migrator.decide(m.now, &mut m);
    // The child begins, with data on a full node.
    (m.waited, m.slept) = (0, m.now);
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn policy_always_looks_at_no_cpus() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.cpu = 8;
    m.idle = [Some(0.9), None, Some(0.0), None];
    for _ in 0..3000 {
        (m.now, m.waited) = (m.now + MS, m.waited + MS / 2);
        migrator.advance(m.now, &mut m);
        migrator.used(2, MIB, 0);
        migrator.decide_always(m.now, &mut m);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn a_thread_that_goes_on_under_policy_always_no_longer_works_away() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.idle = [Some(0.5), None, Some(0.0), None];
    crowded_second(&mut m, &mut migrator);
    assert!(migrator.works_away());
    migrator.advance(m.now, &mut m);
    migrator.used(0, MIB, 0);
    migrator.decide_always(m.now, &mut m);
    assert!(!migrator.works_away());
}

#[test]
fn a_thread_that_policy_always_holds_is_released_whatever_it_waited_before() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.uses(&mut migrator, 0, MIB, IDLE);
    // It has waited for long when its first remote access comes.
    (m.now, m.waited) = (m.now + 100 * IDLE, m.waited + 100 * IDLE);
    migrator.hold_on(m.now, 2, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
    m.now += IDLE + 1;
    migrator.release_if_idle(m.now, &mut m);
    assert_eq!(migrator.held_on(), None);
}

#[test]
fn a_thread_that_waits_stays_when_remote_access_costs_more() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    (m.idle, m.cpu) = ([Some(0.9); 4], 8);
    m.idle[2] = Some(0.0);
    for _ in 0..10_000 {
        m.waited += MS / 4;
        // 8 GiB a second: remote access would cost 0.4 s.
        m.uses(&mut migrator, 2, 8 * MIB, MS);
    }
    assert_eq!(m.sets, []);
    for _ in 0..1000 {
        m.waited += if m.node() == 2 { MS / 2 } else { 0 };
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_ne!(m.node(), 2, "now it costs less");
}

#[test]
fn a_thread_that_goes_and_comes_back_goes_less_and_less_often() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.cpu = 8;
    // Each node seems to be full while the thread is there, and idle while it is not.
    for _ in 0..60_000 {
        for node in [0, 2] {
            m.idle[node] = Some(if m.node() == node { 0.0 } else { 1.0 });
        }
        m.waited += MS / 2;
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert!((4..20).contains(&m.moves()), "{} moves", m.moves());
}

#[test]
fn where_all_nodes_are_full_a_thread_still_moves_to_its_data() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.idle = [Some(0.01); 4];
    for _ in 0..100 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.mask, m.moves()), (2, m.own, 1));
}

#[test]
fn no_thread_is_moved_to_a_full_node() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.idle[2] = Some(0.01);
    m.idle[0] = Some(0.5);
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.sets, []);
    assert!(migrator.works_away());
    m.idle[2] = Some(0.5);
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.moves()), (2, 1));
    assert!(!migrator.works_away());
}

#[test]
fn a_program_can_keep_a_thread_off_a_node() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.program_sets(mask(0..4), false);
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.sets, []);
    // The migrator then uses the CPUs that the program allows.
    m.program_sets(mask(0..10), false);
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.sets[0].1), (2, mask(8..10)));
}

#[test]
fn a_thread_whose_mask_the_program_sets_is_left_alone_from_then_on() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    m.program_sets(mask(0..8), true);
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    migrator.hold_on(m.now, 2, &mut m);
    migrator.release(&mut m);
    assert!(migrator.is_hands_off());
    assert_eq!((migrator.held_on(), m.mask), (None, mask(0..8)));
}

#[test]
fn policy_always_moves_a_thread_at_the_first_remote_access_and_back_at_the_next() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    migrator.hold_on(1, 3, &mut m);
    assert_eq!(
        (migrator.held_on(), m.node(), m.mask),
        (Some(3), 3, mask(12..16))
    );
    migrator.hold_on(2, 1, &mut m);
    assert_eq!(
        (migrator.held_on(), m.node(), m.mask),
        (Some(1), 1, mask(4..8))
    );
    // A node without CPUs cannot hold the thread.
    migrator.hold_on(3, 9, &mut m);
    migrator.hold_on(4, NOWHERE, &mut m);
    migrator.release(&mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn policy_always_does_not_read_the_mask_for_each_access_to_a_refused_node() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.program_sets(mask(0..4), false);
    for now in 1..1000 {
        migrator.hold_on(now, 2, &mut m);
    }
    assert_eq!((m.mask_reads, migrator.held_on()), (1, None));
    // The program allows the node.
    m.program_sets(mask(0..16), false);
    migrator.hold_on(1000 * MS, 2, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
}

proptest! {
    /// For any amounts: a thread that alternates between two nodes faster than the window decays is not moved.
    #[test]
    fn no_ping_pong(bytes in 1..64 * MIB, time in 1..HALF_LIFE / 4, first in 0..4usize, second in 0..4usize) {
        let (mut m, mut migrator) = (Machine::new(), Migrator::new());
        let second = if first == second { (first + 1) % 4 } else { second };
        // The window has both nodes before the first decision that could move the thread.
        for node in [first, second] {
            m.now += time;
            migrator.advance(m.now, &mut m);
            migrator.used(node, 0, bytes);
        }
        for turn in 0..2000 {
            m.uses(&mut migrator, [first, second][turn % 2], bytes, time);
        }
        prop_assert_eq!(m.sets, []);
    }

    /// For any use, any calls of the program and any state of the machine: each mask is a part of the program's own (the machine
    /// asserts that), the migrator sets no mask after the program has set one, moves are no closer together than the hold time,
    /// and in the end the thread has the program's mask.
    #[test]
    fn the_program_has_the_last_word(
        steps in prop::collection::vec((0..6usize, 0..16 * MIB, 0..2 * HOLD_MIN, 0..40u32, 0..4usize), 1..400)
    ) {
        let (mut m, mut migrator) = (Machine::new(), Migrator::new());
        for (node, bytes, time, event, arg) in steps {
            match event {
                0 => m.program_sets(mask(arg as u32 * 4..16), migrator.held_on().is_some()),
                1 => m.program_sets(mask(0..1 + arg as u32), migrator.held_on().is_some()),
                2 => migrator.release(&mut m),
                3 => migrator.hold_on(m.now, node, &mut m),
                4 => m.idle[arg] = [None, Some(0.0), Some(0.5), Some(1.0)][arg],
                5..20 => m.cpu = (0..16).filter(|c| m.mask.contains(*c)).nth(arg).unwrap_or(m.cpu),
                20..30 => m.waited += time,
                _ => {}
            }
            let node = if node < 4 { node } else { NOWHERE };
            m.uses(&mut migrator, node, bytes, time);
            if m.interfered {
                migrator.release(&mut m);
                // The mask is the program's, and stays.
                prop_assert!(migrator.is_hands_off() || m.mask == m.own);
            }
        }
        migrator.release(&mut m);
        prop_assert_eq!(m.mask, m.own);
    }

    /// For any order of nodes: after a move by the window, none follows for a while.
    #[test]
    fn moves_are_rare(steps in prop::collection::vec((0..4usize, 0..64 * MIB, 0..HOLD_MIN / 4), 1..500)) {
        let (mut m, mut migrator) = (Machine::new(), Migrator::new());
        for (node, bytes, time) in steps {
            m.uses(&mut migrator, node, bytes, time);
        }
        let moves: Vec<u64> = m.sets.iter().filter(|(_, s)| *s != m.own).map(|(at, _)| *at).collect();
        prop_assert!(moves.windows(2).all(|pair| pair[1] - pair[0] >= HOLD_MIN), "{moves:?}");
    }
}

/// A machine on which the cost of a move was measured.
struct Measured(Machine, f32);

impl World for Measured {
    fn mask(&mut self) -> Option<CpuMask> {
        self.0.mask()
    }

    fn set_mask(&mut self, mask: &CpuMask) -> bool {
        self.0.set_mask(mask)
    }

    fn cpus_of(&self, node: usize) -> CpuMask {
        self.0.cpus_of(node)
    }

    fn here(&mut self) -> Option<usize> {
        self.0.here()
    }

    fn room(&mut self, now: u64, node: usize) -> Option<Room> {
        self.0.room(now, node)
    }

    fn moves(&mut self, now: u64, from: Option<usize>, to: usize, cpus: f32) {
        World::moves(&mut self.0, now, from, to, cpus);
    }

    fn saw(&mut self, node: usize, crowd: f32, is_guest: bool) {
        self.0.saw(node, crowd, is_guest);
    }

    fn remote_ns(&mut self, at: usize, data: usize) -> f32 {
        self.0.remote_ns(at, data)
    }

    fn times(&mut self) -> Option<ThreadTimes> {
        self.0.times()
    }

    fn random(&mut self) -> f32 {
        self.0.random()
    }

    fn move_cost(&mut self, _node: usize) -> f32 {
        self.1
    }
}

#[test]
fn a_measured_cost_decides_when_a_move_pays() {
    let remote_bytes_until_move = |cost: f32| {
        let (mut world, mut migrator) = (Measured(Machine::new(), cost), Migrator::new());
        (1..=1000).find(|_| {
            world.0.now += MS;
            let now = world.0.now;
            migrator.advance(now, &mut world);
            migrator.used(2, 0, MIB);
            migrator.decide(now, &mut world);
            world.0.moves() > 0
        })
    };
    // The window decays a little meanwhile.
    let at = |cost: f32| remote_bytes_until_move(cost).map(|mib: u64| mib * MIB);
    let is_about = |bytes: Option<u64>, cost: f32| {
        bytes.is_some_and(|bytes| (cost..cost * 1.5).contains(&(bytes as f32)))
    };
    for cost in [MOVE_COST, 8.0 * MOVE_COST] {
        assert!(is_about(at(cost), cost), "{:?} {cost}", at(cost));
    }
    assert_eq!(at(f32::INFINITY), None, "a move never pays");
}
