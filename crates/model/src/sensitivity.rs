//! How the judged rows move when one figure of a machine is 20 % smaller or larger. It shows which figures a row depends on.

use crate::machine::Machine;
use crate::papers::JUDGEMENTS;
use crate::routes::Carries;
use crate::threads::PlacementError;

/// How one row moves with one figure.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Change {
    /// The row.
    pub id: &'static str,
    /// The figure, and its value.
    pub figure: String,
    /// The row's value with the machine as it is.
    pub model: f64,
    /// With the figure 20 % smaller.
    pub smaller: f64,
    /// With the figure 20 % larger.
    pub larger: f64,
}

/// A figure of a machine file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Figure {
    Memory,
    Thread,
    /// All links of this kind and rate.
    Links(Carries, f64),
    Devices,
}

/// Returns how each judged row moves with each figure of its machine. `machine` returns a shipped machine by name.
pub fn changes(machine: impl Fn(&str) -> Option<Machine>) -> Result<Vec<Change>, PlacementError> {
    let mut changes = Vec::new();
    for judged in JUDGEMENTS.iter().filter(|judged| judged.bounds.is_some()) {
        let Some(machine) = machine(judged.machine) else {
            continue;
        };
        let model = (judged.value)(&machine)?;
        for figure in figures(&machine) {
            changes.push(Change {
                id: judged.id,
                figure: name(figure),
                model,
                smaller: (judged.value)(&scaled(&machine, figure, 0.8))?,
                larger: (judged.value)(&scaled(&machine, figure, 1.2))?,
            });
        }
    }
    Ok(changes)
}

fn figures(machine: &Machine) -> Vec<Figure> {
    let mut figures = vec![Figure::Memory, Figure::Thread];
    for link in &machine.links {
        let links = Figure::Links(link.carries, link.bytes_per_s);
        if !figures.contains(&links) {
            figures.push(links);
        }
    }
    if !machine.devices.is_empty() {
        figures.push(Figure::Devices);
    }
    figures
}

fn name(figure: Figure) -> String {
    match figure {
        Figure::Memory => "memory".to_owned(),
        Figure::Thread => "rate of a thread".to_owned(),
        Figure::Devices => "devices".to_owned(),
        Figure::Links(carries, rate) => {
            let kind = match carries {
                Carries::Io => "I/O links",
                Carries::Cpu | Carries::All => "links",
            };
            format!("{kind} of {:.2} GB/s", rate / 1e9)
        }
    }
}

fn scaled(machine: &Machine, figure: Figure, factor: f64) -> Machine {
    let mut machine = machine.clone();
    match figure {
        Figure::Memory => {
            for node in &mut machine.nodes {
                node.read_bytes_per_s *= factor;
                node.write_bytes_per_s *= factor;
            }
        }
        Figure::Thread => {
            for rate in machine.copy.iter_mut().flatten().flatten() {
                *rate *= factor;
            }
        }
        Figure::Links(carries, rate) => {
            for link in &mut machine.links {
                if link.carries == carries && link.bytes_per_s == rate {
                    link.bytes_per_s *= factor;
                }
            }
        }
        Figure::Devices => {
            for device in &mut machine.devices {
                device.read_bytes_per_s *= factor;
                device.write_bytes_per_s *= factor;
            }
        }
    }
    machine
}
