//! The trainer as a service: one thread that owns model and optimizer, and a handle that answers.
//!
//! The invariant: a step is `Done` only when its checkpoint is on disk; a step that fails leaves
//! weights and optimizer as they were. Read [`super::step`] for what a step does.

use super::learner::Learner;
use super::model::TrainModel;
use super::step::{Measured, StepError, TrainBatch, apply, check_settings, measure};
use super::store::{AppliedStep, CheckpointStore, Restored, TrainerState};
use crate::{CheckpointError, ModelConfig};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::protocol::{
    CheckpointReply, LogprobsReply, LogprobsRequest, PROTOCOL_VERSION, PolicyLoss, StepRequest,
    StepResult, StepState, StepStatus, TrainerInfo,
};
use orchestrate_handoff::{Batch, BatchError};
use orchestrate_types::PolicyVersion;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::oneshot;

/// Jobs that may wait: one step and a few measurements; more is a client that does not listen.
const QUEUE: usize = 4;

/// How to run a trainer.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// Starting policy: a checkpoint folder. Read only while `checkpoints` is empty.
    pub policy: Utf8PathBuf,
    /// Folder of the trainer's own checkpoints, `v000000` and on.
    pub checkpoints: Utf8PathBuf,
    /// Newest checkpoints to keep, beside `v000000`.
    pub keep: usize,
    /// Folder that manifests must lie in; `None` = anywhere this process can read.
    pub batch_root: Option<Utf8PathBuf>,
    /// Bearer token that callers must send; `None` = none.
    pub token: Option<String>,
}

/// A call the trainer refuses.
#[derive(Debug, thiserror::Error)]
pub enum TrainerRefusal {
    /// The manifest's path is not one this trainer reads.
    #[error("manifest {path}: {problem}")]
    Path {
        /// As sent.
        path: Utf8PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The batch cannot be read.
    #[error("manifest {path}: {source}")]
    Batch {
        /// As sent.
        path: Utf8PathBuf,
        /// Why.
        source: Box<BatchError>,
    },
    /// The batch, or a setting, does not fit this trainer.
    #[error("{}", chain(.0))]
    Step(#[from] StepError),
    /// The manifest was written for another step.
    #[error("manifest {path} belongs to step {found}, not {expected}")]
    OtherStep {
        /// As sent.
        path: Utf8PathBuf,
        /// Step the manifest names.
        found: String,
        /// Step that was asked for.
        expected: String,
    },
    /// No such step.
    #[error("no step {0} is known: it was never submitted, or is too long ago")]
    UnknownStep(String),
    /// Something else is under way.
    #[error("busy with {0}: ask again later")]
    Busy(String),
    /// The trainer's thread has ended.
    #[error("the trainer is shutting down")]
    Down,
}

/// Answers for a running trainer; cheap to clone.
#[derive(Debug, Clone)]
pub struct TrainerHandle {
    shared: Arc<Shared>,
    jobs: SyncSender<Job>,
}

/// The trainer's thread; ends when every [`TrainerHandle`] is dropped.
#[derive(Debug)]
pub struct TrainerThread {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    config: ModelConfig,
    batch_root: Option<Utf8PathBuf>,
    stopping: AtomicBool,
    board: Mutex<Board>,
}

/// What the handle answers from.
#[derive(Debug)]
struct Board {
    state: TrainerState,
    checkpoint: Utf8PathBuf,
    /// The step under way, or the last that failed.
    current: Option<StepStatus>,
}

#[derive(Debug)]
enum Job {
    Step(Box<StepJob>),
    Logprobs {
        batch: Box<TrainBatch>,
        replay: bool,
        temperature: f64,
        reply: oneshot::Sender<LogprobsReply>,
    },
}

#[derive(Debug)]
struct StepJob {
    request: StepRequest,
    batch: TrainBatch,
    digest: String,
}

/// Opens the checkpoints and starts the trainer's thread. Blocking: reads a model.
///
/// # Errors
/// If the newest checkpoint or the starting policy cannot be used, or no thread can be had.
pub fn start(options: &TrainerOptions) -> Result<(TrainerHandle, TrainerThread), CheckpointError> {
    let (store, restored) =
        CheckpointStore::open(&options.checkpoints, &options.policy, options.keep)?;
    let checkpoint = store.folder(restored.state.policy_version);
    let shared = Arc::new(Shared {
        config: restored.learner.model.config().clone(),
        batch_root: options.batch_root.clone(),
        stopping: AtomicBool::new(false),
        board: Mutex::new(Board { state: restored.state.clone(), checkpoint, current: None }),
    });
    let (jobs, queue) = sync_channel(QUEUE);
    let worker = Worker { shared: Arc::clone(&shared), store, restored, reference: None };
    let thread = std::thread::Builder::new()
        .name("trainer".into())
        .spawn(move || worker.run(&queue))
        .map_err(|e| CheckpointError::new(&options.checkpoints, e))?;
    let handle = TrainerHandle { shared: Arc::clone(&shared), jobs };
    Ok((handle, TrainerThread { shared, thread }))
}

impl TrainerThread {
    /// Asks the step under way to stop at its next phase (it then fails, and nothing changed), and
    /// waits for the thread. Blocking; drop all handles before, or it waits for them.
    pub fn stop(self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        if self.thread.join().is_err() {
            tracing::error!("trainer thread ended by a panic");
        }
    }
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        // The board is plain data that every writer replaces whole.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Board {
    fn known(&self, step_id: &str) -> Option<StepStatus> {
        if let Some(step) = self.state.applied(step_id) {
            let state = StepState::Done { result: Box::new(step.result.clone()) };
            return Some(StepStatus { step_id: step_id.to_owned(), state });
        }
        self.current.clone().filter(|current| current.step_id == step_id)
    }

    fn running(&self) -> Option<&StepStatus> {
        self.current.as_ref().filter(|current| match current.state {
            StepState::Queued | StepState::Running { .. } => true,
            StepState::Done { .. } | StepState::Failed { .. } => false,
        })
    }
}

impl TrainerHandle {
    /// What the trainer is and where it stands.
    pub fn info(&self) -> TrainerInfo {
        let board = self.shared.board();
        TrainerInfo {
            protocol_version: PROTOCOL_VERSION,
            trainer: concat!("orchestrate-moe ", env!("CARGO_PKG_VERSION")).to_owned(),
            model: self.shared.config.shape(),
            algorithms: PolicyLoss::ALL.iter().map(|loss| loss.name().to_owned()).collect(),
            policy_version: board.state.policy_version,
            lineage: board.state.lineage,
            last_step_id: board.state.steps.last().map(|step| step.step_id.clone()),
            checkpoint: board.checkpoint.clone(),
            world_size: 1,
            devices: vec![format!("cpu, {} threads", rayon::current_num_threads())],
        }
    }

    /// Accepts a step, or says where it stands. A step that failed may be submitted again.
    /// Blocking: reads the whole batch.
    ///
    /// # Errors
    /// [`TrainerRefusal`] if the batch cannot be read or used, or another step is under way.
    pub fn submit(&self, request: StepRequest) -> Result<StepStatus, TrainerRefusal> {
        if let Some(status) = self.standing(&request.step_id)? {
            return Ok(status);
        }
        check_settings(&request.hyperparameters)?;
        let (files, batch) = self.read(&request.manifest)?;
        let manifest = files.manifest();
        if manifest.step_id != request.step_id {
            return Err(TrainerRefusal::OtherStep {
                path: request.manifest,
                found: manifest.step_id.clone(),
                expected: request.step_id,
            });
        }
        let digest = fs_err::read(&request.manifest)
            .map(|bytes| blake3::hash(&bytes).to_hex().to_string())
            .unwrap_or_default();
        let step_id = request.step_id.clone();
        let mut board = self.shared.board();
        // Asked again under the lock: another call may have been faster.
        if let Some(status) = Self::standing_on(&board, &step_id)? {
            return Ok(status);
        }
        let has = board.state.policy_version;
        if request.base_version != has {
            let error = format!(
                "step {step_id} is for weights of version {}, this trainer holds version {has}",
                request.base_version
            );
            let state = StepState::Failed { error };
            let status = StepStatus { step_id, state };
            board.current = Some(status.clone());
            return Ok(status);
        }
        self.send(Job::Step(Box::new(StepJob { request, batch, digest })))?;
        let status = StepStatus { step_id, state: StepState::Queued };
        board.current = Some(status.clone());
        Ok(status)
    }

    /// Where a step stands.
    ///
    /// # Errors
    /// [`TrainerRefusal::UnknownStep`].
    pub fn status(&self, step_id: &str) -> Result<StepStatus, TrainerRefusal> {
        let known = self.shared.board().known(step_id);
        known.ok_or_else(|| TrainerRefusal::UnknownStep(step_id.to_owned()))
    }

    /// Queues a measurement; the receiver gets its answer. Blocking: reads the whole batch.
    ///
    /// # Errors
    /// [`TrainerRefusal`] if the batch cannot be read or used, or the queue is full.
    pub fn logprobs(
        &self,
        request: &LogprobsRequest,
    ) -> Result<oneshot::Receiver<LogprobsReply>, TrainerRefusal> {
        if !(request.temperature.is_finite() && request.temperature > 0.0) {
            let problem = format!("`temperature` = {}: use a number above 0", request.temperature);
            return Err(StepError::Setting(problem).into());
        }
        let (_, batch) = self.read(&request.manifest)?;
        let (reply, answer) = oneshot::channel();
        let (replay, temperature) = (request.replay, request.temperature);
        self.send(Job::Logprobs { batch: Box::new(batch), replay, temperature, reply })?;
        Ok(answer)
    }

    /// The newest checkpoint: every applied step has written one.
    pub fn checkpoint(&self) -> CheckpointReply {
        let board = self.shared.board();
        CheckpointReply {
            checkpoint: board.checkpoint.clone(),
            policy_version: board.state.policy_version,
        }
    }

    fn standing(&self, step_id: &str) -> Result<Option<StepStatus>, TrainerRefusal> {
        Self::standing_on(&self.shared.board(), step_id)
    }

    /// The answer that needs no new work: the step is known and has not failed.
    fn standing_on(board: &Board, step_id: &str) -> Result<Option<StepStatus>, TrainerRefusal> {
        if let Some(status) = board.known(step_id) {
            match status.state {
                StepState::Queued | StepState::Running { .. } | StepState::Done { .. } => {
                    return Ok(Some(status));
                }
                StepState::Failed { .. } => {}
            }
        }
        match board.running() {
            Some(other) => Err(TrainerRefusal::Busy(format!("step {}", other.step_id))),
            None => Ok(None),
        }
    }

    fn read(&self, manifest: &Utf8Path) -> Result<(Batch, TrainBatch), TrainerRefusal> {
        let refuse = |problem| TrainerRefusal::Path { path: manifest.to_owned(), problem };
        if manifest.components().any(|part| part.as_str() == "..") {
            return Err(refuse("must not contain `..`"));
        }
        if manifest.file_name() != Some("manifest.json") {
            return Err(refuse("must name a file `manifest.json`"));
        }
        let real = manifest.canonicalize_utf8().map_err(|_| refuse("cannot be found or read"))?;
        if let Some(root) = &self.shared.batch_root {
            let root = root.canonicalize_utf8().map_err(|_| refuse("the batch folder is gone"))?;
            if !real.starts_with(root) {
                return Err(refuse("lies outside the folder this trainer reads batches from"));
            }
        }
        let files = Batch::open(&real).map_err(|source| TrainerRefusal::Batch {
            path: manifest.to_owned(),
            source: Box::new(source),
        })?;
        let batch = TrainBatch::from_files(&files, &self.shared.config)?;
        Ok((files, batch))
    }

    fn send(&self, job: Job) -> Result<(), TrainerRefusal> {
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => TrainerRefusal::Busy("earlier calls".to_owned()),
            TrySendError::Disconnected(_) => TrainerRefusal::Down,
        })
    }
}

struct Worker {
    shared: Arc<Shared>,
    store: CheckpointStore,
    restored: Restored,
    /// The starting policy, read when a step first asks for it.
    reference: Option<TrainModel<f32>>,
}

impl Worker {
    fn run(mut self, queue: &Receiver<Job>) {
        while let Ok(job) = queue.recv() {
            match job {
                Job::Step(job) => self.step(&job),
                Job::Logprobs { batch, replay, temperature, reply } => {
                    let Measured { logprobs, mismatch, disagreement } =
                        measure(&self.restored.learner.model, &batch, replay, temperature);
                    let policy_version = self.restored.state.policy_version;
                    // A caller that went away does not want its answer.
                    drop(reply.send(LogprobsReply {
                        policy_version,
                        logprobs,
                        mismatch,
                        disagreement,
                    }));
                }
            }
        }
    }

    fn step(&mut self, job: &StepJob) {
        let before = self.restored.learner.snapshot();
        let done = catch_unwind(AssertUnwindSafe(|| self.apply_and_save(job)));
        let done = done.unwrap_or_else(|_| Err("the trainer panicked; see its log".to_owned()));
        let step_id = job.request.step_id.clone();
        match done {
            Ok(state) => {
                let result = state.steps.last().map(|step| step.result.clone());
                self.restored.state = state.clone();
                let mut board = self.shared.board();
                board.checkpoint = self.store.folder(state.policy_version);
                board.state = state;
                board.current = None;
                drop(board);
                if let Some(StepResult { policy_version, metrics, .. }) = result {
                    tracing::info!(
                        step_id,
                        policy_version = policy_version.0,
                        loss = metrics.loss,
                        grad_norm = metrics.grad_norm,
                        tokens = metrics.tokens,
                        seconds = metrics.seconds,
                        "step applied"
                    );
                }
            }
            Err(error) => {
                self.restored.learner.restore(before);
                tracing::warn!(step_id, error, "step failed, weights are as before");
                let state = StepState::Failed { error };
                self.shared.board().current = Some(StepStatus { step_id, state });
            }
        }
    }

    fn apply_and_save(&mut self, job: &StepJob) -> Result<TrainerState, String> {
        let started = Instant::now();
        let settings = &job.request.hyperparameters;
        if settings.kl_coefficient > 0.0 && self.reference.is_none() {
            let folder = self.store.folder(PolicyVersion(0));
            let model = TrainModel::load(&folder).map_err(|error| {
                format!("the reference policy cannot be read: {}", chain(&error))
            })?;
            self.reference = Some(model);
        }
        let Restored { learner, state } = &mut self.restored;
        let shared = Arc::clone(&self.shared);
        let step_id = job.request.step_id.clone();
        let mut progress = |phase: &'static str, share: f64| {
            let state = StepState::Running { phase: phase.to_owned(), progress: share };
            let step_id = step_id.clone();
            shared.board().current = Some(StepStatus { step_id, state });
            !shared.stopping.load(Ordering::Relaxed)
        };
        let reference = self.reference.as_ref();
        let mut metrics = apply(learner, reference, &job.batch, settings, &mut progress)
            .map_err(|error| chain(&error))?;
        progress("checkpoint", 1.0);
        let version = state.policy_version.next();
        save(&self.store, learner, (state, version), || {
            metrics.seconds = started.elapsed().as_secs_f64();
            AppliedStep {
                step_id: job.request.step_id.clone(),
                batch_digest: job.digest.clone(),
                result: StepResult {
                    policy_version: version,
                    checkpoint: self.store.folder(version),
                    metrics,
                },
            }
        })
        .map_err(|error| chain(&error))
    }
}

fn save(
    store: &CheckpointStore,
    learner: &Learner,
    (state, version): (&TrainerState, PolicyVersion),
    step: impl FnOnce() -> AppliedStep,
) -> Result<TrainerState, CheckpointError> {
    let companions = store.folder(state.policy_version);
    store.save(learner, version, &companions, || state.after(step()))
}

/// An error with its causes, for an answer that has no other place for them.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
