use std::io::{Read, Write};

use super::*;

fn time(base: Instant, ms: u64) -> Instant {
    base + Duration::from_millis(ms)
}

#[test]
fn a_thread_is_worth_a_move_when_it_uses_one_node_much_within_a_short_time() {
    let (base, adaptive) = (Instant::now(), ThreadPolicy::Adaptive);
    let mut seen = NOTHING;
    let mut adds = |tid, node, bytes, ms| seen.add(tid, node, bytes, adaptive, time(base, ms));
    for ms in 0..3 {
        assert!(!adds(7, 1, WORTH, ms), "a few may be chance");
    }
    assert!(adds(7, 1, 1, 3), "together that is enough");
    for ms in 4..7 {
        assert!(!adds(7, 1, WORTH, ms), "and counted anew");
    }
    // A thread whose number is as far from the other's as the table is long has its place.
    assert!(!adds(7 + SEEN as u32, 1, WORTH, 8), "another thread");
    for ms in 2000..2003 {
        assert!(!adds(7 + SEEN as u32, 1, WORTH, ms), "too long ago");
    }
}

#[test]
fn a_thread_that_uses_two_nodes_in_turn_stays() {
    let (base, mut seen) = (Instant::now(), NOTHING);
    for turn in 0..1000 {
        let node = (turn % 2) as u16;
        let worth = seen.add(7, node, 8 << 20, ThreadPolicy::Adaptive, base);
        assert!(!worth, "turn {turn}");
    }
    // It goes on with one of them.
    assert!((0..4000).any(|_| seen.add(7, 1, 8 << 20, ThreadPolicy::Adaptive, base)));
}

#[test]
fn always_asks_for_no_reason() {
    let mut seen = NOTHING;
    assert!(seen.add(7, 1, 1, ThreadPolicy::Always, Instant::now()));
}

/// A process of its own with one thread, which is asleep.
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

    /// Has it do something, and waits until it sleeps.
    fn wake(&mut self) {
        let input = self.0.stdin.as_mut().unwrap();
        input.write_all(b"x").unwrap();
        let answer = self.0.stdout.as_mut().unwrap();
        answer.read_exact(&mut [0]).unwrap();
        // It has answered: when it sleeps next, it stays asleep, and on its CPU. Not its state tells, which says so a moment
        // before it has left the CPU: a mask that changes in between moves it at once.
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

/// A placer on a machine of which each CPU is a node, and a CPU (a node of its own) on which the program is not. `None` on a machine with one CPU, on which nobody
/// can be anywhere else.
fn placer(program: &Program) -> Option<(Placer, u32, Vec<u32>)> {
    let all = program.cpus();
    let shared = Shared {
        nodes: Nodes::new(|cpu| cpu as u16),
        node_of_cpu: (0..=CpuMask::CPU_MAX).map(|cpu| cpu as u16).collect(),
        idle: Idle::new(),
        is_left_out: OnceLock::new(),
        counts: Arc::default(),
        start: Instant::now(),
    };
    let (_, on) = Task::find(program.tid()).unwrap();
    let elsewhere = |cpu: &u32| *cpu != on && *cpu < NODES as u32;
    let Some(other) = all.iter().copied().find(elsewhere) else {
        eprintln!("not tested: there is one CPU, {on}");
        assert_eq!(all, [on]);
        return None;
    };
    Some((Placer::new(Arc::new(shared)), other, all))
}

fn order(program: &Program, cpu: u32) -> Order {
    Order {
        tid: program.tid(),
        node: cpu as u16,
    }
}

#[test]
fn a_thread_of_another_process_is_placed_and_gets_its_mask_back() {
    let mut program = Program::start();
    let Some((mut placer, cpu, all)) = placer(&program) else {
        return;
    };
    let now = Instant::now();
    placer.consider(&order(&program, cpu), now);
    assert_eq!(program.cpus(), [cpu]);
    // It is asleep, and so has not moved.
    placer.put_back(Placed::has_moved);
    assert_eq!(program.cpus(), [cpu]);
    program.wake();
    placer.put_back(Placed::has_moved);
    assert_eq!(program.cpus(), all);
    assert_eq!(Task::find(program.tid()).unwrap().1, cpu, "and it is there");
    // Not at once again, wherever it is.
    let other = all.iter().copied().find(|c| *c != cpu).unwrap();
    placer.consider(&order(&program, other), now + REST / 2);
    assert_eq!(program.cpus(), all);
    placer.consider(&order(&program, other), now + REST);
    assert_eq!(program.cpus(), [other]);
    placer.put_back(|_| true);
    assert_eq!(program.cpus(), all);
    assert_eq!(placer.shared.counts.values().threads_moved, 2);
}

#[test]
fn a_thread_that_its_program_places_meanwhile_is_left_alone_for_good() {
    let program = Program::start();
    let Some((mut placer, cpu, all)) = placer(&program) else {
        return;
    };
    let now = Instant::now();
    placer.consider(&order(&program, cpu), now);
    let other: Vec<u32> = all.iter().copied().filter(|c| *c != cpu).take(1).collect();
    affinity::set(Some(program.tid()), &other).unwrap();
    placer.put_back(|_| true);
    assert_eq!(program.cpus(), other);
    affinity::set(Some(program.tid()), &all).unwrap();
    placer.consider(&order(&program, cpu), now + Duration::from_secs(60));
    assert_eq!(program.cpus(), all);
}

#[test]
fn what_a_placed_thread_starts_gets_the_mask_back_too_and_what_was_there_stays() {
    let program = Program::start();
    let Some((mut placer, cpu, all)) = placer(&program) else {
        return;
    };
    // This thread is placed, as it starts the others: an older one with that very mask, and one that inherits it.
    std::thread::spawn(move || {
        let older = Program::start();
        affinity::set(Some(older.tid()), &[cpu]).unwrap();
        let (me, _) = Task::find(affinity::current_tid()).unwrap();
        let since = tasks::now_ticks().unwrap() + 1;
        // Ticks are long: the next one begins.
        while tasks::now_ticks().unwrap() < since {
            std::thread::yield_now();
        }
        let (found, set) = (all.iter().copied().collect(), [cpu].into_iter().collect());
        affinity::set_mask(None, &set).unwrap();
        let younger = Program::start();
        assert_eq!(younger.cpus(), [cpu]);
        let now = Instant::now();
        placer.placed.push(Placed {
            task: me,
            node: cpu as u16,
            found,
            set,
            at: now,
            since,
            rest: now,
            again: 0,
            narrow: true,
            hands_off: false,
        });
        placer.put_back(|_| true);
        assert_eq!(affinity::get(None).unwrap(), all);
        assert_eq!((younger.cpus(), older.cpus()), (all, vec![cpu]));
    })
    .join()
    .unwrap();
}

#[test]
fn threads_of_a_program_on_the_fast_path_place_themselves() {
    let program = Program::start();
    let Some((mut placer, cpu, all)) = placer(&program) else {
        return;
    };
    let (pid, is_client) = (program.tid(), Arc::new(AtomicBool::new(true)));
    let told = is_client.clone();
    let left_out = move |process| process == pid && told.load(Relaxed);
    assert!(placer.shared.is_left_out.set(Box::new(left_out)).is_ok());
    placer.consider(&order(&program, cpu), Instant::now());
    assert_eq!(program.cpus(), all);
    is_client.store(false, Relaxed);
    placer.consider(&order(&program, cpu), Instant::now());
    assert_eq!(program.cpus(), [cpu]);
}

#[test]
fn the_placer_ends_with_the_mount_and_leaves_nothing_narrow() {
    let program = Program::start();
    let topology = Topology::from_spec("virtual:2").unwrap();
    let follow = Follow::new(&topology, Arc::default());
    let all = program.cpus();
    for node in [0, 1] {
        follow.order(Order {
            tid: program.tid(),
            node,
        });
    }
    follow.close();
    assert_eq!(program.cpus(), all);
    follow.order(Order {
        tid: program.tid(),
        node: 0,
    });
    assert!(follow.placer.lock().is_none(), "it does not come back");
}
