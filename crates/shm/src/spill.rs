//! Spill ranges: frames that get memory of any node, and lose it again.
//!
//! The frames at home come first. The others are divided into ranges of `SPILL_FRAMES` frames. The daemon gives a range memory of a
//! node (`back_range`), and frees it (`release_range`) when no page is in the range. A thread that looked a page up before may still
//! read there: it reads zeros, and then finds that the state of its entry has changed. `docs/internals/spill-over.md` has the protocol.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use jericho_format::PAGE_BYTES;

use crate::access::before_fill;
use crate::memory::SliceMemory;

/// The node of a range without memory.
const NO_NODE: u16 = u16::MAX;

impl SliceMemory {
    /// Returns the node whose CPUs are local to a spill range; `None` for a range without memory. Panics when there is no such range.
    pub fn node_of_range(&self, range: u32) -> Option<u16> {
        let node = self.range_node(range).load(Ordering::Relaxed);
        (node != NO_NODE).then_some(node)
    }

    /// Sets the node whose CPUs are local to a spill range. Only the slice calls this.
    pub fn set_node_of_range(&self, range: u32, node: Option<u16>) {
        self.range_node(range)
            .store(node.unwrap_or(NO_NODE), Ordering::Relaxed);
    }

    /// Returns whether a frame is in a spill range.
    #[inline]
    pub fn is_spilled(&self, frame: u32) -> bool {
        self.geometry().range_of(frame).is_some()
    }

    /// Returns the node whose CPUs are local to a frame in a spill range; `None` for other frames.
    #[inline]
    pub fn node_of_spilled(&self, frame: u32) -> Option<u16> {
        self.node_of_range(self.geometry().range_of(frame)?)
    }

    /// Gives a spill range memory of a kernel node; `None`: of any node. Returns false if the kernel took a page of another node. Sets MPOL_PREFERRED
    /// and not MPOL_BIND, because an access to bound memory kills a process when the node is full. No page may be in the range. Fails with the errors
    /// of `Mapping::release`, `prefer`, `populate_huge` and `nodes_of`. The range has no memory unless this returns true. Only the slice calls this.
    pub fn back_range(&self, range: u32, kernel_node: Option<u32>) -> io::Result<bool> {
        let backed = self.try_back(&self.bytes_of_range(range), kernel_node);
        if !matches!(backed, Ok(true)) {
            self.release_range(range)?;
        }
        backed
    }

    fn try_back(&self, bytes: &Range<usize>, kernel_node: Option<u32>) -> io::Result<bool> {
        let frames = self.frames();
        // A late reader may have left a page of another node.
        self.release(bytes.clone())?;
        if let Some(node) = kernel_node {
            frames.prefer(bytes.clone(), node)?;
        }
        frames.populate_huge(bytes.clone())?;
        let Some(node) = kernel_node else {
            return Ok(true);
        };
        let pages: Vec<usize> = bytes.clone().step_by(PAGE_BYTES as usize).collect();
        let nodes = frames.nodes_of(&pages)?;
        Ok(nodes.into_iter().all(|found| found == Some(node)))
    }

    /// Frees the memory of a spill range, and sets its policy to the home node. No page may be in the range. Only the slice calls this.
    pub fn release_range(&self, range: u32) -> io::Result<()> {
        self.release(self.bytes_of_range(range))?;
        // Neighbours with one policy are one mapping in the kernel, and a process may have 65530 mappings (vm.max_map_count).
        if let Some(node) = self.home_node() {
            // Best effort: the range gets another policy before it gets memory.
            let _ = self.frames().prefer(self.bytes_of_range(range), node);
        }
        Ok(())
    }

    /// Frees the memory of some frames in spill ranges. No page may be in these frames. Only the slice calls this.
    pub fn release_frames(&self, frames: Range<u32>) -> io::Result<()> {
        self.release(bytes(frames))
    }

    fn release(&self, bytes: Range<usize>) -> io::Result<()> {
        // A reader that sees the zeros must also see that the page has left, as for a frame that is filled again.
        before_fill();
        self.frames().release(bytes)
    }

    /// Returns how many frames have memory, in whole pages. Memory that was swapped out counts, too.
    pub fn allocated_frames(&self) -> io::Result<u64> {
        Ok(self.frames().allocated_bytes()? / PAGE_BYTES)
    }

    fn bytes_of_range(&self, range: u32) -> Range<usize> {
        bytes(self.geometry().spill_range(range))
    }
}

/// Returns the bytes of some frames in the segment of the frames.
fn bytes(frames: Range<u32>) -> Range<usize> {
    let at = |frame: u32| frame as usize * PAGE_BYTES as usize;
    at(frames.start)..at(frames.end)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::access::Miss;
    use crate::entry::{Flags, Key};
    use crate::memory::{Geometry, SPILL_FRAMES};
    use crate::writer::Writer;

    const HOME: u32 = SPILL_FRAMES;

    fn memory(frames: u32) -> SliceMemory {
        let geometry = Geometry::new(frames, HOME).unwrap();
        SliceMemory::create("spill", geometry, Some(0)).unwrap()
    }

    #[test]
    fn frames_belong_to_the_home_node_or_to_a_range() {
        let geometry = Geometry::new(HOME + SPILL_FRAMES + 100, HOME).unwrap();
        assert_eq!(geometry.spill_ranges(), 2);
        assert_eq!(geometry.spill_range(0), HOME..HOME + SPILL_FRAMES);
        assert_eq!(geometry.spill_range(1).len(), 100);
        let ranges = [HOME - 1, HOME, HOME + SPILL_FRAMES, geometry.frames];
        let ranges = ranges.map(|frame| geometry.range_of(frame));
        assert_eq!(ranges, [None, Some(0), Some(1), None]);
        assert_eq!(Geometry::for_frames(1000).spill_ranges(), 0);
        for (frames, home) in [
            (0, 0),
            (1024, 0),
            (1024, 100),
            (1024, 2048),
            (u32::MAX, 512),
        ] {
            assert_eq!(Geometry::new(frames, home), None, "{frames}, {home}");
        }
    }

    #[test]
    fn a_range_gets_memory_of_its_node_and_loses_it() {
        let m = memory(HOME + SPILL_FRAMES + 100);
        let node_of = |frame: u32| m.frames().nodes_of(&[frame as usize * 4096]).unwrap()[0];
        let last = m.geometry().frames - 1;
        assert_eq!([HOME - 1, HOME, last].map(node_of), [Some(0), None, None]);
        for range in 0..2 {
            assert_eq!(m.node_of_range(range), None);
            assert!(m.back_range(range, Some(0)).unwrap());
            m.set_node_of_range(range, Some(3));
        }
        assert_eq!([HOME, last].map(node_of), [Some(0); 2]);
        assert_eq!(m.node_of_spilled(last), Some(3));
        assert_eq!(m.node_of_spilled(HOME - 1), None);
        m.release_range(0).unwrap();
        assert_eq!(
            [HOME - 1, HOME, last].map(node_of),
            [Some(0), None, Some(0)]
        );
        assert!(m.release_frames(HOME - 1..HOME).is_err(), "a frame at home");
    }

    #[test]
    fn a_range_gets_no_memory_of_a_node_that_does_not_exist() {
        let m = memory(HOME + SPILL_FRAMES);
        assert!(m.back_range(0, Some(1000)).is_err());
        let first = HOME as usize * 4096;
        assert_eq!(m.frames().nodes_of(&[first]).unwrap(), [None]);
    }

    #[test]
    fn the_short_path_leaves_spilled_pages_to_the_long_one() {
        let m = memory(HOME + SPILL_FRAMES);
        m.back_range(0, Some(0)).unwrap();
        let mut out = [0; 8];
        for (page, frame, is_short) in [(1, HOME - 1, true), (2, HOME, false)] {
            let key = Key::new(1, page);
            let index = m.insert(key, frame, 0);
            m.copy_in(frame, 0, &[7; 4096]).unwrap();
            m.entry(index).publish(Flags::BACKED);
            let line = m.home_line(key);
            let read = m.try_read(line, key, frame, |_| {}, 0, &mut out);
            assert_eq!(read.is_some(), is_short);
            let writer = Writer::daemon(1);
            let written = m.try_write(line, key, 0, &[8; 8], writer, || true);
            assert_eq!(written.is_some(), is_short);
            assert!(!m.entry(index).state().has(Flags::LATCH));
            let written = m.write_if(key, 8, &[9; 8], writer, 0, || true).unwrap();
            assert_eq!((written.was_clean, written.frame), (!is_short, frame));
            assert_eq!(m.read(key, 8, &mut out, 0), Ok(()));
            assert_eq!(out, [9; 8]);
        }
    }

    #[test]
    fn a_page_that_has_left_a_released_frame_is_absent() {
        let m = memory(HOME + SPILL_FRAMES);
        m.back_range(0, Some(0)).unwrap();
        let key = Key::new(1, 1);
        let index = m.insert(key, HOME + 5, 0);
        m.copy_in(HOME + 5, 0, &[7; 4096]).unwrap();
        m.entry(index).publish(Flags::NONE);
        let seen = m.entry(index).state();
        let latched = m.entry(index).try_latch(seen, 1).unwrap();
        let mut bytes = [0; 4096];
        m.copy_out(HOME + 5, 0, &mut bytes).unwrap();
        m.copy_in(3, 0, &bytes).unwrap();
        assert!(m.entry(index).move_latched(latched, 3));
        m.release_range(0).unwrap();
        let mut out = [0; 8];
        assert_eq!(m.read(key, 8, &mut out, 0), Ok(()));
        assert_eq!(out, [7; 8]);
        let moved = m.entry(index).state();
        assert!(!moved.any(Flags::DIRTY.with(Flags::LATCH)));
        assert!(m.remove(index, moved));
        assert_eq!(m.read(key, 8, &mut out, 0), Err(Miss::Absent));
    }
}
