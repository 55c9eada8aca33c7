//! The vendors' own clients (the Python packages `openai`, `anthropic` and `openai-agents`) against
//! the gateway with a scripted model. `ORCHESTRATE_AGENTS_PYTHON` names a Python that has them.

use crate::scripted::{ScriptedReply, ScriptedSampler, ScriptedTurn};
use crate::server::Server;
use orchestrate_e2e::skip;
use orchestrate_gateway::{GatewayOptions, Message, Role, SampleError, ToolCall};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::Command;

const THINKING: &str = "Two numbers:\nI call the tool.";
const ARGUMENTS: &str = "{\"a\": 2,  \"b\": 3}";

/// The Python of the clients; `None`, reported as a skip, where it is absent.
#[track_caller]
fn python() -> Option<String> {
    let python = std::env::var("ORCHESTRATE_AGENTS_PYTHON").unwrap_or("python3".into());
    let able = std::process::Command::new(&python)
        .args(["-c", "import openai, anthropic, agents"])
        .output();
    if able.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    let why = "ORCHESTRATE_AGENTS_PYTHON is not a Python with openai, anthropic and openai-agents";
    skip::skip("agents-python", why);
    None
}

/// Calls the tool once, then reports its result; the first reply is slower than a keep-alive.
fn adder() -> Arc<ScriptedSampler> {
    ScriptedSampler::new(|request, _| {
        if request.messages.iter().any(|message| message.role == Role::Tool) {
            let content = "The sum is 5.";
            return ScriptedTurn::Reply(ScriptedReply { content, ..ScriptedReply::default() });
        }
        let reply = ScriptedReply {
            reasoning: Some(THINKING),
            content: "I add them.",
            calls: vec![("add", ARGUMENTS.to_owned())],
            finish: None,
        };
        ScriptedTurn::After(Duration::from_millis(100), Box::new(ScriptedTurn::Reply(reply)))
    })
}

/// Runs a scenario of `clients.py` against a sampler.
async fn run(python: &str, scenario: &str, sampler: Arc<ScriptedSampler>) -> Value {
    let keep_alive = Duration::from_millis(30);
    let options = GatewayOptions { keep_alive, ..GatewayOptions::default() };
    let server = Server::start(sampler, options).await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire/clients.py");
    let mut command = Command::new(python);
    command.arg(script).args([scenario, &server.url("")]).kill_on_drop(true);
    command.env_remove("http_proxy").env_remove("HTTP_PROXY").env("NO_PROXY", "*");
    let output = tokio::time::timeout(Duration::from_mins(2), command.output());
    let output = output.await.unwrap().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{scenario}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What the client must send back of the first reply.
fn sampled() -> Message {
    Message {
        reasoning: Some(THINKING.into()),
        tool_calls: vec![ToolCall {
            id: "call_0".into(),
            name: "add".into(),
            arguments: ARGUMENTS.into(),
        }],
        ..Message::new(Role::Assistant, "I add them.")
    }
}

/// Runs a scenario with the adder: two requests, the second with the first reply as it was sampled
/// and the tool's result, both delivered.
async fn adds(python: &str, scenario: &str, keeps_thinking: bool) -> Value {
    let sampler = adder();
    let seen = run(python, scenario, sampler.clone()).await;
    assert_eq!(seen["text"], "The sum is 5.", "{scenario}");
    let requests = sampler.requests();
    assert_eq!(requests.len(), 2, "{scenario}");
    let [.., assistant, result] = requests[1].messages.as_slice() else {
        panic!("{scenario}: {requests:?}")
    };
    let mut expected = sampled();
    if !keeps_thinking {
        expected.reasoning = None;
    }
    assert_eq!(assistant, &expected, "{scenario}");
    assert_eq!(result, &Message::tool("call_0", "5"), "{scenario}");
    let before = requests[1].messages.len() - 2;
    assert_eq!(requests[0].messages, requests[1].messages[..before], "{scenario}");
    assert_eq!(requests[0].tools, requests[1].tools, "{scenario}");
    assert_eq!(sampler.delivered().await, [true, true], "{scenario}");
    seen
}

#[tokio::test]
async fn the_openai_client_chats() {
    let Some(python) = python() else { return };
    adds(&python, "chat", true).await;
    let seen = adds(&python, "chat-stream", true).await;
    assert_eq!(seen["finish"], "stop");
}

#[tokio::test]
async fn the_openai_client_uses_responses() {
    let Some(python) = python() else { return };
    adds(&python, "responses", true).await;
    let seen = adds(&python, "responses-stream", true).await;
    let events = seen["events"][0].as_array().unwrap();
    for (at, name) in [(0, "response.created"), (events.len() - 1, "response.completed")] {
        assert_eq!(events[at], name);
    }
}

#[tokio::test]
async fn the_anthropic_client_uses_messages() {
    let Some(python) = python() else { return };
    let seen = adds(&python, "messages", true).await;
    assert_eq!((&seen["finish"], &seen["counted"]), (&"end_turn".into(), &14.into()));
    adds(&python, "messages-stream", true).await;
}

#[tokio::test]
async fn the_anthropic_tool_runner_finishes() {
    let Some(python) = python() else { return };
    adds(&python, "tool-runner", true).await;
    adds(&python, "tool-runner-stream", true).await;
}

#[tokio::test]
async fn the_openai_agents_runner_finishes() {
    let Some(python) = python() else { return };
    for (scenario, keeps_thinking) in [("agents-responses", true), ("agents-chat", false)] {
        adds(&python, scenario, keeps_thinking).await;
        let seen = adds(&python, &format!("{scenario}-stream"), keeps_thinking).await;
        let items = seen["items"].as_array().unwrap();
        assert!(items.contains(&"tool_call_output_item".into()), "{items:?}");
    }
}

/// The exception of a call and of a stream, and the number of requests.
async fn failing(python: &str, scenario: &str, error: SampleError) -> ([String; 2], usize) {
    let sampler = ScriptedSampler::new(move |_, _| ScriptedTurn::Fail(error.clone()));
    let seen = run(python, scenario, sampler.clone()).await;
    let text = |field: &str| seen[field].as_str().unwrap().to_owned();
    ([text("call"), text("stream")], sampler.requests().len())
}

#[tokio::test]
async fn the_clients_retry_what_passes_and_nothing_else() {
    let Some(python) = python() else { return };
    for scenario in ["fail-chat", "fail-responses", "fail-anthropic"] {
        let ended = SampleError::Ended("50 turns".into());
        let (raised, requests) = failing(&python, scenario, ended).await;
        for raised in raised {
            assert!(
                raised.starts_with("BadRequestError") && raised.contains("50 turns"),
                "{raised}"
            );
        }
        assert_eq!(requests, 2, "{scenario}: one call, one stream");
        let down = SampleError::Unavailable("no engine is up".into());
        let (raised, requests) = failing(&python, scenario, down).await;
        let name =
            if scenario == "fail-anthropic" { "OverloadedError" } else { "InternalServerError" };
        for raised in raised {
            assert!(raised.starts_with(name) && raised.contains("no engine is up"), "{raised}");
        }
        assert_eq!(requests, 4, "{scenario}: each repeated once");
        let long = SampleError::TooLong { prompt: 20, context: 10 };
        let ([called, streamed], _) = failing(&python, scenario, long).await;
        let words = match scenario {
            "fail-anthropic" => "prompt is too long: 20 tokens > 10 maximum",
            _ => "context_length_exceeded",
        };
        assert!(called.contains(words), "{called}");
        assert!(streamed.contains(words), "{streamed}");
    }
}

#[tokio::test]
async fn the_clients_list_the_model_and_name_content_that_it_cannot_read() {
    let Some(python) = python() else { return };
    let seen = run(&python, "image", ScriptedSampler::writing("hello")).await;
    for error in seen["errors"].as_array().unwrap() {
        let error = error.as_str().unwrap();
        assert!(error.starts_with("BadRequestError"), "{error}");
        assert!(error.contains("messages[0].content[0].type"), "{error}");
    }
    assert_eq!(seen["models"], serde_json::json!(["policy"]));
    assert_eq!(seen["anthropic_models"], seen["models"]);
}
