//! Many clients create, write, rename, read and remove small files in shared directories.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::program::{succeed, under_run};
use crate::volume::Volume;

const CLIENTS: u64 = 4;
const ROUNDS: u64 = 1500;

/// Returns the content that a client gives its file `n`. The length differs from file to file.
fn content(client: u64, n: u64) -> Vec<u8> {
    let line = format!("client {client} file {n}\n");
    line.repeat(1 + (n * 7919 % 400) as usize).into_bytes()
}

/// Does one client's work in directories that all clients use. Returns the files that must be there afterwards.
fn work(root: &Path, client: u64) -> BTreeMap<String, Vec<u8>> {
    let mut expected = BTreeMap::new();
    for n in 0..ROUNDS {
        let dir = root.join(format!("d{}", n % 7));
        let temporary = dir.join(format!("c{client}-{n}.tmp"));
        let name = format!("d{}/c{client}-{n}", (n + 1) % 7);
        fs::write(&temporary, content(client, n)).expect("write");
        fs::rename(&temporary, root.join(&name)).expect("rename into another directory");
        expected.insert(name, content(client, n));
        if n % 3 == 0 {
            let (victim, _) = expected.pop_first().expect("there is one");
            fs::remove_file(root.join(&victim)).expect("remove");
            let gone = fs::metadata(root.join(&victim))
                .expect_err("the file was removed")
                .kind();
            assert_eq!(gone, std::io::ErrorKind::NotFound);
        }
        if n % 5 == 0
            && let Some((name, bytes)) = expected.last_key_value()
        {
            assert_eq!(&fs::read(root.join(name)).expect("read"), bytes);
        }
    }
    expected
}

fn list(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for dir in fs::read_dir(root).expect("list") {
        let dir = dir.expect("entry");
        for file in fs::read_dir(dir.path()).expect("list") {
            let file = file.expect("entry");
            names.push(format!(
                "{}/{}",
                dir.file_name().display(),
                file.file_name().display()
            ));
        }
    }
    names.sort();
    names
}

#[test]
fn small_files_of_many_clients_are_all_there() {
    let volume = Volume::mounted("512M", 2, "16M");
    let root = volume.make_dir("shared");
    for d in 0..7 {
        volume.make_dir(&format!("shared/d{d}"));
    }
    let mut expected = BTreeMap::new();
    std::thread::scope(|scope| {
        let root = &root;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || work(root, client)))
            .collect();
        for client in clients {
            expected.extend(client.join().expect("a client"));
        }
    });
    for _ in 0..2 {
        assert!(
            list(&root).iter().eq(expected.keys()),
            "the directories list other names"
        );
        for (name, bytes) in &expected {
            assert_eq!(&fs::read(root.join(name)).expect("read"), bytes, "{name}");
        }
        volume.remount();
    }
    volume.finish();
}

#[test]
fn a_program_that_writes_and_reads_many_small_files_once_makes_the_same_requests_under_run() {
    let volume = Volume::mounted("256M", 2, "32M");
    let dir = volume.make_dir("dir");
    let (whole, report) = (volume.outside("whole"), volume.outside("report"));
    fs::write(&whole, vec![7; 200 * 4096]).expect("a file elsewhere");
    // `split` writes 200 files with one call each. Then `cat` reads each file to its end.
    let mut split = under_run("split");
    split.args(["-b", "4096", "-a", "3"]).arg(&whole).arg("f-");
    succeed(split.current_dir(&dir).env("JERICHO_REPORT", &report));
    let names: Vec<_> = fs::read_dir(&dir)
        .expect("list")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    assert_eq!(names.len(), 200);
    let mut cat = under_run("cat");
    succeed(
        cat.args(&names)
            .current_dir(&dir)
            .env("JERICHO_REPORT", &report),
    );
    // The library sent no request for a descriptor, and no process attached.
    let said = fs::read_to_string(&report).unwrap_or_default();
    assert!(!said.contains("inline"), "{said}");
    volume.finish();
}
