//! Names and attributes: directories, their entries, and what inodes have besides data.

pub(crate) mod acl;
pub(crate) mod directory;
pub(crate) mod known_privileges;
pub(crate) mod namespace;
pub(crate) mod overlay;
pub(crate) mod paths;
pub(crate) mod privileges;
pub(crate) mod rename;
pub(crate) mod room;
pub(crate) mod xattr;
