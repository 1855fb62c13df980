//! The mount: kernel requests to filesystem and data path
