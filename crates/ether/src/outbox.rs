//! Frames that wait to be sent on a network interface, and the threads that send them.
//!
//! A thread puts frames in while it has the lock of the protocol, so they are in the order of their numbers. It sends them without that lock. With `Mode::Inline` each thread sends
//! what waits. With `Mode::Queue` threads of the interface do (section 3 of the Tyche paper has both). In both cases several threads seal frames side by side, and send them in
//! turn: a frame that overtakes others makes the peer believe that these are lost.
//!
//! A frame refers to pages of a pool, and is sealed later. Meanwhile its request may have ended, and the pages may have other bytes. The peer has ended the request,
//! too, so it drops the frame: rule 1 of `docs/formats/wire.md`. A replay that fails gives its pages back earlier; no request gets them before all requests of the replay have ended.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jericho_format::wire::HEADER_BYTES;
use jericho_remote::Frame;
use jericho_storage::LockStat;
use jericho_sys::memory::Mapping;
use jericho_sys::service;
use jericho_topology::Topology;

use crate::lock::{TimedLock, unpoisoned};
use crate::placement;
use crate::socket::Socket;

/// Frames that are sent with one system call.
const FRAMES_AT_ONCE: usize = 32;
/// Sending threads of an interface with `Mode::Queue`: one sends while others seal. Tyche has three for each channel (section 3).
const SENDERS: usize = 3;
/// With this many waiting frames, a thread that adds frames sends some itself. Without this limit, a stranger whose frames are answered could fill the memory.
const WAITING_FRAMES_MAX: usize = 4096;
/// How often `Mode::Auto` looks at an interface.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Threads that wait for their turn to send, in the mean, from which sending threads are used.
const WAITING_MAX: f64 = 1.0;
/// Calls of `send` for each batch of the sending threads, in the mean, below which threads send themselves again.
const CALLS_MIN: f64 = 1.5;

/// Who sends frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The thread that has them.
    Inline,
    /// Threads of the network interface.
    Queue,
    /// The thread that has them; threads of the interface while more than one thread waits for its turn.
    #[default]
    Auto,
}

/// The outboxes of all interfaces of a process.
pub(crate) struct Outboxes {
    all: Vec<Arc<Outbox>>,
    senders: Mutex<Vec<JoinHandle<()>>>,
}

impl Outboxes {
    /// Returns empty outboxes, one for each socket, with the name and the node of its interface.
    pub fn new(sockets: &Arc<Vec<Socket>>, names: &[String], mode: Mode) -> Outboxes {
        let outbox = |(nic, name): (usize, &String)| {
            Arc::new(Outbox {
                sockets: Arc::clone(sockets),
                nic,
                name: name.clone(),
                mode,
                has_senders: AtomicBool::new(mode == Mode::Queue),
                waiting: TimedLock::new(Waiting::default()),
                frames: AtomicUsize::new(0),
                added: Condvar::new(),
                turn: TimedLock::new(0),
                turned: Condvar::new(),
                rooms: Mutex::default(),
                looked: Mutex::new(Looked {
                    at: Instant::now(),
                    wait: Duration::ZERO,
                    calls: 0,
                    batches: 0,
                    agreeing: 0,
                }),
                calls: AtomicU64::new(0),
            })
        };
        Outboxes {
            all: names.iter().enumerate().map(outbox).collect(),
            senders: Mutex::default(),
        }
    }

    /// Starts the sending threads, which may be needed unless the mode is `Mode::Inline`. `nodes` are the interfaces' nodes.
    pub fn start(&self, topology: &Arc<Topology>, nodes: &[Option<u32>]) -> std::io::Result<()> {
        let mut senders = unpoisoned(&self.senders);
        for (outbox, &node) in self.all.iter().zip(nodes) {
            let count = match outbox.mode {
                Mode::Inline => 0,
                _ => SENDERS,
            };
            for number in 0..count {
                let (outbox, topology) = (Arc::clone(outbox), Arc::clone(topology));
                let name = format!("send-{}-{number}", outbox.nic);
                senders.push(service::spawn(name, move || {
                    placement::pin(&topology, node);
                    outbox.run();
                })?);
            }
        }
        Ok(())
    }

    /// Ends the sending threads. Frames that wait are not sent any more.
    pub fn stop(&self) {
        for outbox in &self.all {
            outbox.waiting.lock().is_closed = true;
            outbox.added.notify_all();
        }
        for sender in unpoisoned(&self.senders).drain(..) {
            // A panic in a thread has ended the process.
            let _ = sender.join();
        }
    }

    /// Puts in a frame, whose bytes may be in a pool. The caller has the lock of the protocol, and calls `send` without it.
    pub fn add(&self, frame: Frame, pool: Option<Arc<Mapping>>) {
        let outbox = &self.all[usize::from(frame.link) % self.all.len()];
        let mut waiting = outbox.waiting.lock();
        waiting.frames.push_back(Outgoing { frame, pool });
        outbox.frames.store(waiting.frames.len(), Ordering::Release);
    }

    /// Has the frames sent that wait: by this thread or, by the mode, by others.
    pub fn send(&self) {
        for outbox in &self.all {
            outbox.send();
        }
    }

    /// Returns whether threads of an interface send its frames at present.
    pub fn is_queueing(&self, nic: usize) -> bool {
        self.all[nic].has_senders.load(Ordering::Relaxed)
    }

    /// Returns what is known of the locks.
    pub fn locks(&self) -> Vec<LockStat> {
        let of = |outbox: &Arc<Outbox>| {
            [
                outbox
                    .turn
                    .status()
                    .named(&format!("interface {}", outbox.name)),
                outbox
                    .waiting
                    .status()
                    .named(&format!("queue of {}", outbox.name)),
            ]
        };
        self.all.iter().flat_map(of).collect()
    }
}

impl Drop for Outboxes {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A frame, and the pool that has its bytes.
struct Outgoing {
    frame: Frame,
    pool: Option<Arc<Mapping>>,
}

#[derive(Default)]
struct Waiting {
    frames: VecDeque<Outgoing>,
    /// Batches of frames that were taken: the number of the next one.
    taken: u64,
    is_closed: bool,
}

/// Room for the bytes of frames that are sent together.
type Rooms = Vec<Vec<u8>>;

struct Outbox {
    sockets: Arc<Vec<Socket>>,
    nic: usize,
    name: String,
    mode: Mode,
    /// Threads of the interface send.
    has_senders: AtomicBool,
    waiting: TimedLock<Waiting>,
    /// Length of `waiting.frames`.
    frames: AtomicUsize,
    /// Frames were added, for the sending threads.
    added: Condvar,
    /// The number of the batch that may be sent: the counterpart of Tyche's lock of an interface.
    turn: TimedLock<u64>,
    turned: Condvar,
    rooms: Mutex<Vec<Rooms>>,
    looked: Mutex<Looked>,
    /// Calls of `send` that left frames to the sending threads.
    calls: AtomicU64,
}

/// What `Mode::Auto` has seen at its last look.
struct Looked {
    at: Instant,
    /// Time that threads have waited for their turn.
    wait: Duration,
    /// Calls of `send` until then.
    calls: u64,
    /// Batches that were sent since.
    batches: u64,
    /// Looks in a row that wanted a change.
    agreeing: u32,
}

impl Outbox {
    fn send(&self) {
        loop {
            let waiting = self.frames.load(Ordering::Acquire);
            if waiting == 0 {
                return;
            }
            if self.has_senders.load(Ordering::Relaxed) && waiting < WAITING_FRAMES_MAX {
                self.calls.fetch_add(1, Ordering::Relaxed);
                self.added.notify_one();
                return;
            }
            self.send_batch(false);
        }
    }

    /// Sends frames while there are any, and sleeps while there are none.
    fn run(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            while !waiting.is_closed && waiting.frames.is_empty() {
                waiting = waiting.wait(&self.added);
            }
            if waiting.is_closed {
                return;
            }
            drop(waiting);
            self.send_batch(true);
        }
    }

    /// Takes some frames, seals them, and sends them in turn.
    fn send_batch(&self, by_sender: bool) {
        let (frames, number, has_more) = {
            let mut waiting = self.waiting.lock();
            let count = waiting.frames.len().min(FRAMES_AT_ONCE);
            if count == 0 {
                return;
            }
            let frames: Vec<Outgoing> = waiting.frames.drain(..count).collect();
            waiting.taken += 1;
            self.frames.store(waiting.frames.len(), Ordering::Release);
            (frames, waiting.taken - 1, !waiting.frames.is_empty())
        };
        if by_sender && has_more {
            self.added.notify_one();
        }
        // A batch that is never sent stops all later ones, so a panic ends the process.
        service::run(|| {
            let mut rooms = unpoisoned(&self.rooms).pop().unwrap_or_default();
            rooms.resize_with(rooms.len().max(frames.len()), Vec::new);
            for (Outgoing { frame, pool }, room) in frames.iter().zip(&mut rooms) {
                frame.seal_into(room, |at, out| match pool {
                    Some(pool) => pool.copy_out(at, out),
                    None => out.fill(0),
                });
            }
            let pieces: Vec<_> = rooms[..frames.len()]
                .iter()
                .map(|bytes| bytes.split_at(HEADER_BYTES))
                .map(|(header, rest)| [header, rest].map(IoSlice::new))
                .collect();
            let mut turn = self.turn.lock_when(&self.turned, |turn| *turn == number);
            send_all(&self.sockets[self.nic], &pieces);
            *turn += 1;
            drop(turn);
            self.turned.notify_all();
            drop(pieces);
            unpoisoned(&self.rooms).push(rooms);
        });
        if self.mode == Mode::Auto {
            self.look();
        }
    }

    /// Decides who sends from now on, from what threads have waited and found since the last look.
    fn look(&self) {
        let Ok(mut looked) = self.looked.try_lock() else {
            return;
        };
        looked.batches += 1;
        let age = looked.at.elapsed();
        if age < LOOK_INTERVAL {
            return;
        }
        let wait = self.turn.status().wait;
        let waited = (wait - looked.wait).as_secs_f64() / age.as_secs_f64();
        let calls = self.calls.load(Ordering::Relaxed);
        let found = (calls - looked.calls) as f64 / looked.batches as f64;
        let has_senders = self.has_senders.load(Ordering::Relaxed);
        let wants = match has_senders {
            false => waited > WAITING_MAX,
            true => found >= CALLS_MIN,
        };
        let agreeing = match wants == has_senders {
            true => 0,
            false => looked.agreeing + 1,
        };
        *looked = Looked {
            at: Instant::now(),
            wait,
            calls,
            batches: 0,
            agreeing: agreeing % 2,
        };
        if agreeing >= 2 {
            self.has_senders.store(wants, Ordering::Relaxed);
        }
    }
}

/// Sends frames. Leaves out those that the kernel refuses: the protocol repeats them.
fn send_all(socket: &Socket, mut frames: &[[IoSlice<'_>; 2]]) {
    while !frames.is_empty() {
        let taken = socket.send_many(frames).unwrap_or_else(|error| {
            tracing::trace!(%error, "a frame was not sent");
            1
        });
        frames = &frames[taken.max(1)..];
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use jericho_format::wire::FrameHeader;
    use jericho_remote::{Body, Seal};
    use jericho_sys::packet::Frames;
    use zerocopy::{FromBytes, FromZeros};

    use super::*;
    use crate::socket::{LinkChoice, Opening, Side};

    const INSIDE: &str = "JERICHO_TEST_INSIDE";

    /// Runs a test again in a network namespace with joined interfaces t0 and i0. Returns whether this process is inside.
    fn inside(test: &str) -> bool {
        if std::env::var_os(INSIDE).is_some() {
            return true;
        }
        let script = "ip link add t0 mtu 9000 type veth peer name i0 mtu 9000 && ip link set t0 up && ip link set i0 up && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["-Urn", "sh", "-c", script, "sh"]);
        command.arg(std::env::current_exe().expect("this program"));
        let test = format!("outbox::tests::{test}");
        command.args([&test, "--exact", "--nocapture"]);
        let status = command.env(INSIDE, "1").status();
        assert!(status.expect("unshare(1)").success(), "{test}");
        false
    }

    fn socket(interface: &str) -> Socket {
        let opening = Opening {
            ethertype: 0x88B5,
            choice: LinkChoice::Packet,
            side: Side::Initiator,
        };
        opening.open(interface, None).expect("a socket")
    }

    /// The threads of the interface are as slow as can be: they are not there.
    #[test]
    fn frames_that_wait_for_a_slow_sender_are_limited_and_stay_in_order() {
        if !inside("frames_that_wait_for_a_slow_sender_are_limited_and_stay_in_order") {
            return;
        }
        let (own, peer) = (socket("t0"), socket("i0"));
        let mut header = FrameHeader::new_zeroed();
        header.source = own.mac();
        header.destination = peer.mac();
        header.ethertype = zerocopy::byteorder::big_endian::U16::new(0x88B5);
        let outboxes = Outboxes::new(&Arc::new(vec![own]), &["t0".to_owned()], Mode::Queue);
        let outbox = &outboxes.all[0];
        let mut received = Frames::new(FRAMES_AT_ONCE, 9018);
        let mut numbers = Vec::new();
        for number in 0..3 * WAITING_FRAMES_MAX as u64 {
            let mut header = header;
            header.number = number.into();
            let frame = Frame {
                link: 0,
                header,
                body: Body::Bytes(vec![0; 64]),
                seal: Seal::Checksum(0),
            };
            outboxes.add(frame, None);
            outboxes.send();
            let waiting = outbox.waiting.lock().frames.len();
            assert!(waiting <= WAITING_FRAMES_MAX, "{waiting} frames wait");
            peer.receive_many(&mut received).expect("no error");
            for frame in received.iter() {
                let (header, _) = FrameHeader::read_from_prefix(frame).expect("a header");
                numbers.push(header.number.get());
            }
        }
        // The thread that adds frames has sent the oldest ones. Between the two sockets, frames may be lost.
        assert!(numbers.len() > WAITING_FRAMES_MAX, "{}", numbers.len());
        assert!(numbers.is_sorted());
    }
}
