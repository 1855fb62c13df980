//! One pass over all rows: windows of inodes with their names, extents and attributes, then directories, then the space.
//!
//! A pass reads each table in the order of its keys and does not keep it. `index` has the inodes of a window and their counts. A volume with
//! few inodes has one window. `limits` says how much memory a pass takes.

use std::collections::{BTreeMap, HashSet};

use super::counts::Counts;
use super::extents::{Refused, extents};
use super::findings::{FIXES_MAX, Found, Severity};
use super::inodes::{Compared, Numbers, compare, load};
use super::lost::{Lost, adopt};
use super::names::{entries, orphans_and_xattrs};
use super::progress::Stage;
use super::space::{images, space};
use super::stores::Subject;
use super::sums::sums;
use super::tree::{ManyDirectories, cycles};
use crate::error::Result;
use crate::types::Ino;

/// What a pass has found.
#[derive(Default)]
pub(super) struct Pass {
    pub found: Found,
    pub directories: u64,
    pub files: u64,
    /// Blocks that files have.
    pub used_blocks: u64,
    /// Windows of inodes.
    pub windows: u64,
}

/// What the windows of inodes return besides findings.
#[derive(Default)]
struct Files {
    numbers: Numbers,
    refused: Refused,
    moved: BTreeMap<Ino, Ino>,
    lost: Vec<Ino>,
    tree: Vec<(Ino, Ino)>,
    is_tree_cut: bool,
}

/// Finds everything that is wrong in the stores, and the rows that would put it right.
pub(super) fn pass(subject: Subject) -> Result<Pass> {
    let mut pass = Pass::default();
    let progress = subject.stores.progress();
    progress.begin(Stage::Names, 0);
    let counts = Counts::read(subject, &mut pass.found)?;
    let files = windows(subject, &mut pass)?;
    let lost = without_path(subject, &files, &mut pass)?;
    let unused = counts.unused(&files.numbers);
    let is_made = adopt(subject, &lost, Counts::ino(unused), &mut pass.found)?;
    progress.begin(Stage::Space, 0);
    if files.refused.is_cut {
        // The next pass compares the space, after the repair has removed the refused extents.
        pass.found.is_cut = true;
    } else {
        sums(subject, &files.refused.all, &mut pass.found)?;
        pass.used_blocks = space(subject, files.refused.all, &mut pass.found)?;
    }
    images(subject, &mut pass.found)?;
    let made = is_made.then_some(unused);
    counts.compare(subject, &files.numbers, made, &mut pass.found);
    pass.found.summarise();
    Ok(pass)
}

/// Compares all inodes, window by window.
fn windows(subject: Subject, pass: &mut Pass) -> Result<Files> {
    let shards = subject.stores.all.len();
    let mut files = Files {
        numbers: Numbers {
            rows: vec![0; shards],
            highest: vec![0; subject.volume.slices().len()],
            is_root_made: false,
        },
        ..Files::default()
    };
    let mut starts = vec![Some(0); shards];
    while starts.iter().any(Option::is_some) {
        pass.windows += 1;
        let found = &mut pass.found;
        let index = load(subject, &starts, &mut files.numbers, found)?;
        orphans_and_xattrs(subject, &index, found)?;
        let moved = entries(subject, &index, found)?;
        files.refused.extend(extents(subject, &index, found)?);
        let lost_max = FIXES_MAX - files.lost.len();
        let directories_max = subject.limits.directories_max();
        let tree_max = directories_max.saturating_sub(files.tree.len());
        let room = (lost_max, tree_max);
        for one in compare(subject, &index, &files.numbers, &moved, room)? {
            add(&mut files, pass, one);
        }
        files.moved.extend(moved);
        starts = index.parts.iter().map(|part| part.next()).collect();
    }
    files.tree.sort_unstable();
    Ok(files)
}

/// Adds the results for one shard's inodes of a window.
fn add(files: &mut Files, pass: &mut Pass, one: Compared) {
    pass.found.extend(one.found);
    pass.directories += one.directories;
    pass.files += one.files;
    let room = FIXES_MAX - files.lost.len();
    pass.found.is_cut |= one.lost.len() > room;
    files.lost.extend(one.lost.into_iter().take(room));
    files.tree.extend(one.tree);
    files.is_tree_cut |= one.is_tree_cut;
}

/// Returns the inodes to which no path leads: those without a name, and one directory of each cycle.
fn without_path(subject: Subject, files: &Files, pass: &mut Pass) -> Result<Vec<Lost>> {
    let mut lost: Vec<Lost> = files
        .lost
        .iter()
        .map(|ino| Lost {
            ino: *ino,
            named_in: None,
        })
        .collect();
    let in_cycles = if files.is_tree_cut {
        let nameless: HashSet<Ino> = files.lost.iter().copied().collect();
        let many = ManyDirectories {
            subject,
            count: pass.directories,
            moved: &files.moved,
            lost: &nameless,
        };
        let unreachable = many.unreachable()?;
        let in_cycles = cycles(&unreachable);
        if in_cycles.is_empty() && files.lost.is_empty() && !unreachable.is_empty() {
            // The cycle is among directories for which there was no memory.
            let text = format!("at least {} directories have no path", unreachable.len());
            pass.found.find(Severity::Damage, text);
        }
        in_cycles
    } else {
        cycles(&files.tree)
    };
    let room = FIXES_MAX - lost.len();
    pass.found.is_cut |= in_cycles.len() > room;
    lost.extend(in_cycles.into_iter().take(room).map(|(ino, parent)| Lost {
        ino,
        named_in: Some(parent),
    }));
    Ok(lost)
}
