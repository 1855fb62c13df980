//! Finds the paths of inodes, for messages. A file does not know its names, so the search reads directories.

use std::collections::{HashSet, VecDeque};

use crate::fs::Fs;
use crate::types::{Ino, Kind, ROOT};

/// Largest number of entries that a search reads. Inodes that it did not find by then get no path.
const ENTRIES_MAX: usize = 1_000_000;

impl Fs {
    /// Returns one path from the volume's root for each inode that has a path and is found within the limit.
    pub fn paths_of(&self, mut wanted: HashSet<Ino>) -> Vec<String> {
        let mut found = vec![];
        let mut directories = VecDeque::from([(ROOT, String::new())]);
        let mut entries = 0;
        while let Some((directory, path)) = directories.pop_front() {
            let looked = self.readdir(directory, 2, &mut |entry| {
                entries += 1;
                let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
                if wanted.remove(&entry.ino) {
                    found.push(path.clone());
                }
                if entry.kind == Kind::Directory {
                    directories.push_back((entry.ino, path));
                }
                entries < ENTRIES_MAX && !wanted.is_empty()
            });
            if looked.is_err() || wanted.is_empty() || entries >= ENTRIES_MAX {
                break;
            }
        }
        found
    }
}
