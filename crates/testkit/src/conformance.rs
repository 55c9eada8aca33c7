//! What every [`Engine`] promises, checked on whatever implements it: the fake, the embedded
//! engine, recorded traffic behind a client, a real server.
//!
//! Start with [`crate::engine_conformance!`], or [`all`] where starting a subject is dear.

use camino::Utf8PathBuf;
use orchestrate_engine::{Engine, EngineErrorKind, Finish, GenerateRequest, Generation, Sampling};
use orchestrate_routing::MaskBuilder;
use orchestrate_types::{
    AttemptId, EpisodeId, GroupId, ModelShape, PolicyVersion, RequestId, Retry, RunId, TokenId,
};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The prompt of a turn (from 0), given all tokens so far; `None` after the last one.
pub type Prompts = dyn Fn(usize, &[TokenId]) -> Option<Vec<TokenId>> + Send + Sync;

/// An engine under test, and what to ask of it.
pub struct Subject {
    engine: Arc<dyn Engine>,
    prompts: Box<Prompts>,
    /// Tokens per turn.
    turn_tokens: usize,
    /// A budget that takes long enough to be cut short.
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

/// A promise that was not kept.
#[derive(Debug)]
pub struct BrokenPromise(pub String);

impl fmt::Display for BrokenPromise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BrokenPromise {}

type Kept = Result<(), BrokenPromise>;

/// Breaks the promise unless the condition holds.
macro_rules! promise {
    ($kept:expr, $($words:tt)+) => {
        if !$kept {
            return Err(BrokenPromise(format!($($words)+)));
        }
    };
}

/// Prompts of made-up tokens: 40 at first, then 9 after each answer, four turns in all.
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
    /// A subject that keeps `alive`, a server perhaps, for as long as it lives.
    pub fn new(
        engine: Arc<dyn Engine>,
        prompts: Box<Prompts>,
        alive: impl Any + Send + Sync,
    ) -> Self {
        Self {
            engine,
            prompts,
            turn_tokens: 16,
            long_tokens: 850,
            checkpoint: None,
            missing_checkpoint: None,
            run: RunId::generate(),
            calls: AtomicU32::new(0),
            _alive: Box::new(alive),
        }
    }

    /// Lets weights be synced: from a folder that can be read, and from one that cannot.
    #[must_use]
    pub fn with_checkpoints(mut self, good: Utf8PathBuf, missing: Option<Utf8PathBuf>) -> Self {
        self.checkpoint = Some(good);
        self.missing_checkpoint = missing;
        self
    }

    /// A greedy request with an id of its own.
    fn request(&self, tokens: &[TokenId], start: Option<usize>) -> GenerateRequest {
        let group = GroupId::Eval { round: 0, index: 0 };
        let attempt = AttemptId { episode: EpisodeId { group, member: 0 }, attempt: 1 };
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        GenerateRequest {
            request_id: RequestId::new(self.run, attempt, call % 1000, 0),
            session: format!("conformance-{}", self.run.short()),
            token_ids: tokens.to_vec().into(),
            conversation: None,
            sampling: Sampling {
                temperature: 0.0,
                top_p: 1.0,
                max_new_tokens: self.turn_tokens,
                stop_token_ids: Vec::new(),
                seed: 7,
            },
            routed_experts_start: start,
            cache_namespace: PolicyVersion(0),
            priority: 0,
            deadline: Duration::from_mins(5),
        }
    }

    async fn generate(&self, request: GenerateRequest) -> Result<Generation, BrokenPromise> {
        let what = format!(
            "{} tokens, rows from {:?}",
            request.token_ids.len(),
            request.routed_experts_start
        );
        let got = self.engine.generate(request.clone()).await;
        let got = got.map_err(|error| BrokenPromise(format!("{what}: {error}")))?;
        self.check(&request, &got)?;
        Ok(got)
    }

    /// What holds of every generation.
    fn check(&self, request: &GenerateRequest, got: &Generation) -> Kept {
        let (prompt, outputs) = (request.token_ids.len(), got.output_ids.len());
        let vocab = self.engine.shape().vocab;
        promise!(outputs <= request.sampling.max_new_tokens, "{outputs} tokens are too many");
        promise!(got.output_ids.iter().all(|&id| (id as usize) < vocab), "an id beyond {vocab}");
        promise!(got.logprobs.len() == outputs, "{} log-probs", got.logprobs.len());
        promise!(
            got.logprobs.iter().all(|lp| lp.is_finite() && *lp <= 0.0),
            "log-probs {:?}",
            got.logprobs
        );
        promise!(got.cached_tokens <= prompt, "{} of {prompt} cached", got.cached_tokens);
        let mut next = 0;
        for span in &got.versions {
            promise!(span.start == next && span.end > next, "version spans {:?}", got.versions);
            next = span.end;
        }
        promise!(next == outputs, "versions of {next} of {outputs} tokens");
        promise!(!got.worker.is_empty(), "it does not say who answered");
        match (request.routed_experts_start, &got.routed_experts) {
            (None, rows) => promise!(rows.is_none(), "rows that nobody asked for"),
            (Some(_), None) => {
                promise!(got.finish == Finish::Abort && outputs == 0, "no rows of {outputs}");
            }
            (Some(start), Some(rows)) => {
                let expected = prompt + outputs - 1 - start;
                let found = (rows.start(), rows.rows());
                promise!(found == (start, expected), "{found:?} rows, not {:?}", (start, expected));
            }
        }
        Ok(())
    }

    /// All turns, each with whole rows; gives the last prompt and its answer.
    async fn converse(&self) -> Result<(Vec<TokenId>, Generation), BrokenPromise> {
        let mut so_far: Vec<TokenId> = Vec::new();
        let mut last = None;
        for turn in 0.. {
            let Some(prompt) = (self.prompts)(turn, &so_far) else { break };
            let got = self.generate(self.request(&prompt, Some(0))).await?;
            so_far = [prompt.as_slice(), &got.output_ids].concat();
            last = Some((prompt, got));
        }
        last.ok_or_else(|| BrokenPromise("no turns".to_owned()))
    }
}

/// Tokens in, tokens out; rows from any start are the tail of all rows; turns join without gap.
///
/// # Errors
/// The promise that was broken.
pub async fn turns_join_however_their_rows_are_asked_for(subject: &Subject) -> Kept {
    let shape = Arc::new(subject.engine.shape().clone());
    let broken = |error: orchestrate_routing::RoutingError| BrokenPromise(error.to_string());
    let mut mask = MaskBuilder::new(shape).map_err(broken)?;
    let mut so_far: Vec<TokenId> = Vec::new();
    let (mut drift, mut turns) = (0, 0);
    for turn in 0.. {
        let Some(prompt) = (subject.prompts)(turn, &so_far) else { break };
        promise!(prompt.starts_with(&so_far), "turn {turn} does not go on from the one before");
        let whole = subject.generate(subject.request(&prompt, Some(0))).await?;
        let length = prompt.len();
        for start in [so_far.len(), length] {
            let part = subject.generate(subject.request(&prompt, Some(start))).await?;
            promise!(part.output_ids == whole.output_ids, "greedy tokens differ when repeated");
            // The first prompt may be shorter than a block of the cache.
            let cached = turn == 0 || part.cached_tokens > 0;
            promise!(cached, "a repeated prompt of {length} is not cached");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-2;
            promise!(
                part.logprobs.iter().zip(&whole.logprobs).all(close),
                "log-probs differ when repeated"
            );
            let rows = part.routed_experts.as_ref().zip(whole.routed_experts.as_ref());
            drift += rows.map_or(0, |(part, whole)| {
                let end = part.start() + part.rows();
                (part.start()..end).filter(|&at| part.row(at) != whole.row(at)).count()
            });
        }
        let blind = subject.generate(subject.request(&prompt, None)).await?;
        promise!(blind.output_ids == whole.output_ids, "tokens depend on asking for rows");
        let total = length + whole.output_ids.len();
        let Some(rows) = whole.routed_experts else {
            return Err(BrokenPromise("no rows of a whole turn".to_owned()));
        };
        let pushed = mask.push(rows, total, PolicyVersion(0)).map_err(broken)?;
        drift += pushed.drift_rows;
        so_far = [prompt.as_slice(), &whole.output_ids].concat();
        turns += 1;
    }
    promise!(turns > 1, "{turns} turns");
    let total = so_far.len();
    promise!(drift * 20 <= total, "{drift} rows differ over {total} tokens");
    let finished = mask.finish(total).map_err(broken)?;
    promise!(finished.rows() == total - 1, "{} rows of {total} tokens", finished.rows());
    Ok(())
}

/// A stop token ends a turn, is its last token, and is paid for in rows like any other.
///
/// # Errors
/// The promise that was broken.
pub async fn a_stop_token_ends_a_turn_and_is_kept(subject: &Subject) -> Kept {
    let (prompt, whole) = subject.converse().await?;
    let Some(&stop) = whole.output_ids.get(5) else {
        return Err(BrokenPromise("too few tokens to stop at".to_owned()));
    };
    let mut request = subject.request(&prompt, Some(0));
    request.sampling.stop_token_ids = vec![stop];
    let got = subject.generate(request).await?;
    let expected: Vec<TokenId> =
        whole.output_ids.iter().copied().take_while(|&id| id != stop).collect();
    promise!(got.finish == Finish::Stop, "it ended by {:?}", got.finish);
    promise!(got.output_ids == [expected, vec![stop]].concat(), "tokens {:?}", got.output_ids);
    promise!(whole.finish == Finish::Length, "without stop tokens it ended by {:?}", whole.finish);
    Ok(())
}

/// An abort ends a generation at once, with the tokens and rows it has.
///
/// # Errors
/// The promise that was broken.
pub async fn an_abort_gives_what_there_is(subject: &Subject) -> Kept {
    let (prompt, _) = subject.converse().await?;
    let mut request = subject.request(&prompt, Some(0));
    request.sampling.max_new_tokens = subject.long_tokens;
    let id = request.request_id.clone();
    let mut running = std::pin::pin!(subject.engine.generate(request.clone()));
    // An id that is not known yet is not aborted, so it is said until it was heard.
    let got = loop {
        let wait = tokio::time::timeout(Duration::from_millis(20), &mut running);
        if let Ok(got) = wait.await {
            break got;
        }
        let told = subject.engine.abort(&id).await;
        told.map_err(|error| BrokenPromise(format!("abort: {error}")))?;
    };
    let got = got.map_err(|error| BrokenPromise(format!("aborted: {error}")))?;
    subject.check(&request, &got)?;
    promise!(got.finish == Finish::Abort, "it ended by {:?}", got.finish);
    promise!(got.output_ids.len() < subject.long_tokens, "it ran to its end");
    // An abort of what is not there is no error.
    let told = subject.engine.abort(&id).await;
    told.map_err(|error| BrokenPromise(format!("abort of an unknown id: {error}")))
}

/// A caller that goes away, or whose deadline passes, leaves an engine that answers others.
///
/// # Errors
/// The promise that was broken.
pub async fn callers_that_leave_do_no_harm(subject: &Subject) -> Kept {
    let (prompt, whole) = subject.converse().await?;
    let mut long = subject.request(&prompt, Some(0));
    long.sampling.max_new_tokens = subject.long_tokens;
    let left = tokio::time::timeout(Duration::from_millis(1), subject.engine.generate(long));
    promise!(left.await.is_err(), "a long generation took no time");
    let mut late = subject.request(&prompt, Some(0));
    late.sampling.max_new_tokens = subject.long_tokens;
    late.deadline = Duration::from_millis(1);
    match subject.engine.generate(late).await {
        Ok(_) => return Err(BrokenPromise("it answered after the deadline".to_owned())),
        Err(error) => {
            promise!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "late: {error}");
            promise!(error.retry() != Retry::Never, "a late answer may be tried again");
        }
    }
    let again = subject.generate(subject.request(&prompt, Some(0))).await?;
    promise!(again.output_ids == whole.output_ids, "another answer than before");
    Ok(())
}

/// Requests under way together get the answers they get alone.
///
/// # Errors
/// The promise that was broken.
pub async fn requests_under_way_together_do_not_mix(subject: &Subject) -> Kept {
    let (prompt, _) = subject.converse().await?;
    let alone = subject.generate(subject.request(&prompt, Some(0))).await?;
    let first = (subject.prompts)(0, &[]).unwrap_or_default();
    let other = subject.generate(subject.request(&first, Some(0))).await?;
    let ask = |tokens: &[TokenId]| subject.generate(subject.request(tokens, Some(0)));
    let together = tokio::join!(ask(&prompt), ask(&first), ask(&prompt), ask(&first));
    for (got, expected) in
        [(together.0?, &alone), (together.1?, &other), (together.2?, &alone), (together.3?, &other)]
    {
        promise!(got.output_ids == expected.output_ids, "answers differ beside others");
    }
    Ok(())
}

/// What would hurt an engine is refused for good, and the next request is answered.
///
/// # Errors
/// The promise that was broken.
pub async fn prompts_that_cannot_be_served_are_refused_for_good(subject: &Subject) -> Kept {
    let shape = subject.engine.shape();
    let beyond = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    for tokens in [vec![], vec![beyond], vec![u32::MAX], vec![1; shape.context]] {
        let length = tokens.len();
        match subject.engine.generate(subject.request(&tokens, None)).await {
            Ok(_) => return Err(BrokenPromise(format!("it took a prompt of {length}"))),
            Err(error) => promise!(error.retry() == Retry::Never, "{length} tokens: {error}"),
        }
    }
    let Some(prompt) = (subject.prompts)(0, &[]) else { return Ok(()) };
    let beyond = subject.request(&prompt, Some(prompt.len() + 1));
    match subject.engine.generate(beyond).await {
        Ok(_) => return Err(BrokenPromise("rows from beyond the prompt".to_owned())),
        Err(error) => promise!(error.retry() == Retry::Never, "start beyond the prompt: {error}"),
    }
    subject.generate(subject.request(&prompt, Some(0))).await.map(|_| ())
}

/// After a sync every token has its version, and nothing of the old weights' cache is used.
///
/// # Errors
/// The promise that was broken.
pub async fn a_sync_names_every_token_and_empties_the_cache(subject: &Subject) -> Kept {
    let Some(checkpoint) = &subject.checkpoint else { return Ok(()) };
    let (prompt, _) = subject.converse().await?;
    for version in [PolicyVersion(7), PolicyVersion(8)] {
        let synced = subject.engine.sync_weights(checkpoint, version).await;
        synced.map_err(|error| BrokenPromise(format!("sync: {error}")))?;
        let got = subject.generate(subject.request(&prompt, Some(0))).await?;
        promise!(got.versions.iter().all(|span| span.version == version), "{:?}", got.versions);
        promise!(got.cached_tokens == 0, "{} tokens of the old weights", got.cached_tokens);
        let info = subject.engine.info().await;
        let info = info.map_err(|error| BrokenPromise(format!("info: {error}")))?;
        promise!(info.policy_version == Some(version), "info says {:?}", info.policy_version);
    }
    Ok(())
}

/// After a sync that failed nothing is sampled, until one succeeds.
///
/// # Errors
/// The promise that was broken.
pub async fn after_a_failed_sync_nothing_is_sampled(subject: &Subject) -> Kept {
    let (Some(good), Some(missing)) = (&subject.checkpoint, &subject.missing_checkpoint) else {
        return Ok(());
    };
    let Some(prompt) = (subject.prompts)(0, &[]) else { return Ok(()) };
    let failed = subject.engine.sync_weights(missing, PolicyVersion(9)).await;
    promise!(failed.is_err(), "it synced from {missing}, which is not there");
    let refused = subject.engine.generate(subject.request(&prompt, Some(0))).await;
    promise!(refused.is_err(), "it samples from weights nobody knows");
    let synced = subject.engine.sync_weights(good, PolicyVersion(10)).await;
    synced.map_err(|error| BrokenPromise(format!("sync: {error}")))?;
    subject.generate(subject.request(&prompt, Some(0))).await.map(|_| ())
}

/// All promises, one after the other, on one subject.
///
/// # Errors
/// The first promise that was broken, with its name.
pub async fn all(subject: &Subject) -> Kept {
    let named = |name: &'static str| {
        move |broken: BrokenPromise| BrokenPromise(format!("{name}: {broken}"))
    };
    turns_join_however_their_rows_are_asked_for(subject).await.map_err(named("turns"))?;
    a_stop_token_ends_a_turn_and_is_kept(subject).await.map_err(named("stop"))?;
    an_abort_gives_what_there_is(subject).await.map_err(named("abort"))?;
    callers_that_leave_do_no_harm(subject).await.map_err(named("leave"))?;
    requests_under_way_together_do_not_mix(subject).await.map_err(named("together"))?;
    prompts_that_cannot_be_served_are_refused_for_good(subject).await.map_err(named("refuse"))?;
    a_sync_names_every_token_and_empties_the_cache(subject).await.map_err(named("sync"))?;
    after_a_failed_sync_nothing_is_sampled(subject).await.map_err(named("failed sync"))
}

/// Makes one test per promise of [`crate::conformance`], in a module of the given name. `$make` is an
/// `async fn() -> Option<Subject>`; `None` skips, and has said why.
#[macro_export]
macro_rules! engine_conformance {
    ($name:ident, $make:path) => {
        mod $name {
            $crate::engine_conformance!(@each $make,
                turns_join_however_their_rows_are_asked_for
                a_stop_token_ends_a_turn_and_is_kept
                an_abort_gives_what_there_is
                callers_that_leave_do_no_harm
                requests_under_way_together_do_not_mix
                prompts_that_cannot_be_served_are_refused_for_good
                a_sync_names_every_token_and_empties_the_cache
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
