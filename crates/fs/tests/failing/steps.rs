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
    Fsync,
    Fdatasync,
    /// A write and a sync of its range, as with O_DSYNC.
    SyncWrite,
    RenameOver,
    RenameCross,
    Unlink,
    Truncate,
    Punch,
    /// To the other slice.
    Move,
    /// Of all metadata, as fsync of a directory. The file does not matter.
    Commit,
    /// A checkpoint of the metadata store. The file does not matter.
    Checkpoint,
    /// Discards free space. The file does not matter.
    Trim,
    /// Unmounts and mounts again. The file does not matter.
    Remount,
}

const OPS: [(Op, &str); 18] = [
    (Op::Create, "create"),
    (Op::Read, "read"),
    (Op::Overwrite, "overwrite"),
    (Op::Append, "append"),
    (Op::WriteBig, "write-big"),
    (Op::Fsync, "fsync"),
    (Op::Fdatasync, "fdatasync"),
    (Op::SyncWrite, "sync-write"),
    (Op::RenameOver, "rename-over"),
    (Op::RenameCross, "rename-cross"),
    (Op::Unlink, "unlink"),
    (Op::Truncate, "truncate"),
    (Op::Punch, "punch"),
    (Op::Move, "move"),
    (Op::Commit, "commit"),
    (Op::Checkpoint, "checkpoint"),
    (Op::Trim, "trim"),
    (Op::Remount, "remount"),
];

/// The sequences whose operations all fail in turn.
pub const SEQUENCES: [&str; 16] = [
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
];

/// An operation on a file: 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub op: Op,
    pub file: usize,
}

/// What happened before a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// An unmount.
    Clean,
    /// A crash: the journal has batches that the store does not have.
    Crashed,
}

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
    /// All later operations of that kind fail, too.
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

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.base {
            Base::Clean => "clean",
            Base::Crashed => "crashed",
        })?;
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
        let base = match parts.next() {
            Some("clean") => Base::Clean,
            Some("crashed") => Base::Crashed,
            other => return Err(format!("a base: {other:?}")),
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
