//! Shows the journaled lines to all sinks, each on a thread of its own.

use crate::error::SinkError;
use crate::line::Line;
use orchestrate_store::{Reader, Store};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Time after which a sink that failed is tried again, if no line is journaled before.
const RETRY: Duration = Duration::from_secs(10);

/// One destination of metrics.
pub trait Sink: Send {
    /// Its name in messages.
    fn name(&self) -> &'static str;

    /// Brings it up to date with all lines so far. Lines are only added from one call to the next.
    /// Blocking.
    ///
    /// # Errors
    /// If not all lines could be written. The next call tries again.
    fn update(&mut self, lines: &[Line]) -> Result<(), SinkError>;
}

/// Receives warnings for the user.
pub type Warn = Arc<dyn Fn(&str) + Send + Sync>;

/// The sinks of a run.
pub struct Sinks {
    reader: Reader,
    shared: Arc<Shared>,
    warn: Warn,
    journaled: Arc<Notify>,
    running: Vec<Running>,
    follower: JoinSet<()>,
}

impl std::fmt::Debug for Sinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sinks").field("running", &self.running.len()).finish_non_exhaustive()
    }
}

/// A sink on its thread.
struct Running {
    name: &'static str,
    /// Resolves when the thread has ended, with whether all lines are written.
    ended: oneshot::Receiver<bool>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// All lines so far; `None` until the journal was read.
    lines: Option<Arc<Vec<Line>>>,
    /// No line follows.
    is_complete: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No line follows.
    fn complete(&self) {
        self.state().is_complete = true;
        self.changed.notify_all();
    }

    /// Waits until there are other lines than the first `seen`, `time` has passed, or no line
    /// follows. Returns the lines, and whether they are all.
    fn wait(&self, seen: Option<usize>, time: Option<Duration>) -> (Option<Arc<Vec<Line>>>, bool) {
        let is_same = |state: &mut State| {
            !state.is_complete && state.lines.as_ref().map(|lines| lines.len()) == seen
        };
        let time = time.unwrap_or(Duration::MAX);
        let waited = self.changed.wait_timeout_while(self.state(), time, is_same);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (state.lines.clone(), state.is_complete)
    }
}

impl Sinks {
    /// Starts a thread for each sink, and a task that reads the journal: now, and after each
    /// [`Sinks::journaled`].
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        store: &Store,
        sinks: Vec<Box<dyn Sink>>,
        warn: Warn,
    ) -> Result<Self, std::io::Error> {
        let (reader, shared) = (store.reader().clone(), Arc::new(Shared::default()));
        let running = sinks
            .into_iter()
            .map(|sink| {
                let (name, shared, warn) = (sink.name(), shared.clone(), warn.clone());
                let (end, ended) = oneshot::channel();
                // As long as a sink may write, no other process may.
                let hold = store.hold();
                // Not a task of the runtime, whose shutdown would wait for a sink that hangs.
                thread::Builder::new().name(format!("sink-{name}")).spawn(move || {
                    // The receiver is gone once `finish` has given up.
                    end.send(drive(sink, &shared, &warn)).ok();
                    drop(hold);
                })?;
                Ok(Running { name, ended })
            })
            .collect::<Result<Vec<_>, std::io::Error>>()?;
        let journaled = Arc::new(Notify::new());
        let mut follower = JoinSet::new();
        if !running.is_empty() {
            let (reader, shared, warn) = (reader.clone(), shared.clone(), warn.clone());
            let journaled = journaled.clone();
            follower.spawn(async move {
                let mut has_failed = false;
                loop {
                    if let Err(error) = publish(&reader, &shared).await
                        && !std::mem::replace(&mut has_failed, true)
                    {
                        warn(&format!("sinks: {}", chain(&error)));
                    }
                    journaled.notified().await;
                }
            });
        }
        Ok(Self { reader, shared, warn, journaled, running, follower })
    }

    /// What tells the sinks that a line was journaled.
    pub fn journaled(&self) -> impl Fn() + Send + Sync + 'static {
        let journaled = self.journaled.clone();
        move || journaled.notify_one()
    }

    /// Shows the last lines to all sinks and waits for them, at most for `time`. A sink that does not
    /// finish in time is reported and left alone.
    pub async fn finish(mut self, time: Duration) {
        if self.running.is_empty() {
            return;
        }
        let deadline = Instant::now() + time;
        self.follower.shutdown().await;
        if let Err(error) = publish(&self.reader, &self.shared).await {
            (self.warn)(&format!("sinks: {}", chain(&error)));
        }
        self.shared.complete();
        for Running { name, ended } in std::mem::take(&mut self.running) {
            let reason = match timeout_at(deadline, ended).await {
                Ok(Ok(true)) => continue,
                Ok(Ok(false)) => "still failed".to_owned(),
                Ok(Err(_)) => "ended early".to_owned(),
                Err(_) => {
                    format!("did not finish within {}s (sinks.flush_timeout)", time.as_secs())
                }
            };
            (self.warn)(&format!(
                "sink {name} {reason}; its missing lines are in the journal: repair the cause, and \
                 run again with --resume to write them"
            ));
        }
    }
}

impl Drop for Sinks {
    fn drop(&mut self) {
        self.shared.complete();
    }
}

/// Reads the journal and shows new lines to the sinks.
async fn publish(reader: &Reader, shared: &Shared) -> Result<(), SinkError> {
    let values = reader.metrics().await?;
    let mut lines = shared.state().lines.as_deref().cloned().unwrap_or_default();
    let new = values.into_iter().skip(lines.len()).map(Line::new);
    lines.extend(new.collect::<Result<Vec<_>, _>>()?);
    shared.state().lines = Some(Arc::new(lines));
    shared.changed.notify_all();
    Ok(())
}

/// Brings a sink up to date until no line follows. Returns whether all lines are written.
fn drive(mut sink: Box<dyn Sink>, shared: &Shared, warn: &Warn) -> bool {
    let (mut seen, mut has_warned, mut has_failed) = (None, false, false);
    loop {
        let (lines, is_complete) = shared.wait(seen, has_failed.then_some(RETRY));
        // Only at the end of a run whose journal was never read.
        let Some(lines) = lines else { return false };
        let updated = sink.update(&lines);
        has_failed = updated.is_err();
        if let Err(error) = updated {
            let text = chain(&error);
            tracing::debug!(sink = sink.name(), error = text, "sink failed");
            if !std::mem::replace(&mut has_warned, true) {
                warn(&format!(
                    "sink {}: {text}; the run continues, and missing lines are written later",
                    sink.name()
                ));
            }
        }
        if is_complete {
            return !has_failed;
        }
        seen = Some(lines.len());
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
