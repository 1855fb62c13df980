//! The XDP program that gives an XDP socket its frames, and its place on a network interface (bpf(2)).
//!
//! The program redirects the frames of a [`Selection`] to the socket of the queue on which they arrived. All other frames, and those of a queue
//! without a socket, pass on to the kernel as if the program was not there.

use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Which frames a program redirects: those with an Ethertype and the interface's address, whose flags and number are right.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// Ethertype of the frames.
    pub ethertype: u16,
    /// Offset of the byte of flags in a frame.
    pub flags_at: u8,
    /// The bits of that byte that count.
    pub flags_mask: u8,
    /// Their values.
    pub flags: u8,
    /// Offset of the number in a frame: 4 bytes.
    pub number_at: u8,
    /// The numbers.
    pub numbers: Numbers,
}

/// The numbers of the frames that a program redirects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// All but 0.
    AllButZero,
    /// Those that the owner of the program lists.
    Listed,
}

/// Numbers that a list has room for. The kernel drops those that no frame has had for the longest time.
const NUMBERS_MAX: u32 = 4096;

/// Commands of bpf(2), types of maps and programs, and flags (linux/bpf.h).
const MAP_CREATE: i32 = 0;
const MAP_UPDATE: i32 = 2;
const PROGRAM_LOAD: i32 = 5;
const LINK_CREATE: i32 = 28;
const MAP_LRU_HASH: u32 = 9;
const MAP_SOCKETS: u32 = 17;
const PROGRAM_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const FLAG_HAS_FRAGS: u32 = 1 << 5;
/// Functions that a program calls.
const LOOK_UP: i32 = 1;
const REDIRECT_MAP: i32 = 51;
/// Result of a program: the frame goes on as if there was no program.
const PASS: i32 = 2;

/// A program on an interface, and its maps. Dropping it takes the program off the interface, and so does the end of the process.
#[derive(Debug)]
pub(crate) struct Redirect {
    sockets: OwnedFd,
    numbers: Option<OwnedFd>,
    program: OwnedFd,
    /// Keeps the program on the interface.
    link: Option<OwnedFd>,
}

impl Redirect {
    /// Loads the program for an interface with a MAC address, and room for sockets of some queues. Fails with EPERM without CAP_BPF and CAP_NET_ADMIN.
    pub fn load(selection: &Selection, mac: [u8; 6], queues: u32) -> io::Result<Redirect> {
        let sockets = create_map(MAP_SOCKETS, queues)?;
        let numbers = match selection.numbers {
            Numbers::AllButZero => None,
            Numbers::Listed => Some(create_map(MAP_LRU_HASH, NUMBERS_MAX)?),
        };
        let list = numbers.as_ref().map(AsRawFd::as_raw_fd);
        let steps = program(selection, mac, sockets.as_raw_fd(), list);
        Ok(Redirect {
            program: load(&steps)?,
            sockets,
            numbers,
            link: None,
        })
    }

    /// Makes a socket that is bound to a queue get the frames of this queue.
    pub fn set_socket(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        update(&self.sockets, queue, socket.as_raw_fd() as u32)
    }

    /// Puts the program on an interface. Fails with EBUSY if there is another XDP program.
    pub fn attach(&mut self, interface: i32) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.put(0, &(self.program.as_raw_fd() as u32).to_ne_bytes());
        attributes.put(4, &(interface as u32).to_ne_bytes());
        attributes.put(8, &ATTACH_XDP.to_ne_bytes());
        // No flags: in the driver, if it can, else in the kernel's generic code.
        self.link = Some(attributes.call(LINK_CREATE)?);
        Ok(())
    }

    /// Adds a number to the list. Does nothing without a list.
    pub fn list(&self, number: [u8; 4]) -> io::Result<()> {
        match &self.numbers {
            Some(map) => update(map, u32::from_ne_bytes(number), 1),
            None => Ok(()),
        }
    }
}

/// Arguments of bpf(2): the start of the kernel's union bpf_attr. The kernel takes what is not there for zeros.
#[derive(Default)]
#[repr(C, align(8))]
struct Attributes([[u8; 8]; 16]);

impl Attributes {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0.as_flattened_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Makes the call. Callers put addresses of memory that lives until the call ends.
    fn run(&mut self, command: i32) -> io::Result<i64> {
        let length = size_of_val(&self.0);
        // SAFETY: the pointer and the length are those of the attributes. The addresses in them are of memory that the callers keep, and that has the
        // length that the attributes give: the kernel only reads it.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_mut_ptr(), length as u32) };
        match result {
            0.. => Ok(result),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes a call that returns a descriptor.
    fn call(&mut self, command: i32) -> io::Result<OwnedFd> {
        let fd = self.run(command)?;
        // SAFETY: these calls return a descriptor that nothing else owns. The kernel makes it close-on-exec.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}

/// Makes a map with keys and values of 4 bytes.
fn create_map(kind: u32, entries: u32) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::default();
    for (at, value) in [(0, kind), (4, 4), (8, 4), (12, entries)] {
        attributes.put(at, &u32::to_ne_bytes(value));
    }
    attributes.put(28, b"jericho");
    attributes.call(MAP_CREATE)
}

fn update(map: &OwnedFd, key: u32, value: u32) -> io::Result<()> {
    let mut attributes = Attributes::default();
    attributes.put(0, &(map.as_raw_fd() as u32).to_ne_bytes());
    attributes.put(8, &address(&key));
    attributes.put(16, &address(&value));
    attributes.run(MAP_UPDATE).map(drop)
}

fn load(steps: &[u64]) -> io::Result<OwnedFd> {
    let license = c"MIT OR Apache-2.0";
    let mut attributes = Attributes::default();
    attributes.put(0, &PROGRAM_XDP.to_ne_bytes());
    attributes.put(4, &(steps.len() as u32).to_ne_bytes());
    attributes.put(8, &(steps.as_ptr() as u64).to_ne_bytes());
    attributes.put(16, &(license.as_ptr() as u64).to_ne_bytes());
    attributes.put(44, &FLAG_HAS_FRAGS.to_ne_bytes());
    attributes.put(48, b"jericho");
    attributes.put(68, &ATTACH_XDP.to_ne_bytes());
    attributes.call(PROGRAM_LOAD)
}

fn address(number: &u32) -> [u8; 8] {
    (std::ptr::from_ref(number) as u64).to_ne_bytes()
}

/// Codes of instructions (linux/bpf.h).
mod code {
    pub const LOAD_BYTE: u8 = 0x71;
    pub const LOAD_HALF: u8 = 0x69;
    pub const LOAD_WORD: u8 = 0x61;
    pub const STORE_WORD: u8 = 0x63;
    pub const SET: u8 = 0xb7;
    pub const COPY: u8 = 0xbf;
    pub const ADD: u8 = 0x07;
    pub const AND: u8 = 0x57;
    pub const LOAD_MAP: u8 = 0x18;
    pub const CALL: u8 = 0x85;
    pub const EXIT: u8 = 0x95;
    /// Comparisons of 32 bits with a constant, of 64 bits with one, and of 64 bits with a register.
    pub const IF_NOT: u8 = 0x56;
    pub const IF_ZERO: u8 = 0x15;
    pub const IF_ABOVE: u8 = 0x2d;
}

/// A program in the making. Its jumps all go to its end, where frames pass.
#[derive(Default)]
struct Steps {
    all: Vec<u64>,
    jumps: Vec<usize>,
}

impl Steps {
    fn add(&mut self, code: u8, to: u8, from: u8, offset: i16, constant: i32) {
        let [a, b] = offset.to_ne_bytes();
        let [c, d, e, f] = constant.to_ne_bytes();
        // Two registers share a byte, in the order of bit fields.
        let registers = match cfg!(target_endian = "little") {
            true => to | from << 4,
            false => to << 4 | from,
        };
        let bytes = [code, registers, a, b, c, d, e, f];
        self.all.push(u64::from_ne_bytes(bytes));
    }

    /// Passes the frame if a comparison is true.
    fn pass_if(&mut self, code: u8, register: u8, other: u8, constant: i32) {
        self.jumps.push(self.all.len());
        self.add(code, register, other, 0, constant);
    }

    fn load_map(&mut self, register: u8, map: i32) {
        // A constant of 64 bits takes two steps. The 1 says that it is the descriptor of a map.
        self.add(code::LOAD_MAP, register, 1, 0, map);
        self.add(0, 0, 0, 0, 0);
    }

    fn finish(mut self) -> Vec<u64> {
        let end = self.all.len();
        for at in std::mem::take(&mut self.jumps) {
            let mut bytes = self.all[at].to_ne_bytes();
            bytes[2..4].copy_from_slice(&((end - at - 1) as i16).to_ne_bytes());
            self.all[at] = u64::from_ne_bytes(bytes);
        }
        self.add(code::SET, 0, 0, 0, PASS);
        self.add(code::EXIT, 0, 0, 0, 0);
        self.all
    }
}

/// Returns the steps of the program. A frame passes if what the program must read of it is not in its first piece.
fn program(selection: &Selection, mac: [u8; 6], sockets: i32, numbers: Option<i32>) -> Vec<u64> {
    let mut steps = Steps::default();
    let [a, b, c, d, e, f] = mac;
    let (flags_at, number_at) = (selection.flags_at, selection.number_at);
    let needed = 14.max(flags_at + 1).max(number_at + 4);
    // struct xdp_md: start and end of the frame, and the queue at 16.
    steps.add(code::COPY, 6, 1, 0, 0);
    steps.add(code::LOAD_WORD, 2, 1, 0, 0);
    steps.add(code::LOAD_WORD, 3, 1, 4, 0);
    steps.add(code::COPY, 4, 2, 0, 0);
    steps.add(code::ADD, 4, 0, 0, needed.into());
    steps.pass_if(code::IF_ABOVE, 4, 3, 0);
    let ethertype = u16::from_ne_bytes(selection.ethertype.to_be_bytes());
    steps.add(code::LOAD_HALF, 5, 2, 12, 0);
    steps.pass_if(code::IF_NOT, 5, 0, ethertype.into());
    steps.add(code::LOAD_WORD, 5, 2, 0, 0);
    steps.pass_if(code::IF_NOT, 5, 0, i32::from_ne_bytes([a, b, c, d]));
    steps.add(code::LOAD_HALF, 5, 2, 4, 0);
    steps.pass_if(code::IF_NOT, 5, 0, u16::from_ne_bytes([e, f]).into());
    steps.add(code::LOAD_BYTE, 5, 2, flags_at.into(), 0);
    steps.add(code::AND, 5, 0, 0, selection.flags_mask.into());
    steps.pass_if(code::IF_NOT, 5, 0, selection.flags.into());
    steps.add(code::LOAD_WORD, 5, 2, number_at.into(), 0);
    match numbers {
        None => steps.pass_if(code::IF_ZERO, 5, 0, 0),
        Some(map) => {
            steps.add(code::STORE_WORD, 10, 5, -4, 0);
            steps.add(code::COPY, 2, 10, 0, 0);
            steps.add(code::ADD, 2, 0, 0, -4);
            steps.load_map(1, map);
            steps.add(code::CALL, 0, 0, 0, LOOK_UP);
            steps.pass_if(code::IF_ZERO, 0, 0, 0);
        }
    }
    steps.add(code::LOAD_WORD, 2, 6, 16, 0);
    steps.load_map(1, sockets);
    // The result for a queue without a socket.
    steps.add(code::SET, 3, 0, 0, PASS);
    steps.add(code::CALL, 0, 0, 0, REDIRECT_MAP);
    steps.add(code::EXIT, 0, 0, 0, 0);
    steps.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's verifier judges the program in the tests of `xdp`, which need root.
    #[test]
    fn all_jumps_go_to_the_step_that_lets_a_frame_pass() {
        for (numbers, list) in [(Numbers::AllButZero, None), (Numbers::Listed, Some(7))] {
            let selection = Selection {
                ethertype: 0x88b5,
                flags_at: 15,
                flags_mask: 2,
                flags: 2,
                number_at: 16,
                numbers,
            };
            let steps = program(&selection, [2, 0, 0, 0, 0, 1], 5, list);
            let bytes: Vec<[u8; 8]> = steps.iter().map(|step| step.to_ne_bytes()).collect();
            let pass = steps.len() - 2;
            let jumps = [code::IF_NOT, code::IF_ZERO, code::IF_ABOVE];
            let mut count = 0;
            for (at, step) in bytes.iter().enumerate() {
                if jumps.contains(&step[0]) {
                    let offset = i16::from_ne_bytes([step[2], step[3]]);
                    assert_eq!(at + 1 + offset as usize, pass);
                    count += 1;
                }
            }
            assert_eq!(count, 6);
            let [code, _, _, _, result @ ..] = bytes[pass];
            assert_eq!((code, i32::from_ne_bytes(result)), (code::SET, PASS));
        }
    }
}
