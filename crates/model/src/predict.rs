//! Throughput of flows on a machine, and what limits them.

use crate::fair::{Flow, Stop, share};
use crate::machine::Machine;

/// The throughput of some threads.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Prediction {
    /// How many threads there are.
    pub threads: u32,
    /// Sum of their rates.
    pub bytes_per_s: f64,
    /// What stops the threads, and how many; the most frequent first.
    pub limits: Vec<Limit>,
}

/// What stops some threads.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Limit {
    /// A resource, or `thread` for the rate of the threads themselves.
    pub what: String,
    /// How many threads.
    pub threads: u32,
}

/// Predicts the throughput of flows whose uses are indexes of the resources of `machine`.
pub(crate) fn predict(machine: &Machine, flows: &[Flow]) -> Prediction {
    let mut bytes_per_s = 0.0;
    let mut limits: Vec<Limit> = Vec::new();
    for (flow, share) in flows.iter().zip(share(&machine.capacities(), flows)) {
        bytes_per_s += share.rate * f64::from(flow.count);
        let what = match share.stop {
            Stop::Limit => "thread".to_owned(),
            Stop::Resource(index) => machine.name_of(index),
            Stop::Nothing => "nothing".to_owned(),
        };
        match limits.iter_mut().find(|limit| limit.what == what) {
            Some(limit) => limit.threads += flow.count,
            None => limits.push(Limit {
                what,
                threads: flow.count,
            }),
        }
    }
    limits.sort_by_key(|limit| std::cmp::Reverse(limit.threads));
    Prediction {
        threads: flows.iter().map(|flow| flow.count).sum(),
        bytes_per_s,
        limits,
    }
}

/// Returns the throughput alone.
pub(crate) fn throughput(machine: &Machine, flows: &[Flow]) -> f64 {
    let shares = share(&machine.capacities(), flows);
    let rates = flows.iter().zip(shares);
    rates.map(|(flow, s)| s.rate * f64::from(flow.count)).sum()
}
