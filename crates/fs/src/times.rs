//! Times: nanoseconds since the epoch in records, `SystemTime` in the interface.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NS_PER_S: i128 = 1_000_000_000;
/// 1901-12-13, the earliest time that a record can hold. Earlier times become this one.
const MIN_NS: i128 = -(1 << 31) * NS_PER_S;
/// 2446-05-10, the latest time that a record can hold. Later times become this one.
const MAX_NS: i128 = ((1i128 << 34) - (1 << 31)) * NS_PER_S - 1;

/// Returns the current time.
pub fn now_ns() -> i128 {
    from_system(SystemTime::now())
}

/// Returns a time in nanoseconds, limited to the years 1901 to 2446.
pub fn from_system(time: SystemTime) -> i128 {
    let ns = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i128::try_from(after.as_nanos()).unwrap_or(MAX_NS),
        Err(before) => i128::try_from(before.duration().as_nanos()).map_or(MIN_NS, |ns| -ns),
    };
    ns.clamp(MIN_NS, MAX_NS)
}

/// Returns nanoseconds as a `SystemTime`.
pub fn to_system(ns: i128) -> SystemTime {
    let ns = ns.clamp(MIN_NS, MAX_NS);
    let magnitude = ns.unsigned_abs();
    let duration = Duration::new(
        (magnitude / NS_PER_S as u128) as u64,
        (magnitude % NS_PER_S as u128) as u32,
    );
    if ns < 0 {
        UNIX_EPOCH - duration
    } else {
        UNIX_EPOCH + duration
    }
}

/// Returns whether a read at `now` changes the access time under relatime: if it is not newer than the last change, or at least
/// a day old.
pub fn relatime(atime_ns: i128, mtime_ns: i128, ctime_ns: i128, now: i128) -> bool {
    atime_ns <= mtime_ns || atime_ns <= ctime_ns || now - atime_ns >= 86_400 * NS_PER_S
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_from_1901_to_2446_come_back_to_the_nanosecond() {
        for ns in [
            MIN_NS,
            MIN_NS + 1,
            -1,
            0,
            1,
            1_700_000_000_123_456_789,
            MAX_NS,
        ] {
            assert_eq!(from_system(to_system(ns)), ns);
        }
    }

    #[test]
    fn a_time_out_of_range_becomes_the_nearest_one_in_range() {
        assert_eq!(
            from_system(UNIX_EPOCH - Duration::from_secs(1 << 40)),
            MIN_NS
        );
        assert_eq!(
            from_system(UNIX_EPOCH + Duration::from_secs(1 << 40)),
            MAX_NS
        );
    }

    #[test]
    fn a_read_moves_the_access_time_after_a_change_and_once_a_day() {
        assert!(relatime(5, 5, 1, 6));
        assert!(!relatime(6, 5, 5, 7));
        assert!(relatime(6, 5, 5, 6 + 86_400 * NS_PER_S));
    }
}
