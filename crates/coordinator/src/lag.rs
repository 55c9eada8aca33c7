//! How late the event loop is: the longest time any task of it may have waited to be run.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(10);
/// Buckets per doubling of the delay: what is told is at most 19 % too high.
const PER_DOUBLING: f64 = 4.0;
/// From 1 µs to about 4 s.
const BUCKETS: usize = 88;

/// Delays of a timer that fires all the time. A task that does not yield, or a queue of ready
/// tasks, holds it up like everything else.
#[derive(Debug)]
pub struct LoopLag {
    delays: Mutex<Delays>,
}

#[derive(Debug)]
struct Delays {
    counts: [u64; BUCKETS],
    max: Duration,
}

/// Delays since they were last taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LagSummary {
    /// Times that were looked at.
    pub samples: u64,
    /// 99 of 100 were not longer.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
}

impl Default for LoopLag {
    fn default() -> Self {
        Self { delays: Mutex::new(Delays::NONE) }
    }
}

impl LoopLag {
    /// Looks until dropped.
    pub async fn watch(&self) -> Infallible {
        loop {
            let due = Instant::now() + PERIOD;
            tokio::time::sleep_until(due).await;
            self.lock().add(due.elapsed());
        }
    }

    /// What was seen since the last call.
    pub fn take(&self) -> LagSummary {
        std::mem::replace(&mut *self.lock(), Delays::NONE).summary()
    }

    fn lock(&self) -> MutexGuard<'_, Delays> {
        self.delays.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Delays {
    const NONE: Self = Self { counts: [0; BUCKETS], max: Duration::ZERO };

    fn add(&mut self, delay: Duration) {
        self.max = self.max.max(delay);
        let bucket = (0..BUCKETS).find(|bucket| delay <= upper(*bucket)).unwrap_or(BUCKETS - 1);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
    }

    fn summary(&self) -> LagSummary {
        let samples: u64 = self.counts.iter().sum();
        let mut below = 0;
        let found = self.counts.iter().position(|count| {
            below += count;
            below * 100 >= samples * 99
        });
        let p99 = found.filter(|_| samples > 0).map_or(Duration::ZERO, upper).min(self.max);
        LagSummary { samples, p99, max: self.max }
    }
}

/// Longest delay of a bucket.
fn upper(bucket: usize) -> Duration {
    Duration::from_secs_f64(1e-6 * (bucket as f64 / PER_DOUBLING).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_tells_the_longest_and_all_but_one_in_a_hundred() {
        let lag = LoopLag::default();
        for _ in 0..990 {
            lag.lock().add(Duration::from_micros(100));
        }
        for _ in 0..10 {
            lag.lock().add(Duration::from_millis(20));
        }
        let seen = lag.take();
        assert_eq!((seen.samples, seen.max), (1000, Duration::from_millis(20)));
        assert!((100..=119).contains(&seen.p99.as_micros()), "{seen:?}");
        assert_eq!(lag.take(), LagSummary::default());
    }

    #[tokio::test]
    async fn a_task_that_does_not_yield_is_seen() {
        let lag = LoopLag::default();
        let blocked = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let begun = std::time::Instant::now();
            while begun.elapsed() < Duration::from_millis(60) {
                std::hint::spin_loop();
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        };
        tokio::select! {
            never = lag.watch() => match never {},
            () = blocked => {}
        }
        let seen = lag.take();
        assert!(seen.max >= Duration::from_millis(40), "{seen:?}");
    }
}
