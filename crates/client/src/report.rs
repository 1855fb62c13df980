//! What this process's calls did: counted all the time, told when asked (`JERICHO_REPORT`).

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fast::Why;
use crate::session;

/// Why a descriptor takes the kernel path for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// It is mapped into memory.
    Mapped,
    /// libc's streams (FILE) use it, which go past this library.
    Stream,
    /// Something was done to it that this library does not know.
    Unknown,
    /// Not a regular file.
    NotRegular,
    /// O_DIRECT or O_PATH.
    Direct,
    /// The daemon refused it: another uid, set-id bits, mapped elsewhere, too many files, switched off.
    Refused,
    /// The daemon's segments were not to be had.
    Attach,
    /// The daemon cut this process off.
    CutOff,
    /// Too many descriptors.
    Table,
}

const REASONS: [(Reason, &str); 9] = [
    (Reason::Mapped, "mapped"),
    (Reason::Stream, "used through libc's streams"),
    (Reason::Unknown, "used in an unknown way"),
    (Reason::NotRegular, "not a regular file"),
    (Reason::Direct, "O_DIRECT or O_PATH"),
    (Reason::Refused, "refused by the daemon"),
    (Reason::Attach, "the daemon's memory was not to be had"),
    (Reason::CutOff, "cut off by the daemon"),
    (Reason::Table, "too many descriptors"),
];

const WHYS: [(Why, &str); 8] = [
    (Why::Stale, "another file's slot"),
    (Why::Withheld, "withheld by the daemon"),
    (Why::Throttled, "too much is dirty"),
    (Why::Absent, "not in the cache"),
    (Why::Unbacked, "no space promised"),
    (Why::Busy, "busy"),
    (Why::Changed, "size changed meanwhile"),
    (Why::Far, "would leave a hole"),
];

static KERNEL_READS: [AtomicU64; WHYS.len()] = [const { AtomicU64::new(0) }; WHYS.len()];
static KERNEL_WRITES: [AtomicU64; WHYS.len()] = [const { AtomicU64::new(0) }; WHYS.len()];
static TO_KERNEL: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
static INLINE: AtomicU64 = AtomicU64::new(0);

/// A call of a descriptor that goes inline needed the kernel.
#[cold]
pub fn kernel(write: bool, why: Why) {
    let counts = if write { &KERNEL_WRITES } else { &KERNEL_READS };
    counts[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// A descriptor goes inline from now on.
pub fn descriptor() {
    INLINE.fetch_add(1, Ordering::Relaxed);
}

/// A descriptor takes the kernel path from now on.
pub fn to_kernel(why: Reason) {
    TO_KERNEL[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Whether this process has met a file of a mount at all.
pub fn is_empty() -> bool {
    let met = |n: &AtomicU64| n.load(Ordering::Relaxed) > 0;
    !met(&INLINE) && !TO_KERNEL.iter().any(met)
}

/// What was counted in the areas of this process's sessions.
#[derive(Default)]
struct Sums {
    reads: u64,
    writes: u64,
    written: u64,
    local: u64,
    remote: u64,
}

fn sums() -> Sums {
    let mut sums = Sums::default();
    for session in session::all() {
        // One that was followed by a writable one has its area in common with that.
        let followed = |later: &session::Session| {
            later.index > session.index && later.instance == session.instance
        };
        if session::all().any(followed) {
            continue;
        }
        for slice in 0..session.control.slice_count().min(64) {
            for counter in session.area.counters_of(slice) {
                for (sum, word) in [
                    (&mut sums.reads, &counter.read_calls),
                    (&mut sums.writes, &counter.write_calls),
                    (&mut sums.written, &counter.written_bytes),
                    (&mut sums.local, &counter.local_bytes),
                    (&mut sums.remote, &counter.remote_bytes),
                ] {
                    *sum = sum.wrapping_add(word.load(Ordering::Relaxed));
                }
            }
        }
    }
    sums
}

/// Writes what was counted, in lines that begin with `jericho:`. Errors: those of `out`.
pub fn write_to(out: &mut impl Write) -> std::io::Result<()> {
    let sums = sums();
    let (local, remote) = (sums.local, sums.remote);
    let read = local.wrapping_add(remote).wrapping_sub(sums.written);
    for (what, calls, bytes, kernel) in [
        ("reads", sums.reads, read, &KERNEL_READS),
        ("writes", sums.writes, sums.written, &KERNEL_WRITES),
    ] {
        let others: u64 = kernel.iter().map(|n| n.load(Ordering::Relaxed)).sum();
        write!(
            out,
            "jericho: {what}: {calls} inline with {bytes} bytes, {others} through the kernel"
        )?;
        list(
            out,
            WHYS.iter()
                .map(|(why, name)| (&kernel[*why as usize], *name)),
        )?;
    }
    write!(
        out,
        "jericho: descriptors: {} inline, {} through the kernel",
        INLINE.load(Ordering::Relaxed),
        TO_KERNEL
            .iter()
            .map(|n| n.load(Ordering::Relaxed))
            .sum::<u64>()
    )?;
    list(
        out,
        REASONS
            .iter()
            .map(|(why, name)| (&TO_KERNEL[*why as usize], *name)),
    )?;
    let share = match local.wrapping_add(remote) {
        0 => 100.0,
        all => local as f64 * 100.0 / all as f64,
    };
    writeln!(
        out,
        "jericho: local: {share:.1} % ({local} bytes on the data's node, {remote} from another)"
    )
}

fn list<'a>(
    out: &mut impl Write,
    counts: impl Iterator<Item = (&'a AtomicU64, &'a str)>,
) -> std::io::Result<()> {
    let mut before = " (";
    for (count, name) in counts {
        let count = count.load(Ordering::Relaxed);
        if count > 0 {
            write!(out, "{before}{name}: {count}")?;
            before = ", ";
        }
    }
    writeln!(out, "{}", if before == ", " { ")" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_in_the_order_of_the_numbers() {
        for (at, (why, _)) in WHYS.iter().enumerate() {
            assert_eq!(*why as usize, at);
        }
        for (at, (why, _)) in REASONS.iter().enumerate() {
            assert_eq!(*why as usize, at);
        }
    }

    #[test]
    fn what_was_counted_is_told() {
        kernel(false, Why::Busy);
        to_kernel(Reason::Stream);
        let mut out = vec![];
        write_to(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.lines().all(|line| line.starts_with("jericho: ")));
        assert!(text.contains("busy: "), "{text}");
        assert!(text.contains("used through libc's streams: "), "{text}");
    }
}
