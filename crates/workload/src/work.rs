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

/// Returns the bytes of the files that a run with the papers' sizes makes.
pub fn paper_bytes(kind: Kind, threads: usize) -> u64 {
    let count = threads as u64;
    match kind {
        Kind::Zmio => count * zmio::FILE_BYTES,
        Kind::Dd => count * dd::FILE_BYTES,
        Kind::Fsmark => {
            let variants = kind.variants().iter();
            let largest = variants.map(|variant| variant.request_bytes as u64).max();
            count * fsmark::FILES * largest.unwrap_or(0)
        }
        Kind::Checkpoint => count * checkpoint::PART_BYTES,
        // Each of a pair of threads has a file.
        Kind::Stream => count * stream::FILE_BYTES,
        Kind::Search => {
            let tables = count * search::TABLES as u64 * search::TABLE_BYTES as u64;
            search::CORPUS_BYTES + tables
        }
        Kind::Scan => scan::FILES.max(threads) as u64 * scan::FILE_BYTES,
    }
}
