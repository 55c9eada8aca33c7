//! Times a case and its floor over several rounds.

use crate::heap::{self, HeapUse};
use serde::Serialize;
use std::time::Instant;

/// Results of one case.
#[derive(Debug, Serialize)]
pub(super) struct Case {
    pub(super) name: String,
    /// Bytes of input: reply bodies, or files read or written.
    pub(super) bytes_in: u64,
    /// Minimum time over all rounds.
    pub(super) seconds: f64,
    /// Minimum time of the floor over all rounds.
    pub(super) floor_seconds: f64,
    /// Description of the floor.
    pub(super) floor: &'static str,
    /// Bytes of rows that are kept at the end.
    pub(super) kept_bytes: u64,
    /// Peak of the bytes held, including the reply body, beyond those held before and `kept_bytes`.
    pub(super) peak_extra_bytes: u64,
    /// Limit of `peak_extra_bytes`, if any.
    pub(super) peak_extra_limit_bytes: Option<u64>,
    pub(super) seconds_median: f64,
    pub(super) floor_seconds_median: f64,
    /// `seconds` divided by `floor_seconds`.
    pub(super) ratio: f64,
    /// Limit of `ratio`, if any.
    pub(super) ratio_limit: Option<f64>,
    /// Limit of `seconds`, if any.
    pub(super) seconds_limit: Option<f64>,
    pub(super) rounds: usize,
    /// Whether the case is within all its limits.
    pub(super) ok: bool,
    /// Additional information.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) note: String,
}

/// The limits of a case.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits {
    pub(super) ratio: Option<f64>,
    pub(super) seconds: Option<f64>,
    /// Whether peak memory must stay below the largest body and 5 % of what is kept.
    pub(super) memory: bool,
}

/// Collects one case over its rounds.
#[derive(Debug)]
pub(super) struct Meter {
    case: Vec<f64>,
    floor: Vec<f64>,
    bytes_in: u64,
    largest_body: u64,
    held: isize,
    peak: isize,
    round_case: f64,
    round_floor: f64,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self {
            case: Vec::new(),
            floor: Vec::new(),
            bytes_in: 0,
            largest_body: 0,
            held: 0,
            peak: 0,
            round_case: 0.0,
            round_floor: 0.0,
        }
    }

    /// Times a part of the floor.
    pub(super) fn floor<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        self.round_floor += began.elapsed().as_secs_f64();
        result
    }

    /// Times a part of the case, which reads a body of `body_bytes` that the caller holds.
    pub(super) fn case<T>(&mut self, body_bytes: usize, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let (result, HeapUse { grown, peak }) = heap::measure(work);
        self.round_case += began.elapsed().as_secs_f64();
        self.bytes_in += body_bytes as u64;
        self.largest_body = self.largest_body.max(body_bytes as u64);
        self.peak = self.peak.max(self.held + peak + body_bytes.cast_signed());
        self.held += grown;
        result
    }

    /// Ends a round. The case must have released all its memory.
    pub(super) fn end_round(&mut self) {
        self.case.push(std::mem::take(&mut self.round_case));
        self.floor.push(std::mem::take(&mut self.round_floor));
        self.held = 0;
    }

    /// The results after all rounds, each of which kept `kept_bytes`.
    pub(super) fn finish(
        mut self,
        name: &str,
        floor: &'static str,
        kept_bytes: u64,
        limits: Limits,
    ) -> Case {
        let rounds = self.case.len();
        let (seconds, seconds_median) = minimum_and_median(&mut self.case);
        let (floor_seconds, floor_seconds_median) = minimum_and_median(&mut self.floor);
        let ratio = seconds / floor_seconds.max(f64::MIN_POSITIVE);
        let peak = u64::try_from(self.peak).unwrap_or(0);
        let peak_extra_bytes = peak.saturating_sub(kept_bytes);
        let memory = limits.memory.then(|| self.largest_body + kept_bytes / 20);
        let ok = limits.ratio.is_none_or(|limit| ratio <= limit)
            && limits.seconds.is_none_or(|limit| seconds <= limit)
            && memory.is_none_or(|limit| peak_extra_bytes <= limit);
        Case {
            name: name.to_owned(),
            bytes_in: self.bytes_in / (rounds as u64).max(1),
            seconds,
            floor_seconds,
            floor,
            kept_bytes,
            peak_extra_bytes,
            peak_extra_limit_bytes: memory,
            seconds_median,
            floor_seconds_median,
            ratio,
            ratio_limit: limits.ratio,
            seconds_limit: limits.seconds,
            rounds,
            ok,
            note: String::new(),
        }
    }
}

fn minimum_and_median(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let minimum = values.first().copied().unwrap_or(0.0);
    (minimum, values.get(values.len() / 2).copied().unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { ratio: None, seconds: None, memory: true };

    #[test]
    fn peak_includes_the_body_and_memory_held_across_parts() {
        let mut meter = Meter::new();
        let first = meter.case(8 << 20, || std::hint::black_box(vec![1u8; 32 << 20]));
        meter.floor(|| ());
        let second = meter.case(4 << 20, || std::hint::black_box(vec![1u8; 32 << 20]));
        meter.end_round();
        let kept = (first.len() + second.len()) as u64;
        let case = meter.finish("x", "nothing", kept, LIMITS);
        assert_eq!((case.bytes_in, case.rounds), (12 << 20, 1));
        assert!((3 << 20..6 << 20).contains(&case.peak_extra_bytes), "{case:?}");
        assert_eq!(case.peak_extra_limit_bytes, Some((8 << 20) + kept / 20));
        assert!(case.ok);
    }

    #[test]
    fn minimum_and_median_of_rounds() {
        assert_eq!(minimum_and_median(&mut [3.0, 1.0, 2.0]), (1.0, 2.0));
    }
}
