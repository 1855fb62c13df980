//! The target's device: it loses what is not flushed when its host is reset.

use jericho_remote::{Action, Operation};
use jericho_sim::Random;

pub const BLOCK: usize = 4096;
pub type Block = [u8; BLOCK];

pub struct Disk {
    /// What reads return.
    blocks: Vec<Block>,
    /// What a reset leaves in any case.
    durable: Vec<Block>,
    /// Changes that a reset may lose, in order.
    unflushed: Vec<(usize, Box<Block>)>,
    /// Each flush fails, and what it should have made durable is lost.
    pub fails_flushes: bool,
    /// So does the next one.
    pub fails_next_flush: bool,
    /// Writes that begin at this block fail.
    pub fails_block: Option<usize>,
}

impl Disk {
    pub fn new(blocks: usize) -> Disk {
        Disk {
            blocks: vec![[0; BLOCK]; blocks],
            durable: vec![[0; BLOCK]; blocks],
            unflushed: Vec::new(),
            fails_flushes: false,
            fails_next_flush: false,
            fails_block: None,
        }
    }

    pub fn size_bytes(&self) -> u64 {
        (self.blocks.len() * BLOCK) as u64
    }

    pub fn block(&self, at: usize) -> &Block {
        &self.blocks[at]
    }

    /// Performs an operation on the memory of its data.
    pub fn perform(&mut self, operation: &Operation, memory: &mut [u8]) -> Result<(), u16> {
        let first = operation.offset_bytes as usize / BLOCK;
        let count = operation.length_bytes as usize / BLOCK;
        match operation.action {
            Action::Read => {
                for (block, memory) in (first..).zip(memory.chunks_exact_mut(BLOCK)) {
                    memory.copy_from_slice(&self.blocks[block]);
                }
            }
            Action::Write { .. } if self.fails_block == Some(first) => return Err(5),
            Action::Write { is_durable } => {
                for (block, memory) in (first..).zip(memory.chunks_exact(BLOCK)) {
                    self.change(block, memory.try_into().expect("a block"), is_durable);
                }
            }
            Action::WriteZeroes { is_durable } => {
                (first..first + count).for_each(|b| self.change(b, &[0; BLOCK], is_durable));
            }
            Action::Discard => {}
            Action::Flush if self.fails_flushes || self.fails_next_flush => {
                self.fails_next_flush = false;
                self.unflushed.clear();
                self.blocks.clone_from(&self.durable);
                return Err(5);
            }
            Action::Flush => {
                for (block, bytes) in self.unflushed.drain(..) {
                    self.durable[block] = *bytes;
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, block: usize, bytes: &Block, is_durable: bool) {
        self.blocks[block] = *bytes;
        match is_durable {
            true => {
                // An older change of the block cannot reappear.
                self.unflushed.retain(|(other, _)| *other != block);
                self.durable[block] = *bytes;
            }
            false => self.unflushed.push((block, Box::new(*bytes))),
        }
    }

    /// Resets the host: each change that was not flushed is lost, or is not.
    pub fn reset(&mut self, random: &mut Random) {
        for (block, bytes) in self.unflushed.drain(..) {
            if random.below(2) == 0 {
                self.durable[block] = *bytes;
            }
        }
        self.blocks.clone_from(&self.durable);
    }
}
