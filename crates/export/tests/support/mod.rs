//! A server in this process, and a client that sends exactly the bytes that a test wants.

#![allow(dead_code)] // each test file uses its own part

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jericho_export::{Export, ExportOptions, Listener, Server};
use jericho_storage::{BLOCK_BYTES, Device, IoError};

pub const BLOCK: usize = BLOCK_BYTES as usize;
/// A reply that takes this long never comes.
const LIMIT: Duration = Duration::from_secs(60);

// Numbers of proto.md, written out again so that a wrong constant of the server fails a test.
pub const IHAVEOPT: &[u8; 8] = b"IHAVEOPT";
pub const OPT_GO: u32 = 7;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;
pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;

/// A running server at a socket of its own.
pub struct Served {
    pub server: Option<Server>,
    pub path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Served {
    pub fn new(device: Arc<dyn Device>) -> Served {
        Served::with(device, ExportOptions::default())
    }

    pub fn with(device: Arc<dyn Device>, options: ExportOptions) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::unix(&path).unwrap();
        Served {
            server: Some(Server::start(Export::new(device, options), listener).unwrap()),
            path,
            _dir: dir,
        }
    }

    /// Connects without a negotiation.
    pub fn connect(&self) -> Client {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Client { stream }
    }

    /// Connects and negotiates simple replies.
    pub fn client(&self) -> Client {
        let mut client = self.connect();
        client.greet();
        client.go();
        client
    }

    /// Connects and negotiates structured replies and the block status.
    pub fn structured_client(&self) -> Client {
        let mut client = self.connect();
        client.greet();
        client.option(8, b"");
        assert_eq!(client.option_reply(), (8, 1, vec![]));
        client.option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation");
        assert_eq!(client.option_reply().1, 4);
        assert_eq!(client.option_reply().1, 1);
        client.go();
        client
    }

    pub fn stop(&mut self) -> Result<(), IoError> {
        self.server.take().unwrap().stop()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            let _ = server.stop();
        }
    }
}

pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn number(&mut self, length: usize) -> u64 {
        let bytes = self.take(length);
        bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// Answers the greeting: fixed newstyle, no zeros.
    pub fn greet(&mut self) {
        assert_eq!(self.take(16), b"NBDMAGICIHAVEOPT");
        assert_eq!(self.take(2), [0, 3]);
        self.send(&3u32.to_be_bytes());
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        self.send(IHAVEOPT);
        self.send(&option.to_be_bytes());
        self.send(&(data.len() as u32).to_be_bytes());
        self.send(data);
    }

    /// Returns the option, the kind and the data of a reply.
    pub fn option_reply(&mut self) -> (u32, u32, Vec<u8>) {
        assert_eq!(self.number(8), 0x3_e889_0455_65a9);
        let (option, kind) = (self.number(4) as u32, self.number(4) as u32);
        let length = self.number(4) as usize;
        (option, kind, self.take(length))
    }

    /// Begins the transmission with the export of the empty name. Returns the size and the flags.
    pub fn go(&mut self) -> (u64, u16) {
        self.option(OPT_GO, &[0; 6]);
        let (option, kind, data) = self.option_reply();
        assert_eq!((option, kind, &data[..2]), (OPT_GO, 3, &[0u8, 0][..]));
        while self.option_reply().1 != 1 {}
        let size = u64::from_be_bytes(data[2..10].try_into().unwrap());
        (size, u16::from_be_bytes(data[10..12].try_into().unwrap()))
    }

    /// Sends a request without its payload.
    pub fn request(&mut self, kind: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        self.send(&bytes);
    }

    /// Returns the cookie and the error of a simple reply.
    pub fn reply(&mut self) -> (u64, u32) {
        assert_eq!(self.number(4), 0x6744_6698);
        let error = self.number(4) as u32;
        (self.number(8), error)
    }

    /// Returns the kind and the payload of a structured reply that has one chunk.
    pub fn chunk(&mut self, cookie: u64) -> (u16, Vec<u8>) {
        assert_eq!(self.number(4), 0x668e_33ef);
        assert_eq!(self.number(2), 1, "the only chunk is the last one");
        let kind = self.number(2) as u16;
        assert_eq!(self.number(8), cookie);
        let length = self.number(4) as usize;
        (kind, self.take(length))
    }

    /// Returns the error of a structured reply.
    pub fn chunk_error(&mut self, cookie: u64) -> u32 {
        let (kind, data) = self.chunk(cookie);
        assert_eq!(kind, 0x8001);
        u32::from_be_bytes(data[..4].try_into().unwrap())
    }

    /// Sends a request without payload and returns the error of its simple reply.
    pub fn ask(&mut self, kind: u16, flags: u16, offset: u64, length: u32) -> u32 {
        self.request(kind, flags, 77, offset, length);
        let (cookie, error) = self.reply();
        assert_eq!(cookie, 77);
        error
    }

    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.request(WRITE, flags, 78, offset, data.len() as u32);
        self.send(data);
        let (cookie, error) = self.reply();
        assert_eq!(cookie, 78);
        error
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        assert_eq!(self.ask(READ, 0, offset, length), 0);
        self.take(length as usize)
    }

    /// Waits until the server has ended the connection. Returns what it sent before.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = vec![];
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            // The server did not read everything.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the server did not end the connection: {error}"),
        }
        rest
    }
}
