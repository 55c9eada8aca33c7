//! Servers of a different kind than configured are refused, with the setting to change.

use crate::server::{Reply, options, serve, server_info};
use orchestrate_engine::{EngineErrorKind, EngineKind};
use orchestrate_types::Retry;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::task::JoinSet;

/// A server of a kind, with only the routes that do not sample.
async fn server(tasks: &mut JoinSet<()>, kind: &'static str) -> String {
    let missing = || Reply::Now(404, json!({"detail": "Not Found"}).to_string());
    let models = json!({"object": "list", "data": [{"id": "m", "max_model_len": 1024}]});
    let (url, _) = serve(tasks, move |path, _: &Value| match (kind, path) {
        ("sglang", "/server_info") => Reply::Now(200, server_info().to_string()),
        ("sglang", "/model_info") => Reply::Now(200, json!({"model_path": "m"}).to_string()),
        ("vllm", "/version") => Reply::Now(200, json!({"version": "0.32.0"}).to_string()),
        ("vllm", "/server_info") => {
            let text = "enable_return_routed_experts=True, pipeline_parallel_size=1";
            Reply::Now(200, json!({"vllm_config": text}).to_string())
        }
        ("vllm" | "chat", "/v1/models") => Reply::Now(200, models.to_string()),
        ("page", _) => Reply::Now(200, "<html>hello</html>".to_owned()),
        _ => missing(),
    })
    .await;
    url
}

#[tokio::test]
async fn each_kind_is_recognised() {
    for (kind, expected) in [("sglang", EngineKind::Sglang), ("vllm", EngineKind::Vllm)] {
        let mut tasks = JoinSet::new();
        let url = server(&mut tasks, kind).await;
        assert_eq!(
            EngineKind::detect(&url, None, &orchestrate_engine::TlsClientPem::default())
                .await
                .unwrap(),
            expected
        );
        let (_, info) = expected.connect(options(&url), Duration::ZERO).await.unwrap();
        assert!(info.routed_experts && info.engine.starts_with(kind), "{info:?}");
    }
}

#[tokio::test]
async fn a_server_of_the_other_kind_is_refused_with_the_setting_to_change() {
    for (kind, configured) in [("vllm", EngineKind::Sglang), ("sglang", EngineKind::Vllm)] {
        let mut tasks = JoinSet::new();
        let url = server(&mut tasks, kind).await;
        let error = configured.connect(options(&url), Duration::ZERO).await.unwrap_err();
        assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
        assert!(error.to_string().contains(&format!("engine.kind = \"{kind}\"")), "{error}");
        assert_eq!(error.retry(), Retry::Never);
    }
}

#[tokio::test]
async fn a_server_without_token_ids_is_refused_with_the_training_requirements() {
    for (kind, message) in
        [("chat", "OpenAI-compatible"), ("page", "not recognised as an SGLang or vLLM server")]
    {
        let mut tasks = JoinSet::new();
        let url = server(&mut tasks, kind).await;
        for configured in [EngineKind::Sglang, EngineKind::Vllm] {
            let error = configured.connect(options(&url), Duration::ZERO).await.unwrap_err();
            assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
            let error = error.to_string();
            for part in [message, "routed experts", "/generate", "/inference/v1/generate"] {
                assert!(error.contains(part), "{configured}: {error}");
            }
        }
        let error = EngineKind::detect(&url, None, &orchestrate_engine::TlsClientPem::default())
            .await
            .unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[tokio::test]
async fn an_unreachable_server_is_not_mistaken_for_another_kind() {
    let url = "http://127.0.0.1:9";
    let error = EngineKind::Vllm.connect(options(url), Duration::ZERO).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unreachable(_)), "{error}");
}
