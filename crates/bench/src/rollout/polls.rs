//! The longest poll of any episode, which is what blocks the event loop.

use rustix::time::{ClockId, clock_gettime};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

/// Processor time of the longest poll of a set of futures. Other futures of the same thread have to
/// wait for it.
#[derive(Debug, Default)]
pub(super) struct LongestPoll {
    nanoseconds: AtomicI64,
}

impl LongestPoll {
    /// Runs a future and measures its polls.
    pub(super) async fn watch<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        poll_fn(|context| {
            let begun = thread_time();
            let polled = future.as_mut().poll(context);
            self.nanoseconds.fetch_max(thread_time() - begun, Relaxed);
            polled
        })
        .await
    }

    pub(super) fn milliseconds(&self) -> f64 {
        self.nanoseconds.load(Relaxed) as f64 / 1e6
    }
}

fn thread_time() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn longest_poll_of_all_futures_is_recorded() {
        let longest = LongestPoll::default();
        let busy = |nanoseconds: i64| {
            let begun = thread_time();
            while thread_time() - begun < nanoseconds {}
        };
        longest
            .watch(async {
                busy(3_000_000);
                tokio::task::yield_now().await;
                busy(9_000_000);
                tokio::task::yield_now().await;
            })
            .await;
        longest.watch(async { busy(1_000_000) }).await;
        assert!((9.0..12.0).contains(&longest.milliseconds()), "{}", longest.milliseconds());
    }
}
