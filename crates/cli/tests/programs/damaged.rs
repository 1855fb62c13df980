//! Data that a device has changed, on a volume with checksums.

use std::os::unix::fs::FileExt;

use crate::program::{command, outcome, succeed, under_run, within_limit};
use crate::volume::{Volume, jericho};

const PAGE: usize = 4096;
const PAGES: usize = 64;
/// The page that the device changes.
const DAMAGED: usize = 20;

/// Returns the contents of a page: the same bytes occur nowhere else.
fn page(number: usize) -> Vec<u8> {
    let line = format!("page {number} of a file whose data is to be damaged\n");
    line.bytes().cycle().take(PAGE).collect()
}

#[test]
fn damaged_data_is_an_error_for_every_reader_and_the_rest_of_the_file_is_not() {
    let volume = Volume::mounted("256M", 1, "32M");
    volume.umount();
    let options = ["--force", "--checksums", "--slices", "1"];
    succeed(jericho().arg("format").arg(volume.file()).args(options));
    volume.mount();
    let file = volume.at("file");
    let contents: Vec<u8> = (0..PAGES).flat_map(page).collect();
    std::fs::write(&file, &contents).expect("a file on the mount");
    volume.remount();
    assert!(std::fs::read(&file).expect("the file") == contents);
    volume.umount();

    let device = std::fs::read(volume.file()).expect("the volume");
    let wanted = page(DAMAGED);
    let found = device.chunks(PAGE).position(|bytes| bytes == wanted);
    let at = (found.expect("the page on the device") * PAGE) as u64 + 100;
    let volume_file = std::fs::OpenOptions::new().write(true).open(volume.file());
    let volume_file = volume_file.expect("the volume");
    volume_file.write_all_at(b"X", at).expect("a change");
    volume.mount();

    for mut reader in [within_limit("cat"), under_run("cat"), command("cat")] {
        let read = outcome(reader.arg(&file));
        assert!(!read.status.success());
        let text = String::from_utf8_lossy(&read.stderr).into_owned();
        assert!(text.contains("Input/output error"), "{text}");
        let before = &contents[..DAMAGED * PAGE];
        assert!(read.stdout == before, "{} bytes", read.stdout.len());
    }
    let opened = std::fs::File::open(&file).expect("the file");
    let mut bytes = vec![0; PAGE];
    for number in (0..PAGES).filter(|number| *number != DAMAGED) {
        let read = opened.read_exact_at(&mut bytes, (number * PAGE) as u64);
        read.unwrap_or_else(|error| panic!("page {number}: {error}"));
        assert!(bytes == page(number), "page {number}");
    }
    drop(opened);
    assert!(volume.total("checksum_errors") > 0);
    let shown = succeed(jericho().arg("stat").arg(volume.mnt()));
    assert!(shown.contains("DAMAGED"), "{shown}");
    assert!(shown.contains("\nscrub     all data was "), "{shown}");
    let offset = format!("offset {}: ", DAMAGED * PAGE);
    assert!(volume.log().contains(&offset), "{}", volume.log());

    volume.umount();
    volume.check();
    let checked = outcome(jericho().args(["check", "--data"]).arg(volume.file()));
    assert_eq!(checked.status.code(), Some(1));
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    let finding = format!("damage: /file (inode 2), {offset}");
    assert!(text.contains(&finding), "{text}");
    assert!(text.contains("slice 0, block "), "{text}");
    assert!(text.contains("1 pages damaged or unreadable"), "{text}");
    assert!(text.contains("restore the files named above"), "{text}");
}
