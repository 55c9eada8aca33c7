//! Threads that only observe; their CPU time is not counted as the program's.

use anyhow::Context;
use rustix::process::Pid;
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A running observer thread.
#[derive(Debug)]
pub(super) struct Observer<T> {
    id: Pid,
    thread: JoinHandle<Option<T>>,
}

impl<T: Send + 'static> Observer<T> {
    /// Starts a thread that sets its affinity and priority with `place` and then runs `work`.
    ///
    /// # Errors
    /// The error of `place`; `work` is then not run.
    pub(super) fn begin(
        place: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (ready, begun) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let placed = place();
            let is_placed = placed.is_ok();
            // `begin` waits for this message.
            let _ = ready.send(placed.map(|()| gettid()));
            is_placed.then(work)
        });
        let id = begun.recv().context("an observer thread panicked while it started")??;
        Ok(Self { id, thread })
    }

    pub(super) fn id(&self) -> Pid {
        self.id
    }

    /// Waits for the result.
    pub(super) fn end(self) -> anyhow::Result<T> {
        self.thread.join().ok().flatten().context("an observer thread panicked")
    }
}

/// CPU time of this process, except that of the threads `without`.
pub(super) fn cpu_time(without: &[Pid]) -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let all = Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0));
    all.saturating_sub(without.iter().filter_map(|thread| thread_time(*thread)).sum())
}

/// CPU time of one thread; `None` if the kernel does not report it.
fn thread_time(thread: Pid) -> Option<Duration> {
    let text = fs_err::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_not_run_if_placing_the_thread_fails() {
        let worked = Observer::begin(|| Ok(()), || 7).unwrap().end().unwrap();
        assert_eq!(worked, 7);
        let refused = Observer::begin(|| anyhow::bail!("no place"), || 7).unwrap_err();
        assert_eq!(refused.to_string(), "no place");
    }

    #[test]
    fn cpu_time_can_leave_out_a_thread() {
        let this = gettid();
        let (all, without) = (cpu_time(&[]), cpu_time(&[this]));
        let mut rounds = 0_u64;
        while cpu_time(&[]) < all + Duration::from_millis(60) {
            rounds = std::hint::black_box(rounds + 1);
        }
        assert!(thread_time(this).unwrap() >= Duration::from_millis(1), "{rounds} rounds");
        let others = cpu_time(&[this]).saturating_sub(without);
        assert!(others < cpu_time(&[]).saturating_sub(all));
    }
}
