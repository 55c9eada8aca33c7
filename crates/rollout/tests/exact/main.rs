//! Tokens are exact over turns: the prompt of a turn is the one before, the sampled tokens and the
//! template's own rendering of the new messages; or there is a fork, and the report names it.
//! Random conversations run through the runner with every scaffold.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failed step fails the test, and a skipped test says so"
)]

#[path = "../common/mod.rs"]
mod common;
mod draw;
mod models;

use draw::{Draw, Reply};
use models::Model;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    ChatModel, EpisodeReport, EpisodeRequest, Episodes, GradingRules, History, Message,
    RolloutSection, RolloutSettings, Scaffold,
};
use orchestrate_sandbox::Exit;
use orchestrate_testkit::{
    FakeEngine, FakeExec, FakeReply, FakeRequest, FakeSandboxes, grade_toy, toy_shape, toy_task,
};
use orchestrate_types::ModelShape;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const SCAFFOLDS: [Scaffold; 3] = [Scaffold::Tools, Scaffold::R2eXml, Scaffold::Mini];

/// Number of conversations per scaffold and model.
const CONVERSATIONS: u64 = 1000;

/// Number of conversations for models that differ little from another one.
const FEWER_CONVERSATIONS: u64 = 300;

const TURNS: u32 = 5;

/// How often each feature occurred in the conversations of one kind, to check that all of them did.
#[derive(Debug, Default)]
struct Seen {
    turns: usize,
    forks: usize,
    lookalikes: usize,
    cut: usize,
    aborted: usize,
    unclosed: usize,
    unusual: usize,
    mistakes: usize,
    submitted: usize,
}

struct Played {
    report: EpisodeReport,
    requests: Vec<FakeRequest>,
    replies: Vec<Reply>,
}

fn settings(scaffold: Scaffold, history: History) -> RolloutSettings {
    let config = RolloutSection {
        scaffold: Some(scaffold),
        history: Some(history),
        max_turns: Some(TURNS),
        observation_chars: Some(150),
        system_prompt: Some("You repair <|im_end|> programs.".to_owned()),
        ..RolloutSection::default()
    };
    config.check().unwrap()
}

async fn play(
    chat: &Arc<ChatModel>,
    settings: &RolloutSettings,
    replies: Vec<Reply>,
    seed: u64,
) -> Played {
    let script = replies.clone();
    let shape = ModelShape { context: 1 << 20, ..toy_shape(chat.vocab_size()) };
    let engine = Arc::new(FakeEngine::new(shape, move |_, call| FakeReply::Tokens {
        ids: script[call].ids.clone(),
        finish: script[call].finish.clone(),
    }));
    let draw = Mutex::new(Draw::new(!seed));
    let sandboxes = FakeSandboxes::new(move |_, script| {
        if script == "submit" {
            return FakeExec::new(0, "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n");
        }
        let mut draw = draw.lock().unwrap();
        let takes = if draw.one_in(20) { Duration::MAX } else { Duration::ZERO };
        let exit = Exit::Code(i32::try_from(draw.below(3)).unwrap());
        FakeExec { exit, output: draw.output(), takes }
    });
    let runner = common::runner(
        Arc::clone(&engine) as _,
        Arc::new(sandboxes),
        (Arc::clone(chat), settings.clone()),
        GradingRules::new(grade_toy),
    );
    let request = EpisodeRequest { seed, ..common::request(toy_task()) };
    let report = runner.run(request, &CancellationToken::new()).await;
    Played { report, requests: engine.requests(), replies }
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.to_owned(), content: content.to_owned(), ..Message::default() }
}

/// Text without the spaces after each `<`.
fn without_spaces_after_lt(text: &str) -> String {
    text.split('<').map(|part| part.trim_start_matches(' ')).collect::<Vec<_>>().join("<")
}

/// Text without white space.
fn without_white_space(text: &str) -> String {
    text.split_whitespace().collect()
}

/// The part of a conversation that was checked so far.
struct Checked<'a> {
    model: &'a Model,
    chat: &'a ChatModel,
    scaffold: Scaffold,
    /// Messages for the template, in which unique names stand for sampled turns.
    messages: Vec<Message>,
    /// The same messages with the sampled text.
    with_text: Vec<Message>,
}

impl Checked<'_> {
    fn turn_name(turn: usize) -> String {
        format!("SAMPLED-{turn}-HERE")
    }

    /// Texts of the messages in the delta after a turn.
    fn contents(&self, delta: &str) -> Vec<String> {
        let (open, close) = match self.scaffold {
            Scaffold::Tools | Scaffold::Command | Scaffold::External => self.model.tool,
            Scaffold::R2eXml | Scaffold::Mini => ("<|im_start|>user\n", "<|im_end|>"),
        };
        let parts = delta.split(open).skip(1);
        parts.map(|part| part.split_once(close).unwrap().0.to_owned()).collect()
    }

    /// Checks the tokens between a turn and the next one: they are exactly what the template
    /// renders there, without any control token from a message.
    fn check_delta(&mut self, turn: usize, ids: &[u32], closed: bool, observation: &str) {
        let text = self.chat.decode(ids).unwrap();
        let role = self.scaffold.observation_role();
        let contents = self.contents(&text);
        self.messages.push(message("assistant", &Self::turn_name(turn)));
        let skeleton: Vec<Message> = contents.iter().map(|_| message(role, "x")).collect();
        let bare = self.text_after(turn, &[self.messages.clone(), skeleton].concat());
        self.messages.extend(contents.iter().map(|content| message(role, content)));
        let expected = self.text_after(turn, &self.messages);
        let strip = |text: &str| {
            let rest = if closed { text.strip_prefix("<|im_end|>") } else { Some(text) };
            rest.unwrap().to_owned()
        };
        assert_eq!(ids, self.chat.encode(&strip(&expected)).unwrap(), "{text}");
        let control: Vec<u32> = draw::TAGS
            .iter()
            .filter_map(|tag| match self.chat.encode(tag).unwrap()[..] {
                [id] => Some(id),
                _ => None,
            })
            .collect();
        let only = |ids: &[u32]| ids.iter().copied().filter(|i| control.contains(i)).collect();
        let (found, expected): (Vec<u32>, Vec<u32>) =
            (only(ids), only(&self.chat.encode(&strip(&bare)).unwrap()));
        assert_eq!(found, expected, "{text}");

        // The observation is complete; only control tokens are broken by a space.
        let broken = self.chat.encode(&observation.replace('<', "< ")).unwrap();
        let observation = self.chat.decode(&broken).unwrap();
        assert_eq!(
            without_spaces_after_lt(&contents.join("\n")),
            without_spaces_after_lt(&observation)
        );
    }

    /// The text that the template renders after a turn.
    fn text_after(&self, turn: usize, messages: &[Message]) -> String {
        let text = self.model.template.render(messages, &[], true).unwrap();
        text.split_once(&Self::turn_name(turn)).unwrap().1.to_owned()
    }
}

fn check(
    model: &Model,
    chat: &ChatModel,
    settings: &RolloutSettings,
    played: &Played,
    seen: &mut Seen,
) {
    let Played { report, requests, replies } = played;
    let opening = settings.opening(&toy_task());
    let mut checked = Checked {
        model,
        chat,
        scaffold: settings.scaffold,
        messages: opening.clone(),
        with_text: opening,
    };
    // Messages of the environment must not have control tokens.
    for message in checked.messages.iter_mut().chain(&mut checked.with_text) {
        message.content = message.content.replace("<|im_end|>", "< |im_end|>");
    }
    let first = model.template.render(&checked.messages, &[], true).unwrap();
    assert_eq!(*requests[0].token_ids, chat.encode(&first).unwrap());

    let mut turn = 0;
    let mut start_of_turn = 0;
    let mut sampled: Vec<(usize, Vec<u32>)> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        let prompt = &request.token_ids;
        let reply = &replies[index];
        let whole = [prompt.as_slice(), &reply.ids].concat();
        seen.aborted += usize::from(reply.finish == Finish::Abort);
        if reply.finish == Finish::Abort {
            assert_eq!(*requests[index + 1].token_ids, whole, "the same turn continues");
            continue;
        }
        let first = replies[start_of_turn..=index].iter().flat_map(|r| r.ids.iter().copied());
        let ids: Vec<u32> = first.collect();
        let start = whole.len() - ids.len();
        let log = &report.turns[turn];
        assert_eq!(log.text, chat.decode(&ids).unwrap());
        sampled.push((start, ids.clone()));
        let Some(next) = requests.get(index + 1) else { break };

        let closed = reply.ids.last() == Some(&chat.end_of_turn());
        let mut kept = whole.clone();
        if let Some(fork) = log.fork {
            // Only the policy's own thinking is dropped, with the part of it that the prompt had.
            assert!(fork.at <= start && fork.at + fork.left_out <= whole.len());
            kept.drain(fork.at..fork.at + fork.left_out);
            let dropped = chat.decode(&whole[fork.at..fork.at + fork.left_out]).unwrap();
            assert!(dropped.trim_end().ends_with("think>"), "{dropped}");
            sampled.retain(|(from, _)| *from < fork.at);
            seen.forks += 1;
        }
        assert_eq!(next.token_ids[..kept.len()], kept, "turn {turn} of {:?}", report.attempt);
        checked.check_delta(turn, &next.token_ids[kept.len()..], closed, &log.observation);
        seen.unclosed += usize::from(!closed);
        if settings.history == History::Template && settings.scaffold != Scaffold::Tools {
            // The prompt reads as the template renders the whole conversation, except for line ends
            // that share a token with the text after them.
            let delta = checked.messages[checked.with_text.len() + 1..].to_vec();
            checked.with_text.push(message("assistant", &log.text));
            checked.with_text.extend(delta);
            let text = model.template.render(&checked.with_text, &[], true).unwrap();
            assert_eq!(
                without_white_space(&chat.decode(&next.token_ids).unwrap()),
                without_white_space(&text)
            );
        }
        seen.cut += usize::from(log.observation.contains("characters"));
        let is_mistake = log.actions.is_empty() && !log.observation.is_empty();
        seen.mistakes += usize::from(is_mistake);
        seen.lookalikes +=
            usize::from(draw::LOOKALIKES[..9].iter().any(|text| log.observation.contains(text)));
        turn += 1;
        start_of_turn = index + 1;
    }
    seen.turns += report.turns.len();
    let last = report.turns.last().unwrap();
    seen.submitted += usize::from(last.actions.last().is_some_and(|a| a.name == "submit"));

    let trajectory = report.trajectory().unwrap();
    let end = requests.len() - 1;
    let whole = [requests[end].token_ids.as_slice(), &replies[end].ids].concat();
    assert_eq!(trajectory.token_ids(), whole);
    let mut mask = vec![0; whole.len()];
    for (start, ids) in sampled {
        mask[start..start + ids.len()].fill(1);
    }
    assert_eq!(trajectory.loss_mask(), mask);
    assert_eq!(report.routing_problem, None);
    assert_eq!(report.routing().unwrap().rows(), whole.len() - 1);
    assert_eq!(report.routing_drift, 0);
}

async fn conversations(model: &Model, history: History, count: u64) {
    for scaffold in SCAFFOLDS {
        let chat = Arc::new(model.chat(scaffold, history));
        let settings = settings(scaffold, history);
        let mut seen = Seen::default();
        for seed in 0..count {
            let turns = usize::try_from(TURNS).unwrap();
            let (replies, unusual) = Draw::new(seed).replies(&chat, scaffold, turns, model.thinks);
            seen.unusual += unusual;
            let played = play(&chat, &settings, replies, seed).await;
            check(model, &chat, &settings, &played, &mut seen);
        }
        eprintln!("{count} conversations with {scaffold:?}, {history:?}: {seen:?}");
        let least = usize::try_from(count / 50).unwrap();
        let Seen { turns, forks, lookalikes, cut, aborted, unclosed, unusual, mistakes, submitted } =
            seen;
        for found in [turns, lookalikes, cut, aborted, unclosed, unusual, mistakes, submitted] {
            assert!(found >= least, "a feature occurred too rarely");
        }
        let forking = history == History::Template && scaffold != Scaffold::Tools;
        assert_eq!(forks > least, forking, "{forks} forks");
    }
}

#[tokio::test(start_paused = true)]
async fn random_conversations_of_the_shipped_policy_are_exact() {
    conversations(&models::micro(), History::Sampled, CONVERSATIONS).await;
}

#[tokio::test(start_paused = true)]
async fn random_conversations_with_thinking_are_exact() {
    conversations(&models::qwen3_like(false), History::Sampled, CONVERSATIONS).await;
}

#[tokio::test(start_paused = true)]
async fn random_conversations_with_thinking_opened_by_the_prompt_are_exact() {
    conversations(&models::qwen3_like(true), History::Sampled, FEWER_CONVERSATIONS).await;
}

#[tokio::test(start_paused = true)]
async fn random_conversations_fork_where_thinking_is_dropped() {
    conversations(&models::qwen3_like(false), History::Template, FEWER_CONVERSATIONS).await;
}

#[tokio::test(start_paused = true)]
async fn random_conversations_fork_where_thinking_opened_by_the_prompt_is_dropped() {
    conversations(&models::qwen3_like(true), History::Template, FEWER_CONVERSATIONS).await;
}

#[tokio::test(start_paused = true)]
async fn random_conversations_of_qwen3_itself_are_exact() {
    let Some(model) = models::qwen3() else { return };
    conversations(&model, History::Sampled, CONVERSATIONS).await;
    conversations(&model, History::Template, CONVERSATIONS).await;
}
