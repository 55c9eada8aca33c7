//! What a run is doing and what it waits for, from its open spans: every wait of the coordinator is in one,
//! so the report needs no bookkeeping of its own.
//!
//! The process that drives a run writes a [`Status`] into the run folder once a second; `orchestrate status`
//! reads it.

use crate::live::StageCounts;
use crate::spans::{self, Wait};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_types::unix_micros;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;

/// Name of the file in the run folder.
const STATUS_FILE: &str = "status.json";
/// Time between two updates of the file.
const PERIOD: Duration = Duration::from_secs(1);
/// Largest file that is read.
const FILE_LIMIT: u64 = 4 << 20;

/// What a process is doing, as written to the run folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// The writing process.
    pub(crate) pid: u32,
    /// When it was written, µs since the Unix epoch.
    pub(crate) time_us: i64,
    /// Open stages, innermost last.
    pub(crate) stages: Vec<Wait>,
    /// Progress of the stage that samples.
    pub(crate) counts: StageCounts,
    /// Number of open waits of episodes, by what they wait for.
    pub(crate) open: BTreeMap<String, usize>,
    /// The longest waits of episodes, longest first.
    pub(crate) waits: Vec<Wait>,
}

/// Writes the status of this process into a run folder until it is dropped, which removes it.
#[derive(Debug)]
pub(crate) struct Writer {
    /// The file; `None` once nothing may be written any more. Held while it is written.
    path: Arc<Mutex<Option<Utf8PathBuf>>>,
    /// Aborted when it is dropped.
    _tasks: JoinSet<()>,
}

impl Writer {
    /// Starts to write. Nothing is written if [`spans::layer`] was not installed.
    pub(crate) fn start(
        folder: &Utf8Path,
        counts: impl Fn() -> StageCounts + Send + 'static,
    ) -> Self {
        let path = Arc::new(Mutex::new(Some(folder.join(STATUS_FILE))));
        let file = Arc::clone(&path);
        let work = async move {
            let Some(spans) = spans::open() else { return };
            let mut was_written = true;
            let mut ticks = tokio::time::interval(PERIOD);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let (stages, open, waits) = spans.snapshot();
                let (pid, time_us) = (std::process::id(), unix_micros());
                let status = Status { pid, time_us, stages, counts: counts(), open, waits };
                let file = Arc::clone(&file);
                let written = tokio::task::spawn_blocking(move || {
                    let path = file.lock().unwrap_or_else(PoisonError::into_inner);
                    path.as_ref().map_or(Ok(()), |path| write(path, &status))
                });
                let written = written.await;
                let error = match written {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error.to_string()),
                    Err(error) => Some(error.to_string()),
                };
                if let (Some(error), true) = (&error, was_written) {
                    tracing::warn!(error, "the run's status cannot be written");
                }
                was_written = error.is_none();
            }
        };
        // A task of its own: it also reports when the run's task is stuck.
        let mut tasks = JoinSet::new();
        tasks.spawn(work);
        Self { path, _tasks: tasks }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A write that is under way ends first. The file says nothing once the process has ended; one that
        // is left is recognised by its process.
        let path = self.path.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = path.map(std::fs::remove_file);
    }
}

/// Replaces the file. It is not forced to the disk: after a power failure it means nothing.
fn write(path: &Utf8Path, status: &Status) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    let mut file = tempfile::Builder::new().prefix(".status").tempfile_in(folder)?;
    serde_json::to_writer(&mut file, status)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// The status of the process `holder` (`pid N on host H`), if it wrote one that can be read. It only adds to what
/// the journal says, so a file that cannot be read is left out: another process may be replacing it, or be of another version.
pub(crate) fn read(folder: &Utf8Path, holder: &str) -> Option<Status> {
    let path = folder.join(STATUS_FILE);
    // Not a link, a pipe or a device.
    if !std::fs::symlink_metadata(&path).ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    std::fs::File::open(&path).ok()?.take(FILE_LIMIT).read_to_string(&mut text).ok()?;
    let status: Status = serde_json::from_str(&text).ok()?;
    holder
        .split_whitespace()
        .nth(1)
        .is_some_and(|pid| pid == status.pid.to_string())
        .then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_belongs_to_the_process_that_holds_the_run() {
        let temp = tempfile::tempdir().unwrap();
        let folder = Utf8Path::from_path(temp.path()).unwrap();
        let status = Status {
            pid: 7,
            time_us: 1,
            stages: Vec::new(),
            counts: StageCounts::default(),
            open: BTreeMap::new(),
            waits: Vec::new(),
        };
        write(&folder.join(STATUS_FILE), &status).unwrap();
        assert_eq!(read(folder, "pid 7 on host a"), Some(status));
        assert_eq!(read(folder, "pid 77 on host a"), None);
    }
}
