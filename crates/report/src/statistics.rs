//! Medians, and how sure a ratio of two sets of runs is.
//!
//! The interval is a rank method: that of Hodges and Lehmann (*Estimates of location based on rank tests*, Annals of Mathematical
//! Statistics 34, 1963) on the logarithms, which inverts the test of Mann and Whitney (*On a test of whether one of two random variables is
//! stochastically larger than the other*, the same, 18, 1947). All ratios of a run of B to a run of A are put in order. The estimate is their
//! median, and the interval goes from the k-th smallest one to the k-th largest one, where k is from the exact distribution of Mann and
//! Whitney's U. It assumes no distribution, only that the runs are independent and that the two sides differ by a factor. It never claims more
//! than the runs can tell: with three runs on each side there is no interval at 95 %.

/// Confidence of intervals.
pub const CONFIDENCE: f64 = 0.95;

/// Most runs on a side for which the distribution of U is exact. Above that, the normal approximation differs by less than one rank.
const EXACT_MAX: usize = 40;

/// The 97.5th percentile of the normal distribution.
const Z: f64 = 1.959_964;

/// Returns the median, of an even number of values the mean of the two in the middle. Returns `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// How a set of runs compares with another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The estimate: the median of all ratios of a run of B to a run of A.
    pub estimate: f64,
    /// The interval that has the true ratio with a confidence of at least 95 %. `None`: too few runs to tell.
    pub interval: Option<(f64, f64)>,
}

/// Compares B with A. Returns `None` if a side has no run, or one with a value that is not above 0.
pub fn ratio(a: &[f64], b: &[f64]) -> Option<Ratio> {
    let is_positive = |values: &[f64]| {
        !values.is_empty() && values.iter().all(|value| *value > 0.0 && value.is_finite())
    };
    if !is_positive(a) || !is_positive(b) {
        return None;
    }
    let sorted = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values
    };
    let (a, b) = (sorted(a), sorted(b));
    let pairs = a.len() * b.len();
    let at = |rank: usize| kth_ratio(&a, &b, rank);
    let estimate = match pairs % 2 {
        1 => at(pairs / 2 + 1),
        // The mean of logarithms.
        _ => (at(pairs / 2) * at(pairs / 2 + 1)).sqrt(),
    };
    let interval = rank(a.len(), b.len()).map(|k| (at(k), at(pairs + 1 - k)));
    Some(Ratio { estimate, interval })
}

/// Returns the smallest number of runs of each side that can give an interval.
pub fn runs_needed() -> usize {
    (1..)
        .find(|count| rank(*count, *count).is_some())
        .unwrap_or(usize::MAX)
}

/// Returns the rank of the ends of the interval among all ratios, from 1. Returns `None` if even the smallest and the largest ratio are too
/// near.
fn rank(a: usize, b: usize) -> Option<usize> {
    let tail = (1.0 - CONFIDENCE) / 2.0;
    if a == 0 || b == 0 {
        return None;
    }
    if a.max(b) > EXACT_MAX {
        return Some(normal_rank(a, b));
    }
    let mut below = 0.0;
    let chances = chances_of_u(a, b);
    let k = chances.iter().take_while(|chance| {
        below += **chance;
        below <= tail
    });
    Some(k.count()).filter(|k| *k > 0)
}

/// Returns the same by the normal approximation. With one or two runs on a side the result is smaller than the exact one, so the interval is
/// wider.
fn normal_rank(a: usize, b: usize) -> usize {
    let (a, b) = (a as f64, b as f64);
    let spread = (a * b * (a + b + 1.0) / 12.0).sqrt();
    ((a * b / 2.0 - Z * spread).floor() as usize).max(1)
}

/// Returns the probability of each value of U, from 0 on, if both sides are the same.
///
/// U counts the pairs in which the run of B is before that of A. The runs are put in order one after the other; the `j`-th run of B at place
/// `r` has `r - j` runs of A before it.
fn chances_of_u(a: usize, b: usize) -> Vec<f64> {
    let pairs = a * b;
    let mut ways = vec![vec![0.0; pairs + 1]; b + 1];
    ways[0][0] = 1.0;
    for place in 1..=a + b {
        for chosen in (1..=b.min(place)).rev() {
            let before = place - chosen;
            if before > a {
                break;
            }
            let (fewer, more) = ways.split_at_mut(chosen);
            let from = &fewer[chosen - 1];
            for (to, from) in more[0][before..].iter_mut().zip(from) {
                *to += from;
            }
        }
    }
    let all: f64 = ways[b].iter().sum();
    ways[b].iter().map(|ways| ways / all).collect()
}

/// Returns the `rank`-th smallest of all ratios `b / a`, from 1, of sorted positive values. It takes time in proportion to the number of
/// values, not of pairs: the order of positive numbers is that of their bits, so it searches the bits for the smallest number with enough
/// ratios up to it.
fn kth_ratio(a: &[f64], b: &[f64], rank: usize) -> f64 {
    let count_up_to = |limit: f64| {
        let (mut count, mut first) = (0, 0);
        for value in b {
            // For a larger value of B, the first value of A that is large enough is at the same place or later.
            while first < a.len() && value / a[first] > limit {
                first += 1;
            }
            count += a.len() - first;
        }
        count
    };
    let (mut low, mut high) = (0, f64::MAX.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        match count_up_to(f64::from_bits(middle)) >= rank {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    f64::from_bits(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 10.0]), Some(3.0));
    }

    /// The critical values of U for a two-sided test at 5 %, from the table of the test that textbooks print. An interval begins one rank above.
    #[test]
    fn ranks_are_those_of_the_published_table() {
        for (a, b, critical) in [
            (3, 5, 0),
            (4, 4, 0),
            (2, 8, 0),
            (5, 5, 2),
            (5, 8, 6),
            (6, 9, 10),
            (8, 8, 13),
            (10, 10, 23),
            (20, 20, 127),
        ] {
            assert_eq!(rank(a, b), Some(critical + 1), "{a} and {b}");
            assert_eq!(rank(b, a), Some(critical + 1), "{b} and {a}");
        }
        for (a, b) in [(0, 9), (1, 30), (2, 7), (3, 3), (3, 4)] {
            assert_eq!(rank(a, b), None, "{a} and {b}");
        }
        assert_eq!(runs_needed(), 4);
    }

    #[test]
    fn the_approximation_for_many_runs_agrees_with_the_exact_rank() {
        for (a, b) in [(40, 40), (40, 20), (40, 8)] {
            let (exact, near) = (rank(a, b).unwrap(), normal_rank(a, b));
            assert!(exact.abs_diff(near) <= 1, "{a} and {b}: {exact}, {near}");
        }
        for (a, b) in [(40, 1), (40, 2)] {
            assert!(normal_rank(a, b) <= rank(a, b).unwrap(), "{a} and {b}");
        }
    }

    #[test]
    fn the_interval_of_four_and_four_runs_goes_from_the_least_to_the_largest_ratio() {
        let found = ratio(&[100.0, 110.0, 105.0, 102.0], &[210.0, 200.0, 220.0, 205.0]).unwrap();
        assert_eq!(found.interval, Some((200.0 / 110.0, 220.0 / 100.0)));
        let (low, high) = found.interval.unwrap();
        assert!(low < found.estimate && found.estimate < high, "{found:?}");
    }

    #[test]
    fn an_interval_is_that_of_all_pairs_in_order() {
        let a: Vec<f64> = (0..9).map(|i| 100.0 + 3.0 * f64::from(i * i % 7)).collect();
        let b: Vec<f64> = (0..7).map(|i| 90.0 + 5.0 * f64::from(i * i % 5)).collect();
        let mut pairs: Vec<f64> = b
            .iter()
            .flat_map(|b| a.iter().map(move |a| b / a))
            .collect();
        pairs.sort_by(f64::total_cmp);
        let k = rank(9, 7).unwrap();
        let found = ratio(&a, &b).unwrap();
        assert_eq!(found.interval, Some((pairs[k - 1], pairs[63 - k])));
        assert_eq!(found.estimate, pairs[31]);
    }

    /// Draws pairs of sets from the same distribution: the interval must have 1 in at least 95 of 100 cases.
    #[test]
    fn sets_of_the_same_distribution_have_1_in_their_interval() {
        let mut state = 7_u64;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            1.0 + (state >> 40) as f64 / (1 << 24) as f64
        };
        let mut held = 0;
        for _ in 0..2000 {
            let (a, b) = ([(); 6].map(|()| draw()), [(); 6].map(|()| draw()));
            let (low, high) = ratio(&a, &b).unwrap().interval.unwrap();
            held += usize::from(low <= 1.0 && 1.0 <= high);
        }
        // The exact confidence of six and six runs is 95.9 %. Four standard deviations are 1.8 %.
        assert!((1880..=1955).contains(&held), "{held}");
    }

    #[test]
    fn few_runs_have_an_estimate_and_no_interval_and_bad_ones_nothing() {
        let found = ratio(&[1.0], &[2.0]).unwrap();
        assert_eq!((found.estimate, found.interval), (2.0, None));
        assert_eq!(ratio(&[0.0, 1.0], &[2.0]), None);
        assert_eq!(ratio(&[], &[2.0]), None);
        assert_eq!(ratio(&[f64::NAN], &[2.0]), None);
    }

    #[test]
    fn a_hundred_thousand_runs_are_compared() {
        let a: Vec<f64> = (0..50_000).map(|i| 100.0 + f64::from(i % 100)).collect();
        let b: Vec<f64> = a.iter().map(|value| value * 2.0).collect();
        let found = ratio(&a, &b).unwrap();
        let (low, high) = found.interval.unwrap();
        assert!(
            (1.98..=2.0).contains(&low) && (2.0..2.02).contains(&high),
            "{found:?}"
        );
    }
}
