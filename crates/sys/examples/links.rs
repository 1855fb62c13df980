//! Compares packet sockets with XDP sockets on a pair of joined interfaces: echoes, and a stream of frames in one direction.
//!
//! Needs root. It makes no interfaces:
//! unshare -n sh -c 'ip link add a0 mtu 9000 type veth peer name b0 mtu 9000; ip link set a0 up; ip link set b0 up; exec links a0 b0 ROUNDS MILLISECONDS'

use std::error::Error;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jericho_sys::affinity;
use jericho_sys::packet::{Frames, PacketSocket};
use jericho_sys::poller::Poller;
use jericho_sys::xdp::{Numbers, Selection, XdpSocket};

const ETHERTYPE: u16 = 0x88B6;
const TOGETHER: usize = 32;
const FRAME_BYTES_MAX: usize = 9018;
const PAYLOAD_BYTES: usize = 8192;
/// Frames that are not received yet, at most. A virtual interface holds 256 for an XDP program.
const WINDOW: u64 = 192;
const BURST: u64 = 32;
/// What waits for an answer that was lost gives up.
const PATIENCE: Duration = Duration::from_millis(500);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A side: which socket sends and which one receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode {
    name: &'static str,
    sends_xdp: bool,
    receives_xdp: bool,
}

const MODES: [Mode; 4] = [
    Mode {
        name: "packet",
        sends_xdp: false,
        receives_xdp: false,
    },
    Mode {
        name: "xdp",
        sends_xdp: true,
        receives_xdp: true,
    },
    Mode {
        name: "send packet, receive xdp",
        sends_xdp: false,
        receives_xdp: true,
    },
    Mode {
        name: "send xdp, receive packet",
        sends_xdp: true,
        receives_xdp: false,
    },
];

struct End {
    packet: PacketSocket,
    xdp: Option<XdpSocket>,
    mode: Mode,
    poller: Poller,
}

impl End {
    fn open(interface: &str, mode: Mode) -> Result<End> {
        let packet = PacketSocket::open(interface, ETHERTYPE, 16 << 20)?;
        let selection = Selection {
            ethertype: ETHERTYPE,
            flags_at: 14,
            flags_mask: 0,
            flags: 0,
            number_at: 16,
            // No number is listed: the program lets all frames pass.
            numbers: match mode.receives_xdp {
                true => Numbers::AllButZero,
                false => Numbers::Listed,
            },
        };
        let xdp = match mode.sends_xdp || mode.receives_xdp {
            true => {
                let of = (packet.mac(), packet.mtu());
                Some(XdpSocket::open(interface, of, &selection, None)?)
            }
            false => None,
        };
        let poller = Poller::new()?;
        match &xdp {
            Some(xdp) if mode.receives_xdp => {
                for fd in xdp.fds() {
                    poller.add(fd, 0)?;
                }
            }
            _ => poller.add(&packet, 0)?,
        }
        Ok(End {
            packet,
            xdp,
            mode,
            poller,
        })
    }

    fn send(&self, mut frames: &[[IoSlice<'_>; 2]]) {
        while !frames.is_empty() {
            let sent = match &self.xdp {
                Some(xdp) if self.mode.sends_xdp => xdp.send_many(frames),
                _ => self.packet.send_many(frames),
            };
            frames = &frames[sent.unwrap_or(0)..];
        }
    }

    fn receive(&self, frames: &mut Frames) -> usize {
        let _ = match &self.xdp {
            Some(xdp) if self.mode.receives_xdp => xdp.receive_many(frames),
            _ => self.packet.receive_many(frames).unwrap_or(false),
        };
        frames.iter().count()
    }

    /// Waits for frames. Returns their number: 0 after a time without any.
    fn await_frames(&self, frames: &mut Frames) -> Result<usize> {
        let start = Instant::now();
        loop {
            let count = self.receive(frames);
            if count > 0 || start.elapsed() > PATIENCE {
                return Ok(count);
            }
            self.poller
                .wait(&mut Vec::new(), Some(Duration::from_millis(50)))?;
        }
    }
}

/// `number` must not be zero where an XDP socket receives.
fn head(to: &End, from: &End, number: u32) -> [u8; 64] {
    let mut head = [0; 64];
    head[..6].copy_from_slice(&to.packet.mac());
    head[6..12].copy_from_slice(&from.packet.mac());
    head[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    head[16..20].copy_from_slice(&number.to_ne_bytes());
    head
}

/// Returns microseconds of an echo: the median, and the mean.
fn echo_us(near: &End, far: &End, payload: usize, time: Duration) -> Result<(f64, f64)> {
    let ends = AtomicBool::new(false);
    let payload = vec![7; payload];
    std::thread::scope(|scope| {
        let (ends, payload) = (&ends, &payload);
        scope.spawn(move || {
            let _ = affinity::set(None, &[1]);
            let mut frames = Frames::new(TOGETHER, FRAME_BYTES_MAX);
            let head = head(near, far, 1);
            while !ends.load(Ordering::Relaxed) {
                for _ in 0..far.await_frames(&mut frames).unwrap_or(0) {
                    far.send(&[[IoSlice::new(&head), IoSlice::new(payload)]]);
                }
            }
        });
        let mut frames = Frames::new(TOGETHER, FRAME_BYTES_MAX);
        let head = head(far, near, 1);
        let start = Instant::now();
        let mut times = Vec::new();
        while start.elapsed() < time {
            let sent = Instant::now();
            near.send(&[[IoSlice::new(&head), IoSlice::new(payload)]]);
            if near.await_frames(&mut frames)? == 0 {
                eprintln!("an echo was lost");
            }
            if sent.elapsed() > Duration::from_millis(20) {
                eprintln!(
                    "{}: echo {} took {:?}",
                    near.mode.name,
                    times.len(),
                    sent.elapsed()
                );
            }
            times.push(sent.elapsed().as_secs_f64() * 1e6);
        }
        ends.store(true, Ordering::Relaxed);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        Ok((median(&mut times), mean))
    })
}

/// Returns bytes of payload a second, busy microseconds of all CPUs for a frame, and frames that were lost.
fn stream(near: &End, far: &End, payload: usize, time: Duration) -> Result<(f64, f64, u64)> {
    let ends = AtomicBool::new(false);
    let count = AtomicU64::new(0);
    let payload = vec![7; payload];
    std::thread::scope(|scope| {
        let (ends, count) = (&ends, &count);
        scope.spawn(move || {
            let _ = affinity::set(None, &[1]);
            let mut frames = Frames::new(TOGETHER, FRAME_BYTES_MAX);
            while !ends.load(Ordering::Relaxed) {
                let received = far.await_frames(&mut frames).unwrap_or(0);
                count.fetch_add(received as u64, Ordering::Relaxed);
            }
        });
        let head = head(far, near, 1);
        let one = [IoSlice::new(&head), IoSlice::new(&payload)];
        let burst = vec![one; BURST as usize];
        let (start, busy) = (Instant::now(), busy_us());
        let (mut sent, mut lost) = (0, 0);
        let mut moved = (0, Instant::now());
        while start.elapsed() < time {
            let counted = count.load(Ordering::Relaxed);
            if counted != moved.0 {
                moved = (counted, Instant::now());
            }
            if sent - lost - counted + BURST <= WINDOW {
                near.send(&burst);
                sent += BURST;
            } else if moved.1.elapsed() > Duration::from_millis(20) {
                lost = sent - counted;
            } else {
                std::thread::yield_now();
            }
        }
        let counted = count.load(Ordering::Relaxed);
        let (took, busy) = (start.elapsed().as_secs_f64(), busy_us() - busy);
        ends.store(true, Ordering::Relaxed);
        let rate = counted as f64 * payload.len() as f64 / took;
        Ok((rate, busy / counted as f64, lost))
    })
}

/// Returns the time for which all CPUs have been busy, with all processes.
fn busy_us() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = text.lines().next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // All but idle and iowait.
    let busy = [0, 1, 2, 5, 6].map(|at| ticks.get(at).copied().unwrap_or(0.0));
    busy.iter().sum::<f64>() * 10_000.0
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [a, b, rounds, milliseconds] = &arguments[..] else {
        return Err("arguments: INTERFACE INTERFACE ROUNDS MILLISECONDS".into());
    };
    let time = Duration::from_millis(milliseconds.parse()?);
    affinity::set(None, &[0])?;
    let names = [
        "echo 64 B us",
        "echo 4 KiB us",
        "echo 8 KiB us",
        "stream 8 KiB MB/s",
        "CPU us/frame",
        "lost",
        "stream 64 B frames/s",
    ];
    let mut all = vec![vec![Vec::new(); names.len()]; MODES.len()];
    for round in 0..rounds.parse::<usize>()? {
        for turn in 0..MODES.len() {
            let at = (turn + round) % MODES.len();
            let (near, far) = (End::open(a, MODES[at])?, End::open(b, MODES[at])?);
            let mut values = Vec::new();
            for payload in [0, 4096, PAYLOAD_BYTES] {
                values.push(echo_us(&near, &far, payload, time)?.0);
            }
            let (rate, cpu, lost) = stream(&near, &far, PAYLOAD_BYTES, time)?;
            values.extend([rate / 1e6, cpu, lost as f64]);
            let (rate, ..) = stream(&near, &far, 64, time)?;
            values.push(rate / 64.0);
            for (column, value) in values.into_iter().enumerate() {
                all[at][column].push(value);
            }
        }
    }
    for (mode, columns) in MODES.iter().zip(&mut all) {
        println!("{}", mode.name);
        for (name, values) in names.iter().zip(columns) {
            let middle = median(values);
            let (least, most) = (values[0], values[values.len() - 1]);
            println!("  {name}: {middle:.1} ({least:.1}..{most:.1})");
        }
    }
    Ok(())
}
