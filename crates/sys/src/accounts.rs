//! Names of users and groups: getpwnam(3), getgrnam(3).

use std::ffi::{CStr, CString};
use std::io;

/// Maximum size of a record. A group's record holds the names of its members.
const RECORD_BYTES_MAX: usize = 16 << 20;

/// A group of the group database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The group id.
    pub gid: u32,
    /// Names of the listed members. A user whose primary group it is usually is not listed.
    pub members: Vec<String>,
}

/// Calls `ask` with growing buffers until the record fits. Returns `Ok(None)` when there is no such record.
fn grow<T>(
    mut ask: impl FnMut(&mut [libc::c_char]) -> Result<Option<T>, i32>,
) -> io::Result<Option<T>> {
    let mut bytes = 4096;
    loop {
        let mut buffer = vec![0; bytes];
        match ask(&mut buffer) {
            Ok(found) => return Ok(found),
            Err(libc::ERANGE) if bytes < RECORD_BYTES_MAX => bytes *= 4,
            Err(libc::EINTR) => {}
            // Besides success without a record, C libraries return these for an unknown name.
            Err(libc::ENOENT | libc::ESRCH) => return Ok(None),
            Err(errno) => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Returns the id of the user with this name, or `None` when there is no such user. Fails when the user database cannot be
/// read.
pub fn user_id(name: &str) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    grow(|buffer| {
        // SAFETY: passwd is integers and pointers, for which zeros are valid.
        let mut record: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: `name` ends with NUL; `record`, `buffer` (of the given length) and `found` are valid for writes.
        let failed = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                &raw mut record,
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        };
        match failed {
            0 => Ok((!found.is_null()).then_some(record.pw_uid)),
            errno => Err(errno),
        }
    })
}

/// Returns the group with this name, or `None` when there is no such group. Fails when the group database cannot be
/// read.
pub fn group(name: &str) -> io::Result<Option<Group>> {
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    grow(|buffer| {
        // SAFETY: group is integers and pointers, for which zeros are valid.
        let mut record: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: `name` ends with NUL; `record`, `buffer` (of the given length) and `found` are valid for writes.
        let failed = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &raw mut record,
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            )
        };
        if failed != 0 {
            return Err(failed);
        }
        if found.is_null() {
            return Ok(None);
        }
        let mut members = vec![];
        let mut at = record.gr_mem;
        // SAFETY: gr_mem is an array of pointers into `buffer` that ends with a null pointer; each points to a string that
        // ends with NUL. `buffer` lives until the closure returns.
        unsafe {
            while !at.is_null() && !(*at).is_null() {
                members.push(CStr::from_ptr(*at).to_string_lossy().into_owned());
                at = at.add(1);
            }
        }
        Ok(Some(Group {
            gid: record.gr_gid,
            members,
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_a_user_and_a_group_and_nonsense_is_neither() {
        assert_eq!(user_id("root").unwrap(), Some(0));
        assert_eq!(group("root").unwrap().map(|group| group.gid), Some(0));
        for nonsense in ["no such name", "", "a\0b"] {
            assert_eq!(user_id(nonsense).unwrap(), None);
            assert_eq!(group(nonsense).unwrap(), None);
        }
    }
}
