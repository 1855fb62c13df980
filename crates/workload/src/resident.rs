//! Asks where the cached pages of a file are.

use std::ops::Range;
use std::path::Path;

use jericho_sys::node_memory::nodes_of_file;

use crate::buffer;
use crate::case::Case;
use crate::error::{Context, Result};
use crate::frames::Frames;
use crate::reach::OpenFile;
use crate::seats::Seat;

/// Number of pages of a file that the kernel is asked about.
const PAGES_ASKED: u64 = 64;
const PAGE_BYTES: u64 = 4096;

/// Asks the kernel where some pages of a part of a file are that it has cached. Fails if they are not on the node of the seat.
pub(crate) fn frames_of(
    case: &Case,
    seat: &Seat,
    (file, part): (&dyn OpenFile, Range<u64>),
    path: &Path,
) -> Result<Frames> {
    // A program cannot see the frames of a Jericho volume. They are in the memory of the slice's home node, which the daemon checks.
    if case.is_jericho() {
        return Ok(seat.device.map_or(Frames::Unknown, Frames::On));
    }
    let Some(nodes) = nodes_of(file, part, path)? else {
        return Ok(Frames::bound_by(seat));
    };
    let expected = seat.kernel_node(case.topology);
    if let (Some(_), Some(node)) = (expected, seat.frame) {
        buffer::check(Ok(nodes), expected, &path.display().to_string())?;
        return Ok(Frames::On(node));
    }
    Ok(Frames::spread(case.topology, nodes.into_iter().flatten()))
}

/// Fails if cached pages of a part of a file are on another node than this one of the kernel. Returns whether the kernel has told.
pub(crate) fn confirm(
    (file, part): (&dyn OpenFile, Range<u64>),
    path: &Path,
    kernel_node: u32,
) -> Result<bool> {
    let Some(nodes) = nodes_of(file, part, path)? else {
        return Ok(false);
    };
    buffer::check(Ok(nodes), Some(kernel_node), &path.display().to_string())?;
    Ok(true)
}

/// Returns the kernel's nodes of some pages. `None`: a filesystem without mappings, a container, or an empty part, of which the kernel tells nothing.
fn nodes_of(
    file: &dyn OpenFile,
    part: Range<u64>,
    path: &Path,
) -> Result<Option<Vec<Option<u32>>>> {
    let end = file.size().at(path, "ask for its length")?.min(part.end);
    let bytes = end.saturating_sub(part.start);
    let step = (bytes / PAGES_ASKED / PAGE_BYTES).max(1) * PAGE_BYTES;
    let offsets: Vec<usize> = (part.start..end)
        .step_by(step as usize)
        .map(|offset| offset as usize)
        .collect();
    let descriptor = file.descriptor();
    Ok(descriptor.and_then(|fd| nodes_of_file(fd, end as usize, &offsets).ok()))
}
