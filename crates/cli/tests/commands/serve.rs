//! `jericho serve`: what it refuses, and how it ends. `crates/ether` tests what it serves.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use super::namespaces::{JOINED, inside, without_net_raw};
use super::support::commands::{kill, wait_until};
use super::support::{Volume, fail, jericho, pattern, succeed};

/// Returns `jericho serve` in a network namespace of its own.
fn serve_inside(setup: &str, arguments: &[&str]) -> Command {
    inside(setup, &[&["serve"], arguments].concat())
}

fn disk(volume: &Volume) -> String {
    let path = volume.beside("disk");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(16 << 20).expect("a size");
    path.to_str().expect("a path").to_owned()
}

#[test]
fn serving_is_refused_with_what_to_do() {
    let volume = Volume::formatted();
    let disk = disk(&volume);
    let state = volume.beside("state");
    let state = state.to_str().expect("a path");
    let base = [&*disk, "--name", "data", "--nic", "t0", "--state", state];
    let refused = |setup: &str, change: &dyn Fn(&mut Vec<&str>), expected: &[&str]| {
        let mut arguments = base.to_vec();
        arguments.push("--no-auth");
        change(&mut arguments);
        let message = fail(&mut serve_inside(setup, &arguments), 1);
        for text in expected {
            assert!(message.contains(text), "{message}");
        }
    };
    refused(
        JOINED,
        &|a| a.retain(|x| *x != "--no-auth"),
        &["--no-auth", "--client", "jericho key new"],
    );
    refused("true", &|_| {}, &["t0", "ip link"]);
    refused(
        &JOINED.replace(" && ip link set t0 up", ""),
        &|_| {},
        &["t0", "down", "ip link set t0 up"],
    );
    refused(
        &JOINED.replace("t0 mtu 9000", "t0 mtu 1400"),
        &|_| {},
        &["t0", "1400", "1500"],
    );
    refused(JOINED, &|a| a[2] = "a/b", &["a/b", "slashes"]);
    refused(JOINED, &|a| a[0] = "/nowhere/disk", &["/nowhere/disk"]);
    refused(
        JOINED,
        &|a| a[6] = "/proc/nowhere",
        &["/proc/nowhere", "--state"],
    );
    refused(JOINED, &|a| a[0] = "null:0", &["size of 0"]);
    let message = fail(&mut serve_inside("true", &base), 1);
    assert!(message.contains("--no-auth"), "{message}");
    // Keys.
    let path = |name: &str| volume.beside(name).to_str().expect("a path").to_owned();
    let (key, open, bad) = (path("key"), path("open"), path("bad"));
    let text = succeed(&mut jericho(["key", "new"]));
    for (file, text, mode) in [
        (&key, &*text, 0o600),
        (&open, &*text, 0o644),
        (&bad, "x", 0o600),
    ] {
        std::fs::write(file, text).expect("a file");
        std::fs::set_permissions(file, Permissions::from_mode(mode)).expect("permissions");
    }
    let refused = |clients: &[String], status, expected: &[&str]| {
        let mut serve = serve_inside("true", &base);
        clients.iter().for_each(|client| {
            serve.args(["--client", client]);
        });
        let message = fail(&mut serve, status);
        for text in expected {
            assert!(message.contains(text), "{message}");
        }
    };
    let (one, other) = (format!("one:{key}"), format!("other:{key}"));
    refused(&[one.clone(), one.clone()], 1, &["two clients", "one"]);
    refused(&[one, other], 1, &["one", "other", "same key"]);
    refused(&[format!("one:{open}")], 1, &["chmod 600", &open]);
    refused(&[format!("one:{bad}")], 1, &[&bad, "jericho key new"]);
    refused(&["one:/nowhere".into()], 1, &["/nowhere", "one"]);
    refused(&["one".into()], 2, &["hosta:/etc"]);
    let fingerprint = succeed(jericho(["key", "fingerprint"]).arg(&key));
    assert_eq!(fingerprint.trim().len(), 32);
    assert!(!text.contains(fingerprint.trim()));
    // Without the capability.
    let mut serve = serve_inside(&without_net_raw(JOINED), &base);
    let message = fail(serve.arg("--no-auth"), 1);
    assert!(message.contains("CAP_NET_RAW"), "{message}");
}

struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        // It has ended already in most tests.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_served_device_is_in_use_until_the_server_ends() {
    let volume = Volume::formatted();
    let disk = disk(&volume);
    let state = volume.beside("state");
    let state = state.to_str().expect("a path");
    let arguments = [
        &*disk,
        "--name",
        "data",
        "--nic",
        "t0",
        "--state",
        state,
        "--no-auth",
    ];
    let mut command = serve_inside(JOINED, &arguments);
    let mut serving = Serving(command.stdout(Stdio::piped()).spawn().expect("unshare(1)"));
    let mut line = String::new();
    let output = serving.0.stdout.take().expect("its output");
    let mut output = std::io::BufReader::new(output);
    std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
    assert!(
        line.starts_with(&format!("serving {disk} as tyche://")),
        "{line}"
    );
    assert!(line.ends_with("/data\n"), "{line}");
    let message = fail(&mut serve_inside(JOINED, &arguments), 1);
    assert!(message.contains("in use"), "{message}");
    let message = fail(jericho(["format", "--force"]).arg(&disk), 1);
    assert!(message.contains("in use"), "{message}");
    kill("TERM", serving.0.id().into());
    let mut status = None;
    wait_until("the end of the server", || {
        status = serving.0.try_wait().expect("a status");
        status.is_some()
    });
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

#[test]
fn another_host_copies_to_a_served_file_while_its_target_is_killed() {
    let volume = Volume::formatted();
    let dir = volume.beside("hosts");
    std::fs::create_dir(&dir).expect("a directory");
    std::fs::write(dir.join("in"), pattern(7, 192 << 20)).expect("a file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/commands/two_hosts.sh");
    let mut command = Command::new("unshare");
    command.args(["-Urn", "sh", script]);
    command.arg(jericho(["x"]).get_program()).arg(&dir);
    succeed(&mut command);
    let log = std::fs::read_to_string(dir.join("nbd.log")).expect("a log");
    assert!(log.contains("sent again"), "{log}");
}

/// A program of a user namespace may not be loaded, so this test needs root.
#[test]
fn hosts_with_xdp_and_with_packet_sockets_copy_to_each_other_beside_other_traffic() {
    let map = std::fs::read_to_string("/proc/self/uid_map").expect("a map");
    let is_real = map.split_whitespace().eq(["0", "0", "4294967295"]);
    if !is_real || jericho_sys::process::effective_uid() != 0 {
        eprintln!("SKIPPED: XDP sockets need root");
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/commands/two_hosts.sh");
    let volume = Volume::formatted();
    for (target, initiator) in [("xdp", "xdp"), ("xdp", "packet"), ("packet", "xdp")] {
        let dir = volume.beside(&format!("hosts-{target}-{initiator}"));
        std::fs::create_dir(&dir).expect("a directory");
        std::fs::write(dir.join("in"), pattern(7, 96 << 20)).expect("a file");
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", script]);
        command.arg(jericho(["x"]).get_program()).arg(&dir);
        succeed(command.args([target, initiator]));
        let read = |name| std::fs::read_to_string(dir.join(name)).expect("a log");
        for (log, nic, link) in [("serve.log", "t0", target), ("nbd.log", "i0", initiator)] {
            let log = read(log);
            assert_eq!(
                log.contains(&format!("{nic}: an XDP socket")),
                link == "xdp",
                "{log}"
            );
        }
    }
}

/// Each reason names what to do. `auto` does not mention it.
#[test]
fn xdp_that_is_demanded_and_impossible_is_refused() {
    let serve = |link| {
        let mut arguments = vec!["null:1M", "--name", "data", "--nic", "t0", "--no-auth"];
        arguments.extend(["--link", link]);
        serve_inside(JOINED, &arguments)
    };
    let message = fail(&mut serve("xdp"), 1);
    for text in ["t0", "CAP_NET_ADMIN", "--link packet"] {
        assert!(message.contains(text), "{message}");
    }
    for link in ["auto", "packet"] {
        let mut serving = Serving(serve(link).stdout(Stdio::piped()).spawn().expect("unshare"));
        let mut line = String::new();
        let output = serving.0.stdout.take().expect("its output");
        let mut output = std::io::BufReader::new(output);
        std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
        assert!(line.starts_with("serving"), "{line}");
    }
}

/// Runs a script of a volume with a slice on another host, with an argument. Returns the log of its mounts.
fn with_remote_slice(script: &str, argument: &str) -> String {
    let volume = Volume::formatted();
    let dir = volume.beside("hosts");
    std::fs::create_dir(&dir).expect("a directory");
    let script = format!("{}/tests/commands/{script}.py", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("unshare");
    // Python writes no compiled modules into the sources.
    command.args(["-Urnm", "python3", "-B", &script]);
    command.arg(jericho(["x"]).get_program()).arg(&dir);
    command.arg(std::env::var("JERICHO_SEED").unwrap_or("1".into()));
    succeed(command.arg(argument));
    std::fs::read_to_string(dir.join("mount.log")).expect("a log")
}

#[test]
fn what_programs_have_synced_on_another_host_survives_its_loss_of_power_and_the_end_of_the_mount() {
    let rounds = std::env::var("JERICHO_ROUNDS").unwrap_or("6".into());
    let log = with_remote_slice("remote_slice", &rounds);
    assert!(log.contains("does not answer"), "{log}");
}

#[test]
fn a_host_that_stays_away_costs_its_slice_and_no_other() {
    with_remote_slice("remote_slice", "0");
}

#[test]
fn the_slice_of_a_host_that_was_away_for_long_comes_back_without_a_mount() {
    let rounds = std::env::var("JERICHO_ROUNDS").unwrap_or("4".into());
    let log = with_remote_slice("remote_slice", &format!("-{rounds}"));
    assert!(
        log.contains("a host answers again: its slices take changes again"),
        "{log}"
    );
}

/// Does the same over the FUSE ring, if the kernel offers it.
fn with_remote_slice_over_the_ring(script: &str) {
    let offered = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    if !offered.is_ok_and(|switch| switch.trim() == "Y") {
        eprintln!("SKIPPED: the kernel does not offer the FUSE ring");
        return;
    }
    with_remote_slice(script, "ring");
}

#[test]
fn signals_end_calls_that_wait_for_a_silent_host_and_these_change_nothing() {
    with_remote_slice("silent_host", "device");
}

#[test]
fn signals_end_calls_that_wait_for_a_silent_host_over_the_ring() {
    with_remote_slice_over_the_ring("silent_host");
}

#[test]
fn signals_end_calls_when_more_wait_for_a_silent_host_than_there_are_threads() {
    with_remote_slice("many_wait", "device");
}

#[test]
fn signals_end_programs_when_very_many_calls_wait_for_a_silent_host_over_the_ring() {
    with_remote_slice_over_the_ring("many_wait");
}

#[test]
fn other_hosts_find_what_is_served_and_not_hidden() {
    let volume = Volume::formatted();
    let disk = disk(&volume);
    let program = jericho(["x"]);
    let script = format!(
        "{JOINED}; cd \"$1\"; \
         serve() {{ \"$jericho\" serve null:1M --nic t0 --no-auth \"$@\" >out-$2 2>&1 & until grep -q tyche out-$2; do sleep 0.02; done; }}; \
         jericho=$0; serve --name one --host hostb; \"$0\" discover --nic i0; \"$0\" discover --nic i0 --json; kill $!; wait; \
         serve --name two --host hostb --hidden; \"$0\" discover --nic i0; kill $!; wait"
    );
    let mut command = Command::new("unshare");
    command.args(["-Urn", "sh", "-c", &script]);
    command.arg(program.get_program());
    command.arg(std::path::Path::new(&disk).parent().expect("a directory"));
    let printed = succeed(&mut command);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 2, "{printed}");
    assert_eq!(lines[0], "tyche://hostb/one");
    let json: serde_json::Value = serde_json::from_str(lines[1]).expect("JSON");
    assert_eq!(json[0]["url"], "tyche://hostb/one");
    assert_eq!(json[0]["addresses"][0]["nic"], "i0");
    let missing = fail(&mut jericho(["discover", "--nic", "nowhere0"]), 1);
    assert!(missing.contains("nowhere0"), "{missing}");
}

/// Each refusal names what to do, and the target's log names the client.
#[test]
fn a_client_without_the_right_key_is_refused() {
    let volume = Volume::formatted();
    let directory = volume.beside("keys");
    std::fs::create_dir(&directory).expect("a directory");
    let script = format!(
        "{JOINED}; cd \"$1\"; umask 077; jericho=$0; \"$0\" key new >key; \"$0\" key new >other; \
         serve() {{ \"$jericho\" serve null:1M --nic t0 --host hostb \"$@\" >out 2>>log & until grep -q tyche out; do sleep 0.02; done; }}; \
         try() {{ if \"$jericho\" nbd tyche://hostb/data --nic i0 --socket socket \"$@\"; then exit 9; fi; }}; \
         exec 2>&1; serve --name data --client hosta:key --encrypt; try; try --key other; \
         JERICHO_KEY=key \"$0\" nbd tyche://hostb/data --nic i0 --socket socket & nbd=$!; \
         until [ -S socket ]; do sleep 0.02; done; \"$0\" discover --nic i0 --json; kill $nbd; wait $nbd; kill %1; wait %1; \
         serve --name data --no-auth; try --key key; try --key nowhere; kill $!; wait; \"$0\" key fingerprint other; grep refused log; grep begins log"
    );
    let mut command = Command::new("unshare");
    command.args(["-Urn", "bash", "-c", &script]);
    command.arg(jericho(["x"]).get_program()).arg(&directory);
    let printed = succeed(&mut command);
    let lines: Vec<&str> = printed.lines().collect();
    let expected = [
        "demands a key",
        "does not know this key",
        "\"security\":\"encrypt\"",
        "a host without keys",
        "nowhere",
    ];
    let mut rest = lines.iter();
    for text in expected {
        assert!(rest.any(|line| line.contains(text)), "{text}: {printed}");
    }
    let fingerprint = rest.next().expect("a fingerprint");
    assert!(rest.any(|line| line.contains(fingerprint)), "{printed}");
    assert!(rest.any(|line| line.contains("hosta")), "{printed}");
}

#[test]
fn a_volume_whose_only_device_is_remote_is_found_by_its_name() {
    let volume = Volume::formatted();
    let disk = disk(&volume);
    let file = std::fs::File::options().write(true).open(&disk);
    file.and_then(|file| file.set_len(256 << 20))
        .expect("a size");
    let script = "set -e; cd \"$1\"; mkdir a b state; \
         ip link add t0 mtu 9000 type veth peer name i0 mtu 9000; ip link set i0 up; ip link set t0 up; \
         \"$0\" serve disk --name data --host hostb --nic t0 --ethertype 0x9001 --no-auth --state state >out 2>&1 & server=$!; \
         until grep -q tyche out; do sleep 0.02; done; \
         options='--nic i0 --ethertype 0x9001'; \
         \"$0\" format tyche://hostb/data $options >/dev/null; \
         \"$0\" mount tyche://hostb/data a $options --log log; \
         echo text >a/file; \"$0\" sync a; \
         if \"$0\" mount tyche://hostb/data b $options --log log; then exit 8; fi; \
         if \"$0\" umount --force tyche://hostb/data; then exit 9; fi; \
         \"$0\" umount a; \
         \"$0\" mount tyche://hostb/data a $options --log log; cat a/file; \"$0\" umount a; \
         kill $server; wait $server";
    let mut command = Command::new("unshare");
    command.args(["-Urnm", "sh", "-c", script]);
    command.arg(jericho(["x"]).get_program());
    command.arg(std::path::Path::new(&disk).parent().expect("a directory"));
    assert_eq!(succeed(&mut command), "text\n");
}
