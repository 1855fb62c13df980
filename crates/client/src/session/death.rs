//! Finds out whether a kernel error means that the mount's daemon has died. Programs then get ENOTCONN.

use std::ffi::CStr;

use jericho_sys::errno::{ECANCELED, ECONNABORTED, EIO, ENOENT, ENOTCONN};
use jericho_sys::files;

/// Longest path that the kernel reads, in bytes, with the 0 at its end.
const PATH_BYTES: usize = 4096;

/// Returns whether a call may have failed with `errno` because a daemon has died. ENOTCONN: the daemon died before the call
/// began. ECONNABORTED: the call waited. ECANCELED: the kernel had already given the request to a ring of the daemon. EIO: the
/// call waited for a page of the page cache.
pub fn may_be(errno: i32) -> bool {
    matches!(errno, ENOTCONN | ECONNABORTED | ECANCELED | EIO)
}

/// Returns whether the outcome of another request shows that the daemon has died. A living daemon gives none of these errors.
pub fn is_sure(asked: files::Result<()>) -> bool {
    matches!(asked, Err(ENOTCONN | ECONNABORTED | ECANCELED))
}

/// Returns the errno to report for a call on a path that the kernel failed with `errno`: ENOTCONN when the daemon of its mount has
/// died. The path is relative to `dir`, a descriptor or AT_FDCWD, as in openat(2).
#[cold]
pub fn errno_after_path(dir: i32, path: &CStr, errno: i32) -> i32 {
    if !may_be(errno) {
        return errno;
    }
    let asked = match files::ask_path(dir, path) {
        // The kernel may have cached that the file does not exist, so this asks for its directory.
        Err(ENOENT) => match parent(path, &mut [0; PATH_BYTES]) {
            Some(parent) => files::ask_path(dir, parent),
            None => Err(ENOENT),
        },
        asked => asked,
    };
    match is_sure(asked) {
        true => ENOTCONN,
        false => errno,
    }
}

/// Returns the directory that a path is in, in `room`. Returns `None` when the path is too long. Allocates nothing, because the
/// caller may be a signal handler that has interrupted malloc.
fn parent<'a>(path: &CStr, room: &'a mut [u8; PATH_BYTES]) -> Option<&'a CStr> {
    let path = path.to_bytes();
    let end = path.iter().rposition(|byte| *byte != b'/');
    let path = &path[..end.map_or(0, |last| last + 1)];
    let dir = match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => &path[..slash + 1],
        None => b".",
    };
    let (out, rest) = room.split_at_mut_checked(dir.len())?;
    out.copy_from_slice(dir);
    *rest.first_mut()? = 0;
    CStr::from_bytes_until_nul(room).ok()
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    #[test]
    fn the_directory_of_a_path_precedes_its_last_name() {
        for (path, dir) in [
            (c"a", c"."),
            (c"a/b", c"a/"),
            (c"/a/b//", c"/a/"),
            (c"/a", c"/"),
            (c"", c"."),
        ] {
            let mut room = [b'x'; PATH_BYTES];
            assert_eq!(parent(path, &mut room), Some(dir), "{path:?}");
        }
        let long = |bytes| CString::new([vec![b'a'; bytes], b"/b".to_vec()].concat()).unwrap();
        for (bytes, fits) in [(PATH_BYTES - 2, true), (PATH_BYTES - 1, false)] {
            let mut room = [b'x'; PATH_BYTES];
            let parent = parent(&long(bytes), &mut room);
            assert_eq!(parent.map(CStr::count_bytes), fits.then_some(bytes + 1));
        }
    }

    #[test]
    fn errors_of_files_whose_filesystem_answers_stay_unchanged() {
        for errno in [EIO, ECANCELED, ECONNABORTED, ENOTCONN] {
            assert_eq!(errno_after_path(-1, c"/proc/none", errno), errno);
            assert_eq!(errno_after_path(-1, c"/", errno), errno);
        }
    }
}
