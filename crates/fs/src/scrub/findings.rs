//! What the background check has found: joins neighbouring pages to one line of the log, and repeats no line that the last pass has logged.

use std::collections::HashSet;

use jericho_format::PAGE_BYTES;

use crate::types::Ino;

/// The most findings of a pass that the next pass remembers. It logs further ones again.
const KNOWN_MAX: usize = 4096;

/// What is wrong with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fault {
    /// Its block has another checksum.
    Damaged,
    /// Its block cannot be read.
    Unreadable,
}

/// Pages of a file in a row with the same fault.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Run {
    ino: Ino,
    fault: Fault,
    first: u64,
    end: u64,
    /// What is wrong with the first of them.
    what: String,
}

impl Run {
    fn line(&self) -> String {
        let (ino, offset, what) = (self.ino, self.first * PAGE_BYTES, &self.what);
        match self.end - self.first {
            1 => format!("inode {ino}, offset {offset}: {what}"),
            count => {
                let end = self.end * PAGE_BYTES;
                format!(
                    "inode {ino}, offset {offset} to {end} ({count} pages), at the first of them: {what}"
                )
            }
        }
    }
}

/// The findings of a pass, and those of the pass before it.
#[derive(Default)]
pub(super) struct Findings {
    /// The run that the next page may extend.
    last: Option<Run>,
    /// The lines of this pass, and of the pass before it.
    lines: HashSet<String>,
    known: HashSet<String>,
}

impl Findings {
    /// Notes a page. Returns a line to log, if the page begins another run.
    pub(super) fn note(
        &mut self,
        ino: Ino,
        page: u64,
        (fault, what): (Fault, String),
    ) -> Option<String> {
        if let Some(last) = &mut self.last
            && (last.ino, last.fault, last.end) == (ino, fault, page)
        {
            last.end += 1;
            return None;
        }
        let line = self.end_run();
        let (first, end) = (page, page + 1);
        self.last = Some(Run {
            ino,
            fault,
            first,
            end,
            what,
        });
        line
    }

    /// Ends a run, unless `page` of the inode may extend it. Returns the line to log.
    pub(super) fn end_run_before(&mut self, ino: Ino, page: u64) -> Option<String> {
        let may_go_on = |last: &Run| (last.ino, last.end) == (ino, page);
        match self.last.as_ref().is_some_and(may_go_on) {
            true => None,
            false => self.end_run(),
        }
    }

    /// Ends a run. Returns the line to log.
    pub(super) fn end_run(&mut self) -> Option<String> {
        let line = self.last.take()?.line();
        self.is_new(&line).then_some(line)
    }

    /// Returns whether neither this pass nor the last one had this line. Remembers it for the next pass.
    pub(super) fn is_new(&mut self, line: &str) -> bool {
        let is_new = !self.lines.contains(line) && !self.known.contains(line);
        if self.lines.len() < KNOWN_MAX {
            self.lines.insert(line.to_owned());
        }
        is_new
    }

    /// Ends a pass. Returns the line of the last run.
    pub(super) fn end_pass(&mut self) -> Option<String> {
        let line = self.end_run();
        self.known = std::mem::take(&mut self.lines);
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes unreadable pages, and returns the lines of a pass over them.
    fn pass(findings: &mut Findings, pages: impl IntoIterator<Item = (Ino, u64)>) -> Vec<String> {
        let mut lines = Vec::new();
        for (ino, page) in pages {
            let what = (Fault::Unreadable, format!("page {page}"));
            lines.extend(findings.note(ino, page, what));
        }
        lines.extend(findings.end_pass());
        lines
    }

    #[test]
    fn neighbouring_pages_with_one_fault_are_one_line() {
        let mut findings = Findings::default();
        let pages = (3..6).map(|page| (7, page));
        let lines = pass(&mut findings, pages.chain([(7, 9), (8, 10)]));
        assert_eq!(
            lines,
            [
                "inode 7, offset 12288 to 24576 (3 pages), at the first of them: page 3",
                "inode 7, offset 36864: page 9",
                "inode 8, offset 40960: page 10",
            ]
        );
        let damaged = (Fault::Damaged, "damaged".to_owned());
        let unreadable = (Fault::Unreadable, "unreadable".to_owned());
        assert_eq!(findings.note(7, 1, damaged), None);
        let line = findings.note(7, 2, unreadable);
        assert_eq!(line.as_deref(), Some("inode 7, offset 4096: damaged"));
    }

    #[test]
    fn a_run_ends_with_the_first_page_that_is_in_order() {
        let mut findings = Findings::default();
        findings.note(7, 3, (Fault::Damaged, String::new()));
        assert_eq!(findings.end_run_before(7, 4), None);
        assert!(findings.end_run_before(7, 5).is_some());
        assert_eq!(findings.end_run_before(7, 9), None);
    }

    #[test]
    fn a_pass_repeats_no_line_of_the_last_one() {
        let mut findings = Findings::default();
        let pages = |end| (3..end).map(|page| (7, page));
        assert_eq!(pass(&mut findings, pages(6)).len(), 1);
        for _ in 0..3 {
            assert_eq!(pass(&mut findings, pages(6)), [""; 0]);
        }
        assert_eq!(pass(&mut findings, pages(7)).len(), 1, "it grew");
        assert_eq!(pass(&mut findings, pages(3)), [""; 0]);
        assert_eq!(pass(&mut findings, pages(7)).len(), 1, "it came back");
    }
}
