//! Opens and closes the fast path: sets the functions that the slices call, and starts and ends the threads.

use std::io;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use jericho_cache::Slice;
use jericho_shm::socket_name;
use jericho_sys::handshake::Listener;
use jericho_sys::service;
use parking_lot::Mutex;

use super::Fast;
use super::admission::Admission;
use super::keeping;
use super::state::Job;
use crate::kernel_cache::KernelCache;

/// Period at which rings are drained while pages become dirty.
const ROUND: Duration = Duration::from_millis(5);

impl Fast {
    /// Sets the object that drops the kernel's caches. Returns false when it is set already: the fast path is open.
    pub fn set_kernel(&self, kernel: Arc<dyn KernelCache>) -> bool {
        self.kernel.set(kernel).is_ok()
    }

    /// Gives the slices the functions by which they drain reports, collect reference marks and revoke a client.
    pub fn serve_slices(self: &Arc<Self>) {
        self.volume
            .slices
            .iter()
            .for_each(|slice| self.serve_slice(slice));
    }

    /// Gives one slice these functions, if it does not have them.
    pub(super) fn serve_slice(self: &Arc<Self>, slice: &Slice) {
        let weak = Arc::downgrade(self);
        slice.set_report_drain(Box::new(move || {
            if let Some(fast) = weak.upgrade() {
                fast.drain_rings();
            }
        }));
        let weak = Arc::downgrade(self);
        slice.set_collector(Box::new(move || {
            if let Some(fast) = weak.upgrade() {
                fast.take_touched();
            }
        }));
        let weak = Arc::downgrade(self);
        slice.set_on_broken(Box::new(move |owner| {
            let Some(fast) = weak.upgrade() else {
                return false;
            };
            let known = fast.revoke_client(owner);
            // The revoked client does not report the page.
            fast.unreported.note();
            fast.slots.ring();
            known
        }));
    }

    /// Admits clients, and starts the threads that serve them. `serve_slices` and `set_kernel` come first.
    pub fn open(self: &Arc<Self>) -> io::Result<()> {
        let mut threads = self.threads.lock();
        let (sender, jobs) = channel::<Job>();
        *self.jobs.lock() = Some(sender);
        let body = move || jobs.iter().for_each(|job| job());
        threads.push(service::spawn("fast-jobs", body)?);
        let listener = Listener::bind(&socket_name(self.control.instance()))?;
        let mut admission = Admission::new(self, listener)?;
        let fast = Arc::downgrade(self);
        let body = move || admission.serve(&fast);
        threads.push(service::spawn("fast-clients", body)?);
        if self.keeper.is_configured() {
            let fast = Arc::downgrade(self);
            let body = move || keeping::serve(&fast);
            threads.push(service::spawn("fast-keeper", body)?);
        }
        let fast = Arc::downgrade(self);
        let body = move || drain_periodically(&fast);
        threads.push(service::spawn("fast-rings", body)?);
        drop(threads);
        self.closing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Tells the threads to end; `close` waits for them.
    pub fn begin_close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        let _ = self.stop.0.shutdown(Shutdown::Both);
        self.slots.ring();
        *self.jobs.lock() = None;
    }

    /// Revokes all clients, which then use the kernel, and absorbs their changes. `begin_close` comes first.
    pub fn close(&self) {
        join_all(&self.threads);
        self.revoke_all_clients();
        // Drains every ring. The words of the slots segment name the clients with reports, but clients can write those words.
        self.drain_all_rings();
        for slot_file in self.written_files() {
            self.absorb_file(&slot_file);
        }
        self.drain_reports();
    }
}

/// Waits for the end of threads of the fast path, except for the calling one.
pub(crate) fn join_all(threads: &Mutex<Vec<JoinHandle<()>>>) {
    for thread in std::mem::take(&mut *threads.lock()) {
        let own = thread.thread().id() == std::thread::current().id();
        if !own && thread.join().is_err() {
            tracing::error!("a thread of the fast path has panicked");
        }
    }
}

/// Runs the thread that drains the rings when no request does.
fn drain_periodically(fast: &Weak<Fast>) {
    loop {
        let Some(fast) = fast.upgrade() else {
            return;
        };
        let seen = fast.slots.rung();
        let mut busy = fast.drain_reports();
        for slot_file in fast.written_files() {
            fast.absorb_file(&slot_file);
        }
        if !busy {
            // No client has reported anything for a whole period: sleep until the next report rings the doorbell. Drain once more
            // first, for a report of a client that did not yet see the doorbell armed.
            fast.slots.arm_doorbell(true);
            busy = fast.drain_reports();
        }
        if fast.closing.load(Ordering::SeqCst) {
            return;
        }
        fast.slots.sleep(seen, busy.then_some(ROUND));
    }
}
