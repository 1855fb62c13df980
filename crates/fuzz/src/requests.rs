//! Input from programs and the kernel: the handshake, ioctls and their effects in the daemon, control attributes, and the kernel's
//! messages.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use jericho_daemon::{Asker, Handle, Mounted, OpenOptions};
use jericho_fs::types::ROOT;
use jericho_fs::volume::{OpenMode, Volume};
use jericho_shm::{Answer, CALL_BYTES, Call, Reply, Request};
use jericho_topology::Topology;

use crate::Input;
use crate::volume::sample;

/// Both messages of the handshake over the daemon's socket.
pub fn handshake(data: &[u8]) {
    if let Some(request) = Request::decode(data) {
        assert_eq!(Request::decode(&request.encode()), Some(request));
    }
    if let Some(reply) = Reply::decode(data) {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
    }
}

/// An ioctl on an open file, answered by a daemon; and values of control attributes.
pub fn calls(data: &[u8]) {
    let _ = jericho_fuse::control::Target::parse(data);
    let mut input = Input(data);
    let raw = input.number(4) as u32;
    let _ = Call::decode(raw, input.0);
    let mut argument = [0; CALL_BYTES];
    let given = input.take(CALL_BYTES);
    argument[..given.len()].copy_from_slice(given);
    let _ = Answer::decode(&argument);
    // Usually a request of this protocol version.
    let (number, template) = [
        Call::Fast {
            write: false,
            thread: None,
        },
        Call::Fast {
            write: true,
            thread: None,
        },
        Call::ReadAhead { first: 0, pages: 0 },
        Call::Reserve {
            first: 0,
            pages: 0,
            soon: false,
        },
        Call::Mapped,
    ][raw as usize % 5]
        .encode();
    argument[..4].copy_from_slice(&template[..4]);
    if let Ok(Some(call)) = Call::decode(number, &argument) {
        answer(call);
    }
}

/// A daemon with an open file, for as long as this process lives.
fn answer(call: Call) {
    static BED: OnceLock<Mutex<(Arc<Mounted>, Arc<Handle>)>> = OnceLock::new();
    let bed = BED.get_or_init(|| {
        let volume = Volume::open_from_devices(vec![sample()], OpenMode::WRITE).expect("a volume");
        let options = OpenOptions {
            volume: PathBuf::from("memory"),
            devices: vec![],
            read_only: false,
            force: false,
            keeper: None,
            fast_path: Default::default(),
            cache_bytes: Some(8 << 20),
            topology: Topology::from_spec("virtual:1").expect("a topology"),
            threads: Default::default(),
        };
        let mounted = Mounted::open_volume(volume, &options).expect("a daemon");
        let file = mounted.fs().lookup(ROOT, b"file").expect("the file");
        let handle = mounted.open_file(file.ino, false, true).expect("a handle");
        Mutex::new((mounted, handle))
    });
    let bed = bed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (send, receive) = mpsc::channel();
    let asker = Asker {
        uid: 0,
        gid: 0,
        thread: std::process::id(),
    };
    bed.0.call(&bed.1, call, asker, move |answer| {
        send.send(answer).expect("the fuzzer waits")
    });
    receive
        .recv_timeout(Duration::from_secs(60))
        .expect("every call is answered");
}

/// A message of the kernel, from the device and from the ring.
pub fn kernel(data: &[u8]) {
    jericho_fuse::parse_any(data);
    // Usually with the right length and an existing operation.
    let mut message = data.to_vec();
    if message.len() >= 8 {
        let len = message.len() as u32;
        message[..4].copy_from_slice(&len.to_ne_bytes());
        message[5..8].fill(0);
        message[4] %= 54;
        jericho_fuse::parse_any(&message);
    }
}
