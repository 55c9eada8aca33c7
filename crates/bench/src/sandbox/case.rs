//! Results and limits of one case.

use serde::Serialize;
use std::time::Duration;

/// Limits of a case.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Limits {
    pub(super) p50_ms: Option<f64>,
    pub(super) p99_ms: Option<f64>,
    /// Minimum number of samples per second.
    pub(super) per_s: Option<f64>,
    /// Maximum of the median divided by the floor's median.
    pub(super) by_floor: Option<f64>,
}

/// Memory per sandbox, in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Memory {
    /// Sum of the other fields.
    pub(super) total: u64,
    /// Memory of its control group.
    pub(super) charged: u64,
    /// Its Docker shim; absent if the daemon runs on another machine.
    pub(super) shim: Option<u64>,
    /// Share of this process.
    pub(super) own: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) samples: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) per_s: f64,
    /// Median of the floor, with which the case alternated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) floor_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory: Option<Memory>,
    pub(super) limits: Limits,
    pub(super) ok: bool,
}

impl Case {
    /// Sorts the samples. `wall` is the time that all of them took, possibly in parallel.
    pub(super) fn new(name: impl Into<String>, mut samples: Vec<Duration>, wall: Duration) -> Self {
        samples.sort_unstable();
        let at = |share: f64| {
            let last = samples.len().saturating_sub(1) as f64;
            let place = samples.iter().enumerate().find(|(n, _)| *n as f64 >= share * last);
            place.map_or(0.0, |(_, time)| time.as_secs_f64() * 1e3)
        };
        Self {
            name: name.into(),
            samples: samples.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            per_s: samples.len() as f64 / wall.as_secs_f64().max(1e-9),
            floor_p50_ms: None,
            memory: None,
            limits: Limits::default(),
            ok: true,
        }
    }

    /// A case whose samples ran one after the other.
    pub(super) fn in_turn(name: impl Into<String>, samples: Vec<Duration>) -> Self {
        let wall = samples.iter().sum();
        Self::new(name, samples, wall)
    }

    /// Sets the floor.
    pub(super) fn above(mut self, floor: &Self) -> Self {
        self.floor_p50_ms = Some(floor.p50_ms);
        self
    }

    /// Sets the limits and evaluates them.
    pub(super) fn within(mut self, limits: Limits) -> Self {
        let below = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
        let by_floor = self.floor_p50_ms.map_or(0.0, |floor| self.p50_ms / floor);
        self.ok = below(self.p50_ms, limits.p50_ms)
            && below(self.p99_ms, limits.p99_ms)
            && below(by_floor, limits.by_floor)
            && limits.per_s.is_none_or(|least| self.per_s >= least);
        self.limits = limits;
        self
    }

    pub(super) fn is_limited(&self) -> bool {
        let Limits { p50_ms, p99_ms, per_s, by_floor } = self.limits;
        [p50_ms, p99_ms, per_s, by_floor].iter().any(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(millis: &[u64]) -> Case {
        Case::in_turn("x", millis.iter().copied().map(Duration::from_millis).collect())
    }

    #[test]
    fn percentiles_are_samples_and_limits_are_inclusive() {
        let samples: Vec<u64> = (1..=101).rev().collect();
        let found = case(&samples);
        assert!((found.p50_ms - 51.0).abs() < 1e-9 && (found.p99_ms - 100.0).abs() < 1e-9);
        assert!(case(&[10]).within(Limits { p50_ms: Some(10.0), ..Limits::default() }).ok);
        assert!(!case(&[11]).within(Limits { p99_ms: Some(10.0), ..Limits::default() }).ok);
        let above = |limit| {
            let limits = Limits { by_floor: Some(limit), ..Limits::default() };
            case(&[12]).above(&case(&[10])).within(limits).ok
        };
        assert!(above(1.2) && !above(1.15));
        let rate =
            |limit| case(&[10]).within(Limits { per_s: Some(limit), ..Limits::default() }).ok;
        assert!(rate(99.0) && !rate(101.0));
    }
}
