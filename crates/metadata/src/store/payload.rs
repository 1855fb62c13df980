//! The bytes of a batch in the journal, and which batches of other stores it requires. docs/formats/volume.md describes them.

use jericho_volume::Blocks;

use super::batch::Operations;
use super::tables::{Row, Table};
use crate::error::{Error, Result};

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
    /// A batch of another store: slice (2), incarnation (8), number (8).
    pub const REQUIRE: u8 = 5;
    /// Checksums that change: key (16), length of the change (2), change.
    pub const SUMS: u8 = 6;
}

/// A batch of another store. The batch that requires it does not count without it after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Index of the store.
    pub store: u16,
    /// Incarnation of the store's journal, or `IN_REDB`.
    pub incarnation: u64,
    /// Number of the batch's first segment, or the number of linked batches that redb has once it has this one.
    pub seq: u64,
}

/// Incarnation of a batch that is not in the journal but in a transaction of redb.
pub(super) const IN_REDB: u64 = 0;

/// Number of bytes of a requirement in a payload.
pub(super) const REQUIREMENT_BYTES: usize = 1 + 2 + 8 + 8;

/// Adds requirements to the payload of a batch.
pub(super) fn put_requires(out: &mut Vec<u8>, requires: &[Requirement]) {
    for requirement in requires {
        out.push(item::REQUIRE);
        out.extend_from_slice(&requirement.store.to_le_bytes());
        out.extend_from_slice(&requirement.incarnation.to_le_bytes());
        out.extend_from_slice(&requirement.seq.to_le_bytes());
    }
}

/// Returns the payload of a batch without requirements. Fails if a key or a value is too long for its length field.
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
    for (key, change) in &operations.sums {
        out.push(item::SUMS);
        out.extend_from_slice(key);
        out.extend_from_slice(&u16::try_from(change.len()).ok()?.to_le_bytes());
        out.extend_from_slice(change);
    }
    Some(out)
}

/// Returns the batch of a payload with its requirements, or `None` if the bytes are not a payload.
pub(super) fn decode(bytes: &[u8]) -> Option<(Operations, Vec<Requirement>)> {
    let mut rest = Rest(bytes);
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    let (mut sums, mut requires) = (Vec::new(), Vec::new());
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
            item::REQUIRE => requires.push(Requirement {
                store: u16::from_le_bytes(rest.array()?),
                incarnation: u64::from_le_bytes(rest.array()?),
                seq: u64::from_le_bytes(rest.array()?),
            }),
            item::SUMS => {
                let key = rest.array()?;
                let bytes = u16::from_le_bytes(rest.array()?);
                sums.push((key, rest.take(usize::from(bytes))?.into()));
            }
            _ => return None,
        }
    }
    Some((Operations::new(rows, blocks, sums), requires))
}

/// Does the same as `decode`, and refuses blocks beyond the capacity of their slice. Fails with `Damaged`.
pub(super) fn decode_within(
    bytes: &[u8],
    slices_blocks: &[u64],
) -> Result<(Operations, Vec<Requirement>)> {
    let damaged = |what: &str| Error::Damaged(format!("a batch of the journal {what}"));
    let decoded = decode(bytes).ok_or_else(|| damaged("makes no sense"))?;
    let within = |blocks: &Blocks| {
        let capacity = slices_blocks.get(usize::from(blocks.slice));
        let end = blocks.first.checked_add(u64::from(blocks.count));
        capacity.is_some_and(|capacity| end.is_some_and(|end| end <= *capacity))
    };
    match decoded.0.blocks.iter().all(|(blocks, _)| within(blocks)) {
        true => Ok(decoded),
        false => Err(damaged("names blocks that no slice has")),
    }
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
        let sums = vec![([7; 16], Box::from([1, 2, 3]))];
        Operations::new(rows, vec![(blocks, true), (blocks, false)], sums)
    }

    #[test]
    fn a_batch_comes_back_as_it_was() {
        let batch = sample();
        let (decoded, requires) = decode(&encode(&batch).unwrap()).unwrap();
        assert_eq!(decoded.rows, batch.rows);
        assert_eq!(decoded.blocks, batch.blocks);
        assert_eq!(decoded.sums, batch.sums);
        assert_eq!(requires, []);
    }

    #[test]
    fn requirements_come_back_with_their_batch() {
        let requirement = |store| Requirement {
            store,
            incarnation: 1 << 40,
            seq: 77,
        };
        let all = [requirement(0), requirement(255)];
        let mut bytes = encode(&sample()).unwrap();
        let length = bytes.len();
        put_requires(&mut bytes, &all);
        assert_eq!(bytes.len(), length + 2 * REQUIREMENT_BYTES);
        let (decoded, requires) = decode(&bytes).unwrap();
        assert_eq!(decoded.rows, sample().rows);
        assert_eq!(requires, all);
        assert!(decode(&bytes[..bytes.len() - 1]).is_none());
    }

    #[test]
    fn a_payload_that_ends_early_or_has_an_unknown_item_is_refused() {
        let bytes = encode(&sample()).unwrap();
        // The ends of items are ends of shorter batches.
        let ends = [22, 37, 52].map(|after| bytes.len() - after);
        for end in (bytes.len() - 60..bytes.len()).filter(|end| !ends.contains(end)) {
            assert!(decode(&bytes[..end]).is_none(), "{end} bytes");
        }
        assert!(decode(&[9]).is_none());
        assert!(
            decode(&[item::REMOVE, 10, 0, 0]).is_none(),
            "no eleventh table"
        );
    }
}
