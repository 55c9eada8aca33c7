//! What one case was measured to take, and what it may take.

use serde::Serialize;
use std::time::Duration;

/// What a case must keep to, where it says so.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Limits {
    pub(super) p50_ms: Option<f64>,
    pub(super) p99_ms: Option<f64>,
    /// At least.
    pub(super) per_s: Option<f64>,
    /// Median by the floor's median.
    pub(super) by_floor: Option<f64>,
}

/// Memory by sandbox, in bytes.
#[derive(Debug, Serialize)]
pub(super) struct Memory {
    /// All that follows.
    pub(super) total: u64,
    /// Charged to its control group.
    pub(super) charged: u64,
    /// Docker's process beside it; absent where the daemon's machine is another one.
    pub(super) shim: Option<u64>,
    /// Of this process.
    pub(super) own: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) samples: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) per_s: f64,
    /// Median of the floor that was measured in turn with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) floor_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory: Option<Memory>,
    pub(super) limits: Limits,
    pub(super) ok: bool,
}

impl Case {
    /// `wall` is the time that all samples took together; they may have run side by side.
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

    /// Samples that ran one after the other.
    pub(super) fn in_turn(name: impl Into<String>, samples: Vec<Duration>) -> Self {
        let wall = samples.iter().sum();
        Self::new(name, samples, wall)
    }

    /// Compared with its floor from here on.
    pub(super) fn above(mut self, floor: &Self) -> Self {
        self.floor_p50_ms = Some(floor.p50_ms);
        self
    }

    /// Judged by these limits from here on.
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
    fn percentiles_are_samples_and_limits_hold_at_their_edge() {
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
