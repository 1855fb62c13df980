//! Serves the programs on the fast path, and closes the volume.

use std::io;
use std::sync::Arc;

use jericho_fs::Result;
use jericho_sys::service;

use crate::fast::{join_all, serve_waits};
use crate::kernel_cache::KernelCache;
use crate::mounted::Mounted;
use crate::resumer;

impl Mounted {
    /// Opens the fast path: from now on programs may ask for inline access. `kernel`: drops what the kernel has cached of a file
    /// that clients change.
    pub fn serve_clients(self: &Arc<Self>, kernel: Arc<dyn KernelCache>) -> io::Result<()> {
        let fast = Arc::downgrade(&self.fast);
        self.migrator.leave_out(Box::new(move |pid| {
            fast.upgrade().is_some_and(|fast| fast.is_client(pid))
        }));
        if !self.fast.set_kernel(kernel.clone()) {
            return Ok(());
        }
        self.fast.serve_slices();
        let mut threads = self.threads.lock();
        let reads = self.loan_waits.open();
        let body = move || serve_waits(&reads);
        threads.push(service::spawn("fast-waits", body)?);
        let dropper = self.mapped.dropper();
        let body = move || dropper.serve(&*kernel);
        threads.push(service::spawn("mapped-pages", body)?);
        drop(threads);
        self.look_for_missing()?;
        resumer::start(&self.volume)?;
        self.fast.open()
    }

    /// Ends all inline access permanently, and absorbs what clients have changed.
    pub fn end_clients(&self) {
        self.fast.begin_close();
        self.loan_waits.close();
        self.mapped.close();
        join_all(&self.threads);
        self.fast.close();
    }

    /// Writes everything back, commits, marks the volume clean, and stops all threads. Fails when data could not be written. The
    /// volume stays locked until the last reference is dropped.
    pub fn close(&self) -> Result<()> {
        self.space_waits.close();
        self.end_clients();
        self.migrator.close();
        self.spiller.close();
        let result = self.fs().close();
        for slice in self.volume.slices.iter() {
            slice.close();
        }
        result
    }
}
