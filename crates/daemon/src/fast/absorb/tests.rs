use super::*;
use crate::fast::grants::tests::Bed;

#[test]
fn a_size_that_was_read_before_a_truncation_does_not_extend_the_file_after_it() {
    let bed = Bed::new();
    bed.extend(50_000);
    assert_eq!(bed.size(), 50_000);
    bed.extend(60_000);
    let changes = bed.mounted.fast.take_changes(&bed.file);
    bed.truncate(100);
    assert!(!bed.mounted.fast.apply(&bed.file, changes));
    assert_eq!(bed.handle.file.size(), 100);
    assert_eq!(bed.size(), 100);
    // A later write of a client counts.
    bed.extend(3_000);
    assert_eq!(bed.size(), 3_000);
}

#[test]
fn a_size_that_no_client_can_have_written_is_logged_once_and_ignored() {
    let bed = Bed::new();
    let is_logged = || bed.file.size_warned.load(Ordering::Relaxed);
    bed.extend(16 * PAGE_BYTES);
    bed.mounted.fast.absorb(bed.handle.file.ino());
    assert!(!is_logged());
    // This size is read before a truncation, which releases the reserved space.
    let changes = bed.mounted.fast.take_changes(&bed.file);
    bed.truncate(PAGE_BYTES);
    bed.mounted.fast.apply(&bed.file, changes);
    assert!(!is_logged());
    bed.extend(1 << 40);
    bed.mounted.fast.absorb(bed.handle.file.ino());
    assert!(is_logged());
    assert_eq!(bed.size(), PAGE_BYTES);
}
