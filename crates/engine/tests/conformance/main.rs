//! The conformance suite on the fake engine, on the clients with recorded traffic, and on real
//! servers where available.
//!
//! A real server is one at `ORCHESTRATE_SGLANG_URL`, or one started here by the shell command
//! `ORCHESTRATE_SGLANG_START`, in which `{port}` is replaced; `ORCHESTRATE_SGLANG_MODEL` is the
//! folder of its model (likewise with `VLLM`). `ORCHESTRATE_REQUIRE=sglang,vllm` turns a missing
//! server into a failure.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

mod recorded;

use camino::Utf8PathBuf;
use orchestrate_engine::{
    AssistantMessage, ChatMessage, ClientOptions, EngineKind, Finish, GenerateRequest,
    MessagePrompt, Prompt, Sampling,
};
use orchestrate_testkit::conformance::{Abort, Subject, all, made_up_prompts};
use orchestrate_testkit::{FakeEngine, engine_conformance, toy_shape, well_behaved};
use orchestrate_types::{ModelShape, RequestId, RunId};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::process::{Child, Command};

engine_conformance!(fake, crate::fake_subject);
engine_conformance!(recorded_sglang, crate::recorded::sglang);
engine_conformance!(recorded_vllm, crate::recorded::vllm);

#[expect(clippy::unused_async, reason = "the suite requires an async function")]
async fn fake_subject() -> Option<Subject> {
    let shape = toy_shape(1024);
    let engine = Arc::new(FakeEngine::new(shape.clone(), well_behaved(1024, 100)));
    let fake = Arc::clone(&engine);
    let abort: Box<Abort> = Box::new(move |id| {
        fake.abort(&id);
        Box::pin(std::future::ready(()))
    });
    let subject = Subject::new(engine, made_up_prompts(&shape), abort, ());
    Some(subject.with_checkpoints("/any".into(), None))
}

/// Aborts requests of a server as an operator does: by posting to its route for that.
fn abort_over_http(kind: EngineKind, options: &ClientOptions) -> Box<Abort> {
    let (url, key) = (options.url.clone(), options.api_key.clone().unwrap_or_default());
    Box::new(move |id| {
        let (route, body) = if kind == EngineKind::Vllm {
            let ids = [format!("generate-tokens-{id}")];
            ("/inference/v1/abort_requests", json!({"request_ids": ids}))
        } else {
            ("/abort_request", json!({"rid": id.as_str()}))
        };
        let post = reqwest::Client::new().post(format!("{url}{route}")).bearer_auth(&key);
        let post = post.json(&body);
        Box::pin(async move {
            post.send().await.unwrap().error_for_status().unwrap();
        })
    })
}

/// Large, because on small machines a server takes minutes to start.
const START_TIMEOUT: Duration = Duration::from_mins(10);

#[tokio::test]
async fn engine_sglang_conforms() {
    real(EngineKind::Sglang, "SGLANG").await;
}

#[tokio::test]
async fn engine_vllm_conforms() {
    real(EngineKind::Vllm, "VLLM").await;
}

async fn real(kind: EngineKind, name: &str) {
    let setting = |what: &str| std::env::var(format!("ORCHESTRATE_{name}_{what}")).ok();
    let started = match (setting("URL"), setting("START")) {
        (Some(url), _) => Some((url, None)),
        (None, Some(command)) => Some(start(&command)),
        (None, None) => None,
    };
    let Some(((url, server), model)) = started.zip(setting("MODEL")) else {
        let why = format!("set ORCHESTRATE_{name}_URL or _START, and _MODEL");
        orchestrate_e2e::skip::skip(&kind.to_string(), &why);
        return;
    };
    let model = Utf8PathBuf::from(model).canonicalize_utf8().unwrap();
    let options = ClientOptions {
        url,
        api_key: setting("KEY"),
        tls: orchestrate_engine::TlsClientPem::default(),
        shape: shape(&model),
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: START_TIMEOUT,
        served_model: None,
        chat: orchestrate_engine::ChatServerOptions::default(),
    };
    let prompts = made_up_prompts(&options.shape);
    let abort = abort_over_http(kind, &options);
    let chat_options = options.clone();
    let (engine, info) = kind.connect(options, START_TIMEOUT).await.unwrap();
    let report = engine.probe().await.unwrap();
    assert_eq!(report.refusals().collect::<Vec<_>>(), Vec::<&_>::new(), "{info:?}");
    let missing = model.with_file_name("no-such-checkpoint");
    let subject = Subject::new(engine, prompts, abort, server);
    all(&subject.with_checkpoints(model, Some(missing))).await.unwrap();
    chat_api(chat_options).await;
}

/// The same server through its chat API.
async fn chat_api(options: ClientOptions) {
    let key = options.api_key.clone().unwrap_or_default();
    let models = reqwest::Client::new().get(format!("{}/v1/models", options.url)).bearer_auth(key);
    let models = models.send().await.unwrap().bytes().await.unwrap();
    let models: Value = serde_json::from_slice(&models).unwrap();
    let served_model = models["data"][0]["id"].as_str().map(str::to_owned);
    let options = ClientOptions { served_model, ..options };
    let (engine, info) = EngineKind::Openai.connect(options, START_TIMEOUT).await.unwrap();
    let report = engine.probe().await.unwrap();
    assert_eq!(report.refusals().collect::<Vec<_>>(), Vec::<&_>::new(), "{info:?}");

    let message = |role: &str, content: String| ChatMessage {
        role: role.to_owned(),
        content,
        ..ChatMessage::default()
    };
    let request = |messages: Vec<ChatMessage>, max_new_tokens| {
        let attempt = "v00000-00000.00-a01".parse().unwrap();
        GenerateRequest {
            request_id: RequestId::new(RunId::generate(), attempt, 0, 0),
            session: "chat".to_owned(),
            prompt: Prompt::Messages(MessagePrompt {
                messages: Arc::new(messages),
                tools: Arc::default(),
                estimated_tokens: 10,
                counted: None,
            }),
            sampling: Sampling {
                temperature: 1.0,
                top_p: 1.0,
                max_new_tokens,
                stop_token_ids: Vec::new(),
                seed: u64::MAX,
            },
            priority: 0,
            deadline: START_TIMEOUT,
            listener: None,
        }
    };
    let opening = vec![message("user", "hello".to_owned())];
    let first = engine.generate(request(opening.clone(), 4)).await.unwrap();
    let turn = message("assistant", first.into_message().unwrap().message.content);
    let longer = [opening, vec![turn, message("user", "and now?".to_owned())]].concat();
    engine.generate(request(longer, 4)).await.unwrap();
    // A conversation longer than any context here ends, without an error.
    let too_long = vec![message("user", "one two three ".repeat(100_000))];
    let ended = engine.generate(request(too_long, 4)).await.unwrap().into_message().unwrap();
    assert_eq!((ended.finish, ended.message), (Finish::Length, AssistantMessage::default()));
}

/// Starts a server on a free port. It is killed with the subject.
fn start(command: &str) -> (String, Option<Child>) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let command = command.replace("{port}", &free.to_string());
    let mut shell = Command::new("sh");
    let server = shell.arg("-c").arg(command).kill_on_drop(true).spawn().unwrap();
    (format!("http://127.0.0.1:{free}"), Some(server))
}

/// The shape of a model whose layers are all MoE.
fn shape(model: &Utf8PathBuf) -> ModelShape {
    let text = std::fs::read_to_string(model.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let number = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
    ModelShape {
        hidden_layers: number("num_hidden_layers"),
        moe_layers: (0..number("num_hidden_layers")).collect(),
        // Newer versions of transformers use the second name.
        experts: number(if config["num_experts"].is_u64() {
            "num_experts"
        } else {
            "num_local_experts"
        }),
        top_k: number("num_experts_per_tok"),
        vocab: number("vocab_size"),
        context: number("max_position_embeddings"),
    }
}
