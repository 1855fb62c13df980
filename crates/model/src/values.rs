//! Ratios, gains and losses that papers give, computed by the model.

use crate::demand::Demand;
use crate::fair::{Flow, share};
use crate::machine::Machine;
use crate::network::{ideal, round_robin, table_2};
use crate::placement::{Devices, Placement, flows};
use crate::predict::throughput;
use crate::threads::PlacementError;

/// Threads of the curves of the Tyche paper.
const TYCHE_THREADS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

pub(crate) fn native(local_share: f64) -> Placement {
    Placement::Native { local_share }
}

fn rate(machine: &Machine, placement: Placement, threads: u32) -> Result<f64, PlacementError> {
    Ok(throughput(machine, &flows(machine, placement, threads)?))
}

pub(crate) fn ratio(
    machine: &Machine,
    over: Placement,
    under: Placement,
    threads: u32,
) -> Result<f64, PlacementError> {
    Ok(rate(machine, over, threads)? / rate(machine, under, threads)?)
}

fn peak(machine: &Machine, placement: Placement) -> Result<f64, PlacementError> {
    let mut peak: f64 = 0.0;
    for threads in TYCHE_THREADS {
        peak = peak.max(rate(machine, placement, threads)?);
    }
    Ok(peak)
}

fn percent(ratio: f64) -> f64 {
    (ratio - 1.0) * 100.0
}

pub(crate) fn gain_of_table_2(machine: &Machine, has_storage: bool) -> Result<f64, PlacementError> {
    let peak_of = |is_ideal| {
        peak(
            machine,
            Placement::Network(table_2(is_ideal, true, has_storage)),
        )
    };
    Ok(percent(peak_of(true)? / peak_of(false)?))
}

/// *T-Numa* if `is_tyche_local`, else *No-Opt*.
pub(crate) fn gain_of_peaks(
    machine: &Machine,
    is_write: bool,
    on_first: f64,
    is_tyche_local: bool,
) -> Result<f64, PlacementError> {
    let other = round_robin(is_write, on_first, is_tyche_local);
    let best = peak(machine, Placement::Network(ideal(is_write)))?;
    Ok(percent(best / peak(machine, Placement::Network(other))?))
}

pub(crate) fn largest_gain(
    machine: &Machine,
    is_write: bool,
    on_first: f64,
    is_tyche_local: bool,
) -> Result<f64, PlacementError> {
    let other = Placement::Network(round_robin(is_write, on_first, is_tyche_local));
    let mut largest = f64::NEG_INFINITY;
    for threads in TYCHE_THREADS {
        let best = Placement::Network(ideal(is_write));
        largest = largest.max(percent(ratio(machine, best, other, threads)?));
    }
    Ok(largest)
}

pub(crate) fn loss_of_remote_transfers(machine: &Machine) -> Result<f64, PlacementError> {
    let direct = |is_transfer_remote| {
        Placement::Devices(Devices {
            is_transfer_remote,
            is_copy_remote: None,
        })
    };
    let kept = ratio(machine, direct(true), direct(false), 8)?;
    Ok(100.0 * (1.0 - kept))
}

/// zmIO reads from the devices of its node into memory there, and its CPU reads the data. mstress copies memory of its node.
pub(crate) fn loss_beside_mstress(machine: &Machine) -> Result<f64, PlacementError> {
    let nodes = 0..machine.nodes.len();
    let each = 8 / machine.nodes.len() as u32;
    let zmio = nodes.clone().map(|node| {
        let mut demand = Demand::new(machine);
        demand.transfer_in(&machine.devices_of(node), node, 1.0);
        demand.read(node, node, 1.0);
        demand.flow(each)
    });
    let mstress = nodes.map(|node| {
        let mut demand = Demand::new(machine);
        demand.copy(node, node, node, 1.0);
        demand.flow(each)
    });
    let alone: Vec<Flow> = zmio.collect();
    let both: Vec<Flow> = alone.iter().cloned().chain(mstress).collect();
    let of_zmio = |flows: &[Flow]| -> f64 {
        let shares = share(&machine.capacities(), flows);
        shares
            .iter()
            .take(alone.len())
            .map(|share| share.rate)
            .sum()
    };
    Ok(100.0 * (1.0 - of_zmio(&both) / of_zmio(&alone)))
}
