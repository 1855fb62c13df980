//! The writers of a file, in numbers.

/// The writers that keep the file's home from changing.
#[derive(Default)]
pub struct Writers {
    pub count: u32,
    /// The home is about to change, so new writers wait.
    pub shut: bool,
    /// Number of writers that have begun so far.
    pub begun: u64,
    /// New writers are watched; see `File::watch_writers`.
    pub watch: bool,
    /// Number of writers in `count` that are not watched.
    pub unwatched: u32,
    /// Callbacks that wait for the writers that were active when they were registered.
    pub waiting: Vec<Waiting>,
}

/// A callback that waits for all writers with a number below `before`.
pub struct Waiting {
    pub before: u64,
    pub left: u32,
    pub then: Box<dyn FnOnce() + Send>,
}

impl Writers {
    /// Adds a writer. Returns its number.
    pub fn enter(&mut self) -> u64 {
        self.count += 1;
        self.unwatched += u32::from(!self.watch);
        self.begun += 1;
        self.begun - 1
    }

    /// Removes a writer. Returns the callbacks that waited only for it.
    pub fn leave(&mut self, number: u64) -> Vec<Waiting> {
        self.count -= 1;
        for waiting in &mut self.waiting {
            waiting.left -= u32::from(number < waiting.before);
        }
        // Usually empty.
        self.waiting.extract_if(.., |w| w.left == 0).collect()
    }
}
