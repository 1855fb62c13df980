//! What a read may return: each block is a register.
//!
//! Changes of a block have numbers in the order of their submission, because an initiator does not run overlapping changes at the same time. Number
//! 0 is the block of zeros at the start. A block never goes back to an older change than one that completed, or that a read returned.

use crate::disk::{BLOCK, Block};

#[derive(Clone, Default)]
struct Register {
    /// Value of each change; `values[0]` is of change 1. 0: zeros.
    values: Vec<u64>,
    /// Least number that a read may return.
    floor: usize,
    /// Least number that a reset may leave.
    durable: usize,
    /// Greatest number of a change that completed.
    completed: usize,
    /// Changes up to this number are of earlier initiators.
    inherited: usize,
}

pub struct Oracle {
    registers: Vec<Register>,
    values: u64,
}

impl Oracle {
    pub fn new(blocks: usize) -> Oracle {
        Oracle {
            registers: vec![Register::default(); blocks],
            values: 0,
        }
    }

    /// Submits a change of a block. Returns its number, and the bytes to write.
    pub fn submit(&mut self, block: usize, is_zeros: bool) -> (usize, Block) {
        let value = match is_zeros {
            true => 0,
            false => {
                self.values += 1;
                self.values
            }
        };
        let register = &mut self.registers[block];
        register.values.push(value);
        (register.values.len(), bytes_of(value, block))
    }

    /// Notes that a change completed.
    pub fn completed(&mut self, block: usize, number: usize, is_durable: bool) {
        let register = &mut self.registers[block];
        register.floor = register.floor.max(number);
        register.completed = register.completed.max(number);
        if is_durable {
            register.durable = register.durable.max(number);
        }
    }

    /// Returns the least numbers that a read may return from now on.
    pub fn floor(&self, block: usize) -> usize {
        self.registers[block].floor
    }

    /// Returns the changes that a flush makes durable which begins now.
    pub fn completed_now(&self) -> Vec<usize> {
        self.registers.iter().map(|r| r.completed).collect()
    }

    /// Notes that a flush succeeded.
    pub fn flushed(&mut self, completed: &[usize]) {
        for (register, &number) in self.registers.iter_mut().zip(completed) {
            register.durable = register.durable.max(number);
        }
    }

    /// Checks the bytes of a read that began when `floor` was the least number.
    pub fn read(&mut self, block: usize, floor: usize, bytes: &[u8]) {
        let number = self.number_of(block, floor, bytes);
        let register = &mut self.registers[block];
        register.floor = register.floor.max(number);
    }

    /// Checks a block of the device after a reset. What earlier initiators did not flush may be lost.
    pub fn reset(&mut self, block: usize, bytes: &[u8]) {
        self.number_of(block, self.registers[block].durable, bytes);
        let register = &mut self.registers[block];
        if register.floor <= register.inherited {
            register.floor = register.durable.min(register.floor);
            register.completed = register.durable;
        }
    }

    /// Notes that a new initiator takes the place of the one before.
    pub fn initiator_replaced(&mut self) {
        for register in &mut self.registers {
            register.inherited = register.values.len();
        }
    }

    fn number_of(&self, block: usize, floor: usize, bytes: &[u8]) -> usize {
        let register = &self.registers[block];
        let all = std::iter::once(&0).chain(&register.values).enumerate();
        let is_match = |(_, value): &(usize, &u64)| bytes_of(**value, block)[..] == *bytes;
        let found = all.skip(floor).find(is_match);
        found.map(|(number, _)| number).unwrap_or_else(|| {
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8"));
            let words: Vec<u64> = [0, 8, 2048, BLOCK - 8].map(word).to_vec();
            let all: Vec<u64> = register.values.clone();
            panic!("block {block}: not change {floor} or later: words {words:x?}, changes {all:?}")
        })
    }
}

/// Returns the bytes of a value in a block: different in each word, so that a wrong place shows.
fn bytes_of(value: u64, block: usize) -> Block {
    let mut bytes = [0; BLOCK];
    if value != 0 {
        for (word, chunk) in (0_u64..).zip(bytes.chunks_exact_mut(8)) {
            let mixed = value << 32 | (block as u64) << 16 | word;
            chunk.copy_from_slice(&mixed.to_le_bytes());
        }
    }
    bytes
}
