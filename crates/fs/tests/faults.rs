//! Operations on names by many threads, and on a device that fails.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;

use jericho_fs::Result;
use jericho_fs::check::{CheckOptions, check_devices};
use jericho_fs::format::format_devices;
use jericho_fs::types::{Caller, Ino, Kind, ROOT};
use jericho_fs::{Fs, FsOptions};
use jericho_sim::{FaultPlan, Random, SimDevice};
use jericho_storage::Device;
use jericho_volume::{FormatOptions, OpenMode, Volume};

const CALLER: Caller = Caller {
    uid: 1000,
    gid: 100,
    umask: 0o022,
};

fn formatted() -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new("sim", 64 << 20));
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    format_devices(&devices, &[PathBuf::from("sim")], &FormatOptions::default()).unwrap();
    device
}

fn open(device: &Arc<SimDevice>, interval_ms: u64) -> std::result::Result<Arc<Fs>, String> {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let volume = Volume::open_from_devices(devices, OpenMode::WRITE).map_err(|e| e.to_string())?;
    let options = FsOptions {
        store_cache_bytes: 64 << 20,
        read_only: false,
        inode_cache: 50,
        commit_interval_ms: interval_ms,
    };
    Fs::open(Arc::new(volume), Vec::new(), options).map_err(|e| e.to_string())
}

fn assert_sound(device: &Arc<SimDevice>) {
    let devices: Vec<Arc<dyn Device>> = vec![device.clone()];
    let report = check_devices(devices, CheckOptions::default()).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
}

/// Follows a random path of at most three names. Returns the last directory that it reaches, which may be the root.
fn some_dir(fs: &Fs, random: &mut Random, held: &mut Vec<Ino>) -> Ino {
    let mut dir = ROOT;
    for _ in 0..random.below(4) {
        let name = [b'a' + random.below(4) as u8];
        let Ok(attr) = fs.lookup(dir, &name) else {
            break;
        };
        held.push(attr.ino);
        if attr.kind != Kind::Directory {
            break;
        }
        dir = attr.ino;
    }
    dir
}

fn one_operation(fs: &Fs, random: &mut Random) -> Result<()> {
    let mut held = Vec::new();
    let (dir, other) = (
        some_dir(fs, random, &mut held),
        some_dir(fs, random, &mut held),
    );
    let name = [b'a' + random.below(4) as u8];
    let new = [b'a' + random.below(4) as u8];
    let mut made = |result: Result<jericho_fs::types::Attr>| result.map(|attr| held.push(attr.ino));
    let result = match random.below(10) {
        0 | 1 => made(fs.mknod(dir, &name, Kind::File, 0o644, 0, CALLER)),
        2 | 3 => made(fs.mkdir(dir, &name, 0o755, CALLER)),
        4 => fs.unlink(dir, &name),
        5 => fs.rmdir(dir, &name),
        6 => fs.readdir(dir, 0, &mut |_| true),
        7 => fs.lookup(dir, &name).and_then(|attr| {
            held.push(attr.ino);
            made_link(fs, attr.ino, other, &new, &mut held)
        }),
        _ => fs.rename(dir, &name, other, &new, random.below(3) as u32),
    };
    for ino in held {
        fs.forget(ino, 1);
    }
    result
}

fn made_link(fs: &Fs, ino: Ino, dir: Ino, name: &[u8], held: &mut Vec<Ino>) -> Result<()> {
    held.push(fs.link(ino, dir, name)?.ino);
    Ok(())
}

#[test]
fn threads_that_rename_and_remove_in_one_tree_leave_it_sound() {
    let device = formatted();
    let fs = open(&device, 0).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let fs = &fs;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for _ in 0..3000 {
                    if let Err(error) = one_operation(fs, &mut random) {
                        // EPERM (a link to a directory), and errors that a race or the state of the tree can cause.
                        let expected = [1, 2, 17, 20, 21, 22, 39];
                        assert!(expected.contains(&error.errno()), "{error}");
                    }
                }
            });
        }
    });
    fs.close().unwrap();
    drop(fs);
    assert_sound(&device);
}

fn names(fs: &Fs) -> Vec<String> {
    let mut names = Vec::new();
    fs.readdir(ROOT, 2, &mut |entry| {
        names.push(String::from_utf8(entry.name).unwrap());
        true
    })
    .unwrap();
    names.sort();
    names
}

fn sync(fs: &Fs) -> Result<()> {
    let (sender, receiver) = channel();
    fs.fsync_dir(ROOT, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

#[test]
fn after_a_failure_of_any_device_operation_the_volume_opens_with_all_synced_changes() {
    let mut nth = 1;
    loop {
        let device = formatted();
        device.set_plan(FaultPlan::fail_nth(None, nth, 5));
        let mut history = vec![Vec::new()];
        let mut synced = 0;
        if let Ok(fs) = open(&device, 3_600_000) {
            for step in 0..12 {
                let result = match step % 3 {
                    0 | 1 => fs
                        .mknod(
                            ROOT,
                            format!("f{step}").as_bytes(),
                            Kind::File,
                            0o644,
                            0,
                            CALLER,
                        )
                        .map(|attr| fs.forget(attr.ino, 1)),
                    _ => fs.unlink(ROOT, format!("f{}", step - 1).as_bytes()),
                };
                if result.is_err() {
                    break;
                }
                history.push(names(&fs));
                if step % 2 == 0 && sync(&fs).is_ok() {
                    synced = history.len() - 1;
                }
            }
        }
        let was_reached = device.operations(None) >= nth;
        let device = Arc::new(device.crash(nth));
        let fs = open(&device, 3_600_000).unwrap();
        let found = names(&fs);
        assert!(
            history[synced..].contains(&found),
            "operation {nth}: {found:?}, {history:?}"
        );
        fs.close().unwrap();
        drop(fs);
        assert_sound(&device);
        if !was_reached {
            return;
        }
        nth += 1;
    }
}
