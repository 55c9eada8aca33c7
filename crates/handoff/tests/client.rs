//! The trainer client against a scripted trainer, and the configuration sections.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use orchestrate_handoff::protocol::{
    LogprobsRequest, RoutingReplay, StepRequest, StepState, TrainerInfo,
};
use orchestrate_handoff::{
    AdvantageNorm, AlgorithmSection, TrainerClient, TrainerErrorKind, TrainerSection,
};
use orchestrate_settings::TlsClientPem;
use orchestrate_types::{ModelShape, PolicyVersion, Retry};
use schemars::schema_for;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;

const SOON: Duration = Duration::from_secs(20);

/// `METHOD path`, authorization, body.
type Called = (String, Option<String>, Value);

/// The answers in order, and the calls.
#[derive(Clone, Default)]
struct Trainer {
    answers: Arc<Mutex<Vec<(u16, String)>>>,
    calls: Arc<Mutex<Vec<Called>>>,
}

async fn handle(State(trainer): State<Trainer>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let call = format!("{} {}", parts.method, parts.uri.path());
    let token = parts.headers.get("authorization").map(|v| v.to_str().unwrap().to_owned());
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    trainer.calls.lock().unwrap().push((call, token, body));
    let (status, text) = trainer.answers.lock().unwrap().remove(0);
    (StatusCode::from_u16(status).unwrap(), text).into_response()
}

async fn serve(tasks: &mut JoinSet<()>, answers: Vec<(u16, Value)>) -> (TrainerClient, Trainer) {
    let trainer = Trainer::default();
    *trainer.answers.lock().unwrap() =
        answers.into_iter().map(|(status, body)| (status, body.to_string())).collect();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let app = Router::new().fallback(handle).with_state(trainer.clone());
    tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
    (
        TrainerClient::new(&url, Some("token-1".to_owned()), &TlsClientPem::default()).unwrap(),
        trainer,
    )
}

fn request() -> StepRequest {
    let algorithm = AlgorithmSection::default().check().unwrap();
    StepRequest {
        step_id: "s1".to_owned(),
        base_version: PolicyVersion(3),
        manifest: "/b/manifest.json".into(),
        hyperparameters: algorithm.hyperparameters(0.8, true),
    }
}

fn queued() -> Value {
    json!({"step_id": "s1", "state": "queued"})
}

fn running() -> Value {
    json!({"step_id": "s1", "state": "running", "phase": "update", "progress": 0.5})
}

fn done() -> Value {
    let metrics = json!({
        "loss": 0.1, "grad_norm": 1.0, "entropy": 2.0, "clip_fraction": 0.0,
        "mismatch": {"kl_k3": 0.0, "mean_abs_logprob_diff": 0.0, "extreme_token_fraction": {"2": 0.0}},
        "mismatch_no_replay": null, "disagreement": null,
        "routing_missing": 0, "loss_tokens": 10, "tokens": 20, "seconds": 1.5,
    });
    let result = json!({"policy_version": 4, "checkpoint": "/c/4", "metrics": metrics});
    json!({"step_id": "s1", "state": "done", "result": result})
}

fn calls(trainer: &Trainer) -> Vec<String> {
    trainer.calls.lock().unwrap().iter().map(|(call, _, _)| call.clone()).collect()
}

#[tokio::test]
async fn a_step_is_submitted_followed_and_its_result_returned() {
    let mut tasks = JoinSet::new();
    let answers = vec![(200, queued()), (200, running()), (200, done())];
    let (client, trainer) = serve(&mut tasks, answers).await;
    let mut states = Vec::new();
    let result = client.apply_step(&request(), SOON, |state| states.push(state.clone())).await;
    assert_eq!(result.unwrap().policy_version, PolicyVersion(4));
    assert!(matches!(
        states.as_slice(),
        [StepState::Queued, StepState::Running { .. }, StepState::Done { .. }]
    ));
    assert_eq!(calls(&trainer), ["POST /v1/steps", "GET /v1/steps/s1", "GET /v1/steps/s1"]);
    let calls = trainer.calls.lock().unwrap();
    assert!(calls.iter().all(|(_, token, _)| token.as_deref() == Some("Bearer token-1")));
    let sent: StepRequest = serde_json::from_value(calls[0].2.clone()).unwrap();
    assert_eq!(sent, request());
}

#[tokio::test]
async fn a_step_that_was_already_applied_returns_at_once() {
    let mut tasks = JoinSet::new();
    let (client, trainer) = serve(&mut tasks, vec![(200, done())]).await;
    client.apply_step(&request(), SOON, |_| {}).await.unwrap();
    assert_eq!(calls(&trainer).len(), 1);
}

#[tokio::test]
async fn a_submission_is_retried_with_the_same_step_id_after_transient_errors() {
    let mut tasks = JoinSet::new();
    let busy = json!({"error": {"code": "busy", "message": "starting"}});
    let answers = vec![(503, busy.clone()), (500, busy), (200, done())];
    let (client, trainer) = serve(&mut tasks, answers).await;
    client.submit_step(&request()).await.unwrap();
    let calls = trainer.calls.lock().unwrap();
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|(_, _, body)| body["step_id"] == json!("s1")));
}

#[tokio::test]
async fn a_step_that_a_restarted_trainer_lost_is_submitted_again() {
    let mut tasks = JoinSet::new();
    let unknown = json!({"error": {"code": "unknown_step", "message": "no step s1"}});
    let answers = vec![(200, queued()), (404, unknown), (200, queued()), (200, done())];
    let (client, trainer) = serve(&mut tasks, answers).await;
    client.apply_step(&request(), SOON, |_| {}).await.unwrap();
    assert_eq!(
        calls(&trainer),
        ["POST /v1/steps", "GET /v1/steps/s1", "POST /v1/steps", "GET /v1/steps/s1"]
    );
}

#[tokio::test]
async fn a_failed_step_is_an_error_that_is_not_retried() {
    let mut tasks = JoinSet::new();
    let failed = json!({"step_id": "s1", "state": "failed", "error": "loss is not finite"});
    let (client, _) = serve(&mut tasks, vec![(200, queued()), (200, failed)]).await;
    let error = client.apply_step(&request(), SOON, |_| {}).await.unwrap_err();
    assert!(matches!(error.kind, TrainerErrorKind::StepFailed { .. }), "{error}");
    assert_eq!(error.retry(), Retry::Never);
    assert!(error.to_string().contains("loss is not finite"), "{error}");
}

#[tokio::test]
async fn refusals_and_invalid_replies_are_typed_and_not_retried() {
    let refusal = json!({"error": {"code": "bad_manifest", "message": "digest differs"}});
    for (status, body, word) in [
        (400, refusal, "bad_manifest"),
        (401, json!("who are you"), "who are you"),
        (200, json!({"step_id": "s2", "state": "queued"}), "s2"),
        (200, json!({"step_id": "s1", "state": "dreaming"}), "dreaming"),
        (200, json!(null), "invalid answer"),
    ] {
        let mut tasks = JoinSet::new();
        let (client, trainer) = serve(&mut tasks, vec![(status, body)]).await;
        let error = client.submit_step(&request()).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(error.retry(), Retry::Never);
        assert_eq!(calls(&trainer).len(), 1);
    }
}

#[tokio::test]
async fn waiting_ends_at_the_deadline() {
    let mut tasks = JoinSet::new();
    let answers = (0..50).map(|_| (200, running())).collect();
    let (client, _) = serve(&mut tasks, answers).await;
    let deadline = Duration::from_millis(120);
    let error = client.wait_step("s1", deadline, |_| {}).await.unwrap_err();
    assert!(matches!(error.kind, TrainerErrorKind::TimedOut(_)), "{error}");
    let absent = TrainerClient::new("http://127.0.0.1:9", None, &TlsClientPem::default()).unwrap();
    let error = absent.apply_step(&request(), deadline, |_| {}).await.unwrap_err();
    assert!(matches!(error.kind, TrainerErrorKind::TimedOut(_)), "{error}");
}

#[tokio::test]
async fn info_refuses_another_protocol_version() {
    let mut tasks = JoinSet::new();
    let mut info = TrainerInfo {
        protocol_version: 1,
        trainer: "t 1".to_owned(),
        model: ModelShape {
            hidden_layers: 1,
            moe_layers: vec![0],
            experts: 4,
            top_k: 2,
            vocab: 10,
            context: 10,
        },
        algorithms: vec!["grpo".to_owned()],
        policy_version: PolicyVersion(0),
        lineage: 0,
        last_step_id: None,
        checkpoint: "/c".into(),
        world_size: 1,
        devices: vec!["cpu".to_owned()],
    };
    let good = serde_json::to_value(&info).unwrap();
    info.protocol_version = 2;
    let newer = serde_json::to_value(&info).unwrap();
    let (client, _) = serve(&mut tasks, vec![(200, good), (200, newer)]).await;
    assert_eq!(client.info().await.unwrap().trainer, "t 1");
    let error = client.info().await.unwrap_err();
    assert!(matches!(error.kind, TrainerErrorKind::Protocol(2)), "{error}");
}

#[tokio::test]
async fn log_probs_and_checkpoints_are_requested() {
    let mut tasks = JoinSet::new();
    let mismatch =
        json!({"kl_k3": 0.1, "mean_abs_logprob_diff": 0.2, "extreme_token_fraction": {}});
    let logprobs = json!({
        "policy_version": 3, "logprobs": [[0.0, -0.5]], "mismatch": mismatch, "disagreement": null,
    });
    let checkpoint = json!({"checkpoint": "/c/3", "policy_version": 3});
    let (client, trainer) = serve(&mut tasks, vec![(200, logprobs), (200, checkpoint)]).await;
    let request =
        LogprobsRequest { manifest: "/b/manifest.json".into(), replay: true, temperature: 1.0 };
    assert_eq!(client.logprobs(&request, SOON).await.unwrap().logprobs, [vec![0.0, -0.5]]);
    assert_eq!(client.checkpoint(SOON).await.unwrap().checkpoint, "/c/3");
    assert_eq!(calls(&trainer), ["POST /v1/logprobs", "POST /v1/checkpoints"]);
}

#[test]
fn an_empty_algorithm_section_is_grpo_with_replayed_rollout_routes() {
    let algorithm = AlgorithmSection::default().check().unwrap();
    assert_eq!(algorithm.advantage, Some(AdvantageNorm::Std));
    assert_eq!(algorithm.routing_replay(), RoutingReplay::Rollout);
    let sent = algorithm.hyperparameters(0.7, true);
    assert_eq!((sent.clip_low, sent.clip_high, sent.dual_clip), (0.2, 0.28, Some(3.0)));
    assert!((sent.temperature - 0.7).abs() < 1e-12 && sent.measure_no_replay);
    let off = AlgorithmSection { dual_clip: Some(0.0), ..Default::default() };
    assert_eq!(off.check().unwrap().hyperparameters(1.0, false).dual_clip, None);
}

#[test]
fn all_problems_of_a_section_are_reported_at_once_with_their_remedies() {
    let section: AlgorithmSection = serde_json::from_value(json!({
        "clip_low": 1.5, "clip_high": -0.1, "dual_clip": 0.5, "aggregation": "token-sum-norm",
        "mini_steps": 0, "learning_rate": 0.0, "betas": [0.9, 1.0], "weight_decay": -1.0,
        "max_grad_norm": 0.0, "micro_batch_tokens": 0,
    }))
    .unwrap();
    let problems = section.check().unwrap_err();
    let keys: Vec<&str> =
        problems.iter().map(|p| p.key.strip_prefix("algorithm.").unwrap()).collect();
    assert_eq!(
        keys,
        [
            "clip_low",
            "clip_high",
            "dual_clip",
            "mini_steps",
            "micro_batch_tokens",
            "betas",
            "weight_decay",
            "max_grad_norm",
            "learning_rate",
            "loss_norm_tokens"
        ]
    );
    assert!(problems.iter().all(|problem| !problem.remedy.is_empty()));
    let trainer: TrainerSection = serde_json::from_value(json!({
        "url": "ftp://x", "token_env": "not a name!", "step_timeout": "0s",
    }))
    .unwrap();
    let problems = trainer.check().unwrap_err();
    assert_eq!(problems.len(), 3);
    assert!(problems.iter().all(|problem| !problem.to_string().contains("not a name!")));
}

#[test]
fn unknown_keys_are_errors_and_the_schema_describes_every_key() {
    let unknown = serde_json::from_value::<AlgorithmSection>(json!({"clip": 0.2})).unwrap_err();
    assert!(unknown.to_string().contains("clip_low"), "{unknown}");
    for schema in [schema_for!(AlgorithmSection), schema_for!(TrainerSection)] {
        for (key, property) in schema.as_value()["properties"].as_object().unwrap() {
            let description = property["description"].as_str().unwrap_or_default();
            assert!(!description.is_empty(), "{key}");
        }
    }
    let plan = TrainerSection::default().check().unwrap();
    assert_eq!((plan.url.clone(), plan.token()), (None, Ok(None)));
}
