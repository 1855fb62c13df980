//! A full volume: a program that needs space gets an error, and all others continue.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::fio::verify;
use crate::program::{command, outcome};
use crate::volume::Volume;

const ERRNO_NO_SPACE: i32 = 28;

#[test]
fn a_full_volume_stops_only_programs_that_need_space() {
    let volume = Volume::mounted("256M", 2, "16M");
    let (dir, filling) = (volume.make_dir("steady"), volume.make_dir("filling"));
    let steady = dir.join("file");
    fs::write(&steady, vec![0; 4 << 20]).expect("write");
    File::open(&steady).expect("open").sync_all().expect("sync");

    let full = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // Overwrites, syncs and reads a file whose space is allocated, from before until after the volume is full.
        let other = scope.spawn(|| {
            let file = File::options()
                .read(true)
                .write(true)
                .open(&steady)
                .expect("open");
            let mut page = [0; 4096];
            loop {
                let last = full.load(Ordering::SeqCst);
                let round = rounds.fetch_add(1, Ordering::SeqCst) + 1;
                let offset = round * 37 % 1024 * 4096;
                file.write_all_at(&[round as u8; 4096], offset)
                    .expect("an overwrite needs no space");
                file.sync_data().expect("a sync needs no space");
                file.read_exact_at(&mut page, offset).expect("read");
                assert_eq!(page, [round as u8; 4096]);
                if last {
                    return;
                }
            }
        });
        let fio = outcome(
            command("fio")
                .arg("--name=fill")
                .arg(format!("--directory={}", filling.display()))
                .args([
                    "--rw=write",
                    "--bs=64k",
                    "--size=1G",
                    "--fallocate=none",
                    "--end_fsync=1",
                ]),
        );
        let said = String::from_utf8_lossy(&fio.stderr).into_owned()
            + &String::from_utf8_lossy(&fio.stdout);
        full.store(true, Ordering::SeqCst);
        assert!(
            !fio.status.success() && said.contains("No space left on device"),
            "fio said: {said}"
        );
        other.join().expect("the program that needs no space");
    });

    // Writes fail with ENOSPC once the last space is used.
    let mut number = 0;
    let error = loop {
        match fs::write(filling.join(format!("more{number}")), vec![1; 1 << 20]) {
            Ok(()) => number += 1,
            Err(error) => break error,
        }
        assert!(number < 1000, "a volume of 256 MiB took {number} MiB more");
    };
    assert_eq!(error.raw_os_error(), Some(ERRNO_NO_SPACE), "{error}");

    // Removing the files that filled the volume frees their space.
    fs::remove_dir_all(&filling).expect("removing needs no space");
    verify(
        &volume.make_dir("again"),
        &["--rw=randwrite", "--bs=16k", "--size=32M"],
    );
    volume.finish();
}
