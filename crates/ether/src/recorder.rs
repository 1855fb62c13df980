//! A thread that writes the record of the owner, which can take as long as a sync of its filesystem.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use jericho_remote::Owner;
use jericho_sys::service;

use crate::owner::OwnerRecord;

/// An export, its owner, and whether the record was written.
pub(crate) type Written = (usize, Owner, bool);

pub(crate) struct Recorder {
    /// Dropping it ends the thread.
    records: Option<Sender<(usize, Owner)>>,
    written: Receiver<Written>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread. `bell` is non-blocking, and becomes readable at its other end when a record was written, or could not be.
    pub fn start(record: OwnerRecord, bell: UnixStream) -> io::Result<Recorder> {
        let (records, to_write) = channel::<(usize, Owner)>();
        let (send, written) = channel();
        let thread = service::spawn("serve-record", move || {
            for (export, owner) in to_write {
                let result = record.write(&owner);
                if let Err(error) = &result {
                    let path = record.path().display();
                    tracing::error!(%error, "cannot record the owner of the export in {path}; no client can attach it");
                }
                if send.send((export, owner, result.is_ok())).is_err() {
                    return;
                }
                // EAGAIN: many bytes are there already.
                let _ = (&bell).write(&[1]);
            }
        })?;
        Ok(Recorder {
            records: Some(records),
            written,
            thread: Some(thread),
        })
    }

    /// Writes a record. Records are written in order.
    pub fn submit(&self, export: usize, owner: Owner) {
        if let Some(records) = &self.records {
            // The thread ends after this side only.
            let _ = records.send((export, owner));
        }
    }

    /// Returns the records that were written since the last call.
    pub fn take_written(&self) -> Vec<Written> {
        self.written.try_iter().collect()
    }
}

impl Drop for Recorder {
    /// Waits for the records that were submitted. The lock of the record ends here.
    fn drop(&mut self) {
        drop(self.records.take());
        if let Some(thread) = self.thread.take() {
            // A panic in a thread has ended the process.
            let _ = thread.join();
        }
    }
}
