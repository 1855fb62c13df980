use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::*;
use crate::simulated::{self, LONG};

#[test]
fn a_failing_write_ends_before_its_reply() {
    let device = simulated::device();
    let mounted = simulated::mount(&device);
    let handle = simulated::create(&mounted, b"f");
    let written = simulated::write(&mounted, &handle, 0, &[1; PAGE], WriteMode::PLAIN);
    assert_eq!(written.recv_timeout(LONG), Ok(PAGE as u32));
    simulated::evict(&mounted, &handle);
    simulated::fail_reads(&device);
    let (tx, rx) = mpsc::channel();
    let file = handle.file.clone();
    // The data covers a part of the page, so the page is read first.
    mounted.write(&handle, 0, b"part", WriteMode::PLAIN, move |written| {
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = is_over.clone();
        file.after_writings(move || seen.store(true, Ordering::Relaxed));
        let _ = tx.send((written.is_err(), is_over.load(Ordering::Relaxed)));
    });
    assert_eq!(
        rx.recv_timeout(LONG),
        Ok((true, true)),
        "the write failed, and has ended"
    );
}
