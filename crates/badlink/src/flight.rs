//! Frames that are under way.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Items that arrive at given times. Items of one time arrive in the order of their start.
#[derive(Debug)]
pub struct Flight<T> {
    arrivals: BinaryHeap<Reverse<Arrival<T>>>,
    /// Number of items that have started.
    started: u64,
}

#[derive(Debug)]
struct Arrival<T> {
    time: Duration,
    order: u64,
    item: T,
}

impl<T> Arrival<T> {
    fn key(&self) -> (Duration, u64) {
        (self.time, self.order)
    }
}

impl<T> PartialEq for Arrival<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for Arrival<T> {}

impl<T> PartialOrd for Arrival<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Arrival<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl<T> Flight<T> {
    /// Returns a flight without items.
    pub fn new() -> Flight<T> {
        Flight {
            arrivals: BinaryHeap::new(),
            started: 0,
        }
    }

    /// Makes an item arrive at a time.
    pub fn start(&mut self, time: Duration, item: T) {
        self.started += 1;
        let order = self.started;
        self.arrivals.push(Reverse(Arrival { time, order, item }));
    }

    /// Returns when the next item arrives.
    pub fn next_time(&self) -> Option<Duration> {
        self.arrivals.peek().map(|Reverse(arrival)| arrival.time)
    }

    /// Takes the next item that has arrived.
    pub fn take(&mut self, now: Duration) -> Option<T> {
        self.next_time().filter(|time| *time <= now)?;
        self.arrivals.pop().map(|Reverse(arrival)| arrival.item)
    }

    /// Returns the number of items under way.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Returns whether no item is under way.
    pub fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Flight::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_arrive_at_their_time_in_the_order_of_their_start() {
        let ms = Duration::from_millis;
        let mut flight = Flight::new();
        for (time, item) in [(2, 'c'), (1, 'a'), (1, 'b')] {
            flight.start(ms(time), item);
        }
        assert_eq!((flight.len(), flight.next_time()), (3, Some(ms(1))));
        assert_eq!(flight.take(ms(0)), None);
        assert_eq!(flight.take(ms(1)), Some('a'));
        assert_eq!(flight.take(ms(1)), Some('b'));
        assert_eq!(flight.take(ms(1)), None);
        assert_eq!(flight.take(ms(9)), Some('c'));
        assert!(flight.is_empty());
    }
}
