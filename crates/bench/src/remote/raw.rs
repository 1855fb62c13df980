//! Ceilings: frames between two packet sockets, without any protocol, through the same socket layer that Jericho and the AoE client use.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use jericho_sys::packet::{Frames, PacketSocket};
use jericho_sys::process::wait_readable;
use serde::Serialize;

use crate::Result;
use crate::remote::hosts::{Host, Running};

const ETHERTYPE: u16 = 0x88B6;
const RECEIVE_BYTES: usize = 16 << 20;
/// Memory that a frame of 8 KiB takes in a receive buffer, at most.
const FRAME_MEMORY_BYTES: usize = 16 << 10;
const FRAME_BYTES_MAX: usize = 9014;
/// Header of a frame: that of Ethernet, what the frame asks for, and a count.
const HEADER_BYTES: usize = 64;
const KIND_AT: usize = 14;
const COUNT_AT: usize = 16;
const ECHO: u8 = 1;
const STREAM: u8 = 2;
/// Bytes of the payload of a frame of a stream: those of a full DATA frame of Jericho.
const PAYLOAD_BYTES: usize = 8192;
/// Frames of a stream that are not counted yet by the other end, at most. More than half of what Jericho has in flight.
const WINDOW_MAX: usize = 512;
/// Frames that are sent or received together.
const TOGETHER: usize = 32;
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// What frames reach in a round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ceilings {
    /// Time of a frame of 64 bytes and its echo.
    pub ping_64b_us: f64,
    /// Time of a frame of 4 KiB and its echo.
    pub ping_4k_us: f64,
    /// Payload of frames of 8 KiB in one direction.
    pub stream_bytes_per_s: f64,
}

fn head(to: [u8; 6], from: [u8; 6], kind: u8, count: u64) -> [u8; HEADER_BYTES] {
    let mut head = [0; HEADER_BYTES];
    head[..6].copy_from_slice(&to);
    head[6..12].copy_from_slice(&from);
    head[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    head[KIND_AT] = kind;
    head[COUNT_AT..COUNT_AT + 8].copy_from_slice(&count.to_le_bytes());
    head
}

fn sender(frame: &[u8]) -> [u8; 6] {
    frame[6..12].first_chunk().copied().unwrap_or_default()
}

/// Answers frames on an interface, for ever: echoes, and counts those of a stream.
pub fn answer(interface: &str) -> Result<()> {
    let socket = PacketSocket::open(interface, ETHERTYPE, RECEIVE_BYTES)?;
    let mut frames = Frames::new(TOGETHER, FRAME_BYTES_MAX);
    let mut streamed = 0;
    println!("answering on {interface}");
    loop {
        wait_readable(socket.as_fd(), None)?;
        socket.receive_many(&mut frames)?;
        let mut counts_for = None;
        for frame in frames.iter().filter(|frame| frame.len() >= HEADER_BYTES) {
            if frame[KIND_AT] == STREAM {
                streamed += 1;
                counts_for = Some(sender(frame));
                continue;
            }
            // A new measurement.
            streamed = 0;
            let head = head(sender(frame), socket.mac(), ECHO, 0);
            socket.send_many(&[[IoSlice::new(&head), IoSlice::new(&frame[HEADER_BYTES..])]])?;
        }
        if let Some(to) = counts_for {
            let head = head(to, socket.mac(), STREAM, streamed);
            socket.send_many(&[[IoSlice::new(&head), IoSlice::new(&[])]])?;
        }
    }
}

/// A pair of sockets: this end, and a process that answers.
pub struct Raw {
    socket: PacketSocket,
    frames: Frames,
    payload: Vec<u8>,
    /// Frames of a stream that are not counted yet by the other end, at most. The receive buffer has room for them.
    window: u64,
    _answering: Running,
}

impl Raw {
    /// Starts the process that answers on the interface `there` of a host.
    pub fn new(host: &Host, here: &str, there: &str, log: &Path) -> Result<Raw> {
        let me = std::env::current_exe()?.display().to_string();
        let mut command = host.command(&me);
        // The options that a run needs have no meaning for it.
        command.args(["--answer", there]);
        let answering = host.start(&mut command, log)?;
        crate::remote::hosts::until("the process that answers frames", || {
            Ok(std::fs::read_to_string(log)?.contains("answering"))
        })?;
        let socket = PacketSocket::open(here, ETHERTYPE, RECEIVE_BYTES)?;
        let window = (socket.receive_bytes() / FRAME_MEMORY_BYTES).clamp(1, WINDOW_MAX);
        Ok(Raw {
            socket,
            window: window as u64,
            frames: Frames::new(TOGETHER, FRAME_BYTES_MAX),
            payload: vec![0x5A; PAYLOAD_BYTES],
            _answering: answering,
        })
    }

    /// Measures all ceilings for a time each.
    pub fn measure(&mut self, time: Duration) -> Result<Ceilings> {
        Ok(Ceilings {
            ping_64b_us: self.ping_us(0, time)?,
            ping_4k_us: self.ping_us(4096, time)?,
            stream_bytes_per_s: self.stream_bytes_per_s(time)?,
        })
    }

    fn receive(&mut self) -> Result<()> {
        if !wait_readable(self.socket.as_fd(), Some(ANSWER_WITHIN))? {
            return Err(
                "raw frames were lost: is the receive buffer too small (net.core.rmem_max)?".into(),
            );
        }
        self.socket.receive_many(&mut self.frames)?;
        Ok(())
    }

    /// Waits for the other end's count of the frames of a stream.
    fn counted(&mut self) -> Result<u64> {
        self.receive()?;
        let whole = self
            .frames
            .iter()
            .filter(|frame| frame.len() >= HEADER_BYTES);
        let counts = whole.map(|frame| {
            let count = frame[COUNT_AT..].first_chunk().copied().unwrap_or_default();
            u64::from_le_bytes(count)
        });
        Ok(counts.max().unwrap_or(0))
    }

    /// Measures the time of a frame and its echo. The answering end has the address of a broadcast.
    fn ping_us(&mut self, payload_bytes: usize, time: Duration) -> Result<f64> {
        let head = head([0xFF; 6], self.socket.mac(), ECHO, 0);
        let (start, mut count) = (Instant::now(), 0_u32);
        loop {
            let payload = IoSlice::new(&self.payload[..payload_bytes]);
            self.socket.send_many(&[[IoSlice::new(&head), payload]])?;
            self.receive()?;
            count += 1;
            let passed = start.elapsed();
            if passed >= time {
                return Ok(passed.as_secs_f64() * 1e6 / f64::from(count));
            }
        }
    }

    fn stream_bytes_per_s(&mut self, time: Duration) -> Result<f64> {
        // Sets the count of the other end to zero.
        self.ping_us(0, Duration::ZERO)?;
        let head = head([0xFF; 6], self.socket.mac(), STREAM, 0);
        let (mut sent, mut counted) = (0_u64, 0_u64);
        let start = Instant::now();
        while start.elapsed() < time {
            let room = (self.window - (sent - counted)).min(TOGETHER as u64) as usize;
            let frame = [IoSlice::new(&head), IoSlice::new(&self.payload)];
            let batch = [frame; TOGETHER];
            if room > 0 {
                sent += self.socket.send_many(&batch[..room])? as u64;
            }
            if sent - counted < self.window
                && !wait_readable(self.socket.as_fd(), Some(Duration::ZERO))?
            {
                continue;
            }
            counted = counted.max(self.counted()?);
        }
        let rate = (counted * PAYLOAD_BYTES as u64) as f64 / start.elapsed().as_secs_f64();
        while counted < sent {
            counted = counted.max(self.counted()?);
        }
        Ok(rate)
    }
}
