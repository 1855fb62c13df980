//! The batches of a journal after a checkpoint.
//!
//! Recovery writes nothing. So a second crash finds the same segments.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use jericho_format::journal::{
    BATCH_BYTES_MAX, JOURNAL_CLOSED, JournalHeader, NUMBER_MAX, SEGMENT_CONTINUES,
    SEGMENT_HEADER_BYTES, SegmentHeader, segment_kind,
};
use jericho_storage::{Device, IoError};

use crate::append::Journal;
use crate::area::{AreaDevice, JournalArea, JournalVolume};
use crate::error::{AreaError, BeginError, Damage, Evidence, Found, Lost, RecoverError};
use crate::headers::{self, CurrentHeader};
use crate::position::Position;
use crate::ring::Ring;
use crate::segment::inspect;
use crate::window::Window;

/// If a later batch begins more than this many segments behind an unreadable segment, that segment is damage, even if no later segment
/// says that it was durable: a writer begins a batch only after the batch before it is durable.
const GAP_MAX: u64 = 2;

/// The batches of a journal after a checkpoint.
pub struct Recovery {
    place: AreaDevice,
    header: CurrentHeader,
    window: Window,
    /// The segment that is due.
    due: Position,
    /// The position after the last whole batch.
    end: Position,
    /// The position before the last whole batch, if there is one.
    last: Option<Position>,
    batch: Vec<u8>,
    stage: Stage,
}

/// Which batches a journal had when it was recovered.
#[derive(Clone, Debug)]
pub struct History {
    header: Box<JournalHeader>,
    end_seq: u64,
}

impl History {
    /// Returns whether the journal had the whole batch whose first segment has this number and incarnation. A batch that a
    /// recovery has dropped does not count. Returns `None` if the header no longer names the incarnation.
    pub fn has_batch(&self, incarnation: u64, seq: u64) -> Option<bool> {
        has_batch(&self.header, self.end_seq, incarnation, seq)
    }
}

fn has_batch(header: &JournalHeader, end_seq: u64, incarnation: u64, seq: u64) -> Option<bool> {
    if incarnation >= header.incarnation.get() {
        return Some(incarnation == header.incarnation.get() && seq < end_seq);
    }
    // The next incarnation began after the last batch that counted.
    let mut next_begin = header.first_seq.get();
    for earlier in &header.earlier {
        match earlier.incarnation.get().cmp(&incarnation) {
            Ordering::Greater => next_begin = earlier.first_seq.get(),
            Ordering::Equal => return Some(seq < next_begin),
            // The journal never had this incarnation.
            Ordering::Less => return Some(false),
        }
    }
    None
}

/// How far recovery is.
#[derive(Debug)]
enum Stage {
    /// There may be more batches.
    Reading,
    /// All batches were returned.
    Ended,
    /// All batches before this failure were returned.
    Failed(RecoverError),
}

/// A batch.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'r> {
    /// The payload of one append.
    pub payload: &'r [u8],
    /// The position after it.
    pub end: Position,
}

impl fmt::Debug for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recovery")
            .field("place", &self.place)
            .field("due", &self.due)
            .field("end", &self.end)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Flushes the device, reads the headers, and returns a reader of the batches after a checkpoint. Writes nothing. `checkpoint` is
    /// the position of the checkpoint store.
    pub fn recover(
        device: Arc<dyn Device>,
        area: JournalArea,
        volume: JournalVolume,
        slice: u16,
        checkpoint: Position,
    ) -> Result<Recovery, RecoverError> {
        if !area.is_on(&*device) {
            let device = device.name();
            return Err(AreaError { device, area }.into());
        }
        let place = AreaDevice {
            device,
            area,
            volume,
            slice,
        };
        // After the death of the writer the device may return writes that a power cut would still lose. A read-only
        // device is not flushed: its caller writes nothing that relies on these bytes.
        if !place.device.is_read_only() {
            place.flush()?;
        }
        let header = headers::read(&place)?;
        let ring = Ring::of(area.blocks);
        let begin = Position::begin_of(&header.header);
        let is_closed = header.header.flags.get() & JOURNAL_CLOSED != 0;
        let fits = checkpoint.is_at(&begin) && checkpoint.incarnation <= begin.incarnation
            || checkpoint.incarnation == begin.incarnation
                && (begin.seq + 1..=NUMBER_MAX).contains(&checkpoint.seq)
                && ring.contains(checkpoint.block)
                && !is_closed;
        if !fits {
            return Err(RecoverError::Checkpoint {
                device: place.device.name(),
                checkpoint,
                begin,
            });
        }
        Ok(Recovery {
            window: Window::new(place.clone(), ring, checkpoint.block),
            place,
            header,
            due: checkpoint,
            end: checkpoint,
            last: None,
            batch: vec![],
            stage: match is_closed {
                true => Stage::Ended,
                false => Stage::Reading,
            },
        })
    }
}

impl Recovery {
    /// Returns the next batch, or `None` at the end. A batch without all of its segments is the end.
    ///
    /// Fails with `Damage` at an unreadable segment that was durable, and then at each later call. All batches before the segment were
    /// returned, so the caller can go on with these, without writing to the volume.
    pub fn next_batch(&mut self) -> Result<Option<Batch<'_>>, RecoverError> {
        match &self.stage {
            Stage::Reading => {}
            Stage::Ended => return Ok(None),
            Stage::Failed(error) => return Err(error.clone()),
        }
        match self.read_batch() {
            Ok(true) => Ok(Some(Batch {
                payload: &self.batch,
                end: self.end,
            })),
            Ok(false) => {
                self.stage = Stage::Ended;
                Ok(None)
            }
            Err(error) => {
                self.stage = Stage::Failed(error.clone());
                Err(error)
            }
        }
    }

    /// Reads the next batch. Returns whether there is one.
    fn read_batch(&mut self) -> Result<bool, RecoverError> {
        self.batch.clear();
        for index in 0.. {
            if self.window.left() == 0 {
                return Ok(false);
            }
            let header = match self.read_segment(index)? {
                Ok(header) => header,
                Err(found) => {
                    self.search_evidence(found)?;
                    return Ok(false);
                }
            };
            if header.flags.get() & SEGMENT_CONTINUES == 0 {
                break;
            }
        }
        self.last = Some(self.end);
        self.end = self.due;
        Ok(true)
    }

    /// Reads the segment that is due into the batch, as its segment with this index, and passes it. Returns what is there instead if
    /// the segment's write may have been torn.
    fn read_segment(&mut self, index: u32) -> Result<Result<SegmentHeader, Found>, RecoverError> {
        let header = match inspect(&mut self.window, &self.place)? {
            Ok(header) => header,
            Err(found) => return Ok(Err(found)),
        };
        let (seq, incarnation) = (header.seq.get(), header.incarnation.get());
        if (seq, incarnation) != (self.due.seq, self.incarnation()) {
            return Ok(Err(Found::Other { seq, incarnation }));
        }
        if header.prev_crc.get() != self.due.crc {
            return Err(self.damage(Found::Chain, Evidence::Whole)?.into());
        }
        let is_pad = header.kind == segment_kind::PAD;
        let payload_bytes = header.payload_bytes.get() as usize;
        let is_known = header.pages.get() == 0 && header.requires.get() == 0;
        let fits = header.batch_index.get() == index
            && self.batch.len() + payload_bytes <= BATCH_BYTES_MAX
            && (!is_pad || header.flags.get() & SEGMENT_CONTINUES != 0);
        if !header.numbers_agree() || !is_known || !fits {
            return Err(self.damage(Found::Fields, Evidence::Whole)?.into());
        }
        let blocks = header.blocks.get();
        if !is_pad && let Some(bytes) = self.window.peek(blocks)? {
            let payload = &bytes[SEGMENT_HEADER_BYTES..SEGMENT_HEADER_BYTES + payload_bytes];
            self.batch.extend_from_slice(payload);
        }
        self.window.pass(blocks);
        self.due = Position {
            incarnation,
            seq: seq + 1,
            block: self.window.block(),
            crc: header.crc.get(),
        };
        Ok(Ok(header))
    }

    /// Reads the rest of the ring. Fails if something there shows that the segment that is due was durable.
    fn search_evidence(&mut self, found: Found) -> Result<(), RecoverError> {
        while self.window.left() > 0 {
            let block = self.place.on_device(self.window.block());
            let header = inspect(&mut self.window, &self.place)?.ok();
            let header = header.filter(SegmentHeader::numbers_agree);
            if let Some(evidence) = header.and_then(|header| self.evidence(&header, block)) {
                return Err(self.damage(found, evidence)?.into());
            }
            self.window.pass(1);
        }
        Ok(())
    }

    /// Returns the evidence if a whole segment, `header` at `block`, shows that the due segment was durable.
    fn evidence(&self, header: &SegmentHeader, block: u64) -> Option<Evidence> {
        let (seq, incarnation) = (header.seq.get(), header.incarnation.get());
        if incarnation > self.incarnation() {
            return Some(Evidence::Newer { block, incarnation });
        }
        if incarnation < self.incarnation() || seq <= self.due.seq {
            return None;
        }
        let batch_begin = seq - u64::from(header.batch_index.get());
        let was_durable = header.durable_seq.get() >= self.due.seq;
        (was_durable || batch_begin > self.due.seq + GAP_MAX).then_some(Evidence::Later {
            block,
            seq,
            is_before_tail: header.tail_seq.get() > self.due.seq,
        })
    }

    /// Describes the damage at the segment that is due. Reads the rest of the ring.
    fn damage(&mut self, found: Found, evidence: Evidence) -> Result<Damage, IoError> {
        Ok(Damage {
            device: self.place.device.name(),
            block: self.place.on_device(self.due.block),
            expected_seq: self.due.seq,
            found,
            evidence,
            lost: self.lost()?,
        })
    }

    /// Returns what is lost because the due segment is unreadable. Reads the rest of the ring.
    fn lost(&mut self) -> Result<Lost, IoError> {
        let first_seq = self.due.seq;
        let mut last_seq = first_seq;
        // The whole later segment with the least number.
        let mut next: Option<SegmentHeader> = None;
        let mut ends = 0;
        while self.window.left() > 0 {
            let header = inspect(&mut self.window, &self.place)?.ok();
            let is_later = |header: &SegmentHeader| {
                header.numbers_agree()
                    && header.incarnation.get() == self.incarnation()
                    && header.seq.get() > first_seq
            };
            if let Some(header) = header.filter(is_later) {
                last_seq = last_seq.max(header.seq.get());
                ends += u64::from(header.flags.get() & SEGMENT_CONTINUES == 0);
                if next.is_none_or(|next| header.seq.get() < next.seq.get()) {
                    next = Some(header);
                }
            }
            self.window.pass(1);
        }
        // Unless the next segment continues a batch, the unreadable segment belonged to another batch.
        let has_own = next.is_none_or(|next| next.batch_index.get() == 0);
        Ok(Lost {
            first_seq,
            last_seq,
            batches: ends + u64::from(has_own),
        })
    }

    fn incarnation(&self) -> u64 {
        self.header.header.incarnation.get()
    }

    /// Returns the position after the last returned batch; at first the checkpoint's.
    pub fn end(&self) -> Position {
        self.end
    }

    /// Returns whether the journal has or had the whole batch whose first segment has this number and incarnation; see `History::has_batch`. The caller has
    /// read all batches.
    pub fn has_batch(&self, incarnation: u64, seq: u64) -> Option<bool> {
        has_batch(&self.header.header, self.end.seq, incarnation, seq)
    }

    /// Returns what the journal tells of batches, also for later questions. The caller has read all batches, and has dropped the last one if it does not
    /// count.
    pub fn history(&self) -> History {
        History {
            header: self.header.header.clone(),
            end_seq: self.end.seq,
        }
    }

    /// Drops the last batch that `next_batch` returned: `end` becomes the position before it, and the next incarnation begins there. The
    /// caller does this if the batch requires a batch that another journal does not have.
    pub fn drop_last(&mut self) {
        if let Some(last) = self.last.take() {
            self.end = last;
        }
    }

    /// Returns the bytes of the ring that were read so far. The two headers are not counted.
    pub fn bytes_read(&self) -> u64 {
        self.window.bytes_read()
    }

    /// Begins a new incarnation at the end, and returns its journal. The checkpoint store must have the position `checkpoint` and all
    /// batches before it durably, because the segments of the old incarnation are lost.
    ///
    /// Fails, and writes nothing, if `next_batch` has not returned `None`, or if the position is not `end`.
    pub fn begin_incarnation(self, checkpoint: Position) -> Result<Journal, BeginError> {
        match &self.stage {
            Stage::Reading => Err(BeginError::NotAtEnd),
            Stage::Failed(error) => Err(BeginError::Recover(error.clone())),
            Stage::Ended => self.begin(checkpoint, 0),
        }
    }

    /// Does the same as `begin_incarnation`, also after `next_batch` has failed. Gives up all batches that were not returned.
    pub fn begin_incarnation_after_damage(
        self,
        checkpoint: Position,
    ) -> Result<Journal, BeginError> {
        match &self.stage {
            Stage::Reading => Err(BeginError::NotAtEnd),
            Stage::Ended => self.begin(checkpoint, 0),
            // After the loss of a header there are segments of greater incarnations.
            Stage::Failed(_) => {
                let found = self.greatest_incarnation()?;
                self.begin(checkpoint, found)
            }
        }
    }

    /// Returns the greatest incarnation of the segments in the ring; 0 if there are none.
    fn greatest_incarnation(&self) -> Result<u64, IoError> {
        let ring = Ring::of(self.place.area.blocks);
        let mut window = Window::new(self.place.clone(), ring, ring.first());
        let mut greatest = 0;
        while window.left() > 0 {
            let header = inspect(&mut window, &self.place)?.ok();
            if let Some(header) = header.filter(SegmentHeader::numbers_agree) {
                greatest = greatest.max(header.incarnation.get());
            }
            window.pass(1);
        }
        Ok(greatest)
    }

    /// Begins an incarnation that is greater than the header's and than `found`.
    fn begin(self, checkpoint: Position, found: u64) -> Result<Journal, BeginError> {
        if checkpoint != self.end {
            let end = self.end;
            return Err(BeginError::Checkpoint { checkpoint, end });
        }
        let last_incarnation = self.incarnation().max(found);
        // `close` needs one more incarnation for its header.
        if last_incarnation + 1 >= NUMBER_MAX {
            return Err(BeginError::LastIncarnation);
        }
        let begin = Position {
            incarnation: last_incarnation + 1,
            ..self.end
        };
        let header = headers::write(&self.place, Some(&self.header), begin, 0)?;
        Ok(Journal::empty(self.place, header))
    }
}
