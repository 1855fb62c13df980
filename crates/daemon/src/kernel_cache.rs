//! The functions by which the daemon makes the kernel drop what it has cached of files.

use std::ops::Range;

use jericho_fs::types::Ino;

/// Makes the kernel drop what it has cached of files. The front end implements it.
pub trait KernelCache: Send + Sync {
    /// Makes the kernel ask again for the attributes of an inode. Does not wait.
    fn drop_attributes(&self, ino: Ino);
    /// Makes the kernel drop its pages and attributes of an inode. May wait for requests that the kernel makes meanwhile.
    fn drop_pages(&self, ino: Ino);
    /// Does the same as `drop_pages` for the pages of a byte range.
    fn drop_some_pages(&self, ino: Ino, bytes: Range<u64>);
}

/// A kernel that caches nothing.
impl KernelCache for () {
    fn drop_attributes(&self, _: Ino) {}
    fn drop_pages(&self, _: Ino) {}
    fn drop_some_pages(&self, _: Ino, _: Range<u64>) {}
}
