//! fio writes patterns with checksums and reads them back.

use std::path::Path;

use crate::program::{command, succeed};
use crate::volume::Volume;

/// Runs fio in `dir`, with verification. `args` add to the common arguments or override them.
pub fn verify(dir: &Path, args: &[&str]) {
    succeed(
        command("fio")
            .arg("--name=verify")
            .arg(format!("--directory={}", dir.display()))
            .args([
                "--fallocate=none",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
            ])
            .args(["--do_verify=1", "--randrepeat=0", "--ioengine=psync"])
            .args(args)
            .current_dir(dir),
    );
}

/// Reads back the data that an earlier `verify` with the same arguments wrote.
fn verify_only(dir: &Path, args: &[&str]) {
    let args: Vec<&str> = args.iter().copied().chain(["--verify_only"]).collect();
    verify(dir, &args);
}

#[test]
fn sequential_writes_read_back_and_survive_a_remount() {
    let volume = Volume::mounted("512M", 2, "32M");
    let args = ["--rw=write", "--bs=128k", "--size=96M", "--randseed=7"];
    verify(&volume.make_dir("fio"), &args);
    volume.remount();
    verify_only(&volume.at("fio"), &args);
    volume.finish();
}

#[test]
fn random_writes_of_mixed_sizes_read_back() {
    let volume = Volume::mounted("512M", 2, "64M");
    verify(
        &volume.make_dir("fio"),
        &[
            "--rw=randwrite",
            "--bsrange=512-128k",
            "--bs_unaligned",
            "--size=48M",
        ],
    );
    volume.finish();
}

#[test]
fn reads_and_writes_of_several_jobs_do_not_disturb_each_other() {
    let volume = Volume::mounted("1G", 2, "32M");
    for dir in ["even", "odd"] {
        verify(
            &volume.make_dir(dir),
            &[
                "--rw=randrw",
                "--bsrange=4k-64k",
                "--size=24M",
                "--numjobs=4",
                "--verify_backlog=64",
            ],
        );
    }
    volume.finish();
}

#[test]
fn a_working_set_six_times_the_cache_stays_correct() {
    let volume = Volume::mounted("512M", 2, "16M");
    verify(
        &volume.make_dir("fio"),
        &["--rw=randwrite", "--bs=4k", "--size=48M", "--numjobs=2"],
    );
    assert!(
        volume.total("evictions") > 0,
        "files of six times the cache caused no eviction"
    );
    assert!(volume.total("written_back_bytes") > 0);
    volume.finish();
}

#[test]
fn a_working_set_that_fits_is_served_from_memory() {
    let volume = Volume::mounted("512M", 2, "128M");
    verify(
        &volume.make_dir("fio"),
        &["--rw=randwrite", "--bs=4k", "--size=16M"],
    );
    let (hits, misses) = (volume.total("hits"), volume.total("misses"));
    for file in std::fs::read_dir(volume.at("fio")).expect("list") {
        std::fs::read(file.expect("entry").path()).expect("read");
    }
    assert_eq!(
        volume.total("misses"),
        misses,
        "pages that were just written and verified miss"
    );
    let hits = volume.total("hits") - hits;
    assert!(
        hits >= 4096,
        "16 MiB are 4096 pages that hit, counted: {hits}"
    );
    volume.finish();
}

#[test]
fn asynchronous_direct_and_mapped_access_read_back() {
    let volume = Volume::mounted("512M", 2, "32M");
    for (dir, args) in [
        (
            "libaio",
            ["--ioengine=libaio", "--direct=1", "--iodepth=16"].as_slice(),
        ),
        (
            "io_uring",
            &["--ioengine=io_uring", "--direct=1", "--iodepth=16"],
        ),
        ("mmap", &["--ioengine=mmap"]),
    ] {
        let args: Vec<&str> = args
            .iter()
            .copied()
            .chain(["--rw=randwrite", "--bs=4k", "--size=16M"])
            .collect();
        verify(&volume.make_dir(dir), &args);
    }
    volume.finish();
}
