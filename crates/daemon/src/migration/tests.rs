use std::io::{Read, Write};

use jericho_sys::affinity;

use super::companions::NARROW_COMPANIONS_MAX;
use super::placer::{Migrated, PAUSE};
use super::*;
use crate::narrow_masks::NarrowMask;
use crate::tasks::{self, Task};

fn time(base: Instant, ms: u64) -> Instant {
    base + Duration::from_millis(ms)
}

#[test]
fn a_thread_is_migrated_when_it_uses_one_node_much_within_a_short_time() {
    let (base, adaptive) = (Instant::now(), ThreadPolicy::Adaptive);
    let mut usage = NO_USAGE;
    let mut adds = |tid, node, bytes, ms| usage.add(tid, node, bytes, adaptive, time(base, ms));
    for ms in 0..3 {
        assert!(!adds(7, 1, BYTES_MIN, ms), "too few samples");
    }
    assert!(adds(7, 1, 1, 3), "enough samples");
    for ms in 4..7 {
        assert!(!adds(7, 1, BYTES_MIN, ms), "the sums start again at 0");
    }
    // Thread ids that differ by the length of the table share an entry.
    assert!(
        !adds(7 + SEEN_MAX as u32, 1, BYTES_MIN, 8),
        "another thread"
    );
    for ms in 2000..2003 {
        assert!(!adds(7 + SEEN_MAX as u32, 1, BYTES_MIN, ms), "too long ago");
    }
}

#[test]
fn a_thread_that_uses_two_nodes_in_turn_stays() {
    let (base, mut usage) = (Instant::now(), NO_USAGE);
    for round in 0..1000 {
        let node = (round % 2) as u16;
        let worth = usage.add(7, node, 8 << 20, ThreadPolicy::Adaptive, base);
        assert!(!worth, "round {round}");
    }
    // Later it uses only one of them.
    assert!((0..4000).any(|_| usage.add(7, 1, 8 << 20, ThreadPolicy::Adaptive, base)));
}

#[test]
fn the_policy_always_migrates_at_the_first_access() {
    let mut usage = NO_USAGE;
    assert!(usage.add(7, 1, 1, ThreadPolicy::Always, Instant::now()));
}

#[test]
fn the_word_of_a_program_moves_no_companions_that_the_policy_of_the_file_leaves() {
    use ThreadPolicy::{Adaptive, Always, Never};
    let policies = [Never, Adaptive, Always];
    let with = |always| policies.map(|file| policy_for_companions(file, always));
    assert_eq!(with(false), [None, Some(Adaptive), Some(Adaptive)]);
    assert_eq!(with(true), [None, Some(Adaptive), Some(Always)]);
}

/// A process with one thread, which sleeps.
struct Program(std::process::Child);

impl Program {
    fn start() -> Program {
        let child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("cat runs");
        let mut program = Program(child);
        program.wake();
        program
    }

    /// Makes the process run, and waits until it sleeps again.
    fn wake(&mut self) {
        let input = self.0.stdin.as_mut().unwrap();
        input.write_all(b"x").unwrap();
        let answer = self.0.stdout.as_mut().unwrap();
        answer.read_exact(&mut [0]).unwrap();
        // The process has answered: when it sleeps next, it stays asleep and on its CPU. The state in /proc does not help: it
        // says "sleeping" a moment before the thread has left the CPU, and a mask that changes at that moment moves the thread at
        // once.
        let syscall = format!("/proc/{}/syscall", self.tid());
        while std::fs::read_to_string(&syscall)
            .unwrap()
            .starts_with("running")
        {
            std::thread::yield_now();
        }
    }

    fn tid(&self) -> u32 {
        self.0.id()
    }

    fn cpus(&self) -> Vec<u32> {
        affinity::get(Some(self.tid())).unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the state of a `placer` on a machine on which each CPU is a node, a CPU on which the program is not, and all CPUs of
/// its mask. Returns `None` on a machine with one CPU, on which no thread can move.
fn migrations(program: &Program) -> Option<(Placer, u32, Vec<u32>)> {
    let all = program.cpus();
    let nodes = Nodes::new(|cpu| cpu as u16);
    let masks = Arc::new(MaskNotes::new().unwrap());
    let costs = MoveCosts::default();
    let context = PlacerContext::new(nodes, &costs, Arc::default(), masks, false);
    let (_, on) = Task::find(program.tid()).unwrap();
    let elsewhere = |cpu: &u32| *cpu != on && *cpu < NODES as u32;
    let Some(other) = all.iter().copied().find(elsewhere) else {
        eprintln!("not tested: there is one CPU, {on}");
        assert_eq!(all, [on]);
        return None;
    };
    Some((Placer::new(Arc::new(context)), other, all))
}

fn order(program: &Program, cpu: u32) -> Order {
    order_of(program.tid(), cpu as u16)
}

fn order_of(tid: u32, node: u16) -> Order {
    Order {
        tid,
        at_ticks: u64::MAX,
        node,
        policy: ThreadPolicy::Adaptive,
        inline: false,
        bytes: BYTES_MIN,
    }
}

#[test]
fn a_thread_of_another_process_is_migrated_and_gets_its_mask_back() {
    let mut program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    let now = Instant::now();
    migrations.serve(&order(&program, cpu), now);
    assert_eq!(program.cpus(), [cpu]);
    // The thread sleeps, so it has not moved.
    migrations.restore_masks(Migrated::has_moved);
    assert_eq!(program.cpus(), [cpu]);
    program.wake();
    migrations.restore_masks(Migrated::has_moved);
    assert_eq!(program.cpus(), all);
    assert_eq!(
        Task::find(program.tid()).unwrap().1,
        cpu,
        "the thread stays there"
    );
    // The pause holds for every node.
    let other = all.iter().copied().find(|c| *c != cpu).unwrap();
    migrations.serve(&order(&program, other), now + PAUSE / 2);
    assert_eq!(program.cpus(), all);
    migrations.serve(&order(&program, other), now + PAUSE);
    assert_eq!(program.cpus(), [other]);
    migrations.restore_masks(|_| true);
    assert_eq!(program.cpus(), all);
    assert_eq!(migrations.context.counts().threads_moved, 2);
}

#[test]
fn an_order_is_not_for_a_later_thread_with_the_same_id() {
    let program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    let start = Task::find(program.tid()).unwrap().0.start;
    let given = |at_ticks| Order {
        at_ticks,
        ..order(&program, cpu)
    };
    migrations.serve(&given(start), Instant::now());
    assert_eq!(program.cpus(), all);
    migrations.serve(&given(start + 1), Instant::now());
    assert_eq!(program.cpus(), [cpu]);
    migrations.restore_masks(|_| true);
}

#[test]
fn a_thread_whose_program_sets_another_mask_is_left_alone_for_good() {
    let program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    let now = Instant::now();
    migrations.serve(&order(&program, cpu), now);
    let other: Vec<u32> = all.iter().copied().filter(|c| *c != cpu).take(1).collect();
    affinity::set(Some(program.tid()), &other).unwrap();
    migrations.restore_masks(|_| true);
    assert_eq!(program.cpus(), other);
    affinity::set(Some(program.tid()), &all).unwrap();
    migrations.serve(&order(&program, cpu), now + Duration::from_secs(60));
    assert_eq!(program.cpus(), all);
}

#[test]
fn threads_that_a_migrated_thread_starts_get_the_mask_back_too_and_older_threads_keep_theirs() {
    let program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    // Migrates this thread, because it starts the others: an older one that sets the same mask itself, and one that inherits it.
    std::thread::spawn(move || {
        let older = Program::start();
        affinity::set(Some(older.tid()), &[cpu]).unwrap();
        let (me, _) = Task::find(affinity::current_tid()).unwrap();
        let since = tasks::now_ticks() + 1;
        // Waits for the next tick, because ticks are long.
        while tasks::now_ticks() < since {
            std::thread::yield_now();
        }
        let (original, narrowed) = (all.iter().copied().collect(), [cpu].into_iter().collect());
        affinity::set_mask(None, &narrowed).unwrap();
        let younger = Program::start();
        assert_eq!(younger.cpus(), [cpu]);
        let now = Instant::now();
        let mask = NarrowMask {
            task: me,
            original,
            narrowed,
            since_ticks: since,
        };
        migrations.threads.push(Migrated {
            mask,
            note: Some(migrations.context.note(&mask)),
            is_companion: false,
            node: cpu as usize,
            begun: now,
            not_before: now,
            repeats: 0,
            left_alone: false,
        });
        migrations.restore_masks(|_| true);
        assert_eq!(affinity::get(None).unwrap(), all);
        assert_eq!((younger.cpus(), older.cpus()), (all, vec![cpu]));
    })
    .join()
    .unwrap();
}

/// Keeps a CPU busy until dropped.
struct Busy(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Busy {
    fn new(cpu: u32) -> Busy {
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = is_over.clone();
        let spin = move || {
            affinity::set(None, &[cpu]).unwrap();
            while !seen.load(Relaxed) {
                std::hint::spin_loop();
            }
        };
        Busy(is_over, Some(std::thread::spawn(spin)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
        self.1.take().map(JoinHandle::join).unwrap().unwrap();
    }
}

#[test]
fn a_thread_works_away_from_a_node_with_busy_cpus_unless_it_needs_little() {
    let program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    let _busy = Busy::new(cpu);
    let is_busy = |migrations: &Placer| {
        let room = migrations.context.room(cpu as usize);
        room.is_some_and(|room| room.spare < 0.1)
    };
    let begun = Instant::now();
    while !is_busy(&migrations) {
        assert!(begun.elapsed() < Duration::from_secs(60), "never busy");
        std::thread::sleep(Duration::from_millis(10));
    }
    let now = Instant::now();
    // Nothing is known of the thread yet, so it may need a CPU.
    migrations.serve(&order(&program, cpu), now);
    assert_eq!(
        (program.cpus(), migrations.context.count_away(now)),
        (all, 1)
    );
    // It sleeps.
    let later = now + Duration::from_millis(300);
    migrations.serve(&order(&program, cpu), later);
    assert_eq!(program.cpus(), [cpu]);
    assert_eq!(migrations.context.count_away(later), 0);
}

#[test]
fn under_always_a_thread_is_migrated_to_a_busy_node() {
    let program = Program::start();
    let Some((mut migrations, cpu, _)) = migrations(&program) else {
        return;
    };
    let _busy = Busy::new(cpu);
    let always = Order {
        policy: ThreadPolicy::Always,
        ..order(&program, cpu)
    };
    migrations.serve(&always, Instant::now());
    assert_eq!(program.cpus(), [cpu]);
}

#[test]
fn threads_of_a_program_on_the_fast_path_migrate_themselves() {
    let program = Program::start();
    let Some((mut migrations, cpu, all)) = migrations(&program) else {
        return;
    };
    let (pid, is_client) = (program.tid(), Arc::new(AtomicBool::new(true)));
    let client = is_client.clone();
    let left_out = move |process| process == pid && client.load(Relaxed);
    migrations.context.leave_out(Box::new(left_out));
    migrations.serve(&order(&program, cpu), Instant::now());
    assert_eq!(program.cpus(), all);
    is_client.store(false, Relaxed);
    migrations.serve(&order(&program, cpu), Instant::now());
    assert_eq!(program.cpus(), [cpu]);
}

#[test]
fn the_masks_of_a_few_companions_are_narrow_at_once_and_the_others_follow() {
    let programs: Vec<Program> = (0..=NARROW_COMPANIONS_MAX)
        .map(|_| Program::start())
        .collect();
    let Some((mut migrations, cpu, all)) = migrations(&programs[0]) else {
        return;
    };
    let other = all.iter().copied().find(|c| *c != cpu).unwrap();
    let task = |program: &Program| Task::find(program.tid()).unwrap().0;
    let bring = |migrations: &mut Placer, now| {
        let companions = programs.iter().map(|program| (task(program), other));
        migrations.bring(companions, cpu as usize, ThreadPolicy::Always, now);
        let narrow = programs.iter().map(|program| program.cpus() == [cpu]);
        narrow.collect::<Vec<bool>>()
    };
    let now = Instant::now();
    let mut narrow = vec![true; NARROW_COMPANIONS_MAX];
    narrow.push(false);
    assert_eq!(bring(&mut migrations, now), narrow);
    migrations.restore_masks(|_| true);
    let rest: Vec<bool> = narrow.iter().map(|narrow| !narrow).collect();
    assert_eq!(bring(&mut migrations, now), rest);
    migrations.restore_masks(|_| true);
}

#[test]
fn a_client_asks_for_companions_on_a_node_at_most_four_times_a_second() {
    let topology = Topology::from_spec("virtual:2").unwrap();
    let (migrator, base) = (Migrator::new(&topology, Arc::default()), Instant::now());
    let accepts = |client, node, ms| {
        let (asks, now) = ((client, node), time(base, ms));
        let may_ask = migrator.may_ask(asks, now);
        assert_eq!(may_ask, migrator.accepts(asks, now));
        may_ask
    };
    assert!(accepts(1, 0, 0));
    assert!(!accepts(1, 0, 249));
    assert!(
        accepts(1, 1, 249) && accepts(2, 0, 249),
        "another node, or client"
    );
    assert!(accepts(1, 0, 250));
    assert!(!accepts(1, 0, 498));
    assert!(!accepts(1, 2, 1000), "there is no such node");
    assert_eq!(migrator.asked.lock().len(), 3);
    assert!(accepts(1, 0, 2000));
    assert_eq!(migrator.asked.lock().len(), 1, "the others are forgotten");
}

#[test]
fn the_placer_ends_with_the_mount_and_leaves_no_mask_narrow() {
    let program = Program::start();
    let topology = Topology::from_spec("virtual:2").unwrap();
    let migrator = Migrator::new(&topology, Arc::default());
    let all = program.cpus();
    for node in [0, 1] {
        migrator.order(order_of(program.tid(), node));
    }
    migrator.close();
    assert_eq!(program.cpus(), all);
    migrator.order(order_of(program.tid(), 0));
    assert!(
        migrator.migrations.lock().is_none(),
        "the migrator does not start again"
    );
}
