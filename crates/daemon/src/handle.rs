//! An open file with its reader's position.

use std::sync::Arc;

use jericho_client::ReadAhead;
use jericho_fs::fs::File;
use parking_lot::Mutex;

use crate::fast::Grants;

/// An open file with the state of its reader (read-ahead) and what its program was granted.
pub struct Handle {
    pub(crate) file: Arc<File>,
    pub(crate) read_ahead: ReadAhead,
    /// Opened for writing.
    pub(crate) writable: bool,
    /// Inline access. Its lock comes before those of the fast path.
    pub(crate) grants: Mutex<Grants>,
}

impl Handle {
    pub(crate) fn new(file: Arc<File>, writable: bool) -> Arc<Handle> {
        Arc::new(Handle {
            file,
            read_ahead: ReadAhead::default(),
            writable,
            grants: Mutex::default(),
        })
    }
}
