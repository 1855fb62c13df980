//! How many accesses are local, by the kernel's evidence and by Jericho's counters: under each policy, through the mount, and in the page cache.
//!
//! A thread for each file reads random pieces of it. The first pass is discarded, as in the Jericho paper: then all files are in memory.

use std::path::{Path, PathBuf};

use crate::accesses::{Program, Work, fill};
use crate::costs::{check_costs, write_report};
use crate::evidence::{Evidence, Frames};
use crate::guest::{Volume, tell};
use crate::shape::Shape;

const FILE_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;
const PIECE_BYTES: usize = 64 << 10;
/// First pass that counts.
const FIRST: u16 = 1;
/// Passes that count, if nothing has to settle first.
const PASSES: usize = 2;
/// Passes in a row with the wanted share after which the threads have settled. One pass may have it by chance.
const SETTLED: usize = 2;
/// Passes within which the threads must be at their data under *adaptive*. The emulated CPUs are slow, and other work of the host slows them down further.
const PASSES_MAX: u16 = 30;
/// Most difference of the shares by the kernel and by Jericho's counters.
const AGREEMENT: f64 = 0.01;

/// What a case does on a machine.
struct Scale {
    files_of_node: usize,
    milliseconds: u64,
}

impl Scale {
    /// Returns the scale for a number of nodes. On eight nodes, there are 64 files in 8 directories, as in the paper.
    fn of(shape: &Shape) -> Scale {
        match shape.nodes() {
            0..4 => Scale {
                files_of_node: 2,
                milliseconds: 1500,
            },
            4..8 => Scale {
                files_of_node: 4,
                milliseconds: 3000,
            },
            _ => Scale {
                files_of_node: 8,
                milliseconds: 3000,
            },
        }
    }
}

/// Where the threads of a run may run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    Free,
    /// To the node of their files.
    Near,
    /// To the node that is farthest from their files.
    Far,
}

/// The machine, and the files of a run in the order of their nodes.
struct Experiment {
    shape: Shape,
    scale: Scale,
    /// Files whose share is too small, or whose counters disagree.
    wrong: Vec<String>,
}

impl Experiment {
    fn new() -> Experiment {
        let shape = Shape::of_machine();
        write_report(&shape);
        Experiment {
            scale: Scale::of(&shape),
            shape,
            wrong: vec![],
        }
    }

    fn threads<'a>(&self, files: &'a [PathBuf], bound: Bound) -> Vec<(Option<usize>, &'a Path)> {
        let cpu = |index: usize| {
            let home = index / self.scale.files_of_node;
            let node = match bound {
                Bound::Free => return None,
                Bound::Near => self.shape.node_of_threads(home),
                Bound::Far => self.shape.farthest(home),
            };
            let cpus = &self.shape.cpus[node];
            Some(cpus[index % cpus.len()])
        };
        let threads = files.iter().enumerate();
        threads
            .map(|(index, file)| (cpu(index), file.as_path()))
            .collect()
    }

    fn work<'a>(&self, files: &'a [PathBuf], bound: Bound) -> Work<'a> {
        Work {
            operation: "read",
            bytes: FILE_BYTES,
            piece: PIECE_BYTES,
            milliseconds: self.scale.milliseconds,
            threads: self.threads(files, bound),
        }
    }

    /// Prints the share of local accesses, writes a placement trace, and returns the share.
    fn conclude(&self, name: &str, evidence: &Evidence, first: u16) -> f64 {
        let share = share(evidence.pages_since(first, &self.shape));
        self.tell(&format!("{name}, by the kernel"), share);
        let machine = std::fs::read_to_string("/machine").expect("the machine's name");
        evidence.write_trace(
            &format!("{}-{name}", machine.trim()).replace(' ', "-"),
            first,
        );
        share
    }

    fn tell(&self, what: &str, share: f64) {
        let nodes = self.shape.nodes();
        let threads = nodes * self.scale.files_of_node;
        tell(
            &format!("share of local accesses, {nodes} nodes, {threads} threads, {what}"),
            share,
        );
    }

    /// Takes note of a share below its bound.
    fn expect(&mut self, name: &str, share: f64, bounds: std::ops::RangeInclusive<f64>) {
        if !bounds.contains(&share) {
            self.wrong
                .push(format!("{name}: {share:.4} is not in {bounds:?}"));
        }
    }

    fn end(self) {
        assert!(self.wrong.is_empty(), "{:#?}", self.wrong);
    }

    /// Reads files of a volume under a policy. Compares Jericho's counters of all accesses with the kernel's evidence. Returns the share of local accesses in the
    /// passes that count.
    ///
    /// With `settles`, the passes that count are the last ones, which begin when Jericho's counters have shown this share in some passes in a row, or after many passes.
    fn under(
        &mut self,
        volume: &Volume,
        (policy, bound): (&str, Bound),
        files: &[PathBuf],
        settles: Option<f64>,
    ) -> f64 {
        let name = match bound {
            Bound::Free => format!("Jericho {policy}"),
            Bound::Near => "Jericho best".to_owned(),
            Bound::Far => "Jericho worst".to_owned(),
        };
        let before = volume.accesses();
        let mut program = Program::start(Some(policy), &self.work(files, bound));
        program.wait();
        let mut first = FIRST;
        let mut begun = volume.accesses();
        let mut in_a_row = 0;
        while in_a_row < SETTLED
            && let Some(wanted) = settles.filter(|_| first < PASSES_MAX)
        {
            program.passes(1);
            first += 1;
            let before = std::mem::replace(&mut begun, volume.accesses());
            let share = share_between(before, begun);
            println!(
                "\nlab: {name}: share of local accesses in pass {}: {share:.3}",
                first - 1
            );
            in_a_row = if share >= wanted { in_a_row + 1 } else { 0 };
        }
        program.passes(PASSES);
        let measured = share_between(begun, volume.accesses());
        let done = program.end();
        let all = volume.accesses();
        println!("\nlab: {name}: {first} passes before those that count");
        let frames = self.frames_of_volume(files);
        let evidence = Evidence::join(done, &frames, &self.shape);
        let [by_kernel, counted] = [
            share(evidence.pages_since(0, &self.shape)),
            share_between(before, all),
        ];
        self.tell(&format!("{name}, all passes, by the kernel"), by_kernel);
        self.tell(
            &format!("{name}, all passes, by Jericho's counters"),
            counted,
        );
        self.expect(
            &format!("{name}: counters less evidence"),
            counted - by_kernel,
            -AGREEMENT..=AGREEMENT,
        );
        let pages: f64 = evidence.pages_since(0, &self.shape).iter().sum();
        let counted_pages = (all[0] + all[1] - before[0] - before[1]) as f64;
        self.expect(
            &format!("{name}: pages counted, of those accessed"),
            counted_pages / pages,
            1.0 - AGREEMENT..=1.0 + AGREEMENT,
        );
        self.tell(&format!("{name}, by Jericho's counters"), measured);
        self.conclude(&name, &evidence, first)
    }

    /// Returns where the pages of a volume's files are: `check_frames` has seen them there.
    fn frames_of_volume(&self, files: &[PathBuf]) -> Frames {
        let home = |index| vec![index / self.scale.files_of_node; FILE_BYTES / PAGE_BYTES];
        Frames((0..files.len()).map(home).collect())
    }

    /// Asserts that all pages of all files are cached on the node of the file, by move_pages(2).
    fn check_frames(&self, volume: &Volume, files: &[PathBuf]) {
        for (index, file) in files.iter().enumerate() {
            let found = volume.where_is(file);
            let all = serde_json::json!([[index / self.scale.files_of_node, FILE_BYTES]]);
            assert_eq!(found["resident_bytes_by_kernel_node"], all, "{found}");
        }
    }

    /// Reads files in the page cache. Returns the share of local accesses.
    fn in_page_cache(&mut self, name: &str, files: &[PathBuf], bound: Bound) -> f64 {
        let frames = Frames::of_page_cache(files, FILE_BYTES);
        let mut program = Program::start(None, &self.work(files, bound));
        program.wait();
        program.passes(PASSES);
        let done = program.end();
        let after = Frames::of_page_cache(files, FILE_BYTES);
        assert!(frames.0 == after.0, "the kernel has moved pages");
        let evidence = Evidence::join(done, &frames, &self.shape);
        self.conclude(name, &evidence, FIRST)
    }

    /// Returns new files of a tmpfs, which are in the page cache. They are filled by threads that are free, or bound to nodes in the order of the files.
    fn files_in_page_cache(&self, bound: Bound) -> Vec<PathBuf> {
        let dir = Path::new("/dev/shm/cached");
        // Another case may have left it.
        let _ = std::fs::remove_dir_all(dir);
        std::fs::create_dir(dir).expect("mkdir");
        let files = (0..self.shape.nodes() * self.scale.files_of_node)
            .map(|number| dir.join(number.to_string()));
        let files: Vec<PathBuf> = files.collect();
        fill(self.threads(&files, bound), FILE_BYTES, PIECE_BYTES);
        files
    }
}

fn share([local, remote]: [f64; 2]) -> f64 {
    local / (local + remote)
}

fn share_between(before: [u64; 2], after: [u64; 2]) -> f64 {
    share([0, 1].map(|which| (after[which] - before[which]) as f64))
}

#[test]
#[ignore = "for the guest of make lab"]
fn accesses_of_free_threads_are_local_under_always_and_adaptive() {
    let mut experiment = Experiment::new();
    let (nodes, each) = (experiment.shape.nodes(), experiment.scale.files_of_node);
    let volume = Volume::with_cache("192M");
    check_costs(&volume);
    let files = volume.files_on_nodes(nodes, each, FILE_BYTES);
    experiment.check_frames(&volume, &files);
    let evictions = volume.evictions();
    let mut run =
        |policy, settles| experiment.under(&volume, (policy, Bound::Free), &files, settles);
    run("never", None);
    let always = run("always", None);
    let adaptive = run("adaptive", Some(0.95));
    experiment.expect("always", always, 0.99..=1.0);
    experiment.expect("adaptive", adaptive, 0.95..=1.0);
    // The threads of the daemon copy, so there is no evidence of the program's threads.
    let before = volume.accesses();
    let mut program = Program::start(None, &experiment.work(&files, Bound::Free));
    program.wait();
    program.end();
    let through_mount = share_between(before, volume.accesses());
    experiment.tell("through the mount, by Jericho's counters", through_mount);
    experiment.check_frames(&volume, &files);
    assert_eq!(volume.evictions(), evictions, "pages were read again");
    drop(volume);
    let cached = experiment.files_in_page_cache(Bound::Free);
    experiment.in_page_cache("page cache", &cached, Bound::Free);
    experiment.end();
}

#[test]
#[ignore = "for the guest of make lab"]
fn the_best_and_the_worst_placement_are_local_and_remote() {
    let mut experiment = Experiment::new();
    let (nodes, each) = (experiment.shape.nodes(), experiment.scale.files_of_node);
    let volume = Volume::with_cache("192M");
    check_costs(&volume);
    let files = volume.files_on_nodes(nodes, each, FILE_BYTES);
    experiment.check_frames(&volume, &files);
    let best = experiment.under(&volume, ("adaptive", Bound::Near), &files, None);
    let worst = experiment.under(&volume, ("adaptive", Bound::Far), &files, None);
    experiment.expect("Jericho best", best, 1.0..=1.0);
    experiment.expect("Jericho worst", worst, 0.0..=0.0);
    experiment.check_frames(&volume, &files);
    drop(volume);
    let cached = experiment.files_in_page_cache(Bound::Near);
    let best = experiment.in_page_cache("page cache best", &cached, Bound::Near);
    let worst = experiment.in_page_cache("page cache worst", &cached, Bound::Far);
    experiment.expect("page cache best", best, 1.0..=1.0);
    experiment.expect("page cache worst", worst, 0.0..=0.0);
    experiment.end();
}
