//! What a volume may show after the end of a sequence: for each shard the states since the last acknowledged one.
//!
//! The operations on names are numbered. State `n` of a shard is the result of the first `n` of them in its directories. An operation
//! that changes several shards is in the states of all of them, or of none.

use std::collections::BTreeMap;
use std::ops::Range;

/// Largest number of shards of a volume. In a volume with one shard, the other one never changes.
const SHARDS: usize = 2;

/// File by path. A file is an index in `Model::files`.
pub type Names = BTreeMap<String, usize>;

/// The contents that a file may have after a power cut, and what memory has.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The slice of the inode.
    slice: usize,
    /// Oldest first. The last one is what memory has, except for the unsure bytes. A byte beyond the end of a version is 0.
    versions: Vec<Vec<u8>>,
    /// The sizes that the file may have. The last one is that in memory, unless that is unsure.
    sizes: Vec<usize>,
    /// For each byte: an operation on it has failed, so memory may have it as in any version.
    unsure: Vec<bool>,
    /// An operation that changes the size has failed.
    is_size_unsure: bool,
    /// The state of names in which the file was last created, renamed or removed.
    pub touched: usize,
}

fn byte(version: &[u8], at: usize) -> u8 {
    version.get(at).copied().unwrap_or(0)
}

impl Contents {
    pub fn new(slice: usize, bytes: Vec<u8>, touched: usize) -> Contents {
        Contents {
            slice,
            sizes: vec![bytes.len()],
            versions: vec![bytes],
            unsure: Vec::new(),
            is_size_unsure: false,
            touched,
        }
    }

    /// Returns what memory has, except for the unsure bytes.
    pub fn bytes(&self) -> &[u8] {
        self.versions.last().expect("at least one version")
    }

    fn is_unsure(&self, at: usize) -> bool {
        self.unsure.get(at).copied().unwrap_or(false)
    }

    fn set_unsure(&mut self, range: Range<usize>, is_unsure: bool) {
        if is_unsure && self.unsure.len() < range.end {
            self.unsure.resize(range.end, false);
        }
        let end = range.end.min(self.unsure.len());
        if let Some(flags) = self.unsure.get_mut(range.start..end) {
            flags.fill(is_unsure);
        }
    }

    /// Records that a write has ended, which leads to `bytes`.
    pub fn write(&mut self, bytes: Vec<u8>, range: Range<usize>) {
        self.is_size_unsure &= self.sizes.iter().any(|size| *size > range.end);
        self.zero(bytes, range);
    }

    /// Records that a range was punched, which leads to `bytes`.
    pub fn zero(&mut self, bytes: Vec<u8>, range: Range<usize>) {
        self.set_unsure(range, false);
        self.push(bytes);
    }

    /// Records that a truncation has ended, which leads to `bytes`.
    pub fn truncate(&mut self, bytes: Vec<u8>) {
        self.unsure.truncate(bytes.len());
        self.is_size_unsure = false;
        self.push(bytes);
    }

    fn push(&mut self, bytes: Vec<u8>) {
        self.sizes.push(bytes.len());
        self.versions.push(bytes);
    }

    /// Records that an operation on a range failed that would have led to `bytes`. Each byte of the range may be old or new.
    pub fn may_change(&mut self, bytes: Vec<u8>, range: Range<usize>) {
        let old = self.bytes().to_vec();
        self.is_size_unsure |= bytes.len() != old.len();
        self.set_unsure(range, true);
        self.push(bytes);
        self.push(old);
    }

    /// Records that everything in memory is durable.
    pub fn synced(&mut self) {
        let size = self.sizes.iter().copied().max().unwrap_or(0);
        self.keep(0..size);
        if !self.is_size_unsure {
            self.sizes.drain(..self.sizes.len() - 1);
        }
        self.versions.reverse();
        if !self.unsure.contains(&true) {
            self.versions.truncate(1);
        }
        self.versions.reverse();
    }

    /// Records that the bytes of a range that memory has are durable.
    pub fn synced_range(&mut self, range: Range<usize>) {
        self.keep(range.clone());
        if !self.is_size_unsure {
            self.sizes.iter_mut().for_each(|s| *s = range.end.max(*s));
        }
    }

    /// Gives all versions the bytes of a range that memory has.
    fn keep(&mut self, range: Range<usize>) {
        let latest = self.bytes().to_vec();
        let unsure = std::mem::take(&mut self.unsure);
        for version in &mut self.versions {
            version.resize(version.len().max(range.end), 0);
            for at in range.clone() {
                if !unsure.get(at).copied().unwrap_or(false) {
                    version[at] = byte(&latest, at);
                }
            }
        }
        // The last version says how long the file is in memory.
        if let Some(last) = self.versions.last_mut() {
            last.truncate(latest.len());
        }
        self.unsure = unsure;
    }

    /// Fails if the file may not have these bytes after a power cut.
    pub fn judge(&self, found: &[u8]) -> Result<(), String> {
        let sizes = || self.sizes.iter().copied();
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        if !(least..=most).contains(&found.len()) {
            let size = found.len();
            return Err(format!("{size} bytes instead of {least} to {most}"));
        }
        let may_be = |at, found| self.versions.iter().any(|v| byte(v, at) == found);
        match found.iter().enumerate().find(|(at, b)| !may_be(*at, **b)) {
            Some((at, byte)) => Err(format!("byte {at} is {byte}, which it may not be")),
            None => Ok(()),
        }
    }

    /// Fails if memory may not have these bytes. From then on it is known what memory has.
    pub fn read(&mut self, found: Vec<u8>) -> Result<(), String> {
        self.judge(&found)?;
        if !self.is_size_unsure && found.len() != self.bytes().len() {
            let (size, right) = (found.len(), self.bytes().len());
            return Err(format!("{size} bytes instead of {right}"));
        }
        let latest = self.bytes();
        let is_wrong = |at: &usize| !self.is_unsure(*at) && found[*at] != byte(latest, *at);
        if let Some(at) = (0..found.len()).find(is_wrong) {
            let (byte, right) = (found[at], byte(latest, at));
            return Err(format!("byte {at} is {byte} instead of {right}"));
        }
        self.truncate(found);
        self.unsure.clear();
        Ok(())
    }
}

/// The names after an operation.
#[derive(Clone, Debug)]
struct State {
    names: Names,
    /// The shards that the operation changed.
    changed: [bool; SHARDS],
}

/// The names and contents that a volume may show.
#[derive(Clone, Debug)]
pub struct Model {
    /// Oldest first.
    states: Vec<State>,
    /// The oldest state of each shard that may be found.
    synced: [usize; SHARDS],
    /// Number of the volume's shards: 1, or one for each slice.
    shards: usize,
    /// Returns the slice of a path's directory.
    slice_of_path: fn(&str) -> usize,
    pub files: Vec<Contents>,
}

impl Model {
    /// Begins with files that are durable, each in the slice of its path.
    pub fn new(
        files: Vec<(String, Vec<u8>)>,
        shards: usize,
        slice_of_path: fn(&str) -> usize,
    ) -> Model {
        let names = (0..)
            .zip(&files)
            .map(|(file, (path, _))| (path.clone(), file));
        let first = State {
            names: names.collect(),
            changed: [false; SHARDS],
        };
        let file = |(path, bytes): (String, _)| Contents::new(slice_of_path(&path), bytes, 0);
        Model {
            states: vec![first],
            synced: [0; SHARDS],
            shards,
            slice_of_path,
            files: files.into_iter().map(file).collect(),
        }
    }

    pub fn names(&self) -> &Names {
        &self.states.last().expect("at least one state").names
    }

    fn shard(&self, slice: usize) -> usize {
        slice.min(self.shards - 1)
    }

    fn shard_of_path(&self, path: &str) -> usize {
        self.shard((self.slice_of_path)(path))
    }

    /// Records a change of the names of a file.
    pub fn rename(&mut self, file: usize, change: impl FnOnce(&mut Names)) {
        let old = self.names();
        let mut names = old.clone();
        change(&mut names);
        let mut changed = [false; SHARDS];
        changed[self.shard(self.files[file].slice)] = true;
        let paths = old.keys().chain(names.keys());
        for path in paths.filter(|path| old.get(*path) != names.get(*path)) {
            changed[self.shard_of_path(path)] = true;
            // The inode that had the name loses a link.
            if let Some(replaced) = old.get(path) {
                changed[self.shard(self.files[*replaced].slice)] = true;
            }
        }
        self.states.push(State { names, changed });
        self.files[file].touched = self.states.len() - 1;
    }

    /// Records a new, empty file.
    pub fn create(&mut self, path: String) -> usize {
        let file = self.files.len();
        let slice = (self.slice_of_path)(&path);
        self.files.push(Contents::new(slice, Vec::new(), 0));
        self.rename(file, |names| {
            names.insert(path, file);
        });
        file
    }

    /// Records that a file is durable, with its names.
    pub fn synced(&mut self, file: usize) {
        let contents = &mut self.files[file];
        contents.synced();
        let (slice, touched) = (contents.slice, contents.touched);
        let synced = &mut self.synced[slice.min(self.shards - 1)];
        *synced = touched.max(*synced);
    }

    /// Records that all names of a slice are durable.
    pub fn synced_names(&mut self, slice: usize) {
        self.synced[slice.min(self.shards - 1)] = self.states.len() - 1;
    }

    /// Records that everything is durable.
    pub fn synced_all(&mut self) {
        self.synced = [self.states.len() - 1; SHARDS];
        self.files.iter_mut().for_each(Contents::synced);
    }

    /// Returns the names that each shard's directories have in its state, or `None` if an operation is in one of the two states and not in
    /// the other one, and changed both shards.
    fn names_in(&self, cut: [usize; SHARDS]) -> Option<Names> {
        let (least, most) = (cut[0].min(cut[1]), cut[0].max(cut[1]));
        let is_half = |state: &State| state.changed == [true; SHARDS];
        if self.shards > 1 && self.states[least + 1..=most].iter().any(is_half) {
            return None;
        }
        let of_shard = |shard: usize| {
            let all = self.states[cut[shard]].names.iter();
            all.filter(move |(path, _)| self.shard_of_path(path) == shard)
        };
        let names = (0..SHARDS).flat_map(of_shard);
        Some(names.map(|(path, file)| (path.clone(), *file)).collect())
    }

    /// Fails if a volume may not show this after a power cut.
    pub fn judge(&self, found: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
        let keys: Vec<_> = found.keys().collect();
        let mut why = format!("the names are {keys:?}");
        let newest = self.states.len() - 1;
        let second = self.synced[1]..=if self.shards > 1 {
            newest
        } else {
            self.synced[1]
        };
        let cuts = (self.synced[0]..=newest)
            .flat_map(|one| second.clone().map(move |two| [one, two]))
            .filter_map(|cut| self.names_in(cut));
        for names in cuts.filter(|names| names.keys().eq(found.keys())) {
            let judged = names.iter().try_for_each(|(path, file)| {
                let judged = self.files[*file].judge(&found[path]);
                judged.map_err(|why| format!("{path}: {why}"))
            });
            match judged {
                Ok(()) => return Ok(()),
                Err(error) => why = error,
            }
        }
        Err(why)
    }
}
