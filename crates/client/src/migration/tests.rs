use super::*;
use migrator::{BACK_OFF, HALF_LIFE, HOLD_MIN, IDLE, MOVE_COST, NUDGES};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

fn mask(cpus: std::ops::Range<u32>) -> CpuMask {
    cpus.collect()
}

/// A thread on a machine of four nodes with four CPUs each.
struct Machine {
    now: u64,
    /// What its program set.
    own: CpuMask,
    mask: CpuMask,
    cpu: u32,
    /// Its program has set a mask while ours was there.
    interfered: bool,
    /// The masks that were set, with the time.
    sets: Vec<(u64, CpuMask)>,
    idle: [Option<f32>; 4],
    waited: u64,
    /// Times that the mask was asked for.
    looks: usize,
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
            looks: 0,
        }
    }

    fn node(&self) -> usize {
        self.cpu as usize / 4
    }

    /// Where the kernel would put it.
    fn settle(&mut self) {
        if !self.mask.contains(self.cpu) {
            self.cpu = (0..16).find(|cpu| self.mask.contains(*cpu)).unwrap_or(0);
        }
    }

    fn program_sets(&mut self, mask: CpuMask, held: bool) {
        // A program that sets the very mask that was set for it cannot be told from one that set none.
        if self.sets.last().is_some_and(|(_, ours)| *ours == mask) {
            return;
        }
        self.interfered |= held && mask != self.mask;
        (self.own, self.mask) = (mask, mask);
        self.settle();
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

    /// Times that it was brought to another node.
    fn moves(&self) -> usize {
        let narrow = self.sets.iter().filter(|(_, m)| *m != self.own);
        narrow.count()
    }
}

impl World for Machine {
    fn mask(&mut self) -> Option<CpuMask> {
        self.looks += 1;
        Some(self.mask)
    }

    fn set_mask(&mut self, mask: &CpuMask) -> bool {
        assert!(mask.is_subset(&self.own), "{mask:?} widens {:?}", self.own);
        assert!(!mask.is_empty());
        assert!(!self.interfered, "the program had placed it");
        self.mask = *mask;
        self.sets.push((self.now, *mask));
        self.settle();
        true
    }

    fn cpus_of(&self, node: usize) -> CpuMask {
        match node {
            0..4 => mask(node as u32 * 4..node as u32 * 4 + 4),
            _ => CpuMask::EMPTY,
        }
    }

    fn idle_share(&mut self, _now: u64, node: usize) -> Option<f32> {
        self.idle[node]
    }

    fn waited_ns(&mut self) -> Option<u64> {
        Some(self.waited)
    }
}

#[test]
fn a_thread_that_uses_one_other_node_is_brought_there_and_keeps_its_mask() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..100 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.mask, m.moves()), (2, m.own, 1));
}

#[test]
fn what_does_not_outweigh_a_move_moves_nothing() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    // The window holds what is used in 1/ln 2 of a half-life: a little less than a move costs.
    let each = (MOVE_COST * 0.6) as u64 / 10;
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, each, HALF_LIFE / 10);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn a_thread_that_is_local_already_is_not_touched() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    for _ in 0..10_000 {
        m.uses(&mut migrator, 0, 4 * MIB, MS);
    }
    assert_eq!(m.sets, []);
}

#[test]
fn a_thread_that_the_scheduler_keeps_taking_away_is_held_and_let_go_when_it_uses_something_else() {
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

/// Held on node 2.
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
fn a_held_thread_is_let_go_when_it_uses_nothing_any_more() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    migrator.release_if_idle(m.now + IDLE, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
    migrator.release_if_idle(m.now + IDLE + 1, &mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn a_held_thread_is_let_go_when_its_files_are_never_to_be_followed() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    for _ in 0..3000 {
        m.uses(&mut migrator, NOWHERE, MIB, MS);
    }
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn a_held_thread_that_waits_while_there_are_idle_cpus_is_let_go_and_not_brought_back_soon() {
    let mut m = Machine::new();
    let mut migrator = held(&mut m);
    let began = m.now;
    for _ in 0..1000 {
        m.waited += MS / 2;
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(migrator.held_on(), Some(2), "nowhere is known to be idle");
    m.idle[0] = Some(0.9);
    for _ in 0..1000 {
        m.waited += MS / 2;
        m.uses(&mut migrator, 2, MIB, MS);
        m.cpu = if migrator.held_on().is_none() {
            0
        } else {
            m.cpu
        };
    }
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
    let last = m.sets[m.sets.len() - 1].0;
    assert!(last > began);
    // Its waiting is over, and it may be brought there again, but not before the time is.
    let before = m.sets.len();
    while m.sets.len() == before {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert!(m.now >= last + BACK_OFF);
}

#[test]
fn nobody_is_moved_to_a_full_node() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.idle[2] = Some(0.01);
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.sets, []);
    m.idle[2] = Some(0.5);
    for _ in 0..2 * BACK_OFF / MS {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.moves()), (2, 1));
}

#[test]
fn a_program_that_keeps_a_thread_off_the_node_is_obeyed() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.program_sets(mask(0..4), false);
    for _ in 0..10_000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!(m.sets, []);
    // As far as it lets us.
    m.program_sets(mask(0..10), false);
    for _ in 0..1000 {
        m.uses(&mut migrator, 2, MIB, MS);
    }
    assert_eq!((m.node(), m.sets[0].1), (2, mask(8..10)));
}

#[test]
fn a_thread_that_its_program_places_is_left_alone_from_then_on() {
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
fn always_moves_at_the_first_remote_access_and_back_at_the_next() {
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
    // On a node without CPUs there is nothing to run on.
    migrator.hold_on(3, 9, &mut m);
    migrator.hold_on(4, NOWHERE, &mut m);
    migrator.release(&mut m);
    assert_eq!((migrator.held_on(), m.mask), (None, m.own));
}

#[test]
fn always_does_not_look_at_the_mask_with_each_access_that_may_not_be_local() {
    let (mut m, mut migrator) = (Machine::new(), Migrator::new());
    m.program_sets(mask(0..4), false);
    for now in 1..1000 {
        migrator.hold_on(now, 2, &mut m);
    }
    assert_eq!((m.looks, migrator.held_on()), (1, None));
    // The program lets it go there.
    m.program_sets(mask(0..16), false);
    migrator.hold_on(1000 * MS, 2, &mut m);
    assert_eq!(migrator.held_on(), Some(2));
}

proptest! {
    /// Two nodes in turn, whatever the amounts, faster than the window forgets: nothing happens.
    #[test]
    fn no_ping_pong(bytes in 1..64 * MIB, time in 1..HALF_LIFE / 4, first in 0..4usize, second in 0..4usize) {
        let (mut m, mut migrator) = (Machine::new(), Migrator::new());
        let second = if first == second { (first + 1) % 4 } else { second };
        // Both are in the window before the first decision that could move.
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

    /// Whatever a thread uses, its program does and the machine says: no mask but a part of the program's own (the model
    /// asserts it), no mask after the program set one meanwhile, no moves faster than they are held, and in the end
    /// what was there before.
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
                // What its program set is there, and stays.
                prop_assert!(migrator.is_hands_off() || m.mask == m.own);
            }
        }
        migrator.release(&mut m);
        prop_assert_eq!(m.mask, m.own);
    }

    /// However a thread wanders between nodes: decisions by the window leave it in peace for a while after each.
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
