//! The capability probe of a server: what it reports, then a few tokens sampled from it.

use crate::api::Engine as _;
use crate::capability::{CapabilityFinding, ProbeReport, Severity, TRAINING_REQUIREMENTS, Worker};
use crate::client::Client;
use crate::dialect::Dialect;
use crate::error::{EngineError, EngineErrorKind};
use crate::reply::CheckedReply;
use crate::request::{GenerateRequest, Prompt, Sampling, TokenPrompt};
use async_trait::async_trait;
use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError};
use orchestrate_types::{
    AttemptId, EpisodeId, GroupId, ModelShape, PolicyVersion, RequestId, Retry, RunId, TokenId,
};
use std::sync::Arc;
use std::time::Duration;

/// Deadline of one generation. It is long because a server that is warming up is slow.
const DEADLINE: Duration = Duration::from_mins(2);
/// Prompt length in cache blocks.
const PROMPT_BLOCKS: usize = 3;
/// Minimum block size assumed, in tokens, so that there are enough rows to compare.
const MIN_BLOCK: usize = 16;
/// How often a call is made that the server refuses because it is busy.
const BUSY_TRIES: u32 = 4;
/// Longest pause between two of these.
const MAX_BUSY_PAUSE: Duration = Duration::from_secs(10);
/// Tokens sampled per call.
const OUTPUTS: usize = 2;
/// New tokens of the second turn.
const OBSERVATION: usize = 5;
/// Rounding changes a few rows between two calls. Beyond this share they are rows of other tokens.
const STALE_SHARE: f64 = 0.05;
/// Low enough that the most likely token has nearly all probability, but above what servers treat
/// specially as greedy sampling.
const LOW_TEMPERATURE: f32 = 0.01;
/// A token sampled at the low temperature has a log-probability below this only if another is almost as
/// likely.
const UNLIKELY_LOGPROB: f32 = -0.7;

#[async_trait]
impl<D: Dialect> Worker for Client<D> {
    async fn probe(&self) -> Result<ProbeReport, EngineError> {
        let mut busy = BusyCalls::default();
        let capabilities = loop {
            match self.query_capabilities().await {
                Err(error) => busy.wait_after(error).await?,
                Ok(capabilities) => break capabilities,
            }
        };
        let mut probe = Probe {
            client: self,
            run: RunId::generate(),
            calls: 0,
            block: capabilities.info.page_size.max(MIN_BLOCK),
            facts: capabilities.facts,
            findings: capabilities.findings,
        };
        let routing_off = probe.findings.iter().any(|finding| finding.name == "routing-off");
        let sampled =
            if routing_off { probe.sample_without_rows().await } else { probe.sample().await };
        match sampled {
            Ok(()) => {}
            Err(kind) if is_unreachable(&kind) => {
                return Err(EngineError { engine: self.url().to_owned(), call: D::GENERATE, kind });
            }
            Err(kind) => probe.findings.push(failed_generation::<D>(&kind)),
        }
        let Probe { facts, mut findings, .. } = probe;
        findings.sort_by_key(|finding| finding.severity != Severity::Refusal);
        Ok(ProbeReport { info: capabilities.info, facts, findings })
    }
}

/// Calls that a server refused because it is busy. They are made again, as a run makes them: other clients may
/// use the server.
#[derive(Debug, Default)]
pub(crate) struct BusyCalls(u32);

impl BusyCalls {
    /// Waits until a refused call may be made again.
    ///
    /// # Errors
    /// With the call's error if it is of another kind, or the server was busy too often.
    pub(crate) async fn wait(&mut self, kind: EngineErrorKind) -> Result<(), EngineErrorKind> {
        self.0 += 1;
        match kind.retry() {
            // What cannot be reached is for the caller to wait for.
            Retry::After(pause) if self.0 < BUSY_TRIES && !is_unreachable(&kind) => {
                tracing::debug!(error = %kind, tries = self.0, "the server is busy");
                tokio::time::sleep(pause.min(MAX_BUSY_PAUSE)).await;
                Ok(())
            }
            Retry::After(_) | Retry::Now | Retry::Never => Err(kind),
        }
    }

    /// Like [`Self::wait`], for an error with its call.
    pub(crate) async fn wait_after(&mut self, error: EngineError) -> Result<(), EngineError> {
        let EngineError { engine, call, kind } = error;
        self.wait(kind).await.map_err(|kind| EngineError { engine, call, kind })
    }
}

/// Whether the server is unreachable, as opposed to unsupported.
pub(crate) fn is_unreachable(kind: &EngineErrorKind) -> bool {
    match kind {
        EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
        EngineErrorKind::Refused { .. }
        | EngineErrorKind::ContextFull(_)
        | EngineErrorKind::InvalidReply(_)
        | EngineErrorKind::GenerationFailed(_)
        | EngineErrorKind::Unsupported(_) => false,
    }
}

/// A failed generation as a finding, with the remedy that its error suggests.
fn failed_generation<D: Dialect>(kind: &EngineErrorKind) -> CapabilityFinding {
    let (name, remedy) = match (kind.routing(), kind) {
        (Some(RoutingError::NotCaptured { .. }), _) => (
            "moe-backend",
            "serve with a MoE kernel that reports its choices (SGLang: --moe-runner-backend \
             triton), and without pipeline stages",
        ),
        (Some(RoutingError::ExpertRange { .. }), _) => (
            "physical-experts",
            "serve without expert load balancing, or set engine.model to the served model",
        ),
        (Some(RoutingError::DenseLayer { .. }), _) => {
            ("dense-layers", "set engine.model to the folder of the served model")
        }
        (Some(RoutingError::Length { hint, .. } | RoutingError::NpyShape { hint, .. }), _)
            if hint.contains("columns") =>
        {
            (
                "fused-shared-experts",
                "serve without fused shared experts (SGLang: --disable-shared-experts-fusion)",
            )
        }
        (Some(_), _) => (
            "routed-experts",
            "set engine.model to the folder of the served model, and serve it without options \
             that change its experts",
        ),
        (None, EngineErrorKind::Refused { status: 401 | 403, .. }) => {
            ("closed-route", "set engine.api_key_env, and start vLLM with --enable-scale-out")
        }
        (None, EngineErrorKind::Refused { status: 404, .. }) => {
            ("no-token-route", TRAINING_REQUIREMENTS)
        }
        (None, _) => ("generation", "see the server's log"),
    };
    CapabilityFinding::refusal(name, format!("{} {kind}", D::GENERATE), remedy)
}

struct Probe<'a, D> {
    client: &'a Client<D>,
    run: RunId,
    calls: u32,
    /// Tokens per block of the server's prefix cache.
    block: usize,
    facts: Vec<(&'static str, String)>,
    findings: Vec<CapabilityFinding>,
}

impl<D: Dialect> Probe<'_, D> {
    async fn sample_without_rows(&mut self) -> Result<(), EngineErrorKind> {
        let prompt = self.prompt();
        self.generate(&prompt, None, 1.0).await.map(|_| ())
    }

    /// Steps 2 to 6 of the probe. Step 1 was to ask what the server reports.
    async fn sample(&mut self) -> Result<(), EngineErrorKind> {
        let prompt = self.prompt();
        let length = prompt.len();
        // A whole reply has one row per input, with every MoE layer.
        let first = self.generate(&prompt, Some(0), 1.0).await?;
        let Some(rows) = &first.generation.routed_experts else {
            return Ok(()); // Aborted before it ran: another client has paused this server.
        };
        self.check_form(rows);

        // The same prompt again must be cached, and have the same rows.
        let second = self.generate(&prompt, Some(0), 1.0).await?;
        self.check_cache(&first, &second, length);

        // Rows of the last prompt token and the first sampled token only.
        let tail = self.generate(&prompt, Some(length - 1), 1.0).await?;
        if let Some(rows) = &tail.generation.routed_experts {
            self.check_form(rows);
        }

        // A second turn, which returns the row of the first turn's last token.
        let mut longer = prompt.clone();
        longer.extend(first.generation.output_ids());
        let have = longer.len() - 1;
        longer.extend(self.tokens(OBSERVATION, 7));
        let turn = self.generate(&longer, Some(have), 1.0).await?;
        let boundary =
            turn.generation.routed_experts.as_ref().is_some_and(|rows| rows.row(have).is_some());
        if !boundary {
            self.findings.push(CapabilityFinding::refusal(
                "boundary-row",
                "the row of the token between two turns is missing",
                "use a server that respects the start of the routing rows",
            ));
        }
        let expected = have / self.block * self.block;
        let cached = turn.generation.cached_tokens;
        if turn.cached_tokens && cached < expected.min(have) {
            self.findings.push(CapabilityFinding::warning(
                "prefix-cache",
                format!("only {cached} of {have} tokens seen before were cached"),
                "connect to the server directly, and give its prefix cache more memory",
            ));
        }
        self.check_temperature(&prompt).await?;
        self.check_fields(&first);
        Ok(())
    }

    /// Random tokens that no other probe has used, so that the first call is not cached.
    fn prompt(&self) -> Vec<TokenId> {
        let context = self.client.context();
        let length = (PROMPT_BLOCKS * self.block).min(context.saturating_sub(16) / 2).max(2);
        self.tokens(length, 1)
    }

    fn tokens(&self, count: usize, salt: u64) -> Vec<TokenId> {
        let shape: &ModelShape = self.client.model();
        let vocab = u64::try_from(shape.vocab).unwrap_or(1).max(1);
        let seed = self.run.short().bytes().fold(salt, |hash, byte| mix(hash ^ u64::from(byte)));
        let token = |index: usize| {
            let drawn = mix(seed.wrapping_add(u64::try_from(index).unwrap_or(0))) % vocab;
            TokenId::try_from(drawn).unwrap_or(0)
        };
        (0..count).map(token).collect()
    }

    async fn generate(
        &mut self,
        tokens: &[TokenId],
        start: Option<usize>,
        temperature: f32,
    ) -> Result<CheckedReply, EngineErrorKind> {
        let ids = Arc::new(tokens.to_vec());
        let mut busy = BusyCalls::default();
        loop {
            match self.try_generate(Arc::clone(&ids), start, temperature).await {
                Err(kind) => busy.wait(kind).await?,
                reply @ Ok(_) => return reply,
            }
        }
    }

    async fn try_generate(
        &mut self,
        ids: Arc<Vec<TokenId>>,
        start: Option<usize>,
        temperature: f32,
    ) -> Result<CheckedReply, EngineErrorKind> {
        let group = GroupId::Eval { round: 0, index: 0 };
        let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
        self.calls += 1;
        let request = GenerateRequest {
            request_id: RequestId::new(self.run, attempt, self.calls, 0),
            session: format!("probe-{}", self.run.short()),
            prompt: Prompt::Tokens(TokenPrompt {
                ids,
                routed_experts_start: start,
                cache_namespace: PolicyVersion(0),
            }),
            sampling: Sampling {
                temperature,
                top_p: 1.0,
                max_new_tokens: OUTPUTS,
                stop_token_ids: Vec::new(),
                seed: 1,
            },
            priority: 0,
            deadline: DEADLINE,
            listener: None,
        };
        // Always the same rank: each has its own prefix cache.
        let rank = (self.client.data_parallel_ranks() > 1).then_some(0);
        self.client.sample(&request, rank).await
    }

    fn check_form(&mut self, rows: &RoutedRows) {
        let (name, problem) = match rows.form() {
            PayloadForm::Exact => return,
            PayloadForm::SurplusRow => ("surplus-row", "the server sends one routing row too many"),
            PayloadForm::WholeSequence => (
                "start-ignored",
                "the server ignores the start of the routing rows and sends all of them",
            ),
        };
        let remedy = "upgrade it (SGLang 0.5.12, vLLM 0.31); otherwise traffic grows with the \
                      square of the number of turns";
        self.findings.push(CapabilityFinding::refusal(name, problem, remedy));
    }

    fn check_cache(&mut self, first: &CheckedReply, second: &CheckedReply, prompt: usize) {
        if second.cached_tokens && second.generation.cached_tokens == 0 {
            self.findings.push(CapabilityFinding::warning(
                "prefix-cache",
                format!("a prompt of {prompt} tokens was not cached when it was sent again"),
                "start the server with its prefix cache, and connect to it directly",
            ));
        }
        let (Some(before), Some(after)) =
            (&first.generation.routed_experts, &second.generation.routed_experts)
        else {
            return;
        };
        let differing = (0..prompt).filter(|&at| before.row(at) != after.row(at)).count();
        self.facts.push(("rows that differ when cached", format!("{differing} of {prompt}")));
        if differing as f64 > STALE_SHARE * prompt as f64 {
            self.findings.push(CapabilityFinding::refusal(
                "stale-rows",
                format!("{differing} of {prompt} rows of a prompt differ when it is sent again"),
                "serve without caches outside the GPU (HiCache, LMCache), and without a gateway \
                 that merges replies",
            ));
        }
    }

    /// Whether log-probabilities describe the distribution that was sampled from. After one prompt two
    /// tokens may be almost equally likely even at the low temperature; after two unrelated prompts that
    /// is not a coincidence.
    async fn check_temperature(&mut self, prompt: &[TokenId]) -> Result<(), EngineErrorKind> {
        let other = self.tokens(prompt.len(), 11);
        for prompt in [prompt, &other] {
            let reply = self.generate(prompt, None, LOW_TEMPERATURE).await?;
            let first = reply.generation.logprobs().first();
            let Some(logprob) = first.filter(|&&logprob| logprob < UNLIKELY_LOGPROB) else {
                return Ok(());
            };
            tracing::debug!(logprob, "a token that is unlikely at a low temperature was sampled");
        }
        self.findings.push(CapabilityFinding::warning(
            "raw-logprobs",
            format!(
                "log-probs ignore the temperature (the tokens sampled at {LOW_TEMPERATURE} have \
                 less than {UNLIKELY_LOGPROB})"
            ),
            "train at temperature 1 and top-p 1, or start vLLM with --logprobs-mode \
             processed_logprobs",
        ));
        Ok(())
    }

    fn check_fields(&mut self, first: &CheckedReply) {
        let yes = |has: bool| if has { "yes" } else { "no" }.to_owned();
        self.facts.push(("versions by token", yes(first.versions_by_token)));
        self.facts.push(("cached tokens reported", yes(first.cached_tokens)));
        if let Some(rank) = first.dp_rank {
            self.facts.push(("data-parallel rank", rank.to_string()));
        }
        if !first.versions_by_token {
            self.findings.push(CapabilityFinding::warning(
                "versions",
                "the server does not report the weight version of each token",
                "upgrade it (SGLang 0.5.20, vLLM 0.32); otherwise a restart with older weights \
                 may go unnoticed",
            ));
        }
        if !first.cached_tokens {
            self.findings.push(CapabilityFinding::warning(
                "cached-tokens",
                "the server does not report how much of a prompt was cached",
                "start vLLM with --enable-prompt-tokens-details",
            ));
        }
    }
}

/// A hash of a number, well distributed.
fn mix(value: u64) -> u64 {
    let mixed = (value ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
