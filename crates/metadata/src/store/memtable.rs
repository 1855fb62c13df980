//! Rows that the journal has and redb does not have yet.

use std::ops::Bound;
use std::sync::Arc;

use imbl::OrdMap;
use jericho_format::PAGE_BYTES;

use super::tables::{Row, Table};

/// The value of a row, or `None` for a removed row.
pub(super) type Value = Option<Arc<[u8]>>;

/// Rows in the order of table and key. A clone shares the rows with its original and costs one reference count.
#[derive(Clone, Default)]
pub(super) struct Memtable {
    rows: OrdMap<Arc<[u8]>, Value>,
    bytes: u64,
    /// The rows to put.
    puts: Puts,
}

/// Counts of rows to put.
#[derive(Clone, Copy, Default)]
struct Puts {
    /// Rows that may go between any two rows of their table.
    scattered: u64,
    /// Bytes of the keys and values, and of what redb adds to a row.
    bytes: u64,
}

impl Puts {
    /// Returns the counts of one row.
    fn of(key: &[u8], value: &Value) -> Puts {
        match value {
            None => Puts::default(),
            Some(_) => Puts {
                scattered: u64::from(is_scattered(key)),
                bytes: weight(key, value) + 8,
            },
        }
    }
}

/// Returns the key of a row among the rows of all tables: one byte for the table, then the row's key.
fn whole_key(table: Table, key: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(1 + key.len());
    whole.push(table as u8);
    whole.extend_from_slice(key);
    whole
}

/// Returns whether a row may go between any two rows of its table. In the other tables, new inodes have increasing numbers, and the other
/// rows keep their lengths.
fn is_scattered(key: &[u8]) -> bool {
    let table = key.first().and_then(|index| Table::of_index(*index));
    matches!(
        table,
        Some(Table::Entries | Table::Extents | Table::Xattrs | Table::Logged | Table::Sums)
    )
}

/// Returns how many more pages redb needs at most for rows. A scattered row may split a leaf that is full. Other leaves are
/// at least half full, and a leaf for a long value has less than twice the bytes of the value.
pub(super) fn pages_max(scattered: u64, bytes: u64) -> u64 {
    let leaves = scattered + bytes.div_ceil(PAGE_BYTES / 2);
    // A branch has at least fourteen children.
    leaves + leaves.div_ceil(14)
}

fn weight(key: &[u8], value: &Value) -> u64 {
    (key.len() + value.as_ref().map_or(0, |value| value.len())) as u64
}

impl Memtable {
    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the bytes of all keys and values.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many more pages redb needs at most for these rows.
    pub fn pages_max(&self) -> u64 {
        pages_max(self.puts.scattered, self.puts.bytes)
    }

    /// Puts a row over the earlier one of its key.
    pub fn put(&mut self, row: Row) {
        let key: Arc<[u8]> = whole_key(row.table, &row.key).into();
        let value: Value = row.value.map(Into::into);
        self.set(key, value);
    }

    fn set(&mut self, key: Arc<[u8]>, value: Value) {
        self.bytes += weight(&key, &value);
        let put = Puts::of(&key, &value);
        self.puts.scattered += put.scattered;
        self.puts.bytes += put.bytes;
        if let Some(before) = self.rows.insert(key.clone(), value) {
            self.bytes -= weight(&key, &before);
            let put = Puts::of(&key, &before);
            self.puts.scattered -= put.scattered;
            self.puts.bytes -= put.bytes;
        }
    }

    /// Puts all rows of a newer memtable over these.
    pub fn put_all(&mut self, newer: &Memtable) {
        for (key, value) in &newer.rows {
            self.set(key.clone(), value.clone());
        }
    }

    /// Returns the row of a key: `None` if there is none here, `Some(None)` if it was removed.
    pub fn get(&self, table: Table, key: &[u8]) -> Option<Value> {
        self.rows.get(&whole_key(table, key)[..]).cloned()
    }

    /// Returns the rows of a table whose keys are at least `from` and, if `to` is given, less than `to`, in order.
    pub fn range(
        &self,
        table: Table,
        from: &[u8],
        to: Option<&[u8]>,
    ) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let end = match to {
            Some(to) => whole_key(table, to),
            None => vec![table as u8 + 1],
        };
        let start = whole_key(table, from);
        // The map panics at a range whose start is after its end. Here such a range is empty.
        let end = end.max(start.clone());
        self.rows
            .range::<_, [u8]>((Bound::Included(&start[..]), Bound::Excluded(&end[..])))
            .map(|(key, value)| (&key[1..], value.as_deref()))
    }

    /// Returns all rows in order: table, key, and the value.
    pub fn rows(&self) -> impl Iterator<Item = RowRef<'_>> {
        self.rows.iter().filter_map(|(key, value)| {
            Some(RowRef {
                table: Table::of_index(key[0])?,
                key: &key[1..],
                value: value.as_deref(),
            })
        })
    }
}

/// A row of a memtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowRef<'a> {
    pub table: Table,
    pub key: &'a [u8],
    /// `None`: the row was removed.
    pub value: Option<&'a [u8]>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(table: Table, key: &[u8], value: Option<&[u8]>) -> Row {
        Row {
            table,
            key: key.to_vec(),
            value: value.map(<[u8]>::to_vec),
        }
    }

    #[test]
    fn the_last_row_of_a_key_counts_and_the_bytes_follow() {
        let mut table = Memtable::default();
        table.put(row(Table::Inodes, b"k", Some(b"long value")));
        table.put(row(Table::Inodes, b"k", Some(b"v")));
        assert_eq!(table.bytes(), 3);
        assert_eq!(table.get(Table::Inodes, b"k"), Some(Some(b"v"[..].into())));
        table.put(row(Table::Inodes, b"k", None));
        assert_eq!((table.bytes(), table.len()), (2, 1));
        assert_eq!(table.get(Table::Inodes, b"k"), Some(None));
        assert_eq!(table.get(Table::Entries, b"k"), None);
    }

    #[test]
    fn a_range_stays_in_its_table() {
        let mut table = Memtable::default();
        for at in [Table::Inodes, Table::Entries, Table::Extents] {
            for key in [b"a", b"b", b"c"] {
                table.put(row(at, key, Some(b"")));
            }
        }
        let keys = |from: &[u8], to: Option<&[u8]>| -> Vec<Vec<u8>> {
            let range = table.range(Table::Entries, from, to);
            range.map(|(key, _)| key.to_vec()).collect()
        };
        assert_eq!(keys(b"", None), [b"a", b"b", b"c"]);
        assert_eq!(keys(b"b", None), [b"b", b"c"]);
        assert_eq!(keys(b"", Some(b"b")), [b"a"]);
        assert_eq!(keys(b"c", Some(b"b")), [] as [Vec<u8>; 0]);
    }

    #[test]
    fn a_clone_keeps_its_rows() {
        let mut table = Memtable::default();
        table.put(row(Table::Inodes, b"a", Some(b"1")));
        let before = table.clone();
        let mut newer = Memtable::default();
        newer.put(row(Table::Inodes, b"a", None));
        newer.put(row(Table::Inodes, b"b", Some(b"2")));
        table.put_all(&newer);
        assert_eq!(before.rows().count(), 1);
        assert_eq!(before.get(Table::Inodes, b"a"), Some(Some(b"1"[..].into())));
        assert_eq!(table.get(Table::Inodes, b"a"), Some(None));
        assert_eq!(table.rows().count(), 2);
    }
}
