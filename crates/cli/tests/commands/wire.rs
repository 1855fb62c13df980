//! `jericho wire`: what it refuses, and what passes through it. The crate `badlink` tests the faults.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::namespaces::{JOINED, inside, without_net_raw};
use super::support::commands::kill;
use super::support::{Volume, fail, jericho, pattern, succeed};

#[test]
fn interfaces_are_refused_with_what_to_do() {
    let refused = |setup: &str, arguments: &[&str], expected: &[&str]| {
        let message = fail(&mut inside(setup, &[&["wire"], arguments].concat()), 1);
        for text in expected {
            assert!(message.contains(text), "{message}");
        }
    };
    refused(JOINED, &["t0", "t1"], &["t1", "ip link"]);
    refused(JOINED, &["t0", "t0"], &["t0", "same network interface"]);
    refused(
        &format!("{JOINED} && ip link property add dev t0 altname other"),
        &["t0", "other"],
        &["t0", "other", "same network interface"],
    );
    refused(JOINED, &["t0", "lo"], &["lo", "down"]);
    refused(
        &format!("{JOINED} && ip link set lo up"),
        &["t0", "lo"],
        &["lo", "not an Ethernet interface"],
    );
    refused(
        &JOINED.replace(" && ip link set i0 up", ""),
        &["t0", "i0"],
        &["i0", "ip link set i0 up"],
    );
    refused(
        &without_net_raw(JOINED),
        &["t0", "i0"],
        &["t0", "CAP_NET_RAW"],
    );
}

#[test]
fn a_bad_value_is_named_with_an_example() {
    for (option, value, example) in [
        ("--loss", "0.5", "0.1%"),
        ("--reorder", "200%", "0.1%"),
        ("--duplicate", "often", "0.1%"),
        ("--corrupt", "-1%", "0.1%"),
        ("--delay", "5", "5ms"),
        ("--cut", "5s", "5s:1s"),
        ("--cut", "1s:5s", "5s:1s"),
        ("--reorder-by", "0", "1..=1024"),
    ] {
        let option = format!("{option}={value}");
        let message = fail(&mut jericho(["wire", "a", "b", &*option]), 2);
        for text in [value, example] {
            assert!(message.contains(text), "{option}: {message}");
        }
    }
}

/// Runs a story of `three_hosts.sh` with options of the wire. Returns what the wire printed about each direction, and its messages.
fn on_three_hosts(story: &str, file_bytes: usize, options: &[&str]) -> ([Printed; 2], String) {
    let volume = Volume::formatted();
    let dir = volume.beside("hosts");
    std::fs::create_dir(&dir).expect("a directory");
    std::fs::write(dir.join("in"), pattern(7, file_bytes)).expect("a file");
    let of = |name: &str| format!("{}/tests/commands/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("unshare");
    command.args(["-Urnm", "sh", &of("three_hosts.sh")]);
    command.arg(jericho(["x"]).get_program());
    command.arg(of("traffic.py")).arg(&dir).arg(story);
    succeed(command.args(options));
    let read = |name| std::fs::read_to_string(dir.join(name)).expect("what the wire printed");
    let printed = read("wire");
    let lines: Vec<&str> = printed.lines().collect();
    let [ready, forth, back] = lines[..] else {
        panic!("{printed}");
    };
    let seed = options
        .iter()
        .skip_while(|option| **option != "--seed")
        .nth(1);
    let seed = seed.unwrap_or(&"1");
    assert_eq!(
        ready,
        format!("forwarding between wa and wb with seed {seed}")
    );
    let counts = [
        Printed::of(forth, "wa to wb: "),
        Printed::of(back, "wb to wa: "),
    ];
    (counts, read("wire.log"))
}

/// The counts that the wire printed about a direction.
struct Printed(HashMap<String, u64>);

impl Printed {
    fn of(line: &str, start: &str) -> Printed {
        let counts = line.strip_prefix(start).expect(line).split(", ");
        let count = |text: &str| {
            let (count, name) = text.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        };
        Printed(counts.map(|text| count(text).expect(line)).collect())
    }

    fn count(&self, name: &str) -> u64 {
        self.0[name]
    }

    /// Checks that only some counts are not zero.
    fn has_only(&self, names: &[&str]) {
        let are = |(name, count): (&String, &u64)| (*count > 0) == names.contains(&&**name);
        assert!(self.0.iter().all(are), "{:?}, expected {names:?}", self.0);
    }
}

#[test]
fn a_wire_without_faults_passes_frames_of_all_kinds_and_long_tcp_frames() {
    const BYTES: usize = 16 << 20;
    let ([forth, back], _) = on_three_hosts("good", BYTES, &[]);
    forth.has_only(&["forwarded"]);
    back.has_only(&["forwarded"]);
    // Of at most 9000 bytes each.
    assert!(forth.count("forwarded") > BYTES as u64 / 9000);
}

#[test]
fn tcp_and_a_served_device_keep_their_data_on_a_bad_wire() {
    let faults = "--seed 3 --loss 1% --reorder 10% --reorder-by 16 --duplicate 10% --corrupt 1% --delay 50us";
    let options: Vec<&str> = faults.split(' ').collect();
    let (counts, _) = on_three_hosts("bad", 8 << 20, &options);
    for direction in counts {
        let faults = ["lost", "reordered", "duplicated", "corrupted"];
        assert!(faults.iter().all(|name| direction.count(name) > 0));
        assert_eq!(direction.count("cut"), 0);
    }
}

#[test]
fn a_signal_cuts_the_wire_until_the_next_one() {
    let ([forth, _], log) = on_three_hosts("cut", 0, &[]);
    assert!(forth.count("cut") >= 5);
    assert!(log.contains("joined again"), "{log}");
}

#[test]
fn mtus_that_differ_are_named_in_a_warning() {
    let setup = JOINED.replace("name i0 mtu 9000", "name i0 mtu 1500");
    let mut command = inside(&setup, &["wire", "t0", "i0"]);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut wire = command.spawn().expect("unshare(1)");
    let mut line = String::new();
    let output = wire.stdout.as_mut().expect("its output");
    BufReader::new(output).read_line(&mut line).expect("a line");
    kill("TERM", wire.id().into());
    let output = wire.wait_with_output().expect("its end");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    for text in ["t0 is 9000", "i0 is 1500", "from t0 to i0", "1500 bytes"] {
        assert!(log.contains(text), "{text}: {log}");
    }
}
