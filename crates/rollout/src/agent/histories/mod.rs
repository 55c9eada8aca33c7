//! Random histories through the gateway, in all dialects and in tokens, compared with a naive reference.
//!
//! An agent does with its history whatever agents do: it goes on, edits, compacts, starts sub-agents,
//! sends requests again, several at once, or leaves before the reply. Meanwhile workers fail, abort and
//! get new weights. Requests and replies are bytes of HTTP.

mod draw;
mod embedded;
mod model;
mod reference;
mod wire;
mod workers;

use super::sampler::{ConversationSampler, MODEL, PLACES};
use crate::api::EpisodeRequest;
use crate::config::RolloutSection;
use crate::conversation::{Conversation, ForkCause};
use crate::prefill::PrefillLeaders;
use crate::rows::RowSharing;
use crate::sequence::EpisodeContext;
use camino::Utf8Path;
use draw::{Agent, Question};
use model::chat;
use orchestrate_engine::{Engine, Fleet};
use orchestrate_gateway::{GatewayOptions, router};
use orchestrate_testkit::toy_task;
use orchestrate_types::PolicyVersion;
use reference::{Asked, Reference};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use wire::{Client, WireReply};
use workers::{Call, Log, ROW_SHIFT, fleet};

/// A conversation over `engine`, and a client of its gateway.
fn conversation(engine: Arc<dyn Engine>) -> (Arc<Conversation>, Client) {
    let section = RolloutSection { max_turns: Some(10_000), ..RolloutSection::default() };
    let settings = section.check().unwrap();
    let limits = settings.limits(engine.shape().context);
    let mut context = EpisodeContext {
        request: EpisodeRequest {
            run: "01900000-0000-7000-8000-000000000000".parse().unwrap(),
            epoch: 1,
            attempt: "t000001.02-a01".parse().unwrap(),
            task: Arc::new(toy_task()),
            policy_version: PolicyVersion(0),
            seed: 7,
            temperature: 1.0,
            want_routing: true,
        },
        engine,
        chat: chat(),
        settings: Arc::new(settings),
        sharing: RowSharing::default(),
        leaders: PrefillLeaders::default(),
        stop: CancellationToken::new(),
        deadline: None,
        restarts: 0,
    };
    context.start_clock(Duration::from_hours(1));
    let conversation = Arc::new(Conversation::new(context, limits));
    let sampler = Arc::new(ConversationSampler {
        conversation: Arc::clone(&conversation),
        model: MODEL.to_owned(),
        show_tools: true,
        takes_tokens: true,
        places: Semaphore::new(PLACES),
        schemas: std::sync::Mutex::default(),
    });
    (conversation, Client(router(sampler, GatewayOptions::default())))
}

/// What happened in some conversations.
#[derive(Debug, Default)]
struct Totals {
    requests: usize,
    replies: usize,
    rows: usize,
    sampled: usize,
    faults: usize,
    updates: u64,
    departures: usize,
    closed: usize,
    repeats: usize,
    several_versions: usize,
    several_workers: usize,
    stopped: usize,
    forks: BTreeMap<ForkCause, u64>,
}

/// One conversation while it runs.
struct World {
    log: Arc<Log>,
    fleet: Arc<Fleet>,
    client: Client,
    reference: Reference,
    version: u64,
    totals: Totals,
}

impl World {
    /// Gives all workers new weights, which aborts what they are sampling.
    async fn update(&mut self) {
        self.version += 1;
        self.totals.updates += 1;
        let version = PolicyVersion(self.version);
        self.fleet.sync_weights(Utf8Path::new("weights"), version).await.unwrap();
    }

    /// Whether there may be new weights: the rows of later versions would equal those of other workers.
    fn may_update(&self) -> bool {
        self.version + 1 < ROW_SHIFT as u64
    }

    /// Asks these questions at the same time, and checks the answers.
    async fn ask(&mut self, agent: &mut Agent, questions: &[Question]) {
        let before = self.log.calls().iter().map(|call| call.ordinal + 1).max().unwrap_or(0);
        let mut places = Vec::new();
        for question in questions {
            places.push(self.reference.place(&question.asked, question.replies() as u64));
        }
        self.count(&questions[0], places[0].prompt.len()).await;
        let mut asking = JoinSet::new();
        let holds = self.may_update() && agent.one_in(15);
        if holds {
            self.log.hold_next();
        }
        if holds && questions.len() == 1 && agent.one_in(2) {
            // The client goes away while the reply is sampled, and asks again.
            let log = Arc::clone(&self.log);
            let (path, body) = questions[0].request();
            self.client.post_and_leave(path, &body, || log.is_holding()).await;
            self.totals.departures += 1;
        }
        if !holds && questions.len() == 1 && agent.one_in(10) {
            // The client has a part of the reply, and asks again without saying so.
            let (path, body) = questions[0].request();
            self.client.post_and_close(path, &body).await;
            self.totals.closed += 1;
        }
        for (index, question) in questions.iter().enumerate() {
            let (client, (path, body)) = (self.client.clone(), question.request());
            asking.spawn(async move { (index, client.post(path, &body, false).await) });
        }
        if holds {
            let log = Arc::clone(&self.log);
            wire::until(|| log.is_holding()).await;
            self.update().await;
        }
        let mut answers = vec![String::new(); questions.len()];
        while let Some(answer) = asking.join_next().await {
            let (index, answer) = answer.unwrap();
            answers[index] = answer;
        }
        let new = self.new_calls(before);
        for calls in new.values() {
            self.reference.note(calls);
        }
        let expected: usize = questions.iter().map(Question::replies).sum();
        assert_eq!(new.len(), expected, "generations for {questions:?}");
        for ((question, place), answer) in questions.iter().zip(&places).zip(&answers) {
            let mut sampled = Vec::new();
            for calls in new.values().filter(|calls| *calls[0].prompt == place.prompt) {
                self.count_sources(calls);
                let stops = question.stops();
                let (reply, ids) = self.reference.learn(&question.asked, place, calls, stops);
                let text = chat().decode(&ids).unwrap();
                self.totals.stopped +=
                    usize::from(stops.iter().any(|stop| text.contains(stop.as_str())));
                sampled.push((reply, ids));
            }
            self.totals.requests += 1;
            self.totals.replies += sampled.len();
            self.check(question, &place.prompt, answer, sampled);
            if agent.one_in(10) {
                self.repeat(question, answer).await;
            }
        }
    }

    /// Calls of the generations from number `first` on, without those whose reply was refused.
    fn new_calls(&self, first: u32) -> BTreeMap<u32, Vec<Call>> {
        let mut new: BTreeMap<u32, Vec<Call>> = BTreeMap::new();
        for call in self.log.calls() {
            if call.ordinal >= first && !call.is_refused {
                let calls: &mut Vec<Call> = new.entry(call.ordinal).or_default();
                // Asked again from the first row on: the rows before belonged to other weights.
                calls.retain(|before| before.ids.is_empty() || before.prompt != call.prompt);
                calls.push(call);
            }
        }
        new
    }

    fn count_sources(&mut self, calls: &[Call]) {
        let (first, rest) = calls.split_first().unwrap();
        let totals = &mut self.totals;
        totals.several_versions += usize::from(rest.iter().any(|c| c.version != first.version));
        totals.several_workers += usize::from(rest.iter().any(|c| c.worker != first.worker));
    }

    /// Where a dialect counts tokens, it counts the prompt's.
    async fn count(&self, question: &Question, prompt: usize) {
        let Some((path, body)) = question.count() else { return };
        let counted: Value =
            serde_json::from_str(&self.client.post(path, &body, false).await).unwrap();
        assert_eq!(counted["input_tokens"], json!(prompt));
    }

    /// Checks what the client got against what was sampled.
    fn check(
        &self,
        question: &Question,
        prompt: &[u32],
        answer: &str,
        mut sampled: Vec<(WireReply, Vec<u32>)>,
    ) {
        if let Some(rows_from) = question.rows_from {
            let answer: Value = serde_json::from_str(answer).unwrap();
            let (_, ids) = sampled.pop().unwrap();
            let choice = &answer["choices"][0];
            assert_eq!(choice["token_ids"], json!(ids));
            let rows = &choice["routed_experts"];
            let start = usize::try_from(rows["start"].as_u64().unwrap()).unwrap();
            let tokens = [prompt, &ids].concat();
            assert_eq!(start, rows_from.min(tokens.len() - 1));
            let data = rows["data"].as_str().unwrap();
            let bytes = base64_simd::STANDARD.decode_to_vec(data).unwrap();
            return self.reference.check_sent_rows(&tokens, start, &bytes);
        }
        let request = question.wire.as_ref().unwrap();
        let got = request.read(answer);
        let completion: usize = sampled.iter().map(|(_, ids)| ids.len()).sum();
        assert_eq!(got.usage, (prompt.len() as u64, completion as u64));
        for reply in got.replies {
            let ids = |reply: &WireReply| -> Vec<Option<String>> {
                reply.calls.iter().map(|call| call.id.clone()).collect()
            };
            let is_got = |(sampled, _): &(WireReply, _)| {
                let is_named = reply.number.is_none() || sampled.number == reply.number;
                *sampled == reply && ids(sampled) == ids(&reply) && is_named
            };
            let found = sampled.iter().position(is_got);
            let found = found.unwrap_or_else(|| panic!("{reply:?} is none of {sampled:?}"));
            sampled.remove(found);
        }
        assert!(sampled.is_empty(), "not sent: {sampled:?}");
    }

    /// A client's library sends a request again: it gets the same reply, and nothing is sampled.
    async fn repeat(&mut self, question: &Question, answer: &str) {
        let before = self.log.calls().len();
        let (path, body) = question.request();
        let again = self.client.post(path, &body, true).await;
        assert_eq!(self.log.calls().len(), before);
        if let Some(request) = &question.wire {
            assert_eq!(request.read(&again).replies, request.read(answer).replies);
        } else {
            let choices =
                |text: &str| serde_json::from_str::<Value>(text).unwrap()["choices"].clone();
            assert_eq!(choices(&again), choices(answer));
        }
        self.totals.repeats += 1;
    }
}

/// One conversation of this many requests.
async fn random_conversation(seed: u64, requests: usize) -> Totals {
    let log = Arc::new(Log::default());
    let fleet = Arc::new(fleet(&log));
    let (conversation, client) = conversation(Arc::clone(&fleet) as _);
    let mut world = World {
        log,
        fleet,
        client,
        reference: Reference::default(),
        version: 0,
        totals: Totals::default(),
    };
    let mut agent = Agent::new(seed);
    while world.totals.requests < requests {
        if world.may_update() && agent.one_in(30) {
            world.update().await;
        }
        let known: Vec<Asked> = world.reference.known().cloned().collect();
        let reference = &world.reference;
        let mut question = || loop {
            // Which of two replies an agent means may not be known; the tree's own tests have the rule.
            let question = agent.question(&known);
            if !reference.is_ambiguous(&question.asked) {
                return question;
            }
        };
        let mut questions = vec![question()];
        let other = question();
        if agent.one_in(6) {
            // Replies are told apart by their prompts.
            let prompt_of = |question: &Question| world.reference.prompt_of(&question.asked);
            if prompt_of(&other) != prompt_of(&questions[0]) {
                questions.push(other);
            }
        }
        world.ask(&mut agent, &questions).await;
    }
    let finished = conversation.finish();
    (world.totals.rows, world.totals.sampled) = world.reference.check(&finished);
    world.totals.faults = world.log.faults();
    world.totals.forks = finished.forks;
    world.totals
}

#[tokio::test]
async fn random_histories_in_all_dialects_equal_the_naive_reference() {
    let requests = std::env::var("ORCHESTRATE_HISTORIES").ok().and_then(|n| n.parse().ok());
    let requests = requests.unwrap_or(600);
    let mut all = Totals::default();
    let started = std::time::Instant::now();
    for seed in 0.. {
        let one = random_conversation(seed, 20).await;
        all.requests += one.requests;
        all.replies += one.replies;
        all.rows += one.rows;
        all.sampled += one.sampled;
        all.faults += one.faults;
        all.updates += one.updates;
        all.departures += one.departures;
        all.closed += one.closed;
        all.repeats += one.repeats;
        all.several_versions += one.several_versions;
        all.several_workers += one.several_workers;
        all.stopped += one.stopped;
        for (cause, number) in one.forks {
            *all.forks.entry(cause).or_insert(0) += number;
        }
        if all.requests >= requests {
            break;
        }
    }
    orchestrate_e2e::say(&format!("{all:?} in {:?}", started.elapsed()));
    for cause in [ForkCause::Tools, ForkCause::Opening, ForkCause::History, ForkCause::Repeated] {
        assert!(all.forks.contains_key(&cause), "{cause:?} did not occur: {all:?}");
    }
    let occurred =
        [all.faults, all.departures, all.closed, all.repeats, all.several_versions, all.stopped];
    assert!(occurred.iter().all(|count| *count > 0), "{all:?}");
    assert!(all.several_workers > 0, "{all:?}");
}
