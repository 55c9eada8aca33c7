//! The conformance suite: what every [`Engine`] promises, checked on the fake, the embedded engine,
//! recorded traffic behind a client, and real servers.
//!
//! Use [`crate::engine_conformance!`], or [`all`] if a subject takes long to start.

use camino::Utf8PathBuf;
use orchestrate_engine::{
    Engine, EngineError, EngineErrorKind, Finish, GenerateRequest, Generation, Prompt, Sampling,
    TokenListener, TokenPrompt,
};
use orchestrate_routing::{MaskBuilder, RoutedRows};
use orchestrate_types::{
    AttemptId, EpisodeId, GroupId, ModelShape, PolicyVersion, RequestId, Retry, RunId, TokenId,
};
use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The prompt of a turn (from 0), given all tokens so far; `None` after the last turn.
pub type Prompts = dyn Fn(usize, &[TokenId]) -> Option<Vec<TokenId>> + Send + Sync;

/// Aborts a running request from outside, as an operator would. An unknown id must be ignored.
pub type Abort = dyn Fn(RequestId) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;

/// An engine under test, and what to ask of it.
pub struct Subject {
    engine: Arc<dyn Engine>,
    prompts: Box<Prompts>,
    abort: Box<Abort>,
    /// Tokens sampled per turn.
    turn_tokens: usize,
    /// A number of tokens that takes so long to sample that the request can be aborted before its
    /// end.
    long_tokens: usize,
    checkpoint: Option<Utf8PathBuf>,
    missing_checkpoint: Option<Utf8PathBuf>,
    run: RunId,
    calls: AtomicU32,
    _alive: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("engine", &self.engine).finish_non_exhaustive()
    }
}

/// A broken promise, with what was found instead.
#[derive(Debug)]
pub struct BrokenPromise(pub String);

impl fmt::Display for BrokenPromise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BrokenPromise {}

type Kept = Result<(), BrokenPromise>;

/// Returns a [`BrokenPromise`] with this message unless the condition holds.
macro_rules! promise {
    ($kept:expr, $($message:tt)+) => {
        if !$kept {
            return Err(BrokenPromise(format!($($message)+)));
        }
    };
}

/// Four turns of arbitrary tokens: first 40, then 9 more after each reply.
pub fn made_up_prompts(shape: &ModelShape) -> Box<Prompts> {
    let vocab = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    Box::new(move |turn, so_far| {
        let number = u32::try_from(turn).unwrap_or(0);
        let new = if turn == 0 { 40 } else { 9 };
        let token = |index: u32| (index * 37 + number * 101 + 5) % vocab;
        let next = (0..new).map(token);
        (turn < 4).then(|| so_far.iter().copied().chain(next).collect())
    })
}

impl Subject {
    /// A subject. It keeps `alive`, for example a server, until it is dropped.
    pub fn new(
        engine: Arc<dyn Engine>,
        prompts: Box<Prompts>,
        abort: Box<Abort>,
        alive: impl Any + Send + Sync,
    ) -> Self {
        Self {
            engine,
            prompts,
            abort,
            turn_tokens: 16,
            long_tokens: 850,
            checkpoint: None,
            missing_checkpoint: None,
            run: RunId::generate(),
            calls: AtomicU32::new(0),
            _alive: Box::new(alive),
        }
    }

    /// Enables the checks of weight syncs: from a valid checkpoint, and from one that does not exist.
    #[must_use]
    pub fn with_checkpoints(mut self, good: Utf8PathBuf, missing: Option<Utf8PathBuf>) -> Self {
        self.checkpoint = Some(good);
        self.missing_checkpoint = missing;
        self
    }

    /// A greedy request with a new id.
    fn request(&self, tokens: &[TokenId], start: Option<usize>) -> GenerateRequest {
        let group = GroupId::Eval { round: 0, index: 0 };
        let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        GenerateRequest {
            request_id: RequestId::new(self.run, attempt, call % 1000, 0),
            session: format!("conformance-{}", self.run.short()),
            prompt: Prompt::Tokens(TokenPrompt {
                ids: Arc::new(tokens.to_vec()),
                routed_experts_start: start,
                cache_namespace: PolicyVersion(0),
            }),
            sampling: Sampling {
                temperature: 0.0,
                top_p: 1.0,
                max_new_tokens: self.turn_tokens,
                stop_token_ids: Vec::new(),
                seed: 7,
            },
            priority: 0,
            deadline: Duration::from_mins(5),
            listener: None,
        }
    }

    async fn try_generate(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let reply = self.engine.generate(request).await?;
        reply.into_tokens().ok_or_else(|| EngineError {
            engine: "conformance".to_owned(),
            call: "generate",
            kind: EngineErrorKind::invalid_reply("a message in reply to tokens"),
        })
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, BrokenPromise> {
        let tokens = request.prompt.token_count();
        let got = self.try_generate(request.clone()).await;
        let got =
            got.map_err(|error| BrokenPromise(format!("a prompt of {tokens} tokens: {error}")))?;
        self.check(&request, &got)?;
        Ok(got)
    }

    /// Checks what every generation promises.
    fn check(&self, request: &GenerateRequest, got: &Generation) -> Kept {
        let Prompt::Tokens(asked) = &request.prompt else { return Ok(()) };
        let (prompt, outputs) = (asked.ids.len(), got.output_ids().len());
        let vocab = self.engine.shape().vocab;
        promise!(outputs <= request.sampling.max_new_tokens, "{outputs} tokens are too many");
        promise!(got.output_ids().iter().all(|&id| (id as usize) < vocab), "an id beyond {vocab}");
        promise!(got.logprobs().len() == outputs, "{} log-probs", got.logprobs().len());
        promise!(
            got.logprobs().iter().all(|lp| lp.is_finite() && *lp <= 0.0),
            "log-probs {:?}",
            got.logprobs()
        );
        promise!(got.cached_tokens <= prompt, "{} of {prompt} cached", got.cached_tokens);
        let mut next = 0;
        for span in got.versions() {
            promise!(span.start == next && span.end > next, "version spans {:?}", got.versions());
            next = span.end;
        }
        promise!(next == outputs, "versions of {next} of {outputs} tokens");
        promise!(!got.worker.is_empty(), "the reply does not name its worker");
        match (asked.routed_experts_start, &got.routed_experts) {
            (None, rows) => promise!(rows.is_none(), "rows that were not requested"),
            (Some(_), None) => {
                let never_ran = *got.finish() == Finish::Abort && outputs == 0;
                promise!(never_ran, "no rows for {outputs} tokens");
            }
            (Some(start), Some(rows)) => {
                let expected = prompt + outputs - 1 - start;
                let found = (rows.start(), rows.rows());
                promise!(found == (start, expected), "{found:?} rows, not {:?}", (start, expected));
            }
        }
        Ok(())
    }

    /// Generates all turns, each with all rows. Returns the last prompt and its reply.
    async fn converse(&self) -> Result<(Vec<TokenId>, Generation), BrokenPromise> {
        let mut so_far: Vec<TokenId> = Vec::new();
        let mut last = None;
        for turn in 0.. {
            let Some(prompt) = (self.prompts)(turn, &so_far) else { break };
            let got = self.generate(self.request(&prompt, Some(0))).await?;
            so_far = [prompt.as_slice(), got.output_ids()].concat();
            last = Some((prompt, got));
        }
        last.ok_or_else(|| BrokenPromise("no turns".to_owned()))
    }
}

/// The rows of all turns join without gaps, and rows requested from a later start are the tail of all
/// rows.
///
/// # Errors
/// The promise that was broken.
pub async fn turns_join_whichever_rows_are_requested(subject: &Subject) -> Kept {
    let shape = Arc::new(subject.engine.shape().clone());
    let broken = |error: orchestrate_routing::RoutingError| BrokenPromise(error.to_string());
    let mut mask = MaskBuilder::new(shape).map_err(broken)?;
    let mut so_far: Vec<TokenId> = Vec::new();
    let (mut drift, mut turns) = (0, 0);
    for turn in 0.. {
        let Some(prompt) = (subject.prompts)(turn, &so_far) else { break };
        promise!(prompt.starts_with(&so_far), "turn {turn} does not continue the one before");
        let mut whole = subject.generate(subject.request(&prompt, Some(0))).await?;
        let length = prompt.len();
        for start in [so_far.len(), length] {
            let part = subject.generate(subject.request(&prompt, Some(start))).await?;
            promise!(part.output_ids() == whole.output_ids(), "greedy tokens differ when repeated");
            // The first prompt may be shorter than a cache block.
            let cached = turn == 0 || part.cached_tokens > 0;
            promise!(cached, "a repeated prompt of {length} is not cached");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-2;
            promise!(
                part.logprobs().iter().zip(whole.logprobs()).all(close),
                "log-probs differ when repeated"
            );
            let rows = part.routed_experts.as_ref().zip(whole.routed_experts.as_ref());
            drift += rows.map_or(0, |(part, whole)| {
                let end = part.start() + part.rows();
                (part.start()..end).filter(|&at| part.row(at) != whole.row(at)).count()
            });
        }
        let without_rows = subject.generate(subject.request(&prompt, None)).await?;
        promise!(
            without_rows.output_ids() == whole.output_ids(),
            "tokens depend on whether rows are requested"
        );
        let total = length + whole.output_ids().len();
        let Some(rows) = whole.routed_experts.take() else {
            return Err(BrokenPromise("no rows for a whole turn".to_owned()));
        };
        let pushed = mask.push(rows, total, PolicyVersion(0)).map_err(broken)?;
        drift += pushed.drift_rows;
        so_far = [prompt.as_slice(), whole.output_ids()].concat();
        turns += 1;
    }
    promise!(turns > 1, "{turns} turns");
    let total = so_far.len();
    promise!(drift * 20 <= total, "{drift} rows differ over {total} tokens");
    let finished = mask.finish(total).map_err(broken)?;
    promise!(finished.rows() == total - 1, "{} rows of {total} tokens", finished.rows());
    Ok(())
}

/// A stop token ends a turn, is the turn's last token, and counts towards the routing rows like any
/// other token.
///
/// # Errors
/// The promise that was broken.
pub async fn a_stop_token_ends_a_turn_and_is_kept(subject: &Subject) -> Kept {
    let (prompt, whole) = subject.converse().await?;
    let Some(&stop) = whole.output_ids().get(5) else {
        return Err(BrokenPromise("too few tokens for a stop token".to_owned()));
    };
    let mut request = subject.request(&prompt, Some(0));
    request.sampling.stop_token_ids = vec![stop];
    let got = subject.generate(request).await?;
    let expected: Vec<TokenId> =
        whole.output_ids().iter().copied().take_while(|&id| id != stop).collect();
    promise!(*got.finish() == Finish::Stop, "it ended with {:?}", got.finish());
    promise!(got.output_ids() == [expected, vec![stop]].concat(), "tokens {:?}", got.output_ids());
    promise!(
        *whole.finish() == Finish::Length,
        "without stop tokens it ended with {:?}",
        whole.finish()
    );
    Ok(())
}

/// An abort from outside ends a generation at once, with the tokens and rows that it has.
///
/// # Errors
/// The promise that was broken.
pub async fn an_abort_returns_what_was_sampled(subject: &Subject) -> Kept {
    let (prompt, _) = subject.converse().await?;
    let mut request = subject.request(&prompt, Some(0));
    request.sampling.max_new_tokens = subject.long_tokens;
    let id = request.request_id.clone();
    let mut running = std::pin::pin!(subject.try_generate(request.clone()));
    // Aborting an id that the server does not know yet has no effect, so it is repeated.
    let got = loop {
        let wait = tokio::time::timeout(Duration::from_millis(20), &mut running);
        if let Ok(got) = wait.await {
            break got;
        }
        (subject.abort)(id.clone()).await;
    };
    let got = got.map_err(|error| BrokenPromise(format!("aborted: {error}")))?;
    subject.check(&request, &got)?;
    promise!(*got.finish() == Finish::Abort, "it ended with {:?}", got.finish());
    promise!(got.output_ids().len() < subject.long_tokens, "it ran to its end");
    // The id is unknown by now, which must be ignored.
    (subject.abort)(id).await;
    Ok(())
}

/// An engine still answers others after a caller disconnects, or after a deadline has passed.
///
/// # Errors
/// The promise that was broken.
pub async fn callers_that_disconnect_do_no_harm(subject: &Subject) -> Kept {
    let (prompt, whole) = subject.converse().await?;
    let mut long = subject.request(&prompt, Some(0));
    long.sampling.max_new_tokens = subject.long_tokens;
    // Where both are ready, the time decides: the machine may be slow.
    let disconnected = tokio::select! {
        biased;
        () = tokio::time::sleep(Duration::from_millis(1)) => true,
        _ = subject.try_generate(long) => false,
    };
    promise!(disconnected, "a long generation took no time");
    let mut late = subject.request(&prompt, Some(0));
    late.sampling.max_new_tokens = subject.long_tokens;
    late.deadline = Duration::from_millis(1);
    // A caller that gets no processor time finds the reply when it looks at the clock, but not always.
    let mut ends = Vec::new();
    while ends.len() < 20 && !ends.last().is_some_and(Result::is_err) {
        ends.push(subject.try_generate(late.clone()).await);
    }
    match ends.pop() {
        Some(Err(error)) => {
            promise!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "late: {error}");
            promise!(error.retry() != Retry::Never, "a timeout can be retried");
        }
        _ => return Err(BrokenPromise("it answered after the deadline".to_owned())),
    }
    let again = subject.generate(subject.request(&prompt, Some(0))).await?;
    promise!(again.output_ids() == whole.output_ids(), "the reply differs from the one before");
    Ok(())
}

/// A request gets the same reply alone and next to concurrent requests.
///
/// # Errors
/// The promise that was broken.
pub async fn concurrent_requests_do_not_mix(subject: &Subject) -> Kept {
    let (prompt, _) = subject.converse().await?;
    let alone = subject.generate(subject.request(&prompt, Some(0))).await?;
    let first = (subject.prompts)(0, &[]).unwrap_or_default();
    let other = subject.generate(subject.request(&first, Some(0))).await?;
    let generate = |tokens: &[TokenId]| subject.generate(subject.request(tokens, Some(0)));
    let together =
        tokio::join!(generate(&prompt), generate(&first), generate(&prompt), generate(&first));
    for (got, expected) in
        [(together.0?, &alone), (together.1?, &other), (together.2?, &alone), (together.3?, &other)]
    {
        promise!(
            got.output_ids() == expected.output_ids(),
            "replies differ between concurrent requests"
        );
    }
    Ok(())
}

/// Tokens reported by one call.
#[derive(Debug, Default)]
struct HeardTokens {
    calls: AtomicU32,
    ids: Mutex<Vec<TokenId>>,
}

impl HeardTokens {
    fn ids(&self) -> MutexGuard<'_, Vec<TokenId>> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TokenListener for HeardTokens {
    fn begin(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.ids().clear();
    }

    fn sampled(&self, ids: &[TokenId]) {
        self.ids().extend_from_slice(ids);
    }
}

/// A listener does not change the reply, and hears its tokens in order. An engine that cannot stream
/// tells it nothing.
///
/// # Errors
/// The promise that was broken.
pub async fn a_listener_hears_the_tokens_of_the_reply(subject: &Subject) -> Kept {
    let (prompt, whole) = subject.converse().await?;
    let heard = Arc::new(HeardTokens::default());
    let mut request = subject.request(&prompt, Some(0));
    request.listener = Some(Arc::clone(&heard) as _);
    let got = subject.generate(request).await?;
    promise!(got.output_ids() == whole.output_ids(), "tokens depend on whether they are streamed");
    let rows = [&got, &whole].map(|got| got.routed_experts.as_ref().map(RoutedRows::rows));
    let [streamed, not_streamed] = rows;
    promise!(streamed == not_streamed, "{streamed:?} rows, but {not_streamed:?} if not streamed");
    let ids = heard.ids().clone();
    promise!(
        ids.is_empty() || ids == got.output_ids(),
        "the listener heard {ids:?} of {:?}",
        got.output_ids()
    );
    promise!(ids.is_empty() || heard.calls.load(Ordering::Relaxed) > 0, "no call began");
    Ok(())
}

/// Requests that would harm an engine are refused permanently, and the next request is answered.
///
/// # Errors
/// The promise that was broken.
pub async fn prompts_that_cannot_be_served_are_refused_permanently(subject: &Subject) -> Kept {
    let shape = subject.engine.shape();
    let beyond = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    for tokens in [vec![], vec![beyond], vec![u32::MAX], vec![1; shape.context]] {
        let length = tokens.len();
        match subject.try_generate(subject.request(&tokens, None)).await {
            Ok(_) => return Err(BrokenPromise(format!("it accepted a prompt of {length} tokens"))),
            Err(error) => promise!(error.retry() == Retry::Never, "{length} tokens: {error}"),
        }
    }
    let Some(prompt) = (subject.prompts)(0, &[]) else { return Ok(()) };
    let beyond = subject.request(&prompt, Some(prompt.len() + 1));
    match subject.try_generate(beyond).await {
        Ok(_) => return Err(BrokenPromise("it returned rows from beyond the prompt".to_owned())),
        Err(error) => promise!(error.retry() == Retry::Never, "start beyond the prompt: {error}"),
    }
    subject.generate(subject.request(&prompt, Some(0))).await.map(|_| ())
}

/// After a weight sync every token has its version, and the cache of the old weights is not used.
///
/// # Errors
/// The promise that was broken.
pub async fn a_sync_versions_every_token_and_clears_the_cache(subject: &Subject) -> Kept {
    let Some(checkpoint) = &subject.checkpoint else { return Ok(()) };
    let (prompt, _) = subject.converse().await?;
    for version in [PolicyVersion(7), PolicyVersion(8)] {
        let synced = subject.engine.sync_weights(checkpoint, version).await;
        synced.map_err(|error| BrokenPromise(format!("sync: {error}")))?;
        let got = subject.generate(subject.request(&prompt, Some(0))).await?;
        promise!(got.versions().iter().all(|span| span.version == version), "{:?}", got.versions());
        promise!(
            got.cached_tokens == 0,
            "{} tokens were cached under the old weights",
            got.cached_tokens
        );
        let info = subject.engine.info().await;
        let info = info.map_err(|error| BrokenPromise(format!("info: {error}")))?;
        promise!(info.policy_version == Some(version), "info says {:?}", info.policy_version);
    }
    Ok(())
}

/// After a failed weight sync nothing is sampled until one succeeds.
///
/// # Errors
/// The promise that was broken.
pub async fn after_a_failed_sync_nothing_is_sampled(subject: &Subject) -> Kept {
    let (Some(good), Some(missing)) = (&subject.checkpoint, &subject.missing_checkpoint) else {
        return Ok(());
    };
    let Some(prompt) = (subject.prompts)(0, &[]) else { return Ok(()) };
    let failed = subject.engine.sync_weights(missing, PolicyVersion(9)).await;
    promise!(failed.is_err(), "it synced from {missing}, which does not exist");
    let refused = subject.try_generate(subject.request(&prompt, Some(0))).await;
    promise!(refused.is_err(), "it samples from unknown weights");
    let synced = subject.engine.sync_weights(good, PolicyVersion(10)).await;
    synced.map_err(|error| BrokenPromise(format!("sync: {error}")))?;
    subject.generate(subject.request(&prompt, Some(0))).await.map(|_| ())
}

/// Checks all promises on one subject, one after the other.
///
/// # Errors
/// The first promise that was broken, with its name.
pub async fn all(subject: &Subject) -> Kept {
    let named = |name: &'static str| {
        move |broken: BrokenPromise| BrokenPromise(format!("{name}: {broken}"))
    };
    turns_join_whichever_rows_are_requested(subject).await.map_err(named("turns"))?;
    a_stop_token_ends_a_turn_and_is_kept(subject).await.map_err(named("stop token"))?;
    an_abort_returns_what_was_sampled(subject).await.map_err(named("abort"))?;
    callers_that_disconnect_do_no_harm(subject).await.map_err(named("disconnect"))?;
    concurrent_requests_do_not_mix(subject).await.map_err(named("concurrency"))?;
    a_listener_hears_the_tokens_of_the_reply(subject).await.map_err(named("listener"))?;
    prompts_that_cannot_be_served_are_refused_permanently(subject)
        .await
        .map_err(named("refusal"))?;
    a_sync_versions_every_token_and_clears_the_cache(subject)
        .await
        .map_err(named("weight sync"))?;
    after_a_failed_sync_nothing_is_sampled(subject).await.map_err(named("failed weight sync"))
}

/// Creates one test per promise of [`crate::conformance`], in a module of the given name. `$make` is
/// an `async fn() -> Option<Subject>`, which prints the reason before it returns `None` to skip.
#[macro_export]
macro_rules! engine_conformance {
    ($name:ident, $make:path) => {
        mod $name {
            $crate::engine_conformance!(@each $make,
                turns_join_whichever_rows_are_requested
                a_stop_token_ends_a_turn_and_is_kept
                an_abort_returns_what_was_sampled
                callers_that_disconnect_do_no_harm
                concurrent_requests_do_not_mix
                a_listener_hears_the_tokens_of_the_reply
                prompts_that_cannot_be_served_are_refused_permanently
                a_sync_versions_every_token_and_clears_the_cache
                after_a_failed_sync_nothing_is_sampled
            );
        }
    };
    (@each $make:path, $($promise:ident)+) => {
        $(
            #[tokio::test]
            async fn $promise() {
                let Some(subject) = $make().await else { return };
                $crate::conformance::$promise(&subject).await.unwrap();
            }
        )+
    };
}
