//! The segments of one slice, and the lookups in them. Reads and writes of found pages: `hit`.
//!
//! Three segments: *table* (entries, then overflow counts), *ages* (the reference age of each entry, one byte; then the slice's
//! words: epoch and throttling; then the nodes of the spill ranges), *frames*. The first frames are on the home node and last as long as
//! the slice. The others are in spill ranges (`spill`), which get and lose their memory. A page's home line follows from its key. If that line is full, the page goes to the next
//! line that has room, and every full line in between counts it, so that a lookup knows when to stop. Only the slice changes
//! lines, under its own lock; readers need none.

use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use jericho_format::PAGE_BYTES;
use jericho_sys::memory::Mapping;

use crate::access::{Miss, before_fill, check_writable};
use crate::entry::{Entry, Key, PageState};
use crate::prefetch;

/// Frames in a spill range: 2 MiB, one huge page.
pub const SPILL_FRAMES: u32 = 512;
/// Entries in a line.
pub const WAYS: u32 = 4;
const PAGE: usize = PAGE_BYTES as usize;
/// Most full lines between an entry and its home. A third of all entries is free, so an honest table has fewer (some 240 in the
/// largest). Entries further away come from a malicious client, and a search for them would read the whole table.
const PASSED_MAX: u32 = 4096;

/// Size of a slice's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Frames of the slice, with those that have no memory.
    pub frames: u32,
    /// Frames on the home node, which always have memory: the first ones.
    pub home_frames: u32,
    /// Lines of the table: three entries for two frames.
    pub lines: u32,
}

impl Geometry {
    /// Returns the geometry for a number of frames, at most `PageState::FRAMES_MAX`, all of them on the home node.
    pub fn for_frames(frames: u32) -> Geometry {
        Geometry::new(frames, frames).expect("a valid number of frames")
    }

    /// Returns the geometry for `frames` frames (at most `PageState::FRAMES_MAX`), of which the first `home_frames` are on the home node. If
    /// there are others, they begin at a multiple of `SPILL_FRAMES`. Returns `None` for other numbers.
    pub fn new(frames: u32, home_frames: u32) -> Option<Geometry> {
        let has_valid_home = home_frames == frames
            || (1..frames).contains(&home_frames) && home_frames.is_multiple_of(SPILL_FRAMES);
        if frames == 0 || frames > PageState::FRAMES_MAX || !has_valid_home {
            return None;
        }
        Some(Geometry {
            frames,
            home_frames,
            lines: (u64::from(frames) * 3 / 2).div_ceil(u64::from(WAYS)) as u32,
        })
    }

    /// Returns the number of spill ranges. The last one may be shorter.
    pub fn spill_ranges(self) -> u32 {
        (self.frames - self.home_frames).div_ceil(SPILL_FRAMES)
    }

    /// Returns the frames of a spill range. Panics when there is no such range.
    pub fn spill_range(self, range: u32) -> Range<u32> {
        assert!(range < self.spill_ranges(), "no such range");
        let first = self.home_frames + range * SPILL_FRAMES;
        first..self.frames.min(first + SPILL_FRAMES)
    }

    /// Returns the spill range of a frame; `None` for a frame on the home node, or beyond the last one.
    #[inline]
    pub fn range_of(self, frame: u32) -> Option<u32> {
        let at = frame.checked_sub(self.home_frames)?;
        (frame < self.frames).then_some(at / SPILL_FRAMES)
    }

    /// Returns the number of entries.
    pub fn entries(self) -> u32 {
        self.lines * WAYS
    }

    /// Returns the offset of the slice's words, behind the ages.
    fn words_at(self) -> usize {
        (self.entries() as usize).next_multiple_of(64)
    }

    /// Returns the size of the ages, the slice's words and the nodes of the spill ranges.
    fn ages_bytes(self) -> usize {
        self.words_at() + WORDS_BYTES + self.spill_ranges() as usize * size_of::<u16>()
    }

    fn table_bytes(self) -> usize {
        self.entries() as usize * size_of::<Entry>() + self.lines as usize * size_of::<u16>()
    }
}

/// Bytes of the slice's words.
const WORDS_BYTES: usize = 64;

/// Most bytes of tables that a page of cache may cost.
pub const BOOKKEEPING_BYTES_PER_PAGE_MAX: u64 = 32;

/// Returns the bytes of the shared tables (without the frames) for a number of frames.
pub fn bookkeeping_bytes(frames: u32) -> u64 {
    let g = Geometry::for_frames(frames);
    (g.table_bytes() + g.entries() as usize) as u64
}

/// An entry that held the key at the moment of the lookup.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// Index in the table.
    pub index: u32,
    /// State at the lookup.
    pub state: PageState,
}

/// The memory of one slice.
#[derive(Debug)]
pub struct SliceMemory {
    geometry: Geometry,
    table: Arc<Mapping>,
    ages: Arc<Mapping>,
    frames: Arc<Mapping>,
    begins: Begins,
    /// The kernel's node of the frames at home, in the process that created the segments.
    home_node: Option<u32>,
    /// Frames into which writers of this process copied after they lost the latch, plus one; 0: none. The slice keeps
    /// such a frame out of use until it learns that the copy has ended.
    copied: [AtomicU32; COPIED_MAX],
}

/// Number of frames that `SliceMemory::put_copied` can remember. Further frames stay out of use until the process ends.
const COPIED_MAX: usize = 16;

/// The addresses of the segments and of the slice's words in this process. Going through the mappings would take longer.
#[derive(Debug)]
struct Begins {
    table: NonNull<u8>,
    ages: NonNull<u8>,
    words: NonNull<u8>,
    frames: NonNull<u8>,
}

// SAFETY: these are addresses of mappings that any thread may use while they are mapped. Their bytes are accessed only by atomics
// and by copies.
unsafe impl Send for Begins {}
// SAFETY: as above.
unsafe impl Sync for Begins {}

impl SliceMemory {
    /// Creates the segments, binds them to the kernel's node `node` (if given) and populates them, except for the spill ranges. Fails when
    /// the node has too little memory, or the kernel refuses the policy.
    pub fn create(name: &str, geometry: Geometry, node: Option<u32>) -> io::Result<SliceMemory> {
        let home_len = geometry.home_frames as usize * PAGE;
        let make = |part: &str, len: usize, huge: bool| -> io::Result<Arc<Mapping>> {
            let mut mapping = Mapping::create(&format!("jericho-{name}-{part}"), len, huge)?;
            let is_frames = part == "frames";
            let lasting = if is_frames { home_len } else { mapping.len() };
            mapping.set_lasting(lasting);
            if let Some(node) = node {
                mapping.bind(0..lasting, node)?;
                // Preferred only: a late access to a range without memory then never fails for a lack of memory on this node alone.
                mapping.prefer(lasting..mapping.len(), node)?;
            }
            if huge {
                // A partial success only makes accesses slower.
                mapping.populate_huge(0..lasting)?;
            } else {
                mapping.populate(0..lasting)?;
            }
            Ok(Arc::new(mapping))
        };
        let table = make("table", geometry.table_bytes(), true)?;
        let ages = make("ages", geometry.ages_bytes(), false)?;
        let data = make("frames", geometry.frames as usize * PAGE, true)?;
        let mut memory = SliceMemory::of(geometry, table, ages, data);
        memory.home_node = node;
        for range in 0..geometry.spill_ranges() {
            memory.set_node_of_range(range, None);
        }
        Ok(memory)
    }

    /// Maps the segments of a slice that another process created: table, ages, frames.
    ///
    /// Fails with `InvalidData` when a segment is shorter than the geometry says, and with EACCES when `writable` is set for
    /// read-only fds.
    pub fn attach(
        geometry: Geometry,
        fds: [OwnedFd; 3],
        writable: bool,
    ) -> io::Result<SliceMemory> {
        let [table, ages, data] = fds;
        let map = |fd, len| Mapping::from_fd(fd, len, writable).map(Arc::new);
        let table = map(table, geometry.table_bytes())?;
        let ages = map(ages, geometry.ages_bytes())?;
        let data = map(data, geometry.frames as usize * PAGE)?;
        Ok(SliceMemory::of(geometry, table, ages, data))
    }

    /// Returns the memory of segments that are as long as the geometry says.
    fn of(
        geometry: Geometry,
        table: Arc<Mapping>,
        ages: Arc<Mapping>,
        frames: Arc<Mapping>,
    ) -> SliceMemory {
        assert!(
            geometry.home_frames <= geometry.frames
                && table.len() >= geometry.table_bytes()
                && ages.len() >= geometry.ages_bytes()
                && frames.len() >= geometry.frames as usize * PAGE
        );
        let begin = |mapping: &Mapping| NonNull::new(mapping.as_ptr()).expect("mapped");
        // SAFETY: the address is inside the segment, as the assertion shows.
        let words = unsafe { begin(&ages).add(geometry.words_at()) };
        let begins = Begins {
            table: begin(&table),
            ages: begin(&ages),
            words,
            frames: begin(&frames),
        };
        SliceMemory {
            geometry,
            table,
            ages,
            frames,
            begins,
            home_node: None,
            copied: [const { AtomicU32::new(0) }; COPIED_MAX],
        }
    }

    /// Remembers a frame whose writer lost the latch and has ended its copy.
    #[cold]
    pub(crate) fn put_copied(&self, frame: u32) {
        for copied in &self.copied {
            let put = copied.compare_exchange(0, frame + 1, Ordering::Relaxed, Ordering::Relaxed);
            if put.is_ok() {
                return;
            }
        }
    }

    /// Returns a frame into which a writer of this process copied after it lost the latch, and forgets it.
    pub fn take_copied(&self) -> Option<u32> {
        let any = |copied: &&AtomicU32| copied.load(Ordering::Relaxed) != 0;
        let frame = self
            .copied
            .iter()
            .find(any)?
            .swap(0, Ordering::Relaxed)
            .checked_sub(1)?;
        Some(frame)
    }

    /// Returns table, ages and frames, to be sent to another process.
    pub fn segments(&self) -> [&Mapping; 3] {
        [&self.table, &self.ages, &self.frames]
    }

    /// Returns whether this process may write.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.frames.is_writable()
    }

    pub(crate) fn home_node(&self) -> Option<u32> {
        self.home_node
    }

    /// Returns the word with the node of a spill range. Panics when there is no such range.
    pub(crate) fn range_node(&self, range: u32) -> &AtomicU16 {
        assert!(range < self.geometry.spill_ranges(), "no such range");
        // SAFETY: the words of the ranges follow the slice's words, two-byte aligned, in the ages segment, which is `ages_bytes` long and
        // stays mapped while `self` lives. `range` is below their number.
        unsafe {
            let first = self.begins.words.add(WORDS_BYTES).cast::<AtomicU16>();
            first.add(range as usize).as_ref()
        }
    }

    fn word(&self, at: usize) -> &AtomicU8 {
        debug_assert!(at < WORDS_BYTES);
        // SAFETY: the ages segment has 64 bytes after `words_at` and stays mapped while `self` lives.
        unsafe { self.begins.words.add(at).cast::<AtomicU8>().as_ref() }
    }

    /// Returns the coarse time of the LRU.
    #[inline]
    pub fn epoch(&self) -> u8 {
        self.word(0).load(Ordering::Relaxed)
    }

    /// Begins the next epoch. Only the slice calls this.
    pub fn next_epoch(&self) {
        self.word(0).fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether writers have to go through the daemon because too many pages are dirty.
    #[inline]
    pub fn is_throttled(&self) -> bool {
        self.word(1).load(Ordering::Relaxed) != 0
    }

    /// Sets whether writers have to go through the daemon. Only the slice calls this.
    pub fn set_throttled(&self, throttled: bool) {
        if self.is_throttled() != throttled {
            self.word(1).store(u8::from(throttled), Ordering::Relaxed);
        }
    }

    /// Calls `each` with the index, key and state of every page in the table.
    pub fn scan(&self, mut each: impl FnMut(u32, Key, PageState)) {
        for index in 0..self.geometry.entries() {
            let entry = self.entry(index);
            if let Some(key) = entry.key() {
                each(index, key, entry.state());
            }
        }
    }

    /// Returns the sizes.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the segment of the frames, for I/O. Frame `i` begins at byte `i * 4096`.
    pub fn frames(&self) -> &Arc<Mapping> {
        &self.frames
    }

    /// Returns the entry with an index. Panics when the index is out of range.
    #[inline]
    pub fn entry(&self, index: u32) -> &Entry {
        assert!(index < self.geometry.entries());
        // SAFETY: the table segment is at least `table_bytes` long, stays mapped while `self` lives,
        // begins page-aligned, and `index` is below the number of entries. Entries are atomics, valid
        // for every bit pattern, so that others may change them at any time.
        unsafe {
            self.begins
                .table
                .cast::<Entry>()
                .add(index as usize)
                .as_ref()
        }
    }

    #[inline]
    fn overflow(&self, line: u32) -> &AtomicU16 {
        assert!(line < self.geometry.lines);
        let offset = self.geometry.entries() as usize * size_of::<Entry>();
        // SAFETY: as in `entry`; the counts follow the entries, two-byte aligned since entries are 16 bytes.
        unsafe {
            &*self
                .table
                .as_ptr()
                .add(offset)
                .cast::<AtomicU16>()
                .add(line as usize)
        }
    }

    #[inline]
    fn age(&self, index: u32) -> &AtomicU8 {
        assert!(index < self.geometry.entries());
        // SAFETY: the ages segment has a byte for each entry and stays mapped while `self` lives.
        unsafe {
            self.begins
                .ages
                .cast::<AtomicU8>()
                .add(index as usize)
                .as_ref()
        }
    }

    /// Has the CPU fetch the bytes that the caller probably needs next: the first of `len` bytes at `offset` of a frame. `frame`
    /// may be any number, even one out of range. Without this prefetch, the CPU would begin to load the bytes only when the table
    /// has given the frame and, for a write, only when the writer has the latch.
    #[inline(always)]
    pub fn fetch(&self, frame: u32, offset: usize, len: usize) {
        let at = ((frame as usize) << PAGE_BYTES.trailing_zeros()).wrapping_add(offset);
        prefetch::bytes(self.begins.frames.as_ptr().wrapping_add(at), len);
    }

    /// Does the same as `fetch` for the first bytes of a page, if the page lies in its home line.
    #[inline]
    pub fn fetch_page(&self, key: Key) {
        if let Some((found, _)) = self.find_in(self.home_line(key), key) {
            self.fetch(found.state.frame(), 0, PAGE_BYTES as usize);
        }
    }

    /// Returns the home line of a page, the same for all pages of a group. It is below the number of lines.
    #[inline]
    pub fn home_line(&self, key: Key) -> u32 {
        ((u128::from(key.group_hash()) * u128::from(self.geometry.lines)) >> 64) as u32
    }

    #[inline]
    fn next_line(&self, line: u32) -> u32 {
        if line + 1 == self.geometry.lines {
            0
        } else {
            line + 1
        }
    }

    /// Returns the entries of a line. Panics when the line is out of range.
    #[inline]
    fn line(&self, line: u32) -> &[Entry; WAYS as usize] {
        assert!(line < self.geometry.lines);
        // SAFETY: as in `entry`; a line is `WAYS` entries in a row.
        unsafe {
            self.begins
                .table
                .cast::<[Entry; WAYS as usize]>()
                .add(line as usize)
                .as_ref()
        }
    }

    #[inline(always)]
    pub(crate) fn find_in(&self, line: u32, key: Key) -> Option<(Found, &Entry)> {
        let entries = self.line(line);
        // Sums instead of jumps: the CPU cannot predict a page's place in its line, and a wrong prediction costs more than
        // everything else here. If a malicious client has put the key there twice, this finds some entry.
        let if_there = |way: usize| usize::from(entries[way].is(key)) * way;
        let way = if_there(1) | if_there(2) | if_there(3);
        let entry = &entries[way % WAYS as usize];
        let state = entry.find(key)?;
        let index = line * WAYS + way as u32;
        Some((Found { index, state }, entry))
    }

    /// Does the same as `lookup`, and returns the entry, too.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<(Found, &Entry)> {
        let home = self.home_line(key);
        // Most pages lie in their home line.
        match self.find_in(home, key) {
            Some(found) => Some(found),
            None => self.find_beyond(home, key),
        }
    }

    #[inline(never)]
    fn find_beyond(&self, home: u32, key: Key) -> Option<(Found, &Entry)> {
        let mut line = home;
        // Bounded: overflow counts that change meanwhile, or that a client has corrupted, cannot make the loop endless.
        for _ in 1..self.geometry.lines.min(PASSED_MAX) {
            if self.overflow(line).load(Ordering::Relaxed) == 0 {
                return None;
            }
            line = self.next_line(line);
            if let Some(found) = self.find_in(line, key) {
                return Some(found);
            }
        }
        None
    }

    /// Looks a key up. Without the slice's lock the answer may be out of date, and a page that is being inserted may be missed.
    /// The caller validates the state.
    #[inline]
    pub fn lookup(&self, key: Key) -> Option<Found> {
        Some(self.find(key)?.0)
    }

    /// Checks whether a client could write the page now without asking the slice. Fails with the reason if not.
    #[inline]
    pub fn is_writable_page(&self, key: Key) -> Result<(), Miss> {
        check_writable(self.lookup(key).ok_or(Miss::Absent)?.state)
    }

    /// Copies out of a frame. Fails when the frame index is out of range, which happens when a malicious client has corrupted a
    /// state word.
    #[inline(always)]
    pub fn copy_out(&self, frame: u32, offset: usize, out: &mut [u8]) -> Result<(), Miss> {
        self.copy_out_of(self.geometry.frames, frame, offset, out)
    }

    /// Does the same as `copy_out`, and fails also for a frame in a spill range.
    #[inline(always)]
    pub(crate) fn copy_out_of_home(
        &self,
        frame: u32,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), Miss> {
        self.copy_out_of(self.geometry.home_frames, frame, offset, out)
    }

    /// Copies out of a frame below `frames`, which is at most the number of frames.
    #[inline(always)]
    fn copy_out_of(
        &self,
        frames: u32,
        frame: u32,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), Miss> {
        let at = self.frame_at(frames, frame, offset, out.len())?;
        // SAFETY: the bytes lie in the segment of the frames (`frame_at`), which stays mapped while `self` lives. `out` is
        // exclusive and cannot overlap it, because no code borrows the segment's bytes. The copy may be torn; the callers detect
        // that.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies into a frame that the caller owns. Fails as `copy_out` does.
    pub fn copy_in(&self, frame: u32, offset: usize, data: &[u8]) -> Result<(), Miss> {
        before_fill();
        self.overwrite_below(self.geometry.frames, frame, offset, data)
    }

    /// Copies into a frame whose latch is held, and which is below `frames`: the number of all frames, or of those at home. Panics when this process may not
    /// write.
    #[inline(always)]
    pub(crate) fn overwrite_below(
        &self,
        frames: u32,
        frame: u32,
        offset: usize,
        data: &[u8],
    ) -> Result<(), Miss> {
        assert!(self.is_writable(), "the segments are mapped read-only");
        let to = self.frame_at(frames, frame, offset, data.len())?;
        // SAFETY: the bytes lie in the segment of the frames (`frame_at`), which stays mapped while `self` lives and may be written (checked). They cannot overlap `data`, because no code borrows the segment's bytes.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.as_ptr(), data.len()) };
        Ok(())
    }

    /// Returns the address of bytes `[offset, offset + len)` of a frame below `frames`, which is the number of all frames or of those on the
    /// home node. Panics when the bytes are not within one page.
    #[inline(always)]
    fn frame_at(
        &self,
        frames: u32,
        frame: u32,
        offset: usize,
        len: usize,
    ) -> Result<NonNull<u8>, Miss> {
        assert!(offset <= PAGE && len <= PAGE - offset, "more than a page");
        if frame >= frames {
            return Err(Miss::Absent);
        }
        // SAFETY: the segment of the frames has room for `frames` frames (`create`, `attach`), and the bytes lie in one of them.
        Ok(unsafe { self.begins.frames.add(frame as usize * PAGE + offset) })
    }

    /// Zeroes a frame that the caller owns.
    pub fn zero(&self, frame: u32) {
        before_fill();
        let start = frame as usize * PAGE;
        self.frames.zero(start..start + PAGE);
    }

    /// Marks an entry as used at `epoch`. A mark may be lost. Stores only when the mark is missing, so that hits on a hot page
    /// share its cache line.
    #[inline]
    pub fn touch(&self, index: u32, epoch: u8) {
        let age = self.age(index);
        if age.load(Ordering::Relaxed) != epoch {
            age.store(epoch, Ordering::Relaxed);
        }
    }

    /// Returns whether the entry is marked as used at the present epoch.
    ///
    /// # Safety
    ///
    /// `index` is below the number of entries, as each index from `find_in`.
    #[inline(always)]
    pub(crate) unsafe fn is_marked_now(&self, index: u32) -> bool {
        // SAFETY: the caller guarantees the index; the ages segment has a byte for each entry and stays mapped while `self` lives.
        let age = unsafe {
            self.begins
                .ages
                .cast::<AtomicU8>()
                .add(index as usize)
                .as_ref()
        };
        age.load(Ordering::Relaxed) == self.epoch()
    }

    /// Returns whether the entry is marked as used at `epoch`.
    #[inline]
    pub fn is_marked(&self, index: u32, epoch: u8) -> bool {
        self.age(index).load(Ordering::Relaxed) == epoch
    }

    /// Returns the epoch at which an entry was last marked as used.
    #[inline]
    pub fn last_use(&self, index: u32) -> u8 {
        self.age(index).load(Ordering::Relaxed)
    }

    /// Changes the epoch at which an entry was last marked.
    pub fn set_last_use(&self, index: u32, epoch: u8) {
        self.age(index).store(epoch, Ordering::Relaxed);
    }

    /// Enters a page that is not in the table, in state FILL. Only the slice calls this, under its lock. The table has room,
    /// because it has more entries than there are frames.
    pub fn insert(&self, key: Key, frame: u32, epoch: u8) -> u32 {
        let mut line = self.home_line(key);
        for _ in 0..self.geometry.lines.min(PASSED_MAX) {
            for way in 0..WAYS {
                let index = line * WAYS + way;
                if self.entry(index).key().is_none() {
                    self.entry(index).insert(key, frame);
                    self.touch(index, epoch);
                    return index;
                }
            }
            self.overflow(line).fetch_add(1, Ordering::Relaxed);
            line = self.next_line(line);
        }
        // A client has filled the table, although it has more entries than frames: some page loses its entry.
        let index = self.home_line(key) * WAYS;
        self.entry(index).insert(key, frame);
        index
    }

    /// Returns the number of lines from `home` to `line`.
    fn passed(&self, home: u32, line: u32) -> u32 {
        match line.checked_sub(home) {
            Some(passed) => passed,
            None => self.geometry.lines - home + line,
        }
    }

    /// Repairs the overflow counts for all entries that a lookup can reach. Returns the other entries. Only the slice calls this,
    /// under its lock.
    pub fn recount(&self) -> Vec<u32> {
        let mut counts = vec![0u16; self.geometry.lines as usize];
        let mut astray = vec![];
        for index in 0..self.geometry.entries() {
            let Some(key) = self.entry(index).key() else {
                continue;
            };
            let (mut at, line) = (self.home_line(key), index / WAYS);
            if self.passed(at, line) >= PASSED_MAX {
                astray.push(index);
                continue;
            }
            while at != line {
                counts[at as usize] = counts[at as usize].saturating_add(1);
                at = self.next_line(at);
            }
        }
        for (line, count) in counts.into_iter().enumerate() {
            self.overflow(line as u32).store(count, Ordering::Relaxed);
        }
        astray
    }

    /// Empties an entry if its state is still `seen`; then its frame is free. Only the slice calls this, under its lock.
    pub fn remove(&self, index: u32, seen: PageState) -> bool {
        let entry = self.entry(index);
        let Some(key) = entry.key() else { return false };
        if !entry.try_clear(seen) {
            return false;
        }
        let mut line = self.home_line(key);
        if self.passed(line, index / WAYS) >= PASSED_MAX {
            return true;
        }
        while line != index / WAYS {
            self.overflow(line).fetch_sub(1, Ordering::Relaxed);
            line = self.next_line(line);
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::entry::Flags;
    use crate::writer::Writer;

    fn memory(frames: u32) -> SliceMemory {
        SliceMemory::create("test", Geometry::for_frames(frames), None).unwrap()
    }

    fn fill(m: &SliceMemory, key: Key, frame: u32, byte: u8) -> u32 {
        let index = m.insert(key, frame, 0);
        m.copy_in(frame, 0, &[byte; PAGE]).unwrap();
        m.entry(index).publish(Flags::BACKED);
        index
    }

    fn write(m: &SliceMemory, key: Key, offset: usize, data: &[u8]) -> Result<bool, Miss> {
        m.write_if(key, offset, data, Writer::daemon(1), 0, || true)
            .map(|written| written.was_clean)
    }

    #[test]
    fn bookkeeping_stays_within_its_bound() {
        for frames in [1024, 4096, 262_144, PageState::FRAMES_MAX] {
            let bytes = bookkeeping_bytes(frames);
            assert!(
                bytes <= BOOKKEEPING_BYTES_PER_PAGE_MAX * u64::from(frames),
                "{frames}: {bytes}"
            );
        }
    }

    #[test]
    fn a_full_table_finds_each_of_its_pages_and_no_other() {
        let m = memory(2048);
        // Half of the pages in dense runs, half scattered: both fill lines in their own way.
        let keys: Vec<Key> = (0..1024)
            .map(|i| Key::new(1, i))
            .chain((0..1024).map(|i| Key::new(2 + i % 7, i * 977)))
            .collect();
        for (frame, key) in keys.iter().enumerate() {
            fill(&m, *key, frame as u32, frame as u8);
        }
        let mut out = [0; 8];
        for (frame, key) in keys.iter().enumerate() {
            assert_eq!(m.read(*key, 100, &mut out, 1), Ok(()));
            assert_eq!(out, [frame as u8; 8]);
        }
        assert_eq!(m.read(Key::new(1, 5000), 0, &mut out, 1), Err(Miss::Absent));
        // Removing all pages leaves no overflow counts, or lookups of absent pages would search forever.
        for key in &keys {
            let found = m.lookup(*key).unwrap();
            assert!(m.remove(found.index, found.state));
            assert!(m.lookup(*key).is_none());
        }
        assert!((0..m.geometry.lines).all(|l| m.overflow(l).load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_write_needs_backing_and_says_when_the_page_was_clean() {
        let m = memory(64);
        let key = Key::new(9, 3);
        let index = m.insert(key, 5, 0);
        assert_eq!(
            write(&m, key, 0, b"x"),
            Err(Miss::Absent),
            "still being filled"
        );
        m.zero(5);
        m.entry(index).publish(Flags(0));
        assert_eq!(write(&m, key, 0, b"x"), Err(Miss::Unbacked));
        m.entry(index).mark(Flags::BACKED);
        assert_eq!(write(&m, key, 4, b"abc"), Ok(true));
        assert_eq!(write(&m, key, 7, b"d"), Ok(false), "dirty already");
        let mut out = [0; 6];
        m.read(key, 3, &mut out, 0).unwrap();
        assert_eq!(&out, b"\0abcd\0");
    }

    #[test]
    fn an_evicted_page_is_not_readable_through_its_old_state() {
        let m = memory(64);
        let key = Key::new(1, 0);
        let index = fill(&m, key, 0, 1);
        let seen = m.entry(index).state();
        assert!(m.remove(index, seen));
        assert!(!m.remove(index, seen));
        fill(&m, Key::new(1, 1), 0, 2);
        assert!(!m.entry(index).state_after_copy().is_same_page(seen));
    }

    #[test]
    fn a_guess_changes_only_whether_the_caller_learns_the_frame() {
        let m = memory(64);
        let key = Key::new(1, 0);
        fill(&m, key, 5, 7);
        fill(&m, Key::new(1, 1), 6, 8);
        for guess in [5, 6, 63, 64, u32::MAX] {
            let (learned, mut out) = (std::cell::Cell::new(None), [0; 100]);
            m.fetch(guess, 50, PAGE);
            let learn = |frame| learned.set(Some(frame));
            let hit = m.try_read(m.home_line(key), key, guess, learn, 50, &mut out);
            assert!(hit.is_some_and(|hit| m.entry(hit.index).is(key)));
            assert_eq!(out, [7; 100]);
            assert_eq!(learned.get(), (guess != 5).then_some(5), "guessed {guess}");
        }
    }

    #[test]
    fn readers_never_see_half_a_write() {
        let m = Arc::new(memory(64));
        let key = Key::new(1, 0);
        fill(&m, key, 0, 0);
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let writer = std::thread::spawn({
            let (m, stop) = (m.clone(), stop.clone());
            move || {
                for i in 0..20_000u32 {
                    while write(&m, key, 0, &[i as u8; PAGE]) == Err(Miss::Busy) {}
                }
                stop.store(true, Ordering::Relaxed);
            }
        });
        let (mut out, mut reads) = ([0; PAGE], 0u64);
        while !stop.load(Ordering::Relaxed) {
            if m.read(key, 0, &mut out, 0).is_ok() {
                assert!(out.iter().all(|b| *b == out[0]), "torn page");
                reads += 1;
            }
        }
        writer.join().unwrap();
        assert!(reads > 0);
    }
}
