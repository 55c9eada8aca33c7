//! A server of words alone: what it is sent, and what is made of its answers.

use crate::server::{Reply, options, request, serve};
use orchestrate_engine::{
    ChatClient, ChatMessage, ChatTurn, ClientOptions, Conversation, Engine as _, EngineErrorKind,
    EngineKind, Finish, GenerateRequest, Worker as _,
};
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

fn named(url: &str) -> ClientOptions {
    ClientOptions { served_model: Some("org/coder".to_owned()), ..options(url) }
}

fn asked() -> GenerateRequest {
    let messages = [("system", "mend"), ("user", "it is broken")].map(|(role, content)| {
        ChatMessage { role: role.into(), content: content.into(), ..ChatMessage::default() }
    });
    let tools = vec![json!({"type": "function", "function": {"name": "bash"}})];
    let conversation =
        Conversation { messages: Arc::new(messages.to_vec()), tools: Arc::new(tools) };
    GenerateRequest { conversation: Some(conversation), ..request(vec![7; 100], 64, None) }
}

fn models(context: Option<usize>) -> Reply {
    let model = json!({"id": "org/coder", "object": "model", "max_model_len": context});
    Reply::Now(200, json!({"object": "list", "data": [{"id": "other"}, model]}).to_string())
}

fn said(content: &str, finish: &str) -> Reply {
    let message = json!({"role": "assistant", "content": content});
    let body = json!({
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}},
    });
    Reply::Now(200, body.to_string())
}

/// A client of a server that answers every conversation alike.
async fn client(
    tasks: &mut JoinSet<()>,
    context: Option<usize>,
    answer: impl Fn(&Value) -> Reply + Send + Sync + 'static,
) -> (ChatClient, mpsc::Receiver<crate::server::Seen>) {
    let (url, seen) = serve(tasks, move |path, body| match path {
        "/v1/models" => models(context),
        "/v1/chat/completions" => answer(body),
        _ => Reply::Now(404, "{}".to_owned()),
    })
    .await;
    // As such servers' addresses are often written.
    (ChatClient::new(named(&format!("{url}/v1"))).unwrap(), seen)
}

#[tokio::test]
async fn a_conversation_is_sent_as_messages_and_comes_back_as_words() {
    let mut tasks = JoinSet::new();
    let (client, mut seen) = client(&mut tasks, Some(130), |_| said("hello", "stop")).await;
    let info = client.info().await.unwrap();
    assert_eq!((info.context, info.model_path.as_str()), (Some(130), "org/coder"));
    assert!(!info.routed_experts && client.takes_messages());
    let reply = client.generate(asked()).await.unwrap();
    assert_eq!((reply.finish, reply.cached_tokens), (Finish::Stop, 64));
    assert!(reply.output_ids.is_empty() && reply.logprobs.is_empty());
    assert_eq!(reply.turn.unwrap().content, "hello");

    assert_eq!(seen.recv().await.unwrap().path, "/v1/models");
    let sent = seen.recv().await.unwrap();
    assert_eq!(sent.path, "/v1/chat/completions");
    assert_eq!(sent.headers["authorization"], "Bearer key-1");
    assert_eq!(sent.headers["x-session-id"], "t000001.02-a01");
    let expected = json!({
        "model": "org/coder",
        "messages": [
            {"role": "system", "content": "mend"},
            {"role": "user", "content": "it is broken"},
        ],
        "tools": [{"type": "function", "function": {"name": "bash"}}],
        "temperature": 1.0,
        "top_p": 1.0,
        // What the context has room for.
        "max_tokens": 30,
        "seed": i64::MAX,
    });
    assert_eq!(sent.body, expected);
}

#[tokio::test]
async fn a_conversation_without_room_ends_and_is_no_failure() {
    let mut tasks = JoinSet::new();
    let words = "This model's maximum context length is 128 tokens. However, you requested 164";
    let body = json!({"error": {"message": words, "code": 400}}).to_string();
    let (client, _seen) = client(&mut tasks, None, move |_| Reply::Now(400, body.clone())).await;
    let reply = client.generate(asked()).await.unwrap();
    assert_eq!((reply.finish, reply.turn), (Finish::Length, Some(ChatTurn::default())));
}

#[tokio::test]
async fn a_reply_is_given_the_room_that_there_is_by_the_servers_count() {
    let mut tasks = JoinSet::new();
    let (client, mut seen) = client(&mut tasks, None, |asked| {
        if asked["max_tokens"].as_u64().unwrap() <= 5 {
            return said("short", "length");
        }
        Reply::Now(400, r#"{"message": "longer than the context length"}"#.to_owned())
    })
    .await;
    let reply = client.generate(asked()).await.unwrap();
    assert_eq!((reply.finish, reply.turn.unwrap().content.as_str()), (Finish::Length, "short"));
    let mut tried = Vec::new();
    for _ in 0..3 {
        tried.push(seen.recv().await.unwrap().body["max_tokens"].as_u64().unwrap());
    }
    assert_eq!(tried, [64, 16, 4]);
}

#[tokio::test]
async fn errors_say_what_to_do_with_the_call() {
    for (answer, retry) in [
        (|| Reply::Now(401, r#"{"error": {"message": "bad key"}}"#.to_owned()), Retry::Never),
        (|| Reply::Busy(429, "7"), Retry::After(Duration::from_secs(7))),
        (|| Reply::Now(200, "<html>".to_owned()), Retry::Now),
        (|| said("x", "error"), Retry::Now),
    ] as [(fn() -> Reply, Retry); 4]
    {
        let mut tasks = JoinSet::new();
        let (client, _seen) = client(&mut tasks, None, move |_| answer()).await;
        let error = client.generate(asked()).await.unwrap_err();
        assert_eq!(error.retry(), retry, "{error}");
        assert_eq!(error.call, "/v1/chat/completions");
    }
    let mut tasks = JoinSet::new();
    let (client, _seen) = client(&mut tasks, None, |_| Reply::Never(None)).await;
    let late = GenerateRequest { deadline: Duration::from_millis(50), ..asked() };
    let error = client.generate(late).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "{error}");
    let tokens = request(vec![7; 100], 64, None);
    assert_eq!(client.generate(tokens).await.unwrap_err().retry(), Retry::Never);
}

#[tokio::test]
async fn a_chat_server_is_asked_by_name_and_cannot_be_given_weights() {
    let mut tasks = JoinSet::new();
    let (client, _seen) = client(&mut tasks, None, |_| said("ok", "stop")).await;
    let report = client.probe().await.unwrap();
    assert_eq!((report.findings.len(), report.info.policy_version), (0, Some(PolicyVersion(0))));
    client.sync_weights("org/coder".into(), PolicyVersion(0)).await.unwrap();
    let error = client.sync_weights("/checkpoint".into(), PolicyVersion(1)).await.unwrap_err();
    assert_eq!(error.retry(), Retry::Never);

    let (url, _seen) = serve(&mut tasks, |_, _| models(None)).await;
    let wrong = ClientOptions { served_model: Some("coder".to_owned()), ..options(&url) };
    let error = EngineKind::Openai.connect(wrong, Duration::ZERO).await.unwrap_err().to_string();
    assert!(error.contains("engine.served_model") && error.contains("other, org/coder"), "{error}");
    let error = EngineKind::Openai.client(options(&url)).unwrap_err().to_string();
    assert!(error.contains("engine.served_model"), "{error}");

    // One that does not say what it serves is asked all the same; what it refuses is a finding.
    let refuses = |path: &str, _: &Value| match path {
        "/v1/chat/completions" => Reply::Now(404, r#"{"message": "no such model"}"#.to_owned()),
        _ => Reply::Now(404, "{}".to_owned()),
    };
    let (url, _seen) = serve(&mut tasks, refuses).await;
    let (client, _) = EngineKind::Openai.connect(named(&url), Duration::ZERO).await.unwrap();
    let report = client.probe().await.unwrap();
    let found: Vec<String> = report.refusals().map(ToString::to_string).collect();
    assert!(found.len() == 1 && found[0].contains("no such model"), "{found:?}");
}
