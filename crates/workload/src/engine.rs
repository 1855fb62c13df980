//! How the direct transfers of a run are made: an open file or a kernel may refuse direct I/O or io_uring, and then other things are measured.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use jericho_storage::{Device, Queue};
use rustix::fs::{OFlags, fcntl_getfl};

use crate::error::{Error, Result};
use crate::placement::Placement;

/// What the threads of a run have found out, as sentences.
#[derive(Debug, Default)]
pub struct Engine(Mutex<Found>);

#[derive(Debug, Default)]
struct Found {
    /// Whether there is a page cache between the transfers and the device.
    access: BTreeSet<&'static str>,
    /// What makes the transfers.
    makers: BTreeSet<String>,
    notes: BTreeSet<String>,
}

/// Returns whether transfers go through the page cache. A device without a descriptor has none.
fn is_cached(device: &dyn Device) -> bool {
    let flags = device.queue_fd().map(fcntl_getfl);
    flags.is_some_and(|flags| flags.is_ok_and(|flags| !flags.contains(OFlags::DIRECT)))
}

impl Engine {
    /// Notes how a thread makes its transfers on a target: with a queue, or else with blocking calls that it makes itself. Fails if the placement says where the
    /// transfers go, and they do not go there.
    pub(crate) fn note(
        &self,
        placement: Placement,
        target: &Path,
        device: &dyn Device,
        queue: Option<&dyn Queue>,
    ) -> Result<()> {
        let described = queue.map_or("blocking calls".to_owned(), Queue::describe);
        let (is_cached, has_threads) = (
            is_cached(device),
            queue.is_some() && !described.starts_with("io_uring"),
        );
        let why = match (is_cached, has_threads) {
            (false, false) => None,
            (true, _) => Some(format!(
                "{}: direct I/O is refused there, so transfers go through the page cache, whose pages are on no chosen node",
                target.display()
            )),
            (false, true) => Some(format!(
                "Transfers are made by {described}: fewer are in progress at a time, and a CPU copies each through memory on no chosen node"
            )),
        };
        if let Some(why) = &why
            && placement.reads_only()
        {
            return Err(Error::new(format!(
                "{why}; the placement {} cannot be had, use native or another device",
                placement.name
            )));
        }
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let access = match is_cached {
            true => "page cache",
            false => "direct I/O",
        };
        found.access.insert(access);
        found.makers.insert(described);
        found.notes.extend(why.map(|why| format!("{why}.")));
        Ok(())
    }

    /// Returns how transfers were made. Empty for workloads whose files are cached.
    pub fn used(&self) -> Vec<String> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let access = found.access.iter().map(|text| (*text).to_owned());
        access.chain(found.makers.iter().cloned()).collect()
    }

    /// Returns what a reader must know of that.
    pub fn notes(&self) -> Vec<String> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.notes.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::sync::Arc;

    use jericho_storage::{IoError, open_pool_queue, open_queue};

    use super::*;

    /// A file without direct I/O.
    struct Buffered(File);

    impl Device for Buffered {
        fn name(&self) -> Arc<str> {
            "buffered".into()
        }

        fn size_bytes(&self) -> u64 {
            4096
        }

        fn home_node(&self) -> Option<u32> {
            None
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> std::result::Result<(), IoError> {
            Ok(())
        }

        fn write_at(&self, _: u64, _: &[u8]) -> std::result::Result<(), IoError> {
            Ok(())
        }

        fn flush(&self) -> std::result::Result<(), IoError> {
            Ok(())
        }

        fn discard(&self, _: u64, _: u64) -> std::result::Result<(), IoError> {
            Ok(())
        }

        fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }

        fn describe(&self) -> String {
            "buffered".into()
        }
    }

    #[test]
    fn buffered_files_and_threads_in_place_of_io_uring_are_noted_and_refused_where_the_name_says_more()
     {
        let device: Arc<dyn Device> = Arc::new(Buffered(tempfile::tempfile().unwrap()));
        let threads = open_pool_queue(&[device.clone()][..], 4).unwrap();
        let native = Placement::named("native").unwrap();
        let named = Placement::named("TLORP0I0").unwrap();
        let at = Path::new("/data");
        let engine = Engine::default();
        engine.note(native, at, &*device, None).unwrap();
        assert_eq!(engine.used(), ["page cache", "blocking calls"]);
        assert!(engine.notes()[0].contains("through the page cache"));
        let refused = engine
            .note(named, at, &*device, None)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("TLORP0I0 cannot be had"), "{refused}");

        // On a disk, because /tmp may be without direct I/O.
        let built = std::env::current_exe().unwrap();
        let direct = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
        let options = jericho_storage::OpenOptions {
            create_size: Some(8192),
            ..Default::default()
        };
        let device = jericho_storage::open_device(&direct.path().join("file"), options).unwrap();
        let engine = Engine::default();
        engine.note(named, at, &*device, None).unwrap();
        let ring = open_queue(&[device.clone()][..], &[], 4).unwrap();
        if ring.describe().starts_with("io_uring") {
            engine.note(named, at, &*device, Some(&*ring)).unwrap();
        }
        assert_eq!(engine.notes(), [""; 0]);
        let refused = engine.note(named, at, &*device, Some(&*threads));
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains("4 threads with blocking calls"),
            "{refused}"
        );
        engine.note(native, at, &*device, Some(&*threads)).unwrap();
        assert!(engine.notes()[0].contains("fewer are in progress"));
    }
}
