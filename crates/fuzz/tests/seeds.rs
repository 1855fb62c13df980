//! Runs every target over the corpus and over seeds, within bounds. An input that `make fuzz` has found is tested here from then
//! on.

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use jericho_fuzz::{TARGETS, Target};
use jericho_sim::Random;

/// Number of seeds of each target, and the time after which no further seed begins.
const SEEDS: u64 = 20_000;
const TIME: Duration = Duration::from_secs(12);
/// An input that takes this long hangs.
const HANGS: Duration = Duration::from_secs(120);

/// Outcomes that the seeds must lead to. A target that only meets refusals tests nothing.
const REACHED: [(&str, &[&str]); 4] = [
    (
        "calls",
        &[
            "granted for reading",
            "granted for writing",
            "read ahead",
            "reserved",
            "reserved soon",
            "mapped",
            "token given",
            "latches given up",
            "copy ended",
            "refused",
        ],
    ),
    (
        "admission",
        &[
            "admitted to read",
            "admitted to write",
            "given write access",
            "refused",
            "closed",
        ],
    ),
    (
        "control",
        &[
            "counters",
            "where",
            "place",
            "placed",
            "moved",
            "threads set",
            "synced",
            "trimmed",
            "asked to grow",
            "refused",
        ],
    ),
    (
        "nbd",
        &[
            "served",
            "refused",
            "read",
            "block status",
            "structured",
            "negotiated",
            "ended",
            "broken",
        ],
    ),
];

/// Runs inputs in a thread. Panics with the input that panicked or hangs.
fn run_all(name: &str, target: Target, inputs: impl Iterator<Item = (String, Vec<u8>)>) {
    let (send, inbox) = mpsc::channel::<(String, Vec<u8>)>();
    let (done, outcome) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        for (_, data) in inbox {
            target(&data);
            done.send(()).expect("the test waits");
        }
    });
    for (what, data) in inputs {
        send.send((what.clone(), data.clone()))
            .expect("the thread takes inputs");
        match outcome.recv_timeout(HANGS) {
            Ok(()) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name}: {what} hangs: {data:02x?}"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                panic!("{name}: {what} panics (see above): {data:02x?}")
            }
        }
    }
    drop(send);
    worker.join().expect("its end");
}

fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|f| f.path())
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| {
            (
                path.display().to_string(),
                std::fs::read(&path).expect("a corpus file"),
            )
        })
        .collect()
}

/// Returns the bytes of a seed: short ones first, and every second seed with values that are often wrong.
fn bytes(seed: u64) -> Vec<u8> {
    let mut random = Random::of(seed, &[0xf0]);
    let most = 4 + (seed / 16).min(400);
    let len = random.below(most) as usize;
    let mut data: Vec<u8> = (0..len).map(|_| random.next_u64() as u8).collect();
    if seed % 2 == 1 {
        for byte in &mut data {
            if random.below(3) == 0 {
                *byte = [0, 1, 0x7f, 0x80, 0xff][random.below(5) as usize];
            }
        }
    }
    data
}

fn target(name: &str) {
    let (_, function) = *TARGETS.iter().find(|(n, _)| *n == name).expect("a target");
    let end = Instant::now() + TIME;
    let seeds = (0..SEEDS).take_while(|_| Instant::now() < end);
    let seeds = seeds.map(|seed| (format!("seed {seed}"), bytes(seed)));
    run_all(name, function, corpus(name).into_iter().chain(seeds));
    let expected = REACHED.iter().find(|(of, _)| *of == name);
    let reached = jericho_fuzz::outcomes(name);
    for outcome in expected.map_or(&[][..], |(_, outcomes)| outcomes) {
        assert!(
            reached.contains_key(outcome),
            "{name}: {outcome}: not reached; reached: {reached:?}"
        );
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { target(stringify!($name)); })*

        #[test]
        fn every_target_is_tested_and_has_a_program() {
            assert_eq!([$(stringify!($name)),*].to_vec(), TARGETS.map(|(name, _)| name).to_vec());
            for (name, _) in TARGETS {
                let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets");
                assert!(program.join(format!("{name}.rs")).is_file(), "{name}");
            }
        }
    };
}

targets!(label superblock image rows journal segments handshake calls admission control kernel wire nbd);
