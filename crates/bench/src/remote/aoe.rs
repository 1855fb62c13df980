//! A client of an AoE target (ATA over Ethernet): reads and writes of up to 16 sectors in a frame, as many frames in progress as the target
//! advertises, and repetition after a timeout. The target vblade does nothing for a flush.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use jericho_sys::packet::{Frames, PacketSocket};
use jericho_sys::process::wait_readable;

use crate::Result;
use crate::remote::client::{Client, MEMORY_BYTES, Transfer};

const ETHERTYPE: u16 = 0x88A2;
const SECTOR_BYTES: usize = 512;
/// Sectors of a frame: two pages. A frame of MTU 9000 has room for 17.
const SECTORS_MAX: usize = 16;
const HEADER_BYTES: usize = 36;
const CONFIG_BYTES: usize = 32;
const FRAME_BYTES_MAX: usize = 9100;
const RECEIVE_BYTES: usize = 8 << 20;
/// Most frames in progress, whatever the target advertises.
const WINDOW_MAX: usize = 64;
/// After this time without an answer, a frame is sent again.
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// How often a target is asked before it counts as missing.
const QUESTIONS: u32 = 60;
const VERSION: u8 = 0x10;
const FLAG_RESPONSE: u8 = 8;
const FLAG_ERROR: u8 = 4;
const COMMAND_ATA: u8 = 0;
const COMMAND_CONFIG: u8 = 1;
const ATA_EXTENDED: u8 = 0x40;
const ATA_WRITE: u8 = 1;
const ATA_IDENTIFY: u8 = 0xEC;
const ATA_READ_EXT: u8 = 0x24;
const ATA_WRITE_EXT: u8 = 0x34;
const ATA_STATUS_ERROR: u8 = 1;

/// A target.
pub struct Aoe {
    socket: PacketSocket,
    target: [u8; 6],
    address: Address,
    size_bytes: u64,
    memory: Vec<u8>,
    frames: Frames,
    /// Parts of transfers that are not sent yet.
    unsent: VecDeque<Part>,
    /// Frames in progress. The low bits of a tag are the place here.
    in_progress: Vec<Option<InProgress>>,
    generation: u32,
    /// Parts of each slot that have not ended.
    parts_left: Vec<usize>,
    repetitions: u64,
    waits: u64,
}

/// The shelf and the slot of a target.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// Shelf.
    pub major: u16,
    /// Slot in the shelf.
    pub minor: u8,
}

/// What one frame transfers.
#[derive(Clone, Copy)]
struct Part {
    slot: usize,
    /// Offset in the memory.
    at: usize,
    offset_bytes: u64,
    length_bytes: usize,
    is_write: bool,
}

struct InProgress {
    part: Part,
    head: [u8; HEADER_BYTES],
    sent: Instant,
    is_unsent: bool,
}

fn head(to: [u8; 6], from: [u8; 6], address: Address, command: u8, tag: u32) -> [u8; HEADER_BYTES] {
    let mut head = [0; HEADER_BYTES];
    head[..6].copy_from_slice(&to);
    head[6..12].copy_from_slice(&from);
    head[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    head[14] = VERSION;
    head[16..18].copy_from_slice(&address.major.to_be_bytes());
    head[18] = address.minor;
    head[19] = command;
    head[20..24].copy_from_slice(&tag.to_be_bytes());
    head
}

/// Returns the tag of an answer without an error.
fn answered(frame: &[u8]) -> Result<Option<u32>> {
    // The answer to a question about the configuration is shorter than an ATA header.
    let least = match frame.get(19) {
        Some(&COMMAND_ATA) => HEADER_BYTES,
        _ => CONFIG_BYTES,
    };
    if frame.len() < least || frame[14] & FLAG_RESPONSE == 0 {
        return Ok(None);
    }
    if frame[14] & FLAG_ERROR != 0 {
        return Err(format!("the AoE target refuses a frame: error {}", frame[15]).into());
    }
    if frame[19] == COMMAND_ATA && frame[27] & ATA_STATUS_ERROR != 0 {
        return Err(format!("a transfer over AoE failed with ATA error {}", frame[25]).into());
    }
    Ok(Some(u32::from_be_bytes([
        frame[20], frame[21], frame[22], frame[23],
    ])))
}

/// Asks until there is an answer. Returns it.
fn ask(socket: &PacketSocket, frames: &mut Frames, question: &[u8]) -> Result<Vec<u8>> {
    for _ in 0..QUESTIONS {
        socket.send_many(&[[IoSlice::new(question), IoSlice::new(&[])]])?;
        if !wait_readable(socket.as_fd(), Some(RETRY_AFTER))? {
            continue;
        }
        socket.receive_many(frames)?;
        for frame in frames.iter() {
            if answered(frame)?.is_some() && frame[19] == question[19] {
                return Ok(frame.to_vec());
            }
        }
    }
    Err("no AoE target answers: check that vblade runs and that the interfaces are up".into())
}

impl Aoe {
    /// Looks for a target on an interface.
    pub fn connect(interface: &str, address: Address) -> Result<Aoe> {
        let socket = PacketSocket::open(interface, ETHERTYPE, RECEIVE_BYTES)?;
        let mut frames = Frames::new(32, FRAME_BYTES_MAX);
        let question = head([0xFF; 6], socket.mac(), address, COMMAND_CONFIG, 1);
        let config = ask(&socket, &mut frames, &question)?;
        let target = config[6..12].first_chunk().copied().unwrap_or_default();
        let window = usize::from(u16::from_be_bytes([config[24], config[25]]));
        let sectors = usize::from(config[28]);
        if sectors < SECTORS_MAX {
            return Err(format!(
                "the AoE target takes {sectors} sectors in a frame, and {SECTORS_MAX} are needed: set the MTU of both interfaces to 9000"
            )
            .into());
        }
        let mut question = head(target, socket.mac(), address, COMMAND_ATA, 2);
        (question[26], question[27]) = (1, ATA_IDENTIFY);
        let identity = ask(&socket, &mut frames, &question)?;
        // Words 100 to 103: sectors.
        let sectors = identity
            .get(HEADER_BYTES + 200..)
            .and_then(|rest| rest.first_chunk());
        let sectors = sectors.ok_or("the AoE target sends a short identity")?;
        let window = window.clamp(1, WINDOW_MAX);
        Ok(Aoe {
            target,
            address,
            size_bytes: u64::from_le_bytes(*sectors) * SECTOR_BYTES as u64,
            memory: vec![0x5A; MEMORY_BYTES],
            frames,
            unsent: VecDeque::with_capacity(MEMORY_BYTES / (SECTORS_MAX * SECTOR_BYTES)),
            in_progress: (0..window).map(|_| None).collect(),
            generation: 0,
            parts_left: vec![0; 64],
            repetitions: 0,
            waits: 0,
            socket,
        })
    }

    /// Returns how many frames the target lets be in progress.
    pub fn window(&self) -> usize {
        self.in_progress.len()
    }

    fn frame_of(&mut self, part: Part, place: usize) -> InProgress {
        self.generation = self.generation.wrapping_add(1) & 0x00FF_FFFF;
        let tag = self.generation << 8 | place as u32;
        let mut head = head(
            self.target,
            self.socket.mac(),
            self.address,
            COMMAND_ATA,
            tag,
        );
        head[24] = ATA_EXTENDED | if part.is_write { ATA_WRITE } else { 0 };
        head[26] = (part.length_bytes / SECTOR_BYTES) as u8;
        head[27] = match part.is_write {
            true => ATA_WRITE_EXT,
            false => ATA_READ_EXT,
        };
        let sector = part.offset_bytes / SECTOR_BYTES as u64;
        head[28..34].copy_from_slice(&sector.to_le_bytes()[..6]);
        InProgress {
            part,
            head,
            sent: Instant::now(),
            is_unsent: true,
        }
    }

    /// Sends what the window has room for, and what is to be sent again.
    fn send(&mut self) -> Result<()> {
        for place in 0..self.in_progress.len() {
            if self.in_progress[place].is_none()
                && let Some(part) = self.unsent.pop_front()
            {
                self.in_progress[place] = Some(self.frame_of(part, place));
            }
        }
        let mut batch = [[IoSlice::new(&[]), IoSlice::new(&[])]; WINDOW_MAX];
        let mut count = 0;
        for frame in self
            .in_progress
            .iter()
            .flatten()
            .filter(|frame| frame.is_unsent)
        {
            let part = &frame.part;
            let payload = match part.is_write {
                true => &self.memory[part.at..part.at + part.length_bytes],
                false => &[],
            };
            batch[count] = [IoSlice::new(&frame.head), IoSlice::new(payload)];
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let sent = match self.socket.send_many(&batch[..count]) {
            Ok(sent) => sent,
            // The queue of the interface is full.
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            Err(e) => return Err(format!("cannot send AoE frames: {e}").into()),
        };
        let now = Instant::now();
        let frames = self.in_progress.iter_mut().flatten();
        for frame in frames.filter(|frame| frame.is_unsent).take(sent) {
            (frame.sent, frame.is_unsent) = (now, false);
        }
        Ok(())
    }

    /// Takes the answers that have arrived.
    fn receive(&mut self, ended: &mut Vec<usize>) -> Result<()> {
        self.socket.receive_many(&mut self.frames)?;
        for frame in self.frames.iter() {
            let Some(tag) = answered(frame)? else {
                continue;
            };
            let Some(place) = self.in_progress.get_mut(tag as usize & 0xFF) else {
                continue;
            };
            // An answer to a frame that was repeated may arrive twice.
            let Some(answered) = place.take_if(|waiting| waiting.head[20..24] == frame[20..24])
            else {
                continue;
            };
            let part = answered.part;
            if !part.is_write {
                let data = frame.get(HEADER_BYTES..HEADER_BYTES + part.length_bytes);
                let data = data.ok_or("the AoE target sends fewer bytes than were read")?;
                self.memory[part.at..part.at + part.length_bytes].copy_from_slice(data);
            }
            let left = &mut self.parts_left[part.slot];
            *left -= 1;
            if *left == 0 {
                ended.push(part.slot);
            }
        }
        Ok(())
    }

    /// Marks the frames that have had no answer for too long.
    fn repeat(&mut self) {
        let now = Instant::now();
        for frame in self.in_progress.iter_mut().flatten() {
            if !frame.is_unsent && now.duration_since(frame.sent) >= RETRY_AFTER {
                frame.is_unsent = true;
                self.repetitions += 1;
            }
        }
    }
}

impl Client for Aoe {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn begin(&mut self, slot: usize, transfer: Transfer) -> Result<()> {
        let start = slot * transfer.length_bytes;
        self.parts_left[slot] = 0;
        for at in (0..transfer.length_bytes).step_by(SECTORS_MAX * SECTOR_BYTES) {
            self.parts_left[slot] += 1;
            self.unsent.push_back(Part {
                slot,
                at: start + at,
                offset_bytes: transfer.offset_bytes + at as u64,
                length_bytes: (transfer.length_bytes - at).min(SECTORS_MAX * SECTOR_BYTES),
                is_write: transfer.is_write,
            });
        }
        Ok(())
    }

    fn wait(&mut self, ended: &mut Vec<usize>) -> Result<()> {
        let before = ended.len();
        loop {
            self.send()?;
            if ended.len() > before {
                return Ok(());
            }
            let has_answer = wait_readable(self.socket.as_fd(), Some(RETRY_AFTER))?;
            self.waits += 1;
            // While other frames are answered, it is enough to look now and then.
            if !has_answer || self.waits.is_multiple_of(64) {
                self.repeat();
            }
            if has_answer {
                self.receive(ended)?;
            }
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn get(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.memory[at..at + bytes.len()]);
    }

    fn repetitions(&self) -> Option<u64> {
        Some(self.repetitions)
    }
}
