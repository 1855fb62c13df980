//! Requests that take several steps of the slice: invalidation, and changes of pages that may meet a latch.

use std::ops::Range;
use std::sync::Arc;

use jericho_format::PAGE_BYTES;

use crate::effects::Effects;
use crate::grant::{self, Grant};
use crate::invalidate::Visit;
use crate::object::{Error, Object};
use crate::requests::{Done, GetRequest, Intent};
use crate::scheduler::{self, perform};
use crate::shared::SliceShared;
use crate::waiting;

/// See `Slice::invalidate`.
pub(crate) fn invalidate(shared: &Arc<SliceShared>, object: u64, pages: Range<u64>, done: Done) {
    let context = &shared.context;
    let mut visit = Visit::new(context, object, pages);
    shared.drain_clients();
    shared.lock().drain_reports(context);
    while !visit.is_complete() {
        visit.step(&mut shared.lock(), context);
    }
    let mut effects = Effects::default();
    let mut state = shared.lock();
    visit.wait(&mut state, context, done);
    waiting::retry(&mut state, context, &mut effects);
    drop(state);
    perform(shared, effects);
}

/// See `Slice::zero_part`.
pub(crate) fn zero_part(
    shared: &Arc<SliceShared>,
    object: &Arc<dyn Object>,
    page: u64,
    range: Range<usize>,
    done: Done,
) {
    let (again, of) = (shared.clone(), object.clone());
    let got = move |granted: Result<Grant, Error>| {
        let mut grant = match granted {
            Ok(grant) => grant,
            Err(error) => return done(Err(error)),
        };
        let zeros = &[0; PAGE_BYTES as usize][..range.len()];
        let Err(latched) = grant.write(page, range.start, zeros) else {
            drop(grant);
            return done(Ok(()));
        };
        drop(grant);
        let shared = again.clone();
        let resume = Box::new(move || zero_part(&again, &of, page, range, done));
        scheduler::park(&shared, latched, resume);
    };
    grant::get(shared, modify(object, page, 1), got);
}

/// See `Slice::touch`.
pub(crate) fn touch(
    shared: &Arc<SliceShared>,
    object: &Arc<dyn Object>,
    pages: Range<u64>,
    done: Done,
) {
    let (again, of) = (shared.clone(), object.clone());
    let (first, count) = (pages.start, (pages.end - pages.start) as u32);
    let got = move |granted: Result<Grant, Error>| {
        let mut grant = match granted {
            Ok(grant) => grant,
            Err(error) => return done(Err(error)),
        };
        for page in pages.clone() {
            if let Err(latched) = grant.redirty(page) {
                drop(grant);
                let shared = again.clone();
                let resume = Box::new(move || touch(&again, &of, page..pages.end, done));
                return scheduler::park(&shared, latched, resume);
            }
        }
        drop(grant);
        done(Ok(()));
    };
    grant::get(shared, modify(object, first, count), got);
}

fn modify(object: &Arc<dyn Object>, first: u64, count: u32) -> GetRequest {
    GetRequest {
        object: object.clone(),
        first,
        count,
        intent: Intent::Modify,
    }
}
