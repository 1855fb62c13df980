//! Counts what this process's calls did. Reports it on request (`JERICHO_REPORT`).

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use super::segments::Session;
use super::sessions;
use super::why::Why;

/// Why an fd takes the kernel path for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The file is mapped into memory.
    Mapped,
    /// A stream of libc (FILE) uses the fd and bypasses this library.
    Stream,
    /// The program used a call on it that this library does not know.
    Unknown,
    /// The fd is not a regular file.
    NotRegular,
    /// The fd was opened with O_DIRECT or O_PATH.
    Direct,
    /// The daemon refused the file: another uid, set-id bits, mapped elsewhere, too many files, or switched off.
    Refused,
    /// This process could not attach to the daemon.
    Attach,
    /// The daemon has revoked this process.
    Revoked,
    /// The table of descriptions is full.
    Table,
}

const REASONS: [(Reason, &str); 9] = [
    (Reason::Mapped, "mapped"),
    (Reason::Stream, "used through libc's streams"),
    (Reason::Unknown, "used in an unknown way"),
    (Reason::NotRegular, "not a regular file"),
    (Reason::Direct, "O_DIRECT or O_PATH"),
    (Reason::Refused, "refused by the daemon"),
    (Reason::Attach, "attaching to the daemon failed"),
    (Reason::Revoked, "revoked by the daemon"),
    (Reason::Table, "too many descriptors"),
];

const WHYS: [(Why, &str); 8] = [
    (Why::Stale, "another file's slot"),
    (Why::Withheld, "withheld by the daemon"),
    (Why::Throttled, "too many dirty pages"),
    (Why::Absent, "not in the cache"),
    (Why::Unbacked, "no space reserved"),
    (Why::Busy, "busy"),
    (Why::Changed, "size changed meanwhile"),
    (Why::Far, "leaves a hole or is too long"),
];

static KERNEL_READS: [AtomicU64; WHYS.len()] = [const { AtomicU64::new(0) }; WHYS.len()];
static KERNEL_WRITES: [AtomicU64; WHYS.len()] = [const { AtomicU64::new(0) }; WHYS.len()];
static TO_KERNEL: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
static INLINE: AtomicU64 = AtomicU64::new(0);

/// Counts a call on an inline fd that needed the kernel.
#[cold]
pub fn kernel(write: bool, why: Why) {
    let counts = if write { &KERNEL_WRITES } else { &KERNEL_READS };
    counts[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Counts an fd that goes inline from now on.
pub fn descriptor() {
    INLINE.fetch_add(1, Ordering::Relaxed);
}

/// Counts an fd that takes the kernel path from now on.
pub fn to_kernel(why: Reason) {
    TO_KERNEL[why as usize].fetch_add(1, Ordering::Relaxed);
}

/// Returns whether this process has used no file of a mount.
fn is_empty() -> bool {
    let met = |n: &AtomicU64| n.load(Ordering::Relaxed) > 0;
    !met(&INLINE) && !TO_KERNEL.iter().any(met)
}

/// Writes a report of this process's calls: some lines of text, none when it has used no file of a mount. Fails with the errors
/// of `out`.
pub fn report(out: &mut impl Write) -> std::io::Result<()> {
    if is_empty() {
        return Ok(());
    }
    write_to(out)
}

/// Sums of the counters in the areas of this process's sessions.
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
    for session in sessions::all() {
        // A read-only session shares its area with the writable one that followed it.
        let followed =
            |later: &Session| later.index > session.index && later.instance == session.instance;
        if sessions::all().any(followed) {
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

/// Writes the counts, in lines that begin with `jericho:`. Fails with the errors of `out`.
fn write_to(out: &mut impl Write) -> std::io::Result<()> {
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
    fn names_are_listed_in_the_order_of_the_reasons() {
        for (at, (why, _)) in WHYS.iter().enumerate() {
            assert_eq!(*why as usize, at);
        }
        for (at, (why, _)) in REASONS.iter().enumerate() {
            assert_eq!(*why as usize, at);
        }
    }

    #[test]
    fn the_report_lists_the_counts() {
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
