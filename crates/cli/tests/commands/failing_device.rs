//! A device that fails, hangs or is missing costs the slices on it, and no others. The daemon's devices follow orders
//! (`crates/storage/src/faults.rs`).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::support::commands::{kill, wait_until};
use super::support::{fail, is_mounted, jericho, output, pattern, succeed};

const MIB: usize = 1 << 20;
const BYTES: usize = 3 * 4096 + 100;
const EIO: i32 = 5;
const ENODEV: i32 = 19;

/// A volume with a slice on each of two files, `a` and `b`.
pub struct Pair {
    dir: TempDir,
    transport: &'static str,
}

impl Pair {
    fn formatted() -> Pair {
        // In the build directory, because /tmp may be a tmpfs, which has no direct I/O.
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let pair = Pair {
            dir,
            transport: "auto",
        };
        fs::create_dir(pair.mnt()).expect("a mount point");
        for device in [pair.a(), pair.b()] {
            let file = File::create(device).expect("a file");
            file.set_len(128 * MIB as u64).expect("its length");
        }
        let mut format = jericho(["format", "--slices", "2"]);
        succeed(format.arg(pair.a()).arg(pair.b()));
        pair
    }

    /// Mounts the volume with devices that follow orders. Makes a directory in each slice, with a durable file.
    fn filled() -> Pair {
        Pair::filled_over("auto")
    }

    /// Does the same as `filled`, with a mount over this transport.
    pub fn filled_over(transport: &'static str) -> Pair {
        let mut pair = Pair::formatted();
        pair.transport = transport;
        pair.mount();
        for (slice, dir) in [pair.x(), pair.y()].iter().enumerate() {
            fs::create_dir(dir).expect("mkdir");
            let slice = slice.to_string();
            succeed(jericho(["place", "--slice", &slice]).arg(dir));
            let file = synced(&dir.join("old"), 1).expect("a durable file");
            drop(file);
            let where_is = succeed(jericho(["where", "--json"]).arg(dir.join("old")));
            let place: serde_json::Value = serde_json::from_str(&where_is).expect("JSON");
            assert_eq!(place["slice"].to_string(), slice);
        }
        succeed(Command::new("sync").arg("-f").arg(pair.mnt()));
        pair
    }

    /// Does the same as `filled`. Then the flushes of `b` have failed, and work again. Returns the file whose sync has met it.
    fn failed() -> (Pair, File) {
        let pair = Pair::filled();
        pair.order("/b flush fail EIO\n");
        let lost = File::create(pair.y().join("lost")).expect("create");
        lost.write_all_at(&pattern(2, BYTES), 0).expect("write");
        fails_with(EIO, lost.sync_all());
        pair.order("");
        (pair, lost)
    }

    fn a(&self) -> PathBuf {
        self.dir.path().join("a")
    }

    fn b(&self) -> PathBuf {
        self.dir.path().join("b")
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// A directory in the slice on `a`.
    pub fn x(&self) -> PathBuf {
        self.mnt().join("x")
    }

    /// A directory in the slice on `b`.
    pub fn y(&self) -> PathBuf {
        self.mnt().join("y")
    }

    fn orders(&self) -> PathBuf {
        self.dir.path().join("orders")
    }

    fn mount_command(&self) -> Command {
        let mut command = jericho(["mount", "--cache", "32M", "--topology", "virtual:2"]);
        command.env("JERICHO_FAULTS", self.orders());
        command.args(["--transport", self.transport]);
        command.arg("--log").arg(self.dir.path().join("log"));
        command.arg(self.a()).arg(self.mnt());
        command
    }

    fn mount(&self) {
        succeed(&mut self.mount_command());
    }

    pub fn umount(&self) {
        succeed(jericho(["umount"]).arg(self.mnt()));
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).expect("the log")
    }

    /// Gives the devices other orders.
    pub fn order(&self, orders: &str) {
        let new = self.dir.path().join("new orders");
        fs::write(&new, orders).expect("orders");
        fs::rename(new, self.orders()).expect("rename");
    }

    /// Returns how many operations were noted so far: "/a flush", for example.
    fn noted(&self, operation: &str) -> usize {
        let notes = fs::read_to_string(self.dir.path().join("orders.notes")).unwrap_or_default();
        notes.lines().filter(|line| *line == operation).count()
    }

    pub fn stat(&self) -> serde_json::Value {
        let json = succeed(jericho(["stat", "--json"]).arg(self.mnt()));
        serde_json::from_str(&json).expect("stat gives JSON")
    }

    /// Checks the volume, which is not mounted.
    pub fn assert_sound(&self) {
        succeed(jericho(["check"]).arg(self.a()));
    }

    /// Asserts that the volume, mounted without faults, has what `failed` made durable.
    fn assert_has_old_files(&self) {
        for dir in [self.x(), self.y()] {
            assert_holds(&dir.join("old"), 1);
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Ends what hangs.
        let _ = fs::remove_file(self.orders());
        if is_mounted(&self.mnt()) {
            let forced = jericho(["umount", "--force"]).arg(self.mnt()).output();
            if !forced.is_ok_and(|o| o.status.success()) {
                let mut detach = Command::new("fusermount3");
                let _ = detach.args(["-u", "-z"]).arg(self.mnt()).output();
            }
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            eprintln!("the daemon's log:\n{log}");
        }
    }
}

/// Creates a durable file of `BYTES` bytes.
pub fn synced(path: &Path, seed: u64) -> std::io::Result<File> {
    let file = File::create(path)?;
    file.write_all_at(&pattern(seed, BYTES), 0)?;
    file.sync_all()?;
    Ok(file)
}

#[track_caller]
pub fn assert_holds(path: &Path, seed: u64) {
    let found = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(found == pattern(seed, BYTES), "{} differs", path.display());
}

#[track_caller]
fn fails_with<T>(errno: i32, result: std::io::Result<T>) {
    match result {
        Ok(_) => panic!("no error"),
        Err(error) => assert_eq!(error.raw_os_error(), Some(errno), "{error}"),
    }
}

/// Overwrites pages of a file in `x` and syncs each. Returns the number of flushes of `a` for 20 of these.
fn flushes_of_20_syncs(pair: &Pair, file: &File) -> usize {
    let flushes = |_| {
        let before = pair.noted("/a flush");
        for page in 0..20 {
            file.write_all_at(&[7; 4096], 8192 * page).expect("write");
            file.sync_data().expect("fdatasync");
        }
        pair.noted("/a flush") - before
    };
    // Commits in the background do not come in between each time.
    (0..5).map(flushes).min().unwrap_or(0)
}

#[test]
fn a_device_that_fails_its_flushes_ends_the_changes_of_its_slice_only() {
    let pair = Pair::filled();
    pair.order("/a flush note\n");
    // Too large for the journal, so each page is on the device and is overwritten there.
    let large = File::create(pair.x().join("large")).expect("create");
    large.write_all_at(&pattern(3, MIB), 0).expect("write");
    large.sync_all().expect("fsync");
    let flushes_before = flushes_of_20_syncs(&pair, &large);
    assert_eq!(flushes_before, 20);
    assert!(pair.stat()["slices"][1]["refuses_changes"].is_null());

    pair.order("/b flush fail EIO\n");
    let lost = File::create(pair.y().join("lost")).expect("create");
    lost.write_all_at(&pattern(2, BYTES), 0).expect("write");
    fails_with(EIO, lost.sync_all());
    // The fault is gone, and what the device dropped is not known.
    pair.order("/a flush note\n/b flush note\n");
    fails_with(EIO, lost.sync_all());
    fails_with(EIO, File::create(pair.y().join("new")));
    fails_with(EIO, fs::remove_file(pair.y().join("old")));
    fails_with(
        EIO,
        fs::rename(pair.x().join("old"), pair.y().join("moved")),
    );
    pair.assert_has_old_files();

    // The other slice goes on, as fast as before.
    let on_b = pair.noted("/b flush");
    assert_eq!(flushes_of_20_syncs(&pair, &large), flushes_before);
    for number in 0..20 {
        synced(&pair.x().join(format!("after{number}")), number).expect("a durable file");
    }
    assert_eq!(pair.noted("/b flush"), on_b);
    fs::rename(pair.x().join("after0"), pair.x().join("renamed")).expect("rename");
    fs::remove_file(pair.x().join("after1")).expect("unlink");
    let dir = pair.mnt().join("new directory");
    fs::create_dir(&dir).expect("a new directory avoids the failed slice");
    synced(&dir.join("file"), 5).expect("a durable file");
    let sql =
        "CREATE TABLE t(v BLOB); INSERT INTO t VALUES (randomblob(9000)); SELECT count(*) FROM t";
    let mut sqlite = Command::new("sqlite3");
    assert_eq!(succeed(sqlite.arg(pair.x().join("db")).arg(sql)), "1\n");

    let stat = pair.stat();
    assert!(stat["slices"][0]["refuses_changes"].is_null(), "{stat}");
    let reason = stat["slices"][1]["refuses_changes"]
        .as_str()
        .expect("a reason");
    assert!(
        reason.contains("flush") && reason.contains("/b"),
        "{reason}"
    );
    for command in ["stat", "top"] {
        let mut shown = jericho([command]);
        if command == "top" {
            shown.arg("--once");
        }
        let text = succeed(shown.arg(pair.mnt()));
        assert!(text.contains("slice 1 takes NO CHANGES"), "{text}");
        assert!(
            text.contains(reason) && !text.contains("slice 0 "),
            "{text}"
        );
    }
    let log = pair.log();
    assert!(log.contains("slice 1 takes no more changes"), "{log}");
    assert!(!log.contains("slice 0 takes no more changes"), "{log}");
}

#[test]
fn what_was_synced_before_or_beside_a_failed_device_is_there_after_a_kill() {
    let (pair, lost) = Pair::failed();
    for number in 0..10 {
        synced(&pair.x().join(format!("f{number}")), number).expect("a durable file");
    }
    let pid = pair.stat()["pid"].as_u64().expect("a process id");
    kill("KILL", pid);
    drop(lost);
    wait_until("the daemon is gone", || fs::metadata(pair.mnt()).is_err());
    pair.mount();
    pair.assert_has_old_files();
    for number in 0..10 {
        assert_holds(&pair.x().join(format!("f{number}")), number);
    }
    assert!(pair.stat()["slices"][1]["refuses_changes"].is_null());
    synced(&pair.y().join("new"), 3).expect("the slice takes changes again");
    pair.umount();
    pair.assert_sound();
}

#[test]
fn a_volume_with_a_failed_slice_is_unmounted_by_force_only_and_keeps_the_data_of_the_others() {
    let (pair, lost) = Pair::failed();
    drop(lost);
    // Not synced: the unmount does it.
    fs::write(pair.x().join("late"), pattern(4, BYTES)).expect("write");
    let message = fail(jericho(["umount"]).arg(pair.mnt()), 1);
    for part in ["slice 1", "flush", "/b", "--force"] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
    assert!(is_mounted(&pair.mnt()));
    fs::write(pair.x().join("later"), pattern(5, BYTES)).expect("write");
    succeed(jericho(["umount", "--force"]).arg(pair.mnt()));
    pair.assert_sound();
    pair.mount();
    pair.assert_has_old_files();
    assert_holds(&pair.x().join("late"), 4);
    assert_holds(&pair.x().join("later"), 5);
    pair.umount();
}

#[test]
fn a_missing_device_is_named_by_the_mount_and_costs_its_slice_only() {
    let pair = Pair::filled();
    let free = |pair: &Pair| rustix::fs::statvfs(pair.mnt()).expect("statvfs");
    let whole = free(&pair);
    pair.umount();
    let away = pair.dir.path().join("away");
    fs::create_dir(&away).expect("mkdir");
    fs::rename(pair.b(), away.join("b")).expect("rename");

    let message = fail(jericho(["check"]).arg(pair.a()), 1);
    for part in ["device 1", pair.b().to_str().expect("a path"), "--device"] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
    let mounted = output(&mut pair.mount_command());
    let message = String::from_utf8_lossy(&mounted.stderr);
    assert!(mounted.status.success(), "{message}");
    for part in [
        pair.b().to_str().expect("a path"),
        "missing",
        "slice 1",
        "ENODEV",
        "--device",
    ] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
    assert_eq!(message.lines().count(), 1, "{message}");

    assert_holds(&pair.x().join("old"), 1);
    fails_with(ENODEV, File::open(pair.y().join("old")));
    fails_with(ENODEV, File::create(pair.y().join("new")));
    synced(&pair.x().join("new"), 2).expect("a durable file");
    let part = free(&pair);
    assert!(
        part.f_blocks <= whole.f_blocks * 6 / 10,
        "{} of {}",
        part.f_blocks,
        whole.f_blocks
    );
    assert!(part.f_bfree < part.f_blocks, "{}", part.f_bfree);
    let stat = pair.stat();
    assert_eq!(stat["slices"][1]["absent"], true, "{stat}");
    let text = succeed(jericho(["stat"]).arg(pair.mnt()));
    assert!(text.contains("slice 1 is absent"), "{text}");
    pair.umount();

    // A command gets the message, too.
    let mut run = jericho(["run", "--no-preload", "--cache", "32M", "--volume"]);
    run.arg(pair.a()).arg("--at").arg(pair.mnt());
    let run = output(run.args(["--", "true"]));
    let message = String::from_utf8_lossy(&run.stderr);
    assert!(
        run.status.success() && message.contains("slice 1"),
        "{message}"
    );

    fs::rename(away.join("b"), pair.b()).expect("rename");
    let mounted = output(&mut pair.mount_command());
    assert!(
        mounted.status.success() && mounted.stderr.is_empty(),
        "{mounted:?}"
    );
    pair.assert_has_old_files();
    assert_holds(&pair.x().join("new"), 2);
    synced(&pair.y().join("new"), 3).expect("a durable file");
    assert_eq!(free(&pair).f_blocks, whole.f_blocks);
    pair.umount();
    pair.assert_sound();
}

#[test]
fn a_volume_without_its_first_device_is_refused_with_its_name() {
    let pair = Pair::formatted();
    let away = pair.dir.path().join("away");
    fs::create_dir(&away).expect("mkdir");
    fs::rename(pair.a(), away.join("a")).expect("rename");
    for device in [pair.a(), pair.b()] {
        let mut mount = jericho(["mount"]);
        let message = fail(mount.arg(device).arg(pair.mnt()), 1);
        assert!(
            message.contains(pair.a().to_str().expect("a path")),
            "{message}"
        );
    }
}

#[test]
fn a_device_that_hangs_delays_neither_reads_nor_syncs_on_another() {
    let pair = Pair::filled();
    let cached = fs::read(pair.x().join("old")).expect("read");
    for operation in ["flush", "write"] {
        let name = pair.y().join(operation);
        let file = File::create(name).expect("create");
        file.write_all_at(&pattern(7, BYTES), 0).expect("write");
        let before = pair.noted(&format!("/b {operation}"));
        pair.order(&format!("/b {operation} hang\n"));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| file.sync_all());
            // Ends the fault if the test fails, or the scope would wait for ever.
            let lift = Lift(&pair);
            wait_until("the sync is at the device", || {
                pair.noted(&format!("/b {operation}")) > before
            });
            assert!(fs::read(pair.x().join("old")).expect("read") == cached);
            for number in 0..20 {
                let path = pair.x().join(format!("{operation}{number}"));
                synced(&path, number).expect("a durable file");
                assert_holds(&path, number);
            }
            assert!(!slow.is_finished());
            drop(lift);
            slow.join()
                .expect("no panic")
                .expect("a sync that was only slow");
        });
    }
    pair.umount();
    pair.assert_sound();
}

#[test]
fn duplicates_of_a_descriptor_report_a_failed_write_once_and_another_descriptor_reports_it_too() {
    let pair = Pair::filled();
    let path = pair.y().join("file");
    let file = File::create(&path).expect("create");
    // Too large for the journal, so the page that changes is overwritten on the device.
    file.write_all_at(&pattern(1, 20 * 4096), 0).expect("write");
    file.sync_all().expect("fsync");
    let duplicate = file.try_clone().expect("dup");
    let other = File::options().write(true).open(&path).expect("open");
    file.write_all_at(&[7; 4096], 0).expect("write");
    pair.order("/b write fail EIO\n");
    fails_with(EIO, duplicate.sync_data());
    pair.order("");
    for descriptor in [&file, &duplicate] {
        descriptor.sync_data().expect("reported by the duplicate");
    }
    fails_with(EIO, other.sync_data());
    other.sync_data().expect("reported");
    drop((file, duplicate, other));
    pair.umount();
    pair.mount();
    assert_eq!(fs::read(&path).expect("read")[..4096], [7; 4096]);
    pair.umount();
    pair.assert_sound();
}

/// Ends all orders when it is dropped.
pub struct Lift<'a>(pub &'a Pair);

impl Drop for Lift<'_> {
    fn drop(&mut self) {
        self.0.order("");
    }
}

/// Makes a file `bad` in the slice on `a`, of which the device cannot read the second page, and mounts the volume again: nothing is cached.
fn with_unreadable_page() -> Pair {
    let pair = Pair::filled();
    synced(&pair.x().join("bad"), 8).expect("a durable file");
    pair.umount();
    let device = fs::read(pair.a()).expect("the device");
    let page = &pattern(8, BYTES)[4096..8192];
    let mut blocks = device.chunks(4096);
    let at = 4096
        * blocks
            .position(|block| block == page)
            .expect("the page is on the device");
    pair.order(&format!("/a read fail EIO offset {at}..{}\n", at + 4096));
    pair.mount();
    pair
}

#[test]
fn a_read_over_an_unreadable_page_returns_the_bytes_before_it() {
    let pair = with_unreadable_page();
    let contents = pattern(8, BYTES);
    let mut bytes = vec![0; BYTES];
    let bad = File::open(pair.x().join("bad")).expect("open");
    for from in [0, 100] {
        let read = bad.read_at(&mut bytes, from as u64).expect("a short read");
        assert_eq!(read, 4096 - from);
        assert!(bytes[..read] == contents[from..4096]);
    }
    fails_with(EIO, bad.read_at(&mut bytes, 4096));
    fails_with(EIO, bad.read_at(&mut bytes, 8191));
    let read = bad.read_at(&mut bytes, 8192).expect("read");
    assert!(bytes[..read] == contents[8192..]);
    // The kernel would take a short answer for the end of the file.
    let mapped = Command::new("python3")
        .args(["-c", "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); m[4096]"])
        .arg(pair.x().join("bad"))
        .output()
        .expect("python3");
    assert!(!mapped.status.success(), "a bus error, and no zeros");
    assert_eq!(bad.metadata().expect("stat").len(), BYTES as u64);
    pair.order("");
    assert_holds(&pair.x().join("bad"), 8);
    drop(bad);
    pair.umount();
    pair.assert_sound();
}

#[test]
fn a_read_that_fails_on_the_device_fails_in_the_program_and_for_that_file_only() {
    let pair = with_unreadable_page();
    let mut bytes = [0; 4096];
    let bad = File::open(pair.x().join("bad")).expect("open");
    fails_with(EIO, bad.read_exact_at(&mut bytes, 4096));
    pair.assert_has_old_files();
    synced(&pair.x().join("new"), 9).expect("a durable file");
    fails_with(EIO, bad.read_exact_at(&mut bytes, 4096));
    pair.order("");
    assert_holds(&pair.x().join("bad"), 8);
    drop(bad);
    pair.umount();
    pair.assert_sound();
}
