//! Many workers behind the one seam.
//!
//! A [`Fleet`] holds `session → (worker, rank)`, so that every call of a conversation goes where
//! its KV cache is. A worker that fails gets no more requests; its conversations go on at others,
//! which prefill what they lack, and the rows already held stand. A worker that comes back serves
//! nothing before it was given the weights it missed.
//!
//! The invariant: a request is sent only to a worker whose weights are those of the last
//! [`Engine::sync_weights`], or that nobody has synced yet.
//!
//! | File | What |
//! |---|---|
//! | `placement.rs` | which worker a conversation is on (pure) |
//! | `circuit.rs` | whether a worker gets requests (pure) |
//! | `worker.rs` | one worker: its circuit, permits, and who waits for either |
//! | `care.rs` | probes; waking up a worker that returned |
//! | `sync.rs` | new weights for all of them |
//! | `discover.rs` | workers behind one name |

mod care;
mod circuit;
mod discover;
mod placement;
mod sync;
mod worker;

use crate::{
    Engine, EngineError, EngineErrorKind, EngineInfo, GenerateRequest, Generation, SessionOpening,
};
use async_trait::async_trait;
use camino::{Utf8Path, Utf8PathBuf};
use circuit::Event;
pub use discover::discover;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId};
use placement::{Place, Placement};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use worker::{Asked, Worker};

/// Workers one call may be moved away from. A request that takes down every server it reaches
/// must not reach them all.
const MOVES_PER_CALL: u32 = 2;

/// How a fleet treats its workers.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// Most generations under way at once on each worker, at least 1.
    pub max_in_flight: usize,
    /// Time between two looks at a worker, and the longest one may take.
    pub probe_interval: Duration,
    /// How long calls wait for a worker while all are away.
    pub away_timeout: Duration,
}

/// A worker as it joins.
#[derive(Debug)]
pub struct FleetMember {
    /// Its name, as its replies carry it: the base URL.
    pub name: String,
    /// How to reach it. The client's own limit of generations must not be below the fleet's.
    pub engine: Arc<dyn Engine>,
    /// Whether it answered; one that did not is probed until it does.
    pub is_up: bool,
}

/// One worker as it is now, for people and reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerStatus {
    /// Its name.
    pub name: String,
    /// `up`, `syncing`, `away` or `waking`.
    pub state: &'static str,
    /// Open conversations on it.
    pub sessions: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Calls that wait for its answer or a permit.
    pub calls: usize,
    /// Replies that passed all checks.
    pub answered: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Times it was taken out.
    pub ejected: u64,
}

/// Weights that all workers are to serve.
#[derive(Debug, Clone)]
struct Target {
    checkpoint: Utf8PathBuf,
    version: PolicyVersion,
}

#[derive(Debug)]
struct Shared {
    workers: Vec<Worker>,
    placement: Mutex<Placement>,
    /// Changes whenever a worker leaves or joins.
    roster: watch::Sender<u64>,
    target: Mutex<Option<Target>>,
    /// Held while weights of any worker are exchanged.
    syncing: tokio::sync::Mutex<()>,
    options: FleetOptions,
}

/// A fleet of workers that serve the same weights of the same model.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    shape: ModelShape,
    /// Care of every worker; ends with the fleet.
    _care: JoinSet<()>,
}

impl Fleet {
    /// A fleet, and the care of its workers. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unfit`] without workers, or when their models differ in shape.
    pub fn start(members: Vec<FleetMember>, options: FleetOptions) -> Result<Self, EngineError> {
        let unfit = |engine: &str, words: &str| EngineError {
            engine: engine.to_owned(),
            call: "fleet",
            kind: EngineErrorKind::Unfit(words.to_owned()),
        };
        let Some(first) = members.first() else {
            return Err(unfit("fleet", "it has no workers"));
        };
        let shape = first.engine.shape().clone();
        if let Some(other) = members.iter().find(|member| *member.engine.shape() != shape) {
            return Err(unfit(&other.name, "its model has another shape than the first worker's"));
        }
        let permits = options.max_in_flight;
        let slots = members.iter().map(|member| (permits, member.engine.data_parallel_ranks()));
        let mut placement = Placement::new(slots);
        for (index, _) in members.iter().enumerate().filter(|(_, member)| !member.is_up) {
            placement.leave(index);
        }
        let shared = Arc::new(Shared {
            workers: members.into_iter().map(|member| Worker::new(member, permits)).collect(),
            placement: Mutex::new(placement),
            roster: watch::Sender::new(0),
            target: Mutex::new(None),
            syncing: tokio::sync::Mutex::new(()),
            options,
        });
        let mut care = JoinSet::new();
        for index in 0..shared.workers.len() {
            care.spawn(care::run(Arc::clone(&shared), index));
        }
        Ok(Self { shared, shape, _care: care })
    }

    /// Every worker as it is now.
    pub fn status(&self) -> Vec<WorkerStatus> {
        let placement = self.shared.placement();
        let status = |(index, worker): (usize, &Worker)| worker.status(placement.load(index));
        self.shared.workers.iter().enumerate().map(status).collect()
    }

    /// Times a conversation was moved from one worker to another.
    pub fn moves(&self) -> u64 {
        self.shared.placement().moves()
    }
}

impl Shared {
    fn placement(&self) -> MutexGuard<'_, Placement> {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> Option<Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The version that all workers are to serve.
    fn version(&self) -> Option<PolicyVersion> {
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        target.as_ref().map(|target| target.version)
    }

    /// One event of one worker; who leaves or joins does so in the placement as well.
    fn step(&self, index: usize, event: Event) {
        let Some(worker) = self.workers.get(index) else { return };
        // Under the placement's lock, so that two events of one worker cannot pass each other
        // between its circuit and its place.
        let mut placement = self.placement();
        let (before, after) = worker.step(event);
        if before.is_member() == after.is_member() {
            return;
        }
        if after.is_member() {
            placement.join(index);
        } else {
            placement.leave(index);
        }
        drop(placement);
        let (worker, state) = (worker.name(), after.name());
        if after.is_member() {
            tracing::info!(engine = worker, state, "worker is back");
        } else {
            tracing::warn!(engine = worker, ?event, state, "worker is taken out");
        }
        self.roster.send_modify(|count| *count += 1);
    }

    /// Waits for a place for the conversation's next call, as long as all workers may be away.
    async fn place(&self, request: &GenerateRequest) -> Result<CallPlace<'_>, EngineError> {
        let begin = || {
            let begun = self.placement().begin_call(&request.session, request.token_ids.len());
            begun.map(|place| CallPlace { shared: self, place })
        };
        if let Some(place) = begin() {
            return Ok(place);
        }
        let mut roster = self.roster.subscribe();
        let patience = self.options.away_timeout;
        let end = Instant::now() + patience;
        loop {
            // Who joins from now on is seen below, who has joined before is there.
            roster.mark_unchanged();
            if let Some(place) = begin() {
                return Ok(place);
            }
            // The sender lives in `self`: the only error is the end of patience.
            if !matches!(tokio::time::timeout_at(end, roster.changed()).await, Ok(Ok(()))) {
                return Err(self.nobody(format!("no worker was up for {patience:?}")));
            }
        }
    }

    fn nobody(&self, words: String) -> EngineError {
        EngineError {
            engine: format!("fleet of {}", self.workers.len()),
            call: "place",
            kind: EngineErrorKind::Unreachable(words),
        }
    }
}

/// A call's claim on its worker; given up when dropped.
struct CallPlace<'a> {
    shared: &'a Shared,
    place: Place,
}

impl Drop for CallPlace<'_> {
    fn drop(&mut self) {
        self.shared.placement().end_call(self.place);
    }
}

#[async_trait]
impl Engine for Fleet {
    /// What the workers that are up have in common; an error if one of them fails to say.
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let mut common: Option<EngineInfo> = None;
        for worker in self.shared.workers.iter().filter(|worker| worker.circuit().is_member()) {
            let info = worker.engine().info().await?;
            common = Some(match common {
                None => info,
                Some(held) => EngineInfo {
                    routed_experts: held.routed_experts && info.routed_experts,
                    policy_version: held.policy_version.filter(|v| info.policy_version == Some(*v)),
                    context: match (held.context, info.context) {
                        (Some(a), Some(b)) => Some(a.min(b)),
                        (a, b) => a.or(b),
                    },
                    page_size: held.page_size.max(info.page_size),
                    ..held
                },
            });
        }
        common.ok_or_else(|| self.shared.nobody("no worker is up".to_owned()))
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn takes_messages(&self) -> bool {
        self.shared.workers.first().is_some_and(|worker| worker.engine().takes_messages())
    }

    fn open_session(&self, opening: &SessionOpening<'_>) {
        let mut placement = self.shared.placement();
        // No worker up is no failure here: the first call waits for one.
        let _ = placement.open(opening.session, opening.group, opening.prompt_tokens);
    }

    fn worker_of(&self, session: &str) -> Option<String> {
        let place = self.shared.placement().place(session)?;
        Some(self.shared.workers.get(place.worker)?.place_name(place.rank))
    }

    fn close_session(&self, session: &str) {
        self.shared.placement().close(session);
    }

    async fn generate(&self, mut request: GenerateRequest) -> Result<Generation, EngineError> {
        let mut moves = 0;
        loop {
            let place = self.shared.place(&request).await?;
            match worker::ask(&self.shared, place.place, &mut request).await {
                Asked::Answered(reply) => {
                    let tokens = request.token_ids.len() + reply.output_ids.len();
                    self.shared.placement().grow(&request.session, tokens);
                    return Ok(reply);
                }
                Asked::Away(_) if moves < MOVES_PER_CALL => moves += 1,
                Asked::Away(error) | Asked::Failed(error) => return Err(error),
            }
        }
    }

    /// Gives all workers the weights. A worker that fails is taken out and gets them when it
    /// returns; the call succeeds once at least one worker serves them.
    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        sync::sync_all(&self.shared, Target { checkpoint: checkpoint.to_owned(), version }).await
    }

    async fn abort(&self, request_id: &RequestId) -> Result<(), EngineError> {
        // Which worker has it is known to the call itself alone; ids are never used twice.
        for worker in self.shared.workers.iter().filter(|worker| worker.circuit().is_member()) {
            worker.engine().abort(request_id).await?;
        }
        Ok(())
    }
}
