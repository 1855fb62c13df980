//! The model reads machine files and reports of probes, and refuses bad ones.
#![forbid(unsafe_code)]

use jericho_model::{Placement, SHIPPED, named, names, parse, predict_placement, shipped};
use proptest::prelude::*;

/// Two nodes with two CPUs, 10 GB/s of memory each and 4 GB/s between them. A thread copies 3 GB/s.
const SMALL: &str = r#"
name = "small"
[thread]
copy_bytes_per_s = 3e9
time_by_hops = [1, 1.5]
[[node]]
count = 2
cpus = 2
read_bytes_per_s = 10e9
[[link]]
nodes = [0, 1]
bytes_per_s = 4e9
[[device]]
name = "disk"
node = 0
read_bytes_per_s = 1e9
"#;

fn rate(text: &str, placement: &str, threads: u32) -> f64 {
    let machine = parse("m.toml", text).expect("a machine");
    let placement = named(&machine, placement).expect("a placement");
    predict_placement(&machine, placement, threads)
        .expect("a prediction")
        .bytes_per_s
}

#[track_caller]
fn assert_rate(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() < 1e-6 * expected,
        "{found} instead of {expected}"
    );
}

#[track_caller]
fn assert_refused(text: &str, parts: &[&str]) {
    let error = parse("dir/m.toml", text)
        .expect_err("a bad machine")
        .to_string();
    for part in parts.iter().chain(&["dir/m.toml"]) {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn the_shipped_machines_are_right_and_have_predictions() {
    for known in SHIPPED {
        let machine = shipped(known.name)
            .expect("a shipped name")
            .expect("a right file");
        for (name, placement) in names(&machine) {
            for threads in [1, 3, 64, 1 << 20] {
                let found = predict_placement(&machine, placement, threads).expect(&name);
                assert!(
                    found.bytes_per_s.is_finite() && found.bytes_per_s > 0.0,
                    "{name}"
                );
                assert_eq!(found.threads, threads);
            }
        }
    }
    assert!(shipped("pdp-11").is_none());
}

#[test]
fn local_threads_are_limited_by_themselves_then_by_memory() {
    // One thread: 3 GB/s. Two: one on each node. Four: 6 GB/s of each node would read and write 12 GB/s; its memory has 10.
    assert_rate(rate(SMALL, "proper", 1), 3e9);
    assert_rate(rate(SMALL, "proper", 2), 6e9);
    assert_rate(rate(SMALL, "proper", 4), 10e9);
    // Eight threads on four CPUs: the memory is still the limit.
    assert_rate(rate(SMALL, "PROPER", 8), 10e9);
}

#[test]
fn remote_threads_are_limited_by_their_slower_copy_then_by_the_link() {
    // The side that is one hop away takes 1.5 times as long: 3 / (0.5 + 0.5 * 1.5) = 2.4 GB/s.
    assert_rate(rate(SMALL, "worst", 1), 2.4e9);
    // Two threads on each node would read 4.8 GB/s over 4 GB/s, in each direction.
    assert_rate(rate(SMALL, "worst", 4), 8e9);
}

#[test]
fn half_local_pages_use_half_of_the_link() {
    // Without native_local_share, pages are even over the nodes. A byte takes (1 + 1.25) / 2 of the local time.
    assert_rate(rate(SMALL, "native", 1), 3e9 / 1.125);
    // Memory is the limit for four threads, as for local ones.
    assert_rate(rate(SMALL, "native", 4), 10e9);
}

#[test]
fn more_threads_than_cpus_share_these() {
    let text = SMALL.replace("10e9", "100e9");
    assert_rate(rate(&text, "proper", 4), 12e9);
    assert_rate(rate(&text, "proper", 9), 12e9);
}

#[test]
fn traffic_of_coherence_fills_a_link_earlier() {
    let text = SMALL.replace("[[node]]", "[traffic]\nread_with = 1.6\nread_against = 0.4\nwrite_with = 1\nwrite_against = 1\n[[node]]");
    // Each direction carries 1.6 of one node's bytes and 0.4 of the other's: 2 r = 4 GB/s.
    assert_rate(rate(&text, "worst", 4), 4e9);
}

#[test]
fn of_two_shortest_ways_each_carries_half() {
    let square = r#"
name = "square"
[[node]]
count = 4
cpus = 1
read_bytes_per_s = 1e12
[[link]]
nodes = [0, 1]
bytes_per_s = 1e9
[[link]]
nodes = [1, 2]
bytes_per_s = 1e9
[[link]]
nodes = [2, 3]
bytes_per_s = 1e9
[[link]]
nodes = [3, 0]
bytes_per_s = 1e9
"#;
    // Opposite corners: four flows of two hops, half by each way. Each direction of a link carries two halves.
    let machine = parse("m.toml", square).expect("a machine");
    let worst = predict_placement(&machine, Placement::Worst, 4).expect("a prediction");
    assert_rate(worst.bytes_per_s, 4e9);
}

#[test]
fn transfers_of_devices_take_links_of_their_own() {
    let text = SMALL.replace(
        "[[device]]",
        "[[link]]\nnodes = [0, 1]\nbytes_per_s = 0.5e9\ncarries = \"io\"\n[[device]]",
    );
    let text = text.replacen(
        "bytes_per_s = 4e9",
        "bytes_per_s = 4e9\ncarries = \"cpu\"",
        1,
    );
    assert_rate(rate(&text, "TLORP0I0", 1), 1e9);
    assert_rate(rate(&text, "TRORP0I0", 1), 0.5e9);
    assert_rate(rate(&text, "TRRCPR", 2), 0.5e9);
    assert_rate(rate(&text, "TRLCPR", 2), 1e9);
}

#[test]
fn bad_machine_files_name_the_field_and_what_is_expected() {
    let with = |from: &str, to: &str| SMALL.replacen(from, to, 1);
    for (text, parts) in [
        (
            with("read_bytes_per_s = 10e9", "read_bytes_per_s = -1"),
            vec!["node[0].read_bytes_per_s", "-1"],
        ),
        (
            with("read_bytes_per_s = 10e9", "read_bytes_per_s = nan"),
            vec!["node[0].read_bytes_per_s", "NaN"],
        ),
        (
            with("read_bytes_per_s = 10e9", "read_bytes_per_s = inf"),
            vec!["node[0]", "inf"],
        ),
        (
            with("10e9", "1e300"),
            vec!["node[0]", "expected bytes per second"],
        ),
        (with("3e9", "0"), vec!["thread.copy_bytes_per_s"]),
        (with("1.5]", "-1.5]"), vec!["thread.time_by_hops[1]"]),
        (with("1.5]", "nan]"), vec!["thread.time_by_hops[1]"]),
        (with("[0, 1]", "[0, 7]"), vec!["link[0].nodes", "no node 7"]),
        (with("[0, 1]", "[1, 1]"), vec!["link[0].nodes", "two nodes"]),
        (with("[0, 1]", "[0, -1]"), vec!["line"]),
        (with("4e9", "0.0"), vec!["link[0].bytes_per_s"]),
        (
            with("node = 0", "node = 2"),
            vec!["device[0].node", "no node 2"],
        ),
        (
            with("count = 2", "count = 0"),
            vec!["node[0].count", "1 to 64"],
        ),
        (
            with("count = 2", "count = 100000000000"),
            vec!["node[0].count"],
        ),
        (
            with("cpus = 2", "cpus = 4000000"),
            vec!["node[0].cpus", "4096"],
        ),
        (with("cpus = 2", "cpus = 0"), vec!["no node has CPUs"]),
        (with("cpus = 2", "cpu = 2"), vec!["line", "cpu"]),
        (with("cpus = 2", ""), vec!["line", "cpus"]),
        (
            with("[[link]]\nnodes = [0, 1]\nbytes_per_s = 4e9\n", ""),
            vec!["link", "from node 0 to node 1"],
        ),
        (
            with("bytes_per_s = 4e9", "bytes_per_s = 4e9\none_way = true"),
            vec!["from node 1 to node 0"],
        ),
        (
            with("bytes_per_s = 4e9", "bytes_per_s = 4e9\ncarries = \"cpu\""),
            vec!["transfers of devices"],
        ),
        (
            with(
                "name = \"small\"",
                "name = \"small\"\nnative_local_share = 2",
            ),
            vec!["native_local_share"],
        ),
        ("name = \"x\"".to_owned(), vec!["there is no node"]),
        ("= 4".to_owned(), vec!["line 1"]),
        (String::new(), vec!["name"]),
    ] {
        assert_refused(&text, &parts);
    }
}

#[test]
fn the_example_of_the_page_is_a_machine_and_the_page_has_its_bounds() {
    let page = include_str!("../../../docs/formats/machine.md");
    let (_, rest) = page.split_once("```toml\n").expect("an example");
    let (example, _) = rest.split_once("```").expect("an end");
    assert_rate(rate(example, "worst", 1), 5e9 / 1.3);
    for bound in [
        "64 at most",
        "4,096 at most",
        "2,048 at most",
        "1,024 at most",
    ] {
        assert!(page.contains(bound), "{bound}");
    }
}

#[test]
fn an_error_names_the_entry_and_the_line_of_the_file() {
    let nodes = "[[node]]\ncount = 3\ncpus = 1\nread_bytes_per_s = 1e9\n";
    let link =
        |to: &str, rate: &str| format!("[[link]]\nnodes = [0, {to}]\nbytes_per_s = {rate}\n");
    let device = |node: &str| {
        format!("[[device]]\ncount = 2\nname = \"d\"\nnode = {node}\nread_bytes_per_s = 1e9\n")
    };
    let name = "name = \"x\"\n";
    let right = format!("{name}{nodes}{}{}", link("1", "1e9"), link("2", "1e9"));
    assert!(parse("m.toml", &right).is_ok());
    for (text, part) in [
        (
            format!("{right}{}", nodes.replace("1e9", "0")),
            "node[1].read",
        ),
        (
            format!("{name}{nodes}{}{}", link("1", "1e9"), link("2", "0")),
            "link[1].bytes_per_s",
        ),
        (
            format!("{right}{}{}", device("0"), device("7")),
            "device[1].node",
        ),
        (format!("{name}{nodes}count_of_cpus = 3\n"), "line 6: "),
        (format!("\n\n= 3\n{name}{nodes}"), "line 3: "),
    ] {
        assert_refused(&text, &[part]);
    }
}

#[test]
fn numbers_of_equal_parts_are_bounded_together() {
    let many = |entry: &str, count| SMALL.to_owned() + &entry.repeat(count);
    let devices = "[[device]]\nname = \"\"\nnode = 0\nread_bytes_per_s = 1\ncount = 1024\n";
    assert_refused(&many(devices, 3), &["device: 1025 entries", "at most 1024"]);
    let nodes = "[[node]]\ncpus = 1\nread_bytes_per_s = 1\ncount = 64\n";
    assert_refused(&many(nodes, 3), &["node: 66 entries", "at most 64"]);
}

#[test]
fn names_are_one_line() {
    let long = "x".repeat(1000);
    for name in ["\\u001b[2J", "two\\nlines", long.as_str()] {
        assert_refused(&SMALL.replace("small", name), &["name", "one line"]);
        assert_refused(&SMALL.replace("disk", name), &["device[0].name"]);
    }
}

#[test]
fn traffic_that_is_not_given_has_its_default() {
    let text = SMALL.replace("[[node]]", "[traffic]\nread_with = 1.6\n[[node]]");
    // Only data go over the links, 1.6 bytes of each.
    assert_rate(rate(&text, "worst", 4), 5e9);
}

/// Two nodes with CPUs and one without, each linked with the others.
fn with_expander() -> String {
    let link = |a, b| format!("[[link]]\nnodes = [{a}, {b}]\nbytes_per_s = 4e9\n");
    let expander = "[[node]]\ncpus = 0\nread_bytes_per_s = 10e9\n";
    format!("{SMALL}{expander}{}{}", link(0, 2), link(1, 2))
}

#[test]
fn native_pages_are_also_on_nodes_without_cpus() {
    // The expander is two hops from node 0. Frames there, on node 1 and on node 0 take 1.5, 1.25 and 1 of the local time.
    let link = "[[link]]\nnodes = [0, 2]\nbytes_per_s = 4e9\n";
    let far = with_expander().replace(link, "");
    let far = far.replace("[1, 1.5]", "[1, 1.5, 2]");
    assert_rate(rate(&far, "native", 1), 3e9 / 1.25);
    let small = "name = \"small\"\n";
    let half = far.replace(small, &format!("{small}native_local_share = 0.5\n"));
    assert_rate(rate(&half, "native", 1), 3e9 / 1.1875);
}

#[test]
fn threads_are_on_nodes_with_cpus() {
    // The node after node 1 has no CPUs.
    let text = with_expander().replace("node = 0", "node = 1");
    for placement in ["TRLCPL", "TRLCPR", "TRRCPL", "TRRCPR"] {
        assert_rate(rate(&text, placement, 1), 1e9);
    }
    // No thread runs beside this device.
    let text = with_expander().replace("node = 0", "node = 2");
    let machine = parse("m.toml", &text).expect("a machine");
    let names: Vec<String> = names(&machine).into_iter().map(|(name, _)| name).collect();
    for (name, is_there) in [
        ("TRLCPL", false),
        ("TRLCPR", true),
        ("TRRCPL", true),
        ("TLORP0I0", true),
    ] {
        assert_eq!(names.iter().any(|n| n == name), is_there, "{name}");
    }
}

#[test]
fn a_first_host_without_cpus_has_no_threads() {
    let host = |name: &str, cpus: u32| {
        format!("[[node]]\nhost = \"{name}\"\ncpus = {cpus}\nread_bytes_per_s = 1e9\n")
    };
    let text = format!(
        "name = \"x\"\n{}{}{}",
        host("a", 0),
        host("b", 1),
        host("c", 1)
    );
    let machine = parse("m.toml", &text).expect("a machine");
    let refused = predict_placement(&machine, Placement::Proper, 1).expect_err("no CPUs");
    assert!(
        refused.to_string().contains("CPUs on its first host"),
        "{refused}"
    );
}

#[test]
fn two_hosts_are_not_linked() {
    let text = SMALL
        .replace("count = 2\n", "count = 1\nhost = \"a\"\n")
        .replace(
            "[[link]]",
            "[[node]]\nhost = \"b\"\ncpus = 1\nread_bytes_per_s = 1e9\n[[link]]",
        );
    assert_refused(&text, &["link[0].nodes", "two hosts"]);
}

const REPORT: &str = r#"{
  "format": 1, "something new": {"deep": [1, 2]},
  "machine": {"cpu_model": "Measured 9000", "kernel": "6.12"},
  "topology": {"nodes": [{"id": 0, "cpus": 2}, {"id": 1, "cpus": 2}]},
  "read_bandwidth_bytes_per_s": [[20000000000, 5000000000], [6000000000, 20000000000]],
  "write_bandwidth_bytes_per_s": [[10000000000, 4000000000], [4000000000, 10000000000]],
  "one_cpu": {
    "read_bandwidth_bytes_per_s": [[6000000000, 3000000000], [null, 6000000000]],
    "write_bandwidth_bytes_per_s": [[3000000000, 1500000000], [null, 3000000000]]
  },
  "latency_ns": {"unloaded": [[80, 120], [160, 80]], "loaded": [[null, null], [null, null]]},
  "devices": [{"name": "nvme0n1", "home_node": 1, "read_bytes_per_s": [[1000000000, null], [null, 3000000000]]}]
}"#;

#[test]
fn a_probe_gives_a_machine() {
    let machine = parse("report.json", REPORT).expect("a machine");
    assert_eq!(machine.name, "Measured 9000");
    assert_rate(machine.nodes[0].read_bytes_per_s, 20e9);
    assert_rate(machine.nodes[0].write_bytes_per_s, 10e9);
    // Data go from node 0 to node 1 when node 1 reads memory of node 0.
    let link = |from, to| {
        machine
            .links
            .iter()
            .find(|l| (l.from, l.to) == (from, to))
            .expect("a link")
    };
    assert_rate(link(0, 1).bytes_per_s, 6e9);
    assert_rate(link(1, 0).bytes_per_s, 5e9);
    // A copy reads and writes: 1 / (1/6 + 1/3) GB/s. Node 1 has no figure for memory of node 0: half, by the latencies.
    assert_rate(machine.copy[0][0].expect("a rate"), 2e9);
    assert_rate(machine.copy[0][1].expect("a rate"), 1e9);
    assert_rate(machine.copy[1][0].expect("a rate"), 1e9);
    assert_eq!(machine.devices[0].node, 1);
    assert_rate(machine.devices[0].read_bytes_per_s, 3e9);
}

#[test]
fn the_name_of_a_probed_machine_says_that_virtual_nodes_share_memory() {
    let on = |kernel_node: u32| {
        let node = "{\"id\": 1, \"cpus\": 2";
        let text = REPORT.replace("{\"id\": 0", "{\"kernel_node\": 0, \"id\": 0");
        let text = text.replace(node, &format!("{node}, \"kernel_node\": {kernel_node}"));
        parse("report.json", &text).expect("a machine").name
    };
    assert_eq!(on(1), "Measured 9000");
    assert!(on(0).contains("share memory"), "{}", on(0));
}

#[test]
fn a_probe_with_three_matrices_is_enough() {
    let text = r#"{"read_bandwidth_bytes_per_s": [[10, 5], [5, 10]], "write_bandwidth_bytes_per_s": [[8, 4], [4, 8]], "latency_ns": [[1, 2], [2, 1]]}"#;
    let machine = parse("report.json", text).expect("a machine");
    assert_rate(machine.nodes[1].write_bytes_per_s, 8.0);
    assert_eq!(machine.copy[0][1], None, "no rate of one CPU");
}

#[test]
fn bad_reports_name_the_field() {
    for (from, to, parts) in [
        (
            "[6000000000, 20000000000]]",
            "[6000000000]]",
            vec!["read_bandwidth_bytes_per_s", "each pair"],
        ),
        ("[[80, 120], [160, 80]]", "[[80, 120]]", vec!["latency_ns"]),
        ("[[80, 120]", "[[-80, 120]", vec!["latency_ns", "-80"]),
        (
            "{\"id\": 1, \"cpus\": 2}",
            "{\"id\": 1, \"cpus\": 2}, {\"id\": 2, \"cpus\": 2}",
            vec!["topology.nodes"],
        ),
        (
            "\"home_node\": 1",
            "\"home_node\": 5",
            vec!["devices[0].home_node"],
        ),
        (
            "20000000000, 5",
            "2e20, 5",
            vec!["read_bandwidth_bytes_per_s", "at most"],
        ),
        ("\"one_cpu\"", "\"one_cpu\": 3, \"x\"", vec!["line"]),
    ] {
        let text = REPORT.replacen(from, to, 1);
        assert_ne!(text, REPORT, "{from}");
        assert_refused(&text, &parts);
    }
    assert_refused(
        "{\"read_bandwidth_bytes_per_s\": [], \"write_bandwidth_bytes_per_s\": []}",
        &["0 nodes"],
    );
    let unmeasured =
        "{\"read_bandwidth_bytes_per_s\": [[null]], \"write_bandwidth_bytes_per_s\": [[null]]}";
    assert_refused(
        unmeasured,
        &["read_bandwidth_bytes_per_s[..][0]", "probe again"],
    );
    assert_refused(&" ".repeat(5 << 20), &["at most"]);
}

proptest! {
    /// Any text is a machine or an error, and a machine has predictions.
    #[test]
    fn any_numbers_are_refused_or_predicted(
        cpus in any::<i64>(), memory in any::<f64>(), link in any::<f64>(),
        time in any::<f64>(), node in any::<i64>(), count in any::<i64>(),
    ) {
        let text = format!(
            "name = 'x'\n[thread]\ncopy_bytes_per_s = 1e9\ntime_by_hops = [1.0, {time:e}]\n[[node]]\ncount = {count}\ncpus = {cpus}\n\
             read_bytes_per_s = {memory:e}\n[[link]]\nnodes = [0, {node}]\nbytes_per_s = {link:e}\n"
        ).replace("NaN", "nan");
        if let Ok(machine) = parse("x", &text) {
            for (_, placement) in names(&machine) {
                let _ = predict_placement(&machine, placement, 5);
            }
        }
    }

    #[test]
    fn a_cut_or_changed_file_does_no_harm(at in 0..SMALL.len(), byte in any::<u8>()) {
        let mut bytes = SMALL.as_bytes().to_vec();
        bytes[at] = byte;
        let _ = parse("x", &String::from_utf8_lossy(&bytes));
        let _ = parse("x", &SMALL[..at]);
    }
}
