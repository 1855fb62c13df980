//! `jericho nbd` with the clients that people use: the tools of qemu and libnbd, and fio.

use std::fs;
use std::process::Command;

use super::nbd::{MIB, Nbd, empty, image, qemu_img};
use super::support::loops::Loop;
use super::support::succeed;

/// Runs commands of qemu-io. Those that read back a pattern fail if it differs.
fn qemu_io(uri: &str, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let said = succeed(qemu_io.arg(uri));
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn images_are_copied_and_compared_by_the_tools_of_qemu() {
    let dir = tempfile::tempdir().unwrap();
    let source = image(dir.path(), "source", 1);
    let target = empty(dir.path(), "target");
    let nbd = Nbd::beside(&target, &["--name", "disk 1"]);
    assert!(nbd.uri.starts_with("nbd+unix:///disk%201?"), "{}", nbd.uri);
    let (uri, source_text) = (nbd.uri.as_str(), source.to_str().unwrap());
    let info = qemu_img(&["info", uri]);
    assert!(info.contains("virtual size: 24 MiB"), "{info}");
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", source_text, uri]);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", source_text, uri]);
    let map = |of: &str| {
        let json = qemu_img(&["map", "-f", "raw", "--output", "json", of]);
        let runs: serde_json::Value = serde_json::from_str(&json).unwrap();
        let runs = runs.as_array().unwrap().clone();
        let run = |run: serde_json::Value| (run["start"].clone(), run["data"].clone());
        runs.into_iter().map(run).collect::<Vec<_>>()
    };
    assert!(map(uri).len() >= 4);
    assert_eq!(map(uri), map(source_text));
    // Back from the server, to another format.
    let qcow = dir.path().join("copy.qcow2");
    let qcow = qcow.to_str().unwrap();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", uri, qcow]);
    qemu_img(&["compare", "-f", "qcow2", "-F", "raw", qcow, source_text]);
    nbd.stop("TERM");
    assert_eq!(fs::read(&source).unwrap(), fs::read(&target).unwrap());
    assert!(!target.with_extension("socket").exists());
}

#[test]
fn qemu_io_reads_what_it_wrote_at_any_offset_and_length() {
    let dir = tempfile::tempdir().unwrap();
    let file = empty(dir.path(), "file");
    let nbd = Nbd::beside(&file, &[]);
    qemu_io(
        &nbd.uri,
        &[
            "write -P 7 1000 5000",
            "read -P 0 0 1000",
            "read -P 7 1000 5000",
            "write -f -P 3 33 100",
            "read -P 3 33 100",
            "write -z 2000 3000",
            "read -P 7 1000 1000",
            "read -P 0 2000 3000",
            "read -P 7 5000 1000",
            "write -P 9 1M 2M",
            "write -z -u 1M 1M",
            "write -z -n -u 2M 64k",
            "discard 2560k 512k",
            "read -P 0 1M 1M",
            "read -P 9 2112k 448k",
            "aio_write -P 1 4M 1M",
            "aio_write -P 2 5M 1M",
            "aio_flush",
            "read -P 1 4M 1M",
            "read -P 2 5M 1M",
            "flush",
        ],
    );
    nbd.stop("INT");
    let bytes = fs::read(&file).unwrap();
    assert!(bytes[1000..2000].iter().all(|byte| *byte == 7));
    assert!(bytes[5 * MIB..6 * MIB].iter().all(|byte| *byte == 2));
}

#[test]
fn the_tools_of_libnbd_see_all_abilities_and_copy_over_several_connections() {
    let dir = tempfile::tempdir().unwrap();
    let source = image(dir.path(), "source", 5);
    let target = empty(dir.path(), "target");
    let nbd = Nbd::start(&target, &["--listen", "127.0.0.1:0"]);
    let info = succeed(Command::new("nbdinfo").arg(&nbd.uri));
    for ability in [
        "df",
        "fast_zero",
        "flush",
        "fua",
        "multi_conn",
        "trim",
        "zero",
    ] {
        assert!(info.contains(&format!("can_{ability}: true")), "{info}");
    }
    for line in [
        "base:allocation",
        "block_size_minimum: 1",
        "block_size_maximum: 33554432",
    ] {
        assert!(info.contains(line), "{info}");
    }
    let list = succeed(Command::new("nbdinfo").arg("--list").arg(&nbd.uri));
    assert!(list.contains("export=\"\""), "{list}");
    let copy = |from: &str, to: &str| {
        let many = ["--connections=4", "--requests=16", "--flush"];
        succeed(Command::new("nbdcopy").args(many).args([from, to]));
    };
    copy(source.to_str().unwrap(), &nbd.uri);
    let back = empty(dir.path(), "back");
    copy(&nbd.uri, back.to_str().unwrap());
    let map = succeed(
        Command::new("nbdinfo")
            .args(["--map", "--totals"])
            .arg(&nbd.uri),
    );
    assert!(map.contains("hole,zero"), "{map}");
    nbd.stop("TERM");
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
    assert!(fs::read(&source).unwrap() == fs::read(&back).unwrap());
}

#[test]
fn programs_with_libnbd_reach_every_request() {
    let dir = tempfile::tempdir().unwrap();
    let file = empty(dir.path(), "file");
    let nbd = Nbd::beside(&file, &[]);
    let script = r#"
import nbd
a, b = nbd.NBD(), nbd.NBD()
for h in (a, b):
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_uri(URI)
assert a.get_protocol() == "newstyle-fixed" and a.get_structured_replies_negotiated()
a.pwrite(b"x" * 1000, 3500, nbd.CMD_FLAG_FUA)
chunks = []
def chunk(data, offset, status, error):
    chunks.append((bytes(data), offset, status))
whole = b.pread_structured(1002, 3499, chunk, nbd.CMD_FLAG_DF)
assert whole == b"\0" + b"x" * 1000 + b"\0"
assert chunks == [(bytes(whole), 3499, nbd.READ_DATA)]
a.pwrite(b"y" * 9000, 100000)
b.flush()
a.zero(4096, 98304, nbd.CMD_FLAG_FAST_ZERO)
a.zero(4096, 98304, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
a.trim(8192, 4096)
runs = []
def extent(context, offset, entries, error):
    runs.extend(entries)
b.block_status(1 << 20, 0, extent)
assert len(runs) >= 4 and runs[1] == 0, runs
runs.clear()
b.block_status(1 << 20, 12288, extent, nbd.CMD_FLAG_REQ_ONE)
assert len(runs) == 2 and runs[1] == 3, runs
for call in (lambda: a.set_strict_mode(0) or a.pread(10, a.get_size()),
             lambda: a.pwrite(b"ab", a.get_size() - 1),
             lambda: a.cache(4096, 0)):
    try:
        call()
        assert False, "not refused"
    except nbd.Error as error:
        print(error.errno)
assert a.pread(1, 3500) == b"x"
a.shutdown()
b.shutdown()
"#;
    let script = script.replace("URI", &format!("{:?}", nbd.uri));
    // Debian's libnbd is for Debian's Python, which may not be the first one in PATH.
    let said = succeed(Command::new("/usr/bin/python3").args(["-c", &script]));
    assert_eq!(
        said.split_whitespace().collect::<Vec<_>>(),
        ["EINVAL", "ENOSPC", "EINVAL"]
    );
    nbd.stop("TERM");
}

#[test]
fn fio_verifies_what_many_requests_in_flight_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let file = empty(dir.path(), "file");
    let nbd = Nbd::beside(&file, &[]);
    let mut fio = Command::new("fio");
    fio.current_dir(dir.path());
    // Requests that are no whole blocks, too: neighbours change the same block.
    fio.args(["--name=a", "--ioengine=nbd", "--rw=randwrite", "--size=8M"]);
    fio.args(["--bsrange=512-16k", "--bs_unaligned=0", "--iodepth=32"]);
    fio.args([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=64",
        "--norandommap=0",
    ]);
    let said = succeed(fio.arg(format!("--uri={}", nbd.uri)));
    assert!(said.contains("err= 0"), "{said}");
    nbd.stop("TERM");
}

#[test]
fn a_block_device_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let source = image(dir.path(), "source", 3);
    let Some(device) = Loop::over(&empty(dir.path(), "target")) else {
        return;
    };
    let socket = dir.path().join("socket");
    let nbd = Nbd::start(&device.0, &["--socket", socket.to_str().unwrap()]);
    let source = source.to_str().unwrap();
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", source, &nbd.uri]);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", source, &nbd.uri]);
    qemu_io(
        &nbd.uri,
        &[
            "write -f -P 3 33 100",
            "read -P 3 33 100",
            "discard 0 1M",
            "flush",
        ],
    );
    nbd.stop("TERM");
}
