//! A topology as a table for users.

use std::fmt::Write;

use crate::list::format_list;
use crate::{Node, Topology};

const HEADINGS: [&str; 6] = [
    "node",
    "CPUs",
    "memory",
    "kernel node",
    "threads on",
    "distances",
];

/// Returns a table with a line for each node, and a heading with the kind and the origin of the topology. Ends with a newline.
pub fn format_human(topology: &Topology) -> String {
    let count = topology.nodes.len();
    let kind = if topology.is_virtual { "virtual " } else { "" };
    let plural = if count == 1 { "" } else { "s" };
    let mut text = format!("{count} {kind}node{plural} ({})\n\n", topology.source);

    let rows: Vec<[String; 6]> = topology.nodes.iter().map(row).collect();
    let mut widths = HEADINGS.map(|heading| heading.len());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    push_line(&mut text, &HEADINGS.map(str::to_string), &widths);
    for row in &rows {
        push_line(&mut text, row, &widths);
    }
    text
}

fn row(node: &Node) -> [String; 6] {
    let threads_on = match node.is_memory_only() {
        true => format!("node {}", node.nearest_cpu_node),
        false => "itself".to_string(),
    };
    let distances: Vec<String> = node.distances.iter().map(|d| format!("{d:>3}")).collect();
    [
        node.id.to_string(),
        format_list(&node.cpus),
        format_size(node.memory_bytes),
        node.kernel_node
            .map_or("-".to_string(), |kernel_node| kernel_node.to_string()),
        threads_on,
        distances.join(" "),
    ]
}

fn push_line(text: &mut String, cells: &[String; 6], widths: &[usize; 6]) {
    let mut line = String::new();
    for (cell, &width) in cells.iter().zip(widths) {
        // Writing to a String cannot fail.
        let _ = write!(line, "{cell:<width$}  ");
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// Formats a size as `62.8 GiB`; `none` for 0.
fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    match (bytes, unit) {
        (0, _) => "none".to_string(),
        (_, 0) => format!("{bytes} B"),
        _ => format!("{size:.1} {}", UNITS[unit]),
    }
}
