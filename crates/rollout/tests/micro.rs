//! Scripted micro experts through tokenizer, engine, tools and diff: the runner reads what they
//! wrote, and its observations are those that the experts had.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use camino::Utf8Path;
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, ChatModel, ChatTemplate, Episodes, ExpertEpisode, ExpertTurn, GradingRules,
    MICRO_CHAT_TEMPLATE, RolloutSection, grade_by_summary, opening_messages, train_tokenizer,
};
use orchestrate_tasks::{Task, expert, micro, patch};
use orchestrate_testkit::{FakeEngine, FakeExec, FakeReply, FakeSandboxes, FakeTree, toy_shape};
use orchestrate_types::Outcome;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

fn experts(count: usize) -> Vec<(Task, ExpertEpisode)> {
    let counts = micro::MicroCounts { train: count, held_out: 0, held_out_families: 0 };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let episode = |task: Task| {
        let turns = expert::episode(&task, &mut rng).unwrap();
        let turn = |turn: expert::ExpertTurn| ExpertTurn {
            content: String::new(),
            calls: vec![Action { name: turn.action.name, arguments: turn.action.arguments }],
            observations: vec![turn.observation],
            weight: turn.weight,
        };
        let prompt = opening_messages(None, &task.problem_statement);
        let turns = turns.into_iter().map(turn).collect();
        (task, ExpertEpisode { prompt, turns })
    };
    micro::generate(1, counts).into_iter().map(episode).collect()
}

fn chat(experts: &[(Task, ExpertEpisode)]) -> ChatModel {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8Path::from_path(folder.path()).unwrap();
    let template = ChatTemplate::new(MICRO_CHAT_TEMPLATE).unwrap();
    let corpus: Vec<String> = experts.iter().map(|(_, e)| e.text(&template).unwrap()).collect();
    let entries = train_tokenizer(corpus.into_iter(), 1024, MICRO_CHAT_TEMPLATE, path).unwrap();
    assert_eq!(entries, 1024);
    ChatModel::load(path).unwrap()
}

fn numbered(tree: &FakeTree, path: &str) -> FakeExec {
    let text = String::from_utf8_lossy(&tree[path].1);
    let lines = text.lines().enumerate().map(|(n, line)| format!("{:6}\t{line}\n", n + 1));
    FakeExec::new(0, lines.collect::<String>())
}

fn failures(output: &str) -> FakeExec {
    match output.strip_prefix("exit 1\n") {
        Some(output) => FakeExec::new(1, output),
        None => FakeExec::new(0, output),
    }
}

#[tokio::test(start_paused = true)]
async fn replayed_micro_experts_reproduce_their_tokens_and_the_gold_change() {
    let experts = experts(300);
    let chat = Arc::new(chat(&experts));
    let mut tokens = 0;
    for (task, episode) in experts.iter().take(40) {
        let data = episode.supervised_example(&chat, 0.25).unwrap();
        tokens += data.token_ids.len();
        let turns: Vec<Vec<u32>> =
            episode.turns.iter().map(|t| chat.assistant("", &t.calls).unwrap()).collect();
        let engine = FakeEngine::new(toy_shape(chat.vocab_size()), move |_, call| {
            FakeReply::Tokens { ids: turns[call].clone(), finish: Finish::Stop }
        });
        let observations: Vec<String> = episode
            .turns
            .iter()
            .filter(|t| t.calls[0].arguments["command"] == micro::RUN_COMMAND)
            .map(|t| t.observations[0].clone())
            .collect();
        let runs = std::sync::Mutex::new(observations.into_iter());
        let sandboxes =
            FakeSandboxes::new(move |tree, script| match script.strip_prefix("cat -n ") {
                Some(path) => numbered(tree, path),
                None if script == micro::RUN_COMMAND => {
                    failures(&runs.lock().unwrap().next().unwrap())
                }
                None => FakeExec::new(1, "no summary\n"),
            });
        let plan = RolloutSection::default().check().unwrap();
        let runner = common::runner(
            Arc::new(engine),
            Arc::new(sandboxes),
            (Arc::clone(&chat), plan),
            GradingRules::new(grade_by_summary),
        );
        let report = runner.run(common::request(task.clone()), &CancellationToken::new()).await;
        // The fake cannot run the hidden tests; everything else is as in a real episode.
        assert_eq!(report.outcome, Outcome::Scored { reward: 0.0 });
        assert_eq!(report.trajectory().unwrap().token_ids(), data.token_ids, "{}", task.id);
        for (turn, expert) in report.turns.iter().zip(&episode.turns) {
            assert_eq!(turn.actions, expert.calls);
            assert_eq!(turn.observation, expert.observations[0]);
        }
        let by = |patch: &str| patch::apply(&task.agent_files, patch).unwrap();
        assert_eq!(by(&report.patch), by(&task.gold_patch), "{}", task.id);
    }
    assert!(tokens / 40 < 240, "{} tokens in an expert episode", tokens / 40);
}
