//! What a check finds, and the rows that would put it right. Both take a bounded amount of memory.

use jericho_metadata::shard::ShardId;
use jericho_metadata::store::tables::{Row, Table};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is wrong.
    Info,
    /// Space that belongs to nothing. It is lost, but does no harm.
    Leak,
    /// The volume contradicts itself.
    Damage,
}

/// A result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Severity.
    pub severity: Severity,
    /// Description, with the place.
    pub text: String,
}

/// Most findings that are kept.
pub(super) const FINDINGS_MAX: usize = 10_000;
/// Most bytes of their texts.
const TEXT_BYTES_MAX: usize = 4 << 20;
/// Most rows that one pass changes. The next pass changes the others.
pub(super) const FIXES_MAX: usize = 65_536;
/// Most bytes of these rows.
const FIX_BYTES_MAX: usize = 16 << 20;
/// Least bytes of findings, and of fixes, that each of many parts may keep. Larger than any row.
const PART_BYTES_MIN: usize = 64 << 10;
/// Bytes of a key that a text shows.
const KEY_BYTES_SHOWN: usize = 32;

/// A row to put or to remove, and its store.
pub(super) struct Fix {
    pub shard: ShardId,
    pub row: Row,
}

/// What one part of a pass has found. Parts that run at the same time have one each.
pub(super) struct Found {
    /// Number of parts that run at the same time and share the memory.
    parts: usize,
    pub findings: Vec<Finding>,
    text_bytes: usize,
    /// Number of findings that are not kept, and the worst of them.
    left_out: Option<(u64, Severity)>,
    pub fixes: Vec<Fix>,
    fix_bytes: usize,
    /// Whether not all fixes are kept, or the damage kept some rows from being compared. A further pass finds the rest.
    pub is_cut: bool,
}

impl Default for Found {
    fn default() -> Found {
        Found::part_of(1)
    }
}

impl Found {
    /// Returns empty findings for one of `parts` parts that run at the same time.
    pub fn part_of(parts: usize) -> Found {
        Found {
            parts: parts.max(1),
            findings: Vec::new(),
            text_bytes: 0,
            left_out: None,
            fixes: Vec::new(),
            fix_bytes: 0,
            is_cut: false,
        }
    }

    pub fn find(&mut self, severity: Severity, text: String) {
        let text_bytes_max = (TEXT_BYTES_MAX / self.parts).max(PART_BYTES_MIN);
        if self.findings.len() < FINDINGS_MAX && self.text_bytes < text_bytes_max {
            self.text_bytes += text.len();
            self.findings.push(Finding { severity, text });
        } else {
            self.leave_out(1, severity);
        }
    }

    pub fn damage(&mut self, text: String) {
        self.find(Severity::Damage, text);
    }

    fn leave_out(&mut self, count: u64, severity: Severity) {
        let (before, worst) = self.left_out.unwrap_or((0, severity));
        self.left_out = Some((before + count, worst.max(severity)));
    }

    /// Has the repair put or remove a row.
    pub fn fix(&mut self, shard: ShardId, row: Row) {
        let bytes = row.key.len() + row.value.as_ref().map_or(0, Vec::len);
        let bytes_max = (FIX_BYTES_MAX / self.parts).max(PART_BYTES_MIN);
        if self.fixes.len() >= FIXES_MAX || self.fix_bytes + bytes > bytes_max {
            self.is_cut = true;
            return;
        }
        self.fix_bytes += bytes;
        self.fixes.push(Fix { shard, row });
    }

    /// Has the repair remove a row from the store that has it.
    pub fn remove_from(&mut self, shard: ShardId, table: Table, key: &[u8]) {
        let row = Row {
            table,
            key: key.to_vec(),
            value: None,
        };
        self.fix(shard, row);
    }

    /// Adds what another part has found.
    pub fn extend(&mut self, other: Found) {
        for finding in other.findings {
            self.find(finding.severity, finding.text);
        }
        if let Some((count, severity)) = other.left_out {
            self.leave_out(count, severity);
        }
        for fix in other.fixes {
            self.fix(fix.shard, fix.row);
        }
        self.is_cut |= other.is_cut;
    }

    /// Adds a finding with the number of findings that are not kept.
    pub fn summarise(&mut self) {
        if let Some((count, severity)) = self.left_out.take() {
            let text = format!("and {count} more findings");
            self.findings.push(Finding { severity, text });
        }
    }
}

/// Returns a key as text.
pub(super) fn show_key(key: &[u8]) -> String {
    match key.get(..KEY_BYTES_SHOWN) {
        Some(begin) if key.len() > KEY_BYTES_SHOWN => {
            format!("{begin:02x?} and {} more bytes", key.len() - begin.len())
        }
        _ => format!("{key:02x?}"),
    }
}

/// Returns a name as text.
pub(super) fn show(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().collect()
}
