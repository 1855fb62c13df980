//! Logs when write-back fails and when it works again: once for each change, independent of the number of slices, files and
//! writers.

use std::path::Path;
use std::sync::{Arc, Weak};

use jericho_cache::{Error, Slice};
use jericho_format::PAGE_BYTES;
use parking_lot::Mutex;

/// The outages of write-back to the slices of a volume.
#[derive(Clone)]
pub(crate) struct Outages {
    volume: String,
    slices: Arc<Mutex<Vec<Watched>>>,
}

struct Watched {
    slice: Weak<Slice>,
    is_failing: bool,
}

impl Outages {
    pub fn new(volume: &Path) -> Outages {
        Outages {
            volume: volume.display().to_string(),
            slices: Arc::default(),
        }
    }

    /// Logs the outages of a slice from now on.
    pub fn watch(&self, slice: &Arc<Slice>) {
        let index = {
            let mut slices = self.slices.lock();
            slices.push(Watched {
                slice: Arc::downgrade(slice),
                is_failing: false,
            });
            slices.len() - 1
        };
        let this = self.clone();
        slice.set_on_outage(Box::new(move |error| this.changed(index, error)));
    }

    /// Records that the write-back of a slice fails, or works again.
    fn changed(&self, index: usize, error: Option<&Error>) {
        let volume = &self.volume;
        let mut slices = self.slices.lock();
        let was = slices.iter().any(|slice| slice.is_failing);
        slices[index].is_failing = error.is_some();
        match error {
            Some(error) if !was => {
                let mib = waiting_bytes(&slices).div_ceil(1 << 20);
                tracing::error!(
                    "write-back of volume {volume} fails: {}; {mib} MiB wait in memory and are retried",
                    cause(error)
                );
            }
            None if was && !slices.iter().any(|slice| slice.is_failing) => {
                tracing::info!("write-back of volume {volume} works again");
            }
            _ => {}
        }
    }
}

fn waiting_bytes(slices: &[Watched]) -> u64 {
    let slices = slices.iter().filter_map(|watched| watched.slice.upgrade());
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
