//! Reads that a thread makes itself, instead of the slice's pipeline.
//!
//! A thread that serves requests and has to wait for the next one anyway may as well wait for the device: that spares waking
//! the pipeline for each miss, and being woken by it. It owns a `Reader` of the slice. What its Gets have to read goes into
//! a list of the thread, which `poll` submits; completions take the same way through the slice as in the pipeline.
//! Read-ahead and long reads stay with the pipeline: there, two threads at work are worth more than a wake-up.
//!
//! Others may wait for a fill that this thread has begun (an invalidation does), and hold locks meanwhile. So a thread whose
//! reader is not idle must not wait for anything but what the slice's own threads wait for, or both wait for ever.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jericho_storage::{Completion, Queue, QueueError, Transfer};
use jericho_sys::doorbell::Doorbell;

use crate::get;
use crate::slice::Slice;
use crate::state::Shared;

/// Transfers under way of one thread; what is beyond waits.
const DEPTH: u32 = 64;

/// Pages that are read so at once at most.
pub(crate) const PAGES_MAX: usize = 16;

/// What the Gets of a thread want to read.
type Wanted = Rc<RefCell<Vec<Transfer>>>;

thread_local! {
    /// The lists of this thread's readers, by slice.
    static READERS: RefCell<Vec<(*const Shared, Wanted)>> = const { RefCell::new(Vec::new()) };
}

/// Takes `transfer` for this thread's reader of the slice, or gives it back when it has none.
pub(crate) fn keep(shared: &Arc<Shared>, transfer: Transfer) -> Option<Transfer> {
    READERS.with_borrow(|readers| {
        let slice = Arc::as_ptr(shared);
        match readers.iter().find(|(of, _)| *of == slice) {
            Some((_, wanted)) => {
                wanted.borrow_mut().push(transfer);
                None
            }
            None => Some(transfer),
        }
    })
}

/// The reads of the thread that made it.
pub struct Reader {
    shared: Arc<Shared>,
    /// Shared with `READERS`, so a reader stays in its thread.
    wanted: Wanted,
    queue: Box<dyn Queue>,
    completions: Vec<Completion>,
}

impl Slice {
    /// A reader for the calling thread, which has none of this slice. Completions ring `doorbell` in the thread's sleep.
    /// Errors: io_uring is refused.
    pub fn reader(&self, doorbell: &Doorbell) -> Result<Reader, QueueError> {
        let queue = jericho_storage::open_signalling_queue(&self.devices, DEPTH, doorbell)?;
        let wanted = Wanted::default();
        READERS.with_borrow_mut(|readers| {
            readers.push((Arc::as_ptr(&self.shared), wanted.clone()));
        });
        Ok(Reader {
            shared: self.shared.clone(),
            wanted,
            queue,
            completions: vec![],
        })
    }
}

impl Reader {
    /// Starts what was asked for, and looks for what has ended: true when there is something for `run`.
    pub fn poll(&mut self) -> bool {
        self.submit();
        if self.completions.is_empty() && self.queue.in_flight() > 0 {
            self.queue.wait(&mut self.completions, Some(Duration::ZERO));
        }
        !self.completions.is_empty()
    }

    /// Whether no read is under way or asked for.
    pub fn is_idle(&self) -> bool {
        self.queue.in_flight() == 0
            && self.completions.is_empty()
            && self.wanted.borrow().is_empty()
    }

    /// Ends the reads that have come: the callbacks of their Gets run here.
    pub fn run(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            get::read_ended(&self.shared, completion);
            self.submit();
        }
        self.completions = completions;
    }

    fn submit(&mut self) {
        for transfer in self.wanted.borrow_mut().drain(..) {
            self.queue.submit(transfer);
        }
    }
}

impl Drop for Reader {
    /// Ends what is under way: programs, or the slice's other Gets, wait for it.
    fn drop(&mut self) {
        while !self.is_idle() {
            self.submit();
            if self.completions.is_empty() {
                self.queue.wait(&mut self.completions, None);
            }
            self.run();
        }
        let slice = Arc::as_ptr(&self.shared);
        READERS.with_borrow_mut(|readers| readers.retain(|(of, _)| *of != slice));
    }
}
