//! Forwards frames between two network interfaces through a bad link. One thread waits for frames, due times and signals.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use jericho_badlink::{Counts, Direction, Faults};
use jericho_ether::PacketError;
use jericho_sys::errno;
use jericho_sys::poller::Poller;
use jericho_sys::port::Port;
use jericho_sys::timer::Timer;

/// Size of a receive buffer; the kernel may give less.
const RECEIVE_BYTES: usize = 8 << 20;
/// Frames taken from one interface before the other one has its turn.
const FRAMES_AT_ONCE: usize = 64;
/// Most rounds in which frames are taken at the end, so that a flood does not delay it.
const ROUNDS_AT_END: u32 = 64;
/// Keys of the poller. The interfaces have 0 and 1.
const CUT: u64 = 2;
const END: u64 = 3;
const TIMER: u64 = 4;

/// Sockets that receive a byte with each signal.
pub struct Bells {
    /// Cuts the link, or joins it again.
    pub cut: UnixStream,
    /// Ends the forwarding.
    pub end: UnixStream,
}

/// Two interfaces with a bad link between them.
pub struct Forwarder {
    sides: [Side; 2],
}

/// One interface.
struct Side {
    name: String,
    port: Port,
    /// The frames that come in here.
    direction: Direction,
    has_warned: bool,
}

impl Forwarder {
    /// Opens the interfaces.
    pub fn open(names: [&str; 2], seed: u64, faults: Faults) -> Result<Forwarder, PacketError> {
        let open = |direction: u64| {
            let name = names[direction as usize];
            Ok(Side {
                name: name.to_owned(),
                port: Port::open(name, RECEIVE_BYTES)?,
                direction: Direction::new(seed, direction, faults),
                has_warned: false,
            })
        };
        Ok(Forwarder {
            sides: [open(0)?, open(1)?],
        })
    }

    /// Returns the numbers of the interfaces.
    pub fn indices(&self) -> [i32; 2] {
        self.sides.each_ref().map(|side| side.port.index())
    }

    /// Returns the MTUs of the interfaces.
    pub fn mtus(&self) -> [usize; 2] {
        self.sides.each_ref().map(|side| side.port.mtu())
    }

    /// Forwards frames until the bell `end` has a byte. Returns what happened to the frames that came in on each interface.
    pub fn run(mut self, bells: &Bells) -> io::Result<[Counts; 2]> {
        let poller = Poller::new()?;
        for (key, side) in (0..).zip(&self.sides) {
            poller.add(&side.port, key)?;
        }
        poller.add(&bells.cut, CUT)?;
        poller.add(&bells.end, END)?;
        // The poller alone would round times up to milliseconds.
        let timer = Timer::new()?;
        poller.add(&timer, TIMER)?;
        let start = Instant::now();
        let (mut ready, mut has_more, mut is_cut) = (Vec::new(), false, false);
        let mut timer_time = None;
        loop {
            let next = self.next_time();
            if let Some(time) = next
                && next != timer_time
            {
                timer.set(time.saturating_sub(start.elapsed()))?;
                timer_time = next;
            }
            ready.clear();
            poller.wait(&mut ready, has_more.then_some(Duration::ZERO))?;
            if ready.contains(&END) {
                break;
            }
            if ready.contains(&TIMER) {
                timer.clear();
                timer_time = None;
            }
            if ready.contains(&CUT) && rings_of(&bells.cut) % 2 == 1 {
                is_cut = !is_cut;
                self.set_cut(is_cut);
            }
            let now = start.elapsed();
            has_more = false;
            for side in &mut self.sides {
                has_more |= side.receive(now);
            }
            let [first, second] = &mut self.sides;
            first.deliver(now, second);
            second.deliver(now, first);
        }
        // What has arrived and was not forwarded counts as dropped.
        let now = start.elapsed();
        for side in &mut self.sides {
            (0..ROUNDS_AT_END).take_while(|_| side.receive(now)).count();
        }
        Ok(self.sides.map(|mut side| {
            side.direction.missed(side.port.take_lost());
            side.direction.finish()
        }))
    }

    /// Returns when the next frame is due.
    fn next_time(&self) -> Option<Duration> {
        let times = self.sides.iter().map(|side| side.direction.next_time());
        times.flatten().min()
    }

    fn set_cut(&mut self, is_cut: bool) {
        for side in &mut self.sides {
            side.direction.set_cut(is_cut);
        }
        match is_cut {
            true => tracing::info!("the link is cut until the next SIGUSR1"),
            false => tracing::info!("the link is joined again"),
        }
    }
}

impl Side {
    /// Takes frames that have come in. Returns whether more may have come.
    fn receive(&mut self, now: Duration) -> bool {
        for _ in 0..FRAMES_AT_ONCE {
            let direction = &mut self.direction;
            match self.port.receive(|frame| direction.send(now, frame)) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => {
                    let name = &self.name;
                    tracing::warn!(%error, "the network interface {name} went down; if it was removed, start again");
                    return false;
                }
            }
        }
        true
    }

    /// Sends the frames that are due out of the other interface.
    fn deliver(&mut self, now: Duration, other: &mut Side) {
        while let Some(frame) = self.direction.receive(now) {
            let sent = other.port.send(&frame);
            self.direction.arrived(sent.is_ok());
            if let Err(error) = sent {
                other.refused(&frame, &error);
            }
        }
    }

    /// Warns of frames that the interface does not send, once. A full queue is normal.
    fn refused(&mut self, frame: &[u8], error: &io::Error) {
        let is_full = matches!(
            error.raw_os_error(),
            Some(errno::EAGAIN | errno::ENOBUFS | errno::EINTR)
        );
        if !is_full && !std::mem::replace(&mut self.has_warned, true) {
            let (name, bytes) = (&self.name, frame.len());
            tracing::warn!(%error, "{name} did not send a frame of {bytes} bytes; no more warnings of this kind follow");
        }
    }
}

/// Returns how many bytes a bell has, and takes them.
fn rings_of(mut bell: &UnixStream) -> usize {
    let (mut rings, mut bytes) = (0, [0; 64]);
    while let Ok(read @ 1..) = bell.read(&mut bytes) {
        rings += read;
    }
    rings
}
