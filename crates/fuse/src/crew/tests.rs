use std::sync::mpsc::{Receiver, Sender, channel};

use jericho_topology::Topology;

use super::*;

/// Work that a thread confirms when it takes it, and that ends when the sender of `held` is gone.
struct Work {
    taken: Sender<()>,
    held: Receiver<()>,
}

fn start(crew: &Arc<Crew>, work: &Arc<Mutex<Receiver<Work>>>) {
    let work = work.clone();
    let serve = move |crew: &Arc<Crew>| {
        loop {
            let next = work.lock().recv();
            let Ok(next) = next else {
                return Ok(());
            };
            if crew.take_work() {
                start(crew, &work);
            }
            next.taken.send(()).unwrap();
            let _ = next.held.recv();
            if crew.end_work() {
                return Ok(());
            }
        }
    };
    crew.start(serve).unwrap();
}

#[test]
fn work_that_does_not_end_holds_no_other_work_and_surplus_threads_end_after_it() {
    let topology = Topology::from_spec("virtual:1").unwrap();
    let crew = Crew::new("test", 2, Arc::new(WorkerNodes::new(&topology)));
    let (give, work) = channel();
    let work = Arc::new(Mutex::new(work));
    start(&crew, &work);
    start(&crew, &work);
    let (taken, was_taken) = channel();
    let mut holders = Vec::new();
    for _ in 0..40 {
        let (holder, held) = channel();
        let taken = taken.clone();
        give.send(Work { taken, held }).unwrap();
        // Returns only if a thread takes this work while the others are held.
        was_taken.recv().unwrap();
        holders.push(holder);
    }
    assert!(crew.threads.lock().count > 40);
    drop(holders);
    let mut threads = crew.threads.lock();
    while threads.count > 2 {
        crew.ended.wait(&mut threads);
    }
    drop(threads);
    drop(give);
    crew.wait().unwrap();
}
