//! Reading a range of a table as it is, for checks.

use super::tables::{ReadError, Table};
use super::{Store, explain, guarded};
use crate::error::{Error, Result};

impl Store {
    /// Passes the rows of a table to `each`, in the order of their keys, from `from` on and, if `to` is given, before `to`, until
    /// `each` returns false.
    pub fn scan_range(
        &self,
        table: Table,
        from: &[u8],
        to: Option<&[u8]>,
        mut each: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<()> {
        let view = self.view.load_full();
        guarded(|| {
            let read = view.each(table, from, to, |key, value| Ok(each(key, value)));
            read.map_err(|error| match error {
                ReadError::Redb(error) => explain(self.region.as_deref(), error.to_string()),
                ReadError::Damaged(what) => Error::Damaged(what),
            })
        })
        .inspect_err(|error| self.note_damage(error))
    }
}
