//! What a volume may show after the end of a sequence: the states since the last acknowledged one.

use std::collections::BTreeMap;

/// File by path. A file is an index in `Model::files`.
pub type Names = BTreeMap<String, usize>;

/// The contents that a file may have, oldest first. The last one is what memory has.
#[derive(Clone, Debug)]
pub struct Contents {
    versions: Vec<Vec<u8>>,
    /// An operation has failed, perhaps half-way, so it is not known what memory has. All versions since then stay possible.
    is_unsure: bool,
    /// The state of names in which the file was last created, renamed or removed.
    pub touched: usize,
}

impl Contents {
    fn new(bytes: Vec<u8>, touched: usize) -> Contents {
        Contents {
            versions: vec![bytes],
            is_unsure: false,
            touched,
        }
    }

    /// Returns what memory has, if no operation has failed half-way.
    pub fn bytes(&self) -> &[u8] {
        self.versions.last().expect("at least one version")
    }

    /// Records new bytes in memory.
    pub fn change(&mut self, bytes: Vec<u8>) {
        self.versions.push(bytes);
    }

    /// Records that an operation failed that would have led to `bytes`. Each byte may be old or new.
    pub fn may_change(&mut self, bytes: Vec<u8>) {
        let old = self.bytes().to_vec();
        self.is_unsure = true;
        self.versions.push(bytes);
        self.versions.push(old);
    }

    /// Records that everything in memory is durable.
    pub fn synced(&mut self) {
        if !self.is_unsure {
            self.versions.drain(..self.versions.len() - 1);
        }
    }

    /// Records that the present bytes of a range are durable.
    pub fn synced_range(&mut self, range: std::ops::Range<usize>) {
        if self.is_unsure {
            return;
        }
        let latest = self.bytes().to_vec();
        for version in &mut self.versions {
            version.resize(version.len().max(range.end), 0);
            version[range.clone()].copy_from_slice(&latest[range.clone()]);
        }
    }

    /// Fails if the file may not have these bytes.
    pub fn judge(&self, found: &[u8]) -> Result<(), String> {
        let sizes = self.versions.iter().map(Vec::len);
        let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
        if !(least..=most).contains(&found.len()) {
            let size = found.len();
            return Err(format!("{size} bytes instead of {least} to {most}"));
        }
        let may_be = |at: usize, byte: u8| {
            let mut versions = self.versions.iter();
            versions.any(|version| version.get(at).copied().unwrap_or(0) == byte)
        };
        match found.iter().enumerate().find(|(at, b)| !may_be(*at, **b)) {
            Some((at, byte)) => Err(format!("byte {at} is {byte}, which it never was")),
            None => Ok(()),
        }
    }
}

/// The names and contents that a volume may show.
#[derive(Clone, Debug)]
pub struct Model {
    /// The states of the names, oldest first.
    states: Vec<Names>,
    /// The oldest of them that may be found.
    synced: usize,
    pub files: Vec<Contents>,
}

impl Model {
    pub fn new(names: Names, files: Vec<Vec<u8>>) -> Model {
        Model {
            states: vec![names],
            synced: 0,
            files: files
                .into_iter()
                .map(|bytes| Contents::new(bytes, 0))
                .collect(),
        }
    }

    pub fn names(&self) -> &Names {
        self.states.last().expect("at least one state")
    }

    /// Records a change of the names of a file.
    pub fn rename(&mut self, file: usize, change: impl FnOnce(&mut Names)) {
        let mut names = self.names().clone();
        change(&mut names);
        self.states.push(names);
        self.files[file].touched = self.states.len() - 1;
    }

    /// Records a new, empty file.
    pub fn create(&mut self, path: String) -> usize {
        let file = self.files.len();
        self.files.push(Contents::new(Vec::new(), 0));
        self.rename(file, |names| {
            names.insert(path, file);
        });
        file
    }

    /// Records that the names are durable as they were in a state, or later.
    pub fn synced_names(&mut self, state: usize) {
        self.synced = self.synced.max(state);
    }

    /// Records that all names are durable.
    pub fn synced_all_names(&mut self) {
        self.synced = self.states.len() - 1;
    }

    /// Fails if a volume may not show this.
    pub fn judge(&self, found: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
        let is_found = |names: &&Names| names.keys().eq(found.keys());
        let mut states = self.states[self.synced..]
            .iter()
            .filter(is_found)
            .peekable();
        if states.peek().is_none() {
            let keys: Vec<_> = found.keys().collect();
            return Err(format!("the names are {keys:?}"));
        }
        let mut why = String::new();
        for names in states {
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
