//! What is said of several readings of the same.

use serde::Serialize;

/// A summary of readings, in run order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stats {
    pub mean: f64,
    /// Of the sample (n - 1); `None` for a single reading.
    pub stdev: Option<f64>,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// The readings, one a run.
    pub runs: Vec<f64>,
}

impl Stats {
    /// Of no readings, everything is 0.
    pub fn of(runs: Vec<f64>) -> Self {
        let count = runs.len() as f64;
        let mean = if runs.is_empty() { 0.0 } else { runs.iter().sum::<f64>() / count };
        let squares: f64 = runs.iter().map(|run| (run - mean).powi(2)).sum();
        Self {
            mean,
            stdev: (runs.len() > 1).then(|| (squares / (count - 1.0)).sqrt()),
            median: median(&runs),
            min: runs.iter().copied().reduce(f64::min).unwrap_or(0.0),
            max: runs.iter().copied().reduce(f64::max).unwrap_or(0.0),
            runs,
        }
    }

    /// How many times as much as `other`: the median of the runs' own ratios, so that what disturbed a whole
    /// run counts on both sides.
    pub fn against(&self, other: &Stats) -> f64 {
        let ratios: Vec<f64> = self.runs.iter().zip(&other.runs).map(|(own, theirs)| own / theirs).collect();
        median(&ratios)
    }

    /// `92.1 ± 0.4`
    pub fn show(&self, digits: usize) -> String {
        match self.stdev {
            Some(stdev) => format!("{:.digits$} ± {stdev:.digits$}", self.mean),
            None => format!("{:.digits$}", self.mean),
        }
    }
}

/// The middle one; of an even number the mean of both. 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), middle.checked_sub(1).and_then(|below| sorted.get(below))) {
        (Some(upper), Some(lower)) if sorted.len().is_multiple_of(2) => (lower + upper) / 2.0,
        (Some(only), _) => *only,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_stdev_and_median() {
        let stats = Stats::of(vec![2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((stats.mean, stats.median, stats.min, stats.max), (5.0, 4.5, 2.0, 9.0));
        assert!((stats.stdev.unwrap() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(stats.show(1), "5.0 ± 2.1");
        assert_eq!(Stats::of(vec![3.0, 1.0, 2.0]).median, 2.0);
    }

    #[test]
    fn one_reading_has_no_deviation_and_none_is_nothing() {
        let one = Stats::of(vec![7.0]);
        assert_eq!((one.stdev, one.median, one.show(2)), (None, 7.0, "7.00".to_owned()));
        let none = Stats::of(vec![]);
        assert_eq!((none.mean, none.median, none.min, none.max, none.stdev), (0.0, 0.0, 0.0, 0.0, None));
    }

    #[test]
    fn ratios_are_of_the_same_run() {
        // The second run was disturbed for both: the ratio stays.
        let fast = Stats::of(vec![80.0, 8.0, 80.0]);
        let slow = Stats::of(vec![40.0, 4.0, 40.0]);
        assert_eq!((fast.against(&slow), slow.against(&fast)), (2.0, 0.5));
    }
}
