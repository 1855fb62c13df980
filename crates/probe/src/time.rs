//! Times of reports, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const DAY_S: u64 = 86_400;

/// Returns the present time in seconds since the epoch.
pub(crate) fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Formats a time, given in seconds since the epoch, as `2026-11-26T15:37:39Z`.
pub(crate) fn text(time_s: u64) -> String {
    let (year, month, day) = date(time_s / DAY_S);
    let second = time_s % DAY_S;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns year, month and day of a number of days since the epoch. Counts years from March on, so that a leap day is the last of its year.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    // From 1 March of the year 0 to the epoch.
    let days = days + 719_468;
    let (era, day_of_era) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    let leap_days = day_of_era / 1460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap_days) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_of_the_calendar() {
        assert_eq!(text(0), "1970-01-01T00:00:00Z");
        assert_eq!(text(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(text(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(text(1_764_171_459), "2025-11-26T15:37:39Z");
        assert_eq!(text(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
