//! One inference server over HTTP, whatever its dialect: permits, deadlines, caps, retries of the
//! first contact, and never a sample of unknown weights.

use crate::dialect::{Dialect, Limits, Survey};
use crate::http::{Wire, exchange};
use crate::probe::{ProbeReport, probe};
use crate::reply::{Expected, Fault, Reading};
use crate::{
    Engine, EngineError, EngineErrorKind, EngineInfo, GenerateRequest, Generation, Severity,
    VersionSpan,
};
use async_trait::async_trait;
use backon::{ConstantBuilder, Retryable};
use bytes::Bytes;
use camino::Utf8Path;
use orchestrate_types::{ModelShape, PolicyVersion, RequestId};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Replies beyond this are checked off the async threads.
const INLINE_BYTES: usize = 256 << 10;
/// Pause between two looks at a server that is starting.
const START_POLL: Duration = Duration::from_millis(500);

/// How to reach one server.
#[derive(Clone)]
pub struct ClientOptions {
    /// Base URL, e.g. `http://127.0.0.1:30000`.
    pub url: String,
    /// API key, sent as bearer token.
    pub api_key: Option<String>,
    /// Shape of the model it serves; replies are checked against it.
    pub shape: ModelShape,
    /// Most generations under way at once, at least 1.
    pub max_in_flight: usize,
    /// Whether a server without routed experts is unfit.
    pub require_routed_experts: bool,
    /// Longest time one weight update may take.
    pub sync_timeout: Duration,
    /// Name of the model, for servers that are asked by name.
    pub served_model: Option<String>,
}

impl std::fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientOptions")
            .field("url", &self.url)
            .field("api_key", &self.api_key.as_ref().map(|_| "(not shown)"))
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

/// Which weights this client knows the server to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serving {
    /// Not synced by this client; any numbered version is taken at its word.
    Untouched,
    /// The last sync succeeded with this version.
    Synced(PolicyVersion),
    /// An update failed half-way, or the server went back: nothing may be sampled.
    Unknown,
}

/// One server that speaks `D`.
#[derive(Debug)]
pub struct Client<D> {
    wire: Wire,
    shape: Arc<ModelShape>,
    permits: Semaphore,
    require_routed_experts: bool,
    sync_timeout: Duration,
    /// The server refuses priorities unless it was started with them.
    priorities: AtomicBool,
    /// Data-parallel ranks behind this one address.
    ranks: AtomicUsize,
    /// The longest sequence, by the model's configuration and the server's word.
    context: AtomicUsize,
    serving: Mutex<Serving>,
    syncing: tokio::sync::Mutex<()>,
    dialect: PhantomData<fn() -> D>,
}

impl<D: Dialect> Client<D> {
    /// A client; connects on the first call. Proxies of the environment are ignored.
    ///
    /// # Errors
    /// [`EngineErrorKind::Unfit`] when the HTTP client or the API key cannot be used.
    pub fn new(options: ClientOptions) -> Result<Self, EngineError> {
        Ok(Self {
            wire: Wire::new(&options.url, options.api_key.as_deref())?,
            context: AtomicUsize::new(options.shape.context),
            shape: Arc::new(options.shape),
            permits: Semaphore::new(options.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            require_routed_experts: options.require_routed_experts,
            sync_timeout: options.sync_timeout,
            priorities: AtomicBool::new(false),
            ranks: AtomicUsize::new(1),
            serving: Mutex::new(Serving::Untouched),
            syncing: tokio::sync::Mutex::new(()),
            dialect: PhantomData,
        })
    }

    /// A client of a server that answers: waits at most `patience` for one that is starting.
    ///
    /// # Errors
    /// As [`Engine::info`], the last one when patience ends.
    pub async fn connect(
        options: ClientOptions,
        patience: Duration,
    ) -> Result<(Self, EngineInfo), EngineError> {
        let client = Self::new(options)?;
        let info = await_start(&client, patience).await?;
        Ok((client, info))
    }

    /// Looks at the server and samples a few tokens from it, to find out whether it is fit for
    /// training with routing replay. What is unfit is in the report, and no error.
    ///
    /// # Errors
    /// When the server cannot be asked at all.
    pub async fn probe(&self) -> Result<ProbeReport, EngineError> {
        probe(self).await
    }

    /// Asks what the server is, and remembers what requests depend on.
    pub(crate) async fn survey(&self) -> Result<Survey, EngineError> {
        let survey = D::survey(&self.wire, &self.shape).await?;
        self.priorities.store(survey.priorities, Ordering::Relaxed);
        self.ranks.store(survey.ranks.max(1), Ordering::Relaxed);
        let context = survey.info.context.unwrap_or(usize::MAX).min(self.shape.context);
        self.context.store(context, Ordering::Relaxed);
        Ok(survey)
    }

    /// Base URL, the name its replies carry.
    pub(crate) fn worker(&self) -> String {
        self.wire.base().to_owned()
    }

    pub(crate) fn model(&self) -> &ModelShape {
        &self.shape
    }

    /// The longest sequence that is known to be taken.
    pub(crate) fn context(&self) -> usize {
        self.context.load(Ordering::Relaxed)
    }

    fn serving(&self) -> Serving {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_serving(&self, serving: Serving) {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = serving;
    }

    /// Refuses tokens of weights this client did not put there: a server that restarted serves
    /// its first checkpoint again.
    fn check_versions(
        &self,
        spans: &[VersionSpan],
        before: Serving,
    ) -> Result<(), EngineErrorKind> {
        let Serving::Synced(lowest) = before else { return Ok(()) };
        let highest = match self.serving() {
            Serving::Synced(now) => now.max(lowest),
            // A sync is under way: what was sampled before it is still of the version before.
            Serving::Untouched | Serving::Unknown => lowest,
        };
        let strange = spans.iter().find(|span| span.version < lowest || span.version > highest);
        strange.map_or(Ok(()), |span| {
            self.set_serving(Serving::Unknown);
            Err(EngineErrorKind::Unfit(format!(
                "it serves policy version {}, synced was {lowest}: sync its weights again",
                span.version
            )))
        })
    }

    /// Refuses what would hurt the server, or what it would refuse. Gives the tokens to sample.
    fn check_request(&self, request: &GenerateRequest) -> Result<usize, EngineErrorKind> {
        let prompt = request.token_ids.len();
        let context = self.context();
        let room = context.saturating_sub(prompt);
        if prompt == 0 || room == 0 {
            let message = format!("a prompt of {prompt} tokens in a context of {context}");
            return Err(EngineErrorKind::refused(400, message));
        }
        // An id beyond the vocabulary takes the whole server down with some backends.
        if let Some(id) = request.token_ids.iter().find(|&&id| id as usize >= self.shape.vocab) {
            let message = format!("prompt token {id} is not in the vocabulary");
            return Err(EngineErrorKind::refused(400, message));
        }
        let start = request.routed_experts_start.unwrap_or(0);
        if start > prompt {
            let message = format!("rows from position {start} of a prompt of {prompt} tokens");
            return Err(EngineErrorKind::refused(400, message));
        }
        // One server refuses longer requests, another one cuts them.
        Ok(request.sampling.max_new_tokens.min(room))
    }

    /// Samples once; the fault of a bad reply is kept in full.
    pub(crate) async fn sample(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Reading, Fault> {
        let max_new_tokens = self.check_request(request)?;
        // A closed semaphore cannot be: it is never closed.
        let permit = self.permits.acquire().await;
        let before = self.serving();
        let serving = match before {
            Serving::Untouched => PolicyVersion(0),
            Serving::Synced(version) => version,
            Serving::Unknown => {
                let words = "its weights are unknown since a failed update: sync them again";
                return Err(EngineErrorKind::Unfit(words.to_owned()).into());
            }
        };
        let priorities = self.priorities.load(Ordering::Relaxed);
        let limits = Limits { max_new_tokens, priorities, rank };
        let mut post = self.wire.post(D::GENERATE, D::body(request, &limits), &request.session);
        if let (Some(header), Some(rank)) = (D::RANK_HEADER, rank) {
            post = post.header(header, rank);
        }
        let expected = Expected {
            request_id: request.request_id.as_str().to_owned(),
            prompt_tokens: request.token_ids.len(),
            max_new_tokens,
            routed_experts_start: request.routed_experts_start,
            shape: Arc::clone(&self.shape),
            serving,
        };
        let answer = exchange(post, request.deadline, expected.body_limit()).await;
        if matches!(answer, Err(EngineErrorKind::TimedOut(_))) {
            // The closed connection aborts it, too, but only when the server looks.
            if let Err(error) = D::abort(&self.wire, &request.request_id).await {
                tracing::debug!(request_id = %request.request_id, %error, "cannot abort");
            }
        }
        drop(permit);
        let mut reading = Self::checked(answer?, expected).await?;
        self.check_versions(&reading.generation.versions, before)?;
        reading.generation.worker = self.worker();
        Ok(reading)
    }

    async fn checked(body: Bytes, expected: Expected) -> Result<Reading, Fault> {
        if body.len() <= INLINE_BYTES {
            return D::read(&body, &expected);
        }
        tokio::task::spawn_blocking(move || D::read(&body, &expected)).await.unwrap_or_else(
            |error| {
                Err(EngineErrorKind::InvalidReply(format!("checking it failed: {error}")).into())
            },
        )
    }
}

/// Waits at most `patience` for a server that is starting.
pub(crate) async fn await_start(
    engine: &impl Engine,
    patience: Duration,
) -> Result<EngineInfo, EngineError> {
    let begun = tokio::time::Instant::now();
    let starting = |error: &EngineError| {
        let may_come = match &error.kind {
            EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
            EngineErrorKind::Refused { status, .. } => *status == 503,
            EngineErrorKind::InvalidReply(_) | EngineErrorKind::Unfit(_) => false,
        };
        may_come && begun.elapsed() < patience
    };
    let backoff = ConstantBuilder::default().with_delay(START_POLL).without_max_times();
    (|| engine.info()).retry(backoff).when(starting).await
}

#[async_trait]
impl<D: Dialect> Engine for Client<D> {
    async fn info(&self) -> Result<EngineInfo, EngineError> {
        let Survey { info, findings, .. } = self.survey().await?;
        let unfit = findings.into_iter().find(|finding| finding.severity == Severity::Refusal);
        match unfit.filter(|_| self.require_routed_experts) {
            Some(finding) => {
                Err(self.wire.error("look", EngineErrorKind::Unfit(finding.to_string())))
            }
            None => Ok(info),
        }
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn worker_of(&self, _session: &str) -> Option<String> {
        Some(self.worker())
    }

    fn data_parallel_ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed)
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        self.generate_on(&request, None).await
    }

    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Generation, EngineError> {
        match self.sample(request, rank).await {
            Ok(reading) => Ok(reading.generation),
            Err(fault) => Err(self.wire.error(D::GENERATE, fault.kind)),
        }
    }

    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError> {
        let _one_at_a_time = self.syncing.lock().await;
        self.set_serving(Serving::Unknown);
        // A clean cut: what runs is aborted and resumed by its caller under the new weights.
        D::pause(&self.wire, self.sync_timeout).await?;
        let word = version.to_string();
        let loaded = D::load(&self.wire, checkpoint, &word, self.sync_timeout).await;
        // Also after a failure: a paused server would hold every later call, and none of ours
        // gets through until a sync succeeds.
        let resumed = D::resume(&self.wire).await;
        loaded?;
        resumed?;
        self.set_serving(Serving::Synced(version));
        Ok(())
    }

    async fn abort(&self, request_id: &RequestId) -> Result<(), EngineError> {
        D::abort(&self.wire, request_id).await
    }
}
