//! Sends sequences of requests to a daemon that serves programs: ioctls, connections to its socket, control attributes.
//!
//! Each target has a daemon of its own, which lives as long as the process. Each input opens the file and closes it at the end,
//! which undoes what the input did to the file's slot.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use jericho_daemon::{Asker, Handle, Mounted, OpenOptions, WriteMode};
use jericho_format::PAGE_BYTES;
use jericho_fs::types::{Ino, ROOT};
use jericho_fuse::control::{Control, SYNC, Target};
use jericho_shm::{
    Answer, CALL_BYTES, Call, ClientThread, HANDSHAKE_BYTES, Refusal, Reply, Request, socket_name,
};
use jericho_sys::handshake::Connection;
use jericho_sys::process::{effective_uid, gid};
use jericho_topology::Topology;
use jericho_volume::{OpenMode, Volume};

use crate::input::Input;
use crate::volume::sample;

/// A request that has no answer after this time hangs.
const HANGS: Duration = Duration::from_secs(60);
/// Most requests of one input.
const REQUESTS_MAX: usize = 32;
/// Most connections that an input keeps open.
const CONNECTIONS_MAX: usize = 8;

type Counts = BTreeMap<&'static str, u64>;

/// Returns the number of requests of a target by outcome, since the process began.
pub fn outcomes(target: &str) -> Counts {
    let counts = counts().lock().unwrap_or_else(PoisonError::into_inner);
    counts.get(target).cloned().unwrap_or_default()
}

fn counts() -> &'static Mutex<BTreeMap<&'static str, Counts>> {
    static COUNTS: Mutex<BTreeMap<&'static str, Counts>> = Mutex::new(BTreeMap::new());
    &COUNTS
}

/// Counts an outcome of a target.
pub(crate) fn count(target: &'static str, outcome: &'static str) {
    let mut counts = counts().lock().unwrap_or_else(PoisonError::into_inner);
    *counts
        .entry(target)
        .or_default()
        .entry(outcome)
        .or_default() += 1;
}

/// A daemon that serves programs, with a file of a few pages.
struct Bed {
    mounted: Arc<Mounted>,
    file: Ino,
    instance: u64,
    control: Control,
}

/// The file, opened by one input.
struct Opened<'b> {
    bed: &'b Bed,
    reading: Arc<Handle>,
    writing: Arc<Handle>,
}

/// Waits for the value that a request's callback sends.
fn wait<T>(answer: &mpsc::Receiver<T>) -> T {
    answer
        .recv_timeout(HANGS)
        .expect("every request is answered")
}

impl Bed {
    fn new() -> Bed {
        let volume = Volume::open_from_devices(vec![sample()], OpenMode::WRITE).expect("a volume");
        let options = OpenOptions {
            volume: PathBuf::from("memory"),
            devices: vec![],
            read_only: false,
            force: false,
            keeper: None,
            fast_path: Default::default(),
            cache_bytes: Some(8 << 20),
            spill_bytes: 0,
            topology: Topology::from_spec("virtual:2").expect("a topology"),
            threads: Default::default(),
            with_parent: false,
            move_costs: Default::default(),
        };
        let mounted = Mounted::open_volume(volume, &options).expect("a daemon");
        mounted.serve_clients(Arc::new(())).expect("the fast path");
        let file = mounted.fs().lookup(ROOT, b"file").expect("the file").ino;
        let mut bed = Bed {
            control: Control::new(mounted.clone(), false),
            mounted,
            file,
            instance: 0,
        };
        let opened = bed.open();
        opened.write(0, &[7; 3 * PAGE_BYTES as usize + 5]);
        let fast = Call::Fast {
            write: false,
            thread: None,
        };
        let granted = opened.call(&opened.reading, fast);
        assert_eq!(granted.status, 0, "the fast path is open");
        drop(opened);
        bed.instance = granted.instance;
        bed
    }

    fn open(&self) -> Opened<'_> {
        let open = |writable| {
            self.mounted
                .open_file(self.file, writable)
                .expect("a handle")
        };
        Opened {
            bed: self,
            reading: open(false),
            writing: open(true),
        }
    }

    /// Sends a request as this process, and returns the answer with the number of descriptors.
    fn ask(&self, token: u64, owner: u16) -> (Reply, usize) {
        let connection = self.connect();
        let request = Request { token, owner };
        connection
            .send(&request.encode(), &[])
            .expect("the daemon listens");
        received(&connection).expect("a request is answered")
    }

    fn connect(&self) -> Connection {
        Connection::connect(&socket_name(self.instance), HANGS).expect("the daemon listens")
    }
}

/// Receives all messages of a reply. Returns the reply and the number of descriptors; `None` when the daemon has closed.
fn received(connection: &Connection) -> Option<(Reply, usize)> {
    let mut bytes = [0; HANDSHAKE_BYTES];
    let (len, fds) = match connection.receive(&mut bytes) {
        Ok((0, _)) => return None,
        Ok(received) => received,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
        Err(error) => panic!("the daemon does not answer: {error}"),
    };
    Some((Reply::decode(&bytes[..len]).expect("a reply"), fds.len()))
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.bed.mounted.close_file(&self.reading);
        self.bed.mounted.close_file(&self.writing);
    }
}

impl Opened<'_> {
    fn call_by(&self, asker: Asker, handle: &Arc<Handle>, call: Call) -> Answer {
        let (send, answer) = mpsc::channel();
        self.bed.mounted.call(handle, call, asker, move |answer| {
            send.send(answer).expect("the fuzzer waits");
        });
        wait(&answer)
    }

    fn call(&self, handle: &Arc<Handle>, call: Call) -> Answer {
        self.call_by(own(), handle, call)
    }

    fn token(&self) -> u64 {
        self.call(&self.writing, Call::Token).token
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mode = WriteMode::PLAIN;
        let (send, written) = mpsc::channel();
        let reply = move |written| send.send(written).expect("the fuzzer waits");
        let mounted = &self.bed.mounted;
        mounted.write(&self.writing, offset, data, mode, reply);
        // The volume may be full because all space is reserved.
        let _ = wait(&written);
    }

    /// Returns this process's owner number, after asking for write access.
    fn become_writer(&self) -> u16 {
        self.bed.ask(self.token(), 0).0.owner
    }
}

/// Returns a thread of this process.
fn own() -> Asker {
    Asker {
        uid: effective_uid(),
        gid: gid(),
        thread: std::process::id(),
    }
}

/// Returns a page number: usually near the front, near the largest page, or any.
fn page(input: &mut Input<'_>) -> u64 {
    let (which, offset) = (input.number(1), input.number(1));
    match which % 4 {
        0 | 1 => offset % 16,
        2 => (jericho_format::FILE_BYTES_MAX / PAGE_BYTES)
            .wrapping_add(offset)
            .wrapping_sub(8),
        _ => input.number(8),
    }
}

/// Returns a number of pages, usually a small one.
fn pages(input: &mut Input<'_>) -> u32 {
    match input.number(1) {
        few @ 0..=199 => few as u32 % 20,
        _ => input.number(4) as u32,
    }
}

/// Returns `right` usually, otherwise any number.
fn usually(input: &mut Input<'_>, right: u64) -> u64 {
    match input.number(1) {
        0..=200 => right,
        _ => input.number(8),
    }
}

/// What `calls` does next.
enum Step<'d> {
    /// Makes a call. If the daemon grants it, it counts as this outcome.
    Call(Call, &'static str),
    /// Writes these bytes at this offset through the kernel.
    Write(u64, &'d [u8]),
}

/// Takes the next step of `calls` from the input. `owner`: the writer's number.
fn next_step<'d>(input: &mut Input<'d>, bed: &Bed, owner: u16) -> Step<'d> {
    let (call, outcome) = match input.number(1) % 9 {
        kind @ (0 | 1) => {
            let write = kind == 1;
            let thread = match input.number(1) {
                0..=99 => None,
                block => Some(ClientThread {
                    owner: (usually(input, u64::from(owner)) as u16).max(1),
                    block: usually(input, block % 4) as u32,
                    instance: usually(input, bed.instance),
                }),
            };
            let outcome = match write {
                true => "granted for writing",
                false => "granted for reading",
            };
            (Call::Fast { write, thread }, outcome)
        }
        2 => {
            let (first, pages) = (page(input), pages(input));
            (Call::ReadAhead { first, pages }, "read ahead")
        }
        kind @ (3 | 4) => {
            let soon = kind == 4;
            let call = Call::Reserve {
                first: page(input),
                pages: pages(input),
                soon,
            };
            let outcome = if soon { "reserved soon" } else { "reserved" };
            (call, outcome)
        }
        5 => {
            let call = Call::Interrupted {
                first: page(input),
                pages: pages(input),
                owner: usually(input, u64::from(owner)) as u16,
                instance: usually(input, bed.instance),
            };
            (call, "latches given up")
        }
        6 => {
            let call = Call::Copied {
                slice: input.number(1) as u16 % 4,
                frame: pages(input),
                owner: usually(input, u64::from(owner)) as u16,
                instance: usually(input, bed.instance),
            };
            (call, "copy ended")
        }
        7 if input.number(1).is_multiple_of(4) => (Call::Mapped, "mapped"),
        7 => {
            let (offset, within) = (page(input) % 64 * PAGE_BYTES, input.number(2));
            return Step::Write(offset + within % PAGE_BYTES, input.take(40));
        }
        _ => (Call::Token, "token given"),
    };
    Step::Call(call, outcome)
}

/// Makes ioctls on a file that is open for reading and for writing, with writes through the kernel in between.
pub fn calls(data: &[u8]) {
    static BED: OnceLock<Mutex<(Bed, u16)>> = OnceLock::new();
    let bed = BED.get_or_init(|| {
        let bed = Bed::new();
        let owner = bed.open().become_writer();
        Mutex::new((bed, owner))
    });
    let bed = bed.lock().unwrap_or_else(PoisonError::into_inner);
    let (bed, owner) = &*bed;
    decode(data);
    let opened = bed.open();
    let mut input = Input(data);
    for _ in 0..REQUESTS_MAX {
        if input.is_empty() {
            break;
        }
        let handle = match input.number(1) % 4 {
            0 => &opened.reading,
            _ => &opened.writing,
        };
        let (call, outcome) = match next_step(&mut input, bed, *owner) {
            Step::Call(call, outcome) => (call, outcome),
            Step::Write(at, bytes) => {
                opened.write(at, bytes);
                continue;
            }
        };
        let asker = Asker {
            uid: usually(&mut input, effective_uid().into()) as u32,
            gid: usually(&mut input, gid().into()) as u32,
            thread: usually(&mut input, std::process::id().into()) as u32,
        };
        let answer = opened.call_by(asker, handle, call);
        let names_us = match call {
            Call::Interrupted {
                owner: o,
                instance: i,
                ..
            }
            | Call::Copied {
                owner: o,
                instance: i,
                ..
            } => o == *owner && i == bed.instance,
            _ => true,
        };
        match answer.status {
            0 if names_us => count("calls", outcome),
            0 => count("calls", "nothing to do"),
            off if off == Refusal::Off as u32 => panic!("the fast path is off: {call:?}"),
            _ => count("calls", "refused"),
        }
    }
}

/// Decodes an ioctl's bytes, as they are and with this protocol version.
fn decode(data: &[u8]) {
    let mut input = Input(data);
    let number = input.number(4) as u32;
    let _ = Call::decode(number, input.0);
    let mut argument = [0; CALL_BYTES];
    let given = input.take(CALL_BYTES);
    argument[..given.len()].copy_from_slice(given);
    let _ = Answer::decode(&argument);
    let (token, version) = Call::Token.encode();
    argument[..4].copy_from_slice(&version[..4]);
    // The operation is in the low byte.
    let number = token & !0xff | number & 7;
    if let Ok(Some(call)) = Call::decode(number, &argument) {
        let (encoded, bytes) = call.encode();
        assert_eq!(Call::decode(encoded, &bytes), Ok(Some(call)));
    }
}

/// Takes a request for segments from the input: usually with the token and the owner number that were given last, or with neither.
fn any_request(input: &mut Input<'_>, token: u64, owner: u16) -> [u8; HANDSHAKE_BYTES] {
    let request = Request {
        token: match input.number(1) {
            0..=100 => 0,
            101..=240 => token,
            _ => input.number(8),
        },
        owner: match input.number(1) {
            0..=100 => 0,
            101..=240 => owner,
            _ => input.number(2) as u16,
        },
    };
    let mut bytes = request.encode();
    if input.number(1) > 240 {
        let at = input.below(bytes.len());
        bytes[at] = input.number(1) as u8;
    }
    bytes
}

/// Connects to the socket on which programs ask for segments, and sends messages.
pub fn admission(data: &[u8]) {
    static BED: OnceLock<Mutex<Bed>> = OnceLock::new();
    let bed = BED.get_or_init(|| Mutex::new(Bed::new()));
    let bed = bed.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = bed.open();
    let mut open: Vec<Connection> = vec![];
    let (mut token, mut owner) = (0, 0);
    let mut input = Input(data);
    for _ in 0..REQUESTS_MAX {
        if input.is_empty() {
            break;
        }
        let kind = input.number(1) % 8;
        if kind == 0 || open.is_empty() {
            open.truncate(CONNECTIONS_MAX - 1);
            open.push(bed.connect());
            continue;
        }
        let connection = open.swap_remove(input.below(open.len()));
        let sent = match kind {
            1 => {
                count("admission", "closed");
                continue;
            }
            2 => connection.send(input.take(HANDSHAKE_BYTES + 8), &[]),
            3 => connection.send(input.take(HANDSHAKE_BYTES), &[connection.as_fd()]),
            _ => {
                if kind == 4 {
                    token = opened.token();
                }
                let bytes = any_request(&mut input, token, owner);
                if connection.send(&bytes, &[]).is_err() {
                    continue;
                }
                let Some((reply, descriptors)) = received(&connection) else {
                    count("admission", "closed");
                    continue;
                };
                if reply.error != 0 {
                    assert_eq!(descriptors, 0, "a refusal gives nothing away");
                    count("admission", "refused");
                    continue;
                }
                // The order is: control, slots and area, then each slice's table, ages and frames.
                assert_eq!(descriptors, 3 + 3 * usize::from(reply.slices));
                owner = reply.owner;
                let request = Request::decode(&bytes).expect("only a request gets this answer");
                let outcome = match (request.owner, request.token) {
                    (0, 0) => "admitted to read",
                    (0, _) => "admitted to write",
                    (_, 0) => "admitted again",
                    _ => "given write access",
                };
                count("admission", outcome);
                continue;
            }
        };
        // The daemon may have closed the connection, because it waits only a few seconds for a request.
        if sent.is_ok() {
            match received(&connection) {
                Some((reply, descriptors)) if reply.error == 0 => {
                    owner = reply.owner;
                    assert_eq!(descriptors, 3 + 3 * usize::from(reply.slices));
                }
                Some(_) => count("admission", "refused"),
                None => count("admission", "closed"),
            }
        }
    }
}

/// Gets and sets control attributes with any name and value, on any inode, as any user.
pub fn control(data: &[u8]) {
    static BED: OnceLock<Mutex<Bed>> = OnceLock::new();
    let bed = BED.get_or_init(|| Mutex::new(Bed::new()));
    let bed = bed.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = Target::parse(data);
    let mut input = Input(data);
    for _ in 0..REQUESTS_MAX {
        if input.is_empty() {
            break;
        }
        let ino = usually(
            &mut input,
            [ROOT, bed.file][usize::from(data.len() % 2 == 1)],
        );
        let uid = usually(&mut input, 0) as u32;
        let outcome = bed.attribute(&mut input, ino, uid);
        count("control", outcome.unwrap_or("refused"));
    }
}

impl Bed {
    /// Gets or sets a control attribute. Returns the kind of access.
    fn attribute(&self, input: &mut Input<'_>, ino: Ino, uid: u32) -> Result<&'static str, i32> {
        let control = &self.control;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let set = |input: &mut Input<'_>, name: &str| {
            const VALUES: [&[u8]; 9] = [
                b"0",
                b"1",
                b"node:1",
                b"slice:0",
                b"slice:1\n",
                b"slice:7",
                b"never",
                b"always\0",
                b"inherit",
            ];
            let value = match input.number(1) as usize {
                any @ 230.. => input.take(any % 24),
                one => VALUES[one % VALUES.len()],
            };
            let (send, done) = mpsc::channel();
            control.set(ino, name, value, uid, move |result| {
                send.send(result).expect("the fuzzer waits");
            });
            wait(&done)
        };
        match input.number(1) % 11 {
            0 => control.get(ino, "jericho.stat").map(|_| "counters"),
            1 => {
                let page = text(input.take(3));
                let name = format!("jericho.stat+{page}");
                control.get(ino, &name).map(|_| "counters")
            }
            2 => control.get(ino, "jericho.where").map(|_| "where"),
            3 => control.get(ino, "jericho.place").map(|_| "place"),
            4 => {
                let name = format!("jericho.{}", text(input.take(8)));
                let _ = control.get(ino, &name);
                set(input, &name).map(|()| "another")
            }
            5 => set(input, "jericho.place").map(|()| "placed"),
            6 => set(input, "jericho.move").map(|()| "moved"),
            7 => set(input, "jericho.threads").map(|()| "threads set"),
            8 => {
                let (send, done) = mpsc::channel();
                control.sync(SYNC, move |result| {
                    send.send(result).expect("the fuzzer waits")
                });
                wait(&done).map(|()| "synced")
            }
            9 => {
                let range = match input.number(1) {
                    any @ 200.. => text(input.take(any as usize % 32)),
                    _ => format!("+{}+{}", input.number(4), input.number(3)),
                };
                let name = format!("jericho.trim{range}");
                let (send, done) = mpsc::channel();
                control.trim_part(&name, uid, move |result| {
                    send.send(result).expect("the fuzzer waits");
                });
                wait(&done).map(|_| "trimmed")
            }
            // The device cannot become larger: each of these is refused or changes nothing.
            _ => {
                let request = match input.number(1) {
                    any @ 200.. => text(input.take(any as usize % 48)),
                    _ => format!("+{}+all", input.number(5)),
                };
                let name = format!("jericho.grow{request}");
                let (send, done) = mpsc::channel();
                control.grow(&name, uid, move |result| {
                    send.send(result).expect("the fuzzer waits");
                });
                wait(&done).map(|_| "asked to grow")
            }
        }
    }
}
