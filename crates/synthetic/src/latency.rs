//! A latency model for generations.

use crate::rows::mix;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The time of a call as a function of what the server has to compute. Concurrent requests do not
/// slow each other down, because benchmarks measure the coordinator, not a batch scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Time that every call takes, in milliseconds.
    pub base_ms: f64,
    /// Milliseconds per 1,000 prompt tokens that are not in the prefix cache.
    pub prefill_ms_per_1k: f64,
    /// Milliseconds per sampled token.
    pub decode_ms: f64,
    /// Fraction by which a call may be shorter or longer, 0 to 1; the call's seed determines it.
    pub jitter: f64,
}

impl Latency {
    /// Time of a call with `uncached` prompt tokens to prefill and `sampled` tokens to decode.
    pub fn time(&self, uncached: usize, sampled: usize, seed: u64) -> Duration {
        let prefill = self.prefill_ms_per_1k * uncached as f64 / 1000.0;
        let exact = self.base_ms + prefill + self.decode_ms * sampled as f64;
        // 32 bits of the hash, as a number from -1 to 1.
        let draw = (mix(seed) >> 32) as f64 / f64::from(u32::MAX) * 2.0 - 1.0;
        let ms = (exact * (1.0 + self.jitter * draw)).max(0.0);
        Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_grows_with_work_and_stays_within_the_jitter() {
        let exact = Latency { base_ms: 5.0, prefill_ms_per_1k: 100.0, decode_ms: 2.0, jitter: 0.0 };
        assert_eq!(exact.time(500, 10, 1), Duration::from_millis(75));
        let drawn = Latency { jitter: 0.5, ..exact };
        let times: Vec<Duration> = (0..100).map(|seed| drawn.time(500, 10, seed)).collect();
        let bounds = Duration::from_micros(37_500)..=Duration::from_micros(112_500);
        assert!(times.iter().all(|time| bounds.contains(time)));
        assert!(times.iter().min() < Some(&Duration::from_millis(50)));
        assert!(times.iter().max() > Some(&Duration::from_millis(100)));
    }
}
