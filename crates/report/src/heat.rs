//! The heat map of a probe: a table for each kind of figure, with a color for each pair of nodes.

use maud::{Markup, html};

/// Most nodes of a table. More do not fit on a page.
const NODES_MAX: usize = 64;

/// What a probe has measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// A sentence that says which report this is.
    pub name: String,
    /// Digest of its nodes.
    pub digest: String,
    /// Model of the CPU.
    pub cpu_model: String,
    /// Number of nodes.
    pub nodes: usize,
    /// Sentences about the machine and the measurement.
    pub head: Vec<String>,
    /// The figures.
    pub grids: Vec<Grid>,
}

/// Figures of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The kind of figures, with its unit.
    pub title: String,
    /// `cells[from][to]`: node of the CPUs, node of the memory. `None`: not measured.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// A figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The number.
    pub text: String,
    /// Its color.
    pub color: [u8; 3],
    /// Whether the color is dark, so that white text is legible on it.
    pub is_dark: bool,
}

/// Shows the heat map.
pub fn section(probe: &Probe) -> Markup {
    html! {
        @for sentence in &probe.head { p.soft { (sentence) } }
        div.charts {
            @for grid in &probe.grids {
                figure {
                    figcaption { (grid.title) }
                    div.scroll tabindex="0" { (table(grid)) }
                }
            }
        }
    }
}

fn table(grid: &Grid) -> Markup {
    let count = grid.cells.len().min(NODES_MAX);
    html! {
        table.heat {
            thead { tr {
                th {}
                @for to in 0..count { th scope="col" { "node " (to) } }
            } }
            tbody {
                @for (from, row) in grid.cells.iter().take(count).enumerate() {
                    tr {
                        th scope="row" { "node " (from) }
                        @for cell in row.iter().take(count) { (figure_of(cell.as_ref())) }
                    }
                }
            }
        }
        @if grid.cells.len() > count { p.soft { "Only the first " (count) " nodes are shown." } }
    }
}

fn figure_of(cell: Option<&Cell>) -> Markup {
    let Some(cell) = cell else {
        return html! { td.none { "\u{2013}" } };
    };
    let [red, green, blue] = cell.color;
    let shade = if cell.is_dark { "dark" } else { "light" };
    html! { td class=(shade) style={ "background:rgb(" (red) "," (green) "," (blue) ")" } { (cell.text) } }
}
