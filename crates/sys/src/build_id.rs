//! The build of the running program.
//!
//! The linker writes a hash of the program into a note of its file (`ld --build-id`, which compilers of the common distributions pass). So two builds of
//! the same source are equal, and any change makes another one. No version control is needed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

/// Bytes of the header of a 64-bit ELF file, and of an entry of its table of segments: elf(5).
const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
/// Type of a segment with notes, and type of the note with the build id.
const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
/// Most bytes of a segment with notes that are read.
const NOTES_BYTES_MAX: u64 = 1 << 16;
/// Most bytes of a build id. The linker writes 20 or fewer.
const ID_BYTES_MAX: usize = 64;

/// Returns the build id of the running program in hexadecimal digits. Returns `None` if its file has none, or cannot be read.
pub fn build_id() -> Option<String> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| of_file(Path::new("/proc/self/exe")));
    found.clone()
}

fn of_file(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    of(|at, bytes| file.read_exact_at(bytes, at))
}

/// Finds the build id of a program, whose bytes `read_at` reads.
fn of(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> Option<String> {
    let mut header = [0; HEADER_BYTES];
    read_at(0, &mut header).ok()?;
    // 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table_at = u64_at(&header, 32)?;
    let (entry_bytes, count) = (u16_at(&header, 54)?, u16_at(&header, 56)?);
    if usize::from(entry_bytes) != SEGMENT_BYTES {
        return None;
    }
    (0..u64::from(count)).find_map(|index| {
        let mut entry = [0; SEGMENT_BYTES];
        let at = table_at.checked_add(index * SEGMENT_BYTES as u64)?;
        read_at(at, &mut entry).ok()?;
        if u32_at(&entry, 0)? != PT_NOTE {
            return None;
        }
        let (at, bytes) = (u64_at(&entry, 8)?, u64_at(&entry, 32)?);
        let align = u64_at(&entry, 48)?;
        let mut notes = vec![0; bytes.min(NOTES_BYTES_MAX) as usize];
        read_at(at, &mut notes).ok()?;
        in_notes(&notes, if align == 8 { 8 } else { 4 })
    })
}

/// Finds the build id among notes whose parts have this alignment.
fn in_notes(mut notes: &[u8], align: usize) -> Option<String> {
    loop {
        let (name_bytes, bytes) = (u32_at(notes, 0)? as usize, u32_at(notes, 4)? as usize);
        let kind = u32_at(notes, 8)?;
        let data_at = 12_usize.checked_add(name_bytes)?;
        let data_at = data_at.checked_next_multiple_of(align)?;
        let end = data_at.checked_add(bytes)?;
        let name = notes.get(12..12_usize.checked_add(name_bytes)?)?;
        let data = notes.get(data_at..end)?;
        if kind == NT_GNU_BUILD_ID && name == b"GNU\0" {
            let is_id = (1..=ID_BYTES_MAX).contains(&data.len());
            return is_id.then(|| data.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        notes = notes.get(end.checked_next_multiple_of(align)?..)?;
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    field.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    field.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    field.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_bytes(program: &[u8]) -> Option<String> {
        of(|at, bytes| {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let end = at.saturating_add(bytes.len());
            let found = program.get(at..end);
            bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    fn note(kind: u32, name: &[u8], data: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for field in [name.len() as u32, data.len() as u32, kind] {
            note.extend(field.to_le_bytes());
        }
        for part in [name, data] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    /// Returns a program with one segment, which has these notes.
    fn program(notes: &[u8]) -> Vec<u8> {
        let mut program = vec![0; HEADER_BYTES + SEGMENT_BYTES];
        program[..6].copy_from_slice(b"\x7fELF\x02\x01");
        program[32..40].copy_from_slice(&(HEADER_BYTES as u64).to_le_bytes());
        program[54..56].copy_from_slice(&(SEGMENT_BYTES as u16).to_le_bytes());
        program[56..58].copy_from_slice(&1_u16.to_le_bytes());
        let at = program.len() as u64;
        let segment = &mut program[HEADER_BYTES..];
        segment[..4].copy_from_slice(&PT_NOTE.to_le_bytes());
        segment[8..16].copy_from_slice(&at.to_le_bytes());
        segment[32..40].copy_from_slice(&(notes.len() as u64).to_le_bytes());
        segment[48..56].copy_from_slice(&4_u64.to_le_bytes());
        program.extend(notes);
        program
    }

    #[test]
    fn the_build_id_is_the_one_of_the_linker_among_other_notes() {
        let other = note(1, b"GNU\0", &[9; 5]);
        let id = note(NT_GNU_BUILD_ID, b"GNU\0", &[0xab, 1]);
        let found = of_bytes(&program(&[other.clone(), id.clone()].concat()));
        assert_eq!(found.as_deref(), Some("ab01"));
        assert_eq!(of_bytes(&program(&other)), None);
        assert_eq!(of_bytes(b"#!/bin/sh\n"), None);
        // A damaged file has no id, whatever its lengths say.
        let whole = program(&id);
        for end in 0..whole.len() {
            assert_eq!(of_bytes(&whole[..end]), None);
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            of_bytes(&damaged);
        }
    }

    #[test]
    fn this_program_has_one_or_none() {
        let id = build_id();
        assert!(id.is_none_or(|id| id.len() >= 2 && id.chars().all(|c| c.is_ascii_hexdigit())));
    }
}
