//! The threads of each workload.

use crate::case::Case;
use crate::error::Result;
use crate::kind::Kind;
use crate::run::Thread;

mod checkpoint;
mod dd;
mod files;
mod fsmark;
mod mstress;
mod scan;
mod search;
mod stream;
mod zmio;

/// Returns the threads of a run.
pub fn threads<'a>(case: &'a Case<'a>) -> Result<Vec<Thread<'a>>> {
    let mut threads = match case.kind {
        Kind::Zmio => zmio::threads(case)?,
        Kind::Fsmark => fsmark::threads(case)?,
        Kind::Checkpoint => checkpoint::threads(case)?,
        Kind::Stream => stream::threads(case)?,
        Kind::Search => search::threads(case)?,
        Kind::Scan => scan::threads(case)?,
        Kind::Dd => dd::threads(case)?,
    };
    if case.with_mstress {
        threads.extend(mstress::threads(case));
    }
    Ok(threads)
}
