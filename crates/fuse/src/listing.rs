//! Directories and their entries.

use std::time::Duration;

use jericho_fs::Error;
use jericho_fs::types::{DirEntry, Ino};

use crate::convert::errno;
use crate::filesystem::Jericho;
use crate::protocol::answer::{EntryOut, Listing, OpenOut};
use crate::protocol::request::Transfer;
use crate::reply::Reply;
use crate::server::REQUEST_BYTES_MAX;

/// Number of directory entries in one batch.
const LISTING_BATCH: usize = 64;

impl Jericho {
    pub(crate) fn opendir(&self, reply: Reply) {
        // A listing continues by cookie, so the descriptor has no state.
        reply.with(&OpenOut::new(0, 0));
    }

    pub(crate) fn readdir(&self, ino: Ino, args: &Transfer, reply: Reply) {
        let mut listing = Listing::new(args.size.min(REQUEST_BYTES_MAX) as usize);
        let result = self.list(ino, args.offset, &mut |e| {
            Ok(listing.add(None, (e.ino, e.kind), e.cookie, &e.name))
        });
        match result {
            Ok(()) => reply.bytes(listing.bytes()),
            Err(e) => reply.error(errno("readdir", &e)),
        }
    }

    pub(crate) fn readdirplus(&self, ino: Ino, args: &Transfer, reply: Reply) {
        let fs = self.mounted.fs();
        let mut listing = Listing::new(args.size.min(REQUEST_BYTES_MAX) as usize);
        let mut counted = Vec::new();
        let result = self.list(ino, args.offset, &mut |e| {
            let inode = (e.ino, e.kind);
            if e.name == b"." || e.name == b".." {
                // The kernel counts no lookup of these entries.
                let none = EntryOut::none(Duration::ZERO);
                return Ok(listing.add(Some(&none), inode, e.cookie, &e.name));
            }
            let before = self.mounted.moment();
            let attr = match self.mounted.lookup(ino, &e.name) {
                Ok(attr) => attr,
                // Removed since the batch was listed.
                Err(Error::Errno(libc::ENOENT)) => return Ok(true),
                Err(error) => return Err(error),
            };
            let added = listing.add(Some(&self.entry(&attr, before)), inode, e.cookie, &e.name);
            match added {
                true => counted.push(attr.ino),
                false => fs.forget(attr.ino, 1),
            }
            Ok(added)
        });
        match result {
            // The entries in the reply already count as lookups, so the reply must reach the kernel. The next call
            // meets the error again.
            Err(e) if listing.is_empty() => reply.error(errno("readdirplus", &e)),
            _ => {
                if !reply.deliver(listing.bytes()) {
                    counted.into_iter().for_each(|ino| fs.forget(ino, 1));
                }
            }
        }
    }

    pub(crate) fn fsyncdir(&self, ino: Ino, reply: Reply) {
        let done = Box::new(move |result| reply.done("fsyncdir", result));
        self.mounted.fs().fsync_dir_blocking(ino, done);
    }

    /// Calls `each` for the entries after `cookie`, in batches, until `each` returns false because the reply is full. Does not
    /// hold the directory's lock during these calls.
    fn list(
        &self,
        dir: Ino,
        mut cookie: u64,
        each: &mut dyn FnMut(DirEntry) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        loop {
            let mut batch = Vec::with_capacity(LISTING_BATCH);
            self.mounted.fs().readdir(dir, cookie, &mut |entry| {
                batch.push(entry);
                batch.len() < LISTING_BATCH
            })?;
            let whole = batch.len() >= LISTING_BATCH;
            for entry in batch {
                cookie = entry.cookie;
                if !each(entry)? {
                    return Ok(());
                }
            }
            if !whole {
                return Ok(());
            }
        }
    }
}
