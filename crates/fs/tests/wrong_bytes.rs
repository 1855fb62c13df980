//! Wrong bytes in each kind of durable metadata: a flipped bit, zeros, older bytes, and bytes of another place.
//!
//! Each case changes one block of a device, mounts the volume for reading and for writing, reads all files, checks, and repairs. Nothing
//! may panic or hang. `docs/formats/volume.md` says what happens to each kind.

mod mount;

use std::panic::Location;
use std::sync::mpsc::channel;
use std::sync::{Arc, Once};
use std::time::Duration;

use jericho_cache::{Intent, Slice};
use jericho_format::superblock::{CHUNK_SPARE, COPY_FIRST_BLOCK};
use jericho_fs::check::{CheckOptions, Report, Severity, check_devices};
use jericho_fs::types::{Kind, ROOT};
use jericho_fs::{File, Fs, FsOptions};
use jericho_sim::SimDevice;
use jericho_storage::Device;
use jericho_volume::{OpenMode, Volume};
use mount::{CALLER, Mount, PAGE, pattern, start_slices};

const DEVICE_BYTES: u64 = 64 << 20;
const BLOCK: usize = PAGE as usize;
/// Names and lengths of the files. Each has the pattern of its index.
const FILES: [(&str, usize); 4] = [
    ("one", 4096),
    ("two", 9000),
    ("three", 200_000),
    ("four", 1),
];

/// A volume, and the same volume some changes earlier.
struct Bed {
    older: SimDevice,
    device: SimDevice,
}

/// Silences panics within redb, which the store expects on damaged pages and turns into errors.
fn silence_redb() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let is_of_redb = |at: &Location| at.file().contains("/redb-");
            if !panic.location().is_some_and(is_of_redb) {
                others(panic);
            }
        }));
    });
}

/// Returns a volume with all files durable. With `is_killed`, its last changes are only in the journal.
fn bed(is_killed: bool) -> Bed {
    silence_redb();
    let mut mount = Mount::new(DEVICE_BYTES);
    let fs = mount.fs().clone();
    let dir = fs.mkdir(ROOT, b"dir", 0o755, CALLER).unwrap().ino;
    fs.symlink(ROOT, b"link", b"dir/other", CALLER).unwrap();
    for n in 0..300 {
        let name = format!("empty-{n}");
        let made = fs.mknod(dir, name.as_bytes(), Kind::File, 0o644, 0, CALLER);
        fs.setxattr(made.unwrap().ino, b"user.name", b"value", 0)
            .unwrap();
    }
    mount.commit();
    fs.checkpoint().unwrap();
    let older = mount.device.crash(0);
    for (index, (name, len)) in FILES.iter().enumerate() {
        let (_, file) = mount.create(name);
        mount.write(&file, 0, &pattern(index as u64, *len));
        mount.fsync(&file);
        fs.close_file(&file);
        if !is_killed {
            fs.checkpoint().unwrap();
        }
    }
    if is_killed {
        let device = mount.device.crash(0);
        drop(fs);
        mount.down();
        return Bed { older, device };
    }
    fs.close().unwrap();
    drop(fs);
    mount.down();
    let device = mount.device.crash(0);
    Bed { older, device }
}

fn volume(device: &Arc<SimDevice>, mode: OpenMode) -> Result<Volume, String> {
    Volume::open_from_devices(vec![device.clone()], mode).map_err(|e| e.to_string())
}

fn read_block(device: &SimDevice, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    device.read_at(block * PAGE, &mut bytes).unwrap();
    bytes
}

/// How the bytes of a block are wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    /// A flipped bit at a byte.
    Bit(usize),
    Zeros,
    /// The block as it was earlier: a write was lost.
    Older,
    /// The bytes of another block: a write went to the wrong place.
    Of(u64),
}

impl Bed {
    /// Returns the volume with one block changed, or `None` if that block has these bytes already.
    fn with(&self, block: u64, wrong: Wrong) -> Option<Arc<SimDevice>> {
        let before = read_block(&self.device, block);
        let mut bytes = before.clone();
        match wrong {
            Wrong::Bit(at) => bytes[at] ^= 4,
            Wrong::Zeros => bytes.fill(0),
            Wrong::Older => bytes = read_block(&self.older, block),
            Wrong::Of(other) => bytes = read_block(&self.device, other),
        }
        (bytes != before).then(|| {
            let device = self.device.crash(0);
            device.write_at(block * PAGE, &bytes).unwrap();
            device.flush().unwrap();
            Arc::new(device)
        })
    }

    /// Returns the first block and the number of blocks of the journal.
    fn journal(&self) -> (u64, u64) {
        let device = Arc::new(self.device.crash(0));
        volume(&device, OpenMode::READ)
            .unwrap()
            .superblocks()
            .with(|s| {
                (
                    s.slices[0].journal_first_block.get(),
                    u64::from(s.slices[0].journal_blocks.get()),
                )
            })
    }

    /// Returns the blocks of the metadata region that are not zero, on the device.
    fn region(&self) -> Vec<u64> {
        let device = Arc::new(self.device.crash(0));
        let opened = volume(&device, OpenMode::READ).unwrap();
        let blocks: Vec<u64> = opened.superblocks().with(|s| {
            let mut chunks: Vec<_> = s.chunks.iter().collect();
            chunks.retain(|chunk| chunk.position.get() != CHUNK_SPARE);
            chunks.sort_by_key(|chunk| chunk.position.get());
            let count = u64::from(s.head.chunk_blocks.get());
            let blocks = |first: u64| first..first + count;
            chunks
                .iter()
                .flat_map(|c| blocks(c.first_block.get()))
                .collect()
        });
        let is_used = |block: &u64| {
            read_block(&self.device, *block)
                .iter()
                .any(|byte| *byte != 0)
        };
        blocks.into_iter().filter(is_used).collect()
    }
}

/// What a mount shows.
#[derive(Debug, PartialEq)]
enum Shown {
    /// Everything is as it was written.
    All,
    /// The mount is refused, or something cannot be read. Holds the first message.
    Error(String),
    /// Something is there with wrong contents, or is not there.
    Wrong(String),
}

/// Mounts the volume and reads everything.
fn show(device: &SimDevice, mode: OpenMode) -> Shown {
    let device = Arc::new(device.crash(0));
    let volume = match volume(&device, mode) {
        Ok(volume) => volume,
        Err(error) => return Shown::Error(error),
    };
    let slices = start_slices(&volume, Duration::from_secs(3600));
    let options = FsOptions {
        store_cache_bytes: 4 << 20,
        read_only: mode.read_only,
        inode_cache: 100,
        commit_interval_ms: 3_600_000,
    };
    let shown = match Fs::open(Arc::new(volume), slices.clone(), options) {
        Ok(fs) => {
            let shown = show_files(&fs, &slices);
            if !mode.read_only {
                // A change, and an orderly end. Both may fail.
                let _ = fs.mkdir(ROOT, b"new", 0o755, CALLER);
                let _ = fs.close();
            }
            shown
        }
        Err(error) => Shown::Error(error.to_string()),
    };
    slices.iter().for_each(|slice| slice.close());
    shown
}

fn show_files(fs: &Arc<Fs>, slices: &[Arc<Slice>]) -> Shown {
    for (index, (name, len)) in FILES.iter().enumerate() {
        let opened = fs
            .lookup(ROOT, name.as_bytes())
            .and_then(|attr| fs.open_file(attr.ino));
        let bytes = match opened.and_then(|file| read(&file, slices)) {
            Ok(bytes) => bytes,
            Err(error) if error.errno() == 2 => return Shown::Wrong(format!("{name} is missing")),
            Err(error) => return Shown::Error(error.to_string()),
        };
        if bytes != pattern(index as u64, *len) {
            return Shown::Wrong(format!("{name} has wrong contents"));
        }
    }
    let mut entries = 0;
    let dir = match fs.lookup(ROOT, b"dir") {
        Ok(dir) => dir.ino,
        Err(error) => return Shown::Error(error.to_string()),
    };
    match fs.readdir(dir, 0, &mut |_| {
        entries += 1;
        true
    }) {
        Ok(_) if entries == 302 => Shown::All,
        Ok(_) => Shown::Wrong(format!("dir has {entries} entries")),
        Err(error) => Shown::Error(error.to_string()),
    }
}

fn read(file: &Arc<File>, slices: &[Arc<Slice>]) -> jericho_fs::Result<Vec<u8>> {
    let size = file.size().min(1 << 20) as usize;
    let mut data = vec![0; size];
    for (page, bytes) in data.chunks_mut(BLOCK).enumerate() {
        let slice = &slices[usize::from(file.layout().home())];
        let (sender, receiver) = channel();
        let reply = move |pinned| sender.send(pinned).unwrap();
        slice.get(&file.object(), page as u64, 1, Intent::Read, reply);
        receiver
            .recv()
            .unwrap()
            .map_err(jericho_fs::error::of_cache)?
            .read(page as u64, 0, bytes)
            .unwrap();
    }
    Ok(data)
}

fn check(device: &Arc<SimDevice>, repair: bool) -> Result<Report, String> {
    let options = CheckOptions {
        repair,
        force: false,
    };
    check_devices(vec![device.clone()], options).map_err(|e| e.to_string())
}

/// Returns the texts of all damage that a check reports, or its error. A check changes nothing.
fn damage(device: &Arc<SimDevice>) -> Vec<String> {
    let before = device.digest();
    let found = match check(device, false) {
        Ok(report) => {
            let worse = |f: &&jericho_fs::check::Finding| f.severity != Severity::Info;
            report
                .findings
                .iter()
                .filter(worse)
                .map(|f| f.text.clone())
                .collect()
        }
        Err(error) => vec![error],
    };
    assert_eq!(device.digest(), before, "the check wrote");
    found
}

/// Bytes that are changed in a block: near its begin, in its middle and near its end.
const BITS: [Wrong; 3] = [Wrong::Bit(20), Wrong::Bit(2000), Wrong::Bit(4000)];

/// Puts other bytes into a block.
fn spoil(device: &SimDevice, block: u64) {
    device.write_at(block * PAGE, &[7; BLOCK]).unwrap();
    device.flush().unwrap();
}

/// Expects the same from a mount for reading, a mount for writing and a check: an error that has all `parts`.
#[track_caller]
fn refused(device: &Arc<SimDevice>, parts: &[&str]) {
    let mut messages = damage(device);
    assert!(!messages.is_empty(), "the check is silent");
    for mode in [OpenMode::READ, OpenMode::WRITE] {
        match show(device, mode) {
            Shown::Error(error) => messages.push(error),
            other => panic!("{mode:?}: {other:?}"),
        }
    }
    for message in messages {
        for part in parts {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }
}

#[test]
fn a_wrong_label_is_refused_with_the_name_of_the_device() {
    let bed = bed(false);
    for wrong in BITS {
        refused(
            &bed.with(0, wrong).unwrap(),
            &["the label of sim is damaged"],
        );
    }
    for wrong in [Wrong::Zeros, Wrong::Of(1)] {
        refused(
            &bed.with(0, wrong).unwrap(),
            &["sim is not a Jericho volume"],
        );
    }
}

#[test]
fn the_other_copy_of_the_superblock_counts_and_a_check_names_the_wrong_one() {
    let bed = bed(false);
    for (copy, first) in COPY_FIRST_BLOCK.into_iter().enumerate() {
        for (block, wrong) in BITS.map(|wrong| (first, wrong)).into_iter().chain([
            (first, Wrong::Zeros),
            (first, Wrong::Of(0)),
            (first + 13, BITS[1]),
        ]) {
            let device = bed.with(block, wrong).unwrap();
            let found = check(&device, false).unwrap();
            let text = format!("copy {copy} of the superblock");
            let is_named = found.findings.iter().any(|f| f.text.contains(&text));
            assert!(is_named, "{:?}", found.findings);
            // A power cut may have torn a copy with a right beginning, whichever it is, although the volume was cleanly unmounted.
            if block != first {
                assert!(found.is_sound(), "{copy}: {:?}", found.findings);
            }
            for mode in [OpenMode::READ, OpenMode::WRITE] {
                assert_eq!(show(&device, mode), Shown::All, "{copy} {wrong:?}");
            }
            let repaired = check(&device, true).unwrap();
            assert!(repaired.is_sound(), "{:?}", repaired.findings);
            assert_eq!(damage(&device), [] as [String; 0]);
        }
    }
    let device = bed.with(COPY_FIRST_BLOCK[0], Wrong::Zeros).unwrap();
    spoil(&device, COPY_FIRST_BLOCK[1]);
    refused(&device, &["the superblock of sim is damaged"]);
}

#[test]
fn the_other_copy_of_the_journal_header_counts_and_without_both_only_readers_go_on() {
    for is_killed in [false, true] {
        let bed = bed(is_killed);
        let (first, _) = bed.journal();
        for (copy, wrong) in [0, 1].into_iter().flat_map(|copy| {
            let wrong = BITS.into_iter().chain([Wrong::Zeros]);
            wrong.map(move |wrong| (copy, wrong))
        }) {
            let device = bed.with(first + copy, wrong).unwrap();
            // After a crash the copy may have been torn.
            let found = check(&device, false).unwrap();
            let place = format!("the journal's header at block {} of sim", first + copy);
            let is_named = found.findings.iter().any(|f| f.text.contains(&place));
            assert!(is_named, "{copy} {wrong:?}: {:?}", found.findings);
            assert!(is_killed || !found.is_sound());
            for mode in [OpenMode::READ, OpenMode::WRITE] {
                assert_eq!(show(&device, mode), Shown::All, "{copy} {wrong:?}");
            }
            if !is_killed {
                assert!(check(&device, true).unwrap().is_sound());
                assert_eq!(check(&device, false).unwrap().findings, []);
            }
        }
        let device = bed.with(first, Wrong::Zeros).unwrap();
        spoil(&device, first + 1);
        let parts = ["the journal's header on sim", &format!("block {first}")];
        let Shown::Error(error) = show(&device, OpenMode::WRITE) else {
            panic!("a writer goes on");
        };
        let found = damage(&device);
        for part in parts {
            assert!(error.contains(part), "{error}");
            assert!(found.iter().any(|text| text.contains(part)), "{found:?}");
        }
        // A reader sees the last checkpoint. Nothing that it has is wrong.
        let shown = show(&device, OpenMode::READ);
        let missing = Shown::Wrong("one is missing".into());
        assert_eq!(shown, if is_killed { missing } else { Shown::All });
        assert!(check(&device, true).unwrap().is_sound());
        assert_eq!(damage(&device), [] as [String; 0]);
        let shown = show(&device, OpenMode::WRITE);
        assert!(!matches!(shown, Shown::Error(_)), "{shown:?}");
    }
}

/// Returns the blocks of the journal that begin segments of the last mount, in order.
fn segments(bed: &Bed) -> Vec<u64> {
    let (first, count) = bed.journal();
    let read = |block: u64| read_block(&bed.device, block);
    let incarnation = |block: &[u8]| u64::from_le_bytes(block[16..24].try_into().unwrap());
    let seq = |block: &[u8]| u64::from_le_bytes(block[24..32].try_into().unwrap());
    let mut found: Vec<(u64, u64, u64)> = (first + 2..first + count)
        .map(|block| (block, read(block)))
        .filter(|(_, bytes)| bytes.starts_with(b"JSEG"))
        .map(|(block, bytes)| (incarnation(&bytes), seq(&bytes), block))
        .collect();
    found.sort_unstable();
    let newest = found.last().unwrap().0;
    found.retain(|segment| segment.0 == newest);
    found.into_iter().map(|segment| segment.2).collect()
}

#[test]
fn a_wrong_segment_of_the_journal_is_named_with_its_block_and_the_last_one_is_a_torn_end() {
    let bed = bed(true);
    let segments = segments(&bed);
    assert!(segments.len() > FILES.len(), "{segments:?}");
    let (last, others) = segments.split_last().unwrap();
    // The segments of the four files are the last ones. The checkpoint has those before.
    for block in &others[others.len() + 1 - FILES.len()..] {
        for wrong in [
            Wrong::Bit(20),
            Wrong::Bit(100),
            Wrong::Zeros,
            Wrong::Older,
            Wrong::Of(*last),
        ] {
            let Some(device) = bed.with(*block, wrong) else {
                continue;
            };
            let place = format!("the journal on sim is damaged: block {block} ");
            let Shown::Error(error) = show(&device, OpenMode::WRITE) else {
                panic!("{block} {wrong:?}: a writer goes on");
            };
            assert!(
                error.contains(&place) && error.contains("--read-only"),
                "{error}"
            );
            let found = damage(&device);
            assert!(found.iter().any(|text| text.contains(&place)), "{found:?}");
            // A reader has the batches before. What it has is right.
            match show(&device, OpenMode::READ) {
                Shown::Wrong(what) => assert!(what.ends_with("is missing"), "{what}"),
                other => panic!("{block} {wrong:?}: {other:?}"),
            }
        }
    }
    let device = bed.with(*last, Wrong::Zeros).unwrap();
    assert_eq!(damage(&device), [] as [String; 0]);
    for mode in [OpenMode::READ, OpenMode::WRITE] {
        assert_eq!(show(&device, mode), Shown::Wrong("four is missing".into()));
    }
}

/// Rows that are too short, in pages with right checksums: of each table the first and the last row.
#[test]
fn a_row_of_a_wrong_form_is_refused_when_it_is_used_and_named_by_a_check() {
    use jericho_metadata::store::tables::Table::{
        Bitmaps, Entries, Extents, Inodes, Orphans, Used, Values, Xattrs,
    };
    let bed = bed(false);
    let tables = [
        (Inodes, "inode"),
        (Entries, "directory"),
        (Extents, "extent"),
        (Xattrs, "attribute"),
        (Bitmaps, "bitmap"),
        (Used, "used blocks"),
        (Orphans, "to be removed"),
        (Values, "mark next_ino"),
    ];
    let mut cases = 0;
    for (table, word) in tables {
        for at in [0, usize::MAX] {
            let device = Arc::new(bed.device.crash(0));
            let opened = volume(&device, OpenMode::WRITE).unwrap();
            let (stores, allocator) = jericho_metadata::stores::open(&opened, 1 << 20).unwrap();
            let mut rows = stores[0].raw_rows(table).unwrap();
            if table == Values {
                rows.retain(|(key, _)| key.starts_with(b"next_ino"));
            }
            let row = rows.get(at.min(rows.len().saturating_sub(1))).cloned();
            let (key, value) = row.unwrap_or((vec![0; 8], Vec::new()));
            // Orphans and attributes have their inode in the key.
            let changed = match table {
                Orphans => vec![(table, vec![9; 8], Some(Vec::new()))],
                Xattrs => vec![(table, vec![9; 12], Some(value))],
                _ => vec![(table, key, Some(value[..value.len() - 1].to_vec()))],
            };
            stores[0].put_raw_rows(changed).unwrap();
            stores[0].close().unwrap();
            drop((stores, allocator, opened));
            cases += 1;
            let found = damage(&device);
            assert!(
                found.iter().any(|text| text.contains(word)),
                "{table:?}: {found:?}"
            );
            for mode in [OpenMode::READ, OpenMode::WRITE] {
                let shown = show(&device, mode);
                assert!(
                    !matches!(shown, Shown::Wrong(_)),
                    "{table:?} {at}: {shown:?}"
                );
            }
            let repaired = check(&device, true).unwrap();
            assert!(repaired.is_sound(), "{table:?}: {:?}", repaired.findings);
            assert_eq!(damage(&device), [] as [String; 0]);
        }
    }
    assert_eq!(cases, 16);
}

#[test]
fn a_check_finds_each_wrong_page_of_the_metadata_store_that_matters_and_names_its_place() {
    let bed = bed(false);
    let (mut cases, mut noticed, mut named, mut unnoticed) = (0, 0, 0, 0);
    let region = bed.region();
    for block in &region {
        for wrong in [
            Wrong::Bit(100),
            Wrong::Bit(3000),
            Wrong::Zeros,
            Wrong::Older,
            Wrong::Of(block + 1),
        ] {
            let Some(device) = bed.with(*block, wrong) else {
                continue;
            };
            cases += 1;
            let found = damage(&device);
            // Both kinds of mounts, in turn.
            let mode = if cases % 2 == 0 {
                OpenMode::READ
            } else {
                OpenMode::WRITE
            };
            let shown = show(&device, mode);
            if found.is_empty() {
                // Bytes of a page that is free, or behind the rows of a page.
                assert_eq!(
                    shown,
                    Shown::All,
                    "block {block} {wrong:?}: the check is silent"
                );
                continue;
            }
            assert!(
                found.iter().any(|text| text.contains("metadata store")),
                "{found:?}"
            );
            noticed += 1;
            unnoticed += u64::from(matches!(shown, Shown::Wrong(_)));
            let end = (block + 1) * PAGE;
            let place = format!("at bytes {}..{end} of sim (block {block})", block * PAGE);
            named += u64::from(found.iter().any(|text| text.contains(&place)));
            assert!(
                found
                    .iter()
                    .any(|text| text.contains("of the metadata region")),
                "{found:?}"
            );
        }
    }
    println!(
        "{cases} cases in {} blocks: {noticed} matter, {named} named, {unnoticed} not noticed by a mount",
        region.len()
    );
    // redb verifies a page as soon as it has read it. Only of a page that is exchanged for another one, a later page may be read
    // before redb notices.
    assert!(
        noticed > 50 && named * 5 >= noticed * 4,
        "{named} of {noticed}"
    );
}
