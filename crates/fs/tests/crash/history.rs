//! What a sequence did, and what the volume may show after a power cut in it.
//!
//! The operations on names and sizes are numbered. State `n` is the result of the first `n` of them. After a power cut each shard of the
//! volume shows its part of a state that is not older than its last synced one: a *cut* names a state for each shard. An operation that
//! changes several shards is in the states of all of them, or of none. The bytes of a file may be newer than its state, because pages
//! are written in place, and are never older than the last sync of the file. They never come from elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const PAGE: u64 = 4096;
const SECTOR: usize = 512;
/// Largest number of shards of a volume. In a volume with one shard, the other one never changes.
pub const SHARDS: usize = 2;

/// Returns the slice of an inode, which is in its number.
fn slice_of_ino(ino: u64) -> usize {
    (ino >> 40) as usize
}

/// A state for each shard.
type Cut = [usize; SHARDS];

/// Paths, each with the index of its file in the history.
pub type Names = BTreeMap<String, usize>;

/// What an operation left.
pub struct State {
    pub names: Names,
    /// Number of changes of the devices when the operation began.
    begun: u64,
    /// The shards that the operation changed.
    changed: [bool; SHARDS],
}

/// The contents of a file after an operation on it.
struct Version {
    bytes: Vec<u8>,
    /// Number of the state that has this version first.
    state: usize,
    /// Bytes that are gone whenever the operation is part of the state.
    removed: Range<u64>,
    begun: u64,
}

/// Bytes that are durable from a moment on.
#[derive(Clone)]
struct Synced {
    from: Moment,
    version: usize,
    bytes: Range<u64>,
}

/// When bytes are durable.
#[derive(Clone, Copy)]
enum Moment {
    /// Since the devices have begun this number of changes.
    Change(u64),
    /// Whenever this state of the file's shard is durable. A file that replaces another is written back before the rename, so its
    /// bytes are there whenever the new name is.
    State(usize),
}

pub struct FileHistory {
    pub ino: u64,
    versions: Vec<Version>,
    synced: Vec<Synced>,
    /// Number of the last state that changed the inode.
    pub touched: usize,
    /// Number of the state that created the file.
    pub created: usize,
}

pub struct History {
    pub files: Vec<FileHistory>,
    pub states: Vec<State>,
    /// Synced states of shards, each with the number of changes of the devices at the moment.
    synced: Vec<(u64, usize, usize)>,
    /// Number of the volume's shards: 1, or one for each slice.
    shards: usize,
    /// Returns the slice of a path's directory.
    slice_of_path: fn(&str) -> usize,
    /// A batch takes a part of a file's pages. So a state may have some pages of a hole, unless the file was synced.
    pub has_short_steps: bool,
}

/// A file as found after a power cut.
#[derive(Clone, Debug)]
pub struct Found {
    pub ino: u64,
    pub links: u32,
    pub bytes: Vec<u8>,
}

impl FileHistory {
    pub fn bytes(&self) -> &[u8] {
        &self.versions.last().expect("a file has a version").bytes
    }

    /// Returns the last version whose operation is part of a state.
    fn version_in(&self, state: usize) -> usize {
        let later = self.versions.iter().position(|v| v.state > state);
        later.unwrap_or(self.versions.len()) - 1
    }
}

impl History {
    /// Begins with files that are durable.
    pub fn new(
        names: Names,
        files: Vec<(u64, Vec<u8>)>,
        shards: usize,
        slice_of_path: fn(&str) -> usize,
    ) -> History {
        let mut history = History {
            shards,
            slice_of_path,
            has_short_steps: false,
            files: Vec::new(),
            synced: Vec::new(),
            states: vec![State {
                names,
                begun: 0,
                changed: [false; SHARDS],
            }],
        };
        for (ino, bytes) in files {
            history.add_file(ino, bytes, 0);
            history.sync_bytes(history.files.len() - 1, 0..u64::MAX, 0);
        }
        history
    }

    fn shard_of_ino(&self, ino: u64) -> usize {
        slice_of_ino(ino).min(self.shards - 1)
    }

    fn shard_of_path(&self, path: &str) -> usize {
        (self.slice_of_path)(path).min(self.shards - 1)
    }

    pub fn names(&self) -> &Names {
        &self.states.last().expect("there is a first state").names
    }

    pub fn add_file(&mut self, ino: u64, bytes: Vec<u8>, begun: u64) -> usize {
        let state = self.states.len() - 1;
        let version = Version {
            bytes,
            state,
            removed: 0..0,
            begun,
        };
        self.files.push(FileHistory {
            ino,
            versions: vec![version],
            synced: Vec::new(),
            touched: state,
            created: state,
        });
        self.files.len() - 1
    }

    /// Records an operation on a file with this inode number. `change` changes the names.
    pub fn note(&mut self, file: usize, ino: u64, begun: u64, change: impl FnOnce(&mut Names)) {
        let mut names = self.names().clone();
        change(&mut names);
        let mut changed = [false; SHARDS];
        changed[self.shard_of_ino(ino)] = true;
        let paths = self.names().keys().chain(names.keys());
        for path in paths.filter(|path| self.names().get(*path) != names.get(*path)) {
            changed[self.shard_of_path(path)] = true;
            // The inode that had the name loses a link.
            if let Some(replaced) = self.names().get(path) {
                changed[self.shard_of_ino(self.files[*replaced].ino)] = true;
            }
        }
        self.states.push(State {
            names,
            begun,
            changed,
        });
        if let Some(file) = self.files.get_mut(file) {
            file.touched = self.states.len() - 1;
        }
    }

    /// Records that an operation changed the contents of a file. `removed` are bytes that it took out.
    pub fn note_bytes(&mut self, file: usize, begun: u64, bytes: Vec<u8>, removed: Range<u64>) {
        self.note(file, self.files[file].ino, begun, |_| ());
        let state = self.states.len() - 1;
        self.files[file].versions.push(Version {
            bytes,
            state,
            removed,
            begun,
        });
    }

    /// Records that the latest bytes of a file are durable when the devices have begun `changes` changes.
    pub fn sync_bytes(&mut self, file: usize, bytes: Range<u64>, changes: u64) {
        self.keep_bytes(file, bytes, Moment::Change(changes));
    }

    /// Records that the latest bytes of a file are durable whenever the latest state is.
    pub fn note_replacing(&mut self, file: usize) {
        self.keep_bytes(file, 0..u64::MAX, Moment::State(self.states.len() - 1));
    }

    fn keep_bytes(&mut self, file: usize, bytes: Range<u64>, from: Moment) {
        let file = &mut self.files[file];
        let version = file.versions.len() - 1;
        file.synced.push(Synced {
            from,
            version,
            bytes,
        });
    }

    /// Records that a state is durable in a file's shard when the devices have begun `changes` changes.
    pub fn sync_state(&mut self, file: usize, state: usize, changes: u64) {
        let shard = self.shard_of_ino(self.files[file].ino);
        self.synced.push((changes, shard, state));
    }

    /// Records that the latest state is durable in all shards.
    pub fn sync_all(&mut self, changes: u64) {
        let latest = self.states.len() - 1;
        self.synced
            .extend((0..SHARDS).map(|shard| (changes, shard, latest)));
    }

    /// Returns the cuts in which each shard has a state between the oldest and the newest one, newer ones first.
    fn cuts(&self, oldest: Cut, newest: usize) -> Vec<Cut> {
        let mut cuts: Vec<Vec<usize>> = vec![Vec::new()];
        for oldest in oldest {
            let longer = |cut: &Vec<usize>| {
                let cut = cut.clone();
                (oldest..=newest)
                    .rev()
                    .map(move |state| [&cut[..], &[state]].concat())
            };
            cuts = cuts.iter().flat_map(longer).collect();
        }
        let cuts = cuts.into_iter().map(|cut| Cut::try_from(cut).unwrap());
        cuts.filter(|cut| self.is_whole(cut)).collect()
    }

    /// Returns whether a cut has each operation in all shards that it changed, or in none.
    fn is_whole(&self, cut: &Cut) -> bool {
        self.states.iter().enumerate().all(|(state, operation)| {
            let changed = cut
                .iter()
                .zip(operation.changed)
                .filter(|(_, changed)| *changed);
            let has: Vec<bool> = changed.map(|(newest, _)| state <= *newest).collect();
            has.windows(2).all(|two| two[0] == two[1])
        })
    }

    /// Fails with the reason if the volume must not show `found` after a power cut during change `cut` of the devices.
    pub fn judge(&self, cut: u64, found: &BTreeMap<String, Found>) -> Result<(), String> {
        let mut oldest = [0; SHARDS];
        for (_, shard, state) in self.synced.iter().filter(|(changes, ..)| *changes < cut) {
            oldest[*shard] = oldest[*shard].max(*state);
        }
        let newest = self.states.iter().rposition(|state| state.begun < cut);
        let newest = newest.unwrap_or(0);
        let mut reasons = Vec::new();
        for states in self.cuts(oldest, newest) {
            match self.explain(cut, &states, found) {
                Ok(()) => return Ok(()),
                Err(why) => reasons.push(format!("not state {states:?}: {why}")),
            }
        }
        Err(reasons.join("\n  "))
    }

    /// Returns the names that each shard's directories have in its state.
    fn names_in(&self, states: &Cut) -> Names {
        let mut names = Names::new();
        for (shard, state) in states.iter().enumerate() {
            let of_state = self.states[*state].names.iter();
            let own = of_state.filter(|(path, _)| self.shard_of_path(path) == shard);
            names.extend(own.map(|(path, file)| (path.clone(), *file)));
        }
        names
    }

    fn explain(
        &self,
        cut: u64,
        states: &Cut,
        found: &BTreeMap<String, Found>,
    ) -> Result<(), String> {
        let names = &self.names_in(states);
        let shown: BTreeMap<&String, u64> = found.iter().map(|(n, f)| (n, f.ino)).collect();
        let expected: BTreeMap<&String, u64> = names
            .iter()
            .map(|(name, file)| (name, self.files[*file].ino))
            .collect();
        if shown != expected {
            return Err(format!("it has the names {expected:?}, found {shown:?}"));
        }
        for (name, file) in names {
            let links = names.values().filter(|other| *other == file).count();
            let found = &found[name];
            if found.links as usize != links {
                return Err(format!("{name}: {links} links, found {}", found.links));
            }
            let file = &self.files[*file];
            let state = states[self.shard_of_ino(file.ino)];
            file.explain((cut, state), &found.bytes, self.has_short_steps)
                .map_err(|why| format!("{name}: {why}"))?;
        }
        Ok(())
    }
}

impl FileHistory {
    /// Fails with the reason if the file must not have these bytes in a state.
    fn explain(
        &self,
        (cut, state): (u64, usize),
        bytes: &[u8],
        has_short_steps: bool,
    ) -> Result<(), String> {
        let view = View {
            file: self,
            has_short_steps,
            synced: self
                .synced
                .iter()
                .filter(|synced| match synced.from {
                    Moment::Change(changes) => changes < cut,
                    Moment::State(needed) => needed <= state,
                })
                .cloned()
                .collect(),
            in_state: self.version_in(state),
            newest: self
                .versions
                .iter()
                .rposition(|v| v.begun < cut)
                .unwrap_or(0),
        };
        view.explain_size(bytes.len() as u64)?;
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            view.explain_bytes((index * SECTOR) as u64, sector)?;
        }
        Ok(())
    }
}

/// A file at the moment of a power cut, in one state.
struct View<'a> {
    file: &'a FileHistory,
    has_short_steps: bool,
    synced: Vec<Synced>,
    /// Version that belongs to the state.
    in_state: usize,
    /// Newest version that may have reached a device.
    newest: usize,
}

impl View<'_> {
    fn size(&self, version: usize) -> u64 {
        self.file.versions[version].bytes.len() as u64
    }

    /// Fails if the file must not have this size. A size is that of a version, or ends at a page whose bytes did not reach the
    /// device.
    fn explain_size(&self, size: u64) -> Result<(), String> {
        let whole = |synced: &&Synced| synced.bytes == (0..u64::MAX);
        let synced = self.synced.iter().filter(whole).map(|s| s.version).max();
        // The sizes before a truncation are gone whenever the truncation is part of the state.
        let mut of_state = self.file.versions[..=self.in_state].iter();
        let truncated = of_state.rposition(|v| v.removed.end == u64::MAX);
        let oldest = synced.max(truncated).unwrap_or(0);
        let newest = self.synced.iter().map(|s| s.version).max().unwrap_or(0);
        let newest = newest.max(self.in_state);
        let sizes: BTreeSet<u64> = (oldest..=newest)
            .map(|version| self.size(version))
            .collect();
        let is_end = |synced: &Synced| synced.bytes.end == size;
        let is_known =
            size.is_multiple_of(PAGE) || sizes.contains(&size) || self.synced.iter().any(is_end);
        // A truncation does not make the pages durable that it leaves. So the file may end before them, as before the truncation.
        let since_sync = synced.unwrap_or(0)..=newest;
        let least = since_sync.map(|version| self.size(version)).min();
        let most = sizes.last().copied();
        if !is_known || Some(size) < least || Some(size) > most {
            return Err(format!("size {size}, expected one of {sizes:?}"));
        }
        for synced in &self.synced {
            let versions = synced.version..=synced.version.max(self.in_state);
            let least = versions
                .map(|version| self.size(version).min(synced.bytes.end))
                .min();
            if Some(size) < least {
                return Err(format!("size {size}, but {least:?} was synced"));
            }
        }
        Ok(())
    }

    fn explain_bytes(&self, at: u64, sector: &[u8]) -> Result<(), String> {
        let end = at + sector.len() as u64;
        let overlaps = |range: &Range<u64>| range.start < end && at < range.end;
        let synced = self.synced.iter().filter(|s| overlaps(&s.bytes));
        let oldest = synced.map(|synced| synced.version).max().unwrap_or(0);
        let is_whole = |version: usize| {
            let bytes = self.file.versions[version]
                .bytes
                .get(at as usize..end as usize);
            bytes == Some(sector) && !self.removed_after(version, at..end)
        };
        if (oldest..=self.newest).any(is_whole) {
            return Ok(());
        }
        for (at, byte) in (at..).zip(sector) {
            self.explain_byte(at, *byte)?;
        }
        Ok(())
    }

    /// Returns whether some of the bytes were removed by an operation that is part of the state and later than a version.
    fn removed_after(&self, version: usize, bytes: Range<u64>) -> bool {
        let later = self.file.versions.get(version + 1..=self.in_state);
        let may_lack = |later: &&Version| self.has_short_steps && later.removed.end != u64::MAX;
        later
            .unwrap_or_default()
            .iter()
            .filter(|later| !may_lack(later))
            .any(|later| later.removed.start < bytes.end && bytes.start < later.removed.end)
    }

    fn explain_byte(&self, at: u64, byte: u8) -> Result<(), String> {
        let synced = self.synced.iter().filter(|s| s.bytes.contains(&at));
        let oldest = synced.map(|synced| synced.version).max().unwrap_or(0);
        let is = |version: usize| {
            let bytes = &self.file.versions[version].bytes;
            bytes.get(at as usize) == Some(&byte) && !self.removed_after(version, at..at + 1)
        };
        if (oldest..=self.newest).any(is) {
            return Ok(());
        }
        // A truncation zeroes the rest of its last page in place, perhaps before its size is durable.
        let mut later = self.file.versions[..=self.newest]
            .iter()
            .skip(self.in_state);
        let is_zeroed = later.any(|v| {
            let rest = v.removed.start..v.removed.start.next_multiple_of(PAGE);
            rest.contains(&at) && v.removed.end == u64::MAX
        });
        if byte == 0 && is_zeroed {
            return Ok(());
        }
        let versions: Vec<_> = (oldest..=self.newest)
            .map(|version| (version, self.file.versions[version].bytes.get(at as usize)))
            .collect();
        Err(format!(
            "byte {at} is {byte}, expected that of a version: {versions:?}"
        ))
    }
}
