//! The bytes of a batch in the journal. docs/formats/volume.md describes them.

use jericho_volume::Blocks;

use super::batch::Operations;
use super::tables::{Row, Table};

/// Kinds of items of a payload, in their first byte.
mod item {
    /// A row to put: table, length of the key (2), length of the value (4), key, value.
    pub const PUT: u8 = 1;
    /// A row to remove: table, length of the key (2), key.
    pub const REMOVE: u8 = 2;
    /// Blocks that become used: slice (2), first block (8), number of blocks (4).
    pub const USE: u8 = 3;
    /// Blocks that become free: the same fields.
    pub const FREE: u8 = 4;
}

/// Returns the payload of a batch. Fails if a key or a value is too long for its length field.
pub(super) fn encode(operations: &Operations) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for row in &operations.rows {
        let kind = match row.value {
            Some(_) => item::PUT,
            None => item::REMOVE,
        };
        out.push(kind);
        out.push(row.table as u8);
        out.extend_from_slice(&u16::try_from(row.key.len()).ok()?.to_le_bytes());
        if let Some(value) = &row.value {
            out.extend_from_slice(&u32::try_from(value.len()).ok()?.to_le_bytes());
        }
        out.extend_from_slice(&row.key);
        out.extend_from_slice(row.value.as_deref().unwrap_or_default());
    }
    for (blocks, used) in &operations.blocks {
        out.push(if *used { item::USE } else { item::FREE });
        out.extend_from_slice(&blocks.slice.to_le_bytes());
        out.extend_from_slice(&blocks.first.to_le_bytes());
        out.extend_from_slice(&blocks.count.to_le_bytes());
    }
    Some(out)
}

/// Returns the batch of a payload, or `None` if the bytes are not one.
pub(super) fn decode(bytes: &[u8]) -> Option<Operations> {
    let mut rest = Rest(bytes);
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    while !rest.0.is_empty() {
        match rest.array::<1>()?[0] {
            kind @ (item::PUT | item::REMOVE) => {
                let table = Table::of_index(rest.array::<1>()?[0])?;
                let key_bytes = u16::from_le_bytes(rest.array()?);
                let value_bytes = match kind {
                    item::PUT => Some(u32::from_le_bytes(rest.array()?)),
                    _ => None,
                };
                let key = rest.take(usize::from(key_bytes))?.to_vec();
                let value = match value_bytes {
                    Some(bytes) => Some(rest.take(bytes as usize)?.to_vec()),
                    None => None,
                };
                rows.push(Row { table, key, value });
            }
            kind @ (item::USE | item::FREE) => {
                let range = Blocks {
                    slice: u16::from_le_bytes(rest.array()?),
                    first: u64::from_le_bytes(rest.array()?),
                    count: u32::from_le_bytes(rest.array()?),
                };
                blocks.push((range, kind == item::USE));
            }
            _ => return None,
        }
    }
    Some(Operations::new(rows, blocks))
}

/// The bytes of a payload that are not read yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Operations {
        let row = |table, key: &[u8], value: Option<&[u8]>| Row {
            table,
            key: key.to_vec(),
            value: value.map(<[u8]>::to_vec),
        };
        let rows = vec![
            row(Table::Inodes, b"12345678", Some(b"an inode")),
            row(Table::Xattrs, &[7; 300], Some(&[9; 65_536])),
            row(Table::Orphans, b"12345678", Some(b"")),
            row(Table::Entries, b"gone", None),
        ];
        let blocks = Blocks {
            slice: 3,
            first: 1 << 40,
            count: 77,
        };
        Operations::new(rows, vec![(blocks, true), (blocks, false)])
    }

    #[test]
    fn a_batch_comes_back_as_it_was() {
        let batch = sample();
        let decoded = decode(&encode(&batch).unwrap()).unwrap();
        assert_eq!(decoded.rows, batch.rows);
        assert_eq!(decoded.blocks, batch.blocks);
    }

    #[test]
    fn a_payload_that_ends_early_or_has_an_unknown_item_is_refused() {
        let bytes = encode(&sample()).unwrap();
        // The ends of items are ends of shorter batches.
        let ends = [bytes.len() - 15, bytes.len() - 30];
        for end in (bytes.len() - 40..bytes.len()).filter(|end| !ends.contains(end)) {
            assert!(decode(&bytes[..end]).is_none(), "{end} bytes");
        }
        assert!(decode(&[9]).is_none());
        assert!(decode(&[item::REMOVE, 9, 0, 0]).is_none(), "no tenth table");
    }
}
