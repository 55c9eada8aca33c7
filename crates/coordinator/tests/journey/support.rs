//! A deterministic world around the run loop.

use crate::parts::{Hook, Kill, ToyEngine, ToyEpisodes, ToySandboxes, ToyTrainer, mix, shape};
use camino::Utf8PathBuf;
use orchestrate_coordinator::{
    Coordinator, DiagnosticsSection, Evaluation, EvaluationPlan, Event, Plan, Reporter, RunEnd,
    RunError, RunSection, SamplingPlan, Stop, TaskSet,
};
use orchestrate_handoff::{AlgorithmSection, HandoffSection};
use orchestrate_rollout::EpisodeRequest;
use orchestrate_store::{NewRun, RunKind, Store, StoreError};
use orchestrate_tasks::{Split, Task};
use orchestrate_types::{GroupId, HumanDuration, Limit, ModelName, Outcome, RunId, Stage, TaskId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::Notify;

/// Everything outside of the coordinator, and its run folder.
pub(crate) struct World {
    /// Whether lost attempts are continued at the next start.
    pub(crate) continues: bool,
    _temp: TempDir,
    pub(crate) folder: Utf8PathBuf,
    pub(crate) episodes: Arc<ToyEpisodes>,
    pub(crate) engine: Arc<ToyEngine>,
    pub(crate) trainer: Arc<ToyTrainer>,
    pub(crate) sandboxes: Arc<ToySandboxes>,
    pub(crate) plan: Plan,
    pub(crate) tasks: TaskSet,
    pub(crate) events: Arc<Mutex<Vec<Event>>>,
}

/// Seed of the runs.
const SEED: u64 = 11;

/// Outcomes of a typical run: episodes succeed half the time, some break on their first attempt, and
/// some are truncated. Tasks whose id ends with `easy` are always solved.
pub(crate) fn usual(request: &EpisodeRequest) -> Outcome {
    let id = request.attempt.episode;
    let group = match id.group {
        GroupId::Train { seq } => u64::from(seq),
        GroupId::Eval { index, .. } => 1000 + u64::from(index),
    };
    let hash = mix(&[group, u64::from(id.member), 3]);
    // A retry has another seed. An attempt that a kill lost is repeated with its own.
    if hash.is_multiple_of(7) && request.seed == orchestrate_coordinator::episode_seed(SEED, id) {
        return Outcome::Broken { stage: Stage::Setup, error: "no container".into() };
    }
    let easy = request.task.id.ends_with("easy");
    let solved = easy || mix(&[request.seed, request.policy_version.0]).is_multiple_of(2);
    let reward = f64::from(u8::from(solved));
    if hash.is_multiple_of(5) {
        Outcome::Truncated { limit: Limit::Turns, reward }
    } else {
        Outcome::Scored { reward }
    }
}

pub(crate) fn task(id: &str, split: Split) -> Arc<Task> {
    Arc::new(Task {
        id: TaskId::made_of(id),
        environment: "toy".into(),
        family: "toy".into(),
        split,
        problem_statement: String::new(),
        image: "toy".into(),
        workdir: "/w".into(),
        agent_files: Vec::new(),
        hidden_files: Vec::new(),
        test_command: String::new(),
        test_timeout: Duration::from_secs(1),
        expected: BTreeMap::new(),
        gold_patch: String::new(),
        origin: orchestrate_tasks::Origin::Files,
    })
}

pub(crate) fn plan(steps: u32) -> Plan {
    let run = RunSection {
        seed: Some(SEED),
        steps: Some(steps),
        eval_every: Some(1),
        eval_tasks: Some(2),
        eval_held_out_families: Some(1),
        retry_pause: Some(HumanDuration(Duration::ZERO)),
        max_broken_share: Some(0.5),
        ..RunSection::default()
    };
    Plan {
        run: run.check().unwrap(),
        sampling: SamplingPlan {
            group_size: 3,
            groups_per_step: 2,
            max_groups_per_step: 6,
            max_in_flight: 4,
            max_attempts: 3,
            temperature: 1.0,
        },
        algorithm: AlgorithmSection::default().check().unwrap(),
        handoff: HandoffSection::default().check().unwrap(),
        diagnostics: DiagnosticsSection { no_replay_every: Some(2), on_collapse: None }
            .check()
            .unwrap(),
        model_name: ModelName::made_of("toy-model"),
    }
}

impl World {
    pub(crate) fn new(
        plan: Plan,
        script: impl Fn(&EpisodeRequest) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        // Synced writes cost nothing on a memory file system, and these tests make many.
        let temp = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let folder = Utf8PathBuf::from_path_buf(temp.path().join("run")).unwrap();
        let kill = Kill::never();
        let engine = Arc::new(ToyEngine {
            shape: shape(),
            version: Mutex::new(None),
            kill: Mutex::new(kill.clone()),
        });
        let names = ["a", "b", "c-easy", "d", "e"];
        let train = names.iter().map(|name| task(name, Split::Train)).collect();
        let held_out = (0..3).map(|i| task(&format!("h{i}"), Split::HeldOut)).collect();
        let families = (0..2).map(|i| task(&format!("f{i}"), Split::HeldOutFamilies)).collect();
        Self {
            _temp: temp,
            folder,
            episodes: Arc::new(ToyEpisodes {
                script: Box::new(script),
                engine: engine.clone(),
                requests: Mutex::default(),
                running: AtomicUsize::new(0),
                most_running: AtomicUsize::new(0),
                started: Notify::new(),
                hold: AtomicBool::new(false),
                unfinished: Mutex::default(),
            }),
            engine,
            trainer: Arc::new(ToyTrainer {
                state: Mutex::default(),
                requests: Mutex::default(),
                fail: AtomicBool::new(false),
                yields: AtomicUsize::new(0),
                may_finish: tokio::sync::watch::Sender::new(u32::MAX),
                sick: AtomicBool::new(false),
                kill: Mutex::new(kill),
            }),
            sandboxes: Arc::default(),
            continues: false,
            plan,
            tasks: TaskSet { train, held_out, held_out_families: families },
            events: Arc::default(),
        }
    }

    /// Opens or creates the journal as a newly started process would.
    pub(crate) async fn store(&self, kind: RunKind) -> Store {
        let run: RunId = "01900000-0000-7000-8000-000000000001".parse().unwrap();
        loop {
            let opened = match Store::open(&self.folder).await {
                Err(StoreError::Missing { .. }) => {
                    let new = NewRun { run, plan_digest: "d".into(), kind };
                    Store::create(&self.folder, &new).await
                }
                other => other,
            };
            match opened {
                Ok(store) => return store,
                // Tasks of the "killed" coordinator are dropped when the runtime gets to them;
                // a real kill frees the lock at once.
                Err(StoreError::Locked { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Opens the journal as a newly started process does. Its failpoints let `kill` end the run.
    async fn restarted(&self, kill: &Arc<Kill>, kind: RunKind) -> Store {
        let mut store = self.store(kind).await;
        store.set_failpoint(Arc::new(Hook(kill.clone())));
        // A new process: engines have to be told their weights again.
        *self.engine.version.lock().unwrap() = None;
        *self.engine.kill.lock().unwrap() = kill.clone();
        *self.trainer.kill.lock().unwrap() = kill.clone();
        self.episodes.running.store(0, Ordering::SeqCst);
        if self.continues {
            let lost = store.reader().lost_attempts().await.unwrap();
            *self.episodes.unfinished.lock().unwrap() = lost;
        }
        store
    }

    fn reporter(&self) -> Arc<dyn Reporter> {
        let events = self.events.clone();
        Arc::new(move |event: &Event| events.lock().unwrap().push(event.clone()))
    }

    pub(crate) async fn coordinator(&self, kill: &Arc<Kill>) -> Coordinator {
        Coordinator {
            folder: self.folder.clone(),
            store: self.restarted(kill, RunKind::Training).await,
            episodes: self.episodes.clone(),
            engine: self.engine.clone(),
            trainer: self.trainer.clone(),
            sandboxes: Some(self.sandboxes.clone()),
            tasks: self.tasks.clone(),
            plan: self.plan.clone(),
            reporter: self.reporter(),
        }
    }

    /// An evaluation of the checkpoint `/toy/start` by the plan of the run.
    pub(crate) async fn evaluation(&self, kill: &Arc<Kill>) -> Evaluation {
        Evaluation {
            folder: self.folder.clone(),
            store: self.restarted(kill, RunKind::Evaluation).await,
            episodes: self.episodes.clone(),
            engine: self.engine.clone(),
            checkpoint: "/toy/start".into(),
            sandboxes: Some(self.sandboxes.clone()),
            tasks: self.tasks.clone(),
            plan: EvaluationPlan {
                run: self.plan.run.clone(),
                sampling: self.plan.sampling.clone(),
                model_name: self.plan.model_name.clone(),
            },
            reporter: self.reporter(),
        }
    }

    /// Runs until the end; `None` if `kill` ended the run first.
    pub(crate) async fn start(&self, kill: &Arc<Kill>) -> Option<Result<RunEnd, RunError>> {
        let coordinator = self.coordinator(kill).await;
        tokio::select! {
            biased;
            () = kill.died.notified() => None,
            end = coordinator.run(Stop::default()) => Some(end),
        }
    }

    pub(crate) async fn finish(&self) -> RunEnd {
        self.start(&Kill::never()).await.unwrap().unwrap()
    }

    /// The metrics that must not depend on kills: without times and without the number of attempts.
    pub(crate) fn metrics(&self) -> Vec<serde_json::Value> {
        let text = fs_err::read_to_string(self.folder.join("metrics.jsonl")).unwrap();
        let strip = |line: &str| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().retain(|key, _| {
                let timing = ["time", "loop_lag_", "tokens_per_s"];
                !timing.iter().any(|name| key.starts_with(name))
                    && !key.starts_with("broken_attempts")
            });
            line
        };
        text.lines().map(strip).collect()
    }

    /// Outcomes of all sealed episodes, by episode id.
    pub(crate) async fn sealed(&self) -> BTreeMap<String, Outcome> {
        let reader = orchestrate_store::Reader::open(&self.folder).await.unwrap();
        let mut sealed = BTreeMap::new();
        for episode in reader.episodes().await.unwrap() {
            let loaded = reader.load_episode(episode.id).await.unwrap();
            if episode.state == orchestrate_store::EpisodeState::Sealed {
                sealed.insert(episode.id.to_string(), loaded.record.unwrap().outcome);
            }
        }
        sealed
    }
}
