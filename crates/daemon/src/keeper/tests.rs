use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use jericho_shm::Area;
use jericho_sys::affinity;
use jericho_sys::process::Process;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::narrow_masks::MaskNotes;
use crate::tasks::Task;

/// Longest wait for an event that must happen.
const LONG: Duration = Duration::from_secs(60);

/// A process that stands for the daemon, a client's area, and the keeper that holds both.
struct Bed {
    daemon: Child,
    process: Process,
    area: Area,
    connection: Connection,
    keeper: JoinHandle<io::Result<()>>,
}

impl Bed {
    fn new() -> Bed {
        let daemon = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(daemon.id()).unwrap();
        let area = Area::create("test", 2).unwrap();
        let (connection, theirs) = Connection::pair().unwrap();
        let theirs = Connection::from(theirs);
        let keeper = std::thread::spawn(move || keep(&theirs));
        connection.set_timeout(LONG).unwrap();
        let send = |message: KeeperMessage, fds: &[_]| {
            connection.send(&message.encode(), fds).unwrap();
        };
        send(KeeperMessage::Daemon, &[process.as_fd()]);
        send(KeeperMessage::Area(2), &[area.mapping().fd()]);
        send(KeeperMessage::Complete, &[]);
        let (len, _) = connection.receive(&mut [0; KEEPER_BYTES]).unwrap();
        assert_eq!(len, KEEPER_BYTES);
        assert!(!area.is_revoked());
        Bed {
            daemon,
            process,
            area,
            connection,
            keeper,
        }
    }

    fn kill_daemon(mut self) {
        assert!(!self.area.is_revoked(), "the daemon lives");
        self.process.send(Signal::Kill).unwrap();
        self.daemon.wait().unwrap();
        self.keeper.join().unwrap().unwrap();
        assert!(self.area.is_revoked());
    }
}

/// Sends a message with more descriptors than `Connection::receive` has room for.
fn send_too_many(bed: &Bed) {
    let fds = [bed.process.as_fd(); 250];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = KeeperMessage::Complete.encode();
    let flags = SendFlags::empty();
    rustix::net::sendmsg(
        &bed.connection,
        &[IoSlice::new(&bytes)],
        &mut control,
        flags,
    )
    .unwrap();
}

#[test]
fn programs_are_revoked_although_the_last_message_is_invalid() {
    let bed = Bed::new();
    bed.connection.send(&[7; KEEPER_BYTES], &[]).unwrap();
    bed.kill_daemon();
}

#[test]
fn an_invalid_message_does_not_affect_later_ones() {
    let bed = Bed::new();
    let later = Area::create("test", 3).unwrap();
    bed.connection.send(b"junk", &[]).unwrap();
    let message = KeeperMessage::Area(3).encode();
    bed.connection
        .send(&message, &[later.mapping().fd()])
        .unwrap();
    bed.kill_daemon();
    assert!(later.is_revoked());
}

#[test]
fn programs_are_revoked_although_a_message_cannot_be_received() {
    let bed = Bed::new();
    send_too_many(&bed);
    // The keeper has closed the connection, which tells the daemon that no keeper listens.
    let (len, _) = bed.connection.receive(&mut [0; KEEPER_BYTES]).unwrap();
    assert_eq!(len, 0);
    bed.kill_daemon();
}

#[test]
fn a_thread_whose_mask_the_killed_daemon_has_narrowed_gets_it_back() {
    let program = Command::new("cat").stdin(Stdio::piped()).spawn();
    let mut program = program.unwrap();
    let (task, _) = Task::find(program.id()).unwrap();
    let original = affinity::mask(Some(task.tid)).unwrap();
    let first = affinity::get(Some(task.tid)).unwrap()[0];
    let bed = Bed::new();
    let notes = MaskNotes::new().unwrap();
    let message = KeeperMessage::Masks.encode();
    bed.connection.send(&message, &[notes.fd()]).unwrap();
    notes.narrow(&task, &[first].into_iter().collect());
    assert_eq!(affinity::get(Some(task.tid)).unwrap(), [first]);
    bed.kill_daemon();
    assert_eq!(affinity::mask(Some(task.tid)).unwrap(), original);
    program.kill().unwrap();
    program.wait().unwrap();
}

#[test]
fn a_daemon_that_closes_its_connection_and_lives_on_keeps_its_memory() {
    let mut bed = Bed::new();
    let (unused, _) = Connection::pair().unwrap();
    drop(std::mem::replace(&mut bed.connection, unused));
    bed.kill_daemon();
}

#[test]
fn a_keeper_without_a_daemon_ends_with_its_connection() {
    let (connection, theirs) = Connection::pair().unwrap();
    drop(connection);
    keep(&Connection::from(theirs)).unwrap();
}
