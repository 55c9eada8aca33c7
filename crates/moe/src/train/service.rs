//! The trainer as a service: one thread that owns model and optimizer, and a handle that answers
//! requests.
//!
//! Invariant: a step is `Done` only when its checkpoint is on disk; a failed step leaves weights
//! and optimizer unchanged. See [`super::step`] for what a step does.

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
use orchestrate_http_server::{AllowedFolders, HttpOptions};
use orchestrate_types::PolicyVersion;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::oneshot;

/// Maximum number of waiting jobs: one step and a few measurements.
const QUEUE: usize = 4;

/// Options of the embedded trainer.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// Starting policy: a checkpoint folder. Read only while `checkpoints` is empty.
    pub policy: Utf8PathBuf,
    /// Folder for the trainer's checkpoints, `v000000` onwards.
    pub checkpoints: Utf8PathBuf,
    /// Number of newest checkpoints to keep, in addition to `v000000`.
    pub keep: usize,
    /// Folders that batches may lie in.
    pub batch_roots: AllowedFolders,
    /// Who may reach the server.
    pub http: HttpOptions,
}

/// Why the trainer rejects a request.
#[derive(Debug, thiserror::Error)]
pub enum TrainerRefusal {
    /// The manifest's path is not allowed, or cannot be read.
    #[error("manifest {path}: {problem}")]
    Path {
        /// Path of the manifest, as sent.
        path: Utf8PathBuf,
        /// Problem with the path.
        problem: &'static str,
    },
    /// The batch cannot be read.
    #[error("manifest {path}: {source}")]
    Batch {
        /// Path of the manifest, as sent.
        path: Utf8PathBuf,
        /// Why it cannot be read.
        source: Box<BatchError>,
    },
    /// The batch or a setting does not fit this trainer.
    #[error("{}", chain(.0))]
    Step(#[from] StepError),
    /// The manifest was written for another step.
    #[error("manifest {path} belongs to step {found}, not {expected}")]
    OtherStep {
        /// Path of the manifest, as sent.
        path: Utf8PathBuf,
        /// Step id in the manifest.
        found: String,
        /// Step id in the request.
        expected: String,
    },
    /// The step id is unknown.
    #[error("step {0} is unknown: it was never submitted, or is no longer remembered")]
    UnknownStep(String),
    /// Another request is being processed.
    #[error("busy with {0}; try again later")]
    Busy(String),
    /// The trainer's thread has ended.
    #[error("the trainer is shutting down")]
    Down,
}

/// Handle to a running trainer, used to submit steps and query their status; cheap to clone.
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
    batch_roots: AllowedFolders,
    stopping: AtomicBool,
    public_state: Mutex<PublicState>,
}

/// State that the trainer's thread publishes for the handle.
#[derive(Debug)]
struct PublicState {
    state: TrainerState,
    checkpoint: Utf8PathBuf,
    /// The current step, or the last step if it failed.
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
/// If the newest checkpoint or the starting policy cannot be used, or the thread cannot be started.
pub fn start(options: &TrainerOptions) -> Result<(TrainerHandle, TrainerThread), CheckpointError> {
    let (store, restored) =
        CheckpointStore::open(&options.checkpoints, &options.policy, options.keep)?;
    let checkpoint = store.folder(restored.state.policy_version);
    let shared = Arc::new(Shared {
        config: restored.learner.model.config().clone(),
        batch_roots: options.batch_roots.clone(),
        stopping: AtomicBool::new(false),
        public_state: Mutex::new(PublicState {
            state: restored.state.clone(),
            checkpoint,
            current: None,
        }),
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
    /// Stops the current step at its next phase (it then fails and changes nothing) and joins the
    /// thread. Blocking: it also waits until all handles are dropped.
    pub fn stop(self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        if self.thread.join().is_err() {
            tracing::error!("trainer thread panicked");
        }
    }
}

impl Shared {
    fn public_state(&self) -> MutexGuard<'_, PublicState> {
        // Plain data: it stays consistent even if a writer panicked.
        self.public_state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PublicState {
    fn find_step(&self, step_id: &str) -> Option<StepStatus> {
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
    /// Describes the trainer and its current policy version.
    pub fn info(&self) -> TrainerInfo {
        let public = self.shared.public_state();
        TrainerInfo {
            protocol_version: PROTOCOL_VERSION,
            trainer: concat!("orchestrate-moe ", env!("CARGO_PKG_VERSION")).to_owned(),
            model: self.shared.config.shape(),
            algorithms: PolicyLoss::ALL.iter().map(|loss| loss.name().to_owned()).collect(),
            policy_version: public.state.policy_version,
            lineage: public.state.lineage,
            last_step_id: public.state.steps.last().map(|step| step.step_id.clone()),
            checkpoint: public.checkpoint.clone(),
            world_size: 1,
            devices: vec![format!("cpu, {} threads", rayon::current_num_threads())],
        }
    }

    /// Accepts a step, or returns its status if it is known. A failed step can be submitted again.
    /// Blocking: reads the whole batch.
    ///
    /// # Errors
    /// [`TrainerRefusal`] if the batch cannot be read or used, or another step is running.
    pub fn submit(&self, request: StepRequest) -> Result<StepStatus, TrainerRefusal> {
        if let Some(status) = self.existing_status(&request.step_id)? {
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
        let mut public = self.shared.public_state();
        // Check again under the lock: another request may have been faster.
        if let Some(status) = Self::existing_status_in(&public, &step_id)? {
            return Ok(status);
        }
        let current = public.state.policy_version;
        if request.base_version != current {
            let error = format!(
                "step {step_id} is based on policy version {}, but this trainer is at version \
                 {current}",
                request.base_version
            );
            let state = StepState::Failed { error };
            let status = StepStatus { step_id, state };
            public.current = Some(status.clone());
            return Ok(status);
        }
        self.send(Job::Step(Box::new(StepJob { request, batch, digest })))?;
        let status = StepStatus { step_id, state: StepState::Queued };
        public.current = Some(status.clone());
        Ok(status)
    }

    /// Returns the status of a step.
    ///
    /// # Errors
    /// [`TrainerRefusal::UnknownStep`] if the step was never submitted or is no longer remembered.
    pub fn status(&self, step_id: &str) -> Result<StepStatus, TrainerRefusal> {
        let known = self.shared.public_state().find_step(step_id);
        known.ok_or_else(|| TrainerRefusal::UnknownStep(step_id.to_owned()))
    }

    /// Queues a measurement of a batch's log-probs; the receiver gets the reply. Blocking: reads
    /// the whole batch.
    ///
    /// # Errors
    /// [`TrainerRefusal`] if the batch cannot be read or used, or the queue is full.
    pub fn logprobs(
        &self,
        request: &LogprobsRequest,
    ) -> Result<oneshot::Receiver<LogprobsReply>, TrainerRefusal> {
        if !(request.temperature.is_finite() && request.temperature > 0.0) {
            let problem = format!("temperature = {}: must be greater than 0", request.temperature);
            return Err(StepError::Setting(problem).into());
        }
        let (_, batch) = self.read(&request.manifest)?;
        let (reply, answer) = oneshot::channel();
        let (replay, temperature) = (request.replay, request.temperature);
        self.send(Job::Logprobs { batch: Box::new(batch), replay, temperature, reply })?;
        Ok(answer)
    }

    /// Returns the newest checkpoint. Every applied step has written one, so nothing is written
    /// now.
    pub fn checkpoint(&self) -> CheckpointReply {
        let public = self.shared.public_state();
        CheckpointReply {
            checkpoint: public.checkpoint.clone(),
            policy_version: public.state.policy_version,
        }
    }

    fn existing_status(&self, step_id: &str) -> Result<Option<StepStatus>, TrainerRefusal> {
        Self::existing_status_in(&self.shared.public_state(), step_id)
    }

    /// Status of a step that is known and has not failed; `None` if it has to be run.
    fn existing_status_in(
        public: &PublicState,
        step_id: &str,
    ) -> Result<Option<StepStatus>, TrainerRefusal> {
        if let Some(status) = public.find_step(step_id) {
            match status.state {
                StepState::Queued | StepState::Running { .. } | StepState::Done { .. } => {
                    return Ok(Some(status));
                }
                StepState::Failed { .. } => {}
            }
        }
        match public.running() {
            Some(other) => Err(TrainerRefusal::Busy(format!("step {}", other.step_id))),
            None => Ok(None),
        }
    }

    fn read(&self, manifest: &Utf8Path) -> Result<(Batch, TrainBatch), TrainerRefusal> {
        let invalid_path = |problem| TrainerRefusal::Path { path: manifest.to_owned(), problem };
        if manifest.components().any(|part| part.as_str() == "..") {
            return Err(invalid_path("must not contain `..`"));
        }
        if manifest.file_name() != Some("manifest.json") {
            return Err(invalid_path("the file name must be `manifest.json`"));
        }
        // The same refusal whether or not a file outside exists.
        let not_there = |_| invalid_path("is not below a folder of batches, or cannot be read");
        let roots = &self.shared.batch_roots;
        let real = roots.file(manifest).map_err(not_there)?;
        let folder = real.parent().unwrap_or(&real);
        roots.folder(folder).map_err(not_there)?;
        let files = Batch::open(&real).map_err(|source| TrainerRefusal::Batch {
            path: manifest.to_owned(),
            source: Box::new(source),
        })?;
        let batch = TrainBatch::from_files(&files, &self.shared.config)?;
        Ok((files, batch))
    }

    fn send(&self, job: Job) -> Result<(), TrainerRefusal> {
        self.jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => TrainerRefusal::Busy("earlier requests".to_owned()),
            TrySendError::Disconnected(_) => TrainerRefusal::Down,
        })
    }
}

/// Why a step failed; weights and optimizer are restored.
#[derive(Debug, thiserror::Error)]
enum StepFailure {
    #[error("cannot read the reference policy")]
    Reference(#[source] CheckpointError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Checkpoint(CheckpointError),
    #[error("the trainer panicked; see its log")]
    Panicked,
}

struct Worker {
    shared: Arc<Shared>,
    store: CheckpointStore,
    restored: Restored,
    /// The starting policy, read when a step first needs it.
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
                    // Sending fails only if the caller has disconnected.
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
        let done = done.unwrap_or(Err(StepFailure::Panicked));
        let step_id = job.request.step_id.clone();
        match done {
            Ok(state) => {
                let result = state.steps.last().map(|step| step.result.clone());
                self.restored.state = state.clone();
                let mut public = self.shared.public_state();
                public.checkpoint = self.store.folder(state.policy_version);
                public.state = state;
                public.current = None;
                drop(public);
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
            Err(failure) => {
                let error = chain(&failure);
                self.restored.learner.restore(before);
                tracing::warn!(step_id, error, "step failed; weights are unchanged");
                let state = StepState::Failed { error };
                self.shared.public_state().current = Some(StepStatus { step_id, state });
            }
        }
    }

    fn apply_and_save(&mut self, job: &StepJob) -> Result<TrainerState, StepFailure> {
        let started = Instant::now();
        let settings = &job.request.hyperparameters;
        if settings.kl_coefficient > 0.0 && self.reference.is_none() {
            let folder = self.store.folder(PolicyVersion(0));
            self.reference = Some(TrainModel::load(&folder).map_err(StepFailure::Reference)?);
        }
        let Restored { learner, state } = &mut self.restored;
        let shared = Arc::clone(&self.shared);
        let step_id = job.request.step_id.clone();
        let mut progress = |phase: &'static str, share: f64| {
            let state = StepState::Running { phase: phase.to_owned(), progress: share };
            let step_id = step_id.clone();
            shared.public_state().current = Some(StepStatus { step_id, state });
            !shared.stopping.load(Ordering::Relaxed)
        };
        let reference = self.reference.as_ref();
        let mut metrics = apply(learner, reference, &job.batch, settings, &mut progress)?;
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
        .map_err(StepFailure::Checkpoint)
    }
}

fn save(
    store: &CheckpointStore,
    learner: &Learner,
    (state, version): (&TrainerState, PolicyVersion),
    step: impl FnOnce() -> AppliedStep,
) -> Result<TrainerState, CheckpointError> {
    let companions = store.folder(state.policy_version);
    store.save(learner, version, &companions, || state.with_step(step()))
}

/// Formats an error with all its causes, for replies that have only one text field.
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
