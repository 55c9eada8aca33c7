//! The sink `prometheus`: the newest values in Prometheus's text format, for a server to scrape.

mod family;
mod render;

use crate::error::SinkError;
use crate::follow::Sink;
use crate::line::Line;
use orchestrate_types::{RunId, unix_micros};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// Content type of [`Exposition::scrape`].
pub const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The values that a scrape returns. Counters are sums over all journaled lines, so they continue
/// where they were after a restart. Gauges have the newest value that a line has. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Exposition {
    shown: Arc<Mutex<Shown>>,
    /// Number of lines that the newest scrape saw; `None` before the first.
    scraped: Arc<watch::Sender<Option<usize>>>,
}

#[derive(Debug)]
struct Shown {
    run: RunId,
    start: f64,
    text: String,
    lines: usize,
}

impl Exposition {
    /// The values of a run without lines.
    pub fn new(run: RunId) -> Self {
        let start = unix_micros() as f64 / 1e6;
        let text = render::render(run, start, &[]);
        let shown = Shown { run, start, text, lines: 0 };
        Self { shown: Arc::new(Mutex::new(shown)), scraped: Arc::new(watch::Sender::new(None)) }
    }

    /// The sink that keeps the values up to date.
    pub fn sink(&self) -> Box<dyn Sink> {
        Box::new(ShownLines(self.clone()))
    }

    /// The values, in version 0.0.4 of the text format.
    pub fn scrape(&self) -> String {
        let (text, lines) = {
            let shown = self.shown();
            (shown.text.clone(), shown.lines)
        };
        self.scraped.send_replace(Some(lines));
        text
    }

    /// Waits until the values of all lines were scraped, at most for `time`; not at all if there was no
    /// scrape before. Returns whether nothing was missed.
    pub async fn drained(&self, time: Duration) -> bool {
        let lines = self.shown().lines;
        let mut scraped = self.scraped.subscribe();
        let is_current = |seen: &Option<usize>| seen.is_none_or(|seen| seen == lines);
        // This end holds the sender, so the channel cannot close.
        timeout(time, scraped.wait_for(is_current)).await.is_ok()
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ShownLines(Exposition);

impl Sink for ShownLines {
    fn name(&self) -> &'static str {
        "prometheus"
    }

    fn update(&mut self, lines: &[Line]) -> Result<(), SinkError> {
        let mut shown = self.0.shown();
        shown.text = render::render(shown.run, shown.start, lines);
        shown.lines = lines.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::tests::run_of;

    #[tokio::test]
    async fn the_end_waits_for_a_scraper_that_has_not_seen_the_last_line() {
        let exposition = Exposition::new(RunId::generate());
        let mut sink = exposition.sink();
        sink.update(&run_of(1)).unwrap();
        assert!(exposition.drained(Duration::ZERO).await, "without a scraper");
        exposition.scrape();
        assert!(exposition.drained(Duration::ZERO).await);
        sink.update(&run_of(2)).unwrap();
        assert!(!exposition.drained(Duration::from_millis(1)).await);
        let (drained, _) =
            tokio::join!(exposition.drained(Duration::from_mins(1)), async { exposition.scrape() });
        assert!(drained);
    }
}
