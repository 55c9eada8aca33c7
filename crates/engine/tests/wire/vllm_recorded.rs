//! Recorded replies of vLLM 0.32.0.

use crate::server::{
    Recorded, Reply, VLLM, options, recorded, recording, replay, request, sample, serve, shape,
    tokens,
};
use orchestrate_engine::{Client, EngineErrorKind, Finish, Vllm, VllmClient};
use orchestrate_routing::MaskBuilder;
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

#[tokio::test]
async fn recorded_turns_join_into_one_mask_whichever_rows_were_requested() {
    let mut tasks = JoinSet::new();
    let shape = Arc::new(shape());
    let mut delta = MaskBuilder::new(shape.clone()).unwrap();
    let mut total = 0;
    for name in ["turn1", "turn2", "turn3", "turn4"] {
        let Some(exchanges) = recording(VLLM, name) else { return };
        let mut full = MaskBuilder::new(shape.clone()).unwrap();
        for exchange in &exchanges {
            let Recorded { request, status, body } = recorded(exchange).unwrap();
            let prompt = tokens(&request).ids.len();
            let client = replay::<Vllm>(&mut tasks, status, body).await;
            let got = sample(&client, request).await.unwrap();
            assert_eq!((got.output_ids().len(), got.finish()), (16, &Finish::Length));
            assert_eq!(got.versions()[0].version, PolicyVersion(0), "`default`");
            assert_eq!(got.cached_tokens % 32, 0, "whole blocks");
            let now = prompt + got.output_ids().len();
            let rows = got.routed_experts.unwrap();
            if rows.start() <= full.rows() {
                full.push(rows.clone(), now, PolicyVersion(0)).unwrap();
            }
            if rows.start() <= delta.rows() && now > total {
                let report = delta.push(rows, now, PolicyVersion(0)).unwrap();
                assert_eq!(report.drift_rows, 0, "cached rows equal computed ones");
                total = now;
            }
        }
        assert_eq!(full.finish(total).unwrap(), delta.clone().finish(total).unwrap());
    }
}

#[tokio::test]
async fn every_recorded_reply_has_a_row_for_each_input_from_the_start() {
    let mut tasks = JoinSet::new();
    let (mut replies, mut aborted, mut stopped, mut clamped) = (0, 0, 0, 0);
    for name in [
        "abort_all",
        "abort_by_id",
        "abort_by_prefixed_id",
        "abort_scaleout",
        "bad_requests",
        "chunked_prefill",
        "cold_turn1",
        "cold_turn2",
        "cold_turn3",
        "cold_turn4",
        "concurrent8",
        "midflight_update_keep",
        "midflight_update_keep_reset_running",
        "overlong",
        "pause_abort",
        "pause_keep",
        "pause_wait",
        "stop",
        "turn1",
        "turn2",
        "turn3",
        "turn4",
        "variants",
        "weight_update",
    ] {
        let Some(exchanges) = recording(VLLM, name) else { return };
        for exchange in &exchanges {
            let Some(Recorded { request, status: 200, mut body }) = recorded(exchange) else {
                continue;
            };
            if body.contains("\"output_mode\":\"text\"") {
                continue;
            }
            for name in ["b-noflush", "a-flush", "b-mid-reset", "b-mid", "a-mid", "b-keep"] {
                body = body.replace(&format!("\"{name}\""), "\"4\"");
            }
            let requested = request.sampling.max_new_tokens;
            let (prompt, start) =
                (tokens(&request).ids.len(), tokens(&request).routed_experts_start.unwrap());
            let client = replay::<Vllm>(&mut tasks, 200, body).await;
            let got =
                sample(&client, request).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            let rows = got.routed_experts.as_ref().unwrap();
            assert_eq!(rows.rows(), prompt + got.output_ids().len() - 1 - start, "{name}");
            assert_eq!(got.versions().last().unwrap().end, got.output_ids().len(), "{name}");
            replies += 1;
            aborted += u32::from(*got.finish() == Finish::Abort);
            stopped += u32::from(*got.finish() == Finish::Stop);
            let short = *got.finish() == Finish::Length && got.output_ids().len() < requested;
            clamped += u32::from(short);
        }
    }
    assert!(replies > 40 && aborted >= 4 && stopped >= 1, "{replies} {aborted} {stopped}");
    assert!(clamped >= 2, "replies end at the end of the context");
}

#[tokio::test]
async fn recorded_refusals_are_typed_and_never_retried() {
    let mut tasks = JoinSet::new();
    let mut refusals = 0;
    for name in ["bad_requests", "overlong", "variants"] {
        let Some(exchanges) = recording(VLLM, name) else { return };
        for exchange in exchanges {
            let status = u16::try_from(exchange["response"]["status"].as_u64().unwrap()).unwrap();
            let Some(body) = exchange["response"]["body_raw"].as_str() else { continue };
            if status == 200 {
                continue;
            }
            refusals += 1;
            let client = replay::<Vllm>(&mut tasks, status, body.to_owned()).await;
            let error = sample(&client, request(vec![1, 2, 3], 4, Some(0))).await.unwrap_err();
            assert_eq!(error.retry(), Retry::Never, "{error}");
            match &error.kind {
                EngineErrorKind::Refused { status: found, message, .. } => {
                    assert_eq!(*found, status);
                    assert!(!message.is_empty() && !message.starts_with('{'), "{message}");
                }
                other => panic!("{other}"),
            }
        }
    }
    assert!(refusals >= 10, "{refusals}");
}

#[tokio::test]
async fn dense_layers_are_left_out_of_rows() {
    let mut tasks = JoinSet::new();
    let Some(exchanges) = recording(VLLM, "dense_layers") else { return };
    let Recorded { request, body, .. } = recorded(&exchanges[0]).unwrap();
    let first: Value = serde_json::from_str(&body).unwrap();
    let id = first["request_id"].as_str().unwrap().to_owned();
    let (url, _) = serve(&mut tasks, move |_, sent| {
        let own = format!("generate-tokens-{}", sent["request_id"].as_str().unwrap());
        Reply::Now(200, body.replace(&id, &own))
    })
    .await;
    let mut options = options(&url);
    let error = Client::<Vllm>::new(options.clone()).unwrap();
    let error = sample(&error, request.clone()).await.unwrap_err();
    assert!(error.to_string().contains("`choices[0].routed_experts`"), "{error}");
    options.shape.moe_layers = vec![1, 3];
    let client = Client::<Vllm>::new(options).unwrap();
    let rows = sample(&client, request).await.unwrap().routed_experts.unwrap();
    assert_eq!(rows.row_bytes(), 4);
}

/// A server with the recorded replies of all routes that do not sample.
async fn information(tasks: &mut JoinSet<()>, developer: bool) -> Option<String> {
    let text = |name: &str| {
        let exchanges = recording(VLLM, name)?;
        Some(exchanges[0]["response"]["body_raw"].as_str()?.to_owned())
    };
    let server = text("info_server_info")?;
    let (version, models) = (text("info_version")?, text("info_v1_models")?);
    let (weights, metrics) = (text("info_weight_info")?, text("metrics_start")?);
    let (url, _) = serve(tasks, move |path, _| match path {
        "/version" => Reply::Now(200, version.clone()),
        "/v1/models" => Reply::Now(200, models.clone()),
        "/metrics" => Reply::Now(200, metrics.clone()),
        "/server_info" if developer => Reply::Now(200, server.clone()),
        "/weight_info" if developer => Reply::Now(200, weights.clone()),
        _ => Reply::Now(404, "{\"detail\":\"Not Found\"}".to_owned()),
    })
    .await;
    Some(url)
}

#[tokio::test]
async fn recorded_server_information_is_parsed() {
    let mut tasks = JoinSet::new();
    let Some(url) = information(&mut tasks, true).await else { return };
    let patience = Duration::from_mins(1);
    let (_, info) = VllmClient::connect(options(&url), patience).await.unwrap();
    assert_eq!((info.engine.as_str(), info.model_path.as_str()), ("vllm 0.32.0", "model-a"));
    assert_eq!(info.policy_version, Some(PolicyVersion(0)));
    assert!(info.routed_experts);
    assert_eq!((info.page_size, info.context), (32, Some(1024)));
}

#[tokio::test]
async fn a_server_without_developer_mode_is_refused_with_the_variable_to_set() {
    let mut tasks = JoinSet::new();
    let Some(url) = information(&mut tasks, false).await else { return };
    let error = VllmClient::connect(options(&url), Duration::ZERO).await.unwrap_err();
    assert!(error.to_string().contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    assert_eq!(error.retry(), Retry::Never);
}
