//! The model reads placement traces, and refuses bad lines.
#![forbid(unsafe_code)]

use jericho_model::{LINE_BYTES_MAX, Machine, Trace, TraceError, parse};
use proptest::prelude::*;

const MACHINE: &str = r#"
name = "small"
[thread]
copy_bytes_per_s = 3e9
time_by_hops = [1, 1.5]
[[node]]
count = 2
cpus = 2
read_bytes_per_s = 10e9
[[node]]
cpus = 0
read_bytes_per_s = 10e9
[[link]]
nodes = [0, 1]
bytes_per_s = 4e9
[[link]]
nodes = [1, 2]
bytes_per_s = 4e9
[[device]]
name = "disk"
node = 1
read_bytes_per_s = 1e9
write_bytes_per_s = 0.5e9
"#;

fn machine() -> Machine {
    parse("m.toml", MACHINE).expect("a machine")
}

fn rate(lines: &[&str], threads: u32) -> f64 {
    let machine = machine();
    let mut trace = Trace::new(&machine);
    for line in lines {
        trace.add(line.as_bytes()).expect("a right line");
    }
    trace.predict(threads).expect("a prediction").bytes_per_s
}

#[track_caller]
fn assert_rate(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() < 1e-6 * expected,
        "{found} instead of {expected}"
    );
}

const LOCAL: &str =
    r#"{"thread":7,"cpu":0,"buffer":0,"frame":0,"device":null,"bytes":4096,"op":"read"}"#;
const REMOTE: &str =
    r#"{"thread":9,"cpu":0,"buffer":0,"frame":1,"device":null,"bytes":4096,"op":"read","later":1}"#;
const MISS: &str =
    r#"{"thread":7,"cpu":0,"buffer":0,"frame":1,"device":1,"bytes":100,"op":"read"}"#;

#[test]
fn a_hit_is_a_copy() {
    assert_rate(rate(&[LOCAL, "", LOCAL], 1), 3e9);
    assert_rate(rate(&[LOCAL, REMOTE], 2), 3e9 + 2.4e9);
    assert_rate(rate(&[REMOTE, LOCAL], 1), 2.4e9);
}

#[test]
fn the_example_of_the_page_is_a_trace() {
    let page = include_str!("../../../docs/formats/placement-trace.md");
    let (_, rest) = page.split_once("```json\n").expect("an example");
    let (example, _) = rest.split_once("```").expect("an end");
    let lines: Vec<&str> = example.lines().collect();
    assert!(rate(&lines, 3) > 0.0);
}

#[test]
fn a_thread_goes_on_with_its_mix() {
    let half_remote = REMOTE.replace("\"thread\":9", "\"thread\":7");
    // The mean time of a byte: (1/3 + 1/2.4) / 2 ns.
    assert_rate(
        rate(&[LOCAL, &half_remote], 1),
        2.0 / (1.0 / 3e9 + 1.0 / 2.4e9),
    );
}

#[test]
fn a_miss_also_takes_the_device() {
    assert_rate(rate(&[MISS], 1), 1e9);
    assert_rate(rate(&[&MISS.replace("\"read\"", "\"write\"")], 1), 0.5e9);
    assert_rate(
        rate(&[&MISS.replace("\"frame\":1", "\"frame\":null")], 1),
        1e9,
    );
}

#[test]
fn bad_lines_are_named_with_the_remedy() {
    let machine = machine();
    let long = format!("{LOCAL}{}", " ".repeat(LINE_BYTES_MAX));
    let with = |from: &str, to: &str| LOCAL.replace(from, to);
    for (line, part) in [
        ("{".to_owned(), "docs/formats/placement-trace.md"),
        ("\u{0}".to_owned(), "docs/formats/placement-trace.md"),
        (long, "one access a line"),
        (
            with("\"cpu\":0", "\"cpu\":3"),
            "cpu: the machine has no node 3",
        ),
        (with("\"cpu\":0", "\"cpu\":2"), "cpu: node 2 has no CPUs"),
        (with("\"cpu\":0", "\"cpu\":-1"), "invalid"),
        (
            with("\"frame\":0", "\"frame\":99"),
            "frame: the machine has no node 99",
        ),
        (with("\"frame\":0", "\"frame\":null"), "at least one"),
        (
            with("\"device\":null", "\"device\":0"),
            "no device on node 0",
        ),
        (with("4096", "0"), "bytes: 0"),
        (with("4096", "18446744073709551615"), "bytes"),
        (with("\"read\"", "\"erase\""), "erase"),
        (with("\"thread\":7,", ""), "thread"),
        (
            with("\"frame\":0,", "\"frames\":0,"),
            "missing field `frame`",
        ),
        (with("\"device\":null,", ""), "missing field `device`"),
    ] {
        let mut trace = Trace::new(&machine);
        trace.add(LOCAL.as_bytes()).expect("a right line");
        let error = trace.add(line.as_bytes()).expect_err(&line).to_string();
        assert!(
            error.contains("line 2") && error.contains(part) && !error.contains("line 1"),
            "{part:?} is not in: {error}"
        );
    }
}

#[test]
fn a_trace_has_the_threads_that_it_has() {
    let machine = machine();
    let mut trace = Trace::new(&machine);
    assert_eq!(trace.predict(1), Err(TraceError::Empty));
    trace.add(LOCAL.as_bytes()).expect("a right line");
    assert!(
        trace
            .predict(2)
            .expect_err("one thread")
            .to_string()
            .contains("the trace has 1")
    );
    assert!(trace.predict(0).is_err());
}

#[test]
fn a_line_after_a_prediction_counts() {
    let machine = machine();
    let mut trace = Trace::new(&machine);
    let half_remote = REMOTE.replace("\"thread\":9", "\"thread\":7");
    for (line, expected) in [
        (LOCAL, 3e9),
        (&half_remote, 2.0 / (1.0 / 3e9 + 1.0 / 2.4e9)),
    ] {
        trace.add(line.as_bytes()).expect("a right line");
        assert_rate(
            trace.predict(1).expect("a prediction").bytes_per_s,
            expected,
        );
    }
}

#[test]
fn threads_are_bounded() {
    let machine = machine();
    let mut trace = Trace::new(&machine);
    let refused = (0..).find_map(|thread| {
        let line = LOCAL.replace("\"thread\":7", &format!("\"thread\":{thread}"));
        trace.add(line.as_bytes()).err()
    });
    assert!(
        refused
            .expect("an end")
            .to_string()
            .contains("at most 4096")
    );
}

proptest! {
    #[test]
    fn any_bytes_are_a_line_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        let machine = machine();
        let _ = Trace::new(&machine).add(&line);
    }

    #[test]
    fn order_within_threads_does_not_matter(mut bytes in proptest::collection::vec(1u64..1 << 40, 2..20)) {
        let predict = |bytes: &[u64]| {
            let machine = machine();
            let mut trace = Trace::new(&machine);
            for bytes in bytes {
                let of = if bytes % 2 == 0 { LOCAL.replace("4096", "B") } else { MISS.replace("100", "B") };
                let line = of.replace('B', &bytes.to_string());
                trace.add(line.as_bytes()).expect("a line");
            }
            trace.predict(1).expect("a prediction").bytes_per_s
        };
        let forward = predict(&bytes);
        bytes.reverse();
        prop_assert!((forward - predict(&bytes)).abs() <= 1e-6 * forward);
    }
}
