//! What holds the event loop up: tasks that keep their thread, and the machine itself.

use rustix::time::{ClockId, clock_gettime};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// As often as the event loop is looked at.
const PERIOD: Duration = Duration::from_millis(10);

/// Processor time of the longest poll of any of some futures: what keeps others on its thread from
/// running, whatever the machine does meanwhile.
#[derive(Debug, Default)]
pub(super) struct LongestPoll {
    nanoseconds: AtomicI64,
}

impl LongestPoll {
    /// Runs a future; its polls count.
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

/// How late a thread wakes up that does nothing but sleep, on the processors of this process: no
/// event loop there can be better.
#[derive(Debug)]
pub(super) struct Sleeper {
    /// Nothing is sent: its end is waited for.
    alive: Sender<()>,
    thread: JoinHandle<Duration>,
}

impl Sleeper {
    pub(super) fn begin() -> Self {
        let (alive, end) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut latest = Duration::ZERO;
            loop {
                let due = Instant::now() + PERIOD;
                let Err(RecvTimeoutError::Timeout) = end.recv_timeout(PERIOD) else {
                    return latest;
                };
                latest = latest.max(due.elapsed());
            }
        });
        Self { alive, thread }
    }

    /// The longest delay.
    pub(super) fn end(self) -> Duration {
        drop(self.alive);
        self.thread.join().unwrap_or_default()
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
    async fn a_sleeper_wakes_after_its_time() {
        let sleeper = Sleeper::begin();
        tokio::time::sleep(5 * PERIOD).await;
        let latest = sleeper.end();
        assert!(latest > Duration::ZERO, "no timer is exact");
    }

    #[tokio::test]
    async fn the_longest_one_is_kept() {
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
