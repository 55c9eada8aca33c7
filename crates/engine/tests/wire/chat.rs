//! Chat servers: what they are sent, and how their replies are read.

use crate::server::{Reply, SGLANG, VLLM, options, recording, request, serve};
use orchestrate_engine::{
    ChatClient, ChatMessage, ChatServerOptions, ClientOptions, CountedPrompt, Engine as _,
    EngineError, EngineErrorKind, EngineKind, Finish, GenerateRequest, MessagePrompt, MessageReply,
    Prompt, Thinking, TokenLimitField, Worker as _,
};
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

fn named(url: &str) -> ClientOptions {
    ClientOptions { served_model: Some("org/coder".to_owned()), ..options(url) }
}

fn chat_request() -> GenerateRequest {
    let message = |role: &str, content: &str| -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into(), ..ChatMessage::default() }
    };
    let prompt = MessagePrompt {
        messages: Arc::new(vec![message("system", "mend"), message("user", "it is broken")]),
        tools: Arc::new(vec![json!({"type": "function", "function": {"name": "bash"}})]),
        estimated_tokens: 100,
        counted: None,
    };
    GenerateRequest { prompt: Prompt::Messages(prompt), ..request(Vec::new(), 64, None) }
}

async fn complete(
    client: &ChatClient,
    request: GenerateRequest,
) -> Result<MessageReply, EngineError> {
    client.generate(request).await.map(|reply| reply.into_message().unwrap())
}

fn models(context: Option<usize>) -> Reply {
    let model = json!({"id": "org/coder", "object": "model", "max_model_len": context});
    Reply::Now(200, json!({"object": "list", "data": [{"id": "other"}, model]}).to_string())
}

fn completion(content: &str, finish: &str) -> Reply {
    let message = json!({"role": "assistant", "content": content});
    let body = json!({
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}},
    });
    Reply::Now(200, body.to_string())
}

/// A client of a server with one scripted reply to all conversations.
async fn client(
    tasks: &mut JoinSet<()>,
    context: Option<usize>,
    reply: impl Fn(&Value) -> Reply + Send + Sync + 'static,
) -> (ChatClient, mpsc::Receiver<crate::server::Seen>) {
    let (url, seen) = serve(tasks, move |path, body| match path {
        "/v1/models" => models(context),
        "/v1/chat/completions" => reply(body),
        _ => Reply::Now(404, "{}".to_owned()),
    })
    .await;
    // The URLs of chat servers often end in `/v1`.
    (ChatClient::new(named(&format!("{url}/v1"))).unwrap(), seen)
}

#[tokio::test]
async fn a_conversation_is_sent_as_messages_and_answered_by_a_message() {
    let mut tasks = JoinSet::new();
    let (client, mut seen) = client(&mut tasks, Some(130), |_| completion("hello", "stop")).await;
    let info = client.info().await.unwrap();
    assert_eq!((info.context, info.model_path.as_str()), (Some(130), "org/coder"));
    assert!(!info.routed_experts && client.takes_messages());
    let reply = complete(&client, chat_request()).await.unwrap();
    assert_eq!((reply.finish, reply.cached_tokens), (Finish::Stop, 64));
    assert_eq!(reply.message.content, "hello");

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
        // As many as the context has room for.
        "max_tokens": 30,
        "seed": (1_u64 << 31) - 1,
    });
    assert_eq!(sent.body, expected);
}

#[tokio::test]
async fn a_code_for_a_full_context_is_the_policys_end_whatever_the_status_and_the_text() {
    for (status, error) in [
        (400, json!({"error": {"message": "no", "code": "context_length_exceeded"}})),
        (400, json!({"error": {"message": "no", "code": "string_above_max_length"}})),
        (
            400,
            json!({"error": {"code": 400, "message": "no", "type": "exceed_context_size_error"}}),
        ),
        (413, json!({"type": "error", "error": {"type": "request_too_large", "message": "no"}})),
        (500, json!({"object": "error", "message": "no", "code": "context_length_exceeded"})),
    ] {
        let mut tasks = JoinSet::new();
        let body = error.to_string();
        let answer = move |_: &Value| Reply::Now(status, body.clone());
        let (client, _seen) = client(&mut tasks, None, answer).await;
        let error = complete(&client, chat_request()).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::ContextFull(_)), "{error}");
        assert_eq!(error.retry(), Retry::Never);
    }
}

/// A prompt whose length by our own tokenizer is `estimated`, after one that the server counted.
fn long_request(estimated_tokens: usize, counted: Option<CountedPrompt>) -> GenerateRequest {
    let mut request = chat_request();
    if let Prompt::Messages(prompt) = &mut request.prompt {
        (prompt.estimated_tokens, prompt.counted) = (estimated_tokens, counted);
    }
    request
}

#[tokio::test]
async fn without_a_code_the_known_lengths_decide_and_never_the_text() {
    let text = "This model's maximum context length is 4096 tokens";
    let counted = |estimated, reported| Some(CountedPrompt { estimated, reported });
    let cases = [
        // Reported or set, the smaller one counts.
        (Some(4096), None, long_request(4000, None), true),
        (None, Some(4096), long_request(4000, None), true),
        (Some(9000), Some(4096), long_request(4000, None), true),
        (Some(4096), Some(9000), long_request(4000, None), true),
        (Some(9000), None, long_request(4000, None), false),
        // Without a length nothing is known, and the error says what to set.
        (None, None, long_request(4000, None), false),
        // What the server counted is known, and an estimate of the rest may be short by a quarter.
        (Some(4096), None, long_request(2000, None), false),
        (Some(4096), None, long_request(3300, None), true),
        (Some(4096), None, long_request(2000, counted(1900, 3990)), true),
        (Some(4096), None, long_request(3400, counted(3300, 2100)), false),
    ];
    for (reported, context, request, is_full) in cases {
        let mut tasks = JoinSet::new();
        let (url, _seen) = serve(&mut tasks, move |path, _| match path {
            "/v1/models" => models(reported),
            _ => Reply::Now(400, json!({"object": "error", "message": text}).to_string()),
        })
        .await;
        let chat = ChatServerOptions { context, ..ChatServerOptions::default() };
        let client = ChatClient::new(ClientOptions { chat, ..named(&url) }).unwrap();
        client.info().await.unwrap();
        let case = format!("{reported:?} {context:?} {:?}", request.prompt);
        let error = complete(&client, request).await.unwrap_err();
        assert_eq!(matches!(error.kind, EngineErrorKind::ContextFull(_)), is_full, "{case}");
        let is_unknown = reported.or(context).is_none();
        assert_eq!(error.to_string().contains("engine.context"), is_unknown, "{error}");
    }
}

#[tokio::test]
async fn recorded_refusals_of_prompts_that_are_too_long_end_the_episode() {
    for (server, name) in [(VLLM, "n2_openai"), (SGLANG, "openai")] {
        let Some(exchanges) = recording(server, name) else { return };
        let mut refusals = 0;
        for exchange in exchanges {
            if exchange["response"]["status"] != 400 {
                continue;
            }
            refusals += 1;
            let body = exchange["response"]["body_raw"].as_str().unwrap().to_owned();
            let mut tasks = JoinSet::new();
            let answer = move |_: &Value| Reply::Now(400, body.clone());
            // As both servers report it.
            let (client, _seen) = client(&mut tasks, Some(1024), answer).await;
            client.info().await.unwrap();
            let error = complete(&client, long_request(1100, None)).await.unwrap_err();
            assert!(matches!(error.kind, EngineErrorKind::ContextFull(_)), "{error}");
        }
        assert_eq!(refusals, 2, "{server}");
    }
}

#[tokio::test]
async fn a_reply_is_shortened_until_the_server_has_room_for_it() {
    let mut tasks = JoinSet::new();
    let (client, mut seen) = client(&mut tasks, None, |sent| {
        if sent["max_tokens"].as_u64().unwrap() <= 5 {
            return completion("short", "length");
        }
        let error =
            json!({"message": "too long", "type": "BadRequestError", "param": "input_tokens"});
        Reply::Now(400, json!({"error": error}).to_string())
    })
    .await;
    let reply = complete(&client, chat_request()).await.unwrap();
    assert_eq!((reply.finish, reply.message.content.as_str()), (Finish::Length, "short"));
    let mut tried = Vec::new();
    for _ in 0..3 {
        tried.push(seen.recv().await.unwrap().body["max_tokens"].as_u64().unwrap());
    }
    assert_eq!(tried, [64, 16, 4]);
}

#[tokio::test]
async fn errors_decide_whether_to_retry() {
    for (reply, retry) in [
        (|| Reply::Now(401, r#"{"error": {"message": "bad key"}}"#.to_owned()), Retry::Never),
        (|| Reply::Busy(429, "7"), Retry::After(Duration::from_secs(7))),
        (|| Reply::Now(200, "<html>".to_owned()), Retry::Now),
        (|| completion("x", "error"), Retry::After(Duration::from_secs(1))),
        (|| completion("x", "a_new_reason"), Retry::Now),
    ] as [(fn() -> Reply, Retry); 5]
    {
        let mut tasks = JoinSet::new();
        let (client, _seen) = client(&mut tasks, None, move |_| reply()).await;
        let error = complete(&client, chat_request()).await.unwrap_err();
        assert_eq!(error.retry(), retry, "{error}");
        assert_eq!(error.call, "/v1/chat/completions");
    }
    let mut tasks = JoinSet::new();
    let (client, _seen) = client(&mut tasks, None, |_| Reply::Never(None)).await;
    let late = GenerateRequest { deadline: Duration::from_millis(50), ..chat_request() };
    let error = complete(&client, late).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::TimedOut(_)), "{error}");
    let tokens = request(vec![7; 100], 64, None);
    assert_eq!(complete(&client, tokens).await.unwrap_err().retry(), Retry::Never);
}

#[tokio::test]
async fn chat_requests_name_the_model_and_weights_cannot_be_updated() {
    let mut tasks = JoinSet::new();
    let (client, _seen) = client(&mut tasks, None, |_| completion("ok", "stop")).await;
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

    // A server without a list of models is probed as well. A refused request is a finding.
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

#[tokio::test]
async fn a_busy_chat_server_is_probed_again() {
    let mut tasks = JoinSet::new();
    let calls = AtomicU32::new(0);
    let (client, _seen) =
        client(&mut tasks, None, move |_| match calls.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => Reply::Busy(429, "0"),
            _ => completion("ok", "stop"),
        })
        .await;
    let report = client.probe().await.unwrap();
    assert_eq!(report.findings, []);
}

#[tokio::test]
async fn replies_that_name_another_model_are_a_warning() {
    for (name, found) in [
        (json!("org/coder"), None),
        (json!(""), None),
        (json!(null), None),
        (json!("org/other"), Some("org/other")),
    ] {
        let mut tasks = JoinSet::new();
        let (client, _seen) = client(&mut tasks, None, move |_| {
            let choice = json!({"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"});
            Reply::Now(200, json!({"model": name, "choices": [choice]}).to_string())
        })
        .await;
        let report = client.probe().await.unwrap();
        let warnings: Vec<String> = report.warnings().map(ToString::to_string).collect();
        let named = report.facts.iter().find(|(fact, _)| *fact == "replies name");
        assert_eq!(named.map(|(_, name)| name.as_str()), found);
        match found {
            None => assert!(report.findings.is_empty(), "{warnings:?}"),
            Some(other) => {
                let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
                let names = warning.contains("`org/coder`") && warning.contains(other);
                assert!(names && warning.contains("engine.served_model"), "{warning}");
            }
        }
        assert_eq!(report.refusals().count(), 0);
        // It is the model's reply, whatever the server calls it.
        assert_eq!(complete(&client, chat_request()).await.unwrap().message.content, "ok");
    }
}

/// Whether a server refuses a body.
type Refuses = fn(&Value) -> bool;

/// A server that refuses requests with `refuses`, and calls the tool in its first turn, with thinking.
async fn probed(chat: ChatServerOptions, refuses: Refuses) -> (Vec<String>, Vec<Value>) {
    let mut tasks = JoinSet::new();
    let (url, mut seen) = serve(&mut tasks, move |path, body| match path {
        "/v1/models" => models(None),
        _ if refuses(body) => Reply::Now(400, r#"{"error": {"message": "no"}}"#.to_owned()),
        _ => {
            let function = json!({"name": "bash", "arguments": "{}"});
            let call = json!({"id": "c1", "type": "function", "function": function});
            let message = json!({"content": null, "reasoning_content": "hm", "tool_calls": [call]});
            let choice = json!({"index": 0, "message": message, "finish_reason": "tool_calls"});
            Reply::Now(200, json!({"choices": [choice]}).to_string())
        }
    })
    .await;
    // The run's own prompt and tools.
    let mut chat = chat;
    if let Prompt::Messages(prompt) = chat_request().prompt {
        chat.prompt = prompt;
    }
    let client = ChatClient::new(ClientOptions { chat, ..named(&url) }).unwrap();
    let report = client.probe().await.unwrap();
    let found = report.refusals().map(ToString::to_string).collect();
    let mut bodies = Vec::new();
    while let Ok(sent) = seen.try_recv() {
        bodies.extend((sent.path == "/v1/chat/completions").then_some(sent.body));
    }
    (found, bodies)
}

fn lacks_thinking(body: &Value) -> bool {
    let messages = body["messages"].as_array().unwrap();
    let is_call = |message: &&Value| message["tool_calls"].is_array();
    messages.iter().filter(is_call).any(|message| message["reasoning_content"] != "hm")
}

#[tokio::test]
async fn a_probe_sends_what_a_run_sends_and_a_second_turn() {
    let chat = ChatServerOptions {
        temperature: 0.5,
        top_p: 0.75,
        max_tokens: 4096,
        send_thinking: true,
        ..ChatServerOptions::default()
    };
    let (found, bodies) = probed(chat, |_| false).await;
    assert_eq!(found, Vec::<String>::new());
    assert_eq!(bodies.len(), 2);
    for body in &bodies {
        assert_eq!(body["temperature"], 0.5);
        assert_eq!(body["top_p"], 0.75);
        assert_eq!(body["max_tokens"], 4096);
        assert_eq!(body["seed"], i32::MAX);
        assert_eq!(body["tools"], json!([{"type": "function", "function": {"name": "bash"}}]));
        assert_eq!(body["messages"][0], json!({"role": "system", "content": "mend"}));
        assert_eq!(body["messages"][1], json!({"role": "user", "content": "it is broken"}));
    }
    let second = bodies[1]["messages"].as_array().unwrap();
    assert_eq!(second[2]["reasoning_content"], "hm");
    assert_eq!(second[3], json!({"role": "tool", "content": "(no output)", "tool_call_id": "c1"}));
}

#[tokio::test]
async fn a_probe_names_the_setting_with_which_a_server_accepts_the_requests() {
    let refusals: [(Refuses, &str); 6] = [
        (|body| body.get("max_tokens").is_some(), "token_limit_field = \"max_completion_tokens\""),
        (|body| body.get("seed").is_some(), "engine.send_seed = false"),
        (|body| body.get("top_p").is_some(), "engine.send_sampling = false"),
        (lacks_thinking, "engine.send_thinking = true"),
        (
            |body| body.get("max_tokens").is_some() || body.get("temperature").is_some(),
            "token_limit_field = \"max_completion_tokens\", engine.send_sampling = false",
        ),
        (
            |body| {
                let sizes = ["max_tokens", "max_completion_tokens"].map(|name| body[name].as_u64());
                sizes.into_iter().flatten().any(|size| size > 64)
            },
            "lower rollout.max_response_tokens",
        ),
    ];
    for (refuses, remedy) in refusals {
        let chat = ChatServerOptions { max_tokens: 1024, ..ChatServerOptions::default() };
        let (found, _) = probed(chat, refuses).await;
        assert!(found.len() == 1 && found[0].contains(remedy), "{remedy}: {found:?}");
    }
    // With the settings that it names, there is nothing to find.
    let chat = ChatServerOptions {
        token_limit_field: TokenLimitField::MaxCompletionTokens,
        send_sampling: false,
        send_seed: false,
        send_thinking: true,
        ..ChatServerOptions::default()
    };
    let refuses = |body: &Value| {
        ["max_tokens", "temperature", "top_p", "seed"].iter().any(|name| body.get(name).is_some())
            || lacks_thinking(body)
    };
    let (found, bodies) = probed(chat, refuses).await;
    assert_eq!((found, bodies.len()), (Vec::new(), 2));
}

#[tokio::test]
async fn thinking_is_sent_back_in_its_own_fields_only_if_the_settings_say_so() {
    let thinking = Thinking { reasoning_content: Some("hm".to_owned()), ..Thinking::default() };
    let turn = ChatMessage {
        role: "assistant".to_owned(),
        content: "x".to_owned(),
        thinking: Some(thinking),
        ..ChatMessage::default()
    };
    for (send_thinking, expected) in [
        (false, json!({"role": "assistant", "content": "x"})),
        (true, json!({"role": "assistant", "content": "x", "reasoning_content": "hm"})),
    ] {
        let mut tasks = JoinSet::new();
        let (url, mut seen) = serve(&mut tasks, |_, _| completion("ok", "stop")).await;
        let chat = ChatServerOptions { send_thinking, ..ChatServerOptions::default() };
        let client = ChatClient::new(ClientOptions { chat, ..named(&url) }).unwrap();
        let messages = Arc::new(vec![turn.clone()]);
        let prompt = Prompt::Messages(MessagePrompt { messages, ..MessagePrompt::default() });
        complete(&client, GenerateRequest { prompt, ..chat_request() }).await.unwrap();
        assert_eq!(seen.recv().await.unwrap().body["messages"], json!([expected]));
    }
}
