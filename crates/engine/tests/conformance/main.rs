//! Every engine keeps the same promises: the fake, the clients over recorded traffic, and real
//! servers where they are.
//!
//! A real server is one at `ORCHESTRATE_SGLANG_URL`, or one started here by the shell command
//! `ORCHESTRATE_SGLANG_START`, in which `{port}` is replaced; `ORCHESTRATE_SGLANG_MODEL` is the
//! folder of its model (the same with `VLLM`). `ORCHESTRATE_REQUIRE=sglang,vllm` makes a missing
//! one a failure.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests")]

mod recorded;

use camino::Utf8PathBuf;
use orchestrate_engine::{
    ChatMessage, ChatTurn, ClientOptions, Conversation, EngineKind, Finish, GenerateRequest,
    Sampling,
};
use orchestrate_testkit::conformance::{Subject, all, made_up_prompts};
use orchestrate_testkit::{FakeEngine, engine_conformance, toy_shape, well_behaved};
use orchestrate_types::{ModelShape, PolicyVersion, RequestId, RunId};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::{Child, Command};

engine_conformance!(fake, crate::fake_subject);
engine_conformance!(recorded_sglang, crate::recorded::sglang);
engine_conformance!(recorded_vllm, crate::recorded::vllm);

#[expect(clippy::unused_async, reason = "the form that the suite asks for")]
async fn fake_subject() -> Option<Subject> {
    let shape = toy_shape(1024);
    let engine = FakeEngine::new(shape.clone(), well_behaved(1024, 100));
    let subject = Subject::new(Arc::new(engine), made_up_prompts(&shape), ());
    Some(subject.with_checkpoints("/any".into(), None))
}

/// Loading everything a server needs takes minutes on small machines.
const PATIENCE: Duration = Duration::from_mins(10);

#[tokio::test]
async fn engine_sglang_keeps_every_promise() {
    real(EngineKind::Sglang, "SGLANG").await;
}

#[tokio::test]
async fn engine_vllm_keeps_every_promise() {
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
        shape: shape(&model),
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: PATIENCE,
        served_model: None,
    };
    let prompts = made_up_prompts(&options.shape);
    let plain = options.clone();
    let (engine, info) = kind.connect(options, PATIENCE).await.unwrap();
    let report = engine.probe().await.unwrap();
    assert_eq!(report.refusals().collect::<Vec<_>>(), Vec::<&_>::new(), "{info:?}");
    let missing = model.with_file_name("no-such-checkpoint");
    let subject = Subject::new(engine, prompts, server).with_checkpoints(model, Some(missing));
    all(&subject).await.unwrap();
    by_words(plain).await;
}

/// The same server, asked in the form of chat servers.
async fn by_words(options: ClientOptions) {
    let key = options.api_key.clone().unwrap_or_default();
    let models = reqwest::Client::new().get(format!("{}/v1/models", options.url)).bearer_auth(key);
    let models = models.send().await.unwrap().bytes().await.unwrap();
    let models: Value = serde_json::from_slice(&models).unwrap();
    let served_model = models["data"][0]["id"].as_str().map(str::to_owned);
    let options = ClientOptions { served_model, ..options };
    let (engine, info) = EngineKind::Openai.connect(options, PATIENCE).await.unwrap();
    let report = engine.probe().await.unwrap();
    assert_eq!(report.refusals().collect::<Vec<_>>(), Vec::<&_>::new(), "{info:?}");

    let said = |role: &str, content: String| ChatMessage {
        role: role.to_owned(),
        content,
        ..ChatMessage::default()
    };
    let request = |messages: Vec<ChatMessage>, max_new_tokens| {
        let attempt = "v00000-00000.00-a01".parse().unwrap();
        let conversation = Conversation { messages: Arc::new(messages), tools: Arc::default() };
        GenerateRequest {
            request_id: RequestId::new(RunId::generate(), attempt, 0, 0),
            session: "words".to_owned(),
            token_ids: vec![1; 10].into(),
            conversation: Some(conversation),
            sampling: Sampling {
                temperature: 1.0,
                top_p: 1.0,
                max_new_tokens,
                stop_token_ids: Vec::new(),
                seed: u64::MAX,
            },
            routed_experts_start: None,
            cache_namespace: PolicyVersion(0),
            priority: 0,
            deadline: PATIENCE,
        }
    };
    let opening = vec![said("user", "hello".to_owned())];
    let first = engine.generate(request(opening.clone(), 4)).await.unwrap();
    let turn = said("assistant", first.turn.unwrap().content);
    let longer = [opening, vec![turn, said("user", "and now?".to_owned())]].concat();
    engine.generate(request(longer, 4)).await.unwrap();
    // Longer than any context here: no failure, but an end.
    let endless = vec![said("user", "one two three ".repeat(100_000))];
    let ended = engine.generate(request(endless, 4)).await.unwrap();
    assert_eq!((ended.finish, ended.turn), (Finish::Length, Some(ChatTurn::default())));
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
        // Newer versions of transformers write the second name.
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
