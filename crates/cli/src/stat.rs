//! `jericho stat`.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use jericho_daemon::{ScrubStat, SliceStat, Stat};
use jericho_storage::NetworkStat;

use crate::args::StatArgs;
use crate::failure::{Context, Outcome, print, print_json};
use crate::{control, size};

const PAGE_BYTES: u64 = 4096;

pub fn run(args: &StatArgs) -> Outcome {
    let stat = control::stat(&args.dir)?;
    if args.json {
        print_json(&stat)?;
    } else {
        print(&table(&stat).context("cannot write the table")?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(stat: &Stat) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let mode = if stat.read_only {
        "read-only"
    } else {
        "read-write"
    };
    writeln!(out, "volume    {} ({})", stat.volume, stat.uuid)?;
    writeln!(out, "daemon    process {}, {mode}", stat.pid)?;
    writeln!(out, "topology  {}", stat.topology)?;
    let requests = match stat.transport.as_str() {
        "ring" => "the FUSE ring (FUSE over io_uring)",
        _ => "/dev/fuse",
    };
    writeln!(out, "requests  by {requests}")?;
    write_threads(&mut out, stat)?;
    for (index, device) in stat.devices.iter().enumerate() {
        writeln!(
            out,
            "{:<9} {device}",
            if index == 0 { "devices" } else { "" }
        )?;
    }
    for line in stat.network.iter().flat_map(network_lines) {
        writeln!(out, "{line}")?;
    }
    if let Some(scrub) = &stat.scrub {
        writeln!(out, "scrub     {}", scrub_text(scrub, now_s()))?;
    }
    writeln!(out)?;
    let mut rows = vec![
        [
            "SLICE", "NODE", "USED", "OF", "CACHED", "OF", "DIRTY", "HITS", "MISSES", "RATIO",
            "LOCAL", "EVICTED", "WRITTEN",
        ]
        .map(String::from),
    ];
    let mut total = Total::default();
    for slice in &stat.slices {
        rows.push(row(slice.id.to_string(), slice.node.to_string(), slice));
        total.add(slice);
    }
    if stat.slices.len() > 1 {
        rows.push(row("all".into(), String::new(), &total.0));
    }
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|c| rows.iter().map(|r| r[c].len()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        for (column, width) in row.iter().zip(&widths) {
            write!(out, "{column:>width$}  ")?;
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out.extend(spilled(stat));
    if !stat.clients.is_empty() {
        out.push('\n');
    }
    for client in &stat.clients {
        writeln!(
            out,
            "{} (process {}) reads{} without the kernel: {} pages local, {} remote",
            client.name,
            client.pid,
            if client.writes { " and writes" } else { "" },
            client.local,
            client.remote
        )?;
    }
    for line in refusals(stat) {
        writeln!(out, "\n{line}")?;
    }
    for line in troubles(stat) {
        writeln!(out, "\n{line}")?;
    }
    Ok(out)
}

/// Writes the lines about the migration of threads.
fn write_threads(out: &mut String, stat: &Stat) -> std::fmt::Result {
    writeln!(
        out,
        "threads   migrate to their data{}: {}; costs of moves: {}",
        if stat.with_parent {
            " with their companions"
        } else {
            ""
        },
        stat.threads,
        stat.move_costs
    )?;
    if stat.threads_away > 0 {
        writeln!(
            out,
            "          {} on other nodes than their data, because the CPUs there are busy",
            stat.threads_away
        )?;
    }
    Ok(())
}

/// Returns lines about the frames that slices have taken since the mount.
fn spilled(stat: &Stat) -> Vec<String> {
    let mut lines = Vec::new();
    for slice in &stat.slices {
        for spilled in &slice.spilled {
            lines.push(format!(
                "slice {} has {} of its cache on node {}{}\n",
                slice.id,
                size::human(spilled.frames * PAGE_BYTES),
                spilled.node,
                match spilled.node == slice.node {
                    true => ", taken since the mount",
                    false => "",
                }
            ));
        }
    }
    lines
}

/// Returns lines about the network of a device of another host.
fn network_lines(network: &NetworkStat) -> Vec<String> {
    let mut lines = Vec::new();
    for channel in &network.channels {
        let is_up = match channel.is_up {
            true => "up",
            false => "does not answer",
        };
        let node = channel.node.map(|node| format!(" (node {node})"));
        let mode = match channel.is_queueing {
            true => ", queue mode",
            false => "",
        };
        let sent_bytes = channel.local_bytes + channel.remote_bytes;
        let share = (channel.local_bytes * 100).checked_div(sent_bytes);
        let local = share.map(|percent| format!(", {percent} % for its own node"));
        lines.push(format!(
            "network   {}{}: {is_up}{mode}, round trip {} us, window {} frames, {} sent, {} lost, {}{}",
            channel.nic,
            node.unwrap_or_default(),
            channel.round_trip_us,
            channel.window_frames,
            channel.sent_frames,
            channel.lost_frames,
            size::human(sent_bytes),
            // On a host without nodes all is local.
            local.filter(|_| channel.node.is_some()).unwrap_or_default(),
        ));
    }
    if network.schedule_changes > 0 {
        let how = match network.is_spread {
            true => "all interfaces carry requests of all nodes",
            false => "each interface carries requests of its own node",
        };
        let changes = network.schedule_changes;
        lines.push(format!("          {how} now, after {changes} changes"));
    }
    for lock in &network.locks {
        lines.push(format!(
            "          lock of the {}: acquired {} times, held for {} ns, {} waits of {} us in all",
            lock.name, lock.acquisitions, lock.hold_mean_ns, lock.waits, lock.wait_us
        ));
    }
    lines
}

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Returns what is known of the reads of all data in the background.
fn scrub_text(scrub: &ScrubStat, now_s: u64) -> String {
    let last = match scrub.last_ended_s {
        Some(ended_s) => format!(
            "all data was read {} ago, {} damaged pages found",
            age(now_s.saturating_sub(ended_s)),
            scrub.last_found
        ),
        None => "all data was never read".to_owned(),
    };
    let now = match (scrub.bytes_per_s, scrub.in_pass) {
        (0, _) => "off".to_owned(),
        (rate, true) => format!(
            "reading {} a second, {} damaged pages found so far",
            size::human(rate),
            scrub.found
        ),
        (_, false) => "begins again a week after that".to_owned(),
    };
    format!("{last}; {now}")
}

/// Returns a duration in its largest whole unit.
fn age(seconds: u64) -> String {
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {unit}{plural}")
}

/// Returns a line for each kind of errors of the devices.
fn troubles(stat: &Stat) -> impl Iterator<Item = String> {
    let slices = stat.slices.iter().map(|s| &s.counters);
    let failed: u64 = slices.clone().map(|s| s.write_errors).sum();
    let damaged: u64 = slices.map(|s| s.checksum_errors).sum();
    let failed = (failed > 0)
        .then(|| format!("{failed} writes to a device FAILED; the daemon's log says which"));
    let damaged = (damaged > 0).then(|| {
        format!(
            "{damaged} reads of a page found DAMAGED data on a device; the daemon's log says where"
        )
    });
    failed.into_iter().chain(damaged)
}

/// Returns a line for each slice that takes no changes, with the reason.
pub fn refusals(stat: &Stat) -> impl Iterator<Item = String> {
    stat.slices.iter().filter_map(|slice| {
        let reason = slice.refuses_changes.as_ref()?;
        let what = match (slice.absent, slice.waits_for_host) {
            (true, _) => "is absent",
            (false, true) => "takes NO CHANGES until its host answers",
            (false, false) => "takes NO CHANGES until the next mount",
        };
        Some(format!("slice {} {what}: {reason}", slice.id))
    })
}

fn row(name: String, node: String, s: &SliceStat) -> [String; 13] {
    let counters = &s.counters;
    let (hits, misses) = (counters.hits, counters.misses);
    let lookups = hits.saturating_add(misses);
    let ratio = percent((lookups > 0).then(|| hits as f64 / lookups as f64));
    [
        name,
        node,
        size::human(s.used_bytes),
        size::human(s.capacity_bytes),
        size::human(s.resident * PAGE_BYTES),
        size::human(s.frames * PAGE_BYTES),
        size::human(s.dirty * PAGE_BYTES),
        hits.to_string(),
        misses.to_string(),
        ratio,
        percent(s.locality.share_local),
        counters.evictions.to_string(),
        size::human(counters.written_back_bytes),
    ]
}

/// Formats a share in percent; `-` for the share of nothing.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1}%", 100.0 * share))
}

/// Sums of the table's columns.
#[derive(Default)]
struct Total(SliceStat);

impl Total {
    fn add(&mut self, s: &SliceStat) {
        self.0.capacity_bytes += s.capacity_bytes;
        self.0.used_bytes += s.used_bytes;
        self.0.frames += s.frames;
        self.0.resident += s.resident;
        self.0.dirty += s.dirty;
        self.0.counters = self.0.counters.and(s.counters);
        self.0.locality = self.0.locality.and(s.locality);
    }
}

#[cfg(test)]
mod tests {
    use jericho_daemon::{Counters, Locality};

    use super::*;

    fn slice(id: u16, hits: u64, misses: u64) -> SliceStat {
        SliceStat {
            id,
            node: id,
            counters: Counters {
                hits,
                misses,
                ..Counters::default()
            },
            capacity_bytes: 1 << 30,
            ..SliceStat::default()
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_slice_and_one_for_all() {
        let stat = Stat {
            volume: "/v".into(),
            uuid: "u".into(),
            pid: 7,
            read_only: false,
            topology: "virtual:2".into(),
            transport: "ring".into(),
            build: String::new(),
            slices: vec![slice(0, 3, 1), slice(1, 0, 0)],
            nodes: Vec::new(),
            devices: vec!["file".into()],
            network: vec![],
            locality: Locality::default(),
            threads: "adaptive".into(),
            with_parent: true,
            threads_away: 0,
            move_costs: "probe of 2026-11-26T15:37:39Z".into(),
            counters: Default::default(),
            clients: Vec::new(),
            scrub: None,
        };
        let text = table(&stat).unwrap();
        let away = Stat {
            threads_away: 3,
            ..stat
        };
        let with_away = table(&away).unwrap();
        let line = with_away.lines().nth(5).unwrap_or_default();
        assert!(
            line.contains("3 on other nodes than their data"),
            "{with_away}"
        );
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[4].contains("with their companions: adaptive"));
        assert!(lines[4].ends_with("adaptive; costs of moves: probe of 2026-11-26T15:37:39Z"));
        assert!(lines[7].contains("RATIO"), "{text}");
        assert!(lines[8].contains("75.0%"), "{text}");
        assert!(lines[9].contains(" - "), "{text}");
        assert!(lines[10].trim_start().starts_with("all"), "{text}");
        assert!(lines[10].contains("2.0 GiB"), "{text}");
    }

    #[test]
    fn the_scrub_line_says_what_the_last_pass_found_and_what_is_going_on() {
        let mut scrub = ScrubStat {
            bytes_per_s: 4 << 20,
            in_pass: true,
            ..ScrubStat::default()
        };
        assert_eq!(
            scrub_text(&scrub, 1000),
            "all data was never read; reading 4.0 MiB a second, 0 damaged pages found so far"
        );
        (scrub.last_ended_s, scrub.last_found) = (Some(1000), 3);
        scrub.in_pass = false;
        assert_eq!(
            scrub_text(&scrub, 1000 + 7300),
            "all data was read 2 hours ago, 3 damaged pages found; begins again a week after that"
        );
        scrub.bytes_per_s = 0;
        assert!(scrub_text(&scrub, 1061).ends_with("1 minute ago, 3 damaged pages found; off"));
    }
}
