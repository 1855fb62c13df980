//! Max-min fair sharing of resources among flows, by progressive filling.
//!
//! The rates of all flows grow together. A flow stops when it reaches its own limit, or when a resource that it uses is full; the others
//! grow on. So no resource is over its capacity, and no flow can have more without less for a flow that has as little or less.

/// What part of a resource counts as full: sums of floating-point numbers do not meet a capacity exactly.
const FULL: f64 = 1.0 - 1e-9;

/// Equal flows: for each byte per second of its rate, each of them takes some of each resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flow {
    /// Index of a resource, and what one byte takes of it. A resource is there once at most.
    pub uses: Vec<(usize, f64)>,
    /// The largest rate that one flow can have by itself, in bytes per second.
    pub limit: Option<f64>,
    /// How many flows there are of this kind.
    pub count: u32,
}

/// What stopped a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Its own limit.
    Limit,
    /// The resource with this index is full.
    Resource(usize),
    /// Nothing: the flow uses no resource and has no limit. Its rate is infinite.
    Nothing,
}

/// The rate of each flow of a kind, and what stopped it.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Bytes per second of one flow.
    pub rate: f64,
    /// What stopped it.
    pub stop: Stop,
}

/// Shares `capacities` among the flows. Capacities, uses and limits are finite and not negative; a use names a resource that exists.
pub fn share(capacities: &[f64], flows: &[Flow]) -> Vec<Share> {
    let mut shares: Vec<Option<Share>> = flows.iter().map(|_| None).collect();
    let mut used = vec![0.0; capacities.len()];
    let mut level = 0.0;
    loop {
        let active = active_uses(capacities.len(), flows, &shares);
        let Some((step, at)) = next_stop(capacities, flows, &shares, &used, &active, level) else {
            break;
        };
        level += step;
        for (used, active) in used.iter_mut().zip(&active) {
            *used += step * active;
        }
        for (flow, share) in flows.iter().zip(&mut shares) {
            if share.is_none()
                && let Some(stop) = stop_of(flow, level, at, capacities, &used)
            {
                *share = Some(Share { rate: level, stop });
            }
        }
    }
    let unbounded = Share {
        rate: f64::INFINITY,
        stop: Stop::Nothing,
    };
    shares
        .into_iter()
        .map(|share| share.unwrap_or_else(|| unbounded.clone()))
        .collect()
}

/// Returns what all flows that still grow take of each resource for one byte per second more.
fn active_uses(count: usize, flows: &[Flow], shares: &[Option<Share>]) -> Vec<f64> {
    let mut active = vec![0.0; count];
    for (flow, _) in flows.iter().zip(shares).filter(|(_, s)| s.is_none()) {
        for (resource, use_) in &flow.uses {
            active[*resource] += use_ * f64::from(flow.count);
        }
    }
    active
}

/// Returns how far the rates can grow until a flow stops, and what stops it. `None`: all flows that are left grow without end.
fn next_stop(
    capacities: &[f64],
    flows: &[Flow],
    shares: &[Option<Share>],
    used: &[f64],
    active: &[f64],
    level: f64,
) -> Option<(f64, Stop)> {
    let by_resource = active
        .iter()
        .enumerate()
        .filter(|(_, active)| **active > 0.0)
        .map(|(i, active)| {
            (
                (capacities[i] - used[i]).max(0.0) / active,
                Stop::Resource(i),
            )
        });
    let by_limit = flows
        .iter()
        .zip(shares)
        .filter(|(_, share)| share.is_none())
        .filter_map(|(flow, _)| Some(((flow.limit? - level).max(0.0), Stop::Limit)));
    by_resource
        .chain(by_limit)
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
}

/// Returns what stops a flow at this level, if anything does. `at` is what stopped the growth: it counts as reached, whatever rounding does.
fn stop_of(flow: &Flow, level: f64, at: Stop, capacities: &[f64], used: &[f64]) -> Option<Stop> {
    if flow.limit.is_some_and(|limit| level >= limit * FULL) {
        return Some(Stop::Limit);
    }
    flow.uses
        .iter()
        .filter(|(_, use_)| *use_ > 0.0)
        .find(|(i, _)| at == Stop::Resource(*i) || used[*i] >= capacities[*i] * FULL)
        .map(|(i, _)| Stop::Resource(*i))
}
