//! Recorded replies of SGLang 0.5.23.

use crate::server::{
    Recorded, Reply, SGLANG, options, recorded, recording, replay, request, sample, serve, shape,
    tokens, tokens_mut,
};
use orchestrate_engine::{
    Client, ClientOptions, Engine as _, EngineErrorKind, Finish, Sglang, SglangClient,
};
use orchestrate_routing::MaskBuilder;
use orchestrate_types::{PolicyVersion, Retry};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

#[tokio::test]
async fn recorded_turns_join_into_one_mask_whichever_rows_were_requested() {
    let mut tasks = JoinSet::new();
    let shape = Arc::new(shape());
    let mut delta = MaskBuilder::new(shape.clone()).unwrap();
    let mut total = 0;
    let mut last = None;
    for name in ["turn1", "turn2", "turn3", "turn4"] {
        let Some(exchanges) = recording(SGLANG, name) else { return };
        let mut full = MaskBuilder::new(shape.clone()).unwrap();
        for (index, exchange) in exchanges.iter().enumerate() {
            let Recorded { mut request, status, body } = recorded(exchange).unwrap();
            if name == "turn1" && index == 1 {
                tokens_mut(&mut request).routed_experts_start = Some(0);
            }
            let prompt = tokens(&request).ids.len();
            let wants = tokens(&request).routed_experts_start;
            let client = replay::<Sglang>(&mut tasks, status, body).await;
            let got = sample(&client, request).await.unwrap();
            assert_eq!((got.output_ids().len(), got.finish()), (16, &Finish::Length));
            assert_eq!(got.versions()[0].version, PolicyVersion(0), "`default`");
            let now = prompt + got.output_ids().len();
            assert_eq!(got.routed_experts.is_some(), wants.is_some());
            let Some(rows) = got.routed_experts else { continue };
            if rows.start() <= full.rows() {
                full.push(rows.clone(), now, PolicyVersion(0)).unwrap();
            }
            if rows.start() <= delta.rows() && now > total {
                let report = delta.push(rows, now, PolicyVersion(0)).unwrap();
                assert_eq!(report.drift_rows, 0, "cached rows equal computed ones");
                total = now;
            }
        }
        last = Some((full.finish(total).unwrap(), delta.clone().finish(total).unwrap()));
    }
    let (full, delta) = last.unwrap();
    assert_eq!(full, delta);
    assert_eq!(full.rows(), total - 1);
}

#[tokio::test]
async fn recorded_aborts_stops_and_short_replies_are_normal_results() {
    let mut tasks = JoinSet::new();
    for (name, index, finish) in [
        ("abort_by_rid", 0, Finish::Abort),
        ("pause_abort", 0, Finish::Abort),
        ("stop", 2, Finish::Stop),
        ("max_new_tokens_0_1", 1, Finish::Length),
        ("chunked_prefill", 0, Finish::Length),
    ] {
        let Some(exchanges) = recording(SGLANG, name) else { return };
        let Recorded { request, status, body } = recorded(&exchanges[index]).unwrap();
        let prompt = tokens(&request).ids.len();
        let start = tokens(&request).routed_experts_start.unwrap();
        let client = replay::<Sglang>(&mut tasks, status, body).await;
        let got = sample(&client, request).await.unwrap();
        assert_eq!(*got.finish(), finish, "{name}");
        let rows = got.routed_experts.as_ref().unwrap();
        assert_eq!(rows.rows(), prompt + got.output_ids().len() - 1 - start, "{name}");
    }
}

#[tokio::test]
async fn recorded_refusals_are_typed_and_never_retried() {
    let mut tasks = JoinSet::new();
    for name in ["bad_requests", "overlong"] {
        let Some(exchanges) = recording(SGLANG, name) else { return };
        for exchange in exchanges {
            let status = exchange["response"]["status"].as_u64().unwrap();
            let Some(body) = exchange["response"]["body_raw"].as_str() else { continue };
            if status == 200 || body.is_empty() {
                continue;
            }
            let status = u16::try_from(status).unwrap();
            let client = replay::<Sglang>(&mut tasks, status, body.to_owned()).await;
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
}

#[tokio::test]
async fn recorded_server_info_is_parsed() {
    let (Some(server), Some(model)) =
        (recording(SGLANG, "info_server_info"), recording(SGLANG, "info_model_info"))
    else {
        return;
    };
    let text = |exchange: &Value| exchange["response"]["body_raw"].as_str().unwrap().to_owned();
    let models = recording(SGLANG, "info_v1_models").unwrap();
    let (server, model, models) = (text(&server[0]), text(&model[0]), text(&models[0]));
    let mut tasks = JoinSet::new();
    let (url, _) = serve(&mut tasks, move |path, _| match path {
        "/server_info" => Reply::Now(200, server.clone()),
        "/v1/models" => Reply::Now(200, models.clone()),
        _ => Reply::Now(200, model.clone()),
    })
    .await;
    let patience = Duration::from_mins(1);
    let (_, info) = SglangClient::connect(options(&url), patience).await.unwrap();
    assert_eq!((info.engine.as_str(), info.model_path.as_str()), ("sglang 0.5.23", "model-a"));
    assert_eq!(info.policy_version, Some(PolicyVersion(0)));
    assert!(info.routed_experts);
    // `/server_info` has null for the context.
    assert_eq!((info.page_size, info.context), (1, Some(1024)));
}

/// Every recorded reply to token ids, with the names of weights replaced by numbers.
fn all_replies() -> Option<Vec<(String, Recorded)>> {
    let names = [
        "abort_all",
        "abort_by_rid",
        "bad_requests",
        "chunked_prefill",
        "cold_turn1",
        "cold_turn2",
        "cold_turn3",
        "cold_turn4",
        "concurrent8",
        "logprob_start_len",
        "max_new_tokens_0_1",
        "midflight_update_in_place_flush",
        "midflight_update_in_place_noflush",
        "midflight_update_retract_flush",
        "overlong",
        "pause_abort",
        "pause_in_place",
        "pause_retract",
        "retraction_kv_pressure",
        "stop",
        "stop_no_ignore_eos",
        "turn1",
        "turn2",
        "turn3",
        "turn4",
        "weight_update",
        "weight_update_abort_all",
        "weight_update_inflight",
    ];
    let mut replies = Vec::new();
    for name in names {
        for exchange in recording(SGLANG, name)? {
            let Some(mut recorded) = recorded(&exchange) else { continue };
            if recorded.status != 200 {
                continue;
            }
            for (number, name) in [
                "b-noflush",
                "a-flush",
                "a-abortall",
                "b-inplace-flush",
                "b-inplace",
                "a-retract",
                "b-inflight",
                "a-final",
            ]
            .iter()
            .enumerate()
            {
                let (old, new) = (format!("\"{name}\""), format!("\"{}\"", number + 1));
                recorded.body = recorded.body.replace(&old, &new);
            }
            replies.push((name.to_owned(), recorded));
        }
    }
    Some(replies)
}

#[tokio::test]
async fn every_recorded_reply_has_a_row_for_each_input_from_the_start() {
    let mut tasks = JoinSet::new();
    let Some(replies) = all_replies() else { return };
    assert!(replies.len() > 60, "{}", replies.len());
    let (mut aborted, mut stopped, mut retracted, mut changed) = (0, 0, 0, 0);
    for (name, Recorded { mut request, status, body }) in replies {
        // Nothing was sampled: the budget of the recording was 0.
        request.sampling.max_new_tokens = request.sampling.max_new_tokens.max(1);
        let (prompt, start) = (tokens(&request).ids.len(), tokens(&request).routed_experts_start);
        let client = replay::<Sglang>(&mut tasks, status, body).await;
        let got = sample(&client, request).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let rows = got.routed_experts.as_ref().map(orchestrate_routing::RoutedRows::rows);
        assert_eq!(rows, start.map(|start| prompt + got.output_ids().len() - 1 - start), "{name}");
        assert_eq!(
            got.versions().last().map_or(0, |span| span.end),
            got.output_ids().len(),
            "{name}"
        );
        assert!(got.cached_tokens < prompt, "the last token is always computed");
        aborted += u32::from(*got.finish() == Finish::Abort);
        stopped += u32::from(*got.finish() == Finish::Stop);
        retracted += u32::from(got.num_retractions > 0);
        changed += u32::from(got.versions().len() > 1);
    }
    assert!(aborted >= 4 && stopped >= 3 && retracted >= 4 && changed >= 2);
}

#[tokio::test]
async fn a_repeated_prompt_is_cached_to_its_last_token_and_a_turn_to_its_last_but_one() {
    let mut tasks = JoinSet::new();
    let mut before = 0;
    for name in ["turn1", "turn2", "turn3", "turn4"] {
        let Some(exchanges) = recording(SGLANG, name) else { return };
        for (index, exchange) in exchanges.iter().enumerate() {
            let Recorded { request, status, body } = recorded(exchange).unwrap();
            let prompt = tokens(&request).ids.len();
            let client = replay::<Sglang>(&mut tasks, status, body).await;
            let got = sample(&client, request).await.unwrap();
            if index > 0 {
                assert_eq!(got.cached_tokens, prompt - 1, "{name}");
            } else if before > 0 {
                assert_eq!(got.cached_tokens, before - 1, "{name}");
            }
            before = prompt + got.output_ids().len();
        }
    }
}

#[tokio::test]
async fn dense_layers_are_left_out_of_rows() {
    let mut tasks = JoinSet::new();
    let Some(exchanges) = recording(SGLANG, "dense_layers_glm4_moe") else { return };
    let Recorded { request, body, .. } = recorded(&exchanges[0]).unwrap();
    let first: Value = serde_json::from_str(&body).unwrap();
    let id = first["meta_info"]["id"].as_str().unwrap().to_owned();
    let (url, _) = serve(&mut tasks, move |_, sent| {
        Reply::Now(200, body.replace(&id, sent["rid"].as_str().unwrap()))
    })
    .await;
    let rows = tokens(&request).ids.len() + first["output_ids"].as_array().unwrap().len() - 1;
    let layers = |moe_layers: Vec<usize>| {
        let mut options = options(&url);
        let ids = 4 * decoded_length(first["meta_info"]["routed_experts"].as_str().unwrap()) / 16;
        options.shape.hidden_layers = ids / rows / 2;
        options.shape.moe_layers = moe_layers.into_iter().filter(|&l| l < ids / rows / 2).collect();
        options
    };
    let sparse: Vec<usize> = (1..8).collect();
    let client = Client::<Sglang>::new(layers(sparse)).unwrap();
    let got = sample(&client, request.clone()).await.unwrap();
    assert_eq!(got.routed_experts.unwrap().rows(), rows);
    // Zero is also a valid expert id: only the model's configuration shows which layers are dense.
    let client = Client::<Sglang>::new(layers((0..8).collect())).unwrap();
    let error = sample(&client, request).await.unwrap_err();
    assert!(error.to_string().contains("`meta_info.routed_experts`"), "{error}");
}

/// Bytes behind padded base64.
fn decoded_length(text: &str) -> usize {
    text.len() / 4 * 3 - text.bytes().rev().take_while(|&byte| byte == b'=').count()
}

#[tokio::test]
async fn weight_names_that_are_not_numbers_are_refused() {
    let mut tasks = JoinSet::new();
    let Some(exchanges) = recording(SGLANG, "weight_update") else { return };
    // Index 2: new weights with the cache of the old ones. Its rows belong to neither.
    let Recorded { request, status, body } = recorded(&exchanges[2]).unwrap();
    let client = replay::<Sglang>(&mut tasks, status, body).await;
    let error = sample(&client, request).await.unwrap_err();
    assert!(error.to_string().contains("`meta_info.weight_versions`: `b-noflush`"), "{error}");
}

#[tokio::test]
async fn after_a_failed_update_nothing_is_sampled() {
    // The server refused to clear its cache during requests, but updated the weights anyway.
    let mut tasks = JoinSet::new();
    let Some(exchanges) = recording(SGLANG, "midflight_update_in_place_flush") else { return };
    let update = exchanges.iter().find(|e| e["request"]["path"] == "/update_weights_from_disk");
    let refused = update.unwrap()["response"]["body_raw"].as_str().unwrap().to_owned();
    assert_eq!(update.unwrap()["response"]["status"], 400);
    let (url, mut seen) = serve(&mut tasks, move |path, _| match path {
        "/update_weights_from_disk" => Reply::Now(400, refused.clone()),
        _ => Reply::Now(200, json!({"status": "ok"}).to_string()),
    })
    .await;
    let client = SglangClient::new(ClientOptions { ..options(&url) }).unwrap();
    let folder = camino::Utf8Path::new("/ckpt/7");
    let error = client.sync_weights(folder, PolicyVersion(7)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Refused { status: 400, .. }), "{error}");
    while seen.try_recv().is_ok() {}
    let error = sample(&client, request(vec![1], 4, None)).await.unwrap_err();
    assert!(matches!(error.kind, EngineErrorKind::Unsupported(_)), "{error}");
    assert!(seen.try_recv().is_err(), "nothing was sent");
}
