//! A model behind a chat server that returns only text: it can be evaluated, but not trained.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use orchestrate_e2e::{containers, docker_or_skip, run, stderr};
use orchestrate_tasks::expert::{ExpertTurn, episode};
use orchestrate_tasks::{Split, micro};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::process::Output;
use std::sync::Arc;
use tokio::task::JoinSet;

const TASKS: usize = 4;
const SEED: u64 = 5;

/// The scripted actions for each problem.
type Experts = Arc<Vec<(String, Vec<ExpertTurn>)>>;

/// Scripted experts on the tasks that a run with these counts is evaluated on.
fn experts() -> Experts {
    let counts = micro::MicroCounts { train: 1, held_out: TASKS, held_out_families: TASKS };
    let tasks = micro::generate(SEED, counts).into_iter().filter(|task| task.split != Split::Train);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let plays = tasks.map(|task| {
        let turns = episode(&task, &mut rng).unwrap();
        (task.problem_statement, turns)
    });
    Arc::new(plays.collect())
}

/// The next turn of the addressed expert. Every other expert writes its calls as text, as behind a
/// server that does not parse them.
async fn converse(
    State(experts): State<Experts>,
    Json(asked): Json<Value>,
) -> Result<Json<Value>, (StatusCode, String)> {
    let refuse = |message: String| (StatusCode::BAD_REQUEST, message);
    let messages = asked["messages"].as_array().unwrap();
    let last = messages.last().unwrap();
    // The form that hosted servers require.
    for (at, message) in messages.iter().enumerate() {
        for (nth, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            let answer = &messages.get(at + 1 + nth);
            if answer.is_none_or(|a| a["role"] != "tool" || a["tool_call_id"] != call["id"]) {
                return Err(refuse(format!("call {} has no answer", call["id"])));
            }
        }
    }
    let told = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    let answer = |message: Value, finish: &str| {
        let choice = json!({"index": 0, "message": message, "finish_reason": finish});
        Ok(Json(json!({"object": "chat.completion", "choices": [choice]})))
    };
    let known = experts.iter().position(|(problem, _)| told(&messages[0]).contains(problem));
    let Some(index) = known else {
        return answer(json!({"role": "assistant", "content": "Yes."}), "stop");
    };
    if asked["model"] != "expert" || asked["tools"].as_array().is_none_or(Vec::is_empty) {
        return Err(refuse("model or tools are missing".to_owned()));
    }
    let turns = &experts[index].1;
    let turn = messages.iter().filter(|message| message["role"] == "assistant").count();
    if let Some(before) = turn.checked_sub(1)
        && told(last) != turns[before].observation
    {
        return Err(refuse(format!("{last} for {:?}", turns[before].observation)));
    }
    let action = &turns[turn].action;
    let message = if index % 2 == 0 {
        let function = json!({"name": action.name, "arguments": action.arguments.to_string()});
        let call = json!({"id": format!("call_{turn}"), "type": "function", "function": function});
        json!({"role": "assistant", "content": null, "reasoning_content": "hm",
               "tool_calls": [call]})
    } else {
        let call = json!({"name": action.name, "arguments": action.arguments});
        json!({"role": "assistant", "content": format!("<tool_call>\n{call}\n</tool_call>")})
    };
    answer(message, if index % 2 == 0 { "tool_calls" } else { "stop" })
}

/// A server on a free port; it ends with the set.
async fn serve(tasks: &mut JoinSet<()>) -> String {
    let models = || async { Json(json!({"object": "list", "data": [{"id": "expert"}]})) };
    let app = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(converse))
        .with_state(experts());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
    url
}

/// Runs `orchestrate` with a chat server as its engine.
async fn with_chat(url: &str, command: &[&str]) -> Output {
    let mut arguments: Vec<String> = command.iter().map(ToString::to_string).collect();
    for set in [
        "engine.kind=openai",
        &format!("engine.url={url}"),
        "engine.served_model=expert",
        "engine.tokenizer=environments/micro/policy",
        "rollout.max_sequence_tokens=8192",
        "rollout.max_response_tokens=1024",
        "rollout.show_tools=true",
        "tasks.train=1",
        &format!("tasks.held_out={TASKS}"),
        &format!("tasks.seed={SEED}"),
    ] {
        arguments.extend(["--set".to_owned(), set.to_owned()]);
    }
    let running = tokio::task::spawn_blocking(move || {
        run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
    });
    running.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_chat_server_is_evaluated_by_its_text() {
    if !docker_or_skip("docker_chat_server_is_evaluated_by_its_text").unwrap() {
        return;
    }
    let mut tasks = JoinSet::new();
    let (url, folder) = (serve(&mut tasks).await, tempfile::tempdir().unwrap());
    let dir = folder.path().join("eval");
    let run_dir = dir.to_str().unwrap();
    let done = with_chat(&url, &["eval", "--run-dir", run_dir, "--json"]).await;
    assert!(done.status.success(), "{}", stderr(&done));
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    let sums = found["repositories"].as_object().unwrap();
    let sum = |key: &str| sums.values().filter_map(|sum| sum[key].as_u64()).sum::<u64>();
    assert_eq!((sum("episodes"), sum("solved"), sum("broken")), (4, 4, 0), "{found:#}");
    let predictions = std::fs::read_to_string(dir.join("predictions.jsonl")).unwrap();
    assert!(
        predictions.lines().all(|line| line.contains(r#""model_name_or_path":"expert@0""#)),
        "{predictions}"
    );
    // Turns are stored with their calls, whether the server or the client parsed them.
    for (index, thought) in [("00000", true), ("00001", false)] {
        let shown = run(&["show", run_dir, &format!("v00000-{index}.00")]).unwrap();
        assert!(shown.status.success(), "{}", stderr(&shown));
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(text.contains("tokens, by the local tokenizer"), "{text}");
        assert!(text.contains("submit") && text.contains("hm") == thought, "{text}");
    }
    let id = found["run"].as_str().unwrap();
    let left = containers(None, Some(&format!("orchestrate.run={id}"))).unwrap();
    assert_eq!(left, Vec::<String>::new());

    let seen = with_chat(&url, &["doctor", "--json"]).await;
    assert!(seen.status.success(), "{}", stderr(&seen));
    assert!(String::from_utf8_lossy(&seen.stdout).contains("use evaluation only"));
}

#[tokio::test(flavor = "multi_thread")]
async fn training_with_a_chat_server_is_rejected_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let run_dir = dir.to_str().unwrap();
    let url = "http://127.0.0.1:9/v1";
    let compare = ["compare", "configs/quickstart.toml", "--seeds", "1", "--out", run_dir];
    for command in [&["run", "--run-dir", run_dir][..], &["run", "--dry-run"], &compare] {
        let refused = with_chat(url, command).await;
        assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
        let message = stderr(&refused);
        assert!(
            message.contains("engine.kind = openai") && message.contains("orchestrate eval"),
            "{message}"
        );
        assert!(!dir.exists(), "nothing was started");
    }
    let checkpoint = ["eval", "--run-dir", run_dir, "--checkpoint", "environments/micro/policy"];
    let refused = with_chat(url, &checkpoint).await;
    assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--checkpoint") && !dir.exists(), "{}", stderr(&refused));
}
