//! Conversations whose process is killed at every record, and in the middle of it.

use super::pending::SampledReply;
use super::tests::{chat, context_of, deliver, repeated, request, sent};
use super::*;
use crate::api::{Action, RowCounts};
use crate::rows::RowSharing;
use crate::turn_journal::{ResumedJournal, TakenRecord, TurnJournals};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_engine::{Engine as _, EngineErrorKind, Finish};
use orchestrate_gateway::{ErrorCode, LeaseRecord};
use orchestrate_routing::{CacheOptions, PrefixCache, RoutingMask};
use orchestrate_testkit::{FakeEngine, FakeReply, FakeRequest, toy_shape};
use orchestrate_types::{AttemptId, ModelShape, PolicyVersion, TokenId};
use serde_json::json;

/// Longest prompt that the engine takes, in tokens.
const ENGINE_CONTEXT: usize = 1500;

fn attempt() -> AttemptId {
    "t000001.02-a01".parse().unwrap()
}

fn lease() -> LeaseRecord {
    let lease = json!({"lease": vec![1; 32], "key": vec![2; 32], "worker": "w"});
    serde_json::from_value(lease).unwrap()
}

/// Replies that depend on the seed alone. Some arrive in two parts, because the first is aborted.
fn reply(request: &FakeRequest) -> FakeReply {
    if request.token_ids.len() > ENGINE_CONTEXT {
        return FakeReply::Fail(EngineErrorKind::ContextFull("too long".to_owned()));
    }
    let seed = request.sampling.seed;
    let command = json!({"command": format!("ls {seed}")});
    let call = Action { name: "bash".to_owned(), arguments: command };
    let calls: &[Action] = if seed.is_multiple_of(3) { &[] } else { &[call] };
    let mut ids = chat().assistant(&format!("say {seed}"), calls).unwrap();
    if seed.is_multiple_of(2) {
        ids.truncate(ids.len() / 2);
        return FakeReply::Tokens { ids, finish: Finish::Abort };
    }
    FakeReply::Tokens { ids, finish: Finish::Stop }
}

/// One process of the run: its engine and its cache of routing rows, which die with it.
struct Process {
    engine: Arc<FakeEngine>,
    context: EpisodeContext,
    limits: EpisodeLimits,
    folder: tempfile::TempDir,
}

impl Process {
    fn new() -> Self {
        let shape = ModelShape { context: 1 << 16, ..toy_shape(chat().vocab_size()) };
        let engine = Arc::new(FakeEngine::new(shape, |request, _| reply(request)));
        let (mut context, limits) = context_of(chat(), &engine, 20);
        let cache = PrefixCache::open(CacheOptions { bytes: 1 << 20, spill: None }).unwrap();
        context.sharing = RowSharing { cache: Some(Arc::new(cache)), ..RowSharing::default() };
        Self { engine, context, limits, folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> Utf8PathBuf {
        let folder = Utf8Path::from_path(self.folder.path()).unwrap();
        folder.join(format!("{}.turns", attempt()))
    }

    fn journals(&self) -> TurnJournals {
        let folder = Utf8Path::from_path(self.folder.path()).unwrap();
        TurnJournals::open(folder, &[attempt()]).unwrap()
    }

    fn begin(&self) -> Arc<Conversation> {
        let conversation = Conversation::new(self.context.clone(), self.limits);
        let taken = TakenRecord::new(attempt(), lease(), PolicyVersion(0), [0; 32]);
        conversation.record_in(self.journals().create(taken).unwrap());
        Arc::new(conversation)
    }

    /// Continues the conversation of another process, which left `file`; `None` if its worker cannot have
    /// got the episode.
    async fn resume(&self, file: &[u8]) -> Option<Arc<Conversation>> {
        std::fs::write(self.path(), file).unwrap();
        let journals = self.journals();
        let Some((_, found)) = journals.unfinished().pop() else {
            assert!(!self.path().exists());
            return None;
        };
        assert_eq!(found, lease());
        let resumed = journals.resume(attempt(), self.engine.shape()).unwrap();
        let ResumedJournal { journal, records, restarts, .. } = resumed;
        let context = EpisodeContext { restarts, ..self.context.clone() };
        let conversation = Arc::new(Conversation::new(context, self.limits));
        conversation.replay(records).await.unwrap();
        assert_eq!(self.engine.requests().len(), 0, "the engine was asked again");
        conversation.record_in(journal);
        Some(conversation)
    }
}

/// An agent that keeps its state while the run is killed.
struct Agent {
    conversation: Arc<Conversation>,
    engine: Arc<FakeEngine>,
    /// Replies that it has got.
    had: Vec<Arc<SampledReply>>,
    /// Number of requests that it had sent before the kill. What it did before them is over.
    sent: usize,
    /// Number of its requests so far.
    asked: usize,
    /// Number of replies after which it stops.
    until: usize,
}

impl Agent {
    fn of(process: &Process, conversation: Arc<Conversation>, had: &[Arc<SampledReply>]) -> Self {
        let engine = Arc::clone(&process.engine);
        let (had, sent) = (had.to_vec(), had.len());
        Self { conversation, engine, had, sent, asked: 0, until: usize::MAX }
    }

    /// Whether what it does now was not done before the kill.
    fn is_live(&self) -> bool {
        self.asked >= self.sent
    }

    async fn request(&mut self, request: &Arc<ReplyRequest>) -> Option<Arc<SampledReply>> {
        if self.asked >= self.until {
            return None;
        }
        if self.asked == self.had.len() {
            let reply = deliver(self.conversation.sample(request).await.unwrap());
            self.had.push(reply);
        }
        self.asked += 1;
        Some(Arc::clone(&self.had[self.asked - 1]))
    }

    fn note(&self, code: ErrorCode) {
        if self.is_live() {
            let message = "no".to_owned();
            self.conversation.note(Some(Unanswered { code, message }));
        }
    }

    /// All that an agent may do, to its end or until it stops.
    async fn talk(&mut self) -> Option<()> {
        // Long enough for whole blocks of routing rows.
        let mut history = vec![sent("user", &"mend the total of total.py. ".repeat(12))];
        let first = self.request(&request(&history)).await?;
        history.extend([repeated(&first), sent("tool", "def total(items):")]);
        // Refused, then better.
        self.note(ErrorCode::InvalidRequest);
        let tools = Arc::new(vec![json!({"type": "function", "function": {"name": "bash"}})]);
        let with = |history: &[Arc<HistoryMessage>], sample, tools: &Arc<Vec<_>>| {
            let prompt = RequestPrompt::Messages {
                messages: history.to_vec(),
                tools: Arc::clone(tools),
                thinking: None,
            };
            Arc::new(ReplyRequest { prompt, sample, ..ReplyRequest::clone(&request(history)) })
        };
        self.request(&with(&history, 0, &Arc::default())).await?;
        // Another sample of the same request, which it continues.
        let second = self.request(&with(&history, 1, &Arc::default())).await?;
        history.extend([repeated(&second), sent("tool", "    return sum(items)")]);
        // Weights were updated before this request was sent.
        self.engine.set_version(PolicyVersion(1));
        let third = self.request(&request(&history)).await?;
        // Another system prompt, with tools.
        let aside = [sent("system", "be brief"), sent("user", "name it")];
        self.request(&with(&aside, 0, &tools)).await?;
        history.extend([repeated(&third), sent("tool", "ok")]);
        if self.is_live() {
            let long = [history.clone(), vec![sent("user", &"word ".repeat(3000))]].concat();
            let error = self.conversation.sample(&request(&long)).await.unwrap_err();
            assert!(matches!(error, ReplyError::TooLong { .. }), "{error}");
            self.note(ErrorCode::ContextFull);
        }
        self.request(&request(&history)).await?;
        // In tokens, with a stop string in between.
        let tokens = |ids: Vec<TokenId>| {
            Arc::new(ReplyRequest {
                prompt: RequestPrompt::Tokens(ids.into()),
                ..ReplyRequest::clone(&request(&[]))
            })
        };
        let prompt = chat().encode("name it again").unwrap();
        let fourth = self.request(&tokens(prompt.clone())).await?;
        let prompt = [prompt, fourth.token_ids.clone(), chat().encode("go on").unwrap()].concat();
        self.request(&tokens(prompt)).await?;
        let stops: Arc<[String]> = ["ay".to_owned()].into();
        self.request(&Arc::new(ReplyRequest { stops, ..ReplyRequest::clone(&request(&aside)) }))
            .await?;
        self.note(ErrorCode::ContextFull);
        Some(())
    }
}

/// All of a finished conversation that is sealed, except what depends on the engine's KV cache and on the
/// cache of rows.
#[derive(Debug, PartialEq)]
struct Sealed {
    branches: Vec<SealedBranch>,
    turns: Vec<TurnLog>,
    forks: BTreeMap<ForkCause, u64>,
    rows: RowCounts,
    prompt: u64,
    limit: Option<Limit>,
    problem: Option<String>,
    failure: Option<String>,
    refusal: Option<String>,
}

#[derive(Debug, PartialEq)]
struct SealedBranch {
    tokens: Vec<TokenId>,
    mask: Vec<u8>,
    logprobs: Vec<f32>,
    versions: Vec<i64>,
    turns: Vec<(usize, usize, PolicyVersion, String)>,
    routing: Option<RoutingMask>,
}

fn sealed(conversation: &Conversation) -> Sealed {
    let finished = conversation.finish();
    let branches = finished.branches.iter().map(|branch| {
        let trajectory = &branch.trajectory;
        let turns = trajectory.turns().iter();
        SealedBranch {
            tokens: trajectory.token_ids().to_vec(),
            mask: trajectory.loss_mask().to_vec(),
            logprobs: trajectory.rollout_logprobs().to_vec(),
            versions: trajectory.policy_versions().to_vec(),
            turns: turns
                .map(|t| (t.prompt_end, t.output_end, t.policy_version, t.finish.clone()))
                .collect(),
            routing: branch.routing.clone(),
        }
    });
    let turns = finished.turns.iter().map(|turn| TurnLog { generate_ms: 0, ..turn.clone() });
    Sealed {
        branches: branches.collect(),
        turns: turns.collect(),
        forks: finished.forks,
        rows: RowCounts { reused: 0, shared: 0, wire_bytes: 0, ..finished.rows },
        prompt: finished.counters.prompt,
        limit: finished.limit,
        problem: finished.routing_problem,
        failure: finished.failure,
        refusal: finished.refusal,
    }
}

/// A conversation without a kill: its end, its replies and its file. `is_shared` says whether another
/// attempt has cached the rows of its prompt before.
async fn without_a_kill(is_shared: bool) -> (Sealed, Vec<Arc<SampledReply>>, Vec<u8>) {
    let process = Process::new();
    if is_shared {
        let other = Arc::new(Conversation::new(process.context.clone(), process.limits));
        let mut agent = Agent::of(&process, other, &[]);
        agent.until = 1;
        agent.talk().await;
    }
    let conversation = process.begin();
    let mut agent = Agent::of(&process, Arc::clone(&conversation), &[]);
    agent.talk().await.unwrap();
    let file = std::fs::read(process.path()).unwrap();
    (sealed(&conversation), agent.had, file)
}

/// Where the frames of a file end.
fn ends(file: &[u8]) -> Vec<usize> {
    let mut ends = vec![0];
    while let Some(length) = file.get(ends[ends.len() - 1]..).filter(|rest| !rest.is_empty()) {
        let length = u32::from_le_bytes(length[..4].try_into().unwrap()) as usize;
        ends.push(ends[ends.len() - 1] + 8 + length + 8);
    }
    ends
}

/// Number of replies in a file.
async fn replies_in(file: &[u8]) -> usize {
    match Process::new().resume(file).await {
        Some(conversation) => conversation.finish().turns.len(),
        None => 0,
    }
}

#[tokio::test]
async fn a_conversation_that_is_killed_at_any_byte_ends_like_one_that_is_not() {
    for is_shared in [false, true] {
        let (expected, replies, file) = without_a_kill(is_shared).await;
        let has_cached_rows = String::from_utf8_lossy(&file).contains("\"cached_rows\":[");
        assert_eq!(has_cached_rows, is_shared);
        assert!(expected.branches.len() > 3, "{expected:?}");
        assert_eq!(expected.limit, Some(Limit::SequenceTokens));
        assert_eq!(expected.problem, None);
        let ends = ends(&file);
        assert!(ends.len() > 2 * replies.len());
        let middle = ends.windows(2).map(|pair| pair[0].midpoint(pair[1]));
        for cut in ends.iter().copied().chain(middle) {
            let file = &file[..cut];
            let stored = replies_in(file).await;
            // The agent has the last reply, or the kill came before it was sent.
            for got in [stored, stored.saturating_sub(1)] {
                let process = Process::new();
                let Some(conversation) = process.resume(file).await else {
                    assert!(cut < ends[1], "the beginning is lost");
                    continue;
                };
                let mut agent = Agent::of(&process, conversation, &replies[..got]);
                agent.sent = stored;
                // Killed again after the next reply.
                agent.until = got + 1;
                agent.talk().await;
                let second = std::fs::read(process.path()).unwrap();
                let had = agent.had;
                let process = Process::new();
                let conversation = process.resume(&second).await.unwrap();
                let mut agent = Agent::of(&process, Arc::clone(&conversation), &had);
                agent.talk().await.unwrap();
                // An error is not given again, so the request that it answered may be sent twice and
                // use two numbers.
                let ids = |replies: &[Arc<SampledReply>]| -> Vec<_> {
                    replies.iter().map(|reply| reply.token_ids.clone()).collect()
                };
                assert_eq!(ids(&agent.had), ids(&replies), "cut at {cut}, {got} replies");
                assert_eq!(sealed(&conversation), expected, "cut at {cut}, {got} replies");
            }
        }
    }
}

#[tokio::test]
async fn a_damaged_journal_is_removed_and_its_attempt_not_continued() {
    let (_, _, file) = without_a_kill(false).await;
    let process = Process::new();
    for at in (0..file.len()).step_by(97) {
        let mut bad = file.clone();
        bad[at] ^= 0x04;
        std::fs::write(process.path(), &bad).unwrap();
        assert_eq!(process.journals().unfinished(), [], "byte {at}");
        assert!(!process.path().exists());
    }
    // That of an attempt that has an outcome, or that is not the newest.
    std::fs::write(process.path(), &file).unwrap();
    let folder = Utf8Path::from_path(process.folder.path()).unwrap();
    let other = "t000001.02-a02".parse().unwrap();
    assert_eq!(TurnJournals::open(folder, &[other]).unwrap().unfinished(), []);
    assert!(!process.path().exists());
}

#[tokio::test]
async fn requests_that_were_sampled_at_the_same_time_keep_their_replies() {
    let process = Process::new();
    let conversation = process.begin();
    let history = [sent("user", "mend it")];
    let sample =
        |sample| Arc::new(ReplyRequest { sample, ..ReplyRequest::clone(&request(&history)) });
    let [a, b, c] = [sample(0), sample(1), sample(2)];
    let (a, b, c) =
        tokio::join!(conversation.sample(&a), conversation.sample(&b), conversation.sample(&c));
    let replies = [a, b, c].map(|answer| answer.unwrap().reply);
    let file = std::fs::read(process.path()).unwrap();
    for cut in ends(&file).split_off(1) {
        let process = Process::new();
        let conversation = process.resume(&file[..cut]).await.unwrap();
        let stored = replies_in(&file[..cut]).await;
        let mut numbers = Vec::new();
        let mut tokens = Vec::new();
        for (number, before) in replies.iter().enumerate() {
            let reply = deliver(conversation.sample(&sample(number)).await.unwrap());
            if stored == 3 {
                assert_eq!(reply.token_ids, before.token_ids);
            }
            numbers.push(reply.number);
            tokens.push(reply.token_ids.clone());
        }
        numbers.sort_unstable();
        numbers.dedup();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!((numbers.len(), tokens.len()), (3, 3), "cut at {cut}");
        assert!(process.engine.requests().len() >= 3 - stored);
        assert_eq!(sealed(&conversation).branches.len(), 3);
    }
}

#[tokio::test]
async fn a_journal_that_cannot_be_written_breaks_the_attempt_before_a_reply_is_sent() {
    let process = Process::new();
    let conversation = process.begin();
    let history = vec![sent("user", "mend it")];
    conversation.sample(&request(&history)).await.unwrap();
    conversation.journal.get().unwrap().fail();
    let error = conversation.sample(&request(&[sent("user", "again")])).await.unwrap_err();
    assert!(matches!(&error, ReplyError::Failed(error) if error.contains(".turns")), "{error}");
    assert!(conversation.ended().await, "the attempt does not end");
    assert!(conversation.finish().failure.is_some());
}
