//! A look at a server before a run trusts it: what it says, then a few tokens sampled from it.

use crate::client::Client;
use crate::dialect::Dialect;
use crate::reply::{Fault, Reading};
use crate::{
    Engine as _, EngineError, EngineErrorKind, EngineInfo, Finding, GenerateRequest, Sampling,
    Severity,
};
use orchestrate_routing::{PayloadForm, RoutedRows, RoutingError};
use orchestrate_types::{
    AttemptId, EpisodeId, GroupId, ModelShape, PolicyVersion, RequestId, RunId, TokenId,
};
use std::time::Duration;

/// Longest time one of the probe's generations may take: a server that warms up is slow.
const DEADLINE: Duration = Duration::from_mins(2);
/// Tokens of the prompt, in cache blocks.
const PROMPT_BLOCKS: usize = 3;
/// A block of this size at least, so that the rows say something.
const SMALLEST_BLOCK: usize = 16;
/// Tokens sampled per call.
const OUTPUTS: usize = 2;
/// New tokens of the second turn.
const OBSERVATION: usize = 5;
/// Rounding flips a choice here and there; beyond this share, rows are those of other tokens.
const STALE_SHARE: f64 = 0.05;
/// So cold that the likeliest token has nearly all probability, and above what servers take for
/// greedy sampling, which they treat differently.
const COLD: f32 = 0.01;
/// A log-probability no cold token has.
const UNLIKELY: f32 = -0.7;

/// What a probe found.
#[derive(Debug, Clone)]
pub struct ProbeReport {
    /// What the server says it is.
    pub info: EngineInfo,
    /// Facts worth showing, as `(name, value)`.
    pub facts: Vec<(&'static str, String)>,
    /// What is not as a run wants it, refusals first.
    pub findings: Vec<Finding>,
}

impl ProbeReport {
    /// The reasons not to train with this server.
    pub fn refusals(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity == Severity::Refusal)
    }

    /// What a person should know, and no more.
    pub fn warnings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity == Severity::Warning)
    }
}

/// Probes a server: see [`Client::probe`].
pub(crate) async fn probe<D: Dialect>(client: &Client<D>) -> Result<ProbeReport, EngineError> {
    let survey = client.survey().await?;
    let mut probe = Probe {
        client,
        run: RunId::generate(),
        calls: 0,
        block: survey.info.page_size.max(SMALLEST_BLOCK),
        facts: survey.facts,
        findings: survey.findings,
    };
    let blind = probe.findings.iter().any(|finding| finding.name == "routing-off");
    let sampled = if blind { probe.sample_without_rows().await } else { probe.sample().await };
    match sampled {
        Ok(()) => {}
        Err(fault) if is_absence(&fault.kind) => {
            let engine = client.worker();
            return Err(EngineError { engine, call: D::GENERATE, kind: fault.kind });
        }
        Err(fault) => probe.findings.push(unfit::<D>(&fault)),
    }
    let Probe { facts, mut findings, .. } = probe;
    findings.sort_by_key(|finding| finding.severity != Severity::Refusal);
    Ok(ProbeReport { info: survey.info, facts, findings })
}

/// Whether the server went away, rather than being unfit.
fn is_absence(kind: &EngineErrorKind) -> bool {
    match kind {
        EngineErrorKind::Unreachable(_) | EngineErrorKind::TimedOut(_) => true,
        EngineErrorKind::Refused { .. }
        | EngineErrorKind::InvalidReply(_)
        | EngineErrorKind::Unfit(_) => false,
    }
}

/// A generation that failed, as a finding with the remedy that its error suggests.
fn unfit<D: Dialect>(fault: &Fault) -> Finding {
    let words = fault.kind.to_string();
    let (name, remedy) = match (&fault.routing, &fault.kind) {
        (Some(RoutingError::NotCaptured { .. }), _) => (
            "moe-backend",
            "serve with a MoE kernel that shows its choices (SGLang: --moe-runner-backend \
             triton), and without pipeline stages",
        ),
        (Some(RoutingError::ExpertRange { .. }), _) => {
            ("physical-experts", "serve without expert load balancing, or with the right model")
        }
        (Some(RoutingError::DenseLayer { .. }), _) => {
            ("dense-layers", "make engine.model the folder of the model that is served")
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
            "make engine.model the folder of the model that is served, and serve it without \
             options that change its experts",
        ),
        (None, EngineErrorKind::Refused { status: 401 | 403, .. }) => {
            ("closed-route", "set engine.api_key_env, and start vLLM with --enable-scale-out")
        }
        (None, EngineErrorKind::Refused { status: 404, .. }) => {
            ("no-token-route", crate::kind::NEEDED)
        }
        (None, _) => ("generation", "see the server's own log"),
    };
    Finding::refusal(name, format!("{} {words}", D::GENERATE), remedy)
}

struct Probe<'a, D> {
    client: &'a Client<D>,
    run: RunId,
    calls: u32,
    /// Tokens per block of the server's prefix cache.
    block: usize,
    facts: Vec<(&'static str, String)>,
    findings: Vec<Finding>,
}

impl<D: Dialect> Probe<'_, D> {
    async fn sample_without_rows(&mut self) -> Result<(), Fault> {
        let prompt = self.prompt();
        self.generate(&prompt, None, 1.0).await.map(|_| ())
    }

    /// Steps 2 to 6; the first one was to ask.
    async fn sample(&mut self) -> Result<(), Fault> {
        let prompt = self.prompt();
        let length = prompt.len();
        // A whole reply: as many rows as there were inputs, every MoE layer captured.
        let first = self.generate(&prompt, Some(0), 1.0).await?;
        let Some(rows) = &first.generation.routed_experts else {
            return Ok(()); // Aborted before it ran: somebody else pauses this server.
        };
        self.judge_form(rows);

        // The same prompt: cached, and with the same rows.
        let second = self.generate(&prompt, Some(0), 1.0).await?;
        self.judge_cache(&first, &second, length);

        // The last prompt token and the first sampled one only.
        let tail = self.generate(&prompt, Some(length - 1), 1.0).await?;
        if let Some(rows) = &tail.generation.routed_experts {
            self.judge_form(rows);
        }

        // A second turn: the row of the last sampled token comes now.
        let mut longer = prompt.clone();
        longer.extend(&first.generation.output_ids);
        let have = longer.len() - 1;
        longer.extend(self.tokens(OBSERVATION, 7));
        let turn = self.generate(&longer, Some(have), 1.0).await?;
        let boundary =
            turn.generation.routed_experts.as_ref().is_some_and(|rows| rows.row(have).is_some());
        if !boundary {
            self.findings.push(Finding::refusal(
                "boundary-row",
                "the row of the token between two turns did not come",
                "use a server that honours the start of the routing rows",
            ));
        }
        let expected = have / self.block * self.block;
        let cached = turn.generation.cached_tokens;
        if turn.cached_tokens && cached < expected.min(have) {
            self.findings.push(Finding::warning(
                "prefix-cache",
                format!("of {have} tokens seen before, {cached} were cached"),
                "talk to the server directly, and give its prefix cache room",
            ));
        }
        self.judge_temperature(&prompt).await?;
        self.judge_fields(&first);
        Ok(())
    }

    /// Random tokens that no other probe uses, so that the first look is not at a cache.
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
    ) -> Result<Reading, Fault> {
        let group = GroupId::Eval { round: 0, index: 0 };
        let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
        self.calls += 1;
        let request = GenerateRequest {
            conversation: None,
            request_id: RequestId::new(self.run, attempt, self.calls, 0),
            session: format!("probe-{}", self.run.short()),
            token_ids: tokens.to_vec().into(),
            sampling: Sampling {
                temperature,
                top_p: 1.0,
                max_new_tokens: OUTPUTS,
                stop_token_ids: Vec::new(),
                seed: 1,
            },
            routed_experts_start: start,
            cache_namespace: PolicyVersion(0),
            priority: 0,
            deadline: DEADLINE,
        };
        // Every look at one replica: each has a prefix cache of its own.
        let rank = (self.client.data_parallel_ranks() > 1).then_some(0);
        self.client.sample(&request, rank).await
    }

    fn judge_form(&mut self, rows: &RoutedRows) {
        let (name, words) = match rows.form() {
            PayloadForm::Exact => return,
            PayloadForm::SurplusRow => ("surplus-row", "it sends one routing row too many"),
            PayloadForm::WholeSequence => {
                ("start-ignored", "it ignores the start of the routing rows and sends all")
            }
        };
        let remedy = "upgrade it (SGLang 0.5.12, vLLM 0.31): traffic would grow with the square \
                      of the turns";
        self.findings.push(Finding::refusal(name, words, remedy));
    }

    fn judge_cache(&mut self, first: &Reading, second: &Reading, prompt: usize) {
        if second.cached_tokens && second.generation.cached_tokens == 0 {
            self.findings.push(Finding::warning(
                "prefix-cache",
                format!("a prompt of {prompt} tokens was not cached when it came again"),
                "start it with its prefix cache, and talk to it directly",
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
            self.findings.push(Finding::refusal(
                "stale-rows",
                format!("{differing} of {prompt} rows of a prompt differ when it comes again"),
                "serve without caches beyond the GPU (HiCache, LMCache), and without a gateway \
                 that merges replies",
            ));
        }
    }

    /// Whether log-probs describe the distribution that was sampled from.
    async fn judge_temperature(&mut self, prompt: &[TokenId]) -> Result<(), Fault> {
        let cold = self.generate(prompt, None, COLD).await?;
        if let Some(logprob) = cold.generation.logprobs.first().filter(|&&lp| lp < UNLIKELY) {
            self.findings.push(Finding::warning(
                "raw-logprobs",
                format!(
                    "log-probs do not follow the temperature (at {COLD} the sampled token has \
                     {logprob})"
                ),
                "train at temperature 1 and top-p 1, or start vLLM with --logprobs-mode \
                 processed_logprobs",
            ));
        }
        Ok(())
    }

    fn judge_fields(&mut self, first: &Reading) {
        let yes = |has: bool| if has { "yes" } else { "no" }.to_owned();
        self.facts.push(("versions by token", yes(first.versions_by_token)));
        self.facts.push(("cached tokens told", yes(first.cached_tokens)));
        if let Some(rank) = first.dp_rank {
            self.facts.push(("data-parallel rank", rank.to_string()));
        }
        if !first.versions_by_token {
            self.findings.push(Finding::warning(
                "versions",
                "it does not tell the weight version of each token",
                "upgrade it (SGLang 0.5.20, vLLM 0.32): a server that restarts with older \
                 weights may go unnoticed",
            ));
        }
        if !first.cached_tokens {
            self.findings.push(Finding::warning(
                "cached-tokens",
                "it does not tell how much of a prompt was cached",
                "start vLLM with --enable-prompt-tokens-details",
            ));
        }
    }
}

/// A well-mixed number from a number.
fn mix(value: u64) -> u64 {
    let mixed = (value ^ 0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
