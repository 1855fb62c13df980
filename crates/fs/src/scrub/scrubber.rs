//! The thread that reads all data in the background.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jericho_format::PAGE_BYTES;
use jericho_metadata::store::{Change, Extent};
use jericho_storage::AlignedBuffer;

use crate::check::extents::is_possible;
use crate::core::Core;
use crate::data::extents::At;
use crate::error::{Error, Result};
use crate::scrub::ScrubStatus;
use crate::scrub::findings::Findings;
use crate::scrub::pages::{Rows, examine};
use crate::types::{Ino, ROOT};

/// Pages that one read takes at most: 1 MiB.
const PAGES_AT_ONCE: u32 = 256;
/// Extents of a file that are in memory at most.
const EXTENTS_MAX: usize = 1024;
/// The thread sleeps when it has read this much.
const STEP_BYTES: u64 = 1 << 20;
/// A pass begins at the earliest this long after the end of the last one.
const PERIOD_S: u64 = 7 * 24 * 3600;
/// The place is saved when this much was read since.
const SAVE_BYTES: u64 = 256 << 20;
/// Names of the stored values. The inode and the page where a pass goes on, and the number of pages that it has found; 0 without a pass:
const INO_NAME: &str = "scrub_ino";
const PAGE_NAME: &str = "scrub_page";
const FOUND_NAME: &str = "scrub_found";
/// The end of the last whole pass in seconds since the epoch, and the number of pages that it has found.
const ENDED_NAME: &str = "scrub_ended";
const LAST_FOUND_NAME: &str = "scrub_last_found";
const PAGE: usize = PAGE_BYTES as usize;

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Returns the pass with which the thread begins. Tells what earlier mounts have found.
pub(crate) fn prepare(core: &Core) -> Pass {
    let pass = Pass::resumed(core);
    pass.tell(core);
    pass
}

/// Runs the thread.
pub(crate) fn run(core: &Core, mut pass: Pass) {
    while core.scrub.sleep(|rate| pass.pause(rate)) {
        pass.owed_bytes = 0;
        if let Err(error) = pass.step(core) {
            tracing::warn!(
                "the background check of the data ends before it has read all data: {error}"
            );
            pass.end(core);
        }
        pass.tell(core);
    }
    log(pass.findings.end_run());
    if pass.unsaved_bytes > 0 {
        pass.save(core);
    }
}

/// Logs a finding.
fn log(line: Option<String>) {
    if let Some(line) = line {
        tracing::error!("{line}");
    }
}

/// The place of a pass.
pub(crate) struct Pass {
    ino: Ino,
    page: u64,
    /// Extents of `ino` were read.
    is_begun: bool,
    /// The next of them, in order.
    extents: VecDeque<Extent>,
    /// The page from which on extents have to be read next, if the file may have more.
    more_from: Option<u64>,
    /// Bytes that were read and not slept for.
    owed_bytes: u64,
    unsaved_bytes: u64,
    /// Pages that are damaged or cannot be read.
    found: u64,
    /// When the last pass ended, whole or not, if none is in progress.
    idle_since_s: Option<u64>,
    /// The end of the last whole pass, and the pages that it has found.
    last: Option<(u64, u64)>,
    findings: Findings,
    buffer: AlignedBuffer,
}

impl Pass {
    fn resumed(core: &Core) -> Pass {
        let value = |name| core.store_of(ROOT).value(name).ok().flatten();
        let ino = value(INO_NAME).unwrap_or(0);
        let last_ended_s = value(ENDED_NAME).filter(|ended_s| *ended_s > 0);
        Pass {
            ino,
            page: value(PAGE_NAME).unwrap_or(0),
            is_begun: false,
            extents: VecDeque::new(),
            more_from: None,
            owed_bytes: 0,
            unsaved_bytes: 0,
            found: value(FOUND_NAME).unwrap_or(0),
            idle_since_s: last_ended_s.filter(|_| ino == 0),
            last: last_ended_s.map(|ended_s| (ended_s, value(LAST_FOUND_NAME).unwrap_or(0))),
            findings: Findings::default(),
            buffer: AlignedBuffer::new(PAGES_AT_ONCE as usize * PAGE),
        }
    }

    /// Returns how long to sleep before the next step.
    fn pause(&self, rate: u64) -> Duration {
        match self.idle_since_s {
            // A clock that was set back must not stop all passes.
            Some(ended) => {
                let since = now_s().checked_sub(ended).unwrap_or(PERIOD_S);
                Duration::from_secs(PERIOD_S.saturating_sub(since))
            }
            None => Duration::from_secs_f64(self.owed_bytes as f64 / rate as f64),
        }
    }

    /// Reads about a megabyte.
    fn step(&mut self, core: &Core) -> Result<()> {
        self.idle_since_s = None;
        while self.owed_bytes < STEP_BYTES {
            match self.advance(core) {
                Ok(true) => continue,
                Ok(false) => {}
                // Damaged rows of a file must not keep the data of all later files from being read.
                Err(error @ Error::Damaged(_)) => {
                    let ino = self.ino;
                    let line =
                        format!("the background check skips the rest of inode {ino}: {error}");
                    log(self.findings.end_run());
                    log(self.findings.is_new(&line).then_some(line));
                    self.extents.clear();
                    self.more_from = None;
                }
                Err(error) => return Err(error),
            }
            if !self.begin_next_file(core)? {
                self.last = Some((now_s(), self.found));
                self.end(core);
                return Ok(());
            }
        }
        if self.unsaved_bytes >= SAVE_BYTES {
            self.save(core);
        }
        Ok(())
    }

    /// Reads the next part of the file. Returns false if there is none.
    fn advance(&mut self, core: &Core) -> Result<bool> {
        let Some(extent) = self.extents.pop_front() else {
            return match self.more_from.take() {
                Some(from) => self.read_extents(core, from).map(|()| true),
                None => Ok(false),
            };
        };
        let end = extent.page + u64::from(extent.blocks.count);
        if extent.unwritten || end <= self.page {
            self.page = self.page.max(end);
            return Ok(true);
        }
        let first = extent.page.max(self.page);
        let count = (end - first).min(u64::from(PAGES_AT_ONCE)) as u32;
        self.read(core, &extent, first, count)?;
        self.page = first + u64::from(count);
        if self.page < end {
            // The rest of the extent comes next.
            self.extents.push_front(extent);
        }
        Ok(true)
    }

    /// Reads the next extents of the file, of those that begin at page `from` or later.
    fn read_extents(&mut self, core: &Core, from: u64) -> Result<()> {
        let store = core.store_of(self.ino);
        let extents = store.extents_after(self.ino, (from, self.page), EXTENTS_MAX)?;
        let is_impossible = |extent: &&Extent| !is_possible(&core.volume, extent);
        if let Some(wrong) = extents.iter().find(is_impossible) {
            let what = format!("the extent at page {} is impossible", wrong.page);
            return Err(Error::Damaged(what));
        }
        let last = extents.last().filter(|_| extents.len() == EXTENTS_MAX);
        self.more_from = last.map(|extent| extent.page);
        self.extents = extents.into();
        Ok(())
    }

    /// Goes on with the file of the saved place, or else with the next file that has extents. Returns false if there is none.
    fn begin_next_file(&mut self, core: &Core) -> Result<bool> {
        log(self.findings.end_run());
        let from = self.ino + u64::from(self.is_begun);
        // The shards have the numbers in their order.
        let stores = core.shards.iter().map(|shard| &shard.store);
        let mut next = None;
        // A slice whose device is missing does not concern the others.
        for store in stores.filter(|store| !store.is_absent()) {
            next = store.next_file(from)?;
            if next.is_some() {
                break;
            }
        }
        let Some(ino) = next else { return Ok(false) };
        if ino != self.ino {
            self.page = 0;
        }
        self.ino = ino;
        self.is_begun = true;
        self.more_from = Some(0);
        Ok(true)
    }

    /// Reads pages of an extent, and reports those that are damaged.
    fn read(&mut self, core: &Core, extent: &Extent, first: u64, count: u32) -> Result<()> {
        let at = |page: u64| At {
            slice: extent.blocks.slice,
            block: extent.blocks.first + (page - extent.page),
        };
        let bytes = u64::from(count) * PAGE_BYTES;
        self.owed_bytes += bytes;
        self.unsaved_bytes += bytes;
        let mut sums = Rows::of(core, self.ino);
        let mut page = first;
        for run in core.volume.runs(at(first).blocks(count)) {
            let device = &core.volume.devices()[usize::from(run.device)];
            if device.is_absent() {
                page += u64::from(run.blocks);
                continue;
            }
            let part = &mut self.buffer.as_mut_slice()[..run.blocks as usize * PAGE];
            let whole = device.read_at(run.offset_bytes, part);
            for (page, block) in (page..).zip(part.chunks_exact_mut(PAGE)) {
                let is_right = whole.is_ok() && sums.fits(page, block)?;
                if is_right {
                    continue;
                }
                let examined = examine(core, self.ino, (extent.page, page), at(page), block)?;
                if let Some(fault) = examined {
                    self.found += 1;
                    log(self.findings.note(self.ino, page, fault));
                }
            }
            page += u64::from(run.blocks);
        }
        log(self.findings.end_run_before(self.ino, page));
        if let Some(line) = sums.damaged.take() {
            log(self.findings.is_new(&line).then_some(line));
        }
        if let Some(slice) = core.slices.get(usize::from(extent.blocks.slice)) {
            slice.count_scrubbed(bytes);
        }
        Ok(())
    }

    fn end(&mut self, core: &Core) {
        self.idle_since_s = Some(now_s());
        (self.ino, self.page, self.is_begun, self.found) = (0, 0, false, 0);
        self.extents.clear();
        self.more_from = None;
        log(self.findings.end_pass());
        self.save(core);
    }

    /// Puts the place into the next batch.
    fn save(&mut self, core: &Core) {
        self.unsaved_bytes = 0;
        let commits = core.commits_of(ROOT);
        let _gate = commits.enter();
        if commits.failure().is_ok() {
            commits.push(Change::PutValue(INO_NAME, self.ino));
            commits.push(Change::PutValue(PAGE_NAME, self.page));
            commits.push(Change::PutValue(FOUND_NAME, self.found));
            let (ended_s, found) = self.last.unwrap_or_default();
            commits.push(Change::PutValue(ENDED_NAME, ended_s));
            commits.push(Change::PutValue(LAST_FOUND_NAME, found));
        }
    }

    fn tell(&self, core: &Core) {
        core.scrub.tell(ScrubStatus {
            is_in_pass: self.idle_since_s.is_none(),
            found: self.found,
            last_ended_s: self.last.map(|(ended_s, _)| ended_s),
            last_found: self.last.map_or(0, |(_, found)| found),
            ..ScrubStatus::default()
        });
    }
}
