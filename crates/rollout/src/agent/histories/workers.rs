//! A fleet of workers whose rows differ, that fail now and then, and that get new weights.
//!
//! All of them write one [`Log`], from which the reference takes what was sampled.

use super::model::chat;
use crate::api::Action;
use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, Fleet, FleetOptions, FleetWorker,
    GenerateRequest, Prompt, Reply,
};
use orchestrate_testkit::{FakeEngine, FakeReply, FakeRequest, toy_shape};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId};
use serde_json::json;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Number of workers.
pub(super) const WORKERS: usize = 2;

/// By how much the experts of one worker's rows differ from those of the one before it. With at most
/// this many policy versions, no two workers and versions have equal rows.
pub(super) const ROW_SHIFT: usize = 4;

/// A reply of a worker, as it left the worker.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// Number of the generation in the conversation.
    pub(super) ordinal: u32,
    pub(super) prompt: Arc<Vec<u32>>,
    /// First row that was requested.
    pub(super) start: usize,
    pub(super) ids: Vec<u32>,
    pub(super) worker: usize,
    pub(super) version: PolicyVersion,
    /// Whether its rows were taken away, so that it must be refused.
    pub(super) is_refused: bool,
}

/// What all workers share.
#[derive(Debug, Default)]
pub(super) struct Log {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    /// Generations that have had their fault: none has two.
    faulted: HashSet<u32>,
    /// Number of the next calls that are not answered until they are aborted.
    to_hold: usize,
    /// Generations that failed on one worker and were answered by another call.
    faults: usize,
}

impl Log {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// Holds the next call until new weights abort it.
    pub(super) fn hold_next(&self) {
        self.state().to_hold = 1;
    }

    /// Whether the call has come that was to be held.
    pub(super) fn is_holding(&self) -> bool {
        self.state().to_hold == 0
    }

    /// Number of faults so far.
    pub(super) fn faults(&self) -> usize {
        self.state().faults
    }

    fn takes_hold(&self) -> bool {
        let mut state = self.state();
        let holds = state.to_hold > 0;
        state.to_hold = 0;
        holds
    }

    /// Replies with thinking, text and sometimes a call, decided by the call's seed; some are aborted.
    fn reply(&self, request: &FakeRequest) -> FakeReply {
        let seed = request.sampling.seed;
        // Some prompts have replies that differ in their thinking alone.
        let prompt = request.token_ids.len() as u64;
        let number = if prompt.is_multiple_of(3) { prompt } else { seed };
        let command = json!({"command": format!("ls {number}")});
        let call = Action { name: "bash".to_owned(), arguments: command };
        let calls = if number.is_multiple_of(5) { Vec::new() } else { vec![call] };
        let thinking = if prompt.is_multiple_of(3) || seed.is_multiple_of(5) {
            format!("<think>\nhm {seed}\n</think>\n\n")
        } else {
            String::new()
        };
        let mut ids = chat().assistant(&format!("{thinking}say {number}"), &calls).unwrap();
        let part = usize::try_from(seed >> 8).unwrap() % ids.len();
        if self.takes_hold() {
            ids.truncate(part.min(request.sampling.max_new_tokens - 1));
            return FakeReply::UntilAborted { ids };
        }
        if seed.is_multiple_of(11) && part > 0 && part < request.sampling.max_new_tokens {
            ids.truncate(part);
            return FakeReply::Tokens { ids, finish: Finish::Abort };
        }
        ids.truncate(request.sampling.max_new_tokens);
        let ended = ids.last() == Some(&chat().end_of_turn());
        FakeReply::Tokens { ids, finish: if ended { Finish::Stop } else { Finish::Length } }
    }

    /// The fault of this call, if it is to have one.
    fn fault(&self, seed: u64, ordinal: u32) -> Option<Fault> {
        let mut state = self.state();
        let fault = match seed % 97 {
            0..=3 => Fault::InvalidReply,
            4 => Fault::OtherWeights,
            5..=7 => Fault::NoRows,
            _ => return None,
        };
        let is_new = state.faulted.insert(ordinal);
        state.faults += usize::from(is_new);
        is_new.then_some(fault)
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// The reply fails a check: another worker is asked.
    InvalidReply,
    /// The worker has restarted with other weights: it goes out of service.
    OtherWeights,
    /// The reply lacks its rows.
    NoRows,
}

#[derive(Debug)]
struct Worker {
    number: usize,
    inner: FakeEngine,
    log: Arc<Log>,
    /// Calls that are being answered.
    active: Arc<Mutex<Vec<RequestId>>>,
}

/// A call that is being answered, until it is dropped.
struct Active(Arc<Mutex<Vec<RequestId>>>, RequestId);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.lock().unwrap().retain(|id| *id != self.1);
    }
}

impl Worker {
    fn new(number: usize, log: &Arc<Log>) -> Self {
        let shape = ModelShape { context: 1 << 16, ..toy_shape(chat().vocab_size()) };
        let script = Arc::clone(log);
        let inner = FakeEngine::new(shape, move |request, _| script.reply(request));
        Self {
            number,
            inner: inner.with_row_shift(number * ROW_SHIFT),
            log: Arc::clone(log),
            active: Arc::default(),
        }
    }

    fn error(&self, kind: EngineErrorKind) -> EngineError {
        EngineError { engine: format!("worker {}", self.number), call: "/generate", kind }
    }
}

#[async_trait::async_trait]
impl Engine for Worker {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        self.inner.info().await
    }

    fn shape(&self) -> &ModelShape {
        self.inner.shape()
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        let id = request.request_id.clone();
        let (_, number) = id.as_str().rsplit_once("-n").unwrap();
        let ordinal = number.split_once('-').unwrap().0.parse().unwrap();
        let fault = self.log.fault(request.sampling.seed, ordinal);
        match fault {
            Some(Fault::InvalidReply) => {
                return Err(self.error(EngineErrorKind::invalid_reply("it was cut short")));
            }
            Some(Fault::OtherWeights) => {
                return Err(self.error(EngineErrorKind::unsupported("it has other weights")));
            }
            Some(Fault::NoRows) | None => {}
        }
        let Prompt::Tokens(prompt) = request.prompt.clone() else { panic!("not in tokens") };
        self.active.lock().unwrap().push(id.clone());
        let _active = Active(Arc::clone(&self.active), id);
        let mut reply = self.inner.generate(request).await?;
        let Reply::Tokens(generation) = &mut reply else { panic!("not in tokens") };
        let is_refused = fault.is_some() && !generation.output_ids().is_empty();
        if is_refused {
            generation.routed_experts = None;
        }
        let version = generation.versions().first().map_or(PolicyVersion(0), |span| span.version);
        self.log.state().calls.push(Call {
            ordinal,
            prompt: prompt.ids,
            start: prompt.routed_experts_start.unwrap(),
            ids: generation.output_ids().to_vec(),
            worker: self.number,
            version,
            is_refused,
        });
        Ok(reply)
    }

    /// Aborts what runs, as servers do, before it takes the weights.
    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        loop {
            let active = self.active.lock().unwrap().clone();
            if active.is_empty() {
                break;
            }
            for id in &active {
                self.inner.abort(id);
            }
            tokio::task::yield_now().await;
        }
        self.inner.sync_weights(checkpoint, version).await
    }
}

/// A fleet of workers with one log.
pub(super) fn fleet(log: &Arc<Log>) -> Fleet {
    let worker = |number| FleetWorker {
        name: format!("worker-{number}"),
        engine: Arc::new(Worker::new(number, log)),
        is_up: true,
    };
    let options = FleetOptions {
        max_in_flight: 64,
        probe_interval: Duration::from_millis(5),
        out_of_service_timeout: Duration::from_mins(2),
    };
    Fleet::start((0..WORKERS).map(worker).collect(), options).unwrap()
}
