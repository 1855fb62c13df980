//! POSIX access control lists in the kernel's binary form (version 2), and their relation to the mode.

use jericho_metadata::errno::EINVAL;

use crate::error::Result;

/// Name of the access ACL's attribute.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the default ACL's attribute.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid ACL. Its entries are in order of tags, each of the three base entries occurs once, and it has a mask if it has named
/// entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// Parses the attribute's value. Returns `None` for a value without entries, which removes the ACL. Fails with EINVAL.
    pub fn parse(value: &[u8]) -> Result<Option<Acl>> {
        let (version, rest) = value.split_first_chunk::<4>().ok_or(EINVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(EINVAL);
        }
        let (chunks, []) = rest.as_chunks::<8>() else {
            return Err(EINVAL);
        };
        if chunks.is_empty() {
            return Ok(None);
        }
        let mut entries: Vec<Entry> = chunks
            .iter()
            .map(|c| Entry {
                tag: u16::from_le_bytes([c[0], c[1]]),
                perm: u16::from_le_bytes([c[2], c[3]]),
                id: u32::from_le_bytes([c[4], c[5], c[6], c[7]]),
            })
            .collect();
        entries.sort_by_key(|e| (e.tag, if e.tag & (USER | GROUP) != 0 { e.id } else { 0 }));
        let acl = Acl { entries };
        if acl.is_valid() {
            Ok(Some(acl))
        } else {
            Err(EINVAL)
        }
    }

    fn is_valid(&self) -> bool {
        let count = |tag| self.entries.iter().filter(|e| e.tag == tag).count();
        let known = USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER;
        let named = count(USER) + count(GROUP);
        let sane = |e: &Entry| e.tag & !known == 0 && e.tag.count_ones() == 1 && e.perm & !7 == 0;
        let unique = self
            .entries
            .windows(2)
            .all(|pair| pair[0].tag != pair[1].tag || pair[0].id != pair[1].id);
        self.entries.iter().all(sane)
            && count(USER_OBJ) == 1
            && count(GROUP_OBJ) == 1
            && count(OTHER) == 1
            && count(MASK) <= 1
            && (named == 0 || count(MASK) == 1)
            && unique
    }

    /// Returns the attribute's value.
    pub fn to_bytes(&self) -> Box<[u8]> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for e in &self.entries {
            let id = if e.tag & (USER | GROUP) != 0 {
                e.id
            } else {
                NO_ID
            };
            bytes.extend_from_slice(&e.tag.to_le_bytes());
            bytes.extend_from_slice(&e.perm.to_le_bytes());
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes.into()
    }

    /// Returns whether the mode alone grants the same permissions.
    pub fn is_mode(&self) -> bool {
        self.entries.len() == 3
    }

    fn perm(&self, tag: u16) -> Option<u16> {
        self.entries.iter().find(|e| e.tag == tag).map(|e| e.perm)
    }

    fn set(&mut self, tag: u16, perm: u16) -> bool {
        match self.entries.iter_mut().find(|e| e.tag == tag) {
            Some(entry) => {
                entry.perm = perm & 7;
                true
            }
            None => false,
        }
    }

    /// Returns the permission bits (0777) of a file with this access ACL. The group's bits are those of the mask.
    pub fn mode(&self) -> u16 {
        let group = self.perm(MASK).or(self.perm(GROUP_OBJ)).unwrap_or(0);
        self.perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | self.perm(OTHER).unwrap_or(0)
    }

    /// Sets owner, mask (or group) and other from the mode, as chmod does.
    pub fn set_mode(&mut self, mode: u16) {
        self.set(USER_OBJ, mode >> 6);
        if !self.set(MASK, mode >> 3) {
            self.set(GROUP_OBJ, mode >> 3);
        }
        self.set(OTHER, mode);
    }

    /// Returns the access ACL and the mode of a file created with `mode` under this default ACL. The permissions are those of
    /// the ACL, limited by `mode`.
    pub fn inherit(&self, mode: u16) -> (Acl, u16) {
        let mut acl = self.clone();
        acl.set(USER_OBJ, self.perm(USER_OBJ).unwrap_or(0) & (mode >> 6));
        let group_tag = if self.perm(MASK).is_some() {
            MASK
        } else {
            GROUP_OBJ
        };
        acl.set(group_tag, self.perm(group_tag).unwrap_or(0) & (mode >> 3));
        acl.set(OTHER, self.perm(OTHER).unwrap_or(0) & mode);
        let mode = mode & !0o777 | acl.mode();
        (acl, mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&perm.to_le_bytes());
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    }

    fn named() -> Acl {
        let entries = [
            (USER_OBJ, 7, NO_ID),
            (USER, 6, 1000),
            (GROUP_OBJ, 5, NO_ID),
            (MASK, 7, NO_ID),
            (OTHER, 5, NO_ID),
        ];
        Acl::parse(&value(&entries)).unwrap().unwrap()
    }

    #[test]
    fn an_acl_comes_back_byte_for_byte() {
        let acl = named();
        assert_eq!(Acl::parse(&acl.to_bytes()).unwrap().unwrap(), acl);
    }

    #[test]
    fn permissions_from_a_default_acl_are_limited_by_the_requested_mode() {
        let (acl, mode) = named().inherit(0o640);
        assert_eq!(mode, 0o640);
        assert_eq!(acl.perm(MASK), Some(4));
        assert_eq!(acl.perm(GROUP_OBJ), Some(5));
        assert_eq!(acl.perm(OTHER), Some(0));
    }

    #[test]
    fn chmod_changes_the_mask_and_not_the_owning_group() {
        let mut acl = named();
        acl.set_mode(0o600);
        assert_eq!(acl.mode(), 0o600);
        assert_eq!(acl.perm(GROUP_OBJ), Some(5));
        assert!(!acl.is_mode());
    }

    #[test]
    fn an_acl_that_lacks_an_entry_or_has_one_twice_is_refused() {
        let base = [
            (USER_OBJ, 7, NO_ID),
            (GROUP_OBJ, 5, NO_ID),
            (OTHER, 5, NO_ID),
        ];
        assert!(Acl::parse(&value(&base)).unwrap().unwrap().is_mode());
        assert!(Acl::parse(&value(&base[..2])).is_err());
        let mut twice = base.to_vec();
        twice.push((OTHER, 1, NO_ID));
        assert!(Acl::parse(&value(&twice)).is_err());
        let mut unmasked = base.to_vec();
        unmasked.push((USER, 1, 5));
        assert!(Acl::parse(&value(&unmasked)).is_err());
        assert!(Acl::parse(&value(&base)[..10]).is_err());
        assert_eq!(Acl::parse(&value(&[])).unwrap(), None);
    }
}
