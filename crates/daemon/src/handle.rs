//! An open file with its reader's position.

use std::sync::Arc;

use jericho_client::ReadAhead;
use jericho_fs::fs::File;

/// An open file with the state of its reader (read-ahead).
pub struct Handle {
    pub(crate) file: Arc<File>,
    pub(crate) read_ahead: ReadAhead,
}

impl Handle {
    pub(crate) fn new(file: Arc<File>) -> Arc<Handle> {
        Arc::new(Handle {
            file,
            read_ahead: ReadAhead::default(),
        })
    }
}
