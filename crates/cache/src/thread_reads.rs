//! Reads that a thread keeps for itself, because it has a `Reader` of the slice.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use jericho_storage::Transfer;

use crate::shared::SliceShared;

/// Maximum number of pages of a fill that a thread keeps.
pub(crate) const PAGES_MAX: usize = 16;

/// Transfers that the Gets of a thread have requested.
pub(crate) type Requested = Rc<RefCell<Vec<Transfer>>>;

thread_local! {
    /// The lists of this thread's readers, by slice.
    static READERS: RefCell<Vec<(*const SliceShared, Requested)>> = const { RefCell::new(Vec::new()) };
}

/// Adds a list for a slice to this thread.
pub(crate) fn register(shared: &Arc<SliceShared>) -> Requested {
    let requested = Requested::default();
    READERS.with_borrow_mut(|readers| {
        readers.push((Arc::as_ptr(shared), requested.clone()));
    });
    requested
}

/// Removes this thread's list for a slice.
pub(crate) fn unregister(shared: &Arc<SliceShared>) {
    let slice = Arc::as_ptr(shared);
    READERS.with_borrow_mut(|readers| readers.retain(|(of, _)| *of != slice));
}

/// Adds `transfer` to this thread's list for the slice. Returns the transfer if the thread has no such list.
pub(crate) fn keep(shared: &Arc<SliceShared>, transfer: Transfer) -> Option<Transfer> {
    READERS.with_borrow(|readers| {
        let slice = Arc::as_ptr(shared);
        match readers.iter().find(|(of, _)| *of == slice) {
            Some((_, requested)) => {
                requested.borrow_mut().push(transfer);
                None
            }
            None => Some(transfer),
        }
    })
}
