//! One of four links fails while transfers are in progress, and comes back.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::Result;
use crate::remote::hosts::{Host, run_words};
use crate::remote::load::{Load, drive};
use crate::remote::plan::Plan;
use crate::remote::record::{Record, spread};
use crate::remote::scaling::{HERE, LOADS, Linked, RATE, THERE};

const TABLE: &str = "failover";
/// The link that fails.
const FAILS: usize = 3;
const FAILS_AT: Duration = Duration::from_secs(2);
const BACK_AT: Duration = Duration::from_secs(6);
const END_AT: Duration = Duration::from_secs(10);
/// Transfers are counted in steps of this length.
const STEP: Duration = Duration::from_millis(50);
/// Steps over which a rate is taken that must be reached.
const STEPS: usize = 4;
/// The link that fails is used again when this share of the throughput of all links is reached. Three links carry three quarters.
const USED_AGAIN: f64 = 0.9;
/// Share of what remains that must be reached.
const SHARE: f64 = 0.9;

/// How a link fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// The interface of the target is down: that of the initiator has no carrier.
    Unplugged,
    /// Nothing passes, and the interfaces do not show it.
    Silent,
}

impl Failure {
    fn name(self) -> &'static str {
        match self {
            Failure::Unplugged => "unplugged",
            Failure::Silent => "silent",
        }
    }

    /// Lets the link fail, or puts it back.
    fn set(self, host: &Host, fails: bool) -> Result<()> {
        let there = THERE[FAILS];
        match self {
            Failure::Unplugged => {
                let state = if fails { "down" } else { "up" };
                host.run(&format!("ip link set {there} {state}"))
            }
            Failure::Silent => {
                // Frames that are longer than the burst are dropped: all.
                let queue = match fails {
                    true => "tbf rate 1gbit burst 14 latency 50ms",
                    false => RATE,
                };
                run_words(&format!(
                    "tc qdisc replace dev {} root {queue}",
                    HERE[FAILS]
                ))?;
                host.run(&format!("tc qdisc replace dev {there} root {queue}"))
            }
        }
    }
}

/// What a run shows.
#[derive(Clone, Copy, Debug, Serialize)]
struct Seen {
    /// Transfers in a second over all links.
    rate_per_s: f64,
    /// Longest time without the end of a transfer.
    pause_s: f64,
    /// Time from the failure until [`SHARE`] of what remains is reached.
    reached_after_s: Option<f64>,
    /// Share of what remains, from one second after the failure on.
    share: f64,
    /// Time from the end of the failure until the link is used.
    used_after_s: Option<f64>,
}

/// Ends of transfers in each step.
struct Steps {
    counts: Vec<u64>,
    pause: Duration,
}

impl Steps {
    /// Returns the rate between two moments.
    fn rate_per_s(&self, from: Duration, to: Duration) -> f64 {
        let at = |time: Duration| {
            ((time.as_millis() / STEP.as_millis()) as usize).min(self.counts.len())
        };
        let sum: u64 = self.counts[at(from)..at(to)].iter().sum();
        sum as f64 / (to - from).as_secs_f64()
    }

    /// Returns the time from a moment until the rate of some steps is reached, before another moment.
    fn reached_after_s(&self, from: Duration, to: Duration, rate_per_s: f64) -> Option<f64> {
        let span = STEP * STEPS as u32;
        let starts = (0..).map(|step| from + STEP * step);
        let mut starts = starts.take_while(|start| *start + span <= to);
        let start = starts.find(|start| self.rate_per_s(*start, *start + span) >= rate_per_s)?;
        Some((start + span - from).as_secs_f64())
    }

    fn seen(&self) -> Seen {
        let whole = self.rate_per_s(Duration::from_millis(500), FAILS_AT);
        let remains = whole * (HERE.len() - 1) as f64 / HERE.len() as f64;
        let second = Duration::from_secs(1);
        Seen {
            rate_per_s: whole,
            pause_s: self.pause.as_secs_f64(),
            reached_after_s: self.reached_after_s(FAILS_AT, BACK_AT, remains * SHARE),
            share: self.rate_per_s(FAILS_AT + second, BACK_AT) / remains,
            used_after_s: self.reached_after_s(BACK_AT, END_AT, whole * USED_AGAIN),
        }
    }
}

/// Runs a load while the link fails and comes back.
fn observe(linked: &Linked, load: &Load, failure: Failure) -> Result<Seen> {
    let mut client = linked.attach(HERE.len())?;
    let steps = (END_AT.as_millis() / STEP.as_millis()) as usize;
    let mut seen = Steps {
        counts: vec![0; steps],
        pause: Duration::ZERO,
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let switching = scope.spawn(|| {
            for (at, fails) in [(FAILS_AT, true), (BACK_AT, false)] {
                std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
                failure.set(&linked.host, fails)?;
            }
            Ok(())
        });
        let (mut last, mut before) = (start, 0);
        drive(&mut client, load, |done, now| {
            seen.pause = seen.pause.max(now - last);
            let step = ((now - start).as_millis() / STEP.as_millis()) as usize;
            if let Some(count) = seen.counts.get_mut(step) {
                *count += done - before;
            }
            (last, before) = (now, done);
            Ok(now - start < END_AT)
        })?;
        let switched: Result<()> = switching
            .join()
            .map_err(|_| "the thread that lets the link fail panicked")?;
        switched
    })?;
    Ok(seen.seen())
}

fn seconds(values: impl Iterator<Item = Option<f64>>) -> String {
    let all: Option<Vec<f64>> = values.collect();
    all.map_or("not in each round".into(), |values| spread(&values))
}

/// Measures the table. Returns it as Markdown.
pub fn run(plan: &Plan, record: &mut Record) -> Result<String> {
    let linked = Linked::new(plan)?;
    let mut text = format!(
        "## One of four links fails\n\nLinks as above; the link fails after {FAILS_AT:?} for {:?}. *Unplugged*: the target's interface goes down. *Silent*: all frames are dropped. \
         Three quarters of the throughput before remain: the share must be {SHARE} from one second on. The link must be used 2 s after its return: {USED_AGAIN} of the throughput before. No transfer failed.\n\n\
         | load | failure | longest pause, s | {SHARE} of what remains after, s | share of what remains, from 1 s on | used again after, s |\n|---|---|---|---|---|---|\n",
        BACK_AT - FAILS_AT
    );
    for load in &LOADS {
        for failure in [Failure::Unplugged, Failure::Silent] {
            let mut all = Vec::new();
            // A run is long: fewer are enough.
            for round in 0..plan.rounds.min(3) {
                eprintln!("{}, {}: round {}", load.name(), failure.name(), round + 1);
                let seen = observe(&linked, load, failure)?;
                let line = serde_json::json!({"table": TABLE, "row": load.name(), "failure": failure.name(), "round": round, "seen": seen});
                record.write(&line)?;
                all.push(seen);
            }
            let of = |value: fn(&Seen) -> f64| spread(&all.iter().map(value).collect::<Vec<_>>());
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | **{}** | {} |",
                load.name(),
                failure.name(),
                of(|seen| seen.pause_s),
                seconds(all.iter().map(|seen| seen.reached_after_s)),
                of(|seen| seen.share),
                seconds(all.iter().map(|seen| seen.used_after_s))
            );
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_comes_back_is_noticed() {
        let mut counts = vec![100; 200];
        // Nothing for a second, then three quarters, until half a second after the link is back.
        counts[40..60].fill(0);
        counts[60..130].fill(75);
        let steps = Steps {
            counts,
            pause: Duration::from_secs(1),
        };
        let seen = steps.seen();
        assert_eq!(seen.rate_per_s, 2000.0);
        assert_eq!(seen.share, 1.0);
        // All four steps of the rate lie after the pause; one with nothing would be too few.
        assert_eq!(seen.reached_after_s, Some(1.2));
        assert_eq!(seen.used_after_s, Some(0.65));
    }
}
