//! Traces of page accesses: the file format, and the conversion from the kernel's trace events.
//!
//! A trace is a sequence of little-endian words of eight bytes, one for each accessed page: the kind of access in 2 bits, a number
//! of the file in 22, the page in 40.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// The page is read.
    Read,
    /// A part of the page is written.
    Modify,
    /// The whole page is written.
    Overwrite,
    /// The page ceases to exist: the file was removed or truncated.
    Drop,
}

/// An access to a page. Pages of all files are numbered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// What is done.
    pub kind: AccessKind,
    /// File and page number.
    pub page: u64,
}

const PAGE_BITS: u32 = 40;
const KIND_AT: u32 = 62;

impl Access {
    /// Returns an access to a page of a file.
    pub fn new(kind: AccessKind, file: u64, page: u64) -> Access {
        assert!(
            file < 1 << (KIND_AT - PAGE_BITS) && page < 1 << PAGE_BITS,
            "page out of range"
        );
        let page = file << PAGE_BITS | page;
        Access { kind, page }
    }

    /// Returns the file's number.
    pub fn file(self) -> u64 {
        self.page >> PAGE_BITS
    }

    /// Returns the page's number in its file.
    pub fn page_in_file(self) -> u64 {
        self.page & ((1 << PAGE_BITS) - 1)
    }

    fn word(self) -> u64 {
        (self.kind as u64) << KIND_AT | self.page
    }

    fn of(word: u64) -> Access {
        let kinds = [
            AccessKind::Read,
            AccessKind::Modify,
            AccessKind::Overwrite,
            AccessKind::Drop,
        ];
        Access {
            kind: kinds[(word >> KIND_AT) as usize],
            page: word & ((1 << KIND_AT) - 1),
        }
    }
}

/// Writes a trace.
pub fn write(accesses: &[Access], mut out: impl Write) -> io::Result<()> {
    for access in accesses {
        out.write_all(&access.word().to_le_bytes())?;
    }
    out.flush()
}

/// Returns the accesses of a trace.
pub fn parse(bytes: &[u8]) -> Vec<Access> {
    let words = bytes.chunks_exact(8);
    words
        .map(|word| Access::of(u64::from_le_bytes(word.try_into().expect("eight bytes"))))
        .collect()
}

/// Accesses to neighbouring pages, before it is known which of them exist.
struct PageRange {
    kind: AccessKind,
    file: u64,
    first: u64,
    last: u64,
}

/// Converts the text of the kernel's trace events.
#[derive(Default)]
pub struct Importer {
    ranges: Vec<PageRange>,
    /// Number of each file, by inode number; a new one after the inode was freed.
    files: HashMap<u64, u64>,
    /// The last page that the kernel ever cached of each file. Programs ask for more than a file has.
    last_page: Vec<u64>,
    /// File, first and last page of the last read of each thread.
    reads: HashMap<u64, (u64, u64, u64)>,
}

impl Importer {
    /// Converts all of a text.
    pub fn import(text: impl BufRead) -> io::Result<Vec<Access>> {
        let mut importer = Importer::default();
        for line in text.lines() {
            importer.line(&line?);
        }
        Ok(importer.accesses())
    }

    /// Adds the event of a line to the trace. Ignores other lines.
    fn line(&mut self, line: &str) {
        // thread-id [cpu] flags time: event: field=value field value ...
        let Some((event, thread)) = event_of(line) else {
            return;
        };
        let (name, fields) = event;
        let field = |name: &str| {
            let (_, rest) = fields.split_once(name)?;
            rest[1..].split(' ').next()
        };
        let decimal = |text: &str| text.parse::<u64>().ok();
        let pages = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Some((decimal(first)? >> 12, decimal(last)? >> 12))
        };
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let is_ext4 = name.starts_with("ext4");
        let Some(ino) = field("ino").and_then(|ino| if is_ext4 { decimal(ino) } else { hex(ino) })
        else {
            return;
        };
        let file = *self.files.entry(ino).or_insert_with(|| {
            self.last_page.push(0);
            self.last_page.len() as u64 - 1
        });
        match name {
            "mm_filemap_get_pages" => {
                let Some((first, last)) = field("ofs").and_then(pages) else {
                    return;
                };
                // A long read asks for the rest of its range again and again.
                let seen = self.reads.insert(thread, (file, first, last));
                if seen.is_some_and(|(f, a, z)| f == file && a < first && z == last) {
                    return;
                }
                self.add(AccessKind::Read, file, first, last);
            }
            "mm_filemap_fault" | "mm_filemap_map_pages" => {
                if let Some((first, last)) = field("ofs").and_then(pages) {
                    self.add(AccessKind::Read, file, first, last);
                }
            }
            "ext4_da_write_end" | "ext4_write_end" => {
                let at = field("pos").and_then(decimal);
                let len = field("copied").and_then(decimal);
                if let (Some(at), Some(len @ 1..)) = (at, len) {
                    self.write(file, at, at + len);
                }
                self.reads.remove(&thread);
            }
            "mm_filemap_add_to_page_cache" | "mm_filemap_delete_from_page_cache" => {
                let first = field("ofs").and_then(decimal).map(|bytes| bytes >> 12);
                let order = field("order").and_then(decimal);
                let (Some(first), Some(order)) = (first, order) else {
                    return;
                };
                let last = first + (1 << order) - 1;
                if name.contains("delete") {
                    self.add(AccessKind::Drop, file, first, last);
                } else {
                    let known = &mut self.last_page[file as usize];
                    *known = last.max(*known);
                }
            }
            "ext4_evict_inode" if field("nlink") == Some("0") => {
                self.files.remove(&ino);
            }
            _ => {}
        }
    }

    fn write(&mut self, file: u64, start: u64, end: u64) {
        let (whole_from, whole_to) = (start.div_ceil(4096), end / 4096);
        let (first, last) = (start / 4096, (end - 1) / 4096);
        if first < whole_from {
            self.add(AccessKind::Modify, file, first, first);
        }
        if whole_from < whole_to {
            self.add(AccessKind::Overwrite, file, whole_from, whole_to - 1);
        }
        if last >= whole_to && last >= whole_from {
            self.add(AccessKind::Modify, file, last, last);
        }
    }

    fn add(&mut self, kind: AccessKind, file: u64, first: u64, last: u64) {
        self.ranges.push(PageRange {
            kind,
            file,
            first,
            last,
        });
    }

    fn accesses(&self) -> Vec<Access> {
        let mut accesses = vec![];
        for range in &self.ranges {
            let last = range.last.min(self.last_page[range.file as usize]);
            accesses
                .extend((range.first..=last).map(|page| Access::new(range.kind, range.file, page)));
        }
        accesses
    }
}

/// Returns name and fields of the event in a line, and the thread's id.
fn event_of(line: &str) -> Option<((&str, &str), u64)> {
    let (head, rest) = line.split_once(" [")?;
    // A page that the kernel reclaims still exists.
    if ["kswapd", "kdamond"]
        .iter()
        .any(|name| head.trim_start().starts_with(name))
    {
        return None;
    }
    let thread = head.rsplit('-').next()?.trim().parse().ok()?;
    let mut parts = rest.splitn(3, ": ");
    let (_, name, fields) = (parts.next()?, parts.next()?, parts.next()?);
    Some(((name, fields), thread))
}
