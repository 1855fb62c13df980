//! The steps of a sequence, and the text that names a case.

use std::fmt;
use std::str::FromStr;

use jericho_sim::Random;

/// A kind of operation on one of the two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Create,
    Write1,
    Write4K,
    Write200K,
    Append,
    /// In the calling thread, which logs pages if it commits.
    Fsync,
    Fdatasync,
    /// A write and a sync of its range, as with O_DSYNC, in the calling thread.
    SyncWrite,
    /// Syncs whose pages the slice's evictor writes in place.
    FsyncBySlice,
    FdatasyncBySlice,
    RenameSame,
    RenameCross,
    RenameOver,
    Link,
    Unlink,
    TruncateToNothing,
    TruncateToPart,
    TruncateUp,
    Punch,
    /// Makes a range read as zeros, in the same blocks.
    Zero,
    /// To the other slice.
    Move,
    /// Of all pages but the first two, without a flush or a commit.
    WriteBack,
    /// Of all metadata, as fsync of a directory. The file does not matter.
    Commit,
    /// A checkpoint of the metadata store. The file does not matter.
    Checkpoint,
}

const OPS: [(Op, &str); 24] = [
    (Op::Create, "create"),
    (Op::Write1, "write-1"),
    (Op::Write4K, "write-4k"),
    (Op::Write200K, "write-200k"),
    (Op::Append, "append"),
    (Op::Fsync, "fsync"),
    (Op::Fdatasync, "fdatasync"),
    (Op::SyncWrite, "sync-write"),
    (Op::FsyncBySlice, "fsync-by-slice"),
    (Op::FdatasyncBySlice, "fdatasync-by-slice"),
    (Op::RenameSame, "rename-same"),
    (Op::RenameCross, "rename-cross"),
    (Op::RenameOver, "rename-over"),
    (Op::Link, "link"),
    (Op::Unlink, "unlink"),
    (Op::TruncateToNothing, "truncate-to-nothing"),
    (Op::TruncateToPart, "truncate-to-part"),
    (Op::TruncateUp, "truncate-up"),
    (Op::Punch, "punch"),
    (Op::Move, "move"),
    (Op::WriteBack, "write-back"),
    (Op::Commit, "commit"),
    (Op::Checkpoint, "checkpoint"),
    (Op::Zero, "zero"),
];
/// Number of operations, from the first one on, of which `Sequence::random` chooses.
const RANDOM_OPS: u64 = OPS.len() as u64 - 1;

/// The largest number of steps in a sequence.
const STEPS_MAX: u64 = 5;

/// An operation on a file: 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub op: Op,
    pub file: usize,
}

/// What exists before a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Two files with durable data.
    Durable,
    /// The same, with room for a few pages in each slice.
    Full,
    /// Two files that were created and not committed.
    Fresh,
}

const BASES: [(Base, &str); 3] = [
    (Base::Durable, "durable"),
    (Base::Full, "full"),
    (Base::Fresh, "fresh"),
];

/// Follows the base of a sequence on a volume with checksums.
const SUMMED: &str = "-summed";
/// Follows that, if batches take a few pages of a file each, as they do of files with very many extents.
const SHORT_STEPS: &str = "-short";

/// A sequence of steps, ended by an unmount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub base: Base,
    /// Number of metadata stores: 1, or 2 for one in each slice.
    pub stores: usize,
    /// On a volume that keeps checksums of the data.
    pub has_checksums: bool,
    /// A batch takes a few pages of a file, and the next one the next few.
    pub has_short_steps: bool,
    pub steps: Vec<Step>,
}

/// A power cut in a sequence, and perhaps one more in the recovery from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub sequence: Sequence,
    /// Number of the interrupted change since the mount, and the seed of what the devices lose.
    pub cut: (u64, u64),
    /// The same for the next mount.
    pub again: Option<(u64, u64)>,
}

impl Sequence {
    /// Returns a random sequence of at most `STEPS_MAX` steps, without checksums. Most of its steps are on the same file.
    pub fn random(random: &mut Random) -> Sequence {
        let base = BASES[random.below(BASES.len() as u64) as usize].0;
        // Longer sequences contain the shorter ones.
        let length = if random.below(16) == 0 {
            1 + random.below(STEPS_MAX - 1)
        } else {
            STEPS_MAX
        };
        let mut file = usize::from(random.coin());
        let mut step = || {
            if random.below(4) == 0 {
                file = 1 - file;
            }
            let op = OPS[random.below(RANDOM_OPS) as usize].0;
            Step { op, file }
        };
        let steps = (0..length).map(|_| step()).collect();
        let stores = 1 + usize::from(random.coin());
        Sequence {
            base,
            stores,
            has_checksums: false,
            has_short_steps: false,
            steps,
        }
    }

    /// Has a quarter of the sequences take short steps. `random` is not that of `random`.
    pub fn with_short_steps(mut self, random: &mut Random) -> Sequence {
        self.has_short_steps = random.below(4) == 0;
        self
    }

    /// Gives a third of the sequences checksums, and makes some of their punches zeroings, which matter only there. `random` is not that
    /// of `random`, so the sequences of a seed are otherwise the same.
    pub fn with_checksums(mut self, random: &mut Random) -> Sequence {
        self.has_checksums = random.below(3) == 0;
        for step in &mut self.steps {
            if self.has_checksums && step.op == Op::Punch && random.coin() {
                step.op = Op::Zero;
            }
        }
        self
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let base = BASES.iter().find(|(other, _)| *other == self.base);
        write!(f, "{}-{}", base.expect("listed").1, self.stores)?;
        if self.has_checksums {
            f.write_str(SUMMED)?;
        }
        if self.has_short_steps {
            f.write_str(SHORT_STEPS)?;
        }
        for Step { op, file } in &self.steps {
            let name = OPS.iter().find(|(other, _)| other == op);
            write!(f, ",{}:{}", name.expect("listed").1, ["a", "b"][*file])?;
        }
        Ok(())
    }
}

impl FromStr for Sequence {
    type Err = String;

    fn from_str(text: &str) -> Result<Sequence, String> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let long = name.strip_suffix(SHORT_STEPS);
        let has_short_steps = long.is_some();
        let name = long.unwrap_or(name);
        let plain = name.strip_suffix(SUMMED);
        let (name, stores) = plain.unwrap_or(name).split_once('-').ok_or("BASE-STORES")?;
        let stores = match stores {
            "1" => 1,
            "2" => 2,
            other => return Err(format!("a number of stores: {other}")),
        };
        let (base, _) = BASES
            .iter()
            .find(|(_, other)| *other == name)
            .ok_or(format!("a base: {name}"))?;
        let step = |part: &str| {
            let (name, file) = part.split_once(':').ok_or("a step without a file")?;
            let (op, _) = OPS
                .iter()
                .find(|(_, other)| *other == name)
                .ok_or(format!("an operation: {name}"))?;
            let file = match file {
                "a" => 0,
                "b" => 1,
                other => return Err(format!("a file: {other}")),
            };
            Ok::<Step, String>(Step { op: *op, file })
        };
        let steps = parts.map(step).collect::<Result<_, _>>()?;
        Ok(Sequence {
            base: *base,
            stores,
            has_checksums: plain.is_some(),
            has_short_steps,
            steps,
        })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}:{}", self.sequence, self.cut.0, self.cut.1)?;
        match self.again {
            Some((cut, seed)) => write!(f, " {cut}:{seed}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let mut words = text.split_whitespace();
        let sequence = words.next().unwrap_or_default().parse()?;
        let mut cuts = words.map(|word| {
            let (cut, seed) = word.split_once(':')?;
            Some((cut.parse().ok()?, seed.parse().ok()?))
        });
        let cut = cuts.next().flatten().ok_or("CUT:SEED")?;
        let again = cuts.next().flatten();
        Ok(Case {
            sequence,
            cut,
            again,
        })
    }
}
