//! Shared-memory segments: frames, the page table, and all hand-written atomics
