//! The slots of a session, as the target sees them: rules 1 to 6 of `docs/formats/wire.md`.
//!
//! ```text
//! IDLE ── on_record, on_data ──> RECEIVING ── all data there (begin_if_complete) ──> EXECUTING ── ended ──> DONE
//! RECEIVING ── the request is wrong ──> DONE
//! ```

use jericho_format::PAGE_BYTES;
use jericho_format::wire::{CompletionRecord, FLAG_FUA, LANES_MAX, PLACE_BYTES, RequestRecord};
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use crate::content::{Content, Part, RequestId};
use crate::errno::{EINVAL, EOPNOTSUPP, EROFS};
use crate::lanes::{Lanes, Sources};
use crate::operation::{Action, Operation};
use crate::pages::Run;
use crate::pieces::Pieces;

/// The initiator broke a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// What the device must do for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    pub name: RequestId,
    pub operation: Operation,
    pub run: Run,
}

/// What a session may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub pool_pages: u32,
    pub size_bytes: u64,
    pub is_read_only: bool,
}

#[derive(Debug)]
enum State {
    /// No request yet.
    Idle,
    /// The record, or a part of the data, is missing.
    Receiving {
        record: Option<RequestRecord>,
        pool_page: u32,
        pieces: Pieces,
    },
    Executing {
        operation: Operation,
        run: Run,
    },
    /// The initiator may not have the completion yet.
    Done(Ended),
}

#[derive(Clone, Copy, Debug)]
struct Ended {
    error: u16,
    verifier: u64,
    /// Data of a READ.
    data: Option<Run>,
}

#[derive(Debug)]
struct Slot {
    sequence: u32,
    state: State,
    /// The slot is in `Slots::records`.
    is_queued: bool,
    /// How often the slot is in `Slots::parts`.
    parts: u32,
    /// Lane of the channel on which the latest request has arrived.
    lane: u16,
}

/// All slots of a session, and what must be sent for them.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    limits: Limits,
    /// Slots with a completion to send. Each is here once, so that an initiator that acknowledges nothing uses no further memory.
    records: Lanes<u16>,
    /// Parts of the latest request of a slot.
    parts: Lanes<Part>,
}

impl Slots {
    /// Returns idle slots.
    pub fn new(count: u16, limits: Limits) -> Slots {
        let idle = || Slot {
            sequence: 0,
            state: State::Idle,
            is_queued: false,
            parts: 0,
            lane: 0,
        };
        Slots {
            slots: (0..count).map(|_| idle()).collect(),
            limits,
            records: Lanes::new(LANES_MAX.into()),
            parts: Lanes::new(LANES_MAX.into()),
        }
    }

    /// Takes a request that has arrived on a channel of a lane. Returns what the device must do now, if anything. A request that is only wrong is completed at once, with the
    /// verifier.
    pub fn on_record(
        &mut self,
        record: RequestRecord,
        verifier: u64,
        lane: u16,
    ) -> Result<Option<Begun>, Violation> {
        let name = RequestId {
            slot: record.slot.get(),
            sequence: record.sequence.get(),
        };
        let Some(slot) = self.receive(name, record.pool_page.get(), lane)? else {
            return Ok(None);
        };
        let State::Receiving {
            record: known,
            pool_page,
            ..
        } = &mut slot.state
        else {
            return Ok(None);
        };
        if known.is_some() {
            return Ok(None);
        }
        let moves = operation_of(&record).is_some_and(|operation| operation.data_pages() > 0);
        if moves && *pool_page != record.pool_page.get() {
            return Err(Violation);
        }
        *known = Some(record);
        self.begin_if_complete(name, verifier)
    }

    /// Takes a part of the data of a WRITE. Returns its place in the pool, if it must be copied there, and what the device must do after that.
    pub fn on_data(
        &mut self,
        name: RequestId,
        (place, length): (u16, usize),
        pool_page: u32,
        verifier: u64,
        lane: u16,
    ) -> Result<(Option<u64>, Option<Begun>), Violation> {
        let pool_bytes = u64::from(self.limits.pool_pages) * PAGE_BYTES;
        let offset_bytes =
            u64::from(pool_page) * PAGE_BYTES + u64::from(place) * PLACE_BYTES as u64;
        if offset_bytes + length as u64 > pool_bytes {
            return Err(Violation);
        }
        let Some(slot) = self.receive(name, pool_page, lane)? else {
            return Ok((None, None));
        };
        let State::Receiving {
            pool_page: known,
            pieces,
            ..
        } = &mut slot.state
        else {
            return Ok((None, None));
        };
        if *known != pool_page || !pieces.take(place, length) {
            return Err(Violation);
        }
        let begun = self.begin_if_complete(name, verifier)?;
        Ok((Some(offset_bytes), begun))
    }

    /// Takes the end of an operation. Returns whether the slot was executing it.
    pub fn ended(&mut self, name: RequestId, error: u16, verifier: u64) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(name.slot)) else {
            return false;
        };
        let State::Executing { operation, run } = slot.state else {
            return false;
        };
        if slot.sequence != name.sequence {
            return false;
        }
        let has_data = operation.action == Action::Read && error == 0;
        slot.state = State::Done(Ended {
            error,
            verifier,
            data: has_data.then_some(run),
        });
        if has_data {
            slot.parts += 1;
            self.parts.of(slot.lane).push_back(Part {
                name,
                from_bytes: 0,
                to_bytes: operation.length_bytes,
            });
        }
        self.queue(name);
        true
    }

    /// Returns what the next frame should carry.
    pub fn next_content(&mut self, from: Sources<'_>, payload_max: u16) -> Option<Content> {
        let most = usize::from(payload_max) / size_of::<CompletionRecord>();
        let mut names = Vec::new();
        while names.len() < most
            && let Some(at) = self.records.pop(from)
        {
            let slot = &mut self.slots[usize::from(at)];
            slot.is_queued = false;
            let name = RequestId {
                slot: at,
                sequence: slot.sequence,
            };
            if self.done(name).is_some() {
                names.push(name);
            }
        }
        if !names.is_empty() {
            return Some(Content::Records(names));
        }
        let lane = self.parts.next_lane(from)?;
        let queue = self.parts.of(lane);
        let part = queue.front_mut()?;
        let first = part.take_first(payload_max);
        if part.is_empty() {
            self.slots[usize::from(part.name.slot)].parts -= 1;
            queue.pop_front();
        }
        Some(Content::Data(first))
    }

    /// Returns the completion of a request for a frame.
    pub fn record(&self, name: RequestId) -> Option<CompletionRecord> {
        let ended = self.done(name)?;
        Some(CompletionRecord {
            slot: U16::new(name.slot),
            error: U16::new(ended.error),
            sequence: U32::new(name.sequence),
            verifier: U64::new(ended.verifier),
            reserved: [0; 8],
        })
    }

    /// Returns the pages of the data of a READ.
    pub fn data(&self, name: RequestId) -> Option<Run> {
        self.done(name)?.data
    }

    /// Takes content that was lost, to send it again.
    pub fn lost(&mut self, lost: Vec<Content>) {
        lost.into_iter().for_each(|content| self.requeue(content));
    }

    fn requeue(&mut self, content: Content) {
        match content {
            Content::Records(names) => names.into_iter().for_each(|name| self.queue(name)),
            Content::Data(part) if self.data(part.name).is_some() => {
                let slot = &mut self.slots[usize::from(part.name.slot)];
                slot.parts += 1;
                self.parts.of(slot.lane).push_front(part);
            }
            Content::Data(_) => {}
        }
    }

    /// Queues the completion of a request, if it is still the slot's latest one.
    fn queue(&mut self, name: RequestId) {
        if self.done(name).is_none() {
            return;
        }
        let slot = &mut self.slots[usize::from(name.slot)];
        if !slot.is_queued {
            slot.is_queued = true;
            self.records.of(slot.lane).push_back(name.slot);
        }
    }

    fn done(&self, name: RequestId) -> Option<&Ended> {
        let slot = self.slots.get(usize::from(name.slot))?;
        match &slot.state {
            State::Done(ended) if slot.sequence == name.sequence => Some(ended),
            _ => None,
        }
    }

    /// Returns the slot if it takes the sequence, in `Receiving`. Returns `None` for a late copy of what the slot has, or has had.
    fn receive(
        &mut self,
        name: RequestId,
        pool_page: u32,
        lane: u16,
    ) -> Result<Option<&mut Slot>, Violation> {
        let slot = self.slots.get_mut(usize::from(name.slot));
        let slot = slot.ok_or(Violation)?;
        let ahead = name.sequence.wrapping_sub(slot.sequence) as i32;
        match (&slot.state, ahead) {
            (State::Receiving { .. }, 0) => Ok(Some(slot)),
            (_, ..=0) => Ok(None),
            (State::Idle | State::Done(_), 1) => {
                if slot.parts > 0 {
                    // The initiator has the data of the request before.
                    slot.parts = 0;
                    self.parts.retain(|part| part.name.slot != name.slot);
                }
                (slot.sequence, slot.lane) = (name.sequence, lane);
                slot.state = State::Receiving {
                    record: None,
                    pool_page,
                    pieces: Pieces::default(),
                };
                Ok(Some(slot))
            }
            _ => Err(Violation),
        }
    }

    /// Begins the operation of a slot, if its record and all of its data are there.
    fn begin_if_complete(
        &mut self,
        name: RequestId,
        verifier: u64,
    ) -> Result<Option<Begun>, Violation> {
        let limits = self.limits;
        let slot = &mut self.slots[usize::from(name.slot)];
        let State::Receiving {
            record: Some(record),
            pieces,
            ..
        } = &slot.state
        else {
            return Ok(None);
        };
        let operation = operation_of(record);
        let length = match operation {
            Some(operation) if matches!(operation.action, Action::Write { .. }) => {
                operation.length_bytes
            }
            _ => 0,
        };
        if !pieces.are_within(length) {
            return Err(Violation);
        }
        let error = match operation {
            None => EOPNOTSUPP as u16,
            Some(operation) if !operation.is_valid(limits.size_bytes) => EINVAL as u16,
            Some(operation) if limits.is_read_only && operation.is_change() => EROFS as u16,
            Some(operation) => {
                if !pieces.are_all(length) {
                    return Ok(None);
                }
                let run = Run {
                    page: record.pool_page.get(),
                    pages: operation.data_pages(),
                };
                let end = u64::from(run.page) + u64::from(run.pages);
                if run.pages > 0 && end > limits.pool_pages.into() {
                    return Err(Violation);
                }
                slot.state = State::Executing { operation, run };
                return Ok(Some(Begun {
                    name,
                    operation,
                    run,
                }));
            }
        };
        slot.state = State::Done(Ended {
            error,
            verifier,
            data: None,
        });
        self.queue(name);
        Ok(None)
    }
}

fn operation_of(record: &RequestRecord) -> Option<Operation> {
    let is_durable = record.flags & FLAG_FUA != 0;
    let action = Operation::action_of(record.op, is_durable)?;
    Some(Operation {
        action,
        offset_bytes: record.offset_bytes.get(),
        length_bytes: record.length_bytes.get(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use jericho_format::wire::op;

    const LIMITS: Limits = Limits {
        pool_pages: 8,
        size_bytes: 16 * PAGE_BYTES,
        is_read_only: false,
    };

    fn name(slot: u16, sequence: u32) -> RequestId {
        RequestId { slot, sequence }
    }

    fn record(op: u8, (slot, sequence): (u16, u32), pages: u32, pool_page: u32) -> RequestRecord {
        RequestRecord {
            op,
            flags: 0,
            slot: U16::new(slot),
            sequence: U32::new(sequence),
            offset_bytes: U64::new(0),
            length_bytes: U32::new(pages * PAGE_BYTES as u32),
            pool_page: U32::new(pool_page),
            reserved: [0; 8],
        }
    }

    #[test]
    fn a_request_is_executed_once_however_often_it_arrives() {
        let mut slots = Slots::new(2, LIMITS);
        let write = record(op::WRITE, (1, 1), 1, 3);
        let part = || (0, PAGE_BYTES as usize);
        assert_eq!(slots.on_record(write, 7, 0), Ok(None));
        assert_eq!(slots.on_record(write, 7, 0), Ok(None));
        let (place, begun) = slots.on_data(name(1, 1), part(), 3, 7, 0).unwrap();
        assert_eq!(place, Some(3 * PAGE_BYTES));
        assert_eq!(begun.map(|begun| begun.name), Some(name(1, 1)));
        for _ in 0..2 {
            // While the device writes, and after it has.
            assert_eq!(slots.on_record(write, 7, 0), Ok(None));
            assert_eq!(slots.on_data(name(1, 1), part(), 3, 7, 0), Ok((None, None)));
            slots.ended(name(1, 1), 0, 7);
        }
        let next = record(op::FLUSH, (1, 2), 0, 0);
        assert!(slots.on_record(next, 7, 0).unwrap().is_some());
        assert_eq!(slots.on_record(write, 7, 0), Ok(None));
        assert_eq!(slots.on_data(name(1, 1), part(), 3, 7, 0), Ok((None, None)));
    }

    #[test]
    fn frames_that_break_a_rule_are_violations() {
        let mut slots = Slots::new(2, LIMITS);
        // A slot that does not exist, a sequence that is not due, pages beyond the pool.
        assert!(
            slots
                .on_record(record(op::READ, (2, 1), 1, 0), 7, 0)
                .is_err()
        );
        assert!(
            slots
                .on_record(record(op::READ, (0, 2), 1, 0), 7, 0)
                .is_err()
        );
        assert!(
            slots
                .on_record(record(op::READ, (0, 1), 1, 8), 7, 0)
                .is_err()
        );
        assert!(slots.on_data(name(1, 1), (0, 4096), 8, 7, 0).is_err());
        assert!(slots.on_data(name(1, 1), (64, 4096), 7, 7, 0).is_err());
        // No whole units.
        assert!(slots.on_data(name(1, 1), (0, 100), 0, 7, 0).is_err());
        // Another page than the one before, data outside of the request.
        let mut slots = Slots::new(2, LIMITS);
        slots.on_data(name(0, 1), (64, 4096), 1, 7, 0).unwrap();
        assert!(slots.on_data(name(0, 1), (0, 4096), 2, 7, 0).is_err());
        assert!(
            slots
                .on_record(record(op::WRITE, (0, 1), 1, 1), 7, 0)
                .is_err()
        );
        // The next request while the device executes one.
        let mut slots = Slots::new(2, LIMITS);
        assert!(
            slots
                .on_record(record(op::READ, (0, 1), 1, 0), 7, 0)
                .unwrap()
                .is_some()
        );
        assert!(
            slots
                .on_record(record(op::READ, (0, 2), 1, 0), 7, 0)
                .is_err()
        );
    }

    #[test]
    fn an_initiator_that_acknowledges_nothing_does_not_fill_the_memory() {
        let mut slots = Slots::new(1, LIMITS);
        for sequence in 1..1000 {
            let begun = slots.on_record(record(op::READ, (0, sequence), 1, 0), 7, 0);
            assert!(begun.unwrap().is_some());
            slots.ended(name(0, sequence), 0, 7);
        }
        assert_eq!((slots.records.len(), slots.parts.len()), (1, 1));
    }
}
