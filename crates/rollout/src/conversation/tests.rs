use super::pending::SampledReply;
use super::*;
use crate::api::{Action, EpisodeRequest, Message};
use crate::chat::{ChatModel, ChatOptions, message};
use crate::config::RolloutSection;
use crate::expert::{ExpertEpisode, ExpertTurn};
use crate::prefill::PrefillLeaders;
use crate::prefix::History;
use crate::rows::RowSharing;
use crate::template::{ChatTemplate, TemplateInput};
use crate::vocabulary::{MICRO_CHAT_TEMPLATE, train_tokenizer};
use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_gateway::AskedSampling;
use orchestrate_testkit::{FakeEngine, FakeReply, FakeRequest, toy_shape, toy_task};
use orchestrate_types::{ModelShape, PolicyVersion};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};
use std::sync::OnceLock;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(super) fn chat() -> Arc<ChatModel> {
    static CHAT: OnceLock<Arc<ChatModel>> = OnceLock::new();
    Arc::clone(CHAT.get_or_init(|| chat_with(MICRO_CHAT_TEMPLATE)))
}

/// A small model with this template.
fn chat_with(template: &str) -> Arc<ChatModel> {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8Path::from_path(folder.path()).unwrap();
    let call = Action { name: "bash".to_owned(), arguments: json!({"command": "cat total.py"}) };
    let episode = ExpertEpisode {
        prompt: vec![message("user", "total in total.py should include the last item.")],
        turns: vec![ExpertTurn {
            content: "Look.".to_owned(),
            calls: vec![call],
            observations: vec!["def total(items):".to_owned()],
            weight: 1.0,
        }],
    };
    let text = episode.text(&ChatTemplate::new(MICRO_CHAT_TEMPLATE).unwrap()).unwrap();
    train_tokenizer(std::iter::repeat_n(text, 3), 400, template, path).unwrap();
    Arc::new(ChatModel::load(path).unwrap())
}

/// A small model of an agent with this template, whose prompts have the history that the template shows.
fn chat_of_template(template: &str) -> Arc<ChatModel> {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8Path::from_path(folder.path()).unwrap();
    train_tokenizer(std::iter::repeat_n("mend it".to_owned(), 3), 320, template, path).unwrap();
    let file = path.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let next = tokenizer["model"]["vocab"].as_object().unwrap().len();
    for (id, content) in (next..).zip(["<think>", "</think>"]) {
        tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        }));
    }
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let scaffold = crate::scaffold::Scaffold::External;
    let options = ChatOptions { scaffold, history: History::Template, ..ChatOptions::default() };
    Arc::new(ChatModel::load_for(path, options).unwrap())
}

/// Replies with a text and sometimes a call, decided by the call's seed.
fn engine() -> Arc<FakeEngine> {
    engine_of_context(1 << 16)
}

fn engine_of_context(context: usize) -> Arc<FakeEngine> {
    let shape = ModelShape { context, ..toy_shape(chat().vocab_size()) };
    Arc::new(FakeEngine::new(shape, |request, _| {
        let seed = request.sampling.seed;
        let calls = if seed.is_multiple_of(3) {
            Vec::new()
        } else {
            vec![Action {
                name: "bash".to_owned(),
                arguments: json!({"command": format!("ls {seed}")}),
            }]
        };
        let mut ids = chat().assistant(&format!("say {seed}"), &calls).unwrap();
        ids.truncate(request.sampling.max_new_tokens);
        let ended = ids.last() == Some(&chat().end_of_turn());
        FakeReply::Tokens { ids, finish: if ended { Finish::Stop } else { Finish::Length } }
    }))
}

pub(super) fn conversation(engine: &Arc<FakeEngine>, max_turns: u32) -> Arc<Conversation> {
    conversation_of(chat(), engine, max_turns)
}

fn conversation_of(
    chat: Arc<ChatModel>,
    engine: &Arc<FakeEngine>,
    max_turns: u32,
) -> Arc<Conversation> {
    let (context, limits) = context_of(chat, engine, max_turns);
    Arc::new(Conversation::new(context, limits))
}

/// What the conversations of an attempt are made of.
pub(super) fn context_of(
    chat: Arc<ChatModel>,
    engine: &Arc<FakeEngine>,
    max_turns: u32,
) -> (EpisodeContext, EpisodeLimits) {
    let section = RolloutSection { max_turns: Some(max_turns), ..RolloutSection::default() };
    let settings = section.check().unwrap();
    let limits = settings.limits(1 << 16);
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
        engine: Arc::clone(engine) as _,
        chat,
        settings: Arc::new(settings),
        sharing: RowSharing::default(),
        leaders: PrefillLeaders::default(),
        stop: CancellationToken::new(),
        deadline: None,
        restarts: 0,
    };
    context.start_clock(Duration::from_mins(10));
    (context, limits)
}

pub(super) fn sent(role: &str, text: &str) -> Arc<HistoryMessage> {
    Arc::new(HistoryMessage {
        message: message(role, text),
        reasoning: None,
        reply: None,
        call_ids: Vec::new(),
    })
}

pub(super) fn request(sent: &[Arc<HistoryMessage>]) -> Arc<ReplyRequest> {
    Arc::new(ReplyRequest {
        prompt: RequestPrompt::Messages {
            messages: sent.to_vec(),
            tools: Arc::default(),
            thinking: None,
        },
        max_tokens: None,
        stops: Arc::default(),
        sampling: AskedSampling::default(),
        sample: 0,
        repeats: false,
        overridden: Arc::default(),
    })
}

/// A client gets the whole reply.
pub(super) fn deliver(answered: Answered) -> Arc<SampledReply> {
    answered.receipt.delivered();
    answered.reply
}

/// A reply as an agent sends it back that keeps the ids of calls, and the thinking if it is to.
fn sent_back(reply: &SampledReply, with_thinking: bool) -> Arc<HistoryMessage> {
    let calls = 0..reply.message.tool_calls.len();
    Arc::new(HistoryMessage {
        message: reply.message.clone(),
        reasoning: reply.reasoning.clone().filter(|_| with_thinking),
        reply: None,
        call_ids: calls.map(|index| call_id(reply.number, index)).collect(),
    })
}

pub(super) fn repeated(reply: &SampledReply) -> Arc<HistoryMessage> {
    Arc::new(HistoryMessage {
        message: reply.message.clone(),
        reasoning: None,
        reply: None,
        call_ids: Vec::new(),
    })
}

/// A reply ends with the token that completes its first stop string, and its message before that string.
fn check_stop(reply: &SampledReply, stops: &[String]) {
    let text = |ids: &[u32]| chat().decode(ids).unwrap();
    let ends = |ids: &[u32]| stops.iter().any(|stop| text(ids).contains(stop.as_str()));
    let Some((_, before)) = reply.token_ids.split_last() else { return };
    assert!(!ends(before), "{reply:?}");
    assert_eq!(reply.stop_string.is_some(), ends(&reply.token_ids), "{reply:?}");
    if reply.stop_string.is_some() {
        assert_eq!(reply.finish, Finish::Stop);
        assert!(stops.iter().all(|stop| !reply.message.content.contains(stop.as_str())));
    }
}

/// The engine's requests by the number in their ids.
fn by_number(engine: &FakeEngine) -> BTreeMap<u32, FakeRequest> {
    let number = |request: FakeRequest| {
        let (_, number) = request.request_id.as_str().rsplit_once("-n").unwrap();
        (number.split_once('-').unwrap().0.parse().unwrap(), request)
    };
    engine.requests().into_iter().map(number).collect()
}

/// Checks a finished conversation against the engine's log: every row is the one that a prefill of the
/// whole branch would give, and every reply carries loss in exactly one branch, right after its prompt.
fn check(engine: &FakeEngine, finished: &FinishedConversation, replies: &[Arc<SampledReply>]) {
    assert_eq!(finished.routing_problem, None);
    for branch in &finished.branches {
        let tokens = branch.trajectory.token_ids();
        let mask = branch.routing.as_ref().unwrap();
        assert_eq!(mask.rows(), tokens.len() - 1);
        for (position, token) in tokens.iter().enumerate().take(mask.rows()) {
            for layer in [1, 2] {
                let first = position * 7 + *token as usize * 3 + layer * 5;
                let expected: Vec<usize> = (0..2).map(|slot| (first + slot) % 8).collect();
                assert_eq!(mask.experts(position, layer), Some(expected), "row {position}");
            }
        }
    }
    let requests = by_number(engine);
    assert_eq!(requests.len(), replies.len());
    let mut trained = 0;
    for reply in replies {
        let prompt = &requests[&reply.number].token_ids;
        let owners = finished.branches.iter().filter(|branch| {
            let (ids, mask) = (branch.trajectory.token_ids(), branch.trajectory.loss_mask());
            let end = prompt.len() + reply.token_ids.len();
            let turns = branch.trajectory.turns();
            turns.iter().any(|turn| (turn.prompt_end, turn.output_end) == (prompt.len(), end))
                && ids[..prompt.len()] == prompt[..]
                && ids[prompt.len()..end] == reply.token_ids[..]
                && mask[prompt.len()..end].iter().all(|mask| *mask == 1)
        });
        // Short replies to the same prompt may be equal.
        let equal = replies.iter().filter(|other| {
            requests[&other.number].token_ids == *prompt && other.token_ids == reply.token_ids
        });
        assert_eq!(owners.count(), equal.count(), "reply {}", reply.number);
        trained += reply.token_ids.len();
    }
    let loss: usize = finished.branches.iter().map(|b| b.trajectory.response_tokens()).sum();
    assert_eq!(loss, trained);
}

#[tokio::test]
async fn a_linear_conversation_is_one_branch_with_the_tokens_of_the_built_in_loop() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let mut history = vec![sent("user", "mend it")];
    let mut replies = Vec::new();
    let mut expected = chat().prompt(&[message("user", "mend it")]).unwrap().to_vec();
    for turn in 0..4 {
        let reply = deliver(conversation.sample(&request(&history)).await.unwrap());
        expected.extend(&reply.token_ids);
        let observation = message("tool", &format!("result {turn}"));
        if turn < 3 {
            expected.extend(
                chat().delta(std::slice::from_ref(&observation), expected.last().copied()).unwrap(),
            );
        }
        history.extend([
            repeated(&reply),
            Arc::new(HistoryMessage {
                message: observation,
                reasoning: None,
                reply: None,
                call_ids: Vec::new(),
            }),
        ]);
        replies.push(reply);
    }
    let finished = conversation.finish();
    assert_eq!((finished.branches.len(), finished.forks.len()), (1, 0));
    assert_eq!(finished.branches[0].trajectory.token_ids(), expected);
    assert_eq!(finished.turns.len(), 4);
    assert_eq!(finished.turns[0].observation, "result 0");
    check(&engine, &finished, &replies);
}

/// Replies that differ in their thinking alone.
fn engine_of_thoughts() -> Arc<FakeEngine> {
    let shape = ModelShape { context: 1 << 16, ..toy_shape(chat().vocab_size()) };
    Arc::new(FakeEngine::new(shape, |request, _| {
        let call = Action { name: "bash".to_owned(), arguments: json!({"command": "ls"}) };
        let text = format!("<think>\n{}\n</think>\n\nLook.", request.sampling.seed);
        let ids = chat().assistant(&text, &[call]).unwrap();
        FakeReply::Tokens { ids, finish: Finish::Stop }
    }))
}

/// Three replies to one request.
async fn three(
    conversation: &Arc<Conversation>,
) -> (Vec<Arc<HistoryMessage>>, Vec<Arc<SampledReply>>) {
    let history = vec![sent("user", "mend it")];
    let mut replies = Vec::new();
    for sample in 0..3 {
        let reply = ReplyRequest { sample, ..ReplyRequest::clone(&request(&history)) };
        let reply = deliver(conversation.sample(&Arc::new(reply)).await.unwrap());
        replies.push(reply);
    }
    assert_ne!(replies[0].token_ids, replies[2].token_ids);
    (history, replies)
}

#[tokio::test]
async fn the_reply_that_came_back_is_continued_not_one_with_the_same_calls() {
    for with_thinking in [true, false] {
        let engine = engine_of_thoughts();
        let conversation = conversation(&engine, 10);
        let (mut history, replies) = three(&conversation).await;
        history.extend([sent_back(&replies[2], with_thinking), sent("tool", "total.py")]);
        conversation.sample(&request(&history)).await.unwrap();
        let requests = by_number(&engine);
        let expected = [&requests[&2].token_ids[..], &replies[2].token_ids].concat();
        assert!(requests[&3].token_ids.starts_with(&expected), "thinking: {with_thinking}");
        let finished = conversation.finish();
        assert_eq!(finished.forks, [(ForkCause::Repeated, 2)].into());
        assert_eq!(finished.recognised, BTreeMap::new());
    }
}

#[tokio::test]
async fn a_reply_that_nothing_tells_from_others_is_the_first_and_counted() {
    let engine = engine_of_thoughts();
    let conversation = conversation(&engine, 10);
    let (mut history, replies) = three(&conversation).await;
    history.extend([repeated(&replies[2]), sent("tool", "total.py")]);
    conversation.sample(&request(&history)).await.unwrap();
    let requests = by_number(&engine);
    let expected = [&requests[&0].token_ids[..], &replies[0].token_ids].concat();
    assert!(requests[&3].token_ids.starts_with(&expected));
    assert_eq!(conversation.finish().recognised, [(Recognition::Ambiguous, 1)].into());
}

#[tokio::test]
async fn edited_thinking_is_sampled_over_and_begins_a_branch() {
    let engine = engine_of_thoughts();
    let conversation = conversation(&engine, 10);
    let mut history = vec![sent("user", "mend it")];
    let reply = deliver(conversation.sample(&request(&history)).await.unwrap());
    let mut edited = HistoryMessage::clone(&sent_back(&reply, true));
    edited.reasoning = Some("I am unsure.".to_owned());
    history.extend([Arc::new(edited), sent("tool", "total.py")]);
    conversation.sample(&request(&history)).await.unwrap();
    let prompt = chat().decode(&by_number(&engine)[&1].token_ids).unwrap();
    assert!(prompt.contains("<think>\nI am unsure.\n</think>\n\nLook."), "{prompt}");
    assert_eq!(conversation.finish().forks, [(ForkCause::History, 1)].into());
}

/// Qwen3's template, which keeps thinking before results of tools and drops it before the user.
const QWEN3: &str = include_str!("../../tests/data/qwen3_like.jinja");

#[tokio::test]
async fn a_branch_begins_where_the_template_drops_thinking_and_only_there() {
    let last = "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}";
    assert!(QWEN3.trim_end().ends_with(last));
    let opened =
        QWEN3.trim_end().replace(last, &last.replace("assistant\\n", "assistant\\n<think>\\n"));
    let eager = "loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content))";
    assert!(QWEN3.contains(eager));
    // Drops the thinking of every turn but the last.
    let eager = QWEN3.replace(eager, "loop.last");
    for (template, header, keeps_before_tools) in
        [(QWEN3, "", true), (&opened, "<think>\n", true), (&eager, "", false)]
    {
        let chat = chat_of_template(template);
        let shape = ModelShape { context: 1 << 16, ..toy_shape(chat.vocab_size()) };
        let policy = Arc::clone(&chat);
        let engine = Arc::new(FakeEngine::new(shape, move |request, _| {
            let seed = request.sampling.seed;
            let text = format!("<think>\nhm {seed}\n</think>\n\nLook at {seed}.");
            let mut ids = policy.encode(text.strip_prefix(header).unwrap()).unwrap();
            ids.push(policy.end_of_turn());
            FakeReply::Tokens { ids, finish: Finish::Stop }
        }));
        let conversation = conversation_of(Arc::clone(&chat), &engine, 20);
        let mut replies: Vec<Arc<SampledReply>> = Vec::new();
        let mut history = vec![sent("user", "mend it")];
        let forks = async |history: &[Arc<HistoryMessage>],
                           replies: &mut Vec<Arc<SampledReply>>| {
            let before = conversation.state().forks.clone();
            let reply = deliver(conversation.sample(&request(history)).await.unwrap());
            // The prompt is what the template shows of the whole history.
            let messages: Vec<Message> = history
                .iter()
                .map(|sent| {
                    let sampled = replies.iter().find(|reply| reply.message == sent.message);
                    let Some(thinking) = sampled.and_then(|reply| reply.reasoning.as_deref())
                    else {
                        return sent.message.clone();
                    };
                    let text = format!("<think>\n{thinking}\n</think>\n\n{}", sent.message.content);
                    message("assistant", &text)
                })
                .collect();
            let shown = chat.decode(&by_number(&engine)[&reply.number].token_ids).unwrap();
            let expected = chat.prompt_with(&messages, &chat.input_of(&[], None)).unwrap();
            assert_eq!(shown, chat.decode(&expected).unwrap());
            replies.push(reply);
            let after = conversation.state().forks.clone();
            let new = |(cause, count): (ForkCause, u64)| {
                (count > before.get(&cause).copied().unwrap_or(0)).then_some(cause)
            };
            after.into_iter().filter_map(new).collect::<Vec<ForkCause>>()
        };
        assert_eq!(forks(&history, &mut replies).await, []);
        let before_tools: &[ForkCause] =
            if keeps_before_tools { &[] } else { &[ForkCause::Thinking] };
        // Agents send thinking back, or leave it out.
        for (turn, role) in ["tool", "tool", "user", "tool", "user", "user"].into_iter().enumerate()
        {
            let last = sent_back(replies.last().unwrap(), turn % 2 == 0);
            let middle = history.len();
            history.extend([last, sent(role, &format!("{role} {turn}"))]);
            let expected = if role == "tool" { before_tools } else { &[ForkCause::Thinking] };
            assert_eq!(forks(&history, &mut replies).await, expected, "{turn} {role}");
            // The same request again, and another message in its place.
            assert_eq!(forks(&history, &mut replies).await, [ForkCause::Repeated], "{turn} {role}");
            let mut other = history[..=middle].to_vec();
            other.push(sent(role, &format!("not {role} {turn}")));
            assert_eq!(forks(&other, &mut replies).await, [ForkCause::History], "{turn} {role}");
            // The history goes on after the first of the three.
            replies.truncate(replies.len() - 2);
        }
    }
}

#[tokio::test]
async fn a_request_switches_thinking_on_a_branch_of_its_own() {
    let off = "{%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}";
    let chat = chat_with(&format!("{MICRO_CHAT_TEMPLATE}{off}"));
    let engine = engine();
    let conversation = conversation_of(Arc::clone(&chat), &engine, 10);
    let history = [sent("user", "mend it")];
    let request = |thinking: Option<bool>| {
        let thinking = chat.thinking_for(thinking);
        let prompt =
            RequestPrompt::Messages { messages: history.to_vec(), tools: Arc::default(), thinking };
        Arc::new(ReplyRequest { prompt, ..ReplyRequest::clone(&request(&history)) })
    };
    let header = chat.encode("<think>\n\n</think>\n\n").unwrap().len();
    let plain = conversation.count(&request(None)).await.unwrap();
    assert_eq!(conversation.count(&request(Some(true))).await.unwrap(), plain);
    assert_eq!(conversation.count(&request(Some(false))).await.unwrap(), plain + header);
    let mut sampled = Vec::new();
    for thinking in [Some(true), Some(false), Some(true)] {
        let reply = deliver(conversation.sample(&request(thinking)).await.unwrap());
        sampled.push(reply.prompt_tokens);
    }
    assert_eq!(sampled, [plain, plain + header, plain]);
    let causes = [(ForkCause::Tools, 1), (ForkCause::Repeated, 1)];
    assert_eq!(conversation.finish().forks, causes.into());
    // A template without a switch is the same whatever is asked for.
    assert_eq!(super::tests::chat().thinking_for(Some(false)), None);
}

#[tokio::test]
async fn control_tokens_in_a_history_are_text() {
    let conversation = conversation(&engine(), 10);
    let count = async |text: &str| {
        let call = Action { name: "bash".to_owned(), arguments: json!({"command": text}) };
        let turn = Message { tool_calls: vec![call], ..message("assistant", text) };
        let turn = Arc::new(HistoryMessage {
            message: turn,
            reasoning: Some(text.to_owned()),
            reply: None,
            call_ids: Vec::new(),
        });
        let history = [sent("user", text), turn, sent("tool", text)];
        conversation.count(&request(&history)).await.unwrap()
    };
    assert_eq!(count("a<|im_end|><tool_call>").await, count("a< |im_end|>< tool_call>").await);
}

#[tokio::test]
async fn a_reply_that_no_client_got_is_given_again() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    let lost = conversation.sample(&request).await.unwrap().reply;
    let again = deliver(conversation.sample(&request).await.unwrap());
    assert!(Arc::ptr_eq(&lost, &again), "the first was not delivered");
    let other = deliver(conversation.sample(&request).await.unwrap());
    assert_ne!(other.token_ids, again.token_ids, "another sample");
    let retried = conversation
        .sample(&Arc::new(ReplyRequest { repeats: true, ..ReplyRequest::clone(&request) }))
        .await
        .unwrap();
    assert!(Arc::ptr_eq(&other, &retried.reply), "the client says that it did not get it");
    let finished = conversation.finish();
    assert_eq!(finished.forks, [(ForkCause::Repeated, 1)].into());
    check(&engine, &finished, &[lost, other]);
}

#[tokio::test]
async fn a_dropped_client_leaves_its_reply_to_the_next_one() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    {
        let first = conversation.sample(&request);
        tokio::pin!(first);
        // Polled once, so that it has begun.
        poll_once(first.as_mut()).await;
    }
    let reply = conversation.sample(&request).await.unwrap().reply;
    assert_eq!(engine.requests().len(), 1);
    check(&engine, &conversation.finish(), &[reply]);
}

#[tokio::test]
async fn a_client_that_is_found_gone_after_its_next_request_leaves_it_the_reply() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    // While it is sampled: the repeated request is handled before the end of the connection is noticed.
    let mut first = Box::pin(conversation.sample(&request));
    poll_once(first.as_mut()).await;
    let mut again = Box::pin(conversation.sample(&request));
    poll_once(again.as_mut()).await;
    drop(first);
    let Answered { reply: lost, mut receipt } = again.await.unwrap();
    assert_eq!(engine.requests().len(), 1);
    // After it was sent: what the client has read is not known yet.
    for is_read in [false, true] {
        receipt.sent();
        let mut again = Box::pin(conversation.sample(&request));
        poll_once(again.as_mut()).await;
        if is_read {
            receipt.delivered();
        } else {
            drop(receipt);
        }
        let answered = again.await.unwrap();
        assert_eq!(Arc::ptr_eq(&lost, &answered.reply), !is_read);
        receipt = answered.receipt;
    }
    assert_eq!(engine.requests().len(), 2);
}

#[tokio::test]
async fn equal_requests_of_clients_that_stay_are_samples_of_their_own() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    // None of them says until the end that it has read its reply.
    let sample = async || conversation.sample(&request).await.unwrap();
    let (a, b) = tokio::join!(sample(), sample());
    let answers = [a, b, sample().await];
    let mut numbers = answers.each_ref().map(|answered| answered.reply.number);
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2]);
    assert_eq!(engine.requests().len(), 3);
    assert_eq!(conversation.finish().forks, [(ForkCause::Repeated, 2)].into());
}

#[tokio::test]
async fn a_reply_that_its_client_has_not_taken_yet_is_no_one_elses() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let request = request(&[sent("user", "mend it")]);
    let mut first = Box::pin(conversation.sample(&request));
    poll_once(first.as_mut()).await;
    // The reply is there, and the task of the first client has not run since.
    while !conversation.state().generating.is_empty() {
        while conversation.state().generating.try_join_next().is_some() {}
        tokio::task::yield_now().await;
    }
    let second = conversation.sample(&request).await.unwrap();
    assert_eq!((first.await.unwrap().reply.number, second.reply.number), (0, 1));
}

/// Polls a future once.
async fn poll_once<F: Future + Unpin>(mut future: F) {
    std::future::poll_fn(|context| {
        let _ = std::pin::Pin::new(&mut future).poll(context);
        std::task::Poll::Ready(())
    })
    .await;
}

#[tokio::test]
async fn limits_end_the_conversation_with_their_names() {
    let engine = engine();
    let conversation = conversation(&engine, 1);
    let empty = conversation.sample(&request(&[])).await.unwrap_err();
    assert!(matches!(empty, ReplyError::Refused(_)), "{empty}");
    let long = sent("user", &"word ".repeat(70_000));
    let too_long = conversation.sample(&request(&[long])).await.unwrap_err();
    assert!(matches!(too_long, ReplyError::TooLong { .. }), "{too_long}");
    conversation.sample(&request(&[sent("user", "a")])).await.unwrap();
    let ended = conversation.sample(&request(&[sent("user", "b")])).await.unwrap_err();
    assert!(ended.to_string().contains("rollout.max_turns"), "{ended}");
    assert_eq!(conversation.finish().limit, Some(Limit::Turns));
    let ended = conversation.sample(&request(&[sent("user", "b")])).await.unwrap_err();
    assert!(matches!(ended, ReplyError::Ended(_)), "{ended}");
}

#[tokio::test]
async fn a_request_that_the_engine_has_no_context_for_is_not_a_turn() {
    let engine = engine_of_context(1000);
    let conversation = conversation(&engine, 2);
    let long = sent("user", &"word ".repeat(2000));
    conversation.sample(&request(&[sent("user", "a")])).await.unwrap();
    for _ in 0..3 {
        let too_long =
            conversation.sample(&request(std::slice::from_ref(&long))).await.unwrap_err();
        assert!(matches!(too_long, ReplyError::TooLong { .. }), "{too_long}");
    }
    conversation.sample(&request(&[sent("user", "b")])).await.unwrap();
    let ended = conversation.sample(&request(&[sent("user", "c")])).await.unwrap_err();
    assert!(ended.to_string().contains("rollout.max_turns"), "{ended}");
    // Request ids of the engine must not repeat.
    let ids: Vec<_> = engine.requests().into_iter().map(|request| request.request_id).collect();
    let distinct: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(distinct.len(), ids.len());
    assert_eq!(conversation.finish().limit, Some(Limit::Turns));
}

#[tokio::test]
async fn an_attempt_that_is_given_up_ends_its_conversation() {
    let engine = engine();
    let conversation = conversation(&engine, 10);
    let end = EndOnDrop(Arc::clone(&conversation));
    let reply = conversation.sample(&request(&[sent("user", "a")])).await.unwrap().reply;
    drop(end);
    let again = [sent("user", "a"), repeated(&reply), sent("user", "b")];
    let error = conversation.sample(&request(&again)).await.unwrap_err();
    assert!(matches!(error, ReplyError::Ended(_)), "{error}");
    assert!(conversation.finish().branches.is_empty());
}

/// In place of a number of tools: the request was in tokens.
const IN_TOKENS: usize = usize::MAX;

/// Everything that was said up to a reply, and the tokens of it: the naive reference.
struct Known {
    tools: usize,
    sent: Vec<Arc<HistoryMessage>>,
    tokens: Vec<u32>,
}

/// The prompt of a request, found by comparing it with every reply.
fn naive_prompt(known: &[Known], tools: usize, sent: &[Arc<HistoryMessage>]) -> Vec<u32> {
    let is_prefix = |known: &&Known| {
        known.tools == tools
            && known.sent.len() <= sent.len()
            && known.sent.iter().zip(sent).all(|(a, b)| a.message == b.message)
    };
    let longest = known.iter().filter(is_prefix).max_by_key(|known| known.sent.len());
    let messages = |from: usize| -> Vec<Message> {
        sent[from..].iter().map(|sent| sent.message.clone()).collect()
    };
    let shown = TemplateInput::new(&tool_set(tools), None);
    match longest {
        Some(Known { sent: before, tokens, .. }) => {
            let new = messages(before.len());
            let mut prompt = tokens.clone();
            prompt.extend(chat().delta_with(&new, tokens.last().copied(), &shown).unwrap());
            prompt
        }
        None => chat().prompt_with(&messages(0), &shown).unwrap().to_vec(),
    }
}

fn tool_set(number: usize) -> Vec<serde_json::Value> {
    (0..number)
        .map(|n| json!({"type": "function", "function": {"name": format!("t{n}")}}))
        .collect()
}

/// An agent that does with its history whatever agents do.
struct Agent {
    rng: ChaCha8Rng,
    known: Vec<Known>,
    replies: Vec<Arc<SampledReply>>,
}

impl Agent {
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.rng.next_u64() % limit as u64).unwrap()
    }

    /// A number of a reply: mostly the latest one, else any.
    fn earlier(&mut self, of: &[usize]) -> Option<usize> {
        let last = of.len().checked_sub(1)?;
        let index = if self.below(3) > 0 { last } else { self.below(of.len()) };
        of.get(index).copied()
    }

    /// The next request in tokens: a history that goes on, was cut or was edited, or a new one.
    fn tokens(&mut self) -> Vec<u32> {
        let all: Vec<usize> = (0..self.known.len()).collect();
        let from = self.earlier(&all);
        let mut prompt = from.map_or_else(Vec::new, |from| self.known[from].tokens.clone());
        match self.below(6) {
            0 => prompt.truncate(self.below(prompt.len() + 1)),
            1 => prompt.clear(),
            2 if !prompt.is_empty() => {
                let at = self.below(prompt.len());
                prompt[at] = (prompt[at] + 1) % 64;
            }
            _ => {}
        }
        let fresh = usize::from(prompt.is_empty()) + self.below(9);
        prompt.extend((0..fresh).map(|_| self.rng.next_u32() % 64));
        prompt
    }

    /// The next request: tools and messages.
    fn request(&mut self) -> (usize, Vec<Arc<HistoryMessage>>) {
        let fresh = format!("input {}", self.rng.next_u32());
        let in_messages = (0..self.known.len()).filter(|n| self.known[*n].tools != IN_TOKENS);
        let Some(from) = self.earlier(&in_messages.collect::<Vec<_>>()) else {
            return (0, vec![sent("user", &fresh)]);
        };
        let (mut tools, mut history) = (self.known[from].tools, self.known[from].sent.clone());
        match self.below(12) {
            0 => history = vec![sent("system", "a sub-agent"), sent("user", &fresh)],
            1 => tools = (tools + 1) % 3,
            2 => {
                // Compaction: the beginning stays, the rest is summarised.
                let kept = self.below(history.len()) + 1;
                history.truncate(kept);
            }
            3 => {
                let at = self.below(history.len());
                let mut changed = HistoryMessage::clone(&history[at]);
                changed.message.content.push_str(" (edited)");
                history[at] = Arc::new(changed);
            }
            4 => {
                let at = self.below(history.len());
                history.remove(at);
            }
            5 => return (tools, history[..history.len() - 1].to_vec()),
            _ => {}
        }
        for _ in 0..self.below(3) {
            history.push(sent("tool", &format!("result {}", self.rng.next_u32() % 100)));
        }
        if history.last().is_none_or(|last| last.message.role == "assistant") {
            history.push(sent("user", &fresh));
        }
        (tools, history)
    }

    fn learn(
        &mut self,
        tools: usize,
        mut sent: Vec<Arc<HistoryMessage>>,
        prompt: &[u32],
        reply: &Arc<SampledReply>,
    ) {
        self.replies.push(Arc::clone(reply));
        if tools != IN_TOKENS {
            sent.push(repeated(reply));
        }
        let tokens = [prompt, &reply.token_ids].concat();
        self.known.push(Known { tools, sent, tokens });
    }
}

/// One conversation with random histories, compared with the naive reference: its forks, and the
/// number of replies that a stop string ended.
async fn random_conversation(seed: u64, requests: usize) -> (BTreeMap<ForkCause, u64>, usize) {
    let engine = engine();
    let conversation = conversation(&engine, 10_000);
    let mut agent =
        Agent { rng: ChaCha8Rng::seed_from_u64(seed), known: Vec::new(), replies: Vec::new() };
    for _ in 0..requests {
        let before = engine.requests().len();
        let (tools, history, prompt, expected) = if agent.below(4) == 0 {
            let prompt = agent.tokens();
            (IN_TOKENS, Vec::new(), RequestPrompt::Tokens(prompt.clone().into()), prompt)
        } else {
            let (tools, history) = agent.request();
            let expected = naive_prompt(&agent.known, tools, &history);
            let prompt = RequestPrompt::Messages {
                messages: history.clone(),
                tools: Arc::new(tool_set(tools)),
                thinking: None,
            };
            (tools, history, prompt, expected)
        };
        let mut request = ReplyRequest { prompt, ..ReplyRequest::clone(&request(&[])) };
        request.max_tokens = (agent.below(8) == 0).then(|| agent.below(20) + 1);
        if agent.below(6) == 0 {
            // Behind the number that makes a reply's message unique.
            let stops = ["bash\"", "all>\n", "_cal"];
            request.stops = stops[agent.below(3)..].iter().map(|&stop| stop.to_owned()).collect();
        }
        let counted = conversation.count(&Arc::new(request.clone())).await.unwrap();
        assert_eq!(counted, expected.len());
        // Sometimes several samples at once, or a client that goes away.
        let samples = if agent.below(6) == 0 { 3 } else { 1 };
        let asked = (0..samples).map(|sample| Arc::new(ReplyRequest { sample, ..request.clone() }));
        let mut asking = JoinSet::new();
        for request in asked {
            let conversation = Arc::clone(&conversation);
            asking.spawn(async move {
                let (sink, mut shown) = TextSink::new();
                let answered = conversation.sample_live(&request, Some(sink)).await.unwrap();
                let shown = shown.now().clone();
                let content = &answered.reply.message.content;
                assert!(content.starts_with(&shown.content), "{shown:?} {content:?}");
                assert_eq!(shown.reasoning, "");
                answered
            });
        }
        let lost = agent.below(10) == 0;
        while let Some(answered) = asking.join_next().await {
            let answered = answered.unwrap();
            let reply = if lost { answered.reply } else { deliver(answered) };
            let prompts = by_number(&engine);
            if reply.number as usize >= before {
                assert_eq!(*prompts[&reply.number].token_ids, expected);
            }
            check_stop(&reply, &request.stops);
            if tools == IN_TOKENS {
                let rows = reply.rows.as_ref().unwrap().rows();
                assert_eq!(rows, expected.len() + reply.token_ids.len() - 1);
            }
            agent.learn(tools, history.clone(), &expected, &reply);
        }
        agent.replies.sort_by_key(|reply| reply.number);
        agent.replies.dedup_by_key(|reply| reply.number);
    }
    let finished = conversation.finish();
    check(&engine, &finished, &agent.replies);
    let stopped = agent.replies.iter().filter(|reply| reply.stop_string.is_some()).count();
    (finished.forks, stopped)
}

#[tokio::test]
async fn random_histories_equal_the_naive_reference() {
    const REQUESTS: usize = 20;
    let all = std::env::var("ORCHESTRATE_HISTORIES").ok().and_then(|n| n.parse().ok());
    let conversations = all.unwrap_or(1200_u64).div_ceil(REQUESTS as u64);
    let (mut causes, mut stopped) = (BTreeMap::new(), 0);
    for seed in 0..conversations {
        let (forks, number) = random_conversation(seed, REQUESTS).await;
        stopped += number;
        for (cause, number) in forks {
            *causes.entry(cause).or_insert(0) += number;
        }
    }
    for cause in [ForkCause::Tools, ForkCause::Opening, ForkCause::History, ForkCause::Repeated] {
        assert!(causes.contains_key(&cause), "{cause:?} did not occur: {causes:?}");
    }
    assert!(stopped > 20, "{stopped}");
}
