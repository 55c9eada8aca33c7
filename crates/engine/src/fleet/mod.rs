//! Many workers behind one [`Engine`].
//!
//! A [`Fleet`] assigns each conversation to a worker and rank, so that every call goes where its KV
//! cache is. A worker that fails goes out of service. Its conversations move to others, which prefill
//! what they lack; the routing rows received so far stay valid. A worker that returns is given the
//! weights that it missed before it serves again.
//!
//! The invariant: a request is sent only to a worker with the weights of the last
//! [`Engine::sync_weights`], or with its first weights if there was no sync yet.
//!
//! | File | Responsibility |
//! |---|---|
//! | `placement.rs` | which worker a conversation is assigned to (pure) |
//! | `circuit.rs` | whether a worker gets requests (pure) |
//! | `worker.rs` | one worker: its circuit breaker, its permits, and how calls wait for them |
//! | `shared.rs` | the state that the following share |
//! | `call.rs` | one call |
//! | `health.rs` | health checks, and the recovery of a worker that returns |
//! | `sync.rs` | new weights for all workers |
//! | `discover.rs` | workers behind one host name |

mod call;
mod circuit;
mod discover;
mod health;
mod placement;
mod shared;
mod sync;
mod worker;

pub use discover::discover;
pub use shared::FleetOptions;
pub use worker::{FleetWorker, WorkerStatus};

use crate::api::{Engine, EngineInfo};
use crate::error::{EngineError, EngineErrorKind};
use crate::generation::Reply;
use crate::request::{GenerateRequest, SessionOpening};
use async_trait::async_trait;
use call::{CallOutcome, call};
use camino::Utf8Path;
use orchestrate_types::{ModelShape, PolicyVersion};
use placement::Placement;
use shared::{Shared, TargetWeights};
use std::sync::Arc;
use tokio::task::JoinSet;
use worker::Worker;

/// How often one call may move to another worker. A request that crashes every server that it
/// reaches must not reach them all.
const MAX_MOVES_PER_CALL: u32 = 2;

/// A fleet of workers that serve the same weights of the same model.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    shape: ModelShape,
    /// Health checks of every worker. Dropping the fleet ends them.
    _health_checks: JoinSet<()>,
}

impl Fleet {
    /// Creates a fleet and starts the health checks of its workers. Must be called within a Tokio
    /// runtime.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unsupported`] without workers, or if their models differ in shape.
    pub fn start(workers: Vec<FleetWorker>, options: FleetOptions) -> Result<Self, EngineError> {
        let error = |engine: &str, message: &str| EngineError {
            engine: engine.to_owned(),
            call: "fleet",
            kind: EngineErrorKind::unsupported(message),
        };
        let Some(first) = workers.first() else {
            return Err(error("fleet", "it must have at least one worker"));
        };
        let shape = first.engine.shape().clone();
        if let Some(other) = workers.iter().find(|worker| *worker.engine.shape() != shape) {
            let message = "its model has a different shape than the first worker's";
            return Err(error(&other.name, message));
        }
        let permits = options.max_in_flight;
        let slots = workers.iter().map(|worker| (permits, worker.engine.data_parallel_ranks()));
        let mut placement = Placement::new(slots);
        for (index, _) in workers.iter().enumerate().filter(|(_, worker)| !worker.is_up) {
            placement.take_out(index);
        }
        let workers = workers.into_iter().map(|worker| Worker::new(worker, permits)).collect();
        let shared = Arc::new(Shared::new(workers, placement, options));
        let mut health_checks = JoinSet::new();
        for index in 0..shared.workers.len() {
            health_checks.spawn(health::run(Arc::clone(&shared), index));
        }
        Ok(Self { shared, shape, _health_checks: health_checks })
    }

    /// Current state of every worker.
    pub fn status(&self) -> Vec<WorkerStatus> {
        let placement = self.shared.placement();
        let status = |(index, worker): (usize, &Worker)| worker.status(placement.load(index));
        self.shared.workers.iter().enumerate().map(status).collect()
    }

    /// How often a conversation moved from one worker to another.
    pub fn moves(&self) -> u64 {
        self.shared.placement().moves()
    }
}

#[async_trait]
impl Engine for Fleet {
    /// The common properties of all workers in service. An error if one of them does not answer.
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let mut common: Option<EngineInfo> = None;
        for worker in self.shared.workers.iter().filter(|worker| worker.circuit().is_in_service()) {
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
        common.ok_or_else(|| self.shared.no_worker("no worker is in service".to_owned()))
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn takes_messages(&self) -> bool {
        self.shared.workers.first().is_some_and(|worker| worker.engine().takes_messages())
    }

    fn worker_of(&self, session: &str) -> Option<String> {
        let place = self.shared.placement().assigned(session)?;
        Some(self.shared.workers.get(place.worker)?.rank_name(place.rank))
    }

    fn open_session(&self, opening: &SessionOpening<'_>) {
        let mut placement = self.shared.placement();
        // Without a worker in service the first call waits for one.
        let _ = placement.open(opening.session, opening.group, opening.prompt_tokens);
    }

    fn close_session(&self, session: &str) {
        self.shared.placement().close(session);
    }

    async fn generate(&self, mut request: GenerateRequest) -> Result<Reply, EngineError> {
        let mut moves = 0;
        loop {
            let place = self.shared.begin_call(&request).await?;
            match call(&self.shared, place.place, &mut request).await {
                CallOutcome::Answered(reply) => {
                    let sampled = match &reply {
                        Reply::Tokens(generation) => generation.output_ids().len(),
                        // Unknown until the next prompt.
                        Reply::Message(_) => 0,
                    };
                    let tokens = request.prompt.token_count() + sampled;
                    self.shared.placement().set_tokens(&request.session, tokens);
                    return Ok(reply);
                }
                CallOutcome::OutOfService(_) if moves < MAX_MOVES_PER_CALL => moves += 1,
                CallOutcome::OutOfService(error) | CallOutcome::Failed(error) => return Err(error),
            }
        }
    }

    /// Gives the weights to all workers. A worker that fails goes out of service and gets them when
    /// it returns. Succeeds once at least one worker serves them.
    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let target = TargetWeights { checkpoint: checkpoint.to_owned(), version };
        sync::sync_all(&self.shared, target).await
    }
}
