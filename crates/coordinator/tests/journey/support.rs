//! A deterministic world around the run loop: scripted episodes, a toy trainer that outlives the
//! coordinator, an engine that forgets its weights when "restarted", and a kill switch.

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_coordinator::{
    Coordinator, DiagnosticsSection, Event, Plan, RunEnd, RunError, RunSection, SamplingPlan,
    StepProgress, Stop, TaskSet, TrainerSink,
};
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, GenerateRequest, Generation,
};
use orchestrate_handoff::protocol::{
    Mismatch, PROTOCOL_VERSION, StepMetrics, StepRequest, StepResult, TrainerInfo,
};
use orchestrate_handoff::{
    AlgorithmSection, Batch, HandoffSection, TrainerError, TrainerErrorKind,
};
use orchestrate_rollout::{EpisodeReport, EpisodeRequest, Episodes, Timings, TurnLog};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_sandbox::{Sandbox, SandboxError, SandboxProvider, SandboxSpec, SweepReport};
use orchestrate_store::{Failpoint, NewRun, Store, StoreError};
use orchestrate_tasks::{Split, Task};
use orchestrate_types::{
    AbortCause, GroupId, HumanDuration, Limit, ModelShape, Outcome, PolicyVersion, RequestId,
    RunId, Stage, Trajectory, TurnSpan,
};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Stops the world at the n-th point it passes.
#[derive(Debug, Default)]
pub(crate) struct Kill {
    left: AtomicUsize,
    dead: AtomicBool,
    died: Notify,
    pub(crate) names: Mutex<BTreeSet<String>>,
}

impl Kill {
    pub(crate) fn after(points: usize) -> Arc<Self> {
        let kill = Self { left: AtomicUsize::new(points), ..Self::default() };
        Arc::new(kill)
    }

    pub(crate) fn never() -> Arc<Self> {
        Self::after(usize::MAX)
    }

    pub(crate) async fn pass(&self, name: &str) {
        self.names.lock().unwrap().insert(name.to_owned());
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        if left <= 1 || self.dead.load(Ordering::SeqCst) {
            self.left.store(0, Ordering::SeqCst);
            self.dead.store(true, Ordering::SeqCst);
            self.died.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

#[derive(Debug)]
struct Hook(Arc<Kill>);

impl Failpoint for Hook {
    fn reach(&self, name: &str) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (kill, name) = (self.0.clone(), name.to_owned());
        Box::pin(async move { kill.pass(&name).await })
    }
}

pub(crate) fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 2,
        moe_layers: vec![0, 1],
        experts: 4,
        top_k: 2,
        vocab: 100,
        context: 64,
    }
}

pub(crate) fn mix(values: &[u64]) -> u64 {
    values.iter().fold(0x9E37_79B9_7F4A_7C15, |hash, &value| {
        let mixed = (hash ^ value).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^ (mixed >> 29)
    })
}

/// What scripted episodes do.
pub(crate) type Script = dyn Fn(&EpisodeRequest) -> Outcome + Send + Sync;

pub(crate) struct ToyEpisodes {
    pub(crate) script: Box<Script>,
    pub(crate) engine: Arc<ToyEngine>,
    pub(crate) requests: Mutex<Vec<EpisodeRequest>>,
    pub(crate) running: AtomicUsize,
    pub(crate) most_running: AtomicUsize,
    pub(crate) started: Notify,
    /// Episodes wait for the stop token instead of ending.
    pub(crate) hold: AtomicBool,
}

impl std::fmt::Debug for ToyEpisodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ToyEpisodes")
    }
}

#[async_trait::async_trait]
impl Episodes for ToyEpisodes {
    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        self.requests.lock().unwrap().push(request.clone());
        self.started.notify_one();
        assert_eq!(
            self.engine.version(),
            Some(request.policy_version),
            "generating with weights that are not live"
        );
        let aborted = if self.hold.load(Ordering::SeqCst) {
            stop.cancelled().await;
            true
        } else {
            for _ in 0..mix(&[request.seed, 7]) % 5 {
                tokio::task::yield_now().await;
            }
            stop.is_cancelled()
        };
        self.running.fetch_sub(1, Ordering::SeqCst);
        let outcome = if aborted {
            Outcome::Aborted { by: AbortCause::Shutdown }
        } else {
            (self.script)(&request)
        };
        report(&request, outcome)
    }
}

fn report(request: &EpisodeRequest, outcome: Outcome) -> EpisodeReport {
    let tokens = 6 + usize::try_from(mix(&[request.seed, 1]) % 5).unwrap();
    let id = |t: usize| u32::try_from(mix(&[request.seed, t as u64]) % 100).unwrap();
    let version = request.policy_version;
    let trajectory = Trajectory::new(
        (0..tokens).map(id).collect(),
        (0..tokens).map(|t| u8::from(t >= 4)).collect(),
        (0..tokens).map(|t| if t >= 4 { -0.5 } else { 0.0 }).collect(),
        vec![i64::try_from(version.0).unwrap(); tokens],
        vec![TurnSpan {
            prompt_end: 4,
            output_end: tokens,
            policy_version: version,
            cached_tokens: 0,
            finish: "stop".into(),
        }],
    )
    .unwrap();
    let rows: Vec<u8> =
        (0..tokens - 1).flat_map(|t| [0, 1, 2, if t % 2 == 0 { 3 } else { 1 }]).collect();
    let versions = vec![RowVersion { start: 0, end: tokens - 1, version }];
    let missing = request.task.id.contains("unrouted");
    let routing = (request.want_routing && !missing)
        .then(|| RoutingMask::new(Arc::new(shape()), &rows, versions).unwrap());
    let turn = TurnLog {
        text: "ls".into(),
        actions: Vec::new(),
        observation: "files".into(),
        generate_ms: 1,
        exec_ms: 1,
        fork: None,
    };
    EpisodeReport {
        attempt: request.attempt,
        outcome,
        trajectory: Some(trajectory),
        routing_problem: missing.then(|| "engine sent none".to_owned()),
        routing,
        turns: vec![turn; 2],
        patch: format!("patch of {}", request.task.id),
        verdict: None,
        routing_drift: 0,
        routing_wire_bytes: 10,
        routing_rows_reused: 1,
        routing_rows_shared: 0,
        routing_rows_mixed: 0,
        prompt_tokens: 20,
        cached_tokens: 5,
        cacheable_tokens: 10,
        timings: Timings { setup_s: 0.5, generate_s: 1.0, exec_s: 0.25, grade_s: 0.25 },
    }
}

#[derive(Debug)]
pub(crate) struct ToyEngine {
    shape: ModelShape,
    version: Mutex<Option<PolicyVersion>>,
    kill: Mutex<Arc<Kill>>,
}

impl ToyEngine {
    pub(crate) fn version(&self) -> Option<PolicyVersion> {
        *self.version.lock().unwrap()
    }
}

fn engine_error() -> EngineError {
    let kind = EngineErrorKind::Unreachable("toy".into());
    EngineError { engine: "toy".into(), call: "generate", kind }
}

#[async_trait::async_trait]
impl Engine for ToyEngine {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        Err(engine_error())
    }
    fn shape(&self) -> &ModelShape {
        &self.shape
    }
    async fn generate(&self, _request: GenerateRequest) -> Result<Generation, EngineError> {
        Err(engine_error())
    }
    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let kill = self.kill.lock().unwrap().clone();
        kill.pass("engine.before").await;
        *self.version.lock().unwrap() = Some(version);
        kill.pass("engine.after").await;
        Ok(())
    }
    async fn abort(&self, _request_id: &RequestId) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Deterministic "training": weights are a digest of everything applied, in order.
#[derive(Debug)]
pub(crate) struct ToyTrainer {
    pub(crate) state: Mutex<ToyWeights>,
    pub(crate) requests: Mutex<Vec<StepRequest>>,
    pub(crate) fail: AtomicBool,
    pub(crate) yields: AtomicUsize,
    /// It finishes no later step than this.
    pub(crate) may_finish: tokio::sync::watch::Sender<u32>,
    /// Its probabilities are far from the engine's.
    pub(crate) sick: AtomicBool,
    kill: Mutex<Arc<Kill>>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ToyWeights {
    pub(crate) version: u64,
    pub(crate) digest: String,
    pub(crate) applied: Vec<String>,
    pub(crate) results: BTreeMap<String, StepResult>,
    pub(crate) trained: Vec<BTreeSet<String>>,
}

#[async_trait::async_trait]
impl TrainerSink for ToyTrainer {
    async fn info(&self) -> Result<TrainerInfo, TrainerError> {
        let state = self.state.lock().unwrap();
        Ok(TrainerInfo {
            protocol_version: PROTOCOL_VERSION,
            trainer: "toy".into(),
            model: shape(),
            algorithms: vec!["grpo".into()],
            policy_version: PolicyVersion(state.version),
            lineage: 0,
            last_step_id: state.applied.last().cloned(),
            checkpoint: format!("/toy/{}", state.version).into(),
            world_size: 1,
            devices: Vec::new(),
        })
    }

    async fn apply(
        &self,
        request: &StepRequest,
        _progress: &StepProgress,
    ) -> Result<StepResult, TrainerError> {
        let kill = self.kill.lock().unwrap().clone();
        kill.pass("trainer.before").await;
        if self.fail.load(Ordering::SeqCst) {
            let (step_id, error) = (request.step_id.clone(), "loss is NaN".to_owned());
            let kind = TrainerErrorKind::StepFailed { step_id, error };
            return Err(TrainerError { trainer: "toy".into(), call: "apply", kind });
        }
        let step: u32 = request.step_id.rsplit('-').next().unwrap().parse().unwrap();
        self.may_finish.subscribe().wait_for(|&last| step <= last).await.unwrap();
        for _ in 0..self.yields.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
        }
        let result = self.apply_once(request);
        kill.pass("trainer.after").await;
        Ok(result)
    }
}

impl ToyTrainer {
    fn apply_once(&self, request: &StepRequest) -> StepResult {
        self.requests.lock().unwrap().push(request.clone());
        let mut state = self.state.lock().unwrap();
        if let Some(result) = state.results.get(&request.step_id) {
            return result.clone();
        }
        assert_eq!(request.base_version.0, state.version, "a step on the wrong weights");
        let folder = request.manifest.parent().unwrap();
        Batch::open(&request.manifest).unwrap();
        let manifest = fs_err::read(&request.manifest).unwrap();
        state.digest =
            blake3::hash(&[state.digest.as_bytes(), &manifest].concat()).to_hex().to_string();
        state.trained.push(episodes_of(folder));
        state.version += 1;
        let extreme = if self.sick.load(Ordering::SeqCst) { 0.5 } else { 1e-4 };
        let mismatch = Mismatch {
            kl_k3: 1e-3,
            mean_abs_logprob_diff: 1e-2,
            mean_abs_prob_diff: 2e-3,
            extreme_token_fraction: BTreeMap::from([("2".to_owned(), extreme)]),
            ..Mismatch::default()
        };
        let result = StepResult {
            policy_version: PolicyVersion(state.version),
            checkpoint: format!("/toy/{}", state.version).into(),
            metrics: StepMetrics {
                mismatch_no_replay: request
                    .hyperparameters
                    .measure_no_replay
                    .then(|| Mismatch { kl_k3: 3e-3, ..mismatch.clone() }),
                mismatch,
                grad_norm: 0.5,
                tokens: 100,
                ..StepMetrics::default()
            },
        };
        state.applied.push(request.step_id.clone());
        state.results.insert(request.step_id.clone(), result.clone());
        result
    }
}

fn episodes_of(folder: &Utf8Path) -> BTreeSet<String> {
    let bytes = fs_err::read(folder.join("0000.safetensors")).unwrap();
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let ids = header["__metadata__"]["episode_ids"].as_str().unwrap();
    serde_json::from_str(ids).unwrap()
}

#[derive(Debug, Default)]
pub(crate) struct ToySandboxes {
    pub(crate) swept_below: Mutex<Vec<i64>>,
    pub(crate) shut_down: AtomicUsize,
}

#[async_trait::async_trait]
impl SandboxProvider for ToySandboxes {
    async fn open(&self, _spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        panic!("scripted episodes open no sandboxes")
    }
    async fn sweep(&self, _run: RunId, epoch: i64) -> Result<SweepReport, SandboxError> {
        self.swept_below.lock().unwrap().push(epoch);
        Ok(SweepReport::default())
    }
    async fn shutdown(&self) -> Result<(), SandboxError> {
        self.shut_down.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Everything outside the coordinator, and its run folder.
pub(crate) struct World {
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

/// Most episodes succeed half the time; a few are broken once, one task is always solved.
pub(crate) fn usual(request: &EpisodeRequest) -> Outcome {
    let id = request.attempt.episode;
    let group = match id.group {
        GroupId::Train { seq } => u64::from(seq),
        GroupId::Eval { index, .. } => 1000 + u64::from(index),
    };
    let hash = mix(&[group, u64::from(id.member), 3]);
    if hash.is_multiple_of(7) && request.attempt.attempt % 2 == 1 {
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
        id: id.to_owned(),
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
        seed: Some(11),
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
        handoff: HandoffSection::default().plan(),
        diagnostics: DiagnosticsSection { no_replay_every: Some(2), on_collapse: None }
            .check()
            .unwrap(),
        model_name: "toy-model".into(),
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
            plan,
            tasks: TaskSet { train, held_out, held_out_families: families },
            events: Arc::default(),
        }
    }

    /// Opens (or creates) the journal as a freshly started process would.
    pub(crate) async fn store(&self) -> Store {
        let run: RunId = "01900000-0000-7000-8000-000000000001".parse().unwrap();
        loop {
            let opened = match Store::open(&self.folder).await {
                Err(StoreError::Missing { .. }) => {
                    let new = NewRun { run, plan_digest: "d".into() };
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

    pub(crate) async fn coordinator(&self, kill: &Arc<Kill>) -> Coordinator {
        let mut store = self.store().await;
        store.set_failpoint(Arc::new(Hook(kill.clone())));
        // A new process: engines have to be told their weights again.
        *self.engine.version.lock().unwrap() = None;
        *self.engine.kill.lock().unwrap() = kill.clone();
        *self.trainer.kill.lock().unwrap() = kill.clone();
        self.episodes.running.store(0, Ordering::SeqCst);
        let events = self.events.clone();
        Coordinator {
            folder: self.folder.clone(),
            store,
            episodes: self.episodes.clone(),
            engine: self.engine.clone(),
            trainer: self.trainer.clone(),
            sandboxes: self.sandboxes.clone(),
            tasks: self.tasks.clone(),
            plan: self.plan.clone(),
            reporter: Arc::new(move |event: &Event| events.lock().unwrap().push(event.clone())),
        }
    }

    /// Runs until its end or until `kill` strikes (`None`).
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

    /// What must not depend on faults: metrics without times and without the count of attempts.
    pub(crate) fn metrics(&self) -> Vec<serde_json::Value> {
        let text = fs_err::read_to_string(self.folder.join("metrics.jsonl")).unwrap();
        let strip = |line: &str| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().retain(|key, _| {
                let of_the_clock = ["time_", "loop_lag_", "tokens_per_s"];
                !of_the_clock.iter().any(|name| key.starts_with(name)) && key != "broken_attempts"
            });
            line
        };
        text.lines().map(strip).collect()
    }

    /// Ids of all sealed episodes, with the digest of what was stored.
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
