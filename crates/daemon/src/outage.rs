//! Logs when write-back fails and when it works again: once for each change, independent of the number of slices, files and
//! writers.

use std::path::Path;
use std::sync::{Arc, Weak};

use jericho_cache::{Error, Slice};
use jericho_format::PAGE_BYTES;
use parking_lot::Mutex;

/// Logs outages of write-back to the slices of a volume.
pub(crate) fn watch(volume: &Path, slices: &[Arc<Slice>]) {
    let failing = Arc::new(Mutex::new(vec![false; slices.len()]));
    let all: Arc<[Weak<Slice>]> = slices.iter().map(Arc::downgrade).collect();
    for (index, slice) in slices.iter().enumerate() {
        let (failing, all) = (failing.clone(), all.clone());
        let volume = volume.display().to_string();
        slice.set_on_outage(Box::new(move |error| {
            let mut failing = failing.lock();
            let was = failing.contains(&true);
            failing[index] = error.is_some();
            match error {
                Some(error) if !was => {
                    let mib = waiting_bytes(&all).div_ceil(1 << 20);
                    tracing::error!(
                        "write-back of volume {volume} fails: {}; {mib} MiB wait in memory and are retried",
                        cause(error)
                    );
                }
                None if was && !failing.contains(&true) => {
                    tracing::info!("write-back of volume {volume} works again");
                }
                _ => {}
            }
        }));
    }
}

fn waiting_bytes(slices: &[Weak<Slice>]) -> u64 {
    let slices = slices.iter().filter_map(Weak::upgrade);
    slices
        .map(|slice| slice.dirty_bytes())
        .sum::<u64>()
        .max(PAGE_BYTES)
}

fn cause(error: &Error) -> String {
    match error.errno() {
        libc::ENOSPC => format!("no space on the host ({error})"),
        libc::EDQUOT => format!("the host's quota is used up ({error})"),
        _ => error.to_string(),
    }
}
