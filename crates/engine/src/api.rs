//! The [`Engine`] trait: everything that the rest of the program requires of an inference engine. It
//! contains no HTTP types.

use crate::error::EngineError;
use crate::generation::Reply;
use crate::request::{GenerateRequest, SessionOpening};
use camino::Utf8Path;
use orchestrate_types::{ModelShape, PolicyVersion};

/// Properties of an engine, as it reports them.
#[derive(Debug, Clone)]
pub struct EngineInfo {
    /// Name and version, for display.
    pub engine: String,
    /// Folder or name of the served model.
    pub model_path: String,
    /// Whether it returns routed experts.
    pub routed_experts: bool,
    /// Policy version of the weights that it serves; `None` if its name for them is not a number.
    pub policy_version: Option<PolicyVersion>,
    /// Maximum sequence length in tokens, where reported.
    pub context: Option<usize>,
    /// Tokens per block of its prefix cache.
    pub page_size: usize,
}

/// An inference engine, or a fleet of them.
///
/// Dropping the future of a call aborts the request on the engine.
///
/// # Example
///
/// One turn with routing rows. The fake engine of the tests stands in for a server here.
///
/// ```
/// use orchestrate_engine::{Engine, GenerateRequest, Prompt, Sampling, TokenPrompt};
/// use orchestrate_testkit::{FakeEngine, toy_shape, well_behaved};
/// use orchestrate_types::{PolicyVersion, RequestId, RunId};
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let engine: Arc<dyn Engine> = Arc::new(FakeEngine::new(toy_shape(1024), well_behaved(1024, 100)));
///
/// let prompt = vec![11, 12, 13, 14];
/// let reply = engine
///     .generate(GenerateRequest {
///         request_id: RequestId::new(RunId::generate(), "t000001.00-a01".parse()?, 0, 0),
///         session: "t000001.00".to_owned(),
///         prompt: Prompt::Tokens(TokenPrompt {
///             ids: Arc::new(prompt.clone()),
///             routed_experts_start: Some(0), // rows of all tokens
///             cache_namespace: PolicyVersion(0),
///         }),
///         sampling: Sampling {
///             temperature: 1.0,
///             top_p: 1.0,
///             max_new_tokens: 8,
///             stop_token_ids: vec![2],
///             seed: 42,
///         },
///         priority: 0,
///         deadline: Duration::from_secs(60),
///         listener: None,
///     })
///     .await?;
///
/// // A prompt in tokens is answered in tokens.
/// let generation = reply.into_tokens().ok_or("not tokens")?;
/// let outputs = generation.output_ids().len();
/// assert_eq!(generation.logprobs().len(), outputs);
/// assert_eq!(generation.versions()[0].version, PolicyVersion(0));
///
/// // One routing row per input token: the last sampled token was not an input yet. Its row comes
/// // with the next turn, which requests rows from here on.
/// let rows = generation.routed_experts.ok_or("no routing rows")?;
/// assert_eq!((rows.start(), rows.rows()), (0, prompt.len() + outputs - 1));
/// // The expert ids of one token: two MoE layers, top-2.
/// assert_eq!(rows.row(0).map(<[u8]>::len), Some(4));
/// # Ok(())
/// # })
/// # }
/// ```
#[async_trait::async_trait]
pub trait Engine: Send + Sync + std::fmt::Debug {
    /// Asks what the engine is and what it can do.
    async fn info(&self) -> Result<EngineInfo, EngineError>;

    /// Shape of the served model. Routing rows are checked against it.
    fn shape(&self) -> &ModelShape;

    /// Whether prompts must be [`Prompt::Messages`](crate::Prompt::Messages). Such an engine hides
    /// tokens, log-probabilities and routed experts: it can be evaluated, but not trained with.
    fn takes_messages(&self) -> bool {
        false
    }

    /// Number of data-parallel ranks behind this address, at least 1. Each has its own prefix cache.
    fn data_parallel_ranks(&self) -> usize {
        1
    }

    /// Name of the worker that will answer the conversation's next call, as replies name it; `None`
    /// if that is not known before the call.
    fn worker_of(&self, session: &str) -> Option<String> {
        let _ = session;
        None
    }

    /// Announces a conversation, so that a fleet assigns its worker now and [`Engine::worker_of`]
    /// knows it. Without this call the worker is assigned at the first request.
    fn open_session(&self, opening: &SessionOpening<'_>) {
        let _ = opening;
    }

    /// Ends a conversation: the engine may forget it.
    fn close_session(&self, session: &str) {
        let _ = session;
    }

    /// Samples one turn. Dropping the future aborts the request on the engine.
    async fn generate(&self, request: GenerateRequest) -> Result<Reply, EngineError>;

    /// Samples one turn on one data-parallel rank, below [`Engine::data_parallel_ranks`]; with
    /// `None` the engine chooses.
    async fn generate_on(
        &self,
        request: &GenerateRequest,
        rank: Option<usize>,
    ) -> Result<Reply, EngineError> {
        let _ = rank;
        self.generate(request.clone()).await
    }

    /// Loads new weights from a Hugging Face folder and serves them as `version`: pauses, updates,
    /// clears the prefix cache, verifies the version and continues.
    ///
    /// After an error the engine refuses to sample until a later sync succeeds.
    async fn sync_weights(
        &self,
        checkpoint: &Utf8Path,
        version: PolicyVersion,
    ) -> Result<(), EngineError>;
}
