//! Sinks over a real journal: slow ones, failing ones, and their end.

use super::*;
use camino::Utf8PathBuf;
use orchestrate_store::{NewRun, RunKind, Store};
use orchestrate_types::{PolicyVersion, RunId};
use serde_json::json;
use std::sync::mpsc;

/// More than any step of a test takes.
const LONG: Duration = Duration::from_mins(2);

struct World {
    _folder: tempfile::TempDir,
    store: Store,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl World {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8PathBuf::from_path_buf(folder.path().to_owned()).unwrap();
        let (run, plan_digest, kind) = (RunId::generate(), String::new(), RunKind::Training);
        let new = NewRun { run, plan_digest, kind };
        let store = Store::create(&path, &new).await.unwrap();
        Self { _folder: folder, store, warnings: Arc::default() }
    }

    /// Journals the line of an evaluation round.
    async fn journal(&self, round: u32) {
        self.store.open_eval(round, PolicyVersion(0)).await.unwrap();
        let line = json!({"global_step": round, "policy_version": 0, "eval_tasks": 5});
        self.store.finish_eval(round, &line).await.unwrap();
    }

    fn start(&self, sinks: Vec<Box<dyn Sink>>) -> Sinks {
        let warnings = self.warnings.clone();
        let warn: Warn = Arc::new(move |text| warnings.lock().unwrap().push(text.to_owned()));
        Sinks::start(&self.store, sinks, warn).unwrap()
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap().clone()
    }
}

/// Sends the number of lines of each update; fails while `broken` is set.
struct Recorder {
    seen: mpsc::SyncSender<usize>,
    broken: Arc<Mutex<bool>>,
}

fn recorder(broken: bool) -> (Box<dyn Sink>, mpsc::Receiver<usize>, Arc<Mutex<bool>>) {
    let (seen, updates) = mpsc::sync_channel(1000);
    let broken = Arc::new(Mutex::new(broken));
    (Box::new(Recorder { seen, broken: broken.clone() }), updates, broken)
}

impl Sink for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn update(&mut self, lines: &[Line]) -> Result<(), SinkError> {
        let broken = *self.broken.lock().unwrap();
        self.seen.send(lines.len()).unwrap();
        if broken {
            return Err(SinkError::file("/full".into())(std::io::Error::other("no space")));
        }
        Ok(())
    }
}

/// A sink that never returns.
struct Hanging(mpsc::Receiver<()>);

impl Sink for Hanging {
    fn name(&self) -> &'static str {
        "hanging"
    }

    fn update(&mut self, _: &[Line]) -> Result<(), SinkError> {
        self.0.recv().ok();
        Ok(())
    }
}

fn until(updates: &mpsc::Receiver<usize>, lines: usize) {
    while updates.recv_timeout(LONG).unwrap() != lines {}
}

#[tokio::test(flavor = "multi_thread")]
async fn every_journaled_line_arrives_although_another_sink_hangs() {
    let world = World::new().await;
    world.journal(0).await;
    let (release, hangs) = mpsc::sync_channel(1);
    let (sink, updates, _) = recorder(false);
    let sinks = world.start(vec![Box::new(Hanging(hangs)), sink]);
    let journaled = sinks.journaled();
    until(&updates, 1);
    for round in 1..4 {
        world.journal(round).await;
        journaled();
        until(&updates, round as usize + 1);
    }
    // Journaled without a notice: the end reads it.
    world.journal(4).await;
    sinks.finish(Duration::from_secs(1)).await;
    until(&updates, 5);
    let warnings = world.warnings();
    let of_the_hanging: Vec<_> =
        warnings.iter().filter(|text| text.contains("hanging did not finish within 1s")).collect();
    assert!(of_the_hanging.len() == 1 && of_the_hanging[0].contains("--resume"), "{warnings:?}");
    drop(release);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_sink_warns_once_and_gets_all_lines_once_it_works() {
    let world = World::new().await;
    let (sink, updates, broken) = recorder(true);
    let sinks = world.start(vec![sink]);
    let journaled = sinks.journaled();
    for round in 0..3 {
        world.journal(round).await;
        journaled();
        until(&updates, round as usize + 1);
    }
    *broken.lock().unwrap() = false;
    sinks.finish(LONG).await;
    until(&updates, 3);
    let warnings = world.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("sink recorder: cannot write /full: no space"), "{warnings:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sink_that_still_fails_at_the_end_is_named() {
    let world = World::new().await;
    let (sink, _updates, _) = recorder(true);
    world.start(vec![sink]).finish(LONG).await;
    let warnings = world.warnings();
    assert!(warnings.iter().any(|text| text.contains("recorder still failed")), "{warnings:?}");
}
