//! `jericho top`: the current activity of a mounted volume, on a terminal or as lines.
//!
//! All numbers come from the counters of `jericho stat`, polled repeatedly. Rates and shares are those of the time between two
//! answers. The first view has no earlier answer, so its shares are those since the mount.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use jericho_daemon::{ClientStat, Locality, SliceStat, Stat};
use jericho_storage::ChannelStat;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Table};

use crate::args::TopArgs;
use crate::failure::{Context, Failure, Outcome, print};
use crate::stat::percent;
use crate::{control, size};

const PAGE_BYTES: u64 = 4096;

pub fn run(args: &TopArgs) -> Outcome {
    let mut source = Source::new(&args.dir);
    if args.once {
        print(&source.next()?.to_text())?;
    } else if std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
        on_terminal(&mut source, args.interval)?;
    } else {
        as_lines(&mut source, args.interval)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one view for each interval, until the reader is gone or the mount has ended.
fn as_lines(source: &mut Source, interval: Duration) -> Result<(), Failure> {
    loop {
        let text = source.next()?.to_text();
        let mut out = std::io::stdout().lock();
        let written = writeln!(out, "{text}").and_then(|()| out.flush());
        match written {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("cannot write")?,
        }
        drop(out);
        std::thread::sleep(interval);
    }
}

fn on_terminal(source: &mut Source, interval: Duration) -> Result<(), Failure> {
    // Polls once before the screen is taken, so that an error about a wrong directory appears on the normal screen.
    let mut view = source.next()?;
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let outcome = loop {
        if let Err(e) = terminal.draw(|frame| view.draw(frame)) {
            break Err(Failure::new(format!("cannot draw: {e}")));
        }
        match wait_for_key(interval) {
            Ok(true) => break Ok(()),
            Ok(false) => {}
            Err(e) => break Err(Failure::new(format!("cannot read the keyboard: {e}"))),
        }
        match source.next() {
            Ok(next) => view = next,
            Err(failure) => break Err(failure),
        }
    };
    ratatui::restore();
    outcome
}

/// Waits for the interval. Returns true when the user wants to leave.
fn wait_for_key(interval: Duration) -> std::io::Result<bool> {
    let end = Instant::now() + interval;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if !event::poll(left)? {
            return Ok(false);
        }
        match event::read()? {
            Event::Key(key) if key.kind == KeyEventKind::Press => {
                let interrupt = key.modifiers.contains(KeyModifiers::CONTROL);
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(true),
                    KeyCode::Char('c') if interrupt => return Ok(true),
                    KeyCode::Char(' ') => return Ok(false),
                    _ => {}
                }
            }
            Event::Resize(..) => return Ok(false),
            _ => {}
        }
    }
}

/// The daemon's answers. Each is shown relative to the one before.
struct Source<'a> {
    dir: &'a Path,
    last: Option<(Instant, Stat)>,
}

impl Source<'_> {
    fn new(dir: &Path) -> Source<'_> {
        Source { dir, last: None }
    }

    fn next(&mut self) -> Result<View, Failure> {
        let (now, stat) = (Instant::now(), control::stat(self.dir)?);
        let before = self.last.take();
        let view = match &before {
            Some((then, last)) if last.pid == stat.pid => {
                View::new(&stat, Some((last, now - *then)))
            }
            _ => View::new(&stat, None),
        };
        self.last = Some((now, stat));
        Ok(view)
    }
}

/// Contents of the screen: a heading and tables.
struct View {
    heading: Vec<String>,
    tables: Vec<Part>,
}

struct Part {
    title: &'static str,
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl View {
    /// Creates a view. `before` is an earlier answer of the same daemon, and its age.
    fn new(stat: &Stat, before: Option<(&Stat, Duration)>) -> View {
        let since = match before {
            Some((_, time)) => format!("the last {:.1} s", time.as_secs_f64()),
            None => "all since the mount".into(),
        };
        let last = before.map(|(last, _)| last);
        let all = locality_since(stat.locality, last.map(|last| last.locality));
        let mut heading = vec![
            format!("{}, process {}", stat.volume, stat.pid),
            format!(
                "{} local accesses in {since}; threads migrate: {}",
                percent(all.share_local),
                stat.threads
            ),
        ];
        heading.extend(crate::stat::refusals(stat));
        let tables = vec![
            View::nodes(stat, last),
            View::slices(stat, before),
            View::clients(stat, before),
            View::channels(stat, before),
        ];
        View { heading, tables }
    }

    fn nodes(stat: &Stat, last: Option<&Stat>) -> Part {
        let row = |node: &jericho_daemon::NodeStat| {
            let old = last.and_then(|l| l.nodes.iter().find(|n| n.node == node.node));
            let locality = locality_since(node.locality, old.map(|n| n.locality));
            let old = old.map_or_else(Default::default, |n| n.counters);
            let grown = node.counters.since(old);
            vec![
                node.node.to_string(),
                size::human(node.resident * PAGE_BYTES),
                size::human(node.frames * PAGE_BYTES),
                size::human(node.dirty * PAGE_BYTES),
                share(grown.hits, grown.misses),
                percent(locality.share_local),
            ]
        };
        Part {
            title: "Nodes",
            columns: vec!["NODE", "CACHED", "OF", "DIRTY", "HITS", "LOCAL"],
            rows: stat.nodes.iter().map(row).collect(),
        }
    }

    fn slices(stat: &Stat, before: Option<(&Stat, Duration)>) -> Part {
        let row = |slice: &SliceStat| {
            let old = before.and_then(|(l, _)| l.slices.iter().find(|s| s.id == slice.id));
            let locality = locality_since(slice.locality, old.map(|s| s.locality));
            let old = old.map_or_else(Default::default, |s| s.counters);
            let grown = slice.counters.since(old);
            let (hits, misses) = (grown.hits, grown.misses);
            let rate = |n: u64| before.map_or("-".into(), |(_, t)| per_second(n, t).to_string());
            let bytes = |n: u64| before.map_or("-".into(), |(_, t)| size::human(per_second(n, t)));
            vec![
                slice.id.to_string(),
                slice.node.to_string(),
                size::human(slice.resident * PAGE_BYTES),
                size::human(slice.dirty * PAGE_BYTES),
                rate(hits.saturating_add(misses)),
                share(hits, misses),
                percent(locality.share_local),
                bytes(grown.read_bytes),
                bytes(grown.written_back_bytes),
            ]
        };
        Part {
            title: "Slices",
            columns: vec![
                "SLICE",
                "NODE",
                "CACHED",
                "DIRTY",
                "PAGES/s",
                "HITS",
                "LOCAL",
                "READ/s",
                "WRITTEN/s",
            ],
            rows: stat.slices.iter().map(row).collect(),
        }
    }

    fn clients(stat: &Stat, before: Option<(&Stat, Duration)>) -> Part {
        let row = |client: &ClientStat| {
            let old = before.and_then(|(l, _)| l.clients.iter().find(|c| c.pid == client.pid));
            let since = |of: fn(&ClientStat) -> u64| of(client).saturating_sub(old.map_or(0, of));
            let bytes = since(|c| c.local_bytes).saturating_add(since(|c| c.remote_bytes));
            let locality = Locality::new(since(|c| c.local), since(|c| c.remote));
            vec![
                client.pid.to_string(),
                client.name.clone(),
                if client.writes {
                    "read and write"
                } else {
                    "read"
                }
                .into(),
                before.map_or("-".into(), |(_, t)| size::human(per_second(bytes, t))),
                percent(locality.share_local),
            ]
        };
        Part {
            title: "Programs with inline access",
            columns: vec!["PROCESS", "NAME", "ACCESS", "BYTES/s", "LOCAL"],
            rows: stat.clients.iter().map(row).collect(),
        }
    }

    fn channels(stat: &Stat, before: Option<(&Stat, Duration)>) -> Part {
        let mut rows = Vec::new();
        for (at, network) in stat.network.iter().enumerate() {
            let last = before.and_then(|(last, _)| last.network.get(at));
            let last = last.filter(|last| last.device == network.device);
            for (number, channel) in network.channels.iter().enumerate() {
                let old = last.and_then(|last| last.channels.get(number));
                let since =
                    |of: fn(&ChannelStat) -> u64| of(channel).saturating_sub(old.map_or(0, of));
                let (local, remote) = (since(|c| c.local_bytes), since(|c| c.remote_bytes));
                let rate =
                    |bytes| before.map_or("-".into(), |(_, t)| size::human(per_second(bytes, t)));
                rows.push(vec![
                    network.device.clone(),
                    channel.nic.clone(),
                    if channel.is_up { "up" } else { "no answer" }.into(),
                    channel.round_trip_us.to_string(),
                    channel.window_frames.to_string(),
                    rate(local.saturating_add(remote)),
                    since(|c| c.lost_frames).to_string(),
                    match channel.node {
                        // On a host without nodes all is local.
                        None => "-".into(),
                        Some(_) => share(local, remote),
                    },
                ]);
            }
        }
        Part {
            title: "Channels to other hosts",
            columns: vec![
                "DEVICE", "NIC", "STATE", "RTT us", "WINDOW", "SENT/s", "LOST", "LOCAL",
            ],
            rows,
        }
    }

    /// Formats the view as lines, each table with its columns aligned.
    fn to_text(&self) -> String {
        let mut out = String::new();
        for line in &self.heading {
            out.push_str(line);
            out.push('\n');
        }
        for part in self.tables.iter().filter(|part| !part.rows.is_empty()) {
            let widths = part.widths();
            let heads: Vec<String> = part.columns.iter().map(|c| c.to_string()).collect();
            for row in std::iter::once(&heads).chain(&part.rows) {
                let cells = row.iter().zip(&widths);
                let line: String = cells.map(|(c, w)| format!("{c:>w$}  ")).collect();
                out.push_str(line.trim_end());
                out.push('\n');
            }
        }
        out
    }

    fn draw(&self, frame: &mut Frame) {
        let shown: Vec<&Part> = self.tables.iter().filter(|p| !p.rows.is_empty()).collect();
        // Each table has a heading line, a border above, and an empty line below.
        let heights = shown
            .iter()
            .map(|p| Constraint::Max(p.rows.len() as u16 + 3));
        let all = std::iter::once(Constraint::Length(self.heading.len() as u16 + 1))
            .chain(heights)
            .chain([Constraint::Min(0), Constraint::Length(1)]);
        let areas = Layout::vertical(all).split(frame.area());
        let heading: Vec<Line> = self
            .heading
            .iter()
            .map(|l| Line::from(l.as_str()))
            .collect();
        frame.render_widget(Paragraph::new(heading).bold(), areas[0]);
        for (part, area) in shown.iter().zip(&areas[1..]) {
            let widths = part
                .widths()
                .into_iter()
                .map(|w| Constraint::Length(w as u16));
            let right = |cells: Vec<String>| {
                Row::new(
                    cells
                        .into_iter()
                        .map(|cell| Line::from(cell).right_aligned()),
                )
            };
            let heads = part.columns.iter().map(|c| c.to_string()).collect();
            let table = Table::new(part.rows.iter().cloned().map(right), widths)
                .header(right(heads).style(Style::new().reversed()))
                .column_spacing(2)
                .block(Block::new().title(part.title));
            frame.render_widget(table, *area);
        }
        let keys = Paragraph::new("q: leave   space: now").dim();
        frame.render_widget(keys, areas[areas.len() - 1]);
    }
}

impl Part {
    fn widths(&self) -> Vec<usize> {
        let of = |at: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(at));
            let longest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            longest.max(self.columns[at].len())
        };
        (0..self.columns.len()).map(of).collect()
    }
}

fn locality_since(now: Locality, before: Option<Locality>) -> Locality {
    let before = before.unwrap_or_default();
    Locality::new(
        now.local.saturating_sub(before.local),
        now.remote.saturating_sub(before.remote),
    )
}

fn share(part: u64, rest: u64) -> String {
    let all = part.saturating_add(rest);
    percent((all > 0).then(|| part as f64 / all as f64))
}

fn per_second(n: u64, time: Duration) -> u64 {
    (n as f64 / time.as_secs_f64().max(0.001)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    /// Returns counters of a volume of two slices with one client. They grow with `n`.
    fn stat(n: u64) -> Stat {
        let locality = Locality::new(3 * n, n);
        let counters = jericho_daemon::Counters {
            hits: 90 * n,
            misses: 10 * n,
            read_bytes: n << 20,
            ..Default::default()
        };
        let slice = |id: u16| SliceStat {
            id,
            node: id,
            counters,
            resident: 256,
            frames: 1024,
            locality,
            ..SliceStat::default()
        };
        let node = |node| jericho_daemon::NodeStat {
            node,
            counters,
            resident: 256,
            frames: 1024,
            dirty: 1,
            lent_frames: 0,
            locality,
        };
        Stat {
            volume: "/volume".into(),
            uuid: "u".into(),
            pid: 7,
            read_only: false,
            topology: "virtual:2".into(),
            transport: "ring".into(),
            build: String::new(),
            slices: vec![slice(0), slice(1)],
            nodes: vec![node(0), node(1)],
            devices: vec!["file".into()],
            network: vec![],
            locality,
            threads: "adaptive".into(),
            with_parent: false,
            threads_away: 0,
            move_costs: String::new(),
            counters: Default::default(),
            clients: vec![ClientStat {
                pid: 42,
                name: "fio".into(),
                writes: true,
                local: 9 * n,
                remote: n,
                local_bytes: (3 * n) << 20,
                remote_bytes: n << 20,
                written_bytes: 0,
            }],
            scrub: None,
        }
    }

    #[test]
    fn rates_and_shares_are_of_the_time_between_two_answers() {
        let mut last = stat(1);
        // One of the accesses before the interval was local and three were remote; they must not count.
        last.slices[0].locality = Locality::new(1, 3);
        let view = View::new(&stat(3), Some((&last, Duration::from_secs(2))));
        assert_eq!(
            view.tables[1].rows[0],
            [
                "0", "0", "1.0 MiB", "0 B", "100", "90.0%", "100.0%", "1.0 MiB", "0 B"
            ]
        );
        assert_eq!(
            view.tables[2].rows[0],
            ["42", "fio", "read and write", "4.0 MiB", "90.0%"]
        );
        let first = View::new(&stat(3), None);
        assert_eq!(first.tables[1].rows[0][4], "-");
        // New clients, and counters that start again, must not overflow.
        last.clients.clear();
        View::new(&stat(0), Some((&stat(5), Duration::ZERO)));
        View::new(&stat(3), Some((&last, Duration::ZERO)));
    }

    #[test]
    fn the_screen_shows_nodes_slices_and_programs() {
        let view = View::new(&stat(3), Some((&stat(1), Duration::from_secs(2))));
        let mut terminal = Terminal::new(TestBackend::new(80, 22)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let text = terminal.backend().to_string();
        let lines: Vec<&str> = text
            .lines()
            .map(|line| line.trim_matches('"').trim_end())
            .filter(|line| !line.is_empty())
            .collect();
        assert_eq!(
            lines,
            [
                "/volume, process 7",
                "75.0% local accesses in the last 2.0 s; threads migrate: adaptive",
                "Nodes",
                "NODE   CACHED       OF    DIRTY   HITS  LOCAL",
                "   0  1.0 MiB  4.0 MiB  4.0 KiB  90.0%  75.0%",
                "   1  1.0 MiB  4.0 MiB  4.0 KiB  90.0%  75.0%",
                "Slices",
                "SLICE  NODE   CACHED  DIRTY  PAGES/s   HITS  LOCAL   READ/s  WRITTEN/s",
                "    0     0  1.0 MiB    0 B      100  90.0%  75.0%  1.0 MiB        0 B",
                "    1     1  1.0 MiB    0 B      100  90.0%  75.0%  1.0 MiB        0 B",
                "Programs with inline access",
                "PROCESS  NAME          ACCESS  BYTES/s  LOCAL",
                "     42   fio  read and write  4.0 MiB  90.0%",
                "q: leave   space: now",
            ]
        );
        // Draws on terminals of extreme sizes.
        for (width, height) in [(1, 1), (20, 3), (300, 5)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| view.draw(frame)).unwrap();
        }
    }
}
