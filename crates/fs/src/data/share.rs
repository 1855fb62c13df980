//! How many changes of extents a batch takes, so that its length and the time to seal it are bounded, however many extents a file has.
//!
//! A batch has three shares: one for files with new changes, one for files whose changes an earlier batch did not take as a whole, and
//! one for the removals of files. One file takes only a part of a share. So a file with very many changes takes many batches, and other
//! files' changes are in each of them. The second share also gets what the first one leaves, and the third what the second one leaves.
//! Removals come last, so that the sync of a file does not wait for the removals of others.

use std::collections::HashSet;

use jericho_volume::SliceId;

use crate::data::extents::At;

/// By what the number of changes of a full batch is divided for the steps of the share of new changes, and of the two other ones.
const STEPS_PART: usize = 4;
const OTHER_STEPS_PART: usize = 8;
/// Blocks of the bitmaps that a share changes for each change of a full batch: 128 bytes of bitmaps.
const BITMAP_BLOCKS: usize = 1024;
/// By what the steps of a share are divided for one file, and the containers.
const NEW_FILE_PART: usize = 8;
const OTHER_FILE_PART: usize = 4;
const FILE_CONTAINERS_PART: usize = 2;
/// Steps that a file takes at least, as far as the share has them: more than a small sync has, so that it needs one batch.
const FILE_STEPS_MIN: usize = 64;

/// What a batch still takes. A *step* is a run of pages whose rows change in one way: at most three rows, one range of blocks that
/// becomes used, and one that becomes free.
pub struct Share {
    steps: usize,
    /// Number of containers whose bitmaps may still change. The row of a bitmap is long, so they are counted, too.
    containers: usize,
    /// The same for the present file.
    file_steps: usize,
    file_containers: usize,
    /// What a file takes at most.
    file_steps_max: usize,
    file_containers_max: usize,
    changed: HashSet<(SliceId, u64)>,
    container_blocks: u64,
    /// The largest number of pages of a step.
    step_pages: u64,
}

impl Share {
    /// Returns the share of files whose changes an earlier batch did not take as a whole, or that of removals. A full batch has `full_at`
    /// changes.
    pub fn of_left(full_at: usize, container_blocks: u32) -> Share {
        Share::new(
            (OTHER_STEPS_PART, OTHER_FILE_PART),
            full_at,
            container_blocks,
        )
    }

    /// Returns the share of files with new changes.
    pub fn of_new(full_at: usize, container_blocks: u32) -> Share {
        Share::new((STEPS_PART, NEW_FILE_PART), full_at, container_blocks)
    }

    /// Returns the share together with what another one has left.
    pub fn with_rest(self, other: &Share) -> Share {
        let (steps, containers) = (self.steps + other.steps, self.containers + other.containers);
        let file_steps = (steps / OTHER_FILE_PART).max(FILE_STEPS_MIN);
        let is_short = self.step_pages < u64::MAX;
        Share {
            steps,
            containers,
            file_steps_max: if is_short {
                self.file_steps_max
            } else {
                file_steps
            },
            file_containers_max: (containers / FILE_CONTAINERS_PART).max(2),
            ..self
        }
    }

    /// Returns the share of a file whose changes one batch should take as a whole.
    pub fn of_replacement(full_at: usize, container_blocks: u32) -> Share {
        Share::new((STEPS_PART, 1), full_at, container_blocks)
    }

    /// Returns a share of which each file takes one step of at most this many pages.
    pub fn of_short_steps(step_pages: u64, container_blocks: u32) -> Share {
        Share {
            file_steps_max: 1,
            step_pages,
            ..Share::new(
                (STEPS_PART, 1),
                FILE_STEPS_MIN * STEPS_PART,
                container_blocks,
            )
        }
    }

    /// Returns the number of steps that are left.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns whether the share may not suffice for a step of another file.
    pub fn is_used_up(&self) -> bool {
        self.steps == 0 || self.containers < 2
    }

    fn new((part, file_part): (usize, usize), full_at: usize, container_blocks: u32) -> Share {
        let steps = (full_at / part).max(1);
        // A step changes at most two containers. With less than that no step would be taken.
        let containers = full_at * BITMAP_BLOCKS / container_blocks.max(1) as usize;
        let containers = containers.clamp(2, steps.max(2));
        Share {
            steps,
            containers,
            file_steps: 0,
            file_containers: 0,
            file_steps_max: (steps / file_part).max(FILE_STEPS_MIN),
            file_containers_max: (containers / FILE_CONTAINERS_PART).max(2),
            changed: HashSet::new(),
            container_blocks: u64::from(container_blocks),
            step_pages: u64::MAX,
        }
    }

    /// Begins to take the changes of a file.
    pub fn begin_file(&mut self) {
        self.file_steps = self.file_steps_max.min(self.steps);
        self.file_containers = self.file_containers_max.min(self.containers);
    }

    /// Returns whether nothing is left for the file.
    pub fn is_spent(&self) -> bool {
        self.file_steps == 0
    }

    /// Takes a step of the file: `count` pages, or the first ones of them. The bitmaps change of as many blocks, from each of `blocks` on.
    /// Returns the number of pages; 0 if the share does not suffice.
    pub fn take_step(&mut self, count: u64, blocks: [Option<At>; 2]) -> u64 {
        if self.is_spent() {
            return 0;
        }
        let container_of = |at: At| (at.slice, at.block / self.container_blocks);
        let containers = blocks.map(|at| at.map(container_of));
        let is_new = |container: &(SliceId, u64)| !self.changed.contains(container);
        let mut new: Vec<_> = containers.into_iter().flatten().filter(is_new).collect();
        new.dedup();
        if new.len() > self.file_containers {
            return 0;
        }
        self.file_steps -= 1;
        self.steps -= 1;
        self.file_containers -= new.len();
        self.containers -= new.len();
        self.changed.extend(new);
        // A step ends with the containers. So two suffice for each step, and each batch takes one at least.
        let left = |at: At| self.container_blocks - at.block % self.container_blocks;
        let count = count.min(self.step_pages);
        blocks.into_iter().flatten().map(left).fold(count, u64::min)
    }

    /// Takes a step without a change.
    pub fn take_nothing(&mut self) {
        self.take_step(0, [None, None]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINER: u64 = 64;

    fn at(block: u64) -> Option<At> {
        Some(At { slice: 0, block })
    }

    #[test]
    fn a_file_takes_a_part_of_the_share_and_the_next_one_another() {
        let mut share = Share::of_new(1024, CONTAINER as u32);
        let mut taken = Vec::new();
        for _ in 0..10 {
            share.begin_file();
            let steps = (0..).take_while(|page| share.take_step(1, [at(*page % 64), None]) > 0);
            taken.push(steps.count());
        }
        assert_eq!(taken, [64, 64, 64, 64, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_step_ends_with_a_container_and_a_batch_changes_a_bounded_number_of_them() {
        for (full_at, containers) in [(1024, 128), (1, 2)] {
            let mut share = Share::of_left(full_at, CONTAINER as u32);
            share.begin_file();
            let (mut old, mut new) = (10, 1000 * CONTAINER);
            loop {
                let pages = share.take_step(1 << 40, [at(old), at(new)]);
                if pages == 0 {
                    break;
                }
                old += pages;
                new += pages;
            }
            // Each page changes two containers, which end at different pages.
            assert!(old > 10 && old <= containers / 2 * CONTAINER, "{old}");
        }
    }
}
