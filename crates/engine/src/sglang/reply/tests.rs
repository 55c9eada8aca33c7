//! Malformed replies, from a table and at random: each is an error with its reason, none panics.

use super::*;
use orchestrate_routing::{RoutedRows, RoutingError, encode_sglang};
use orchestrate_types::{ModelShape, PolicyVersion};
use proptest::prelude::*;
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

fn check_reply(body: &[u8], expected: &ExpectedReply) -> Result<Generation, EngineErrorKind> {
    read(body, expected).map(|reply| reply.generation)
}

/// Rows of positions 2..6 of a sequence of 4 + 3 tokens.
fn routing(rows: u16) -> String {
    let ids: Vec<u16> =
        (0..rows).flat_map(|r| [r % 8, (r + 1) % 8, (r + 3) % 8, (r + 5) % 8]).collect();
    encode_sglang(&RoutedRows::from_ids(&shape(), 2, &ids).unwrap(), &shape()).unwrap()
}

fn reply() -> Value {
    json!({
        "text": "ok",
        "output_ids": [7, 8, 9],
        "meta_info": {
            "id": "r-1",
            "finish_reason": {"type": "stop", "matched": 9},
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "cached_tokens": 3,
            "num_retractions": 0,
            "weight_version": "12",
            "weight_versions": [{"version": "12", "start": 0, "end": 3}],
            "output_token_logprobs": [[-0.5, 7, null], [5e-7, 8, null], [0.0, 9, "x"]],
            "routed_experts": routing(4),
            "a_field_of_tomorrow": {"deep": [1, 2, 3]},
        },
    })
}

fn check(reply: &Value) -> Result<Generation, EngineErrorKind> {
    check_reply(reply.to_string().as_bytes(), &expected())
}

#[test]
fn a_correct_reply_is_read_in_full() {
    let got = check(&reply()).unwrap();
    assert_eq!(got.output_ids(), [7, 8, 9]);
    assert_eq!(got.logprobs(), [-0.5, 0.0, 0.0]);
    assert_eq!(*got.finish(), Finish::Stop);
    assert_eq!((got.cached_tokens, got.num_retractions), (3, 0));
    let version = PolicyVersion(12);
    assert_eq!(got.versions(), [VersionSpan { version, start: 0, end: 3 }]);
    let rows = got.routed_experts.unwrap();
    assert_eq!((rows.start(), rows.rows()), (2, 4));
    assert_eq!(got.routing_wire_bytes, routing(4).len());
}

#[test]
fn a_version_change_inside_one_reply_is_kept_by_token() {
    let mut reply = reply();
    reply["meta_info"]["weight_versions"] = json!([
        {"version": "default", "start": 0, "end": 1},
        {"version": "1", "start": 1, "end": 1},
        {"version": "1", "start": 1, "end": 3},
    ]);
    let got = check(&reply).unwrap();
    assert_eq!(
        got.versions(),
        [
            VersionSpan { version: PolicyVersion(0), start: 0, end: 1 },
            VersionSpan { version: PolicyVersion(1), start: 1, end: 3 },
        ]
    );
}

#[test]
fn a_reply_may_have_one_version_instead_of_spans() {
    let mut reply = reply();
    reply["meta_info"].as_object_mut().unwrap().remove("weight_versions");
    assert_eq!(check(&reply).unwrap().versions().len(), 1);
}

#[test]
fn a_request_aborted_in_the_queue_is_an_abort_without_tokens() {
    let reply = json!({
        "output_ids": [],
        "meta_info": {
            "id": "r-1",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        },
    });
    let got = check(&reply).unwrap();
    assert_eq!((got.finish(), got.output_ids().len()), (&Finish::Abort, 0));
    assert!(got.routed_experts.is_none());
}

#[test]
fn bodies_that_are_not_replies_are_refused() {
    for body in [
        &b""[..],
        b"<html><body>Bad Gateway</body></html>",
        b"null",
        b"[]",
        b"{}",
        b"\x1f\x8b\x08\x00\x00\x00",
        b"{\"output_ids\":[1,2",
        b"\xff\xfe\x00",
    ] {
        let error = check_reply(body, &expected()).unwrap_err();
        assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{error}");
    }
    let inside = check_reply(br#"{"error":{"message":"out of memory"}}"#, &expected());
    assert!(inside.unwrap_err().to_string().contains("out of memory"));
}

#[test]
fn hostile_json_is_refused_without_a_panic() {
    let deep = format!(r#"{{"meta_info":{}{}}}"#, "[".repeat(10_000), "]".repeat(10_000));
    let text = reply().to_string();
    for body in [
        deep,
        text.replace("-0.5", "NaN"),
        text.replace("-0.5", "-Infinity"),
        text.replace("-0.5", "-1e400"),
        text.replace("-0.5", "-1e39"),
        text.replace(r#""output_ids""#, r#""output_ids":[1],"output_ids""#),
        text.replace("[7,8,9]", "[7,8,99999999999999999999]"),
        format!("{text}{text}"),
    ] {
        assert!(check_reply(body.as_bytes(), &expected()).is_err(), "{}", &body[..60]);
    }
}

/// `(case, path into the reply, its new value or `None` to remove it, part of the error)`
type Mutation = (&'static str, &'static [&'static str], Option<Value>, &'static str);

const META: &str = "meta_info";
const ROUTING: &[&str] = &[META, "routed_experts"];
const LOGPROBS: &[&str] = &[META, "output_token_logprobs"];
const SPANS: &[&str] = &[META, "weight_versions"];
const FINISH: &[&str] = &[META, "finish_reason"];

fn mutations_of_tokens() -> Vec<Mutation> {
    vec![
        (
            "e7 another request",
            &[META, "id"],
            Some(json!("r-2")),
            "`meta_info.id`: answers request `r-2`",
        ),
        ("e7 no id", &[META, "id"], None, "`meta_info`: missing field `id`"),
        (
            "e7 another prompt",
            &[META, "prompt_tokens"],
            Some(json!(5)),
            "`meta_info.prompt_tokens`: 5 tokens",
        ),
        ("no prompt count", &[META, "prompt_tokens"], None, "`meta_info.prompt_tokens`"),
        (
            "wrong count",
            &[META, "completion_tokens"],
            Some(json!(2)),
            "`meta_info.completion_tokens`",
        ),
        ("cached too many", &[META, "cached_tokens"], Some(json!(5)), "`meta_info.cached_tokens`"),
        (
            "e8 beyond vocabulary",
            &["output_ids"],
            Some(json!([7, 8, 50])),
            "`output_ids`: token id 50",
        ),
        ("e8 negative id", &["output_ids"], Some(json!([7, 8, -1])), "`output_ids[2]`"),
        ("e8 float id", &["output_ids"], Some(json!([7, 8, 9.0])), "`output_ids[2]`"),
        ("e8 null id", &["output_ids"], Some(json!([7, 8, null])), "`output_ids[2]`"),
        ("e8 ids missing", &["output_ids"], None, "missing field `output_ids`"),
        (
            "e8 more than asked",
            &["output_ids"],
            Some(json!(vec![1; 9])),
            "`meta_info.completion_tokens`",
        ),
        ("e8 logprobs missing", LOGPROBS, None, "`meta_info.output_token_logprobs`: 0 entries"),
        ("e8 logprobs null", LOGPROBS, Some(json!(null)), "0 entries"),
        ("e8 too few", LOGPROBS, Some(json!([[-0.5, 7, null]])), "1 entries"),
        (
            "e8 no id",
            LOGPROBS,
            Some(json!([[-0.5], [-0.1], [-0.1]])),
            "`meta_info.output_token_logprobs[0]",
        ),
        (
            "e8 of another token",
            LOGPROBS,
            Some(json!([[-0.5, 7, null], [-0.1, 9, null], [-0.1, 9, null]])),
            "token 9",
        ),
        (
            "e8 null value",
            LOGPROBS,
            Some(json!([[null, 7, null], [-0.1, 8, null], [-0.1, 9, null]])),
            "null",
        ),
        (
            "e8 positive",
            LOGPROBS,
            Some(json!([[0.5, 7, null], [-0.1, 8, null], [-0.1, 9, null]])),
            "0.5",
        ),
        (
            "e8 floor",
            LOGPROBS,
            Some(json!([[-9999.0, 7, null], [-0.1, 8, null], [-0.1, 9, null]])),
            "-9999",
        ),
    ]
}

fn mutations_of_rows_and_ends() -> Vec<Mutation> {
    let span = |start: u32, end: u32| json!({"version": "12", "start": start, "end": end});
    vec![
        ("e9 missing", ROUTING, None, "`meta_info.routed_experts`: requested, but missing"),
        ("e9 null", ROUTING, Some(json!(null)), "missing"),
        ("e9 empty", ROUTING, Some(json!("")), "0 base64"),
        ("e9 a number", ROUTING, Some(json!(7)), "`meta_info.routed_experts`"),
        ("e9 a list", ROUTING, Some(json!([[1, 2]])), "`meta_info.routed_experts`"),
        ("e9 no base64", ROUTING, Some(json!("!".repeat(routing(4).len()))), "base64"),
        ("e9 white space", ROUTING, Some(json!(format!(" {}", routing(4)))), "base64"),
        ("e9 cut off", ROUTING, Some(json!(routing(4)[..126])), "truncated"),
        ("e10 one row short", ROUTING, Some(json!(routing(3))), "base64"),
        ("e10 two rows long", ROUTING, Some(json!(routing(7))), "base64"),
        ("e11 nothing captured", ROUTING, Some(json!("A".repeat(128))), "captured nothing"),
        ("e15 no version", SPANS, Some(json!([])), "0 of 3"),
        ("e15 no number", SPANS, Some(json!([{"version": "b", "start": 0, "end": 3}])), "`b`"),
        ("e15 gap", SPANS, Some(json!([span(0, 1), span(2, 3)])), "gap"),
        ("e15 overlap", SPANS, Some(json!([span(0, 2), span(1, 3)])), "gap"),
        ("e15 backwards", SPANS, Some(json!([span(0, 2), span(2, 1)])), "gap"),
        ("e15 short", SPANS, Some(json!([span(0, 2)])), "2 of 3"),
        ("e15 long", SPANS, Some(json!([span(0, 4)])), "4 of 3"),
        ("no finish", FINISH, Some(json!(null)), "`meta_info.finish_reason`"),
        (
            "unknown finish",
            FINISH,
            Some(json!({"type": "tired"})),
            "`meta_info.finish_reason`: `tired`",
        ),
        (
            "logits were not numbers",
            FINISH,
            Some(json!({"type": "stop", "matched": "NaN happened"})),
            "NaN",
        ),
        (
            "e14 abort without rows",
            &[META],
            Some(json!({
                "id": "r-1",
                "finish_reason": {"type": "abort", "message": "Aborted", "status_code": null},
                "prompt_tokens": 4,
                "weight_version": "12",
                "output_token_logprobs": [[-0.5, 7, null], [-0.1, 8, null], [-0.1, 9, null]],
            })),
            "missing",
        ),
    ]
}

#[test]
fn every_invalid_field_is_a_typed_error_with_its_reason() {
    for (case, path, value, message) in
        mutations_of_tokens().into_iter().chain(mutations_of_rows_and_ends())
    {
        let mut reply = reply();
        let (last, parents) = path.split_last().unwrap();
        let parent = parents.iter().fold(&mut reply, |value, key| &mut value[*key]);
        match value {
            Some(value) => parent[*last] = value,
            None => {
                parent.as_object_mut().unwrap().remove(*last);
            }
        }
        let error = check(&reply).expect_err(case);
        assert!(matches!(error, EngineErrorKind::InvalidReply(_)), "{case}: {error}");
        assert!(error.to_string().contains(message), "{case}: {error}");
    }
}

#[test]
fn an_abort_with_a_status_is_that_error() {
    let mut reply = reply();
    reply["meta_info"]["finish_reason"] =
        json!({"type": "abort", "message": "queue is full", "status_code": 503});
    let error = check(&reply).unwrap_err();
    assert!(
        matches!(&error, EngineErrorKind::Refused { status: 503, message, .. } if message == "queue is full")
    );
}

#[test]
fn a_payload_with_escapes_or_under_another_key_is_refused() {
    let text = reply().to_string();
    let payload = routing(4);
    assert!(payload.contains('/') || payload.contains('A'));
    let spellings = [
        // Legal JSON for the same characters. No engine sends it, and it could not be borrowed.
        text.replace(&payload, &payload.replacen('A', "\\u0041", 1)),
        text.replace("\"routed_experts\"", "\"routed\\u005fexperts\""),
        // Two payloads.
        text.replace("\"text\":\"ok\"", &format!("\"routed_experts\":\"{payload}\"")),
        // Under another key.
        text.replace("\"meta_info\":{", "\"meta_info\":{\"a\":{").replace(
            &format!("\"routed_experts\":\"{payload}\""),
            &format!("\"b\":1}},\"c\":{{\"routed_experts\":\"{payload}\"}}"),
        ),
        // Under another key, with an empty one under an escaped key.
        text.replace(
            "\"meta_info\":{",
            &format!("\"x\":{{\"routed_experts\":\"{payload}\"}},\"meta_info\":{{"),
        )
        .replace(
            &format!(",\"routed_experts\":\"{payload}\",\"a_field"),
            ",\"routed\\u005fexperts\":\"\",\"a_field",
        ),
    ];
    for body in spellings {
        assert_ne!(body, text);
        assert!(check_reply(body.as_bytes(), &expected()).is_err(), "{body}");
    }
    // The generated text may mention the key.
    let quoted = text.replace("\"ok\"", r#""say \"routed_experts\":\"x\"""#);
    assert_eq!(check_reply(quoted.as_bytes(), &expected()).unwrap().output_ids(), [7, 8, 9]);
}

#[test]
fn a_refused_payload_keeps_the_routing_error() {
    let mut reply = reply();
    reply["meta_info"]["routed_experts"] = json!("A".repeat(128));
    let error = check(&reply).unwrap_err();
    assert!(matches!(error.routing(), Some(RoutingError::NotCaptured { .. })), "{error:?}");
    let mut reply = self::reply();
    reply["output_ids"] = json!(7);
    assert!(check(&reply).unwrap_err().routing().is_none());
}

#[test]
fn every_prefix_of_a_correct_reply_is_refused() {
    let text = reply().to_string();
    for end in 0..text.len() {
        assert!(check_reply(&text.as_bytes()[..end], &expected()).is_err(), "{end}");
    }
}

proptest! {
    #[test]
    fn prop_changed_bytes_never_panic(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut body = reply().to_string().into_bytes();
        for (index, byte) in changes {
            let at = index.index(body.len());
            body[at] = byte;
        }
        if let Ok(got) = check_reply(&body, &expected()) {
            prop_assert_eq!(got.output_ids().len(), got.logprobs().len());
            prop_assert!(got.output_ids().iter().all(|&id| id < 50));
            prop_assert!(got.logprobs().iter().all(|lp| lp.is_finite() && *lp <= 0.0));
        }
    }
}
