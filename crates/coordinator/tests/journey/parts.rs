//! Fakes of the parts around the run loop: scripted episodes, a toy trainer that outlives the
//! coordinator, an engine that forgets its weights when "restarted", and a kill switch.

use camino::Utf8Path;
use orchestrate_coordinator::{StepProgress, TrainerSink};
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, GenerateRequest, Reply,
};
use orchestrate_handoff::protocol::{
    Disagreement, HalfDecades, Mismatch, PROTOCOL_VERSION, ProbabilityGrid, StepMetrics,
    StepRequest, StepResult, TrainerInfo,
};
use orchestrate_handoff::{Batch, TrainerError, TrainerErrorKind};
use orchestrate_rollout::{
    EpisodeBranch, EpisodeReport, EpisodeRequest, Episodes, Timings, TurnLog,
};
use orchestrate_routing::{RoutingMask, RowVersion};
use orchestrate_sandbox::{Sandbox, SandboxError, SandboxProvider, SandboxSpec, SweepReport};
use orchestrate_store::Failpoint;
use orchestrate_types::{
    AbortCause, AttemptId, ModelShape, Outcome, PolicyVersion, RunId, Trajectory, TurnSpan,
};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
/// Stops everything at the n-th point that is passed.
#[derive(Debug, Default)]
pub(crate) struct Kill {
    left: AtomicUsize,
    dead: AtomicBool,
    pub(crate) died: Notify,
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
pub(crate) struct Hook(pub(crate) Arc<Kill>);

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

/// The outcome of a scripted episode.
pub(crate) type Script = dyn Fn(&EpisodeRequest) -> Outcome + Send + Sync;

pub(crate) struct ToyEpisodes {
    pub(crate) script: Box<Script>,
    pub(crate) engine: Arc<ToyEngine>,
    pub(crate) requests: Mutex<Vec<EpisodeRequest>>,
    pub(crate) running: AtomicUsize,
    pub(crate) most_running: AtomicUsize,
    pub(crate) started: Notify,
    /// Whether episodes wait for the stop token instead of ending.
    pub(crate) hold: AtomicBool,
    /// Attempts of an earlier process that are continued.
    pub(crate) unfinished: Mutex<Vec<AttemptId>>,
}

impl std::fmt::Debug for ToyEpisodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ToyEpisodes")
    }
}

#[async_trait::async_trait]
impl Episodes for ToyEpisodes {
    fn unfinished(&self) -> Vec<AttemptId> {
        std::mem::take(&mut *self.unfinished.lock().unwrap())
    }

    async fn run(&self, request: EpisodeRequest, stop: &CancellationToken) -> EpisodeReport {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        self.requests.lock().unwrap().push(request.clone());
        self.started.notify_one();
        tracing::debug!(attempt = %request.attempt, "scripted episode");
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
        unread: None,
        observation: "files".into(),
        generate_ms: 1,
        exec_ms: 1,
        fork: None,
        overridden: Vec::new(),
    };
    EpisodeReport {
        attempt: request.attempt,
        outcome,
        // A task called so has episodes whose conversation forked.
        branches: vec![
            EpisodeBranch { trajectory, routing };
            if request.task.id.contains("forked") { 2 } else { 1 }
        ],
        forks: BTreeMap::new(),
        recognised: BTreeMap::new(),
        routing_problem: missing.then(|| "engine sent none".to_owned()),
        turns: vec![turn; 2],
        patch: format!("patch of {}", request.task.id),
        verdict: None,
        metrics: BTreeMap::new(),
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
    pub(crate) shape: ModelShape,
    pub(crate) version: Mutex<Option<PolicyVersion>>,
    pub(crate) kill: Mutex<Arc<Kill>>,
}

impl ToyEngine {
    pub(crate) fn version(&self) -> Option<PolicyVersion> {
        *self.version.lock().unwrap()
    }
}

fn engine_error() -> EngineError {
    let kind = EngineErrorKind::unreachable("toy");
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
    async fn generate(&self, _request: GenerateRequest) -> Result<Reply, EngineError> {
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
}

/// Deterministic "training": the weights are a digest of everything that was applied, in order.
#[derive(Debug)]
pub(crate) struct ToyTrainer {
    pub(crate) state: Mutex<ToyWeights>,
    pub(crate) requests: Mutex<Vec<StepRequest>>,
    pub(crate) fail: AtomicBool,
    pub(crate) yields: AtomicUsize,
    /// The last step that it may finish.
    pub(crate) may_finish: tokio::sync::watch::Sender<u32>,
    /// Whether its probabilities are far from the engine's.
    pub(crate) sick: AtomicBool,
    pub(crate) kill: Mutex<Arc<Kill>>,
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
        let mut sizes = HalfDecades::default();
        sizes.add(1e-2);
        let mismatch = Mismatch {
            kl_k3: 1e-3,
            mean_abs_logprob_diff: 1e-2,
            mean_abs_prob_diff: 2e-3,
            extreme_token_fraction: BTreeMap::from([("2".to_owned(), extreme)]),
            token_histogram: sizes.clone(),
            sequence_histogram: sizes.clone(),
            probability_grid: ProbabilityGrid::new(&BTreeMap::from([((3, 4), 9)])),
        };
        let no_replay = request.hyperparameters.measure_no_replay;
        let disagreement = Disagreement {
            router: 0.1,
            token: 0.2,
            sequence_mean: 0.3,
            sequence_mean_experts: 0.4,
            histogram: vec![0.9, 0.1, 0.0],
            by_layer: vec![0.1, 0.1],
            token_histogram: vec![0.8, 0.2, 0.0],
            sequence_histogram: sizes,
        };
        let result = StepResult {
            policy_version: PolicyVersion(state.version),
            checkpoint: format!("/toy/{}", state.version).into(),
            metrics: StepMetrics {
                mismatch_no_replay: no_replay.then(|| Mismatch { kl_k3: 3e-3, ..mismatch.clone() }),
                disagreement: no_replay.then_some(disagreement),
                mismatch,
                grad_norm: 0.5,
                tokens: 100,
                loss_tokens: 30,
                expert_load_entropy: vec![1.0, 0.5],
                expert_load: vec![vec![1.5, 0.5], vec![1.0, 1.0]],
                route_drift: Some(0.25),
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
