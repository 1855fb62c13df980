//! Tests which processes receive a volume's segments, and which of them may write.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use jericho_daemon::{Asker, Handle, Mounted, OpenOptions};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Kind, ROOT};
use jericho_shm::{Answer, Call, HANDSHAKE_BYTES, Refusal, Reply, Request, socket_name};
use jericho_sim::SimDevice;
use jericho_storage::Device;
use jericho_sys::handshake::Connection;
use jericho_sys::process::{effective_uid, gid};
use jericho_topology::Topology;
use jericho_volume::{FormatOptions, OpenMode, Volume};

const LONG: Duration = Duration::from_secs(60);
const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0,
};

/// A volume with one file, open for reading and for writing.
struct Bed {
    mounted: Arc<Mounted>,
    reading: Arc<Handle>,
    writing: Arc<Handle>,
}

fn bed(read_only: bool) -> Bed {
    let device = Arc::new(SimDevice::new("sim", 64 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![device];
    let format = FormatOptions {
        slices: Some(1),
        ..FormatOptions::default()
    };
    format_devices(&devices, &[PathBuf::from("sim")], &format).unwrap();
    let open = |read_only| {
        let volume = Volume::open_from_devices(
            devices.clone(),
            OpenMode {
                read_only,
                force: false,
            },
        )
        .unwrap();
        let options = OpenOptions {
            volume: PathBuf::from("simulated"),
            read_only,
            cache_bytes: Some(8 << 20),
            spill_bytes: 0,
            topology: Topology::from_spec("virtual:1").unwrap(),
            threads: Default::default(),
            with_parent: false,
            move_costs: Default::default(),
            fast_path: Default::default(),
            keeper: None,
            devices: Vec::new(),
            force: false,
        };
        Mounted::open_volume(volume, &options).unwrap()
    };
    let mounted = open(false);
    let made = mounted
        .fs()
        .mknod(ROOT, b"file", Kind::File, 0o644, 0, CALLER);
    let ino = made.unwrap().ino;
    let mounted = if read_only {
        mounted.close().unwrap();
        open(true)
    } else {
        mounted
    };
    mounted.serve_clients(Arc::new(())).unwrap();
    let handle = |writable| mounted.open_file(ino, writable).unwrap();
    Bed {
        reading: handle(false),
        writing: handle(true),
        mounted,
    }
}

impl Bed {
    fn call_as(&self, uid: u32, handle: &Arc<Handle>, call: Call) -> Answer {
        self.call_by(uid, 0, handle, call)
    }

    fn call_by(&self, uid: u32, thread: u32, handle: &Arc<Handle>, call: Call) -> Answer {
        let (answer, answered) = mpsc::channel();
        let asker = Asker {
            uid,
            gid: gid(),
            thread,
        };
        self.mounted
            .call(handle, call, asker, move |a| answer.send(a).unwrap());
        answered.recv_timeout(LONG).expect("an answer")
    }

    fn call(&self, handle: &Arc<Handle>, call: Call) -> Answer {
        self.call_as(effective_uid(), handle, call)
    }

    /// Returns a token. Fails with the reason for which there is none.
    fn token(&self, handle: &Arc<Handle>) -> Result<u64, u32> {
        match self.call(handle, Call::Token) {
            Answer {
                status: 0, token, ..
            } => Ok(token),
            Answer { status, .. } => Err(status),
        }
    }

    /// Connects and sends a request. Returns the owner number and whether the frames are writable. Fails with an errno.
    fn ask(&self, token: u64, owner: u16) -> Result<(u16, bool), u32> {
        let instance = self
            .call(
                &self.reading,
                Call::Fast {
                    write: false,
                    thread: None,
                },
            )
            .instance;
        let connection = Connection::connect(&socket_name(instance), LONG).unwrap();
        connection
            .send(&Request { token, owner }.encode(), &[])
            .unwrap();
        let mut bytes = [0; HANDSHAKE_BYTES];
        let (len, fds) = connection.receive(&mut bytes).unwrap();
        let reply = Reply::decode(&bytes[..len]).expect("a reply");
        if reply.error != 0 {
            return Err(reply.error);
        }
        // The order is: control, slots, area, then the slice's table, ages and frames.
        assert_eq!(fds.len(), 6);
        use std::os::fd::AsRawFd;
        let writable = |at: usize| jericho_sys::files::mode(fds[at].as_raw_fd()).unwrap().write;
        assert!(!writable(0) && writable(2));
        let all = [1, 3, 4, 5].map(writable);
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        Ok((reply.owner, all[0]))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.mounted.close().unwrap();
    }
}

#[test]
fn writable_segments_need_a_token_of_a_writable_descriptor() {
    let bed = bed(false);
    assert_eq!(bed.token(&bed.reading), Err(Refusal::ReadOnly as u32));
    let (owner, writable) = bed.ask(0, 0).unwrap();
    assert!(!writable);
    // Presents a token that the daemon never gave, as a new client and as an existing one.
    assert_eq!(bed.ask(12345, 0), Err(libc::EACCES as u32));
    assert_eq!(bed.ask(12345, owner), Err(libc::EACCES as u32));
    let token = bed.token(&bed.writing).unwrap();
    assert_eq!(bed.ask(token, owner), Ok((owner, true)));
    assert_eq!(
        bed.ask(token, owner),
        Err(libc::EACCES as u32),
        "valid once"
    );
}

#[test]
fn a_user_that_is_not_trusted_gets_no_token() {
    let bed = bed(false);
    let nobody = 65534;
    let refused = bed.call_as(nobody, &bed.writing, Call::Token);
    assert_eq!(refused.status, Refusal::Owner as u32);
    assert_eq!(refused.token, 0);
}

#[test]
fn a_read_only_mount_has_no_writers() {
    let bed = bed(true);
    assert_eq!(bed.token(&bed.writing), Err(Refusal::ReadOnly as u32));
    assert_eq!(bed.ask(1, 0), Err(libc::EROFS as u32));
    assert!(!bed.ask(0, 0).unwrap().1);
}

/// Returns the calling thread's id.
fn thread_id() -> u32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn a_client_releases_only_its_own_latches() {
    let bed = bed(false);
    let instance = bed
        .call(
            &bed.reading,
            Call::Fast {
                write: false,
                thread: None,
            },
        )
        .instance;
    let (owner, _) = bed.ask(0, 0).unwrap();
    let calls = |owner| {
        let interrupted = Call::Interrupted {
            first: 0,
            pages: 1,
            owner,
            instance,
        };
        let copied = Call::Copied {
            slice: 0,
            frame: 1,
            owner,
            instance,
        };
        [interrupted, copied]
    };
    let statuses = |owner, thread| {
        calls(owner).map(|call| {
            let uid = effective_uid();
            bed.call_by(uid, thread, &bed.reading, call).status
        })
    };
    let (own, refused) = (thread_id(), [Refusal::Owner as u32; 2]);
    assert_eq!(statuses(owner, own), refused, "the client only reads");
    let token = bed.token(&bed.writing).unwrap();
    assert_eq!(bed.ask(token, owner), Ok((owner, true)));
    assert_eq!(statuses(owner, own), [0; 2]);
    assert_eq!(statuses(owner, std::process::id()), [0; 2]);
    assert_eq!(statuses(owner + 1, own), refused, "no client");
    assert_eq!(statuses(owner, 0), refused, "of another pid namespace");
    assert_eq!(statuses(owner, 1), refused, "another process");
}
