//! An engine whose replies are scripted.

use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
    VersionSpan,
};
use orchestrate_routing::RoutedRows;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, TokenId};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tokio::sync::oneshot;

/// Name of the only worker.
const WORKER: &str = "fake";

/// What the fake answers to one call.
#[derive(Debug)]
pub enum FakeReply {
    /// These tokens, ended this way, with right routing rows.
    Tokens {
        /// Sampled ids.
        ids: Vec<TokenId>,
        /// How it ended.
        finish: Finish,
    },
    /// These tokens, ended by a stop token, but one routing row too few.
    ShortRows {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens, ended by a stop token, without routing rows.
    NoRows {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens, ended by a stop token, whose KV was dropped and computed again on the way.
    Retracted {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens once the request is aborted; too late after its deadline.
    UntilAborted {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// An error.
    Fail(EngineErrorKind),
    /// No answer, ever.
    Hang,
}

/// Gives the reply to a request; the number counts earlier calls of the same session from 0.
pub type EngineScript = dyn Fn(&GenerateRequest, usize) -> FakeReply + Send + Sync;

/// A fake engine: replies from a script, routing rows from a hash of position, token and version,
/// a prefix cache per session, and a record of all requests.
pub struct FakeEngine {
    shape: ModelShape,
    script: Box<EngineScript>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    version: PolicyVersion,
    requests: Vec<GenerateRequest>,
    /// Tokens with KV, and calls so far, by session.
    sessions: HashMap<String, (Vec<TokenId>, usize)>,
    /// Requests that wait for their abort.
    held: HashMap<String, oneshot::Sender<()>>,
}

impl std::fmt::Debug for FakeEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeEngine").field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// Three hidden layers, the first dense; 8 experts, top-2; 4,096 tokens of context.
pub fn toy_shape(vocab: usize) -> ModelShape {
    ModelShape {
        hidden_layers: 3,
        moe_layers: vec![1, 2],
        experts: 8,
        top_k: 2,
        vocab,
        context: 4096,
    }
}

/// A script without whims: tokens from a hash of the prompt, `max_new_tokens` of them unless a
/// stop token comes first; more than `patience` are never sampled to the end.
pub fn well_behaved(
    vocab: usize,
    patience: usize,
) -> impl Fn(&GenerateRequest, usize) -> FakeReply + Send + Sync + 'static {
    move |request, _| {
        let seed = request
            .token_ids
            .iter()
            .fold(17_usize, |hash, &id| (hash * 31 + id as usize) % 1_000_003);
        let sampling = &request.sampling;
        let token = |n: usize| TokenId::try_from((seed * (n + 3) + n * n) % vocab).unwrap_or(0);
        let mut ids: Vec<TokenId> = (0..sampling.max_new_tokens.min(patience)).map(token).collect();
        if sampling.max_new_tokens > patience {
            return FakeReply::UntilAborted { ids };
        }
        match ids.iter().position(|id| sampling.stop_token_ids.contains(id)) {
            Some(stop) => {
                ids.truncate(stop + 1);
                FakeReply::Tokens { ids, finish: Finish::Stop }
            }
            None => FakeReply::Tokens { ids, finish: Finish::Length },
        }
    }
}

impl FakeEngine {
    /// An engine that serves policy version 0.
    pub fn new(
        shape: ModelShape,
        script: impl Fn(&GenerateRequest, usize) -> FakeReply + Send + Sync + 'static,
    ) -> Self {
        Self { shape, script: Box::new(script), state: Mutex::default() }
    }

    /// All requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.lock().requests.clone()
    }

    /// Serves another version from now on, and forgets all KV.
    pub fn set_version(&self, version: PolicyVersion) {
        let mut state = self.lock();
        state.version = version;
        state.sessions.values_mut().for_each(|(tokens, _)| tokens.clear());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ids of one row: for each MoE layer `top_k` neighbours on the ring of experts.
    fn row(&self, position: usize, token: TokenId, version: PolicyVersion, ids: &mut Vec<u16>) {
        for layer in &self.shape.moe_layers {
            let first = position * 7 + token as usize * 3 + layer * 5 + version_shift(version);
            let ring = (0..self.shape.top_k).map(|slot| (first + slot) % self.shape.experts);
            ids.extend(ring.filter_map(|id| u16::try_from(id).ok()));
        }
    }

    fn error(kind: EngineErrorKind) -> EngineError {
        EngineError { engine: "fake".to_owned(), call: "generate", kind }
    }

    /// Refuses what a client refuses before it sends anything.
    fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let (prompt, shape) = (request.token_ids.len(), &self.shape);
        let outside = request.token_ids.iter().any(|&id| id as usize >= shape.vocab);
        let start = request.routed_experts_start.unwrap_or(0);
        if prompt == 0 || prompt >= shape.context || outside || start > prompt {
            let message = "a prompt that cannot be served".to_owned();
            return Err(Self::error(EngineErrorKind::refused(400, message)));
        }
        Ok(())
    }

    async fn hold(
        &self,
        request: &GenerateRequest,
        ids: Vec<TokenId>,
    ) -> Result<Generation, EngineError> {
        let (held, aborted) = oneshot::channel();
        self.lock().held.insert(request.request_id.as_str().to_owned(), held);
        let waited = tokio::time::timeout(request.deadline, aborted).await;
        self.lock().held.remove(request.request_id.as_str());
        match waited {
            Ok(_) => self.reply(request, ids, Finish::Abort, Some(0)),
            Err(_) => Err(Self::error(EngineErrorKind::TimedOut(request.deadline))),
        }
    }

    fn reply(
        &self,
        request: &GenerateRequest,
        ids: Vec<TokenId>,
        finish: Finish,
        rows: Option<usize>,
    ) -> Result<Generation, EngineError> {
        let mut state = self.lock();
        let version = state.version;
        let cached = state.sessions.entry(request.session.clone()).or_default();
        let all = [&*request.token_ids, ids.as_slice()].concat();
        // The last prompt token is always computed: its logits are needed.
        let cached_tokens = cached
            .0
            .iter()
            .zip(request.token_ids.iter())
            .take_while(|(a, b)| a == b)
            .count()
            .min(request.token_ids.len().saturating_sub(1));
        let computed = all.len().saturating_sub(1);
        cached.0 = all.iter().take(computed).copied().collect();
        drop(state);

        let rows = rows.zip(request.routed_experts_start).map(|(missing, start)| {
            let mut flat = Vec::new();
            let end = computed.saturating_sub(missing);
            for (position, token) in all.iter().enumerate().take(end).skip(start) {
                self.row(position, *token, version, &mut flat);
            }
            RoutedRows::from_ids(&self.shape, start, &flat)
        });
        let routed_experts = rows
            .transpose()
            .map_err(|e| Self::error(EngineErrorKind::InvalidReply(e.to_string())))?;
        let logprobs = ids.iter().map(|id| -0.1 - f32::from((id % 64) as u8) / 64.0).collect();
        Ok(Generation {
            logprobs,
            finish,
            cached_tokens,
            routing_wire_bytes: routed_experts
                .as_ref()
                .map_or(0, |rows| rows.rows() * rows.row_bytes() * 4),
            routed_experts,
            versions: vec![VersionSpan { version, start: 0, end: ids.len() }],
            num_retractions: 0,
            worker: WORKER.to_owned(),
            turn: None,
            output_ids: ids,
        })
    }
}

fn version_shift(version: PolicyVersion) -> usize {
    usize::try_from(version.0).unwrap_or(0)
}

#[async_trait::async_trait]
impl Engine for FakeEngine {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        Ok(EngineInfo {
            engine: "fake 0".to_owned(),
            model_path: "fake".to_owned(),
            routed_experts: true,
            policy_version: Some(self.lock().version),
            context: Some(self.shape.context),
            page_size: 1,
        })
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn worker_of(&self, _session: &str) -> Option<String> {
        Some(WORKER.to_owned())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.check(&request)?;
        let call = {
            let mut state = self.lock();
            state.requests.push(request.clone());
            let session = state.sessions.entry(request.session.clone()).or_default();
            session.1 += 1;
            session.1 - 1
        };
        match (self.script)(&request, call) {
            FakeReply::Tokens { ids, finish } => self.reply(&request, ids, finish, Some(0)),
            FakeReply::ShortRows { ids } => self.reply(&request, ids, Finish::Stop, Some(1)),
            FakeReply::NoRows { ids } => self.reply(&request, ids, Finish::Stop, None),
            FakeReply::Retracted { ids } => {
                let reply = self.reply(&request, ids, Finish::Stop, Some(0))?;
                Ok(Generation { num_retractions: 1, ..reply })
            }
            FakeReply::UntilAborted { ids } => self.hold(&request, ids).await,
            FakeReply::Fail(kind) => Err(Self::error(kind)),
            FakeReply::Hang => std::future::pending().await,
        }
    }

    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        self.set_version(version);
        Ok(())
    }

    async fn abort(&self, request_id: &RequestId) -> Result<(), EngineError> {
        if let Some(held) = self.lock().held.remove(request_id.as_str()) {
            // A caller that has left needs no answer.
            held.send(()).ok();
        }
        Ok(())
    }
}
