//! What moves of threads cost, as the caller of the mount has measured them.

use jericho_client::migration::nodes::remote_ns_of;
use jericho_format::threads::MoveCost;

/// Bytes in a window that justify a migration, if nobody has measured them. The limit is higher than for inline access: a call through the
/// kernel costs so much that the distance matters less.
pub(crate) const BYTES_MIN: u64 = 16 << 20;
/// How many times as many bytes justify a migration here as for inline access.
const TIMES_INLINE: u64 = 4;

/// Costs of moves between nodes, and where they come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveCosts {
    /// For each node of a thread, and in it for each node of the data: remote bytes of inline accesses that justify a move.
    /// [`MoveCost::Default`] where a row or a value is missing.
    pub table: Vec<Vec<MoveCost>>,
    /// How long a move takes, in nanoseconds; 0: nobody has measured it.
    pub move_ns: u32,
    /// Where they come from, for users.
    pub origin: String,
}

impl Default for MoveCosts {
    /// Returns the costs of a machine that nobody has measured.
    fn default() -> MoveCosts {
        MoveCosts {
            table: vec![],
            move_ns: 0,
            origin: "defaults".into(),
        }
    }
}

impl MoveCosts {
    /// Returns the cost of a move from one node to data on another.
    pub(crate) fn of(&self, from: usize, to: usize) -> MoveCost {
        let row = self.table.get(from);
        row.and_then(|row| row.get(to)).copied().unwrap_or_default()
    }

    /// Returns the nanoseconds that a byte on node `data`, read or written through the kernel, costs more for a thread on node `at` than for one on
    /// `data`.
    pub(crate) fn remote_ns(&self, at: usize, data: usize) -> f32 {
        match at == data {
            true => 0.0,
            false => remote_ns_of(self.of(at, data), self.move_ns) / TIMES_INLINE as f32,
        }
    }

    /// Returns the bytes of requests that justify a migration of a thread to a node, wherever it runs: a worker does not know where. Takes the
    /// largest number, and leaves out nodes from which a move never pays. Returns `u64::MAX` if it pays from none.
    pub(crate) fn bytes_min(&self, to: usize) -> u64 {
        if self.table.is_empty() {
            return BYTES_MIN;
        }
        let others = (0..self.table.len()).filter(|from| *from != to);
        let paying = others.filter_map(|from| match self.of(from, to) {
            MoveCost::Default => Some(BYTES_MIN),
            MoveCost::Bytes(bytes) => {
                let bytes = bytes.max(MoveCost::BYTES_MIN);
                Some(bytes.saturating_mul(TIMES_INLINE))
            }
            MoveCost::Never => None,
        });
        paying.max().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_measurements_the_defaults_count() {
        let costs = MoveCosts::default();
        assert_eq!(
            (costs.bytes_min(0), costs.bytes_min(7)),
            (BYTES_MIN, BYTES_MIN)
        );
        assert_eq!(costs.of(0, 1), MoveCost::Default);
        let table = vec![vec![MoveCost::Default; 2]; 2];
        let costs = MoveCosts { table, ..costs };
        assert_eq!(costs.bytes_min(1), BYTES_MIN);
    }

    #[test]
    fn the_most_distant_node_that_pays_counts() {
        let (default, never) = (MoveCost::Default, MoveCost::Never);
        let mib = |count: u64| MoveCost::Bytes(count << 20);
        let costs = MoveCosts {
            table: vec![
                vec![default, mib(2), never],
                vec![mib(1), default, never],
                vec![mib(3), never, default],
            ],
            move_ns: 80_000,
            origin: "test".into(),
        };
        assert_eq!(costs.bytes_min(0), 12 << 20);
        assert_eq!(costs.bytes_min(1), 8 << 20);
        assert_eq!(costs.bytes_min(2), u64::MAX);
        // A quarter of what it costs inline.
        assert_eq!(costs.remote_ns(1, 0), 20_000.0 / (1 << 20) as f32);
        assert_eq!((costs.remote_ns(0, 2), costs.remote_ns(1, 1)), (0.0, 0.0));
        // Few bytes make a remote byte dear, and move no thread.
        let few = MoveCosts {
            table: vec![
                vec![default, MoveCost::Bytes(1 << 10)],
                vec![never, default],
            ],
            ..costs
        };
        assert_eq!(few.bytes_min(1), 4 << 20);
        assert_eq!(few.remote_ns(0, 1), 20_000.0 / 1024.0);
    }
}
