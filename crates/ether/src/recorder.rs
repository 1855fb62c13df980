//! A thread that writes the record of the owner, which can take as long as a sync of its filesystem.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use jericho_remote::Owner;
use jericho_storage::Device;
use jericho_sys::service;

use crate::lock::unpoisoned;
use crate::owner::{OwnerRecord, label_of};

/// An export, its owner, and whether the record was written.
pub(crate) type Written = (usize, Owner, bool);

pub(crate) struct Recorder {
    /// Dropping it ends the thread.
    records: Option<Sender<(usize, Owner)>>,
    written: Arc<Mutex<Vec<Written>>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread, for the record of a device. Returns it with a socket that does not block, and that becomes readable when a record was written, or could not be.
    pub fn start(
        record: OwnerRecord,
        device: Arc<dyn Device>,
    ) -> io::Result<(Recorder, UnixStream)> {
        let (bell, rung) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        rung.set_nonblocking(true)?;
        let (records, to_write) = channel::<(usize, Owner)>();
        let written: Arc<Mutex<Vec<Written>>> = Arc::default();
        let ended = Arc::clone(&written);
        let thread = service::spawn("serve-record", move || {
            for (export, owner) in to_write {
                let result = record.write(&owner, label_of(&*device));
                if let Err(error) = &result {
                    let path = record.path().display();
                    tracing::error!(%error, "cannot record the owner of the export in {path}; no client can attach it");
                }
                unpoisoned(&ended).push((export, owner, result.is_ok()));
                // EAGAIN: many bytes are there already.
                let _ = (&bell).write(&[1]);
            }
        })?;
        let recorder = Recorder {
            records: Some(records),
            written,
            thread: Some(thread),
        };
        Ok((recorder, rung))
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
        std::mem::take(&mut *unpoisoned(&self.written))
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
