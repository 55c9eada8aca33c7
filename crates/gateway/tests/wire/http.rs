//! Routes, statuses and keys.

use crate::scripted::{ScriptedReply, ScriptedSampler, ScriptedTurn};
use crate::server::{Server, quick};
use orchestrate_gateway::{GatewayOptions, Role, SampleError};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// A minimal request of each dialect, with its path.
pub(crate) fn requests() -> [(&'static str, Value); 3] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        ("chat/completions", json!({"messages": messages})),
        ("responses", json!({"input": "hi"})),
        ("messages", json!({"messages": messages, "max_tokens": 50})),
    ]
}

/// Whether a document is an error in the form of the dialect at `path`.
pub(crate) fn is_error_of(path: &str, error: &Value) -> bool {
    let message = &error["error"]["message"];
    let form = if path.contains("messages") {
        error["type"] == "error" && error["error"]["type"].is_string()
    } else {
        let fields = error["error"].as_object().unwrap();
        fields.contains_key("param") && fields.contains_key("code") && fields["type"].is_string()
    };
    form && message.is_string()
}

#[tokio::test]
async fn every_dialect_answers_with_and_without_the_version() {
    let server = Server::start(ScriptedSampler::writing("hello"), quick()).await;
    for (path, body) in requests() {
        for prefix in ["/", "/v1/", "/v1/v1/"] {
            let reply = server.post(&format!("{prefix}{path}"), &body).await;
            assert_eq!(reply.status(), 200, "{prefix}{path}");
            assert!(reply.headers().contains_key("request-id"));
            assert!(reply.text().await.unwrap().contains("hello"));
        }
    }
    for (path, field) in
        [("responses/input_tokens", "input"), ("messages/count_tokens", "messages")]
    {
        let body = json!({field: [{"role": "user", "content": "four"}]});
        let counted: Value = server.post(&format!("/v1/{path}"), &body).await.json().await.unwrap();
        assert_eq!(counted["input_tokens"], 4, "{path}");
    }
    let models: Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "policy");
    assert_eq!(server.get("/v1/models/policy").await.status(), 200);
    assert_eq!(server.get("/v1/models/org/other").await.status(), 404);
}

#[tokio::test]
async fn replies_name_the_fields_that_were_overridden() {
    let server = Server::start(ScriptedSampler::writing("hello"), quick()).await;
    for (path, plain) in requests() {
        let header = async |body: &Value| {
            let reply = server.post(&format!("/v1/{path}"), body).await;
            assert_eq!(reply.status(), 200, "{path}");
            let listed = reply.headers().get("x-overridden-fields").cloned();
            listed.map(|listed| listed.to_str().unwrap().to_owned())
        };
        assert_eq!(header(&plain).await, None, "{path}");
        for stream in [false, true] {
            let mut body = plain.clone();
            body["temperature"] = json!(0.5);
            body["of_tomorrow"] = json!(1);
            body["stream"] = json!(stream);
            assert_eq!(header(&body).await.as_deref(), Some("of_tomorrow, temperature"), "{path}");
        }
    }
}

#[tokio::test]
async fn errors_have_the_form_of_the_dialect() {
    let options = GatewayOptions { body_limit: 1000, ..quick() };
    let server = Server::start(ScriptedSampler::writing("hello"), options).await;
    for (path, mut body) in requests() {
        let url = format!("/v1/{path}");
        for (reply, status) in [
            (server.post(&url, &json!({})).await, 400),
            (server.post(&url, &json!([])).await, 400),
            (server.post(&url, &json!({"input": "x".repeat(1000)})).await, 413),
            (server.get(&url).await, 405),
            (server.post(&format!("{url}/unknown"), &body).await, 404),
        ] {
            assert_eq!(reply.status(), status, "{path}");
            let error: Value = reply.json().await.unwrap();
            assert!(is_error_of(path, &error), "{path}: {error}");
        }
        let compressed = server.client().post(server.url(&url)).header("content-encoding", "gzip");
        let reply = compressed.body("x").send().await.unwrap();
        assert_eq!(reply.status(), 415);
        assert!(is_error_of(path, &reply.json().await.unwrap()));
        body["stream"] = json!("yes");
        let error: Value = server.post(&url, &body).await.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("stream") && message.contains("boolean"), "{message}");
    }
    let chunk = format!("258\r\n{}\r\n", " ".repeat(0x258));
    let head = format!(
        "POST {}/v1/messages HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n",
        server.episode.path()
    );
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.unwrap();
    let mut line = [0; 12];
    stream.read_exact(&mut line).await.unwrap();
    assert_eq!(std::str::from_utf8(&line).unwrap(), "HTTP/1.1 413");
}

#[tokio::test]
async fn sampling_errors_are_statuses_also_of_streams() {
    for error in [
        SampleError::Ended("the time is up".into()),
        SampleError::Unavailable("no engine is up".into()),
        SampleError::TooLong { prompt: 20, context: 10 },
    ] {
        let turn = ScriptedTurn::Fail(error.clone());
        let server = Server::start(ScriptedSampler::new(move |_, _| turn.clone()), quick()).await;
        for (path, mut body) in requests() {
            let reply = server.post(&format!("/v1/{path}"), &body).await;
            let status = match &error {
                SampleError::Unavailable(_) if path == "messages" => 529,
                SampleError::Unavailable(_) => 503,
                _ => 400,
            };
            assert_eq!(reply.status(), status);
            let retry = if status == 400 { "false" } else { "true" };
            assert_eq!(reply.headers()["x-should-retry"], retry);
            body["stream"] = json!(true);
            let reply = server.post(&format!("/v1/{path}"), &body).await;
            assert_eq!(reply.status(), status);
            assert!(is_error_of(path, &reply.json().await.unwrap()));
        }
    }
}

#[tokio::test]
async fn only_the_secret_path_leads_to_an_episode_and_only_while_it_lasts() {
    let options = GatewayOptions { require_key: true, ..quick() };
    let server = Server::start(ScriptedSampler::writing("hello"), options).await;
    let body = &requests()[2].1;
    let post = |url: String| server.client().post(url).json(body);
    let url = server.url("/v1/messages");
    assert_eq!(post(url.clone()).send().await.unwrap().status(), 401);
    assert_eq!(post(url.clone()).header("x-api-key", "sk").send().await.unwrap().status(), 401);
    let secret = server.episode.secret().to_owned();
    let with_key = || post(url.clone()).header("x-api-key", &secret);
    assert_eq!(with_key().send().await.unwrap().status(), 200);
    assert_eq!(post(url.clone()).bearer_auth(&secret).send().await.unwrap().status(), 200);
    assert_eq!(server.get("/v1/models").await.status(), 401);
    let other = format!("http://{}/e/{}/v1/messages", server.address, "0".repeat(secret.len()));
    let reply = post(other).send().await.unwrap();
    assert_eq!(reply.status(), 404);
    assert!(is_error_of("messages", &reply.json().await.unwrap()));
    assert_eq!(server.registry.len(), 1);
    let printed = format!("{:?} {:?}", server.registry, server.episode);
    assert!(!printed.contains(&secret), "{printed}");
    let client = server.client().clone();
    let registry = server.registry.clone();
    drop(server.episode);
    assert!(registry.is_empty());
    let gone = client.post(&url).header("x-api-key", &secret).json(body).send().await;
    assert_eq!(gone.unwrap().status(), 404);
}

/// The document of a reply, or of the last event of one.
fn document(text: &str) -> Value {
    let mut events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    events.next_back().map_or_else(
        || serde_json::from_str(text).unwrap(),
        |last| serde_json::from_str::<Value>(last).unwrap()["response"].clone(),
    )
}

#[tokio::test]
async fn a_response_is_continued_by_its_id() {
    let calls = ScriptedReply {
        reasoning: Some("hm"),
        calls: vec![("ls", "{}".into())],
        ..ScriptedReply::default()
    };
    let sampler = ScriptedSampler::new(move |_, _| ScriptedTurn::Reply(calls.clone()));
    let server = Server::start(Arc::clone(&sampler), quick()).await;
    let ask = async |body: &Value| {
        let reply = server.post("/v1/responses", body).await;
        assert_eq!(reply.status(), 200, "{body}");
        document(&reply.text().await.unwrap())
    };
    for stream in [false, true] {
        let first = ask(&json!({"input": "a", "instructions": "x", "stream": stream})).await;
        assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Value::Null));
        let result = |of: &Value, text: &str| {
            let call = of["output"].as_array().unwrap().last().unwrap()["call_id"].clone();
            json!({"type": "function_call_output", "call_id": call, "output": text})
        };
        let asked = [result(&first, "b")];
        let second = ask(&json!({
            "previous_response_id": first["id"], "input": asked, "stream": stream,
        }))
        .await;
        assert_eq!(second["previous_response_id"], first["id"]);
        let third = json!({
            "previous_response_id": second["id"], "instructions": "y",
            "input": [result(&second, "c"), {"role": "user", "content": "d"}],
        });
        let counted = server.post("/v1/responses/input_tokens", &third).await;
        assert_eq!(counted.json::<Value>().await.unwrap()["input_tokens"], 5);
        let third = ask(&third).await;
        assert_eq!(third["status"], "completed");
        let requests = sampler.requests();
        let last = &requests.last().unwrap().messages;
        let texts: Vec<(Role, &str)> =
            last.iter().map(|message| (message.role, message.content.as_str())).collect();
        let (user, assistant, tool) = (Role::User, Role::Assistant, Role::Tool);
        // The instructions of earlier requests do not apply.
        let expected = [
            (Role::System, "y"),
            (user, "a"),
            (assistant, ""),
            (tool, "b"),
            (assistant, ""),
            (tool, "c"),
            (user, "d"),
        ];
        assert_eq!(texts, expected);
        assert_eq!((last[2].reasoning.as_deref(), last[2].reply), (Some("hm"), Some(7)));
        // Two requests may continue one response.
        let other = ask(&json!({"previous_response_id": first["id"], "input": asked})).await;
        assert_ne!(other["id"], second["id"]);
    }
}

#[tokio::test]
async fn a_response_that_is_not_stored_is_not_found() {
    let server = Server::start(ScriptedSampler::writing("hello"), quick()).await;
    let other = server.registry.register(ScriptedSampler::writing("hello"));
    let ask = async |path: &str, body: &Value| {
        let url = format!("http://{}{path}/v1/responses", server.address);
        let reply = server.client().post(url).json(body).send().await.unwrap();
        (reply.status().as_u16(), reply.json::<Value>().await.unwrap())
    };
    let path = server.episode.path();
    let (_, unstored) = ask(&path, &json!({"input": "a", "store": false})).await;
    assert_eq!(unstored["store"], false);
    let (_, elsewhere) = ask(&other.path(), &json!({"input": "a"})).await;
    for id in [&unstored["id"], &elsewhere["id"], &json!("resp_1")] {
        for stream in [false, true] {
            let body = json!({"previous_response_id": id, "input": "b", "stream": stream});
            let (status, error) = ask(&path, &body).await;
            assert_eq!(status, 400);
            assert_eq!(error["error"]["code"], "previous_response_not_found");
            assert_eq!(error["error"]["param"], "previous_response_id");
        }
    }
    let (status, _) = ask(&path, &json!({"previous_response_id": "", "input": "b"})).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn what_a_last_message_of_the_assistant_means_is_the_dialects() {
    let sampler = ScriptedSampler::writing("hello");
    let server = Server::start(Arc::clone(&sampler), quick()).await;
    for (path, mut body) in requests() {
        let field = if path == "responses" { "input" } else { "messages" };
        body[field] =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let reply = server.post(&format!("/v1/{path}"), &body).await;
        if path == "messages" {
            // Here it would be a prefill.
            assert_eq!(reply.status(), 400);
            let error: Value = reply.json().await.unwrap();
            let message = error["error"]["message"].as_str().unwrap();
            assert!(message.contains("must end with a user message"), "{message}");
            let counted = server.post("/v1/messages/count_tokens", &body).await;
            assert_eq!(counted.json::<Value>().await.unwrap()["input_tokens"], 2);
            continue;
        }
        // Here the reply is another message.
        assert_eq!(reply.status(), 200, "{path}");
        let requests = sampler.requests();
        let last = requests.last().unwrap().messages.last().unwrap();
        assert_eq!((last.role, last.content.as_str()), (Role::Assistant, "b"), "{path}");
    }
}

#[tokio::test]
async fn the_clients_sampling_decides_in_evaluations() {
    let server = Server::start(ScriptedSampler::evaluating("hello"), quick()).await;
    for (path, plain) in requests() {
        let ask = async |fields: Value| {
            let mut body = plain.clone();
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            server.post(&format!("/v1/{path}"), &body).await
        };
        let reply = ask(json!({"temperature": 0.5, "top_p": 0.9, "seed": 3})).await;
        assert_eq!(reply.status(), 200, "{path}");
        assert_eq!(reply.headers()["x-overridden-fields"], "seed", "{path}");
        for (field, value) in
            [("temperature", -0.5), ("temperature", 11.0), ("top_p", 0.0), ("top_p", 1.5)]
        {
            let reply = ask(json!({ field: value })).await;
            assert_eq!(reply.status(), 400, "{path} {field} {value}");
            let error: Value = reply.json().await.unwrap();
            assert!(error["error"]["message"].as_str().unwrap().starts_with(field), "{error}");
        }
    }
}
