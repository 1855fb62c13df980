use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;
use jericho_format::label::{Label, LabelState};
use jericho_format::superblock::{COPY_FIRST_BLOCK, Superblock};
use jericho_storage::{Device, Layer, OpenOptions, open_device};
use zerocopy::byteorder::little_endian::U32;

use crate::*;

/// Formats a volume without contents.
fn make(paths: &[PathBuf], options: &FormatOptions) -> Result<Summary, VolumeError> {
    format(paths, options, |_| Ok(()))
}

fn paths(dir: &tempfile::TempDir, names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(|name| dir.path().join(name)).collect()
}

fn of_size(mib: u64) -> FormatOptions {
    FormatOptions {
        size_bytes: Some(mib << 20),
        ..FormatOptions::default()
    }
}

fn refusal<T>(result: Result<T, VolumeError>, needle: &str) {
    let error = result.err().expect("the call must fail");
    assert!(error.to_string().contains(needle), "{error}");
}

const WRITE: OpenMode = OpenMode::WRITE;

#[test]
fn a_name_has_the_same_hash_after_opening_again_and_another_on_another_volume() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (paths(&dir, &["a"]), paths(&dir, &["b"]));
    make(&a, &of_size(32)).unwrap();
    make(&b, &of_size(32)).unwrap();
    let hash_in = |file: &[PathBuf]| Volume::open(&file[0], WRITE).unwrap().hash_name(b"name");
    let hash = hash_in(&a);
    assert_eq!(hash_in(&a), hash);
    assert_ne!(hash_in(&b), hash);
    assert!(hash > 0 && hash < 1 << 63);
}

#[test]
fn a_volume_of_two_files_opens_by_the_first_and_after_both_were_moved() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["one", "two"]);
    make(
        &files,
        &FormatOptions {
            slices: Some(2),
            ..of_size(64)
        },
    )
    .unwrap();
    let volume = Volume::open(&files[0], WRITE).unwrap();
    assert_eq!(volume.devices().len(), 2);
    assert_eq!(
        [volume.slices()[0].device(), volume.slices()[1].device()],
        [0, 1]
    );
    drop(volume);
    refusal(Volume::open(&files[1], WRITE), "first device");
    std::fs::create_dir(dir.path().join("new")).unwrap();
    let moved = paths(&dir, &["new/one", "new/two"]);
    std::fs::rename(&files[0], &moved[0]).unwrap();
    std::fs::rename(&files[1], &moved[1]).unwrap();
    Volume::open(&moved[0], WRITE).unwrap();
    std::fs::remove_file(&moved[1]).unwrap();
    let volume = Volume::open(&moved[0], WRITE).unwrap();
    let missing = |slice: usize| volume.missing_of(&volume.slices()[slice]);
    assert!(missing(0).is_none());
    assert!(missing(1).unwrap().name().ends_with("two"));
}

#[test]
fn the_newest_superblock_counts_for_a_slice_whose_device_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["one", "two"]);
    let options = FormatOptions {
        slices: Some(2),
        ..of_size(64)
    };
    make(&files, &options).unwrap();
    let node = |volume: &Volume| volume.superblocks().with(|s| s.slices[1].node.get());
    let volume = Volume::open(&files[0], WRITE).unwrap();
    volume
        .superblocks()
        .update(&[], |s| s.slices[1].node.set(7))
        .unwrap();
    drop(volume);
    // The first device loses the change.
    let device = jericho_storage::open_device(&files[0], Default::default()).unwrap();
    let copies = crate::superblocks::read_copies(&*device).unwrap();
    let is_new = |copy: &Result<Superblock, _>| {
        copy.as_ref()
            .is_ok_and(|copy| copy.slices[1].node.get() == 7)
    };
    let newer = copies.iter().position(is_new).unwrap();
    device
        .write_at(COPY_FIRST_BLOCK[newer] * PAGE_BYTES, &[0; 4096])
        .unwrap();
    device.flush().unwrap();
    drop(device);
    let volume = Volume::open(&files[0], WRITE).unwrap();
    assert_eq!(node(&volume), 7);
    // A change brings the first device up to date.
    volume.superblocks().update(&[], |_| {}).unwrap();
    drop(volume);
    std::fs::remove_file(&files[1]).unwrap();
    assert_eq!(node(&Volume::open(&files[0], WRITE).unwrap()), 7);
}

#[test]
fn a_device_of_another_volume_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let a = paths(&dir, &["a1", "a2"]);
    let b = paths(&dir, &["b1", "b2"]);
    make(&a, &of_size(64)).unwrap();
    make(&b, &of_size(64)).unwrap();
    std::fs::rename(&b[1], &a[1]).unwrap();
    let before = bytes(&[&a[0], &a[1], &b[0]]);
    let error = Volume::open(&a[0], WRITE).err().unwrap().to_string();
    for part in [
        "a2",
        "device 1",
        "belongs to another volume",
        "connect the right",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(bytes(&[&a[0], &a[1], &b[0]]) == before);
}

/// Returns the bytes of files.
fn bytes(files: &[&PathBuf]) -> Vec<Vec<u8>> {
    files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect()
}

#[test]
fn a_copy_beside_the_original_is_never_used_with_it_unless_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let original = paths(&dir, &["a", "b"]);
    make(&original, &of_size(64)).unwrap();
    std::fs::create_dir(dir.path().join("copy")).unwrap();
    let copy = paths(&dir, &["copy/a", "copy/b"]);
    for (from, to) in original.iter().zip(&copy) {
        std::fs::copy(from, to).unwrap();
    }
    let all = [&original[0], &original[1], &copy[0], &copy[1]];
    let before = bytes(&all);
    let names = |error: &str, files: [&PathBuf; 2]| {
        let shown = files
            .iter()
            .all(|file| error.contains(&file.display().to_string()));
        assert!(shown && error.contains("--device"), "{error}");
    };
    // The original is where the volume was formatted. Its copy has both second devices to choose from.
    Volume::open(&original[0], WRITE).unwrap();
    let error = Volume::open(&copy[0], WRITE).err().unwrap().to_string();
    names(&error, [&copy[0], &original[0]]);
    // The user decides.
    for (first, second) in [(0, 1), (2, 3)] {
        let opened = Volume::open_among(all[first], &[all[second].clone()], WRITE).unwrap();
        assert_eq!(&*opened.devices()[1].name(), all[second].to_str().unwrap());
    }
    let both = [copy[1].clone(), original[1].clone()];
    let error = Volume::open_among(&copy[0], &both, WRITE).err().unwrap();
    names(&error.to_string(), [&copy[1], &original[1]]);
    assert!(bytes(&all) == before);
    // Without the original's first device, two second devices are left.
    std::fs::remove_file(&original[0]).unwrap();
    let error = Volume::open(&copy[0], WRITE).err().unwrap().to_string();
    names(&error, [&original[1], &copy[1]]);
    std::fs::remove_file(&original[1]).unwrap();
    Volume::open(&copy[0], WRITE).unwrap();
}

#[test]
fn a_copied_device_under_another_name_is_used_only_where_the_right_one_is_missing_and_alone() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["a", "b", "b.old", "b.older"]);
    make(&files[..2], &of_size(64)).unwrap();
    std::fs::copy(&files[1], &files[2]).unwrap();
    let opened = Volume::open(&files[0], WRITE).unwrap();
    assert_eq!(&*opened.devices()[1].name(), files[1].to_str().unwrap());
    drop(opened);
    std::fs::rename(&files[1], &files[3]).unwrap();
    refusal(Volume::open(&files[0], WRITE), "b.old and");
    std::fs::remove_file(&files[2]).unwrap();
    Volume::open(&files[0], WRITE).unwrap();
}

#[test]
fn a_volume_of_format_1_is_refused_with_the_version_that_reads_it_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["volume"]);
    make(&files, &of_size(32)).unwrap();
    make_format_1(&files[0]);
    let before = bytes(&[&files[0]]);
    for mode in [WRITE, OpenMode::READ] {
        refusal(Volume::open(&files[0], mode), "format version 1");
        refusal(
            Volume::open(&files[0], mode),
            "version 1 is read by builds of jericho 0.1.0 without a journal: copy the files",
        );
    }
    let again = make(&files, &of_size(32)).err().unwrap().to_string();
    assert!(
        again.contains("format version 1") && again.contains("--force"),
        "{again}"
    );
    assert!(bytes(&[&files[0]]) == before);
}

/// Gives a volume's label the format version 1, with a right checksum.
fn make_format_1(path: &PathBuf) {
    let mut bytes = std::fs::read(path).unwrap();
    let LabelState::Valid(mut label) = Label::decode(&bytes[..4096]) else {
        panic!("the volume has a label");
    };
    label.version = U32::new(1);
    bytes[..4096].copy_from_slice(&label.encode());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn format_refuses_bad_input_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = paths(&dir, &["volume"]);
    refusal(make(&file, &FormatOptions::default()), "--size");
    refusal(make(&file, &of_size(4)), "too small");
    refusal(
        make(
            &file,
            &FormatOptions {
                slices: Some(0),
                ..of_size(64)
            },
        ),
        "at least 1 slice",
    );
    refusal(
        make(
            &file,
            &FormatOptions {
                slices: Some(300),
                ..of_size(64)
            },
        ),
        "at most 256",
    );
    refusal(make(&[dir.path().into()], &of_size(64)), "directory");
    refusal(
        make(&[file[0].clone(), file[0].clone()], &of_size(64)),
        "twice",
    );
    assert!(!file[0].exists());

    std::fs::write(&file[0], "letters of somebody").unwrap();
    refusal(make(&file, &of_size(64)), "--force");
    assert_eq!(std::fs::read(&file[0]).unwrap(), b"letters of somebody");
    let mut mode = std::fs::metadata(&file[0]).unwrap().permissions();
    mode.set_readonly(true);
    std::fs::set_permissions(&file[0], mode).unwrap();
    refusal(
        make(
            &file,
            &FormatOptions {
                force: true,
                ..of_size(64)
            },
        ),
        "read-only",
    );
    std::fs::remove_file(&file[0]).unwrap();

    make(&file, &of_size(64)).unwrap();
    let before = std::fs::read(&file[0]).unwrap();
    refusal(make(&file, &of_size(128)), "already holds a Jericho volume");
    let forced = FormatOptions {
        force: true,
        slices: Some(0),
        ..of_size(64)
    };
    refusal(make(&file, &forced), "at least 1 slice");
    assert!(std::fs::read(&file[0]).unwrap() == before);
    make(
        &file,
        &FormatOptions {
            force: true,
            ..of_size(128)
        },
    )
    .unwrap();
    assert_eq!(std::fs::metadata(&file[0]).unwrap().len(), 128 << 20);
}

#[test]
fn of_two_formats_of_a_new_file_at_once_one_makes_a_volume_and_the_other_leaves_it_alone() {
    for round in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let file = paths(&dir, &["volume"]);
        let barrier = std::sync::Barrier::new(2);
        let uuid_of = || {
            barrier.wait();
            make(&file, &of_size(32)).map(|made| made.uuid)
        };
        let made: Vec<_> = std::thread::scope(|scope| {
            let threads = [scope.spawn(uuid_of), scope.spawn(uuid_of)];
            threads.map(|thread| thread.join().unwrap()).into()
        });
        let found = Volume::open(&file[0], WRITE).unwrap().uuid();
        let winners: Vec<_> = made.iter().flatten().collect();
        assert_eq!(winners, [&found], "round {round}: {made:?}");
    }
}

#[test]
fn a_link_to_nowhere_is_refused_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let link = paths(&dir, &["link"]);
    std::os::unix::fs::symlink("nowhere", &link[0]).unwrap();
    refusal(make(&link, &of_size(32)), "exists already");
    assert!(std::fs::symlink_metadata(&link[0]).is_ok());
}

#[test]
fn errors_distinguish_missing_damaged_and_newer_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let file = paths(&dir, &["volume"]).remove(0);
    refusal(Volume::open(&file, WRITE), "does not exist");
    refusal(Volume::open(dir.path(), WRITE), "directory");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    refusal(Volume::open(&file, WRITE), "not a Jericho volume");

    let whole = paths(&dir, &["whole"]);
    make(&whole, &of_size(32)).unwrap();
    let good = std::fs::read(&whole[0]).unwrap();
    let open = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        Volume::open(&file, WRITE)
    };
    open(&good).unwrap();
    refusal(open(&good[..good.len() - 4096]), "truncated");
    let mut bad = good.clone();
    bad[8] = 9;
    refusal(open(&bad), "version 9");
    bad[8] = 1;
    bad[100] ^= 1;
    refusal(open(&bad), "label");
    bad = good.clone();
    bad[4096 + 200] ^= 1;
    open(&bad).unwrap();
    bad[4096 * 38 + 200] ^= 1;
    refusal(open(&bad), "superblock");
}

#[test]
fn a_volume_with_records_of_another_version_is_refused_with_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["volume"]);
    make(&files, &of_size(32)).unwrap();
    let volume = Volume::open(&files[0], WRITE).unwrap();
    for _ in 0..2 {
        let change = volume.superblocks().update(&[], |s| s.head.records.set(1));
        change.unwrap();
    }
    drop(volume);
    let shown = format!(
        "{}: its metadata records have version 1, and this version of jericho reads only version 5; to go on, copy",
        files[0].display()
    );
    refusal(Volume::open(&files[0], WRITE), &shown);
    refusal(Volume::open(&files[0], OpenMode::READ), &shown);
}

#[test]
fn a_volume_with_unknown_features_is_refused_or_only_read_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["volume"]);
    make(&files, &of_size(32)).unwrap();
    // One copy of the superblock suffices.
    let set = |incompatible, read_only, compatible| {
        let volume = Volume::open(&files[0], WRITE).unwrap();
        let change = volume.superblocks().update(&[], |s| {
            s.head.incompatible.set(incompatible);
            s.head.read_only.set(read_only);
            s.head.compatible.set(compatible);
        });
        change.unwrap();
    };
    // A writer keeps the features that it may ignore.
    set(0, 0, 3);
    let volume = Volume::open(&files[0], WRITE).unwrap();
    volume.superblocks().update(&[], |_| ()).unwrap();
    assert_eq!(volume.superblocks().with(|s| s.head.compatible.get()), 3);
    drop(volume);
    set(0, 4, 0);
    let before = bytes(&files.iter().collect::<Vec<_>>());
    Volume::open(&files[0], OpenMode::READ).unwrap();
    refusal(Volume::open(&files[0], WRITE), "features (0x4)");
    refusal(Volume::open(&files[0], WRITE), "jericho mount --read-only");
    assert!(bytes(&files.iter().collect::<Vec<_>>()) == before);
    make(
        &files,
        &FormatOptions {
            force: true,
            ..of_size(32)
        },
    )
    .unwrap();
    set(8, 0, 0);
    for mode in [WRITE, OpenMode::READ] {
        refusal(Volume::open(&files[0], mode), "features (0x8)");
    }
}

#[test]
fn the_error_of_a_locked_volume_names_the_process_that_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = paths(&dir, &["volume"]);
    make(&file, &of_size(64)).unwrap();
    let lock = Volume::lock(&file[0], WRITE).unwrap();
    refusal(
        Volume::lock(&file[0], WRITE),
        &std::process::id().to_string(),
    );
    refusal(
        make(
            &file,
            &FormatOptions {
                force: true,
                ..of_size(64)
            },
        ),
        "in use",
    );
    drop(lock);
    Volume::lock(&file[0], WRITE).unwrap();
}

#[test]
fn the_contents_are_there_before_the_label_makes_the_file_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    let file = paths(&dir, &["volume"]);
    let label = |path: &PathBuf| std::fs::read(path).unwrap()[..8].to_vec();
    let mut labelled = None;
    format(&file, &of_size(64), |_| {
        labelled = Some(label(&file[0]));
        Ok(())
    })
    .unwrap();
    assert_eq!(labelled, Some(vec![0; 8]));
    assert_eq!(label(&file[0]), b"JERICHO\0");

    let failed = paths(&dir, &["failed"]);
    let no_contents = |_: &Volume| Err(VolumeError::Store("no room for a root".into()));
    refusal(format(&failed, &of_size(64), no_contents), "no room");
    assert!(!failed[0].exists());
}

fn grow(volume: &Volume, mib: u64) -> Result<Vec<GrownDevice>, GrowError> {
    volume.grow(&GrowRequest {
        size_bytes: Some(mib << 20),
        device: None,
    })
}

fn growth_refusal(result: Result<Vec<GrownDevice>, GrowError>, needle: &str) {
    let error = result.expect_err("the growth must fail");
    assert!(error.to_string().contains(needle), "{error}");
}

fn blocks(volume: &Volume) -> Vec<u64> {
    volume.slices().iter().map(|slice| slice.blocks).collect()
}

#[test]
fn a_file_grows_with_its_volume_and_has_its_space_on_the_host_as_format_made_it() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    for preallocate in [true, false] {
        let file = paths(&dir, &["volume"]);
        let options = FormatOptions {
            preallocate,
            slices: Some(2),
            force: true,
            ..of_size(64)
        };
        make(&file, &options).unwrap();
        let volume = Volume::open(&file[0], WRITE).unwrap();
        let before = blocks(&volume);
        let label = std::fs::read(&file[0]).unwrap()[..4096].to_vec();
        let stored = || file[0].metadata().unwrap().blocks() * 512;
        let (stored_before, old_end) = (stored(), volume.slices()[1].regions()[0]);
        let grown = grow(&volume, 128).unwrap();
        assert_eq!(grown.len(), 1);
        assert_eq!(
            (grown[0].old_bytes, grown[0].new_bytes),
            (64 << 20, 128 << 20)
        );
        assert_eq!(file[0].metadata().unwrap().len(), 128 << 20);
        let added = stored() - stored_before;
        assert_eq!(added >= 64 << 20, preallocate, "{added} bytes were added");
        assert_eq!(std::fs::read(&file[0]).unwrap()[..4096], label);

        // The open volume and the next one know the new blocks. The last slice's region got longer, the other slice has one more.
        let after = blocks(&volume);
        assert!(
            after
                .iter()
                .zip(&before)
                .all(|(new, old)| new - old == 8192)
        );
        let run = volume.translate(1, before[1], 100).unwrap();
        let old_end = (old_end.device_first + old_end.blocks) * 4096;
        assert_eq!((run.offset_bytes, run.blocks), (old_end, 100));
        let run = volume.translate(0, before[0], 100).unwrap();
        assert_eq!(run.offset_bytes, old_end + 8192 * 4096);
        volume.devices()[0]
            .write_at((128 << 20) - 4096, &[7; 4096])
            .unwrap();
        assert!(grow(&volume, 128).unwrap().is_empty());
        drop(volume);
        assert_eq!(blocks(&Volume::open(&file[0], WRITE).unwrap()), after);

        // Both copies of the superblock have the new size.
        for copy in [1, 38] {
            let mut bytes = std::fs::read(&file[0]).unwrap();
            bytes[copy * 4096 + 200] ^= 1;
            let damaged = paths(&dir, &["damaged"]);
            std::fs::write(&damaged[0], bytes).unwrap();
            assert_eq!(blocks(&Volume::open(&damaged[0], WRITE).unwrap()), after);
        }
    }
}

#[test]
fn a_file_that_another_program_made_longer_is_used_with_the_next_growth() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["one", "two"]);
    let options = FormatOptions {
        preallocate: true,
        slices: Some(2),
        ..of_size(64)
    };
    make(&files, &options).unwrap();
    let lengthen = |file: &PathBuf, mib: u64| {
        let file = std::fs::File::options().write(true).open(file).unwrap();
        file.set_len(mib << 20).unwrap();
    };
    let all = GrowRequest::default();
    let volume = Volume::open(&files[0], WRITE).unwrap();
    let before = blocks(&volume);
    assert!(volume.grow(&all).unwrap().is_empty());
    lengthen(&files[1], 96);
    assert_eq!(volume.grow(&all).unwrap().len(), 1);
    assert_eq!(blocks(&volume), [before[0], before[1] + 8192]);
    drop(volume);
    lengthen(&files[0], 80);
    lengthen(&files[1], 100);
    let volume = Volume::open(&files[0], WRITE).unwrap();
    assert_eq!(volume.grow(&all).unwrap().len(), 2);
    assert_eq!(blocks(&volume), [before[0] + 4096, before[1] + 9216]);
    for (file, mib) in files.iter().zip([80, 100]) {
        assert!(file.metadata().unwrap().blocks() * 512 >= mib << 20);
    }
}

#[test]
fn a_growth_that_is_refused_says_why_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["one", "two"]);
    make(&files, &of_size(64)).unwrap();
    let before = std::fs::read(&files[0]).unwrap();
    let volume = Volume::open(&files[0], WRITE).unwrap();
    growth_refusal(grow(&volume, 128), "2 devices");
    let request = |size_bytes, device| GrowRequest {
        size_bytes: Some(size_bytes),
        device: Some(device),
    };
    growth_refusal(volume.grow(&request(1 << 30, [7; 16])), "another volume");
    let first = Volume::device_id(&files[0]).unwrap();
    let refuse = |bytes: u64, needle| growth_refusal(volume.grow(&request(bytes, first)), needle);
    refuse(32 << 20, "shrinking is not supported");
    refuse((64 << 20) + 4096, "next possible size");
    refuse(1 << 60, "at most");
    assert_eq!(volume.grow(&request((64 << 20) + 4095, first)).unwrap(), []);
    assert!(std::fs::read(&files[0]).unwrap() == before);
    drop(volume);
    let volume = Volume::open(&files[0], OpenMode::READ).unwrap();
    growth_refusal(volume.grow(&request(1 << 30, first)), "read-only");
    assert!(std::fs::read(&files[0]).unwrap() == before);
    drop(volume);
    let volume = Volume::open(&files[0], WRITE).unwrap();
    let second = Volume::device_id(&files[1]).unwrap();
    assert_eq!(volume.grow(&request(80 << 20, second)).unwrap().len(), 1);
}

/// A device whose writes fail while a test wants that.
struct Failing {
    inner: std::sync::Arc<dyn jericho_storage::Device>,
    fails: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

impl jericho_storage::Layer for Failing {
    fn below(&self) -> &dyn jericho_storage::Device {
        &*self.inner
    }
    fn write_at(&self, at: u64, buf: &[u8]) -> Result<(), jericho_storage::IoError> {
        match self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(jericho_storage::IoError {
                operation: "write",
                device: self.inner.name(),
                offset_bytes: at,
                length_bytes: buf.len() as u64,
                cause: jericho_storage::Cause::Errno(5),
            }),
            false => self.inner.write_at(at, buf),
        }
    }
}

#[test]
fn a_change_that_failed_does_not_count_instead_of_the_next_one() {
    for earlier in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let files = paths(&dir, &["one", "two"]);
        make(&files, &of_size(64)).unwrap();
        let fails = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let open = |path| jericho_storage::open_device(path, Default::default()).unwrap();
        let second = Failing {
            inner: open(&files[1]),
            fails: fails.clone(),
        };
        let devices: Vec<std::sync::Arc<dyn jericho_storage::Device>> =
            vec![open(&files[0]), std::sync::Arc::new(second)];
        let volume = Volume::open_from_devices(devices, WRITE).unwrap();
        let superblocks = volume.superblocks();
        for _ in 0..earlier {
            superblocks.update(&[], |_| {}).unwrap();
        }
        // The second device, which the change needs, has failed: nothing has changed. The first one goes on.
        fails.store(true, std::sync::atomic::Ordering::Relaxed);
        let created_s = |seconds: u64| move |s: &mut Superblock| s.head.created_s.set(seconds);
        superblocks.update(&[1], created_s(6)).unwrap_err();
        superblocks.update(&[0], created_s(7)).unwrap();
        drop(volume);
        let volume = Volume::open(&files[0], WRITE).unwrap();
        assert_eq!(
            volume.superblocks().with(|s| s.head.created_s.get()),
            7,
            "after {earlier} earlier changes"
        );
    }
}

/// A device that has the promises of one of another host.
struct Far(Arc<dyn Device>);

impl Layer for Far {
    fn below(&self) -> &dyn Device {
        &*self.0
    }
    fn queue_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.queue_fd()
    }
    fn may_fall_silent(&self) -> bool {
        true
    }
}

#[test]
fn a_new_volume_on_another_host_takes_superblocks_before_it_has_a_label() {
    let dir = tempfile::tempdir().unwrap();
    let files = paths(&dir, &["far"]);
    let options = OpenOptions {
        create_size: Some(64 << 20),
        ..OpenOptions::default()
    };
    let device = open_device(&files[0], options).unwrap();
    let far: Arc<dyn Device> = Arc::new(Far(device));
    let devices = [far];
    // The first contents change the superblock, for example for a chunk of a store.
    let contents = |volume: &Volume| Ok(volume.superblocks().update(&[0], |_| {})?);
    format_devices(&devices, &files, &of_size(64), contents).unwrap();
    let volume = Volume::open_from_devices(devices.to_vec(), WRITE).unwrap();
    volume.superblocks().update(&[0], |_| {}).unwrap();
    // From then on the label counts.
    devices[0]
        .write_at(0, &vec![0; PAGE_BYTES as usize])
        .unwrap();
    volume.superblocks().update(&[0], |_| {}).unwrap_err();
}
