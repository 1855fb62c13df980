//! Chooses the spill ranges that slices give back, and the node of each range that they take. The functions are pure.
//!
//! A node is *low* below a sixteenth of its memory, and has *plenty* from an eighth on. A slice takes memory of another node only if
//! that node has plenty afterwards. Slices give back enough to a low node for it to have plenty. The gap between the two limits keeps a range from leaving
//! right after it was taken. On its own node, a slice may go down to three thirty-seconds.

use std::cmp::Reverse;

use jericho_format::PAGE_BYTES;
use jericho_shm::SPILL_FRAMES;

/// Bytes of a range. The last range of a slice may have fewer.
pub(super) const RANGE_BYTES: u64 = SPILL_FRAMES as u64 * PAGE_BYTES;
/// Most ranges that a slice takes, or that are given back because a slice wants them, at once: 32 MiB.
pub(super) const AT_ONCE: usize = 16;

/// Returns the bytes below which a node, or a control group, with this much memory is low.
pub(super) fn low_bytes(total_bytes: u64) -> u64 {
    total_bytes / 16
}

/// The memory of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeView {
    /// All memory.
    pub total_bytes: u64,
    /// Memory that can be had now.
    pub available_bytes: u64,
    /// The node has memory of its own.
    pub may_lend: bool,
    /// The kernel has lately taken memory of another node instead: the node has cached files and no free memory.
    pub is_refusing: bool,
    /// Whether slices may come home to the node. False in the pause after the node has refused memory to a slice that is at home there.
    pub may_call_home: bool,
}

impl NodeView {
    /// Returns the bytes below which memory is given back to the node.
    pub fn low_bytes(&self) -> u64 {
        low_bytes(self.total_bytes)
    }

    /// Returns the bytes that a node keeps when it lends memory.
    fn plenty_bytes(&self) -> u64 {
        self.total_bytes / 8
    }

    /// Returns the bytes that a node keeps when it gives memory to its own slices.
    fn own_bytes(&self) -> u64 {
        self.total_bytes / 32 * 3
    }

    fn has_beyond(&self, kept_bytes: u64) -> bool {
        !self.is_refusing && self.available_bytes >= kept_bytes + RANGE_BYTES
    }
}

/// A spill range with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// The node whose memory it has.
    pub node: usize,
    /// It is being given back.
    pub is_leaving: bool,
    /// Memory that it has: less and less, while it is being given back.
    pub bytes: u64,
}

/// A slice.
#[derive(Clone, Debug)]
pub(super) struct SliceView {
    /// Its home node.
    pub home: usize,
    /// It has needed frames since the last round.
    pub wants: bool,
    /// Its range that it gives back to take memory at home for it. It takes this memory also without a need.
    pub comes_home: Option<usize>,
    /// Ranges that it has taken in this round, or in the last one if this round goes on with that.
    pub taken: usize,
    /// Its spill ranges; `None` without memory.
    pub ranges: Vec<Option<Held>>,
}

impl SliceView {
    /// Returns the range for which the slice takes memory next.
    fn next_range(&self) -> Option<usize> {
        if self.wants {
            return self.ranges.iter().position(Option::is_none);
        }
        self.comes_home
            .filter(|range| self.ranges[*range].is_none())
    }
}

/// What a round sees.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// By number.
    pub nodes: Vec<NodeView>,
    /// Bytes that slices can still allocate on all nodes together. A control group can allow fewer than the nodes have available.
    pub shared_available_bytes: u64,
    /// The slices.
    pub slices: Vec<SliceView>,
    /// `distances[from][to]`.
    pub distances: Vec<Vec<u32>>,
}

/// A range of a slice: the slice's place in the view, and the number of the range.
pub(super) type Place = (usize, usize);

impl View {
    /// Returns the ranges that have memory of a node, each with its place.
    fn held(&self, node: usize) -> impl Iterator<Item = (Place, Held)> + '_ {
        let slices = self.slices.iter().enumerate();
        let ranges = slices.flat_map(|(slice, view)| {
            let ranges = view.ranges.iter().enumerate();
            ranges.filter_map(move |(range, held)| Some(((slice, range), (*held)?)))
        });
        ranges.filter(move |(_, held)| held.node == node)
    }

    /// Returns how much of a node's memory slices of other nodes hold.
    fn lent_bytes(&self, node: usize) -> u64 {
        let held = self.held(node);
        let lent = held.filter(|((slice, _), _)| self.slices[*slice].home != node);
        lent.map(|(_, held)| held.bytes).sum()
    }

    /// Returns the ranges to give back.
    pub fn to_give_back(&self) -> Vec<Place> {
        let nodes = 0..self.nodes.len();
        let mut places: Vec<Place> = nodes.flat_map(|node| self.of_node(node)).collect();
        let slices = 0..self.slices.len();
        places.extend(slices.filter_map(|slice| self.to_bring_home(slice)));
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Returns the ranges with memory of a node that the node needs for itself, or for its own slices.
    fn of_node(&self, node: usize) -> Vec<Place> {
        let view = &self.nodes[node];
        let is_low = view.available_bytes < view.low_bytes();
        let (wanted_bytes, of_own) = if is_low {
            (view.plenty_bytes() - view.available_bytes, true)
        } else {
            (self.missing_at_home(node), false)
        };
        if wanted_bytes == 0 {
            return vec![];
        }
        let distance = |slice: usize| self.distances[self.slices[slice].home][node];
        let is_own = |slice: usize| self.slices[slice].home == node;
        // Leaving ranges will free these bytes. A range counts only with the memory that it still has, because a program may keep one page of it for long.
        let leaving = self.held(node).filter(|(_, held)| held.is_leaving);
        let coming_bytes: u64 = leaving.map(|(_, held)| held.bytes).sum();
        let wanted = wanted_bytes.saturating_sub(coming_bytes);
        let mut places: Vec<Place> = self
            .held(node)
            .filter(|((slice, _), held)| !held.is_leaving && (of_own || !is_own(*slice)))
            .map(|(place, _)| place)
            .collect();
        // The farthest slices give memory back first, and the node's own slices last.
        places.sort_by_key(|(slice, range)| (is_own(*slice), Reverse((distance(*slice), *range))));
        places.truncate(wanted.div_ceil(RANGE_BYTES) as usize);
        places
    }

    /// Returns the bytes that slices of other nodes must give back to a node, so that the slices at home there can take the ranges that they want (at most
    /// [`AT_ONCE`]). Returns 0 if one of these slices could not take even one range after all other slices had given back all memory of the node, or
    /// while the node refuses memory.
    fn missing_at_home(&self, node: usize) -> u64 {
        if self.nodes[node].is_refusing {
            return 0;
        }
        let own = self.slices.iter().filter(|slice| slice.home == node);
        let ranges = own.filter(|slice| slice.wants).flat_map(|slice| {
            let free = slice.ranges.iter().filter(|range| range.is_none());
            free.take(AT_ONCE.saturating_sub(slice.taken))
        });
        let wanted = ranges.take(AT_ONCE).count() as u64;
        let view = &self.nodes[node];
        let reachable_bytes = view.available_bytes + self.lent_bytes(node);
        if wanted == 0 || reachable_bytes < view.own_bytes() + RANGE_BYTES {
            return 0;
        }
        let needed_bytes = view.own_bytes() + wanted * RANGE_BYTES;
        needed_bytes.saturating_sub(view.available_bytes)
    }

    /// Returns the farthest range of a slice, if all its ranges have memory, its home node has plenty, and slices may come home to this node. The slice
    /// gives this range back, to take memory at home.
    pub fn to_bring_home(&self, slice: usize) -> Option<Place> {
        let view = &self.slices[slice];
        let home = &self.nodes[view.home];
        let may_call = home.may_call_home && home.has_beyond(home.plenty_bytes());
        if view.ranges.contains(&None) || !may_call {
            return None;
        }
        let held = view.ranges.iter().flatten();
        if held.clone().any(|held| held.is_leaving) {
            return None;
        }
        let (range, held) = held
            .enumerate()
            .max_by_key(|(_, held)| self.distances[view.home][held.node])?;
        (held.node != view.home).then_some((slice, range))
    }

    /// Chooses memory for ranges of the slices that want it, and notes it in the view, but not in `taken`. Returns the ranges, each with its node.
    pub fn take(&mut self) -> Vec<(Place, usize)> {
        let nodes = 0..self.nodes.len();
        let mut lent_bytes: Vec<u64> = nodes.map(|node| self.lent_bytes(node)).collect();
        let mut taken = vec![];
        for slice in 0..self.slices.len() {
            for _ in self.slices[slice].taken..AT_ONCE {
                let Some((place, node)) = self.next_of(slice, &lent_bytes) else {
                    break;
                };
                if node != self.slices[slice].home {
                    lent_bytes[node] += RANGE_BYTES;
                }
                taken.push((place, node));
            }
        }
        taken
    }

    /// Chooses memory for one range of a slice.
    fn next_of(&mut self, slice: usize, lent_bytes: &[u64]) -> Option<(Place, usize)> {
        let view = &self.slices[slice];
        let (home, range) = (view.home, view.next_range()?);
        let mut nodes: Vec<usize> = (0..self.nodes.len()).collect();
        nodes.sort_by_key(|node| (*node != home, self.distances[home][*node], *node));
        let node = nodes
            .into_iter()
            .find(|node| self.may_take(home, *node, lent_bytes[*node]))?;
        self.nodes[node].available_bytes -= RANGE_BYTES;
        self.shared_available_bytes -= RANGE_BYTES;
        self.slices[slice].ranges[range] = Some(Held {
            node,
            is_leaving: false,
            bytes: RANGE_BYTES,
        });
        Some(((slice, range), node))
    }

    /// Returns whether a slice at home on `home` may take memory of a node.
    fn may_take(&self, home: usize, node: usize, lent_bytes: u64) -> bool {
        let view = &self.nodes[node];
        if !view.may_lend {
            return false;
        }
        let kept_bytes = match node == home {
            true => view.own_bytes(),
            false => view.plenty_bytes(),
        };
        view.has_beyond(kept_bytes)
            && self.shared_available_bytes >= kept_bytes + RANGE_BYTES
            && (node == home || lent_bytes + RANGE_BYTES <= view.total_bytes / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns three nodes of 16 GiB with this much available memory, and slices at home on these nodes, each with `ranges` ranges. Node 2 is far
    /// from 0 and near to 1.
    fn view(available: [u64; 3], homes: &[usize], ranges: usize) -> View {
        let node = |available_bytes| NodeView {
            total_bytes: 16 * GIB,
            available_bytes,
            may_lend: true,
            is_refusing: false,
            may_call_home: true,
        };
        let slice = |home: &usize| SliceView {
            home: *home,
            wants: true,
            comes_home: None,
            taken: 0,
            ranges: vec![None; ranges],
        };
        View {
            nodes: available.map(node).to_vec(),
            shared_available_bytes: u64::MAX,
            slices: homes.iter().map(slice).collect(),
            distances: vec![vec![10, 12, 21], vec![12, 10, 12], vec![21, 12, 10]],
        }
    }

    fn nodes_of(view: &View, slice: usize) -> Vec<Option<usize>> {
        let ranges = view.slices[slice].ranges.iter();
        ranges.map(|held| held.map(|held| held.node)).collect()
    }

    #[test]
    fn the_nearest_node_with_plenty_lends_and_home_comes_first() {
        for (available, node) in [
            ([4 * GIB, 4 * GIB, 4 * GIB], Some(0)),
            ([GIB, 4 * GIB, 4 * GIB], Some(1)),
            ([GIB, GIB, 4 * GIB], Some(2)),
            ([GIB, 2 * GIB, 2 * GIB], None),
            // On its own node, a slice may go below an eighth.
            ([2 * GIB, 4 * GIB, 4 * GIB], Some(0)),
        ] {
            let mut view = view(available, &[0], 1);
            let taken = view.take();
            assert_eq!(taken.first().map(|(_, node)| *node), node, "{available:?}");
            assert_eq!(nodes_of(&view, 0), [node]);
            assert!(view.take().is_empty());
        }
    }

    #[test]
    fn a_slice_that_wants_nothing_takes_nothing_and_one_that_wants_much_takes_it_in_steps() {
        let mut view = view([0, 8 * GIB, 0], &[0], 40);
        view.slices[0].wants = false;
        assert!(view.take().is_empty());
        view.slices[0].wants = true;
        let counts = [view.take().len(), view.take().len(), view.take().len()];
        assert_eq!(counts, [AT_ONCE, AT_ONCE, 40 - 2 * AT_ONCE]);
    }

    #[test]
    fn a_node_lends_a_quarter_and_keeps_plenty() {
        let mut all = view([0, 16 * GIB, 0], &[0, 2], 4000);
        while !all.take().is_empty() {}
        let held = all.held(1).count() as u64 * RANGE_BYTES;
        assert_eq!(held, 4 * GIB);
        let mut few = view([0, 3 * GIB, 0], &[0], 4000);
        while !few.take().is_empty() {}
        assert_eq!(few.nodes[1].available_bytes, 2 * GIB);
        few.nodes[1].may_lend = false;
        few.nodes[1].available_bytes = 16 * GIB;
        few.slices[0].ranges = vec![None];
        assert!(few.take().is_empty(), "it has no memory of its own");
    }

    #[test]
    fn all_nodes_together_give_what_a_control_group_has() {
        const MIB: u64 = 1 << 20;
        // Each node could give what the group has left. On its own node, a slice may take more of it.
        for (at_home, elsewhere, kept) in [(128, 128, 96), (0, 160, 128)] {
            let node = |id| NodeView {
                total_bytes: GIB,
                available_bytes: MIB * if id < 4 { at_home } else { elsewhere },
                may_lend: true,
                is_refusing: false,
                may_call_home: true,
            };
            let mut view = View {
                nodes: (0..8).map(node).collect(),
                shared_available_bytes: MIB * elsewhere,
                distances: vec![vec![10; 8]; 8],
                ..view([0; 3], &[0, 1, 2, 3], 100)
            };
            let taken_bytes = view.take().len() as u64 * RANGE_BYTES;
            assert_eq!(taken_bytes, MIB * (elsewhere - kept));
            assert_eq!(view.shared_available_bytes, MIB * kept);
        }
    }

    #[test]
    fn a_low_node_gets_back_what_it_lacks_from_the_farthest_slices_first() {
        let mut view = view([0, 0, 3 * GIB], &[2, 0, 1], 8);
        // The slice at home takes first.
        view.nodes[2].available_bytes = 8 * GIB;
        view.take();
        assert_eq!(view.held(2).count(), 24);
        assert!(view.to_give_back().is_empty());
        view.nodes[2].available_bytes = GIB;
        view.slices[0].wants = false;
        assert!(view.to_give_back().is_empty(), "between low and plenty");
        view.nodes[2].available_bytes = GIB - RANGE_BYTES;
        let lacks = (GIB / RANGE_BYTES) as usize + 1;
        assert!(lacks > 24);
        assert_eq!(view.to_give_back().len(), 24, "all that there is");
        // With smaller watermarks it is a question of which.
        view.nodes[2].total_bytes = 16 * 8 * RANGE_BYTES;
        view.nodes[2].available_bytes = 6 * RANGE_BYTES;
        let given: Vec<Place> = (0..8).map(|range| (1, range)).collect();
        let given = given.into_iter().chain([(2, 6), (2, 7)]);
        assert_eq!(view.to_give_back(), given.collect::<Vec<_>>());
        for range in 0..8 {
            view.slices[1].ranges[range].as_mut().unwrap().is_leaving = true;
        }
        assert_eq!(view.to_give_back(), [(2, 6), (2, 7)]);
        // A program keeps a page of each: the others have left, and do not come once more.
        for range in 0..8 {
            view.slices[1].ranges[range].as_mut().unwrap().bytes = PAGE_BYTES;
        }
        assert_eq!(view.to_give_back().len(), 10);
    }

    #[test]
    fn a_node_gets_memory_back_for_its_own_slice() {
        let mut view = view([0, 8 * GIB, 0], &[0, 1], 20);
        view.slices[1].wants = false;
        view.take();
        let own_bytes = 3 * GIB / 2;
        view.nodes[1].available_bytes = own_bytes;
        assert!(view.to_give_back().is_empty());
        view.slices[1].wants = true;
        // As many as the slice can take. It has half of one already, and wants sixteen.
        view.nodes[1].available_bytes = own_bytes + RANGE_BYTES / 2;
        assert_eq!(view.to_give_back().len(), AT_ONCE);
        // A round that goes on with the last one.
        view.slices[1].taken = AT_ONCE - 1;
        assert_eq!(view.to_give_back().len(), 1);
        view.slices[1].taken = 0;
        view.slices[1].ranges.truncate(3);
        assert_eq!(view.to_give_back().len(), 3);
        view.slices[1].ranges.resize(20, None);
        // Sixteen ranges of others would not be enough for one range.
        view.nodes[1].available_bytes = own_bytes - 16 * RANGE_BYTES;
        assert!(view.to_give_back().is_empty());
        view.nodes[1].available_bytes = own_bytes - 14 * RANGE_BYTES;
        assert_eq!(view.to_give_back().len(), AT_ONCE);
        view.nodes[1].available_bytes = own_bytes;
        let given = view.to_give_back();
        assert_eq!(given.len(), AT_ONCE);
        // The slice at home would not get the memory.
        view.nodes[1].is_refusing = true;
        assert!(view.to_give_back().is_empty());
        view.nodes[1].available_bytes = GIB - RANGE_BYTES;
        assert!(!view.to_give_back().is_empty(), "the node itself is low");
        view.nodes[1].available_bytes = own_bytes;
        view.nodes[1].is_refusing = false;
        assert!(given.iter().all(|(slice, _)| *slice == 0));
        // The slice takes at home what there is, and the other slice does not take it again.
        for (slice, range) in given {
            view.slices[slice].ranges[range] = None;
            view.nodes[1].available_bytes += RANGE_BYTES;
        }
        let taken = view.take();
        assert!(taken.len() == AT_ONCE && taken.iter().all(|((slice, _), _)| *slice == 1));
    }

    #[test]
    fn a_range_comes_home_when_there_is_plenty() {
        let mut view = view([0, 2 * GIB + RANGE_BYTES, 8 * GIB], &[0], 3);
        view.take();
        assert_eq!(nodes_of(&view, 0), [Some(1), Some(2), Some(2)]);
        view.nodes[0].available_bytes = 4 * GIB;
        let [(0, range)] = view.to_give_back()[..] else {
            panic!("one range comes home");
        };
        assert_ne!(range, 0, "it is nearer than the others");
        view.slices[0].ranges[range].as_mut().unwrap().is_leaving = true;
        assert!(view.to_give_back().is_empty(), "one at a time");
        view.slices[0].ranges[range] = None;
        view.take();
        assert_eq!(nodes_of(&view, 0)[range], Some(0));
        // Also without a wish.
        view.slices[0].wants = false;
        let [(0, range)] = view.to_give_back()[..] else {
            panic!("one range comes home");
        };
        view.nodes[0].is_refusing = true;
        assert!(view.to_give_back().is_empty());
        view.nodes[0].is_refusing = false;
        view.nodes[0].may_call_home = false;
        assert!(view.to_give_back().is_empty());
        view.slices[0].comes_home = Some(range);
        assert!(view.take().is_empty(), "it has memory");
        view.slices[0].ranges = vec![None; 3];
        assert_eq!(view.take(), [((0, range), 0)]);
        assert!(view.take().is_empty(), "no other range");
    }

    #[test]
    fn a_node_without_free_memory_is_left_out() {
        let mut view = view([4 * GIB, 4 * GIB, 4 * GIB], &[0], 1);
        view.nodes[0].is_refusing = true;
        assert_eq!(view.take(), [((0, 0), 1)]);
    }
}
