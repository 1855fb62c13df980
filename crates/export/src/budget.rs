//! Limits the requests of a connection that are in flight, and the memory of their buffers.

use parking_lot::{Condvar, Mutex};

/// Maximum number of requests of a connection in flight.
pub(crate) const REQUESTS_MAX: usize = 64;

#[derive(Debug, Default)]
struct Taken {
    requests: usize,
    bytes: usize,
}

/// The limits of a connection, and what its requests take of them.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes_max: usize,
    taken: Mutex<Taken>,
    returned: Condvar,
}

impl Budget {
    /// Creates a budget of `REQUESTS_MAX` requests and `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Budget {
        Budget {
            bytes_max,
            taken: Mutex::default(),
            returned: Condvar::new(),
        }
    }

    /// Waits until a request and a buffer of `bytes` are within the limits, and takes them. The caller asks for at most
    /// `bytes_max`; otherwise it would wait for ever.
    pub fn take(&self, bytes: usize) {
        debug_assert!(bytes <= self.bytes_max, "{bytes} bytes can never be taken");
        let mut taken = self.taken.lock();
        self.returned.wait_while(&mut taken, |taken| {
            taken.requests == REQUESTS_MAX || taken.bytes + bytes > self.bytes_max
        });
        taken.requests += 1;
        taken.bytes += bytes;
    }

    /// Returns what a request has taken.
    pub fn give_back(&self, bytes: usize) {
        let mut taken = self.taken.lock();
        taken.requests -= 1;
        taken.bytes -= bytes;
        drop(taken);
        // Only the reader of the connection waits.
        self.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_bytes_and_for_its_turn() {
        let budget = Budget::new(100);
        budget.take(60);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| budget.take(60));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!second.is_finished());
            budget.give_back(60);
            second.join().unwrap();
        });
        for _ in 1..REQUESTS_MAX {
            budget.take(0);
        }
        std::thread::scope(|scope| {
            let next = scope.spawn(|| budget.take(0));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!next.is_finished());
            budget.give_back(60);
            next.join().unwrap();
        });
    }
}
