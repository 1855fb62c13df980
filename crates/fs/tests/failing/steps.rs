//! The steps of a sequence, and the text that names a case.

use std::fmt;
use std::str::FromStr;

use jericho_sim::Operation;

/// A kind of operation on one of the two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A third file beside it, which a later `Create` finds.
    Create,
    Read,
    Overwrite,
    Append,
    WriteBig,
    /// All of the file, and a page more.
    Rewrite,
    Fsync,
    Fdatasync,
    /// In the calling thread.
    FdatasyncHere,
    /// Writes dirty pages back without a sync, as the evictor does.
    WriteBack,
    /// A write and a sync of its range, as with O_DSYNC.
    SyncWrite,
    RenameOver,
    RenameCross,
    /// A further name in the other directory.
    Link,
    Unlink,
    Truncate,
    Punch,
    /// To the other slice.
    Move,
    /// Of the file's first directory, as fsync of the directory.
    Commit,
    /// Of everything. The file does not matter.
    SyncAll,
    /// A checkpoint of the metadata store. The file does not matter.
    Checkpoint,
    /// Discards free space. The file does not matter.
    Trim,
    /// Both devices become larger. The file does not matter.
    Grow,
    /// A third device. The file does not matter.
    Add,
    /// Syncs everything, ends the mount without an unmount, damages a copy of the superblock of the file's device, repairs, and mounts again.
    Repair,
    /// Unmounts and mounts again. The file does not matter.
    Remount,
}

const OPS: [(Op, &str); 26] = [
    (Op::Create, "create"),
    (Op::Read, "read"),
    (Op::Overwrite, "overwrite"),
    (Op::Append, "append"),
    (Op::WriteBig, "write-big"),
    (Op::Rewrite, "rewrite"),
    (Op::Fsync, "fsync"),
    (Op::Fdatasync, "fdatasync"),
    (Op::FdatasyncHere, "fdatasync-here"),
    (Op::WriteBack, "write-back"),
    (Op::SyncWrite, "sync-write"),
    (Op::RenameOver, "rename-over"),
    (Op::RenameCross, "rename-cross"),
    (Op::Link, "link"),
    (Op::Unlink, "unlink"),
    (Op::Truncate, "truncate"),
    (Op::Punch, "punch"),
    (Op::Move, "move"),
    (Op::Commit, "commit"),
    (Op::SyncAll, "sync-all"),
    (Op::Checkpoint, "checkpoint"),
    (Op::Trim, "trim"),
    (Op::Grow, "grow"),
    (Op::Add, "add"),
    (Op::Repair, "repair"),
    (Op::Remount, "remount"),
];

/// The sequences whose operations all fail in turn. Their volumes have one metadata store.
pub const SEQUENCES: [&str; 22] = [
    "clean",
    "crashed",
    "clean,append:a,fsync:a,append:a,fdatasync:a",
    "clean,overwrite:a,fdatasync:a,read:a,read:b",
    "clean,create:b,append:b,commit:b,append:a,checkpoint:a",
    "clean,sync-write:a,sync-write:b,overwrite:a",
    "clean,write-big:b,fsync:b,truncate:b,fsync:b",
    "clean,append:a,rename-over:a,fsync:a",
    "clean,rename-cross:a,append:b,commit:a",
    "clean,punch:a,fsync:a,unlink:a,commit:a,trim:a",
    "clean,write-big:a,move:a,fsync:a",
    "clean,append:a,fsync:a,remount:a,read:a,overwrite:a,fsync:a",
    "crashed,read:a,append:a,fsync:a",
    "crashed,unlink:a,create:a,append:a,fsync:a,checkpoint:a",
    "crashed,move:b,overwrite:b,fdatasync:b",
    "clean,truncate:a,append:a,fsync:a,read:a,checkpoint:a,append:a,fsync:a",
    "clean,append:a,grow:a,write-big:a,fsync:a",
    "clean,overwrite:a,write-back:a,checkpoint:a,fdatasync-here:a",
    "clean,overwrite:a,write-back:a,fdatasync-here:a,fdatasync-here:a,append:a,fdatasync:a",
    "clean,overwrite:b,write-back:b,grow:a,fdatasync-here:b",
    "clean-summed,overwrite:a,fdatasync:a,punch:b,rewrite:b,fsync:b,read:a",
    "crashed-summed,truncate:a,rewrite:a,fsync:a,append:b,fdatasync:b",
];

/// The same for volumes with a metadata store in each slice.
pub const SEQUENCES_OF_STORES: [&str; 26] = [
    "clean-stores",
    "crashed-stores",
    "crashed-stores-summed",
    "clean-stores,append:a,append:b,fsync:a,fsync:b,create:b,append:b,commit:b,create:a,append:a,fsync:a",
    "clean-stores,write-big:b,rewrite:b,fsync:b,read:b,write-big:a,rewrite:a,fdatasync:a,read:a",
    "clean-stores,write-big:b,fdatasync-here:b,overwrite:a,fdatasync-here:a,overwrite:b,fdatasync-here:b,read:a",
    "clean-stores,truncate:a,punch:b,overwrite:a,append:b,rewrite:a,rewrite:b,fsync:a,fsync:b",
    "clean-stores-summed,overwrite:a,fdatasync:a,overwrite:b,fsync:b,punch:b,rewrite:b,fsync:b,sync-write:a",
    "clean-stores,rename-cross:a,fsync:a,append:b,fsync:b,rename-cross:b,commit:b",
    "clean-stores,link:a,commit:a,link:b,fsync:b,unlink:a,sync-all:a,append:b,fsync:b",
    "clean-stores,append:a,rename-over:a,fsync:a,create:b,append:b,commit:b",
    "clean-stores,write-big:a,move:a,overwrite:a,fsync:a,append:b,fsync:b",
    "clean-stores,move:b,write-big:b,fsync:b,truncate:b,append:a,fsync:a,fsync:b",
    "clean-stores,move:a,append:a,rename-cross:a,append:b,commit:b,overwrite:a,fdatasync:a",
    "clean-stores-summed,move:a,rewrite:a,fsync:a,rename-over:b,commit:a,append:b,fsync:b",
    "crashed-stores,rename-cross:b,append:a,fsync:a,checkpoint:a,append:b,fsync:b",
    "crashed-stores-summed,link:b,overwrite:a,commit:a,rewrite:b,fdatasync:b,remount:a,read:b",
    "clean-stores,overwrite:b,write-back:b,fdatasync-here:b,overwrite:a,fdatasync-here:a,fdatasync-here:b,fsync:b",
    "clean-stores,move:a,sync-all:a,overwrite:a,write-back:a,fdatasync:a,fdatasync:a,fdatasync-here:a",
    "clean-stores,overwrite:b,write-back:b,append:b,checkpoint:b,fdatasync-here:b,fsync:b",
    "clean-stores,overwrite:b,write-back:b,grow:a,fdatasync-here:b,append:b,fsync:b",
    "clean-stores,overwrite:b,write-back:b,add:a,fdatasync-here:b,append:b,fsync:b",
    "clean-stores,append:b,grow:a,write-big:a,fsync:b,fsync:a",
    "clean-stores,append:b,add:a,fsync:b,create:a,append:a,fsync:a",
    "clean-stores,append:a,repair:a,append:a,fsync:a",
    "crashed-stores,append:b,repair:b,rename-cross:b,append:b,fsync:b",
];

/// An operation on a file: 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub op: Op,
    pub file: usize,
}

/// What happened before a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// An unmount.
    Clean,
    /// A crash: the journal has batches that the store does not have.
    Crashed,
}

/// A volume on which a sequence begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    pub state: State,
    /// Each slice has a metadata store, so it is a shard of its own.
    pub has_stores: bool,
    /// The volume keeps checksums of the data.
    pub has_checksums: bool,
}

/// Follows the state in the text of a base.
const STORES: &str = "-stores";
const SUMMED: &str = "-summed";

/// A mount, steps and an unmount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    pub base: Base,
    pub steps: Vec<Step>,
}

/// A sequence in which an operation of a device fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub sequence: Sequence,
    pub device: usize,
    pub operation: Operation,
    pub nth: u64,
    /// All later operations of that kind fail, too. A device whose flush fails once forgets that, and what it should have made durable.
    pub is_lasting: bool,
    pub errno: i32,
}

pub const KINDS: [(Operation, &str); 5] = [
    (Operation::Read, "read"),
    (Operation::Write, "write"),
    (Operation::Flush, "flush"),
    (Operation::DurableWrite, "durable"),
    (Operation::Discard, "discard"),
];
pub const DEVICES: [&str; 2] = ["one", "two"];

impl Sequence {
    /// Returns whether each step needs only its own slice, and the slices do not share a store.
    pub fn is_separate(&self) -> bool {
        use Op::{
            Add, Checkpoint, Grow, Link, Move, Remount, RenameCross, RenameOver, Repair, SyncAll,
            Trim,
        };
        let needs_both = [
            Add,
            Checkpoint,
            Grow,
            Link,
            Move,
            Remount,
            RenameCross,
            RenameOver,
            Repair,
            SyncAll,
            Trim,
        ];
        let is_own = |step: &Step| !needs_both.contains(&step.op);
        self.base.has_stores && self.steps.iter().all(is_own)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.base.state {
            State::Clean => "clean",
            State::Crashed => "crashed",
        })?;
        f.write_str(if self.base.has_stores { STORES } else { "" })?;
        f.write_str(if self.base.has_checksums { SUMMED } else { "" })?;
        for Step { op, file } in &self.steps {
            let name = OPS.iter().find(|(other, _)| other == op);
            write!(f, ",{}:{}", name.expect("listed").1, ["a", "b"][*file])?;
        }
        Ok(())
    }
}

/// Returns a text without an end that it may have, and whether it had it.
fn without_end<'t>(text: &'t str, end: &str) -> (&'t str, bool) {
    match text.strip_suffix(end) {
        Some(text) => (text, true),
        None => (text, false),
    }
}

impl FromStr for Sequence {
    type Err = String;

    fn from_str(text: &str) -> Result<Sequence, String> {
        let mut parts = text.split(',');
        let text = parts.next().unwrap_or_default();
        let (text, has_checksums) = without_end(text, SUMMED);
        let (text, has_stores) = without_end(text, STORES);
        let state = match text {
            "clean" => State::Clean,
            "crashed" => State::Crashed,
            other => return Err(format!("a base: {other:?}")),
        };
        let base = Base {
            state,
            has_stores,
            has_checksums,
        };
        let step = |part: &str| {
            let (name, file) = part.split_once(':').ok_or("a step without a file")?;
            let known = OPS.iter().find(|(_, other)| *other == name);
            let op = known.ok_or(format!("an operation: {name}"))?.0;
            let file = ["a", "b"].iter().position(|other| *other == file);
            let file = file.ok_or(format!("a file: {part}"))?;
            Ok::<Step, String>(Step { op, file })
        };
        let steps = parts.map(step).collect::<Result<_, _>>()?;
        Ok(Sequence { base, steps })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = KINDS.iter().find(|(kind, _)| *kind == self.operation);
        write!(
            f,
            "{} {} {} {} {} {}",
            self.sequence,
            DEVICES[self.device],
            kind.expect("listed").1,
            self.nth,
            if self.is_lasting { "lasting" } else { "once" },
            self.errno
        )
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [sequence, device, kind, nth, lasting, errno] = words[..] else {
            return Err("SEQUENCE DEVICE OPERATION N once|lasting ERRNO".into());
        };
        let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
        let device = DEVICES.iter().position(|name| *name == device);
        let kind = KINDS.iter().find(|(_, name)| *name == kind);
        Ok(Case {
            sequence: sequence.parse()?,
            device: device.ok_or("a device")?,
            operation: kind.ok_or("an operation of a device")?.0,
            nth: number(nth)?,
            is_lasting: lasting == "lasting",
            errno: number(errno)? as i32,
        })
    }
}
