//! A fake engine with scripted replies.

use camino::Utf8Path;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation, Prompt,
    Reply, SampledTokens, Sampling, TokenListener, VersionSpan,
};
use orchestrate_routing::RoutedRows;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, TokenId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Name of the only worker.
const WORKER: &str = "fake";

/// A request as [`FakeEngine`] received it. Its prompt is always tokens.
#[derive(Debug, Clone)]
pub struct FakeRequest {
    /// Id of the request, new for every try.
    pub request_id: RequestId,
    /// Id of the conversation.
    pub session: String,
    /// All tokens so far, `[P]`.
    pub token_ids: Arc<Vec<TokenId>>,
    /// First absolute position whose routing row is requested; `None` = no rows.
    pub routed_experts_start: Option<usize>,
    /// How to sample.
    pub sampling: Sampling,
    /// Requests with a higher priority run first.
    pub priority: i32,
    /// Maximum time that the call may take.
    pub deadline: Duration,
}

/// What the fake replies to one request.
#[derive(Debug)]
pub enum FakeReply {
    /// These tokens, with correct routing rows.
    Tokens {
        /// Sampled ids.
        ids: Vec<TokenId>,
        /// Why sampling stopped.
        finish: Finish,
    },
    /// These tokens, ended by a stop token, with one routing row too few.
    ShortRows {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens, ended by a stop token, without routing rows.
    NoRows {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens, ended by a stop token, with the KV cache dropped and computed again once.
    Retracted {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// These tokens once the request is aborted; a timeout after its deadline.
    UntilAborted {
        /// Sampled ids.
        ids: Vec<TokenId>,
    },
    /// An error.
    Fail(EngineErrorKind),
    /// An error after these tokens, which only a listener is told.
    Break {
        /// Sampled ids.
        ids: Vec<TokenId>,
        /// The error.
        kind: EngineErrorKind,
    },
    /// No reply, ever.
    Hang,
}

impl FakeReply {
    /// The tokens that a listener is told.
    fn ids(&self) -> &[TokenId] {
        match self {
            Self::Tokens { ids, .. }
            | Self::ShortRows { ids }
            | Self::NoRows { ids }
            | Self::Retracted { ids }
            | Self::UntilAborted { ids }
            | Self::Break { ids, .. } => ids,
            Self::Fail(_) | Self::Hang => &[],
        }
    }
}

/// Number of tokens that a listener is told at once.
const TOKENS_PER_REPORT: usize = 3;

/// Returns the reply to a request, given the number of earlier calls in the same session.
pub type EngineScript = dyn Fn(&FakeRequest, usize) -> FakeReply + Send + Sync;

/// A fake engine: replies come from a script, routing rows from a hash of position, token and
/// version. It has a prefix cache per session, and records all requests.
pub struct FakeEngine {
    shape: ModelShape,
    row_shift: usize,
    script: Box<EngineScript>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    version: PolicyVersion,
    requests: Vec<FakeRequest>,
    /// By session: tokens in the KV cache, and the number of calls so far.
    sessions: HashMap<String, (Vec<TokenId>, usize)>,
    /// Requests that wait to be aborted, by request id.
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

/// A script that samples `max_new_tokens` tokens from a hash of the prompt, or fewer if a stop token
/// comes first. Requests for more than `long` tokens do not end until they are aborted.
pub fn well_behaved(
    vocab: usize,
    long: usize,
) -> impl Fn(&FakeRequest, usize) -> FakeReply + Send + Sync + 'static {
    move |request, _| {
        let seed = request
            .token_ids
            .iter()
            .fold(17_usize, |hash, &id| (hash * 31 + id as usize) % 1_000_003);
        let sampling = &request.sampling;
        let token = |n: usize| TokenId::try_from((seed * (n + 3) + n * n) % vocab).unwrap_or(0);
        let mut ids: Vec<TokenId> = (0..sampling.max_new_tokens.min(long)).map(token).collect();
        if sampling.max_new_tokens > long {
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
        script: impl Fn(&FakeRequest, usize) -> FakeReply + Send + Sync + 'static,
    ) -> Self {
        Self { shape, row_shift: 0, script: Box::new(script), state: Mutex::default() }
    }

    /// An engine whose routing rows differ from those of others: every expert's number is `shift` higher,
    /// modulo the number of experts.
    #[must_use]
    pub fn with_row_shift(self, shift: usize) -> Self {
        Self { row_shift: shift, ..self }
    }

    /// All requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<FakeRequest> {
        self.lock().requests.clone()
    }

    /// Serves another version from now on, with an empty KV cache.
    pub fn set_version(&self, version: PolicyVersion) {
        let mut state = self.lock();
        state.version = version;
        state.sessions.values_mut().for_each(|(tokens, _)| tokens.clear());
    }

    /// Aborts a request, as an operator would on a real server. An unknown id is ignored.
    pub fn abort(&self, request_id: &RequestId) {
        if let Some(held) = self.lock().held.remove(request_id.as_str()) {
            // Fails if the caller is gone, which then needs no reply.
            held.send(()).ok();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the ids of one row: for each MoE layer `top_k` consecutive experts, modulo the number
    /// of experts.
    fn row(&self, position: usize, token: TokenId, version: PolicyVersion, ids: &mut Vec<u16>) {
        for layer in &self.shape.moe_layers {
            let shift = self.row_shift + version_shift(version);
            let first = position * 7 + token as usize * 3 + layer * 5 + shift;
            let ring = (0..self.shape.top_k).map(|slot| (first + slot) % self.shape.experts);
            ids.extend(ring.filter_map(|id| u16::try_from(id).ok()));
        }
    }

    fn error(kind: EngineErrorKind) -> EngineError {
        EngineError { engine: "fake".to_owned(), call: "generate", kind }
    }

    /// Refuses requests that a client refuses before it sends them.
    fn check(&self, request: &FakeRequest) -> Result<(), EngineError> {
        let (prompt, shape) = (request.token_ids.len(), &self.shape);
        let outside = request.token_ids.iter().any(|&id| id as usize >= shape.vocab);
        let start = request.routed_experts_start.unwrap_or(0);
        if prompt >= shape.context {
            let message = format!("the prompt has {prompt} tokens");
            return Err(Self::error(EngineErrorKind::ContextFull(message)));
        }
        if prompt == 0 || outside || start > prompt {
            let message = "the prompt cannot be served";
            return Err(Self::error(EngineErrorKind::refused(400, message)));
        }
        Ok(())
    }

    async fn hold(
        &self,
        request: &FakeRequest,
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

    /// A reply of these tokens, with `missing_rows` routing rows too few; `None` = without rows.
    fn reply(
        &self,
        request: &FakeRequest,
        ids: Vec<TokenId>,
        finish: Finish,
        missing_rows: Option<usize>,
    ) -> Result<Generation, EngineError> {
        let mut state = self.lock();
        let version = state.version;
        let cached = state.sessions.entry(request.session.clone()).or_default();
        let all = [&*request.token_ids, ids.as_slice()].concat();
        // The last prompt token is always computed, because its logits are needed.
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

        let rows = missing_rows.zip(request.routed_experts_start).map(|(missing, start)| {
            let mut flat = Vec::new();
            let end = computed.saturating_sub(missing);
            for (position, token) in all.iter().enumerate().take(end).skip(start) {
                self.row(position, *token, version, &mut flat);
            }
            RoutedRows::from_ids(&self.shape, start, &flat)
        });
        let routed_experts = rows
            .transpose()
            .map_err(|e| Self::error(EngineErrorKind::invalid_reply(e.to_string())))?;
        let logprobs = ids.iter().map(|id| -0.1 - f32::from((id % 64) as u8) / 64.0).collect();
        let versions = match ids.len() {
            0 => Vec::new(),
            end => vec![VersionSpan { version, start: 0, end }],
        };
        let sampled = SampledTokens { output_ids: ids, logprobs, versions };
        let mut generation = Generation::new(sampled, finish, request.sampling.max_new_tokens)
            .map_err(Self::error)?;
        generation.cached_tokens = cached_tokens;
        generation.routing_wire_bytes =
            routed_experts.as_ref().map_or(0, |rows| rows.rows() * rows.row_bytes() * 4);
        generation.routed_experts = routed_experts;
        WORKER.clone_into(&mut generation.worker);
        Ok(generation)
    }

    async fn generate_tokens(
        &self,
        request: FakeRequest,
        listener: Option<Arc<dyn TokenListener>>,
    ) -> Result<Generation, EngineError> {
        self.check(&request)?;
        let call = {
            let mut state = self.lock();
            state.requests.push(request.clone());
            let session = state.sessions.entry(request.session.clone()).or_default();
            session.1 += 1;
            session.1 - 1
        };
        let reply = (self.script)(&request, call);
        if let Some(listener) = listener {
            listener.begin();
            reply.ids().chunks(TOKENS_PER_REPORT).for_each(|ids| listener.sampled(ids));
        }
        match reply {
            FakeReply::Tokens { ids, finish } => self.reply(&request, ids, finish, Some(0)),
            FakeReply::ShortRows { ids } => self.reply(&request, ids, Finish::Stop, Some(1)),
            FakeReply::NoRows { ids } => self.reply(&request, ids, Finish::Stop, None),
            FakeReply::Retracted { ids } => {
                let mut generation = self.reply(&request, ids, Finish::Stop, Some(0))?;
                generation.num_retractions = 1;
                Ok(generation)
            }
            FakeReply::UntilAborted { ids } => self.hold(&request, ids).await,
            FakeReply::Fail(kind) | FakeReply::Break { kind, .. } => Err(Self::error(kind)),
            FakeReply::Hang => std::future::pending().await,
        }
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

    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError> {
        let Prompt::Tokens(prompt) = request.prompt else {
            let message = "prompts must be tokens, not messages";
            return Err(Self::error(EngineErrorKind::unsupported(message)));
        };
        let listener = request.listener;
        let request = FakeRequest {
            request_id: request.request_id,
            session: request.session,
            token_ids: prompt.ids,
            routed_experts_start: prompt.routed_experts_start,
            sampling: request.sampling,
            priority: request.priority,
            deadline: request.deadline,
        };
        self.generate_tokens(request, listener).await.map(Reply::Tokens)
    }

    async fn sync_weights(
        &self,
        _checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        self.set_version(version);
        Ok(())
    }
}
