use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};

use jericho_topology::Topology;

use super::*;

/// Limit of a wait. Only a hang takes this long.
const LONG: Duration = Duration::from_secs(60);

/// Work that a thread confirms when it takes it, and that ends when the sender of `held` is gone.
struct Work {
    taken: Sender<()>,
    held: Receiver<()>,
}

fn one_node() -> Arc<WorkerNodes> {
    let topology = Topology::from_spec("virtual:1").unwrap();
    Arc::new(WorkerNodes::new(&topology))
}

/// A crew that takes work from a queue.
struct Bed {
    crew: Arc<Crew>,
    queue: Sender<Work>,
    /// How often a thread was prepared.
    prepared: Arc<AtomicUsize>,
    /// Threads with this number and higher ones cannot be prepared.
    impossible_from: Arc<AtomicUsize>,
}

type Start = fn(
    &'static str,
    usize,
    usize,
    &Arc<WorkerNodes>,
    Prepare,
    Option<Box<dyn Relief>>,
) -> io::Result<Arc<Crew>>;

impl Bed {
    /// A crew without a supervisor: the test makes its polls.
    fn stepped(regular: usize, most: usize) -> Bed {
        Bed::new(Crew::without_supervisor, regular, most, None)
    }

    fn new(start: Start, regular: usize, most: usize, relief: Option<Box<dyn Relief>>) -> Bed {
        let (queue, work) = channel::<Work>();
        let work = Arc::new(Mutex::new(work));
        let prepared = Arc::new(AtomicUsize::new(0));
        let impossible_from = Arc::new(AtomicUsize::new(usize::MAX));
        let (count, limit) = (prepared.clone(), impossible_from.clone());
        let prepare = move |number: usize| -> io::Result<Body> {
            count.fetch_add(1, Ordering::Relaxed);
            if number >= limit.load(Ordering::Relaxed) {
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
            let work = work.clone();
            Ok(Box::new(move |place| {
                loop {
                    let next = work.lock().recv();
                    let Ok(next) = next else { return Ok(()) };
                    place.serve(|| {
                        next.taken.send(()).unwrap();
                        let _ = next.held.recv();
                    });
                    if place.is_surplus() {
                        return Ok(());
                    }
                }
            }))
        };
        Bed {
            crew: start(
                "test",
                regular,
                most,
                &one_node(),
                Box::new(prepare),
                relief,
            )
            .unwrap(),
            queue,
            prepared,
            impossible_from,
        }
    }

    /// Gives the threads work. Returns when a thread has it, which holds it until the result is dropped.
    fn hold(&self) -> Sender<()> {
        let (taken, was_taken) = channel();
        let (holder, held) = channel();
        self.queue.send(Work { taken, held }).unwrap();
        was_taken.recv_timeout(LONG).expect("a thread");
        holder
    }

    fn count(&self) -> usize {
        self.crew.state.lock().roster.count()
    }

    /// Waits until the threads have ended the work that is held no more.
    fn settle(&self) {
        while !self.crew.state.lock().roster.is_idle() {
            std::thread::yield_now();
        }
    }

    fn poll(&self) {
        self.crew.poll();
    }

    fn end(self) -> io::Result<()> {
        drop(self.queue);
        self.crew.wait()
    }
}

#[test]
fn work_that_hangs_holds_no_other_work_and_further_threads_end_after_it() {
    let bed = Bed::stepped(2, THREADS_MAX);
    let mut holders = Vec::new();
    for threads in [2, 4, 8, 16, 32, 64] {
        // `hold` returns only if a thread takes the work.
        while holders.len() < threads {
            holders.push(bed.hold());
        }
        assert_eq!(bed.count(), threads);
        bed.poll();
        assert_eq!(bed.count(), threads, "no request was seen twice");
        bed.poll();
        assert_eq!(bed.count(), 2 * threads);
    }
    drop(holders);
    bed.settle();
    for _ in 0..roster::CALM_POLLS {
        assert_eq!(bed.count(), 128);
        bed.poll();
    }
    // Each thread has one more request. All but the two regular ones end after it.
    let holders: Vec<_> = (0..128).map(|_| bed.hold()).collect();
    assert_eq!(bed.count(), 128);
    drop(holders);
    while bed.count() > 2 {
        std::thread::yield_now();
    }
    let regular = [bed.hold(), bed.hold()];
    assert_eq!(bed.count(), 2);
    drop(regular);
    bed.end().unwrap();
}

#[test]
fn work_that_ends_between_two_polls_starts_no_thread() {
    let bed = Bed::stepped(2, THREADS_MAX);
    let mut held = [bed.hold(), bed.hold()];
    for _ in 0..100 {
        bed.poll();
        drop(held);
        // The threads take this work only after they have ended the work before.
        held = [bed.hold(), bed.hold()];
    }
    assert_eq!(bed.prepared.load(Ordering::Relaxed), 2);
    drop(held);
    bed.end().unwrap();
}

#[test]
fn the_number_of_threads_is_limited() {
    let bed = Bed::stepped(1, 3);
    let mut holders = vec![bed.hold()];
    for threads in [2, 3, 3] {
        bed.poll();
        bed.poll();
        assert_eq!(bed.count(), threads);
        if holders.len() < threads {
            holders.push(bed.hold());
        }
    }
    drop(holders);
    bed.end().unwrap();
}

#[test]
fn a_thread_that_cannot_be_started_is_tried_once_at_each_poll_and_noted_once() {
    let bed = Bed::stepped(2, THREADS_MAX);
    bed.impossible_from.store(2, Ordering::Relaxed);
    let holders = [bed.hold(), bed.hold()];
    bed.poll();
    for attempts in 1..10 {
        assert_eq!(bed.crew.state.lock().start_failed, attempts > 1);
        bed.poll();
        assert_eq!(bed.prepared.load(Ordering::Relaxed), 2 + attempts);
        assert_eq!(bed.count(), 2);
    }
    bed.impossible_from.store(usize::MAX, Ordering::Relaxed);
    bed.poll();
    assert_eq!(bed.count(), 4);
    assert!(!bed.crew.state.lock().start_failed);
    drop((bed.hold(), holders));
    bed.end().unwrap();
}

#[test]
fn a_crew_that_ends_while_a_thread_hangs_starts_no_more_and_waits_for_it() {
    let bed = Bed::stepped(2, THREADS_MAX);
    let holders = [bed.hold(), bed.hold()];
    bed.poll();
    let (crew, prepared) = (bed.crew.clone(), bed.prepared.clone());
    let waiting = std::thread::spawn(move || bed.end());
    // Two further threads find that the crew has ended.
    crew.poll();
    while !crew.state.lock().has_ended {
        std::thread::yield_now();
    }
    let before = prepared.load(Ordering::Relaxed);
    crew.poll();
    assert_eq!(prepared.load(Ordering::Relaxed), before);
    assert!(!waiting.is_finished());
    drop(holders);
    waiting.join().unwrap().unwrap();
    assert_eq!(crew.state.lock().roster.count(), 0);
}

#[test]
fn the_first_error_of_a_thread_is_the_result_and_the_thread_is_not_replaced() {
    let (order, next) = channel::<()>();
    let next = Arc::new(Mutex::new(next));
    let prepare = move |number: usize| -> io::Result<Body> {
        let next = next.clone();
        Ok(Box::new(move |_| match number {
            1 => Err(io::Error::other("the first")),
            _ => {
                let _ = next.lock().recv();
                Err(io::Error::other("a later one"))
            }
        }))
    };
    let crew =
        Crew::without_supervisor("test", 2, THREADS_MAX, &one_node(), Box::new(prepare), None)
            .unwrap();
    while crew.state.lock().roster.count() > 1 {
        std::thread::yield_now();
    }
    for _ in 0..3 {
        crew.poll();
        assert_eq!(crew.state.lock().roster.count(), 1);
    }
    assert!(!crew.state.lock().has_ended);
    drop(order);
    assert_eq!(crew.wait().unwrap_err().to_string(), "the first");
    assert!(crew.state.lock().has_ended);
}

#[test]
fn a_supervisor_finds_what_hangs_and_ends_with_its_crew() {
    let bed = Bed::new(Crew::start, 2, THREADS_MAX, None);
    for _ in 0..2 {
        // Each `hold` returns only if a thread takes the work.
        let holders: Vec<_> = (0..7).map(|_| bed.hold()).collect();
        drop(holders);
        bed.settle();
        // The supervisor sleeps when it has found no request for a second.
        while !bed.crew.hints.is_asleep.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }
    bed.end().unwrap();
}

/// Hangs, until the test runner kills it, if one wake-up is lost.
#[test]
fn a_request_that_begins_while_the_supervisor_goes_to_sleep_wakes_it() {
    const REQUESTS: u64 = 5_000;
    let (send, receive) = channel::<()>();
    let receive = Mutex::new(Some(receive));
    let awake = Arc::new(AtomicU64::new(0));
    let woken = awake.clone();
    let prepare = move |_| -> io::Result<Body> {
        let (begin, woken) = (receive.lock().take(), woken.clone());
        Ok(Box::new(move |place| {
            begin.map(|begin| begin.recv());
            for _ in 0..REQUESTS {
                place.serve(|| {
                    let before = woken.load(Ordering::Relaxed);
                    while woken.load(Ordering::Relaxed) == before {
                        std::thread::yield_now();
                    }
                });
            }
            Ok(())
        }))
    };
    let crew =
        Crew::without_supervisor("test", 1, 1, &one_node(), Box::new(prepare), None).unwrap();
    send.send(()).unwrap();
    while crew.sleep_while_idle() {
        awake.fetch_add(1, Ordering::Relaxed);
    }
    crew.wait().unwrap();
}

/// Records what a crew asks of its relief.
struct Recorded {
    is_wanted: AtomicBool,
    is_armed: AtomicBool,
    /// Called when it is armed.
    armed: Box<dyn Fn() + Send + Sync>,
    calls: Mutex<Vec<&'static str>>,
}

impl Relief for Arc<Recorded> {
    fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }
    fn arm(&self) -> bool {
        (self.armed)();
        !self.is_armed.swap(true, Ordering::SeqCst)
    }
    fn confirm(&self) {
        self.calls.lock().push("confirm");
    }
    fn cancel(&self) {
        self.is_armed.store(false, Ordering::SeqCst);
        self.calls.lock().push("cancel");
    }
}

#[test]
fn a_crew_whose_threads_are_all_stuck_is_relieved_once_and_only_then() {
    let holders = Arc::new(Mutex::new(Vec::new()));
    let crew = Arc::new(Mutex::new(None::<Arc<Crew>>));
    let ends = AtomicBool::new(true);
    let (of_relief, crew_of_relief) = (holders.clone(), crew.clone());
    let relief = Arc::new(Recorded {
        is_wanted: AtomicBool::new(false),
        is_armed: AtomicBool::new(false),
        armed: Box::new(move || {
            // A thread ends its request at the last moment.
            if ends.swap(false, Ordering::Relaxed) {
                of_relief.lock().pop();
                let crew = crew_of_relief.lock().clone().unwrap();
                while crew.state.lock().roster.all_serve() {
                    std::thread::yield_now();
                }
            }
        }),
        calls: Mutex::new(Vec::new()),
    });
    let bed = Bed::new(
        Crew::without_supervisor,
        1,
        2,
        Some(Box::new(relief.clone())),
    );
    *crew.lock() = Some(bed.crew.clone());
    holders.lock().push(bed.hold());
    bed.poll();
    bed.poll();
    holders.lock().push(bed.hold());
    (0..4).for_each(|_| bed.poll());
    assert!(relief.calls.lock().is_empty(), "not wanted");
    relief.is_wanted.store(true, Ordering::Relaxed);
    bed.poll();
    assert_eq!(*relief.calls.lock(), ["cancel"]);
    bed.poll();
    holders.lock().push(bed.hold());
    bed.poll();
    assert_eq!(*relief.calls.lock(), ["cancel"], "a request that is new");
    (0..4).for_each(|_| bed.poll());
    assert_eq!(*relief.calls.lock(), ["cancel", "confirm"]);
    holders.lock().clear();
    crew.lock().take();
    bed.end().unwrap();
}
