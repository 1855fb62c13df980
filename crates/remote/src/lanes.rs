//! What waits to be sent, by lane. A lane stands for a NUMA node of the initiator: for requests of threads on this node, and for channels whose network
//! interface is there.

use std::collections::VecDeque;

/// Queues, one for each lane.
#[derive(Debug)]
pub(crate) struct Lanes<T>(Vec<VecDeque<T>>);

/// The lanes from which a channel takes content: first its own, then those that are open to all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sources<'l> {
    pub own: u16,
    /// Lane -> whether it is open. Lanes beyond are not.
    pub open: &'l [bool],
}

impl Sources<'_> {
    /// Returns the lanes in the order in which the channel looks at them.
    fn lanes(self) -> impl Iterator<Item = usize> {
        let own = usize::from(self.own);
        let others = (0..self.open.len()).filter(move |&lane| lane != own && self.open[lane]);
        std::iter::once(own).chain(others)
    }
}

impl<T> Lanes<T> {
    /// Returns empty queues.
    pub fn new(count: usize) -> Lanes<T> {
        Lanes((0..count).map(|_| VecDeque::new()).collect())
    }

    /// Returns the queue of a lane. A lane that does not exist has that of the first one.
    pub fn of(&mut self, lane: u16) -> &mut VecDeque<T> {
        let lane = usize::from(lane);
        let at = if lane < self.0.len() { lane } else { 0 };
        &mut self.0[at]
    }

    /// Takes the next element of some lanes.
    pub fn pop(&mut self, from: Sources<'_>) -> Option<T> {
        from.lanes()
            .find_map(|lane| self.0.get_mut(lane)?.pop_front())
    }

    /// Returns the lane whose element `pop` would take.
    pub fn next_lane(&self, from: Sources<'_>) -> Option<u16> {
        let has = |lane: &usize| self.0.get(*lane).is_some_and(|queue| !queue.is_empty());
        from.lanes().find(has).map(|lane| lane as u16)
    }

    /// Returns the number of elements of all lanes.
    pub fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    /// Keeps the elements for which a function returns `true`.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&T) -> bool) {
        for queue in &mut self.0 {
            queue.retain(&mut is_kept);
        }
    }

    /// Removes all elements.
    pub fn clear(&mut self) {
        self.0.iter_mut().for_each(VecDeque::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_takes_from_its_own_lane_and_then_from_open_ones() {
        let mut lanes = Lanes::new(3);
        for (lane, element) in [(0, 'a'), (1, 'b'), (2, 'c'), (1, 'd'), (9, 'e')] {
            lanes.of(lane).push_back(element);
        }
        let own = Sources { own: 1, open: &[] };
        assert_eq!(lanes.next_lane(own), Some(1));
        assert_eq!((lanes.pop(own), lanes.pop(own)), (Some('b'), Some('d')));
        assert_eq!((lanes.pop(own), lanes.next_lane(own)), (None, None));
        let open = [true, false, false];
        let own = Sources {
            own: 1,
            open: &open,
        };
        assert_eq!(lanes.next_lane(own), Some(0));
        assert_eq!((lanes.pop(own), lanes.pop(own)), (Some('a'), Some('e')));
        assert_eq!((lanes.pop(own), lanes.len()), (None, 1));
    }
}
