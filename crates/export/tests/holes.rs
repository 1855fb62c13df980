//! The block status, zeros and trims on a sparse file.

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jericho_storage::{OpenOptions, open_device};
use support::{BLOCK_STATUS, Client, FAST_ZERO, FUA, NO_HOLE, REQ_ONE, Served, TRIM, WRITE_ZEROES};

const MIB: u64 = 1 << 20;
const HOLE_ZERO: u32 = 3;
const DATA: u32 = 0;

fn served(dir: &Path) -> Served {
    let options = OpenOptions {
        create_size: Some(16 * MIB),
        ..OpenOptions::default()
    };
    Served::new(open_device(&dir.join("file"), options).unwrap())
}

/// Returns the runs that the server reports.
fn status(client: &mut Client, flags: u16, offset: u64, length: u64) -> Vec<(u64, u32)> {
    client.request(BLOCK_STATUS, flags, 5, offset, length as u32);
    let (kind, data) = client.chunk(5);
    assert_eq!((kind, &data[..4]), (5, &[0u8, 0, 0, 1][..]));
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    let runs = data[4..].chunks(8);
    runs.map(|run| (number(&run[..4]).into(), number(&run[4..])))
        .collect()
}

fn write(client: &mut Client, offset: u64, length: usize) {
    client.request(support::WRITE, 0, 6, offset, length as u32);
    client.send(&vec![7; length]);
    assert_eq!(client.reply(), (6, 0));
}

#[test]
fn a_sparse_file_has_the_block_status_that_its_holes_have() {
    let dir = tempfile::tempdir().unwrap();
    let served = served(dir.path());
    let mut client = served.structured_client();
    let all = |client: &mut Client| status(client, 0, 0, 16 * MIB);
    assert_eq!(all(&mut client), [(16 * MIB, HOLE_ZERO)]);
    write(&mut client, 4 * MIB, MIB as usize);
    write(&mut client, 8 * MIB + 100, 50);
    let block = 4096;
    let runs = [
        (4 * MIB, HOLE_ZERO),
        (MIB, DATA),
        (3 * MIB, HOLE_ZERO),
        (block, DATA),
        (8 * MIB - block, HOLE_ZERO),
    ];
    assert_eq!(all(&mut client), runs);
    assert_eq!(status(&mut client, REQ_ONE, 0, 16 * MIB), runs[..1]);
    // A request may begin and end inside a block.
    let part = status(&mut client, 0, 8 * MIB - 10, 30);
    assert_eq!(part, [(10, HOLE_ZERO), (20, DATA)]);
    assert_eq!(status(&mut client, 0, 4 * MIB + 1, 1), [(1, DATA)]);
    client.request(BLOCK_STATUS, 0, 7, 15 * MIB, 2 << 20);
    assert_eq!(client.chunk_error(7), 22);
    client.request(BLOCK_STATUS, 0, 7, 0, 0);
    assert_eq!(client.chunk_error(7), 22);
}

#[test]
fn zeros_and_trims_make_holes_unless_the_client_wants_the_space() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = served(dir.path());
    let file = dir.path().join("file");
    let blocks = || file.metadata().unwrap().blocks() * 512;
    let mut client = served.client();
    client.write(0, 0, &vec![7; 8 << 20]);
    assert!(blocks() >= 8 * MIB);
    assert_eq!(client.ask(TRIM, 0, 100, 2 << 20), 0);
    assert_eq!(
        client.ask(WRITE_ZEROES, FAST_ZERO | FUA, 2 * MIB, 1 << 20),
        0
    );
    assert_eq!(client.ask(WRITE_ZEROES, 0, 3 * MIB + 1, 1 << 20), 0);
    assert!(blocks() <= 5 * MIB, "{}", blocks());
    // Not fast where the space must stay, and nothing has changed then.
    let both = FAST_ZERO | NO_HOLE;
    assert_eq!(client.ask(WRITE_ZEROES, both, 5 * MIB, 1 << 20), 95);
    assert_eq!(client.read(5 * MIB, 4096), [7; 4096]);
    let before = blocks();
    assert_eq!(client.ask(WRITE_ZEROES, NO_HOLE, 5 * MIB, 1 << 20), 0);
    assert!(blocks() >= before);
    served.stop().unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let is = |from: u64, to: u64, byte: u8| {
        let part = &bytes[from as usize..to as usize];
        part.iter().all(|b| *b == byte)
    };
    // The trim spares the blocks that it covers in part.
    assert!(is(0, 4096, 7) && is(4096, 2 * MIB, 0));
    assert!(is(2 * MIB, 3 * MIB, 0) && is(3 * MIB, 3 * MIB + 1, 7));
    assert!(is(3 * MIB + 1, 4 * MIB + 1, 0) && is(4 * MIB + 1, 5 * MIB, 7));
    assert!(is(5 * MIB, 6 * MIB, 0) && is(6 * MIB, 8 * MIB, 7));
}
