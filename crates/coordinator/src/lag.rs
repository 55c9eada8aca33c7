//! The delay of the event loop: how long a task that is ready may have to wait until it runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Time between two timers.
const PERIOD: Duration = Duration::from_millis(10);
/// Buckets per doubling of the delay, so that a reported delay is at most 19 % too high.
const PER_DOUBLING: f64 = 4.0;
/// Buckets from 1 µs to about 4 s.
const BUCKETS: usize = 88;

/// Measures the delay of a timer that fires every 10 ms. A task that does not yield, or a long queue of
/// ready tasks, delays it like every other task. The timer is a task on the runtime of the episodes and
/// ends when this value is dropped.
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

/// Delays of the event loop over a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LagSummary {
    /// Number of times that the timer fired.
    pub samples: u64,
    /// 99th percentile of the delay.
    pub p99: Duration,
    /// The longest delay.
    pub max: Duration,
}

impl LoopLag {
    /// Starts to measure.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn start() -> Self {
        Self::start_with(|_, _| {})
    }

    /// Starts to measure, and calls `observe` for each timer with the time at which it was due and its
    /// delay.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn start_with(observe: impl Fn(Instant, Duration) + Send + 'static) -> Self {
        let delays = Arc::new(Mutex::new(Delays::NONE));
        let measured = Arc::clone(&delays);
        let mut watch = JoinSet::new();
        watch.spawn(async move {
            loop {
                let due = Instant::now() + PERIOD;
                tokio::time::sleep_until(due).await;
                let delay = due.elapsed();
                lock(&measured).add(delay);
                observe(due, delay);
            }
        });
        Self { delays, _watch: watch }
    }

    /// The delays since the last call.
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

/// Longest delay that falls into a bucket.
#[expect(clippy::disallowed_methods, reason = "a measured time")]
fn upper(bucket: usize) -> Duration {
    Duration::from_secs_f64(1e-6 * (bucket as f64 / PER_DOUBLING).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_has_the_longest_delay_and_the_99th_percentile() {
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
    async fn task_that_does_not_yield_is_measured_once() {
        let observed = Arc::new(Mutex::new(Vec::new()));
        let timers = Arc::clone(&observed);
        let lag = LoopLag::start_with(move |due, delay| timers.lock().unwrap().push((due, delay)));
        tokio::time::sleep(Duration::from_millis(30)).await;
        let blocked = std::time::Instant::now();
        while blocked.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        let seen = lag.take();
        assert!(seen.max >= Duration::from_millis(40), "{seen:?}");
        let observed = observed.lock().unwrap();
        let longest = observed.iter().map(|(_, delay)| *delay).max();
        assert_eq!((observed.len() as u64, longest), (seen.samples, Some(seen.max)));
        // Of the timers that were late, on a busy machine perhaps others for longer, one was due in the loop.
        let freed = blocked + Duration::from_millis(60);
        let was_blocked = |(due, delay): &(Instant, Duration)| {
            *delay >= Duration::from_millis(40) && due.into_std() + *delay >= freed
        };
        assert!(observed.iter().any(was_blocked), "{observed:?}");
        assert_eq!(lag.take(), LagSummary::default());
    }
}
