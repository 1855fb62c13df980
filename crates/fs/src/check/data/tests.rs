use jericho_metadata::store::Change;
use jericho_metadata::testing::{formatted, open_first, opened};

use super::*;

#[test]
fn a_batch_has_as_many_pieces_as_the_memory_allows_and_the_next_one_goes_on_there() {
    let device = formatted(32, 1);
    let volume = opened(&device);
    let (store, allocator) = open_first(&volume, 1 << 20);
    let put = |page: u64| {
        let extent = Extent {
            page,
            blocks: jericho_volume::Blocks {
                slice: 0,
                first: 1000 - page,
                count: 1,
            },
            unwritten: page == 14,
            summed: false,
        };
        Change::PutExtent(7, extent)
    };
    let changes: Vec<Change> = (0..20).step_by(2).map(put).collect();
    store.commit(&changes).unwrap();
    store.close().unwrap();
    drop((store, allocator));
    let progress = Progress::default();
    let (stores, _) = open_stores(&volume, false, &progress).unwrap();
    let mut walk = Walk::new(&stores);
    let mut batches = Vec::new();
    while let Some(batch) = walk.next(&volume, &stores, (1, 3)).unwrap() {
        let pages: Vec<u64> = batch[0].iter().map(|piece| piece.page).collect();
        batches.push(pages);
    }
    // In the order of the device, which is the reverse one here. Page 14 has no data.
    let expected: [&[u64]; 3] = [&[4, 2, 0], &[10, 8, 6], &[18, 16, 12]];
    assert_eq!(batches, expected);
}
