//! The application side: inline reads and writes of cached pages
