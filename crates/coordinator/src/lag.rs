//! How late the event loop is: the longest time any task of it may have waited to be run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(10);
/// Buckets per doubling of the delay: what is told is at most 19 % too high.
const PER_DOUBLING: f64 = 4.0;
/// From 1 µs to about 4 s.
const BUCKETS: usize = 88;

/// Delays of a timer that fires all the time. A task that does not yield, or a queue of ready
/// tasks, holds it up like everything else. It is a task of its own, so that it runs where the
/// episodes run; it ends when this is dropped.
#[derive(Debug)]
pub struct LoopLag {
    delays: Arc<Mutex<Delays>>,
    _watch: JoinSet<()>,
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

impl LoopLag {
    /// Begins to look.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn begin() -> Self {
        Self::begin_with(|_, _| {})
    }

    /// Begins to look, and tells each time at which the timer was due with its delay.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn begin_with(tell: impl Fn(Instant, Duration) + Send + 'static) -> Self {
        let delays = Arc::new(Mutex::new(Delays::NONE));
        let seen = Arc::clone(&delays);
        let mut watch = JoinSet::new();
        watch.spawn(async move {
            loop {
                let due = Instant::now() + PERIOD;
                tokio::time::sleep_until(due).await;
                let delay = due.elapsed();
                lock(&seen).add(delay);
                tell(due, delay);
            }
        });
        Self { delays, _watch: watch }
    }

    /// What was seen since the last call.
    pub fn take(&self) -> LagSummary {
        std::mem::replace(&mut *lock(&self.delays), Delays::NONE).summary()
    }
}

fn lock(delays: &Mutex<Delays>) -> MutexGuard<'_, Delays> {
    delays.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut delays = Delays::NONE;
        for _ in 0..990 {
            delays.add(Duration::from_micros(100));
        }
        for _ in 0..10 {
            delays.add(Duration::from_millis(20));
        }
        let seen = delays.summary();
        assert_eq!((seen.samples, seen.max), (1000, Duration::from_millis(20)));
        assert!((100..=119).contains(&seen.p99.as_micros()), "{seen:?}");
        assert_eq!(Delays::NONE.summary(), LagSummary::default());
    }

    #[tokio::test]
    async fn a_task_that_does_not_yield_is_seen_once() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&told);
        let lag = LoopLag::begin_with(move |due, delay| seen.lock().unwrap().push((due, delay)));
        tokio::time::sleep(Duration::from_millis(30)).await;
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        let seen = lag.take();
        assert!(seen.max >= Duration::from_millis(40), "{seen:?}");
        let told = told.lock().unwrap();
        let (due, longest) = told.iter().max_by_key(|(_, delay)| *delay).unwrap();
        assert_eq!((told.len() as u64, *longest), (seen.samples, seen.max));
        let due = due.into_std();
        assert!(due + *longest >= begun + Duration::from_millis(60), "{told:?}");
        assert_eq!(lag.take(), LagSummary::default());
    }
}
