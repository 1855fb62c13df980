//! Max-min fairness: hand-computed cases, and the properties that define it, for any flows.
#![forbid(unsafe_code)]

use jericho_model::{Flow, Share, Stop, share};
use proptest::prelude::*;

fn flow(uses: &[(usize, f64)]) -> Flow {
    Flow {
        uses: uses.to_vec(),
        limit: None,
        count: 1,
    }
}

fn rates(shares: &[Share]) -> Vec<f64> {
    shares.iter().map(|share| share.rate).collect()
}

fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * a.abs().max(b.abs()).max(1e-9)
}

#[track_caller]
fn assert_rates(shares: &[Share], expected: &[f64]) {
    let found = rates(shares);
    let all = found.iter().zip(expected).all(|(a, b)| is_close(*a, *b));
    assert!(
        all && found.len() == expected.len(),
        "{found:?} instead of {expected:?}"
    );
}

#[test]
fn three_flows_over_two_links_share_as_in_the_textbook() {
    // A uses both links (10 and 4), B the first, C the second: A and C get 2 each, B the rest of the first.
    let flows = [
        flow(&[(0, 1.0), (1, 1.0)]),
        flow(&[(0, 1.0)]),
        flow(&[(1, 1.0)]),
    ];
    let shares = share(&[10.0, 4.0], &flows);
    assert_rates(&shares, &[2.0, 8.0, 2.0]);
    assert_eq!(shares[0].stop, Stop::Resource(1));
    assert_eq!(shares[1].stop, Stop::Resource(0));
}

#[test]
fn a_flow_stops_at_its_limit_and_leaves_the_rest() {
    let mut slow = flow(&[(0, 1.0)]);
    slow.limit = Some(1.0);
    let shares = share(&[10.0], &[slow, flow(&[(0, 1.0)])]);
    assert_rates(&shares, &[1.0, 9.0]);
    assert_eq!(shares[0].stop, Stop::Limit);
}

#[test]
fn a_byte_that_takes_more_of_a_resource_counts_as_more() {
    // Equal rates: r and 3r fill 8.
    assert_rates(
        &share(&[8.0], &[flow(&[(0, 1.0)]), flow(&[(0, 3.0)])]),
        &[2.0, 2.0],
    );
}

#[test]
fn many_equal_flows_are_one_entry() {
    let many = Flow {
        count: 5,
        ..flow(&[(0, 1.0)])
    };
    assert_rates(&share(&[10.0], &[many]), &[2.0]);
}

#[test]
fn a_flow_without_bounds_is_named_as_such() {
    let shares = share(&[], &[flow(&[])]);
    assert_eq!(shares[0].stop, Stop::Nothing);
    assert!(shares[0].rate.is_infinite());
}

#[test]
fn a_full_resource_stops_its_flows_at_once() {
    assert_rates(
        &share(&[0.0, 5.0], &[flow(&[(0, 1.0)]), flow(&[(1, 1.0)])]),
        &[0.0, 5.0],
    );
}

const RESOURCES: usize = 6;

fn any_flow() -> impl Strategy<Value = Flow> {
    let uses = proptest::collection::btree_map(0..RESOURCES, 0.01..10.0f64, 1..=RESOURCES);
    let limit = proptest::option::of(0.01..100.0f64);
    (uses, limit, 1u32..4).prop_map(|(uses, limit, count)| Flow {
        uses: uses.into_iter().collect(),
        limit,
        count,
    })
}

fn any_flows() -> impl Strategy<Value = (Vec<f64>, Vec<Flow>)> {
    (
        proptest::collection::vec(0.1..100.0f64, RESOURCES),
        proptest::collection::vec(any_flow(), 1..12),
    )
}

fn used(flows: &[Flow], shares: &[Share]) -> Vec<f64> {
    let mut used = vec![0.0; RESOURCES];
    for (flow, share) in flows.iter().zip(shares) {
        for (resource, by_byte) in &flow.uses {
            used[*resource] += by_byte * share.rate * f64::from(flow.count);
        }
    }
    used
}

proptest! {
    #[test]
    fn no_resource_is_over_its_capacity((capacities, flows) in any_flows()) {
        let shares = share(&capacities, &flows);
        for (used, capacity) in used(&flows, &shares).iter().zip(&capacities) {
            prop_assert!(*used <= capacity * (1.0 + 1e-6), "{} of {}", used, capacity);
        }
        for (flow, share) in flows.iter().zip(&shares) {
            prop_assert!(share.rate <= flow.limit.unwrap_or(f64::INFINITY) * (1.0 + 1e-6));
        }
    }

    /// The definition of max-min fairness: each flow is at its limit, or uses a full resource on which no other flow has a larger rate.
    #[test]
    fn a_flow_can_only_have_more_at_the_cost_of_a_smaller_one((capacities, flows) in any_flows()) {
        let shares = share(&capacities, &flows);
        let used = used(&flows, &shares);
        for (flow, own) in flows.iter().zip(&shares) {
            let at_limit = flow.limit.is_some_and(|limit| is_close(own.rate, limit));
            let is_bottleneck = |resource: usize| {
                let users = flows.iter().zip(&shares);
                let mut users = users.filter(|(f, _)| f.uses.iter().any(|(r, _)| *r == resource));
                is_close(used[resource], capacities[resource])
                    && users.all(|(_, other)| other.rate <= own.rate * (1.0 + 1e-6))
            };
            prop_assert!(at_limit || flow.uses.iter().any(|(r, _)| is_bottleneck(*r)));
        }
    }

    /// Brute force: of all ways to share, max-min fairness has the largest smallest rate, then the largest second smallest rate, and so on.
    #[test]
    fn no_other_way_to_share_is_fairer(
        capacities in proptest::collection::vec(0.1..100.0f64, RESOURCES),
        flows in proptest::collection::vec(any_flow(), 3),
    ) {
        const STEPS: u32 = 12;
        let flows: Vec<Flow> = flows.into_iter().map(|flow| Flow { count: 1, ..flow }).collect();
        let alone: Vec<f64> = flows
            .iter()
            .map(|flow| {
                let by_resource = flow.uses.iter().map(|(resource, use_)| capacities[*resource] / use_);
                by_resource.fold(flow.limit.unwrap_or(f64::INFINITY), f64::min)
            })
            .collect();
        let sorted = |mut rates: Vec<f64>| {
            rates.sort_by(f64::total_cmp);
            rates
        };
        let fair = sorted(rates(&share(&capacities, &flows)));
        for at in 0..(STEPS + 1).pow(3) {
            let step = |flow: u32| f64::from(at / (STEPS + 1).pow(flow) % (STEPS + 1)) / f64::from(STEPS);
            let other: Vec<Share> = (0..3)
                .map(|flow| Share { rate: step(flow) * alone[flow as usize], stop: Stop::Nothing })
                .collect();
            let used = used(&flows, &other);
            if used.iter().zip(&capacities).any(|(used, capacity)| used > capacity) {
                continue;
            }
            let other = sorted(rates(&other));
            let first = fair.iter().zip(&other).find(|(a, b)| !is_close(**a, **b));
            prop_assert!(first.is_none_or(|(fair, other)| fair > other), "{:?} {:?}", fair, other);
        }
    }

    #[test]
    fn equal_flows_have_equal_rates((capacities, mut flows) in any_flows()) {
        flows.push(flows[0].clone());
        let shares = share(&capacities, &flows);
        prop_assert!(is_close(shares[0].rate, shares[flows.len() - 1].rate));
    }

    #[test]
    fn a_count_is_the_same_as_so_many_flows((capacities, flows) in any_flows()) {
        let one_by_one: Vec<Flow> = flows
            .iter()
            .flat_map(|flow| vec![Flow { count: 1, ..flow.clone() }; flow.count as usize])
            .collect();
        let shares = share(&capacities, &one_by_one);
        let mut at = 0;
        for (flow, together) in flows.iter().zip(share(&capacities, &flows)) {
            prop_assert!(is_close(shares[at].rate, together.rate));
            at += flow.count as usize;
        }
    }

    /// More of one resource never makes the worst-off flow worse. (It may cost a better-off flow something.)
    #[test]
    fn the_smallest_rate_grows_with_capacity(
        (capacities, flows) in any_flows(),
        resource in 0..RESOURCES,
        factor in 1.0..4.0f64,
    ) {
        let smallest = |capacities: &[f64]| {
            let shares = share(capacities, &flows);
            shares.iter().map(|share| share.rate).fold(f64::INFINITY, f64::min)
        };
        let mut more = capacities.clone();
        more[resource] *= factor;
        prop_assert!(smallest(&more) >= smallest(&capacities) * (1.0 - 1e-6));
    }

    /// If all resources and limits grow by a factor, so do all rates.
    #[test]
    fn rates_scale_with_all_capacities((capacities, flows) in any_flows(), factor in 0.5..4.0f64) {
        let scaled: Vec<f64> = capacities.iter().map(|c| c * factor).collect();
        let faster: Vec<Flow> = flows
            .iter()
            .map(|flow| Flow { limit: flow.limit.map(|l| l * factor), ..flow.clone() })
            .collect();
        let rates = share(&capacities, &flows);
        for (before, after) in rates.iter().zip(share(&scaled, &faster)) {
            prop_assert!(is_close(before.rate * factor, after.rate));
        }
    }
}
