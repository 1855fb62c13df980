use super::*;

const OPCODES: std::ops::RangeInclusive<u32> = 0..=60;

fn message(opcode: u32, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let header = InHeader {
        len: (size_of::<InHeader>() + body.len()) as u32,
        opcode,
        unique: 2,
        nodeid: 1,
        ..InHeader::default()
    };
    [header.as_bytes(), &body].concat()
}

/// Returns a request of each operation that has arguments, as the kernel sends it.
fn examples() -> Vec<Vec<u8>> {
    let zeros = |len| vec![0; len];
    let with_size = |at: usize, size: u32, len: usize| {
        let mut args = zeros(len);
        args[at..at + 4].copy_from_slice(&size.to_ne_bytes());
        args
    };
    vec![
        message(op::LOOKUP, &[b"name\0"]),
        message(op::FORGET, &[&zeros(8)]),
        message(op::GETATTR, &[&zeros(16)]),
        message(op::SETATTR, &[&zeros(88)]),
        message(op::SYMLINK, &[b"name\0", b"to/where\0"]),
        message(op::MKNOD, &[&zeros(16), b"name\0"]),
        message(op::MKDIR, &[&zeros(8), b"name\0"]),
        message(op::UNLINK, &[b"name\0"]),
        message(op::RMDIR, &[b"name\0"]),
        message(op::RENAME, &[&zeros(8), b"from\0", b"to\0"]),
        message(op::RENAME2, &[&zeros(16), b"from\0", b"to\0"]),
        message(op::LINK, &[&zeros(8), b"name\0"]),
        message(op::OPEN, &[&zeros(8)]),
        message(op::READ, &[&zeros(40)]),
        message(op::WRITE, &[&with_size(16, 5, 40), b"bytes"]),
        message(op::RELEASE, &[&zeros(24)]),
        message(op::FSYNC, &[&zeros(16)]),
        message(
            op::SETXATTR,
            &[&with_size(0, 5, 16), b"user.a/b\0", b"value"],
        ),
        message(op::GETXATTR, &[&zeros(8), b"user.a\0"]),
        message(op::LISTXATTR, &[&zeros(8)]),
        message(op::REMOVEXATTR, &[b"user.a\0"]),
        message(op::INIT, &[&zeros(16)]),
        message(op::READDIR, &[&zeros(40)]),
        message(op::READDIRPLUS, &[&zeros(40)]),
        message(op::CREATE, &[&zeros(16), b"name\0"]),
        message(op::IOCTL, &[&with_size(24, 3, 32), b"abc"]),
        message(op::BATCH_FORGET, &[&with_size(0, 2, 8), &zeros(32)]),
        message(op::FALLOCATE, &[&zeros(32)]),
        message(op::LSEEK, &[&zeros(24)]),
        message(op::COPY_FILE_RANGE, &[&zeros(56)]),
        message(op::COPY_FILE_RANGE_64, &[&zeros(56)]),
        message(op::TMPFILE, &[&zeros(16), b"/\0"]),
        message(op::STATX, &[&zeros(24)]),
    ]
}

fn set_len(message: &mut [u8]) {
    let len = (message.len() as u32).to_ne_bytes();
    message[..4].copy_from_slice(&len);
}

fn parsed(message: &[u8]) -> Result<Operation<'_>> {
    parse_message(message, &Agreed::all()).1
}

/// Parses a message as the ring delivers it, with `arguments` bytes in a separate place.
fn parsed_in_two(message: &[u8], arguments: usize) -> Result<Operation<'_>> {
    let (header, body) = InHeader::read_from_prefix(message).unwrap();
    let (arguments, rest) = body.split_at(arguments.min(body.len()));
    parse(&header, arguments, rest, &Agreed::all())
}

/// A generator that returns the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }
}

#[test]
fn every_whole_request_is_parsed_and_no_truncated_one() {
    for whole in examples() {
        let opcode = whole[4];
        assert!(parsed(&whole).is_ok(), "operation {opcode}");
        for len in 0..whole.len() {
            let mut cut = whole[..len].to_vec();
            assert!(
                parsed(&cut).is_err(),
                "operation {opcode}: says it is longer"
            );
            if len < size_of::<InHeader>() {
                continue;
            }
            set_len(&mut cut);
            // The bytes after TMPFILE's arguments are not parsed.
            if u32::from(opcode) == op::TMPFILE && len >= size_of::<InHeader>() + 16 {
                continue;
            }
            assert!(parsed(&cut).is_err(), "operation {opcode} of {len} bytes");
        }
    }
}

#[test]
fn the_ring_and_the_device_deliver_the_same_request() {
    let write = message(
        op::WRITE,
        &[&[0; 16], &5_u32.to_ne_bytes(), &[0; 20], b"bytes"],
    );
    for arguments in [0, 40] {
        let read = parsed_in_two(&write, arguments);
        assert!(matches!(read, Ok(Operation::Write { data: b"bytes", .. })));
    }
    assert!(parsed_in_two(&write, 41).is_err() && parsed_in_two(&write, 39).is_err());
    let rename = message(op::RENAME, &[&7_u64.to_ne_bytes(), b"from\0to\0"]);
    let read = parsed_in_two(&rename, 8).unwrap();
    let Operation::Rename {
        name,
        dir_to,
        name_to,
        flags,
    } = read
    else {
        panic!("{read:?}");
    };
    assert_eq!(
        (name, dir_to, name_to, flags),
        (&b"from"[..], 7, &b"to"[..], 0)
    );
}

#[test]
fn invalid_names_are_refused() {
    for name in [
        &b"a/b\0"[..],
        b"/\0",
        b"\0",
        b"",
        b"endless",
        b"two\0names\0",
    ] {
        for opcode in [op::LOOKUP, op::UNLINK, op::RMDIR] {
            assert!(parsed(&message(opcode, &[name])).is_err(), "{name:?}");
        }
        let create = message(op::CREATE, &[&[0; 16], name]);
        assert!(parsed(&create).is_err(), "{name:?}");
    }
    // A link's target and an attribute's name may contain slashes.
    assert!(parsed(&message(op::SYMLINK, &[b"a\0", b"/b\0"])).is_ok());
    assert!(parsed(&message(op::SYMLINK, &[b"a/b\0", b"/b\0"])).is_err());
    assert!(parsed(&message(op::SYMLINK, &[b"a\0", b"\0"])).is_err());
}

#[test]
fn data_must_have_the_length_that_the_request_gives() {
    for (opcode, at, len) in [(op::WRITE, 16, 40), (op::IOCTL, 24, 32)] {
        for (says, result) in [(3_u32, true), (2, false), (4, false), (u32::MAX, false)] {
            let mut args = vec![0; len];
            args[at..at + 4].copy_from_slice(&says.to_ne_bytes());
            let read = message(opcode, &[&args, b"abc"]);
            assert_eq!(parsed(&read).is_ok(), result, "{says} of 3 bytes");
        }
    }
    for (count, result) in [(2_u64, true), (1, false), (3, false), (1 << 28, false)] {
        let forget = message(op::BATCH_FORGET, &[&count.to_ne_bytes(), &[0; 32]]);
        assert_eq!(parsed(&forget).is_ok(), result, "{count} of 2");
    }
}

#[test]
fn the_short_form_of_setxattr_is_parsed_unless_the_long_form_was_agreed_on() {
    let short = [&1_u32.to_ne_bytes()[..], &2_u32.to_ne_bytes()].concat();
    let message = message(op::SETXATTR, &[&short, b"user.a\0", b"v"]);
    let read = parse_message(&message, &Agreed::default()).1.unwrap();
    let Operation::SetXattr { args, name, value } = read else {
        panic!("{read:?}");
    };
    assert_eq!((args.flags, args.kernel_flags), (2, 0));
    assert_eq!((name, value), (&b"user.a"[..], &b"v"[..]));
}

#[test]
fn an_unknown_operation_is_not_malformed() {
    for opcode in [0, 7, 37, 54, 4096, u32::MAX] {
        let read = message(opcode, &[b"whatever"]);
        assert!(matches!(parsed(&read), Ok(Operation::Other)), "{opcode}");
    }
}

#[test]
fn no_bytes_make_the_parser_panic() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for opcode in OPCODES {
        for round in 0..400 {
            let len = random.next() as usize % if round % 4 == 0 { 400 } else { 64 };
            let bytes = random.bytes(len);
            let mut message = message(opcode, &[&bytes]);
            if round % 8 == 0 {
                let at = random.next() as usize % message.len();
                message[at] ^= 0xff;
            }
            let _ = parsed(&message);
            let _ = parsed_in_two(&message, random.next() as usize % 130);
        }
    }
    for mut whole in examples() {
        for _ in 0..400 {
            let at = random.next() as usize % whole.len();
            whole[at] = random.next() as u8;
            set_len(&mut whole);
            let _ = parsed(&whole);
        }
    }
}
