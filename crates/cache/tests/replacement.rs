//! The kinds of replacement, in the simulator that compares them on traces.
#![forbid(unsafe_code)]

#[allow(dead_code)]
#[path = "../examples/replacement/simulator.rs"]
mod simulator;
#[allow(dead_code)]
#[path = "../examples/replacement/trace.rs"]
mod trace;

use jericho_cache::replacement::{AgedSweep, Replacement, S3Fifo};
use simulator::{ModelSlice, ModelTable, ReadAhead, entries_for, footprint, optimum, run};
use trace::{Access, AccessKind, Importer};

const FRAMES: u32 = 2048;

fn read(file: u64, page: u64) -> Access {
    Access::new(AccessKind::Read, file, page)
}

fn aged_sweep() -> Box<dyn Replacement<ModelTable>> {
    Box::new(AgedSweep::default())
}

fn s3_fifo() -> Box<dyn Replacement<ModelTable>> {
    Box::new(S3Fifo::new(entries_for(FRAMES), FRAMES))
}

/// Pages of file 0 that are used again and again, among pages that are not.
const HOT: u64 = 1000;

/// Returns how many hot pages are left after a scan of many times the cache. `uses`: accesses to each page of the scan.
fn hot_pages_after_a_scan(
    kind: Box<dyn Replacement<ModelTable>>,
    uses: usize,
    ahead: u64,
) -> usize {
    const SCANNED: u64 = 20_000;
    let mut model = ModelSlice::new(FRAMES, kind);
    for round in 0..20 {
        (0..HOT).for_each(|page| model.access(read(0, page)));
        (0..300).for_each(|page| model.access(read(1, round * 300 + page)));
    }
    assert!((0..HOT).all(|page| model.has(read(0, page))), "hot");
    if ahead > 0 {
        model.set_read_ahead(ReadAhead::new(ahead, &[read(2, SCANNED - 1)]));
    }
    for page in 0..SCANNED {
        (0..uses).for_each(|_| model.access(read(2, page)));
    }
    (0..HOT).filter(|page| model.has(read(0, *page))).count()
}

#[test]
fn a_scan_evicts_the_hot_pages_with_lru() {
    assert_eq!(hot_pages_after_a_scan(aged_sweep(), 1, 0), 0);
}

#[test]
fn a_scan_leaves_the_hot_pages_with_s3_fifo() {
    assert!(hot_pages_after_a_scan(s3_fifo(), 1, 0) > 950);
}

#[test]
fn a_scan_in_small_pieces_leaves_the_hot_pages_with_s3_fifo() {
    assert!(hot_pages_after_a_scan(s3_fifo(), 8, 0) > 950);
}

#[test]
fn a_scan_that_is_read_ahead_leaves_the_hot_pages_with_s3_fifo() {
    assert!(hot_pages_after_a_scan(s3_fifo(), 1, 32) > 950);
}

#[test]
fn pages_used_least_recently_are_evicted_first_by_lru() {
    let mut model = ModelSlice::new(FRAMES, aged_sweep());
    (0..2000).for_each(|page| model.access(read(0, page)));
    // Uses pages 0 to 99, so that the oldest pages begin at page 100. Then more pages enter than there are free frames.
    (0..100).for_each(|page| model.access(read(0, page)));
    (2000..2300).for_each(|page| model.access(read(0, page)));
    let gone: Vec<u64> = (0..2300)
        .filter(|page| !model.has(read(0, *page)))
        .collect();
    assert!(gone.len() >= 2300 - FRAMES as usize);
    assert!(
        gone.iter().all(|page| (100..800).contains(page)),
        "{gone:?}"
    );
}

#[test]
fn the_optimum_evicts_the_page_that_is_missed_last() {
    let trace = [1, 2, 3, 1, 2].map(|page| read(0, page));
    let counts = optimum(&trace, 2);
    assert_eq!((counts.accesses, counts.misses), (5, 4));
    // Page 1 is overwritten before it is read, so evicting it costs nothing.
    let overwrite = |page| Access::new(AccessKind::Overwrite, 0, page);
    let trace = [
        overwrite(1),
        read(0, 2),
        read(0, 3),
        overwrite(1),
        read(0, 2),
    ];
    let counts = optimum(&trace, 2);
    assert_eq!((counts.accesses, counts.misses), (3, 2));
}

#[test]
fn no_kind_beats_the_optimum_and_a_run_is_repeatable() {
    let mut random = 1u64;
    let mut next = || {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // Lower pages are more frequent.
        let (a, b) = (random >> 50, (random >> 36) & 0x3fff);
        (a * b) >> 14
    };
    let trace: Vec<Access> = (0..100_000).map(|_| read(0, next())).collect();
    let best = optimum(&trace, FRAMES).misses;
    let all = footprint(&trace) as u64;
    for kind in [aged_sweep, s3_fifo] {
        let misses = run(&trace, FRAMES, 0, kind()).misses;
        assert!(misses >= best && best >= all, "{misses}, {best}, {all}");
        assert_eq!(misses, run(&trace, FRAMES, 0, kind()).misses);
    }
}

#[test]
fn trace_events_become_accesses() {
    let text = "\
          cat-17      [000] .....  1.000001: mm_filemap_add_to_page_cache: dev 7:0 ino c pfn=0x1 ofs=0 order=2
          cat-17      [000] .....  1.000002: mm_filemap_get_pages: dev=7:0 ino=c ofs=0-131071
          cat-17      [000] .....  1.000003: mm_filemap_get_pages: dev=7:0 ino=c ofs=8192-131071
           sh-18      [001] .....  1.000004: ext4_da_write_end: dev 7,0 ino 12 pos 4000 len 4292 copied 4292
  kdamond.0-9         [001] .....  1.000005: mm_filemap_delete_from_page_cache: dev 7:0 ino c pfn=0x1 ofs=0 order=0
           rm-19      [001] .....  1.000006: mm_filemap_delete_from_page_cache: dev 7:0 ino c pfn=0x1 ofs=4096 order=0
           rm-19      [001] .....  1.000007: ext4_evict_inode: dev 7,0 ino 12 nlink 0
          cat-20      [000] .....  1.000008: mm_filemap_get_pages: dev=7:0 ino=c ofs=0-4095
";
    let accesses = Importer::import(text.as_bytes()).expect("text");
    let expected = [
        // The file has four pages, and a long read is one read.
        (AccessKind::Read, 0, 0),
        (AccessKind::Read, 0, 1),
        (AccessKind::Read, 0, 2),
        (AccessKind::Read, 0, 3),
        (AccessKind::Modify, 0, 0),
        (AccessKind::Overwrite, 0, 1),
        (AccessKind::Modify, 0, 2),
        // A page that the kernel has reclaimed still exists; the removed file's does not.
        (AccessKind::Drop, 0, 1),
        // The inode's next file is another one.
        (AccessKind::Read, 1, 0),
    ];
    assert_eq!(
        accesses,
        expected.map(|(kind, file, page)| Access::new(kind, file, page))
    );
    let mut bytes = vec![];
    trace::write(&accesses, &mut bytes).expect("memory");
    assert_eq!(trace::parse(&bytes), accesses);
}
