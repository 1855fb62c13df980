//! Clients that break the protocol lose their own connection, and nothing else happens.

mod support;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jericho_export::ExportOptions;
use jericho_sim::SimDevice;
use jericho_storage::Device;
use support::{
    BLOCK, BLOCK_STATUS, DF, DISC, FAST_ZERO, FLUSH, IHAVEOPT, NO_HOLE, READ, REQ_ONE, Served,
    TRIM, WRITE, WRITE_ZEROES,
};

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
const SIZE: u64 = 64 << 20;

fn served() -> Served {
    Served::new(Arc::new(SimDevice::new("sim", SIZE)))
}

/// Fails unless the server serves another client.
fn assert_serves(served: &Served) {
    let mut client = served.client();
    assert_eq!(client.write(0, 123, b"abc"), 0);
    assert_eq!(client.read(123, 3), b"abc");
    client.request(DISC, 0, 0, 0, 0);
    assert!(client.rest().is_empty());
}

#[test]
fn a_negotiation_with_nonsense_ends_the_connection() {
    let served = served();
    let option = |option: u32, length: u32| {
        [
            &3u32.to_be_bytes()[..],
            IHAVEOPT,
            &option.to_be_bytes(),
            &length.to_be_bytes(),
        ]
        .concat()
    };
    let cases: [(&str, Vec<u8>); 6] = [
        ("unknown client flags", vec![0xff; 4]),
        (
            "a wrong magic number",
            [&[0, 0, 0, 3][..], b"IHAVENOT"].concat(),
        ),
        ("an option of 4 GiB", option(7, u32::MAX)),
        ("an export name of 4 GiB", option(1, u32::MAX)),
        ("an unknown name, which has no error reply", {
            [&option(1, 3)[..], b"abc"].concat()
        }),
        (
            "the client's own greeting",
            b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
        ),
    ];
    for (what, bytes) in cases {
        let mut client = served.connect();
        assert_eq!(client.take(18).len(), 18);
        client.send(&bytes);
        assert!(client.rest().is_empty(), "{what}");
        assert_serves(&served);
    }
}

#[test]
fn half_a_message_ends_with_its_connection() {
    let served = served();
    for length in [0, 1, 3, 4, 11, 19, 21] {
        let mut client = served.connect();
        let bytes = [
            &[0, 0, 0, 3][..],
            IHAVEOPT,
            &[0, 0, 0, 7, 0, 0, 0, 6],
            &[0; 6],
        ]
        .concat();
        client.send(&bytes[..length]);
        drop(client);
    }
    for length in [1, 27] {
        let mut client = served.client();
        client.send(&[0x25, 0x60, 0x95, 0x13].repeat(7)[..length]);
        drop(client);
    }
    let mut client = served.client();
    client.request(WRITE, 0, 1, 0, 1 << 20);
    client.send(&[1; 1000]);
    drop(client);
    assert_serves(&served);
    // The half write has changed nothing.
    assert_eq!(served.client().read(0, 100), [0; 100]);
}

#[test]
fn a_request_with_a_wrong_magic_number_or_a_huge_write_ends_the_connection() {
    let served = served();
    let mut client = served.client();
    client.send(&[7; 28]);
    assert!(client.rest().is_empty());
    let mut client = served.client();
    client.request(WRITE, 0, 1, 0, u32::MAX);
    assert!(client.rest().is_empty());
    assert_serves(&served);
}

#[test]
fn options_that_cannot_be_are_refused_and_the_negotiation_goes_on() {
    const ACK: u32 = 1;
    const UNSUP: u32 = 0x8000_0001;
    const INVALID: u32 = 0x8000_0003;
    const UNKNOWN: u32 = 0x8000_0006;
    let served = served();
    let mut client = served.connect();
    client.greet();
    for (option, data, kind) in [
        (5, &b""[..], UNSUP),
        (11, b"", UNSUP),
        (99, b"abc", UNSUP),
        (3, b"x", INVALID),
        (7, b"", INVALID),
        (7, b"\xff\xff\xff\xff\0\0", INVALID),
        (6, b"\0\0\0\0\xff\xff", INVALID),
        (6, b"\0\0\0\x01x\0\0", UNKNOWN),
        // Structured replies come first.
        (10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation", INVALID),
        (8, b"x", INVALID),
        (8, b"", ACK),
        (10, b"\0\0\0\0\xff\xff\xff\xff\0\0\0\x05base:", INVALID),
        (10, b"\0\0\0\x01x\0\0\0\0", UNKNOWN),
        // Another server's context is not an error; there is none of it.
        (10, b"\0\0\0\0\0\0\0\x01\0\0\0\x05qemu:", ACK),
    ] {
        client.option(option, data);
        let reply = client.option_reply();
        assert_eq!((reply.0, reply.1), (option, kind), "{data:?}");
    }
    client.go();
    // No context was selected.
    client.request(BLOCK_STATUS, 0, 5, 0, 4096);
    assert_eq!(client.chunk_error(5), EINVAL);
    client.request(READ, DF, 6, 0, (32 << 20) + 1);
    assert_eq!(client.chunk_error(6), EOVERFLOW);
    client.request(READ, DF, 7, 5, 3);
    assert_eq!(client.chunk(7), (1, vec![0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0]));
    client.request(READ, 0, 8, 5, 0);
    assert_eq!(client.chunk(8), (0, vec![]));

    let mut client = served.connect();
    client.greet();
    client.option(2, b"");
    assert_eq!(client.option_reply(), (2, ACK, vec![]));
    assert!(client.rest().is_empty());
}

#[test]
fn requests_that_cannot_be_are_refused_and_the_connection_goes_on() {
    let served = served();
    let mut client = served.client();
    for (kind, flags, offset, length, error) in [
        (READ, 0, SIZE, 1, EINVAL),
        (READ, 0, u64::MAX, 2, EINVAL),
        (READ, 0, 0, u32::MAX, EINVAL),
        (READ, 0, 0, (32 << 20) + 1, EINVAL),
        (READ, DF, 0, 1, EINVAL),
        (READ, 0x8000, 0, 1, EINVAL),
        (FLUSH, 0, 0, 1, EINVAL),
        (FLUSH, NO_HOLE, 0, 0, EINVAL),
        (TRIM, 0, 0, 4096, EINVAL),
        (WRITE_ZEROES, 0, SIZE - 1, 2, ENOSPC),
        (WRITE_ZEROES, REQ_ONE, 0, 1, EINVAL),
        (WRITE_ZEROES, FAST_ZERO, 0, 4096, ENOTSUP),
        (BLOCK_STATUS, 0, 0, 4096, EINVAL),
        (5, 0, 0, 4096, EINVAL),
        (999, 0, 0, 4096, EINVAL),
    ] {
        let got = client.ask(kind, flags, offset, length);
        assert_eq!(got, error, "{kind} with {flags} of {length} at {offset}");
    }
    // The payload of a refused write is skipped.
    assert_eq!(client.write(0, SIZE - 1, b"ab"), ENOSPC);
    assert_eq!(client.write(NO_HOLE, 0, b"ab"), EINVAL);
    // An empty request changes nothing.
    assert_eq!(client.write(0, 5, b""), 0);
    assert_eq!(client.ask(WRITE_ZEROES, 0, 5, 0), 0);
    assert_eq!(client.ask(READ, 0, SIZE, 0), 0);
    assert_eq!(client.write(0, SIZE - 2, b"ab"), 0);
    assert_eq!(client.read(SIZE - 3, 3), b"\0ab");
    assert_serves(&served);
}

#[test]
fn a_read_only_export_refuses_every_change() {
    let device = Arc::new(SimDevice::new("sim", SIZE).with_discards());
    let before = device.digest();
    let options = ExportOptions {
        read_only: true,
        ..ExportOptions::default()
    };
    let served = Served::with(device.clone(), options);
    let mut client = served.connect();
    client.greet();
    let (size, flags) = client.go();
    assert_eq!((size, flags & 2), (SIZE, 2));
    assert_eq!(client.write(0, 0, b"ab"), EPERM);
    assert_eq!(client.ask(WRITE_ZEROES, 0, 0, 4096), EPERM);
    assert_eq!(client.ask(TRIM, 0, 0, 4096), EPERM);
    assert_eq!(client.read(0, 2), b"\0\0");
    assert_eq!(client.ask(FLUSH, 0, 0, 0), 0);
    assert_eq!(device.digest(), before);
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_client_that_does_not_read_its_replies_holds_bounded_memory_and_no_other_client() {
    let device = Arc::new(SimDevice::new("sim", SIZE));
    device.write_at(0, &[1; 16 << 20]).unwrap();
    let mut served = Served::new(device);
    let before = resident_bytes();
    let mut silent = served.client();
    let limit = Some(Duration::from_millis(200));
    silent.stream.set_write_timeout(limit).unwrap();
    // 4 GiB of replies, or as many requests as the server takes.
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend([0; 20]);
    bytes.extend((16u32 << 20).to_be_bytes());
    for _ in 0..256 {
        if silent.stream.write_all(&bytes).is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    let held = resident_bytes().saturating_sub(before);
    assert!(held < 100 << 20, "{held} bytes");
    // It has read blocks 0 to 4095, and others may change them.
    assert_serves(&served);
    let begun = Instant::now();
    served.stop().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
    // The end of the server ends the connection.
    let mut rest = vec![0; 1 << 20];
    while silent.stream.read(&mut rest).is_ok_and(|count| count > 0) {}
}

#[test]
fn connections_beyond_the_limit_are_closed_and_free_ones_are_used_again() {
    let served = served();
    let mut clients: Vec<_> = (0..32).map(|_| served.client()).collect();
    assert!(served.connect().rest().is_empty());
    for client in &mut clients {
        assert_eq!(client.read(0, 1), [0]);
    }
    clients.truncate(31);
    // The server notices the end of the last one soon.
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let mut client = served.connect();
        if client.rest_or_greeting() {
            break;
        }
        assert!(Instant::now() < end);
    }
}

impl support::Client {
    /// Returns whether the server greets.
    fn rest_or_greeting(&mut self) -> bool {
        let mut greeting = [0; 18];
        self.stream.read_exact(&mut greeting).is_ok()
    }
}

#[test]
fn random_bytes_end_the_connection_or_wait_for_more() {
    let served = served();
    let mut random = jericho_sim::Random::new(3);
    for _ in 0..200 {
        let mut client = served.client();
        let bytes: Vec<u8> = (0..BLOCK).map(|_| random.next_u64() as u8).collect();
        // The server may end the connection before it has taken everything.
        let _ = client.stream.write_all(&bytes);
    }
    assert_serves(&served);
}
