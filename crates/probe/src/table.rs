//! A report as tables for people.

use std::fmt::Write;

use crate::report::{Matrix, Report};

/// Returns a table for each kind of figure, the devices, and what was not measured. Ends with a newline.
pub fn table(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = head(report, &mut out);
    let all = &report.read_bandwidth_bytes_per_s;
    let one = &report.one_cpu;
    let stores = &report.write_stores;
    let loaded = load_text(report);
    let nanoseconds = |value: &f64| format!("{value:.1}");
    let _ = matrix(
        &mut out,
        "Reads, one CPU, GB/s",
        &one.read_bandwidth_bytes_per_s,
        gigabytes,
    );
    let _ = matrix(
        &mut out,
        "Reads, all CPUs of the node, GB/s",
        all,
        gigabytes,
    );
    let title = format!("Writes ({stores}), one CPU, GB/s");
    let _ = matrix(
        &mut out,
        &title,
        &one.write_bandwidth_bytes_per_s,
        gigabytes,
    );
    let title = format!("Writes ({stores}), all CPUs of the node, GB/s");
    let _ = matrix(
        &mut out,
        &title,
        &report.write_bandwidth_bytes_per_s,
        gigabytes,
    );
    let _ = matrix(
        &mut out,
        "Latency, ns",
        &report.latency_ns.unloaded,
        nanoseconds,
    );
    let title = format!("Latency while {loaded} stream reads from the same memory, ns");
    let _ = matrix(&mut out, &title, &report.latency_ns.loaded, nanoseconds);
    if report.node_count() > 1 {
        let title = "Cost of moving a thread to another node, us";
        let microseconds = |value: &f64| format!("{:.1}", value / 1000.0);
        let _ = moves(&mut out, title, &report.migration_ns, microseconds);
    }
    for device in &report.devices {
        let home = match device.home_node {
            Some(node) => format!("home node {node}"),
            None => "home node unknown".into(),
        };
        let title = format!(
            "Sequential reads of {}, {home}, MB/s (thread on node, buffer on node)",
            device.description
        );
        let megabytes = |value: &u64| format!("{:.0}", *value as f64 / 1e6);
        let _ = matrix(&mut out, &title, &device.read_bytes_per_s, megabytes);
    }
    let _ = ends(report, &mut out);
    out
}

/// Formats a bandwidth in units of 10^9 bytes a second.
pub(crate) fn gigabytes(bytes_per_s: &u64) -> String {
    format!("{:.1}", *bytes_per_s as f64 / 1e9)
}

/// Names the CPUs that stream during the loaded latency. A row is of the CPUs of one node, and a node with one CPU leaves the streams to the CPUs of other
/// nodes. So the text names these rows if other rows have streams of their own node.
pub(crate) fn load_text(report: &Report) -> String {
    let nodes_with = |loaded_by: &str| -> Vec<String> {
        let nodes = report.topology.nodes.iter();
        let nodes = nodes.filter(|node| node.loaded_by == loaded_by);
        nodes.map(|node| node.id.to_string()).collect()
    };
    let (own, others) = (nodes_with("node"), nodes_with("others"));
    match (own.is_empty(), others.is_empty()) {
        (_, true) => "the other CPUs of the node".to_owned(),
        (true, false) => "all other CPUs".to_owned(),
        (false, false) => {
            let noun = if others.len() == 1 { "node" } else { "nodes" };
            let others = others.join(", ");
            format!("the other CPUs of the node ({noun} {others}: all other CPUs)")
        }
    }
}

fn head(report: &Report, out: &mut String) -> std::fmt::Result {
    let (topology, machine) = (&report.topology, &report.machine);
    writeln!(
        out,
        "{}, kernel {}, {}",
        machine.cpu_model, machine.kernel, report.time
    )?;
    let count = report.node_count();
    let plural = if count == 1 { "" } else { "s" };
    let quick = if report.quick { ", quick" } else { "" };
    writeln!(out, "{count} node{plural} ({}){quick}", topology.source)?;
    let measured = || topology.nodes.iter().filter(|node| node.buffer_bytes > 0);
    if let (Some(least), Some(most)) = (
        measured().map(|node| node.buffer_bytes).min(),
        measured().map(|node| node.buffer_bytes).max(),
    ) {
        let huge: u64 = measured().map(|node| node.huge_bytes).sum();
        let all: u64 = measured().map(|node| node.buffer_bytes).sum();
        let sizes = match least == most {
            true => format!("{} MiB", least >> 20),
            false => format!("{} to {} MiB", least >> 20, most >> 20),
        };
        let pages = match huge {
            0 => "on small pages, so the latency includes TLB misses".to_owned(),
            huge if huge == all => "all on huge pages".to_owned(),
            huge => format!(
                "{} % on huge pages; elsewhere the latency includes TLB misses",
                huge * 100 / all
            ),
        };
        let caches = machine.last_level_cache_bytes >> 20;
        writeln!(
            out,
            "{sizes} on each node, {pages}; a CPU has {caches} MiB of caches"
        )?;
    }
    report
        .notes
        .iter()
        .try_for_each(|note| writeln!(out, "{note}"))
}

fn ends(report: &Report, out: &mut String) -> std::fmt::Result {
    for (index, skipped) in report.skipped.iter().enumerate() {
        let line = if index == 0 { "\n" } else { "" };
        writeln!(
            out,
            "{line}Not measured: {}: {}",
            skipped.what, skipped.reason
        )?;
    }
    Ok(())
}

/// Appends a table with a row for each node that has figures, and a column for each node's memory that has.
fn matrix<T>(
    out: &mut String,
    title: &str,
    matrix: &Matrix<T>,
    text: impl Fn(&T) -> String,
) -> std::fmt::Result {
    rows(out, title, ("from", "memory"), matrix, text)
}

fn moves<T>(
    out: &mut String,
    title: &str,
    matrix: &Matrix<T>,
    text: impl Fn(&T) -> String,
) -> std::fmt::Result {
    rows(out, title, ("from", "node"), matrix, text)
}

fn rows<T>(
    out: &mut String,
    title: &str,
    (from, to): (&str, &str),
    matrix: &Matrix<T>,
    text: impl Fn(&T) -> String,
) -> std::fmt::Result {
    let count = matrix.len();
    let has_row = |row: usize| matrix[row].iter().any(Option::is_some);
    let has_column = |column: usize| matrix.iter().any(|row| row[column].is_some());
    let columns: Vec<usize> = (0..count).filter(|column| has_column(*column)).collect();
    if columns.is_empty() {
        return writeln!(out, "\n{title}: not measured");
    }
    let mut lines = vec![vec![from.to_owned()]];
    lines[0].extend(columns.iter().map(|column| format!("{to} {column}")));
    for row in (0..count).filter(|row| has_row(*row)) {
        let cell = |column: &usize| matrix[row][*column].as_ref().map_or("-".into(), &text);
        let mut line = vec![format!("node {row}")];
        line.extend(columns.iter().map(cell));
        lines.push(line);
    }
    writeln!(out, "\n{title}")?;
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max();
    let widths: Vec<usize> = (0..=columns.len()).filter_map(width).collect();
    for line in &lines {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            match column {
                0 => write!(out, "  {cell:<width$}")?,
                _ => write!(out, "  {cell:>width$}")?,
            }
        }
        out.push('\n');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::report;
    use crate::report::{DeviceRates, Skipped};
    use jericho_topology::Topology;

    #[test]
    fn the_title_of_the_loaded_latency_is_true_for_each_row() {
        let mut report = report(&Topology::from_spec("virtual:2").unwrap());
        report.topology.nodes.push(report.topology.nodes[1].clone());
        report.topology.nodes[2].id = 2;
        let mut by = |kinds: [&str; 3]| {
            for (node, kind) in report.topology.nodes.iter_mut().zip(kinds) {
                node.loaded_by = kind.to_owned();
            }
            load_text(&report)
        };
        assert_eq!(by(["node", "node", "none"]), "the other CPUs of the node");
        assert_eq!(by(["others", "others", "none"]), "all other CPUs");
        // A node with one CPU does not change what the rows of the other nodes are.
        let mixed = "the other CPUs of the node (node 1: all other CPUs)";
        assert_eq!(by(["node", "others", "none"]), mixed);
        let mixed = "the other CPUs of the node (nodes 1, 2: all other CPUs)";
        assert_eq!(by(["node", "others", "others"]), mixed);
    }

    #[test]
    fn the_tables_have_all_figures_and_what_is_missing() {
        let mut report = report(&Topology::from_spec("virtual:2").unwrap());
        report.latency_ns.loaded[0] = vec![None, None];
        report.devices.push(DeviceRates {
            name: "/dev/x".into(),
            description: "/dev/x (block device)".into(),
            size_bytes: 1 << 30,
            home_node: Some(1),
            read_bytes_per_s: vec![vec![Some(2_500_000_000), None], vec![None, None]],
        });
        report.skipped.push(Skipped {
            what: "memory of node 1".into(),
            reason: "a cause".into(),
        });
        let text = table(&report);
        for part in [
            "Example <CPU> & more, kernel 6.18, 2026-11-26T",
            "2 nodes (virtual:2)",
            "256 MiB on each node, all on huge pages; a CPU has 32 MiB of caches",
            "A note.",
            "  from    memory 0  memory 1\n  node 0      12.5       8.0\n  node 1       8.0      12.5\n",
            "Writes (non-temporal stores), all CPUs of the node, GB/s",
            "the other CPUs of the node stream",
            "ns\n  from    memory 0  memory 1\n  node 1     400.0     200.0\n",
            "  node 0       -   120.0\n",
            "Sequential reads of /dev/x (block device), home node 1, MB/s",
            "  from    memory 0\n  node 0      2500\n",
            "\n\nNot measured: memory of node 1: a cause\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        report.topology.nodes[0].huge_bytes = 0;
        assert!(table(&report).contains("50 % on huge pages"));
        report.topology.nodes[1].huge_bytes = 0;
        assert!(table(&report).contains("on small pages"));
    }
}
