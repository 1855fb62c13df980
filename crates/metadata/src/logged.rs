//! Logged pages: pages of files whose newest synced contents are in the journal and not yet in their blocks.
//!
//! A small sync that needs a commit puts the contents of its pages into the batch, so that it needs one durable write instead of two. The
//! row of the page in the store, its *image*, names the block. From then on the image is *live*, until
//!
//! - the page's contents are in the block: the checkpointer *settles* the image (`settle`), or the cache writes newer contents; or
//! - the block no longer belongs to the file.
//!
//! The next batch then removes the image's row. A mount makes the images in the store live again, if their blocks belong to files.
//! docs/internals/logged-pages.md has the rules and what each of them prevents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::store::{Block, Change, Image};
use crate::types::Ino;
use jericho_volume::Blocks;

/// A live image.
struct Live {
    image: Image,
    /// The cache writes newer contents into the block. No thread may then settle the image: its write could arrive after the cache's and
    /// undo it.
    is_superseded: bool,
}

/// A change of a row for the next batch.
enum Row {
    /// Puts the image of this page of a file.
    Put(Image, Ino, u64),
    Remove,
}

/// Which images of a file's pages wait for a later batch.
enum Held {
    All,
    /// Those of these blocks.
    Of(BTreeSet<Block>),
}

#[derive(Default)]
struct State {
    live: BTreeMap<Block, Live>,
    /// Blocks into which a thread writes an image at the moment.
    settling: BTreeSet<Block>,
    /// Rows for the next batch.
    changed: BTreeMap<Block, Row>,
    /// Files whose images wait for a batch with the files' extents and checksums.
    held: BTreeMap<Ino, Held>,
    /// Blocks whose rows are removed by a sealed batch that is not durable yet.
    removed: BTreeSet<Block>,
    /// Blocks whose images are in a batch that is sealed and not durable.
    sealed: BTreeSet<Block>,
}

/// The live images of a shard. Its lock is taken last. Thread-safe.
#[derive(Default)]
pub struct LoggedPages {
    state: Mutex<State>,
    /// Threads wait here for the end of a settlement.
    settled: Condvar,
    /// Number of live images and of blocks that are being settled.
    live: AtomicUsize,
    /// Whether there is any state, so that volumes without images need no lock.
    is_busy: AtomicBool,
    /// Maximum number of live images. With this many, syncs log no more pages.
    max: AtomicUsize,
    /// Whether settlements wait until the batch of an image is durable.
    waits_for_batch: AtomicBool,
}

fn range(blocks: Blocks) -> std::ops::Range<Block> {
    let end = blocks.first.saturating_add(u64::from(blocks.count));
    (blocks.slice, blocks.first)..(blocks.slice, end)
}

impl State {
    fn is_settling(&self, blocks: Blocks) -> bool {
        self.settling.range(range(blocks)).next().is_some()
    }

    /// Returns whether a recovery may find an image of one of the blocks that is no longer live.
    fn has_old(&self, blocks: Blocks) -> bool {
        let mut changed = self.changed.range(range(blocks));
        changed.any(|(_, row)| matches!(row, Row::Remove))
            || self.removed.range(range(blocks)).next().is_some()
    }

    /// Makes an image live, in place of an earlier one of the block.
    fn put(&mut self, block: Block, image: Image) {
        let live = Live {
            image,
            is_superseded: false,
        };
        self.live.insert(block, live);
    }

    /// Has the next batch remove a block's image.
    fn forget(&mut self, block: Block) {
        self.live.remove(&block);
        self.changed.insert(block, Row::Remove);
    }

    /// Returns whether a row waits for a batch that has its file.
    fn is_held(&self, (block, row): (&Block, &Row)) -> bool {
        let Row::Put(_, owner, _) = row else {
            return false;
        };
        match self.held.get(owner) {
            None => false,
            Some(Held::All) => true,
            Some(Held::Of(blocks)) => blocks.contains(block),
        }
    }

    /// Has the next batch remove the live images of blocks.
    fn forget_live(&mut self, blocks: Blocks) {
        let live = self.live.range(range(blocks));
        let found: Vec<Block> = live.map(|(at, _)| *at).collect();
        found.into_iter().for_each(|block| self.forget(block));
    }
}

impl LoggedPages {
    /// Holds the lock until the returned value is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn hold_all(&self) -> impl Sized {
        self.state.lock()
    }

    fn count(&self, state: &State) {
        let live = state.live.len() + state.settling.len();
        self.live.store(live, Ordering::Release);
        let in_batches = state.changed.len() + state.removed.len() + state.sealed.len();
        let is_busy = live + in_batches > 0;
        self.is_busy.store(is_busy, Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Acquire)
    }

    /// Returns the number of live images plus that of blocks that are being settled.
    fn len(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// Returns whether no image is live and none is being settled.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes an image of a page of a file live, in place of an earlier one of the block. The caller has made the block its own with
    /// `claim`, and holds the gate: the batch that gets the image also gets the extent that names the block.
    pub fn put(&self, block: Block, image: Image, (owner, page): (Ino, u64)) {
        let mut state = self.state.lock();
        let row = Row::Put(image.clone(), owner, page);
        state.changed.insert(block, row);
        state.put(block, image);
        self.count(&state);
    }

    /// Makes an image of the store live, when the volume is opened.
    pub fn load(&self, block: Block, image: Image) {
        let mut state = self.state.lock();
        state.put(block, image);
        self.count(&state);
    }

    /// Has the next batch remove the image of a block that no file has, when the volume is opened. Otherwise a later recovery would
    /// put the image in place of the contents of the block's next owner.
    pub fn drop_orphan(&self, block: Block) {
        let mut state = self.state.lock();
        state.changed.insert(block, Row::Remove);
        self.count(&state);
    }

    /// Sets the maximum number of live images. With this many, syncs log no more pages.
    pub fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Makes settlements wait until the batch of an image is durable. Blocks with checksums need that: a crash before it must find the
    /// contents that the durable checksum belongs to.
    pub fn wait_for_batch(&self) {
        self.waits_for_batch.store(true, Ordering::Relaxed);
    }

    /// Returns whether `count` more images may become live.
    pub fn has_room(&self, count: usize) -> bool {
        self.len() + count <= self.max.load(Ordering::Relaxed)
    }

    /// Returns whether images should be settled soon.
    pub fn is_half_full(&self) -> bool {
        let len = self.len();
        len > 0 && len >= self.max.load(Ordering::Relaxed) / 2
    }

    /// Prepares blocks for a write by the cache, or for new images: waits until no thread settles one of them, and lets no thread begin.
    /// A call of `wrote` or `put` must follow. After a failed write the page stays dirty, and that call follows later.
    pub fn claim(&self, blocks: Blocks) {
        if self.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        self.settled
            .wait_while(&mut state, |state| state.is_settling(blocks));
        for (_, live) in state.live.range_mut(range(blocks)) {
            live.is_superseded = true;
        }
    }

    /// Removes the images of blocks that have newer contents now. Returns whether a recovery could put older images in place of these
    /// contents, until the next batch is durable. The write is durable, or the caller has recorded it, so the batch that removes the
    /// images becomes durable after the contents.
    pub fn wrote(&self, blocks: Blocks) -> bool {
        if self.is_idle() {
            return false;
        }
        let mut state = self.state.lock();
        state.forget_live(blocks);
        self.count(&state);
        state.has_old(blocks)
    }

    /// Removes the images of blocks that are about to be free for other files. So the removal is in the same batch as the extent of the next
    /// owner, or in an earlier one. Waits until no thread settles one of the blocks.
    pub fn release(&self, blocks: Blocks) {
        if self.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        state.forget_live(blocks);
        self.count(&state);
        self.settled
            .wait_while(&mut state, |state| state.is_settling(blocks));
    }

    /// Returns the live images of these blocks, in order: each block within the slice, and its image.
    pub fn images(&self, blocks: Blocks) -> Vec<(u64, Image)> {
        if self.is_empty() {
            return Vec::new();
        }
        let state = self.state.lock();
        let live = state.live.range(range(blocks));
        live.map(|((_, block), live)| (*block, live.image.clone()))
            .collect()
    }

    /// Returns whether a recovery could find an image of one of the blocks: a live one, or one whose removal is not durable.
    pub fn has_rows(&self, blocks: Blocks) -> bool {
        if self.is_idle() {
            return false;
        }
        let state = self.state.lock();
        state.live.range(range(blocks)).next().is_some() || state.has_old(blocks)
    }

    /// Lets images of blocks be settled again after `claim`. No transfer to the blocks is in flight.
    pub fn unclaim(&self, blocks: Blocks) {
        if self.is_idle() {
            return;
        }
        for (_, live) in self.state.lock().live.range_mut(range(blocks)) {
            live.is_superseded = false;
        }
    }

    /// Returns whether the next batch changes rows, as far as is known before its sealing.
    pub fn has_changes(&self) -> bool {
        if self.is_idle() {
            return false;
        }
        let state = self.state.lock();
        state.changed.iter().any(|row| !state.is_held(row))
    }

    /// If `is_held`, keeps the images of a file out of batches, from the one that is being sealed on, until a call without it. With
    /// checksums, an image that is durable before the file's new checksums would be damaged data after a crash.
    pub fn hold(&self, file: Ino, is_held: bool) {
        if self.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        match is_held {
            true => state.held.insert(file, Held::All),
            false => state.held.remove(&file),
        };
    }

    /// Does the same for a file whose changes the batch that is being sealed has in part. Only the images of pages that are left for later
    /// batches are kept out of this batch.
    pub fn hold_left(&self, file: Ino, is_left: impl Fn(u64) -> bool) {
        if self.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        let left = state.changed.iter().filter_map(|(block, row)| match row {
            Row::Put(_, owner, page) if *owner == file && is_left(*page) => Some(*block),
            _ => None,
        });
        let left = left.collect();
        state.held.insert(file, Held::Of(left));
    }

    /// Takes the changes of rows for the batch that is being sealed.
    pub fn take_changes(&self) -> impl Iterator<Item = Change> + use<> {
        let mut state = self.state.lock();
        let all = std::mem::take(&mut state.changed);
        let (held, changed) = match state.held.is_empty() {
            true => (BTreeMap::new(), all),
            false => all
                .into_iter()
                .partition(|(block, row)| state.is_held((block, row))),
        };
        if held.is_empty() {
            state.held.clear();
        }
        state.changed = held;
        for (block, row) in &changed {
            match row {
                Row::Put(..) => state.sealed.insert(*block),
                Row::Remove => state.removed.insert(*block),
            };
        }
        self.count(&state);
        let change = |(block, row)| match row {
            Row::Put(image, _, _) => Change::PutLogged(block, image),
            Row::Remove => Change::DelLogged(block),
        };
        changed.into_iter().map(change)
    }

    /// Records that all batches that were sealed so far are durable.
    pub fn changes_durable(&self) {
        if self.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        state.removed.clear();
        state.sealed.clear();
        self.count(&state);
    }

    /// Takes at most `count` neighbouring images from block `from` on, for the calling thread to write into their blocks. Until the
    /// guard is dropped, no other thread writes there. Returns `None` if no image from `from` on may be settled.
    pub fn begin_settling(&self, from: Block, count: usize) -> Option<Settlement<'_>> {
        let mut state = self.state.lock();
        let mut images: Vec<(Block, Image)> = Vec::new();
        let waits_for_batch = self.waits_for_batch.load(Ordering::Relaxed);
        let is_durable =
            |block: &Block| !state.changed.contains_key(block) && !state.sealed.contains(block);
        let may_settle = |(block, live): &(&Block, &Live)| {
            !live.is_superseded
                && !state.settling.contains(block)
                && (!waits_for_batch || is_durable(block))
        };
        for (block, live) in state.live.range(from..).filter(may_settle) {
            let next = images.last().map(|((slice, block), _)| (*slice, block + 1));
            if images.len() == count || next.is_some_and(|next| next != *block) {
                break;
            }
            images.push((*block, live.image.clone()));
        }
        state
            .settling
            .extend(images.iter().map(|(block, _)| *block));
        self.count(&state);
        drop(state);
        (!images.is_empty()).then_some(Settlement {
            pages: self,
            images,
            is_written: false,
        })
    }
}

/// Neighbouring images that the calling thread writes into their blocks.
pub struct Settlement<'a> {
    pages: &'a LoggedPages,
    images: Vec<(Block, Image)>,
    is_written: bool,
}

impl Settlement<'_> {
    /// Returns the images in order of their blocks, which are neighbours.
    pub fn images(&self) -> &[(Block, Image)] {
        &self.images
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> Blocks {
        let (slice, first) = self.images[0].0;
        let count = self.images.len() as u32;
        Blocks {
            slice,
            first,
            count,
        }
    }

    /// Records that the images are in their blocks. The caller has recorded the write (`took_data`).
    pub fn written(mut self) {
        self.is_written = true;
    }
}

impl Drop for Settlement<'_> {
    fn drop(&mut self) {
        let mut state = self.pages.state.lock();
        for (block, image) in &self.images {
            state.settling.remove(block);
            // The block may have been freed meanwhile, and its image removed.
            let is_same = |live: &Live| Arc::ptr_eq(&live.image, image);
            if self.is_written && state.live.get(block).is_some_and(is_same) {
                state.forget(*block);
            }
        }
        self.pages.count(&state);
        drop(state);
        self.pages.settled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const FILE: Ino = 7;

    fn image(byte: u8) -> Image {
        vec![byte; 4096].into()
    }

    fn blocks(first: u64, count: u32) -> Blocks {
        Blocks {
            slice: 1,
            first,
            count,
        }
    }

    fn pages() -> LoggedPages {
        let pages = LoggedPages::default();
        for block in [5, 6, 7, 9] {
            pages.put((1, block), image(block as u8), (FILE, block));
        }
        pages
    }

    /// Returns the rows of the next batch: a block, and the first byte of its image.
    fn changes(pages: &LoggedPages) -> Vec<(u64, Option<u8>)> {
        let change = |change| match change {
            Change::PutLogged((_, block), image) => (block, Some(image[0])),
            Change::DelLogged((_, block)) => (block, None),
            other => panic!("{other:?}"),
        };
        pages.take_changes().map(change).collect()
    }

    /// Runs `waits` in a thread, and checks that it ends after `go`, and not before.
    fn ends_after(waits: impl FnOnce() + Send, go: impl FnOnce()) {
        std::thread::scope(|scope| {
            let (ended, has_ended) = channel();
            scope.spawn(move || {
                waits();
                ended.send(()).unwrap();
            });
            // Long enough for the thread to end if it does not wait. A slow machine makes the test weaker, never wrong.
            assert!(has_ended.recv_timeout(Duration::from_millis(20)).is_err());
            go();
            has_ended.recv_timeout(Duration::from_secs(60)).unwrap();
        });
    }

    #[test]
    fn neighbouring_images_are_settled_together_and_then_removed() {
        let pages = pages();
        let first = pages.begin_settling((0, 0), 2).unwrap();
        assert_eq!(first.blocks(), blocks(5, 2));
        let second = pages.begin_settling((1, 7), 2).unwrap();
        assert_eq!(second.blocks(), blocks(7, 1));
        first.written();
        // The device has refused it.
        drop(second);
        let live = |block| !pages.images(blocks(block, 1)).is_empty();
        assert!(!live(5) && live(7));
        let rows = [(5, None), (6, None), (7, Some(7)), (9, Some(9))];
        assert_eq!(changes(&pages), rows);
        assert_eq!(
            pages.begin_settling((1, 5), 9).unwrap().blocks(),
            blocks(7, 1)
        );
        assert_eq!(changes(&pages), []);
    }

    #[test]
    fn a_claimed_block_is_not_settled_until_it_has_a_new_image() {
        let pages = pages();
        pages.claim(blocks(4, 4));
        assert_eq!(
            pages.begin_settling((0, 0), 9).unwrap().blocks(),
            blocks(9, 1)
        );
        pages.put((1, 6), image(60), (FILE, 6));
        let settlement = pages.begin_settling((0, 0), 9).unwrap();
        assert_eq!(settlement.blocks(), blocks(6, 1));
        assert_eq!(settlement.images()[0].1[0], 60);
        drop(settlement);
        pages.unclaim(blocks(7, 1));
        assert_eq!(
            pages.begin_settling((0, 0), 9).unwrap().blocks(),
            blocks(6, 2)
        );
    }

    #[test]
    fn a_thread_that_claims_or_releases_a_block_waits_for_its_settlement() {
        let pages = pages();
        let settlement = pages.begin_settling((1, 5), 1).unwrap();
        ends_after(|| pages.claim(blocks(0, 100)), || settlement.written());
        let settlement = pages.begin_settling((1, 9), 1);
        assert!(settlement.is_none(), "claimed");
        pages.unclaim(blocks(0, 100));
        let settlement = pages.begin_settling((1, 9), 1).unwrap();
        ends_after(|| pages.release(blocks(9, 1)), || settlement.written());
        pages.release(blocks(6, 1));
        assert_eq!(
            changes(&pages),
            [(5, None), (6, None), (7, Some(7)), (9, None)]
        );
    }

    #[test]
    fn a_block_has_rows_until_the_batch_that_removes_them_is_durable() {
        let pages = LoggedPages::default();
        pages.put((1, 5), image(5), (FILE, 5));
        assert_eq!(changes(&pages), [(5, Some(5))]);
        pages.changes_durable();
        pages.begin_settling((0, 0), 1).unwrap().written();
        assert!(pages.is_empty());
        // A batch that was sealed before has become durable.
        pages.changes_durable();
        assert!(pages.wrote(blocks(4, 2)) && !pages.wrote(blocks(6, 1)));
        assert_eq!(changes(&pages), [(5, None)]);
        assert!(pages.has_rows(blocks(5, 1)) && pages.images(blocks(5, 1)).is_empty());
        pages.changes_durable();
        assert!(!pages.wrote(blocks(5, 1)) && pages.is_idle());
    }

    #[test]
    fn a_settlement_does_not_remove_the_image_of_the_next_owner() {
        let pages = pages();
        let settlement = pages.begin_settling((1, 5), 1).unwrap();
        pages.wrote(blocks(5, 1));
        pages.put((1, 5), image(50), (FILE, 5));
        settlement.written();
        assert_eq!(pages.images(blocks(5, 1))[0].1[0], 50);
        assert_eq!(changes(&pages)[0], (5, Some(50)));
    }

    #[test]
    fn an_image_of_a_held_file_waits_for_a_batch_with_the_file() {
        let pages = pages();
        pages.wait_for_batch();
        pages.put((1, 20), image(20), (FILE + 1, 20));
        pages.hold(FILE, true);
        assert!(pages.has_changes());
        assert_eq!(changes(&pages), [(20, Some(20))]);
        pages.changes_durable();
        assert!(!pages.has_changes(), "a commit would change nothing");
        assert_eq!(changes(&pages), []);
        let settlement = pages.begin_settling((0, 0), 9).unwrap();
        assert_eq!(settlement.blocks(), blocks(20, 1), "the only durable one");
        drop(settlement);
        // The removal of a held image waits for nothing.
        pages.release(blocks(9, 1));
        assert_eq!(changes(&pages), [(9, None)]);
        pages.hold(FILE, false);
        let rows = [5, 6, 7].map(|block| (u64::from(block), Some(block)));
        assert_eq!(changes(&pages), rows);
    }

    #[test]
    fn images_of_pages_that_a_batch_leaves_wait_for_a_later_one() {
        let pages = pages();
        pages.hold_left(FILE, |page| page == 6 || page == 9);
        assert_eq!(changes(&pages), [(5, Some(5)), (7, Some(7))]);
        assert!(!pages.has_changes(), "a commit would change nothing");
        // The next batch omits the file's changes, and the one after that has all of them.
        pages.hold(FILE, true);
        assert_eq!(changes(&pages), []);
        pages.hold(FILE, false);
        assert_eq!(changes(&pages), [(6, Some(6)), (9, Some(9))]);
    }

    #[test]
    fn an_image_with_a_checksum_is_settled_only_when_its_batch_is_durable() {
        let pages = pages();
        pages.wait_for_batch();
        assert!(pages.begin_settling((0, 0), 9).is_none());
        assert_eq!(pages.take_changes().count(), 4);
        assert!(pages.begin_settling((0, 0), 9).is_none());
        pages.changes_durable();
        let settlement = pages.begin_settling((0, 0), 9).unwrap();
        assert_eq!(settlement.blocks(), blocks(5, 3));
        drop(settlement);
        pages.put((1, 6), image(60), (FILE, 6));
        let settlement = pages.begin_settling((0, 0), 9).unwrap();
        assert_eq!(settlement.blocks(), blocks(5, 1), "6 has a newer image");
    }
}
