//! The threads of each workload.

use crate::case::{Case, Scale};
use crate::direct::{self, Devices};
use crate::error::{Error, Result};
use crate::kind::{Kind, Variant};
use crate::part::Part;
use crate::room::{self, Needs, ThreadMemory};
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

/// Sizes of fsmark.
pub(crate) use fsmark::{CHUNK_BYTES as FSMARK_CHUNK_BYTES, files as fsmark_files};
/// Requests that a thread of zmio has in progress.
pub(crate) use zmio::DEPTH as ZMIO_DEPTH;

/// Returns the part of a thread, for workloads that read or write plain files and devices. Fails for others.
pub(crate) fn part(case: &Case, devices: &Devices, index: usize) -> Result<Part> {
    match (case.kind, case.scratch) {
        (Kind::Scan, Some(_)) => scan::part(case, index),
        (Kind::Zmio, _) => {
            let bytes = zmio::file_bytes(case.seats.len(), case.scale);
            direct::part(case, devices, index, bytes)
        }
        (Kind::Dd, _) => {
            let bytes = dd::file_bytes(case.seats.len(), case.scale);
            direct::part(case, devices, index, bytes)
        }
        _ => Err(Error::new(format!(
            "{} does not read or write plain files",
            case.kind.name()
        ))),
    }
}

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
        Kind::Mstress => mstress::threads(case),
    };
    if case.with_mstress {
        threads.extend(mstress::threads_beside(case));
    }
    Ok(threads)
}

/// Returns the most bytes that the files of a run have together.
pub fn bytes(kind: Kind, variant: Variant, threads: usize, scale: Scale) -> u64 {
    match kind {
        Kind::Zmio => zmio::bytes(threads, scale),
        Kind::Fsmark => fsmark::bytes(variant, threads, scale),
        Kind::Checkpoint => checkpoint::bytes(threads, scale),
        Kind::Stream => stream::bytes(threads, scale),
        Kind::Search => search::bytes(threads, scale),
        Kind::Scan => scan::bytes(threads, scale),
        Kind::Dd => dd::bytes(threads, scale),
        Kind::Mstress => 0,
    }
}

/// Returns the memory that a thread of a run takes, besides cached pages.
pub fn memory(
    kind: Kind,
    variant: Variant,
    threads: usize,
    scale: Scale,
    index: usize,
) -> ThreadMemory {
    let request_bytes = variant.request_bytes as u64;
    match kind {
        Kind::Zmio => ThreadMemory {
            frame_bytes: zmio::DEPTH as u64 * request_bytes,
            thread_bytes: 0,
        },
        Kind::Dd => ThreadMemory {
            frame_bytes: request_bytes,
            thread_bytes: 0,
        },
        Kind::Mstress => ThreadMemory {
            frame_bytes: mstress::BUFFER_BYTES as u64,
            thread_bytes: 0,
        },
        _ => ThreadMemory {
            frame_bytes: 0,
            thread_bytes: match kind {
                Kind::Stream => stream::memory_bytes(variant, threads, scale, index),
                Kind::Search => search::memory_bytes(threads, scale),
                _ => request_bytes,
            },
        },
    }
}

/// Returns the memory that a run takes, besides cached pages, by node.
pub(crate) fn needs(case: &Case) -> Needs {
    let count = case.seats.len();
    let mut needs = room::needs(case.topology, case.seats, |index| {
        memory(case.kind, case.variant, count, case.scale, index)
    });
    if case.with_mstress {
        for (node, bytes) in mstress::memory_beside(case) {
            *needs.entry(node).or_default() += bytes;
        }
    }
    needs
}
