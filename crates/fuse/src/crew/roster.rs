//! The threads of a crew, what each of them is doing, and how many threads are missing or too many.
//!
//! Knows no clock and starts no thread: the supervisor calls `poll` at intervals of its period, and does what the answer says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Polls in succession that must find too many threads before some may end. So a hang that comes back within a second finds the threads that it needs,
/// and does not start and end threads each time.
pub(super) const CALM_POLLS: u32 = 10;

/// The number of the request that a thread is serving, or 0. It has a cache line of its own (two, because processors fetch pairs), because its
/// thread writes it twice in each request.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct RequestCell(AtomicU64);

impl RequestCell {
    /// Notes that its thread serves a request. Numbers of successive requests differ, and none is 0.
    pub(super) fn begin(&self, request: u64) {
        // SeqCst: see `Crew::sleep_while_idle`.
        self.0.store(request, Ordering::SeqCst);
    }

    /// Notes that its thread serves no request.
    pub(super) fn end(&self) {
        // SeqCst: see `Relief`.
        self.0.store(0, Ordering::SeqCst);
    }

    fn request(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[derive(Default)]
struct Member {
    cell: Arc<RequestCell>,
    /// A thread has the cell, or is being started for it.
    is_taken: bool,
    /// The request at the last poll.
    seen: u64,
}

/// What a poll has found.
pub(super) struct Poll {
    /// Number of threads to start.
    pub(super) missing: usize,
    /// Each thread is stuck.
    pub(super) all_are_stuck: bool,
    /// No thread serves a request, and further polls would change nothing.
    pub(super) is_over: bool,
}

/// The threads of a crew.
pub(super) struct Roster {
    members: Vec<Member>,
    /// Number of threads that should not be stuck.
    regular: usize,
    most: usize,
    /// Polls in succession that found too many threads, up to `CALM_POLLS`.
    calm_polls: u32,
    surplus: usize,
}

impl Roster {
    /// Creates a roster without threads. `most`: the limit of all threads.
    pub(super) fn new(regular: usize, most: usize) -> Roster {
        Roster {
            members: Vec::new(),
            regular,
            most: most.max(regular),
            calm_polls: 0,
            surplus: 0,
        }
    }

    /// Returns the number of threads.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.members.iter().filter(|m| m.is_taken).count()
    }

    /// Returns the number of regular threads. It is less than at the start if threads have failed.
    pub(super) fn regular(&self) -> usize {
        self.regular
    }

    /// Returns the number of threads that have to end.
    pub(super) fn surplus(&self) -> usize {
        self.surplus
    }

    /// Gives a new thread the first free cell. Returns `None` when there are as many threads as there may be.
    pub(super) fn join(&mut self) -> Option<(usize, Arc<RequestCell>)> {
        let free = self.members.iter().position(|member| !member.is_taken);
        let at = free.unwrap_or(self.members.len());
        if at >= self.most {
            return None;
        }
        if at == self.members.len() {
            self.members.push(Member::default());
        }
        self.members[at].is_taken = true;
        Some((at, self.members[at].cell.clone()))
    }

    /// Frees the cell of a thread that ends.
    pub(super) fn leave(&mut self, at: usize) {
        // The next thread in the cell numbers its requests from the beginning.
        self.members[at].cell.end();
        self.members[at].seen = 0;
        self.members[at].is_taken = false;
    }

    /// Frees the cell of a thread that has ended its request, if there are too many threads and this one is not a regular one. Returns whether it
    /// did.
    ///
    /// The threads in the first `regular` cells are spread evenly over the nodes, and stay. There are enough others: if `regular + n` threads are
    /// not stuck, at least `n` of them have later cells.
    pub(super) fn release(&mut self, at: usize) -> bool {
        let is_released = self.surplus > 0 && at >= self.regular;
        if is_released {
            self.surplus -= 1;
            self.leave(at);
        }
        is_released
    }

    /// Frees the cell of a thread that has failed. It is not replaced: another thread would probably fail too.
    pub(super) fn fail(&mut self, at: usize) {
        self.leave(at);
        self.regular = self.regular.saturating_sub(1);
    }

    /// Returns whether no thread serves a request.
    pub(super) fn is_idle(&self) -> bool {
        self.members.iter().all(|member| member.cell.request() == 0)
    }

    /// Returns whether each thread serves a request.
    pub(super) fn all_serve(&self) -> bool {
        let mut taken = self.members.iter().filter(|member| member.is_taken);
        taken.all(|member| member.cell.request() != 0)
    }

    /// Polls all cells. A thread that serves the request that it served at the last poll is *stuck*.
    pub(super) fn poll(&mut self) -> Poll {
        let (mut moving, mut stuck, mut is_idle) = (0, 0, true);
        for member in self.members.iter_mut().filter(|m| m.is_taken) {
            let request = member.cell.request();
            if request != 0 && request == member.seen {
                stuck += 1;
            } else {
                moving += 1;
            }
            is_idle &= request == 0;
            member.seen = request;
        }
        self.calm_polls = match moving > self.regular {
            true => (self.calm_polls + 1).min(CALM_POLLS),
            false => 0,
        };
        let is_calm = self.calm_polls == CALM_POLLS;
        self.surplus = match is_calm {
            true => moving - self.regular,
            false => 0,
        };
        // If all are stuck, probably more requests hang. Each round takes the period twice, so doubling the threads finds threads for very many
        // requests in a few rounds.
        let wanted = match moving {
            0 => self.regular.max(stuck),
            _ => self.regular,
        };
        let missing = wanted.saturating_sub(moving);
        Poll {
            missing: missing.min(self.most.saturating_sub(moving + stuck)),
            all_are_stuck: moving == 0,
            is_over: is_idle && (moving <= self.regular || is_calm),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A roster of `regular` threads, and their cells.
    fn roster(regular: usize, most: usize) -> (Roster, Vec<Arc<RequestCell>>) {
        let mut roster = Roster::new(regular, most);
        let cells = (0..regular).map(|_| roster.join().unwrap().1).collect();
        (roster, cells)
    }

    fn join(roster: &mut Roster, cells: &mut Vec<Arc<RequestCell>>, count: usize) {
        for _ in 0..count {
            let (at, cell) = roster.join().unwrap();
            assert_eq!(at, cells.len());
            cells.push(cell);
        }
    }

    #[test]
    fn threads_that_serve_one_request_after_the_other_are_never_stuck() {
        let (mut roster, cells) = roster(4, 512);
        for request in 1..100 {
            cells.iter().for_each(|cell| cell.begin(request));
            let poll = roster.poll();
            assert_eq!((poll.missing, poll.is_over), (0, false));
            assert_eq!(roster.surplus(), 0);
        }
    }

    #[test]
    fn each_thread_that_is_stuck_is_replaced_once() {
        let (mut roster, mut cells) = roster(4, 512);
        cells[0].begin(7);
        cells[1].begin(9);
        assert_eq!(roster.poll().missing, 0);
        cells[1].end();
        assert_eq!(roster.poll().missing, 1);
        join(&mut roster, &mut cells, 1);
        cells[1].begin(10);
        assert_eq!(roster.poll().missing, 0);
        assert_eq!(roster.poll().missing, 1);
        join(&mut roster, &mut cells, 1);
        for _ in 0..50 {
            let poll = roster.poll();
            assert_eq!((poll.missing, poll.is_over), (0, false));
        }
    }

    #[test]
    fn while_all_threads_are_stuck_their_number_doubles_up_to_the_limit() {
        let (mut roster, mut cells) = roster(4, 50);
        let mut counts = vec![];
        for _ in 0..6 {
            cells.iter().for_each(|cell| cell.begin(1));
            assert_eq!(roster.poll().missing, 0);
            let missing = roster.poll().missing;
            join(&mut roster, &mut cells, missing);
            counts.push(roster.count());
        }
        assert_eq!(counts, [8, 16, 32, 50, 50, 50]);
        assert!(roster.join().is_none());
    }

    #[test]
    fn a_thread_that_could_not_be_started_is_missing_at_the_next_poll() {
        let (mut roster, cells) = roster(2, 9);
        cells.iter().for_each(|cell| cell.begin(1));
        roster.poll();
        assert_eq!(roster.poll().missing, 2);
        assert_eq!(roster.poll().missing, 2);
    }

    #[test]
    fn after_a_hang_the_further_threads_may_end_and_no_others() {
        let (mut roster, mut cells) = roster(2, 512);
        cells.iter().for_each(|cell| cell.begin(1));
        roster.poll();
        assert_eq!(roster.poll().missing, 2);
        join(&mut roster, &mut cells, 2);
        roster.poll();
        assert!(!roster.release(3), "it replaces one that hangs");
        cells.iter().for_each(|cell| cell.end());
        for _ in 1..CALM_POLLS {
            let poll = roster.poll();
            assert_eq!((poll.missing, poll.is_over), (0, false));
            assert!(!roster.release(3), "another hang may follow at once");
        }
        assert!(roster.poll().is_over);
        assert!(!roster.release(1), "a regular thread");
        assert!(roster.release(3));
        assert_eq!(roster.surplus(), 1);
        // A thread that hangs meanwhile takes the place of the one that would end.
        cells[0].begin(5);
        roster.poll();
        roster.poll();
        assert!(!roster.release(2));
        cells[0].end();
        (0..CALM_POLLS).for_each(|_| assert_eq!(roster.poll().missing, 0));
        assert!(roster.release(2));
        assert!(roster.poll().is_over);
        assert_eq!((roster.count(), roster.surplus()), (2, 0));
    }

    #[test]
    fn a_new_thread_in_the_cell_of_an_earlier_one_is_not_taken_for_it() {
        let (mut roster, cells) = roster(1, 2);
        cells[0].begin(1);
        roster.poll();
        roster.leave(0);
        let (at, cell) = roster.join().unwrap();
        assert_eq!(at, 0);
        cell.begin(1);
        assert_eq!(roster.poll().missing, 0);
        assert_eq!(roster.poll().missing, 1);
    }
}
