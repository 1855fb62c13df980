//! A report as a heat map: one image with a grid of cells for each kind of figure.
//!
//! A cell has its number as text, and a color from a scale that goes from light to dark. The text is black on light cells and white on dark
//! ones. The image has a background of its own. Background and headings follow the reader's color scheme, and headings print as black.

use std::fmt::Write;

use crate::report::{Matrix, Report};
use crate::table::{gigabytes, load_text};

const CELL_WIDTH: usize = 76;
const CELL_HEIGHT: usize = 34;
const MARGIN: usize = 24;
const LABEL_WIDTH: usize = 64;
const LINE_HEIGHT: usize = 20;
const CHAR_WIDTH: usize = 8;
/// Grids side by side.
const COLUMNS: usize = 2;

/// The ends of the scale, as red, green and blue: from a good figure to a bad one.
const GOOD: [f64; 3] = [222.0, 235.0, 247.0];
const BAD: [f64; 3] = [8.0, 69.0, 148.0];
/// Luminance of a cell below which its text is white. There, white and black text have the same contrast.
const WHITE_BELOW: f64 = 0.179;

const STYLE: &str = "\
.paper{fill:#fff}\
text{font:14px system-ui,sans-serif;fill:#1a1a1a}\
.title{font-weight:600}\
.number{text-anchor:middle}\
.dark{fill:#fff}.light{fill:#000}\
.empty{fill:none;stroke:#888;stroke-dasharray:3}\
@media (prefers-color-scheme:dark){.paper{fill:#161616}text{fill:#eee}.light{fill:#000}.dark{fill:#fff}}\
@media print{.paper{fill:none}text{fill:#000}.light{fill:#000}.dark{fill:#fff}svg{print-color-adjust:exact}}";

/// Figures of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// The kind of figures, with its unit.
    pub title: String,
    /// `cells[from][to]`: node of the CPUs, node of the memory. `None`: not measured.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// A figure of a grid.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The number.
    pub text: String,
    /// How bad it is, from 0 to 1.
    badness: f64,
}

impl Cell {
    /// Returns red, green and blue of its color: darker if it is worse.
    pub fn color(&self) -> [u8; 3] {
        color(self.badness)
    }

    /// Returns whether white text is more legible on its color than black text.
    pub fn is_dark(&self) -> bool {
        luminance(self.color()) < WHITE_BELOW
    }
}

/// Returns the heat map as an SVG document.
pub fn heat_map(report: &Report) -> String {
    let (grids, head) = (grids(report), head(report));
    let count = report.node_count();
    let width_of = |text: &String| text.chars().count() * CHAR_WIDTH;
    let longest = |texts: &mut dyn Iterator<Item = &String>| texts.map(width_of).max().unwrap_or(0);
    let titles = longest(&mut grids.iter().map(|grid| &grid.title));
    let grid_width = (LABEL_WIDTH + count * CELL_WIDTH).max(titles);
    let grid_height = 2 * LINE_HEIGHT + count * CELL_HEIGHT;
    let lines = grids.len().div_ceil(COLUMNS);
    let top = MARGIN + (head.len() + 1) * LINE_HEIGHT;
    let width = MARGIN + (COLUMNS * (grid_width + MARGIN)).max(longest(&mut head.iter()) + MARGIN);
    let height = top + lines * (grid_height + MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>Bandwidth and latency between nodes</title>\n<style>{STYLE}</style>\n\
         <path class=\"paper\" d=\"M0 0H{width}V{height}H0z\"/>\n"
    );
    for (index, text) in head.iter().enumerate() {
        let class = if index == 0 { "title" } else { "plain" };
        let y = MARGIN + LINE_HEIGHT / 2 + index * LINE_HEIGHT;
        push_text(&mut out, (MARGIN, y), class, text);
    }
    for (index, grid) in grids.iter().enumerate() {
        let left = MARGIN + index % COLUMNS * (grid_width + MARGIN);
        let top = top + index / COLUMNS * (grid_height + MARGIN);
        push_grid(&mut out, grid, left, top);
    }
    out.push_str("</svg>\n");
    out
}

/// Returns the lines above the grids.
pub fn head(report: &Report) -> Vec<String> {
    let (machine, count) = (&report.machine, report.node_count());
    let plural = if count == 1 { "" } else { "s" };
    let mut lines = vec![
        format!(
            "{}, kernel {}, {}",
            machine.cpu_model, machine.kernel, report.time
        ),
        format!(
            "{count} node{plural} ({}); rows: node of the CPUs; columns: node of the memory; darker: worse",
            report.topology.source
        ),
    ];
    lines.extend(report.notes.iter().cloned());
    lines
}

/// Returns a grid for each kind of figure.
pub fn grids(report: &Report) -> Vec<Grid> {
    let one = &report.one_cpu;
    let nanoseconds = |value: &f64| format!("{value:.0}");
    let bandwidth = |title: &str, matrix: &Matrix<u64>| {
        grid(title.into(), matrix, |value| -(*value as f64), gigabytes)
    };
    let latency =
        |title: String, matrix: &Matrix<f64>| grid(title, matrix, |value| *value, nanoseconds);
    let loaded = format!("Latency while {} stream, ns", load_text(report));
    let mut grids = vec![
        bandwidth("Reads, one CPU, GB/s", &one.read_bandwidth_bytes_per_s),
        bandwidth("Reads, all CPUs, GB/s", &report.read_bandwidth_bytes_per_s),
        bandwidth("Writes, one CPU, GB/s", &one.write_bandwidth_bytes_per_s),
        bandwidth(
            "Writes, all CPUs, GB/s",
            &report.write_bandwidth_bytes_per_s,
        ),
        latency("Latency, ns".into(), &report.latency_ns.unloaded),
        latency(loaded, &report.latency_ns.loaded),
    ];
    let megabytes = |value: &u64| format!("{:.0}", *value as f64 / 1e6);
    for device in &report.devices {
        let title = format!("Reads of {}, MB/s", device.name);
        let matrix = &device.read_bytes_per_s;
        grids.push(grid(title, matrix, |value| -(*value as f64), megabytes));
    }
    grids
}

/// Makes a grid. `badness` is larger for a worse figure.
fn grid<T>(
    title: String,
    matrix: &Matrix<T>,
    badness: impl Fn(&T) -> f64,
    text: impl Fn(&T) -> String,
) -> Grid {
    let values = || matrix.iter().flatten().flatten().map(&badness);
    let (best, worst) = (
        values().fold(f64::INFINITY, f64::min),
        values().fold(f64::NEG_INFINITY, f64::max),
    );
    // Small differences are noise, and must not look like large ones: the scale spans half of the best value at least.
    let span = (worst - best).max(best.abs() / 2.0).max(f64::MIN_POSITIVE);
    let cell = |value: &Option<T>| {
        let value = value.as_ref()?;
        Some(Cell {
            text: text(value),
            badness: (badness(value) - best) / span,
        })
    };
    Grid {
        title,
        cells: matrix
            .iter()
            .map(|row| row.iter().map(cell).collect())
            .collect(),
    }
}

fn push_grid(out: &mut String, grid: &Grid, left: usize, top: usize) {
    push_text(out, (left, top), "title", &grid.title);
    let first_row = top + 2 * LINE_HEIGHT - LINE_HEIGHT / 2;
    for column in 0..grid.cells.len() {
        let x = left + LABEL_WIDTH + column * CELL_WIDTH + CELL_WIDTH / 2;
        push_text(
            out,
            (x, top + LINE_HEIGHT + 4),
            "number",
            &format!("node {column}"),
        );
    }
    for (row, cells) in grid.cells.iter().enumerate() {
        let y = first_row + row * CELL_HEIGHT;
        let middle = y + CELL_HEIGHT / 2 + 5;
        push_text(out, (left, middle), "plain", &format!("node {row}"));
        for (column, cell) in cells.iter().enumerate() {
            let x = left + LABEL_WIDTH + column * CELL_WIDTH;
            let (width, height) = (CELL_WIDTH - 2, CELL_HEIGHT - 2);
            let place = format!("x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
            let Some(cell) = cell else {
                let _ = writeln!(out, "<rect class=\"empty\" {place}/>");
                continue;
            };
            let [red, green, blue] = cell.color();
            let _ = writeln!(out, "<rect {place} fill=\"rgb({red},{green},{blue})\"/>");
            let shade = if cell.is_dark() { "dark" } else { "light" };
            let center = (x + width / 2, middle);
            push_text(out, center, &format!("number {shade}"), &cell.text);
        }
    }
}

fn color(part: f64) -> [u8; 3] {
    let part = part.clamp(0.0, 1.0);
    let mix = |(good, bad): (f64, f64)| (good + (bad - good) * part) as u8;
    [0, 1, 2].map(|at: usize| mix((GOOD[at], BAD[at])))
}

/// Returns how bright a color is, from 0 to 1.
fn luminance([red, green, blue]: [u8; 3]) -> f64 {
    let linear = |value: u8| (f64::from(value) / 255.0).powf(2.2);
    0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
}

fn push_text(out: &mut String, (x, y): (usize, usize), class: &str, text: &str) {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::report;
    use jericho_topology::Topology;

    #[test]
    fn the_heat_map_shows_each_figure_in_a_color_on_which_it_is_legible() {
        let mut report = report(&Topology::from_spec("virtual:2").unwrap());
        report.latency_ns.loaded[1][0] = None;
        let svg = heat_map(&report);
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("Example &lt;CPU&gt; &amp; more"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 6 * 4);
        assert_eq!(svg.matches("class=\"empty\"").count(), 1);
        assert!(svg.contains("prefers-color-scheme:dark") && svg.contains("@media print"));
        assert_eq!(svg.matches(">150</text>").count(), 2);
        // The worst figure of a grid is dark, with white text.
        let worst = format!("rgb({},{},{})", BAD[0], BAD[1], BAD[2]);
        assert!(svg.contains(&worst), "{svg}");
        assert!(svg.contains("class=\"number dark\""));
    }

    #[test]
    fn text_and_cell_have_enough_contrast_on_the_whole_scale() {
        for step in 0..=100 {
            let part = f64::from(step) / 100.0;
            let cell = luminance(color(part));
            let contrast = match cell < WHITE_BELOW {
                true => 1.05 / (cell + 0.05),
                false => (cell + 0.05) / 0.05,
            };
            // The Web Content Accessibility Guidelines ask for 4.5.
            assert!(contrast >= 4.5, "{part}: {contrast}");
        }
    }

    #[test]
    fn equal_figures_are_all_light() {
        let equal: Matrix<f64> = vec![vec![Some(5.0); 2]; 2];
        let grid = grid(String::new(), &equal, |value| *value, |_| String::new());
        let cells = grid.cells.iter().flatten().flatten();
        assert!(cells.into_iter().all(|cell| cell.badness == 0.0));
    }
}
