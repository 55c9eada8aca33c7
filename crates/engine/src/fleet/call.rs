//! One call on the worker that its conversation is assigned to.

use super::circuit::CircuitEvent;
use super::placement::WorkerRank;
use super::shared::Shared;
use crate::error::{EngineError, EngineErrorKind};
use crate::generation::Reply;
use crate::request::{GenerateRequest, Prompt};

/// How a call ended.
pub(super) enum CallOutcome {
    /// The reply passed all checks.
    Answered(Reply),
    /// The caller decides whether to try again.
    Failed(EngineError),
    /// The worker went out of service: another one may answer.
    OutOfService(EngineError),
}

/// Makes one call, and reports to the worker's circuit how it ended.
pub(super) async fn call(
    shared: &Shared,
    place: WorkerRank,
    request: &mut GenerateRequest,
) -> CallOutcome {
    const CALL: &str = "/generate";
    let Some(worker) = shared.workers.get(place.worker) else {
        return CallOutcome::Failed(shared.no_worker("the assigned worker is gone".to_owned()));
    };
    let reply = async {
        loop {
            let permit = worker.ready().await?;
            if let (Prompt::Tokens(prompt), Some(version)) = (&mut request.prompt, shared.version())
            {
                // The weights that will answer: only their KV cache may be reused.
                prompt.cache_namespace = version;
            }
            let rank = Some(place.rank).filter(|_| worker.engine().data_parallel_ranks() > 1);
            let result = worker.engine().generate_on(&*request, rank).await;
            drop(permit);
            match &result {
                // The client noticed a weight sync before the fleet did.
                Err(EngineError { kind: EngineErrorKind::Unsupported(_), .. })
                    if !worker.circuit().accepts_requests() => {}
                Ok(_) | Err(_) => return Some(result),
            }
        }
    };
    // A call that waits moves on when its worker goes out of service. So does a call that was sent,
    // because a stopped process neither answers nor closes its connections.
    let result = tokio::select! {
        biased;
        result = reply => result,
        () = worker.out_of_service() => None,
    };
    let error = match result {
        None => return CallOutcome::OutOfService(worker.out_of_service_error(CALL)),
        Some(Ok(mut reply)) => {
            worker.count_answered();
            shared.step(place.worker, CircuitEvent::RequestSucceeded);
            reply.set_worker(worker.rank_name(place.rank));
            return CallOutcome::Answered(reply);
        }
        Some(Err(error)) => error,
    };
    worker.count_failed();
    match &error.kind {
        EngineErrorKind::Unreachable(_) => {
            // A probe shows whether only this connection broke or the worker is gone.
            if worker.survives_probe().await {
                shared.step(place.worker, CircuitEvent::RequestFailed);
                CallOutcome::Failed(error)
            } else {
                CallOutcome::OutOfService(error)
            }
        }
        EngineErrorKind::InvalidReply(_) => {
            shared.step(place.worker, CircuitEvent::RequestFailed);
            shared.placement().avoid(&request.session, place.worker);
            CallOutcome::Failed(error)
        }
        EngineErrorKind::Unsupported(_) => {
            shared.step(place.worker, CircuitEvent::WeightsUnknown);
            CallOutcome::OutOfService(error)
        }
        EngineErrorKind::Refused { status: 500 | 502 | 504, .. } => {
            shared.step(place.worker, CircuitEvent::RequestFailed);
            CallOutcome::Failed(error)
        }
        // A refusal shows that the worker is alive. A timeout may be a long generation: health
        // checks find out whether the worker is.
        EngineErrorKind::Refused { .. }
        | EngineErrorKind::ContextFull(_)
        | EngineErrorKind::TimedOut(_)
        | EngineErrorKind::GenerationFailed(_) => CallOutcome::Failed(error),
    }
}
