//! An NBD client that sends any bytes: raw, or in messages that are well formed except for what the input chooses.

use std::io::{self, Write};
use std::sync::Arc;

use jericho_export::{Export, ExportOptions, converse};

use crate::daemon::count;
use crate::input::Input;
use crate::volume::Memory;

/// Most messages of a client.
const MESSAGES_MAX: usize = 64;
/// Longest payload of a write.
const PAYLOAD_MAX: usize = 20_000;
const OPTION_MAGIC: &[u8] = b"IHAVEOPT";
const REQUEST_MAGIC: [u8; 4] = [0x25, 0x60, 0x95, 0x13];

/// Counts the replies, and their bytes, so that a reply without end is noticed.
struct Replies {
    length_bytes: u64,
}

impl Write for Replies {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.length_bytes += bytes.len() as u64;
        // The server sends each reply at once.
        match bytes {
            [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, ..] => count("nbd", "served"),
            [0x67, 0x44, 0x66, 0x98, ..] => count("nbd", "refused"),
            [0x66, 0x8e, 0x33, 0xef, _, _, 0, 1, ..] => count("nbd", "read"),
            [0x66, 0x8e, 0x33, 0xef, _, _, 0, 5, ..] => count("nbd", "block status"),
            [0x66, 0x8e, 0x33, 0xef, ..] => count("nbd", "structured"),
            _ => count("nbd", "negotiated"),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn option(bytes: &mut Vec<u8>, input: &mut Input<'_>) {
    let option = input.number(1) as u32 % 12;
    let length = input.below(80);
    let data = match (option, input.number(1) % 4) {
        // What the option should have, so that the transmission is reached.
        (7, 0..=2) => &[0; 6],
        (8, 0..=2) => &[][..],
        (10, 0..=2) => &b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation"[..],
        _ => input.take(length),
    };
    bytes.extend(OPTION_MAGIC);
    bytes.extend(option.to_be_bytes());
    let length = match input.number(1) % 16 {
        0 => input.number(4) as u32,
        _ => data.len() as u32,
    };
    bytes.extend(length.to_be_bytes());
    bytes.extend(data);
}

fn request(bytes: &mut Vec<u8>, input: &mut Input<'_>) {
    let kind = input.number(1) as u16 % 9;
    let flags = 1u16.checked_shl(input.number(1) as u32 % 20);
    let offset = match input.number(1) % 8 {
        0 => input.number(8),
        _ => input.number(3),
    };
    let length = match input.number(1) % 8 {
        0 => input.number(4) as usize,
        _ => input.below(PAYLOAD_MAX),
    };
    bytes.extend(REQUEST_MAGIC);
    bytes.extend(flags.unwrap_or(0).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(input.number(8).to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend((length as u32).to_be_bytes());
    if kind == 1 && length <= PAYLOAD_MAX {
        bytes.resize(bytes.len() + length, input.number(1) as u8);
    }
}

/// Lets an input negotiate with a server and send it requests.
pub fn nbd(data: &[u8]) {
    let mut input = Input(data);
    let options = ExportOptions {
        name: "export".into(),
        read_only: input.number(1) % 8 == 0,
    };
    let export = Export::new(Arc::new(Memory::default()), options);
    let mut bytes = vec![];
    match input.number(1) % 4 {
        0 => bytes.extend(input.0),
        _ => {
            bytes.extend([0, 0, 0, input.number(1) as u8 & 3]);
            for _ in 0..input.below(8) {
                option(&mut bytes, &mut input);
            }
            bytes.extend(OPTION_MAGIC);
            bytes.extend([0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0]);
            for _ in 0..MESSAGES_MAX {
                match input.is_empty() {
                    true => break,
                    false => request(&mut bytes, &mut input),
                }
            }
        }
    }
    let mut replies = Replies { length_bytes: 0 };
    match converse(&export, &*bytes, &mut replies) {
        Ok(()) => count("nbd", "ended"),
        Err(_) => count("nbd", "broken"),
    }
    let most = (MESSAGES_MAX as u64 + 1) * (33 << 20);
    assert!(replies.length_bytes < most, "endless replies");
}
