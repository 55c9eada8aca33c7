//! The embedded engine passes the engine conformance suite, through the client that runs use.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use camino::Utf8PathBuf;
use orchestrate_engine::{ClientOptions, EngineKind};
use orchestrate_moe::infer::{EngineOptions, WeightFormat, serve_engine};
use orchestrate_moe::{ModelConfig, StoredType, Weights, save_checkpoint};
use orchestrate_testkit::conformance::{Subject, made_up_prompts};
use orchestrate_testkit::engine_conformance;
use orchestrate_types::RequestId;
use serde_json::json;
use std::pin::Pin;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

engine_conformance!(f32_weights, crate::with_f32);
engine_conformance!(quantised_weights, crate::with_q8);

async fn with_f32() -> Option<Subject> {
    Some(subject(WeightFormat::F32).await)
}

async fn with_q8() -> Option<Subject> {
    Some(subject(WeightFormat::Q8_0).await)
}

async fn subject(weight_format: WeightFormat) -> Subject {
    let folder = tempfile::tempdir().unwrap();
    let root = Utf8PathBuf::try_from(folder.path().to_owned()).unwrap();
    let config: ModelConfig = serde_json::from_value(json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "max_position_embeddings": 1024, "rope_theta": 1e4
    }))
    .unwrap();
    let shape = config.shape();
    for (name, seed) in [("a", 1), ("b", 2)] {
        let weights = Weights::random_by_width(config.clone(), seed);
        save_checkpoint(&root.join(name), &weights, StoredType::F32, None).unwrap();
    }
    let options = EngineOptions { weight_format, ..EngineOptions::new(root.join("a")) };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let mut server = JoinSet::new();
    server.spawn(serve_engine(options, listener, stop.clone()));
    let abort_url = format!("{url}/abort_request");
    let client = ClientOptions {
        url,
        api_key: None,
        tls: orchestrate_engine::TlsClientPem::default(),
        shape: shape.clone(),
        max_in_flight: 8,
        require_routed_experts: true,
        sync_timeout: Duration::from_mins(1),
        served_model: None,
        chat: orchestrate_engine::ChatServerOptions::default(),
    };
    let (engine, _) = EngineKind::Sglang.connect(client, Duration::from_mins(1)).await.unwrap();
    let report = engine.probe().await.unwrap();
    assert_eq!(report.findings, [], "the engine supports training");
    let (good, missing) = (root.join("b"), root.join("c"));
    let alive = (folder, server, stop.drop_guard());
    let abort = Box::new(move |id: RequestId| -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let post = reqwest::Client::new().post(&abort_url).json(&json!({"rid": id.as_str()}));
        Box::pin(async move {
            post.send().await.unwrap().error_for_status().unwrap();
        })
    });
    let subject = Subject::new(engine, made_up_prompts(&shape), abort, alive);
    subject.with_checkpoints(good, Some(missing))
}
