//! Links, the shortest ways between nodes, and which part of the bytes takes which link.
//!
//! If several ways are equally short, each carries an equal part. Real routing tables choose one way for each pair of nodes, but few
//! machines publish them.

use std::collections::VecDeque;

/// Which bytes a link carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carries {
    /// All.
    All,
    /// Accesses of CPUs.
    Cpu,
    /// Transfers of devices.
    Io,
}

/// One direction of a link between two nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Where its bytes come from.
    pub from: usize,
    /// Where they go.
    pub to: usize,
    /// What it can carry.
    pub bytes_per_s: f64,
    /// Which bytes it carries.
    pub carries: Carries,
}

/// The ways of one kind of bytes.
#[derive(Clone, Debug, Default, PartialEq)]
struct Ways {
    /// Indexes of the links that carry these bytes.
    links: Vec<usize>,
    /// `hops[from][to]`.
    hops: Vec<Vec<Option<u32>>>,
    /// `count[from][to]`: shortest ways. Counts of many ways exceed an integer, and only their ratios matter.
    count: Vec<Vec<f64>>,
}

/// The ways between all nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Routes {
    cpu: Ways,
    io: Ways,
    ends: Vec<(usize, usize)>,
}

impl Routes {
    pub fn new(nodes: usize, links: &[Link]) -> Routes {
        let carriers = |wanted| {
            let is_carrier = |link: &Link| link.carries == Carries::All || link.carries == wanted;
            let links = links.iter().enumerate();
            links
                .filter(|(_, l)| is_carrier(l))
                .map(|(i, _)| i)
                .collect()
        };
        let ends: Vec<_> = links.iter().map(|link| (link.from, link.to)).collect();
        Routes {
            cpu: Ways::new(nodes, carriers(Carries::Cpu), &ends),
            io: Ways::new(nodes, carriers(Carries::Io), &ends),
            ends,
        }
    }

    fn ways(&self, carries: Carries) -> &Ways {
        match carries {
            Carries::Io => &self.io,
            Carries::Cpu | Carries::All => &self.cpu,
        }
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.cpu.hops.len()
    }

    /// Returns how many links bytes pass from one node to another. `None`: no way leads there.
    pub fn hops(&self, carries: Carries, from: usize, to: usize) -> Option<u32> {
        self.ways(carries).hops[from][to]
    }

    /// Returns each link that bytes pass from one node to another, and the part of the bytes that passes it.
    pub fn parts(&self, carries: Carries, from: usize, to: usize) -> Vec<(usize, f64)> {
        let ways = self.ways(carries);
        let Some(all) = ways.hops[from][to].filter(|hops| *hops > 0) else {
            return Vec::new();
        };
        let part = |link: &usize| {
            let (a, b) = self.ends[*link];
            let hops = ways.hops[from][a]? + 1 + ways.hops[b][to]?;
            let part = ways.count[from][a] * ways.count[b][to] / ways.count[from][to];
            (hops == all).then_some((*link, part))
        };
        ways.links.iter().filter_map(part).collect()
    }
}

impl Ways {
    fn new(nodes: usize, links: Vec<usize>, ends: &[(usize, usize)]) -> Ways {
        let (hops, count) = (0..nodes)
            .map(|from| search(nodes, from, &links, ends))
            .unzip();
        Ways { links, hops, count }
    }
}

/// Breadth-first search: the hops to each node, and the number of shortest ways.
fn search(
    nodes: usize,
    from: usize,
    links: &[usize],
    ends: &[(usize, usize)],
) -> (Vec<Option<u32>>, Vec<f64>) {
    let (mut hops, mut count) = (vec![None; nodes], vec![0.0; nodes]);
    hops[from] = Some(0);
    count[from] = 1.0;
    let mut ahead = VecDeque::from([(from, 0)]);
    while let Some((node, far)) = ahead.pop_front() {
        for link in links.iter().filter(|link| ends[**link].0 == node) {
            let next = ends[*link].1;
            if hops[next].is_none() {
                hops[next] = Some(far + 1);
                ahead.push_back((next, far + 1));
            }
            if hops[next] == Some(far + 1) {
                count[next] += count[node];
            }
        }
    }
    (hops, count)
}
