//! Commits in the thread of a caller that may block.
//!
//! A caller leaves its callback with the others (`Control::waiters`). If no thread commits, the caller leads: it takes all callbacks,
//! seals the batch, commits, and calls them. Otherwise it goes on, and the thread that leads serves its callback in the next round.
//! So a caller that commits alone wakes no other thread. The committer leads like any caller: for callers that must not block, after
//! each interval, and when a caller has led `ROUNDS_MAX` rounds.
//!
//! A thread calls callbacks when it no longer leads and holds no lock.

use jericho_metadata::errno::ESHUTDOWN;
use jericho_metadata::shard::{ShardId, ShardSet};

use super::group;
use super::seal::seal;
use super::{Commits, Control, Waiter};
use crate::core::Core;
use crate::error::{Error, Result};

/// Number of rounds that one caller leads at most, so that its own call ends under any load.
const ROUNDS_MAX: usize = 16;

/// Commits a shard's batch in the calling thread, for this waiter and all others; or leaves the waiter with the thread that is
/// committing. The calling thread may block, holds no lock of a file and not the gate. Runs callbacks of other callers.
pub fn lead(core: &Core, shard: ShardId, waiter: Waiter) {
    let commits = &core.shards.get(shard).commits;
    if let Err(waiter) = commits.leave(waiter) {
        return (waiter.done)(Err(ESHUTDOWN));
    }
    let _left = HandsOver(commits);
    for _ in 0..ROUNDS_MAX {
        match commits.begin_round() {
            Some(round) => round.run(core, shard),
            None => return,
        }
    }
}

impl Commits {
    /// Adds a waiter, without waking a thread. Returns it when the committer ends.
    fn leave(&self, waiter: Waiter) -> std::result::Result<(), Waiter> {
        let mut control = self.control.lock();
        if control.stop {
            return Err(waiter);
        }
        control.waiters.push(waiter);
        Ok(())
    }

    /// Takes the lead, if there are waiters and no thread leads.
    fn begin_round(&self) -> Option<Round<'_>> {
        let mut control = self.control.lock();
        let may_begin = !control.stop && !control.is_led && !control.waiters.is_empty();
        may_begin.then(|| self.take_round(&mut control))
    }

    /// Sleeps until there is work, then takes the lead. Returns `None` when the committer must end.
    pub(super) fn next(&self) -> Option<Round<'_>> {
        let mut control = self.control.lock();
        loop {
            if control.stop {
                return None;
            }
            let has_work = control.is_due() || !control.waiters.is_empty();
            if has_work && !control.is_led {
                return Some(self.take_round(&mut control));
            }
            // If there is work, another thread leads, and wakes the committer at its end.
            let until = if has_work { None } else { control.deadline };
            control.committer_waits = has_work;
            control.asleep = Some(until);
            #[cfg(test)]
            {
                control.sleeps += 1;
            }
            match until {
                Some(at) => drop(self.work.wait_until(&mut control, at)),
                None => self.work.wait(&mut control),
            }
            control.asleep = None;
            control.committer_waits = false;
        }
    }

    /// Takes the lead and all waiters. No thread leads.
    fn take_round(&self, control: &mut Control) -> Round<'_> {
        let is_due = control.is_due();
        let waiters = std::mem::take(&mut control.waiters);
        let commit = is_due || waiters.iter().any(|waiter| waiter.commit);
        if commit {
            self.disarm(control);
        }
        control.is_led = true;
        Round {
            commits: self,
            commit,
            waiters,
        }
    }
}

/// The lead, with the waiters of one round. When it is dropped, the next thread may lead.
pub(super) struct Round<'a> {
    commits: &'a Commits,
    commit: bool,
    waiters: Vec<Waiter>,
}

impl Round<'_> {
    /// Makes durable what the waiters wait for, and calls them. `shard` is the one that is led.
    pub fn run(mut self, core: &Core, shard: ShardId) {
        let mut refused = Vec::new();
        let result = match self.commit {
            true => {
                let mut group = seal(core, shard, &mut self.waiters);
                group.flush_for(&mut self.waiters);
                let result = group.commit();
                refused = std::mem::take(&mut group.refused);
                result
            }
            false => self.flush(core, shard, &mut refused),
        };
        let answers = Answers {
            waiters: std::mem::take(&mut self.waiters),
            result,
        };
        drop(self);
        drop(answers);
        for (waiter, error) in refused {
            (waiter.done)(Err(error));
        }
    }

    /// Makes the data of the waiters durable. Moves the waiters with data in a shard whose changes have ended to `refused`. The device may
    /// have lost this data and flush again, and the other waiters do not need the device.
    fn flush(
        &mut self,
        core: &Core,
        shard: ShardId,
        refused: &mut Vec<(Waiter, Error)>,
    ) -> Result<()> {
        let mut flush = || {
            refused.extend(group::take_lost(core, &mut self.waiters));
            let mut data = ShardSet::one(shard);
            self.waiters
                .iter()
                .for_each(|waiter| data.extend(waiter.data));
            self.commits.failure()?;
            group::flush(core, data)
        };
        // The second time without the waiters that need the failed device.
        flush().or_else(|_| flush())
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        // A panic may leave the batch half sealed, or its overlay half released.
        self.commits.fail_if_panicking();
        let mut control = self.commits.control.lock();
        control.is_led = false;
        if control.stop {
            self.commits.ended.notify_all();
        } else if control.committer_waits {
            self.commits.work.notify_one();
        }
        drop(control);
        // Only a panic leaves waiters here.
        drop(Answers {
            waiters: std::mem::take(&mut self.waiters),
            result: Err(Error::HalfDone),
        });
    }
}

/// Calls the waiters' callbacks when it is dropped. If one panics, calls the others before the panic goes on.
struct Answers {
    waiters: Vec<Waiter>,
    result: Result<()>,
}

impl Drop for Answers {
    fn drop(&mut self) {
        if self.waiters.is_empty() {
            return;
        }
        let mut rest = Answers {
            waiters: std::mem::take(&mut self.waiters),
            result: self.result.clone(),
        };
        while let Some(waiter) = rest.waiters.pop() {
            (waiter.done)(self.result.clone());
        }
    }
}

/// Wakes the committer if a caller ends its rounds, also by a panic, and leaves waiters that no thread serves.
struct HandsOver<'a>(&'a Commits);

impl Drop for HandsOver<'_> {
    fn drop(&mut self) {
        let control = self.0.control.lock();
        if !control.waiters.is_empty() && !control.is_led {
            self.0.work.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
