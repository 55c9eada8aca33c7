//! Replies of the route for tokens: correct ones are read, wrong ones are refused by field.

use super::*;
use orchestrate_routing::{RoutedRows, encode_npy};
use orchestrate_types::{ModelShape, PolicyVersion};
use serde_json::{Value, json};
use std::sync::Arc;

fn shape() -> ModelShape {
    ModelShape {
        hidden_layers: 3,
        moe_layers: vec![1, 2],
        experts: 8,
        top_k: 2,
        vocab: 50,
        context: 100,
    }
}

fn expected() -> ExpectedReply {
    ExpectedReply {
        request_id: "r-1".to_owned(),
        prompt_tokens: 4,
        max_new_tokens: 8,
        routed_experts_start: Some(2),
        shape: Arc::new(shape()),
        serving: PolicyVersion(3),
    }
}

fn routing(rows: u16) -> String {
    let ids: Vec<u16> =
        (0..rows).flat_map(|r| [r % 8, (r + 1) % 8, (r + 3) % 8, (r + 5) % 8]).collect();
    encode_npy(&RoutedRows::from_ids(&shape(), 2, &ids).unwrap(), &shape()).unwrap()
}

fn reply() -> Value {
    let entry = |id: u32, lp: f64| {
        json!({"token_id": id, "logprob": lp, "rank": 1,
               "top_logprobs": [{"token_id": id, "logprob": lp, "rank": 1}]})
    };
    json!({
        "request_id": "generate-tokens-r-1",
        "output_mode": "tokens",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7,
                  "prompt_tokens_details": {"cached_tokens": 2}},
        "choices": [{
            "index": 0, "finish_reason": "stop", "stop_reason": 9, "token_ids": [7, 8, 9],
            "routed_experts": routing(4), "sampling_mask": null,
            "weight_versions": [{"version": "12", "start": 0, "end": 3}],
            "logprobs": {"content": [entry(7, -0.5), entry(8, 5e-7), entry(9, 0.0)]},
        }],
        "prompt_logprobs": null,
    })
}

fn check(reply: &Value) -> Result<CheckedReply, EngineErrorKind> {
    read(reply.to_string().as_bytes(), &expected())
}

#[test]
fn a_correct_reply_is_read_in_full() {
    let checked = check(&reply()).unwrap();
    assert!(checked.versions_by_token && checked.cached_tokens);
    let got = checked.generation;
    assert_eq!((got.output_ids(), got.finish()), (&[7, 8, 9][..], &Finish::Stop));
    assert_eq!(got.logprobs(), [-0.5, 0.0, 0.0]);
    assert_eq!(got.cached_tokens, 2);
    assert_eq!(got.versions(), single_version(PolicyVersion(12), 3));
    let rows = got.routed_experts.unwrap();
    assert_eq!((rows.start(), rows.rows()), (2, 4));
    assert_eq!(rows.row(3).unwrap(), [1, 2, 4, 6]);
    assert_eq!(got.routing_wire_bytes, routing(4).len());
}

#[test]
fn rows_that_were_not_requested_are_ignored() {
    let without_rows = ExpectedReply { routed_experts_start: None, ..expected() };
    let mut reply = reply();
    reply["choices"][0]["routed_experts"] = json!("not even base64");
    let got = read(reply.to_string().as_bytes(), &without_rows).unwrap().generation;
    assert!(got.routed_experts.is_none());
    assert_eq!(got.routing_wire_bytes, 15);
}

#[test]
fn without_a_reported_version_the_synced_one_is_used() {
    let mut reply = reply();
    reply["choices"][0]["weight_versions"] = json!(null);
    reply["usage"]["prompt_tokens_details"] = json!(null);
    let checked = check(&reply).unwrap();
    assert!(!checked.versions_by_token && !checked.cached_tokens);
    assert_eq!(checked.generation.versions(), single_version(PolicyVersion(3), 3));
    assert_eq!(checked.generation.cached_tokens, 0);
}

#[test]
fn a_request_aborted_before_it_ran_is_an_abort_without_tokens() {
    let mut reply = reply();
    reply["choices"][0]["finish_reason"] = json!("abort");
    reply["choices"][0]["token_ids"] = json!([]);
    reply["choices"][0]["logprobs"] = json!(null);
    reply["choices"][0]["routed_experts"] = json!(null);
    reply["choices"][0]["weight_versions"] = json!([]);
    reply["usage"] = json!(null);
    let got = check(&reply).unwrap().generation;
    assert_eq!((got.finish(), got.output_ids().len()), (&Finish::Abort, 0));
    assert!(got.routed_experts.is_none());
}

#[test]
fn every_wrong_field_is_named() {
    let span = |start: u32, end: u32| json!({"version": "12", "start": start, "end": end});
    let entry = |id: u32, lp: Value| json!({"token_id": id, "logprob": lp});
    let with_first = |first: Value| json!([first, entry(8, json!(-0.1)), entry(9, json!(-0.1))]);
    let choice = |key: &str| format!("/choices/0/{key}");
    for (path, value, message) in [
        ("/request_id".to_owned(), json!("r-1"), "`request_id`: answers request `r-1`"),
        ("/request_id".to_owned(), json!("generate-tokens-r-2"), "`request_id`"),
        ("/request_id".to_owned(), json!(null), "`request_id`"),
        ("/output_mode".to_owned(), json!("text"), "`output_mode`"),
        ("/usage".to_owned(), json!(null), "`usage.prompt_tokens`"),
        ("/usage/prompt_tokens".to_owned(), json!(5), "`usage.prompt_tokens`: 5 tokens"),
        ("/usage/completion_tokens".to_owned(), json!(2), "`usage.completion_tokens`"),
        (
            "/usage/prompt_tokens_details/cached_tokens".to_owned(),
            json!(5),
            "`usage.prompt_tokens_details.cached_tokens`",
        ),
        ("/choices".to_owned(), json!([]), "`choices`: 0 choices"),
        ("/choices".to_owned(), json!(null), "`choices`"),
        (choice("index"), json!(1), "`choices[0].index`"),
        (choice("finish_reason"), json!(null), "`choices[0].finish_reason`: missing"),
        (choice("finish_reason"), json!("repetition"), "`choices[0].finish_reason`: `repetition`"),
        (choice("token_ids"), json!(null), "`choices[0].token_ids`"),
        (choice("token_ids"), json!([7, 8, 50]), "`choices[0].token_ids`: token id 50"),
        (choice("token_ids"), json!([7, 8, -1]), "`choices[0].token_ids[2]`"),
        (choice("logprobs"), json!(null), "`choices[0].logprobs.content`: 0 entries"),
        (choice("logprobs/content"), json!(null), "`choices[0].logprobs.content`: 0 entries"),
        (
            choice("logprobs/content"),
            with_first(entry(6, json!(-0.5))),
            "`choices[0].logprobs.content`: entry 0 is for token 6",
        ),
        (
            choice("logprobs/content"),
            with_first(entry(7, json!(-9999.0))),
            "`choices[0].logprobs.content`: entry 0 is -9999",
        ),
        (choice("logprobs/content"), with_first(entry(7, json!(null))), "entry 0 is null"),
        (choice("logprobs/content"), with_first(entry(7, json!(0.5))), "entry 0 is 0.5"),
        (
            choice("logprobs/content"),
            with_first(json!({"token": "token_id:7", "logprob": -0.5})),
            "missing field `token_id`",
        ),
        (choice("routed_experts"), json!(null), "`choices[0].routed_experts`: requested"),
        (choice("routed_experts"), json!(""), "`choices[0].routed_experts`"),
        (choice("routed_experts"), json!(routing(3)), "[3, 3, 2]"),
        (choice("routed_experts"), json!({"data": "", "shape": []}), "`choices[0].routed_experts`"),
        (choice("weight_versions"), json!([]), "`choices[0].weight_versions`: covers 0 of 3"),
        (choice("weight_versions"), json!([span(0, 1), span(2, 3)]), "a gap"),
        (
            choice("weight_versions"),
            json!([{"version": "b-noflush", "start": 0, "end": 3}]),
            "`b-noflush` is not a policy version",
        ),
    ] {
        let mut reply = reply();
        *reply.pointer_mut(&path).unwrap() = value.clone();
        let error = check(&reply).expect_err(&path);
        assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{path}: {error:?}");
        let found = error.to_string();
        assert!(found.contains(message), "{path} {value}: {found}");
    }
    let mut two = reply();
    let choice = two["choices"][0].clone();
    two["choices"].as_array_mut().unwrap().push(choice);
    assert!(check(&two).unwrap_err().to_string().contains("`routed_experts`: a second"));
}

#[test]
fn every_prefix_of_a_correct_reply_is_refused() {
    let text = reply().to_string();
    for end in 0..text.len() {
        assert!(read(&text.as_bytes()[..end], &expected()).is_err(), "{end}");
    }
}
