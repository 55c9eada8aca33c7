//! Ends process 1 at its deadline, from a separate thread.

use crate::log;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Ends the process at a deadline that can be moved, but never past the lifetime.
pub(crate) struct DeadlineTimer {
    expires_at: Mutex<Instant>,
    changed: Condvar,
    lifetime_ends_at: Instant,
}

impl DeadlineTimer {
    /// Starts the thread, with the end of the lifetime as deadline.
    pub(crate) fn start(lifetime: Duration) -> io::Result<Arc<Self>> {
        let lifetime_ends_at = Instant::now()
            .checked_add(lifetime)
            .ok_or_else(|| io::Error::other("the lifetime is too long"))?;
        let timer = Arc::new(Self {
            expires_at: Mutex::new(lifetime_ends_at),
            changed: Condvar::new(),
            lifetime_ends_at,
        });
        let waiting = Arc::clone(&timer);
        std::thread::Builder::new().stack_size(64 * 1024).spawn(move || waiting.wait_and_exit())?;
        Ok(timer)
    }

    /// Moves the deadline to `from_now`, or to the end of the lifetime if that is earlier.
    pub(crate) fn set(&self, from_now: Duration) {
        let expires_at = Instant::now()
            .checked_add(from_now)
            .map_or(self.lifetime_ends_at, |at| at.min(self.lifetime_ends_at));
        *self.expires_at.lock().unwrap_or_else(PoisonError::into_inner) = expires_at;
        self.changed.notify_one();
    }

    fn wait_and_exit(&self) {
        let mut expires_at = self.expires_at.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(left) =
            expires_at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        {
            expires_at = match self.changed.wait_timeout(expires_at, left) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        log::line("the deadline passed");
        exit_process();
    }
}

#[expect(
    clippy::exit,
    reason = "the deadline ends process 1, and the container with it, from a second thread"
)]
fn exit_process() -> ! {
    std::process::exit(3)
}
