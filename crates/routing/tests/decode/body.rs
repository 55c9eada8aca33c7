//! Cutting the routed experts out of a reply.

use crate::{shape, varied};
use orchestrate_routing::{RoutedRows, RoutingError, encode_npy, split_body};
use proptest::prelude::*;
use serde_json::{Value, json};

fn split(body: &str) -> (String, Vec<&str>) {
    let split = split_body(body.as_bytes()).unwrap();
    let payloads = split.payloads.into_iter().map(|range| &body[range]).collect();
    (String::from_utf8(split.json).unwrap(), payloads)
}

#[test]
fn payloads_are_found_wherever_engines_put_them() {
    for (body, rest, payloads) in [
        (
            r#"{"text":"a","meta_info":{"id":"1","routed_experts":"AAAA","cached":2}}"#,
            r#"{"text":"a","meta_info":{"id":"1","routed_experts":"","cached":2}}"#,
            vec!["AAAA"],
        ),
        (
            r#"{"choices":[{"index":0}],"sglext":{"routed_experts" : "AB=="}}"#,
            r#"{"choices":[{"index":0}],"sglext":{"routed_experts" : ""}}"#,
            vec!["AB=="],
        ),
        (
            "{\"choices\":[{\"routed_experts\":\r\n\t \"AA==\"},{\"routed_experts\":null},{\"routed_experts\":\"\"}]}",
            "{\"choices\":[{\"routed_experts\":\r\n\t \"\"},{\"routed_experts\":null},{\"routed_experts\":\"\"}]}",
            vec!["AA==", ""],
        ),
        (r#"{"routed_experts":[[1,2]]}"#, r#"{"routed_experts":[[1,2]]}"#, vec![]),
        (r#"{"no":"experts"}"#, r#"{"no":"experts"}"#, vec![]),
        ("", "", vec![]),
    ] {
        assert_eq!(split(body), (rest.to_owned(), payloads));
    }
}

#[test]
fn a_payload_of_any_length_ends_at_its_quote() {
    let boundaries = (1..=3).flat_map(|block| block * 2048 - 2..=block * 2048 + 2);
    for length in boundaries.chain([0, 1, 100_000]) {
        let payload = "A".repeat(length);
        let body = format!(r#"{{"routed_experts":"{payload}","id":"x"}}"#);
        let rest = r#"{"routed_experts":"","id":"x"}"#.to_owned();
        assert_eq!(split(&body), (rest, vec![payload.as_str()]));
        let cut_off = format!(r#"{{"routed_experts":"{payload}"#);
        let error = split_body(cut_off.as_bytes()).unwrap_err();
        assert_eq!(error, RoutingError::Body("the body ends inside the string"), "{length}");
    }
}

#[test]
fn a_file_ends_where_its_header_says_or_else_at_the_next_quote() {
    let shape = shape(6, &[0, 1, 2, 3, 4, 5], 256, 8);
    for count in [0, 1, 82, 83, 84, 400] {
        let ids = varied(&shape, count);
        let rows = RoutedRows::from_ids(&shape, 0, &ids).unwrap();
        let file = encode_npy(&rows, &shape).unwrap();
        let body = format!("{{\"routed_experts\": \"{file}\", \"b\": \"{file}\"}}");
        assert_eq!(split(&body).1, [file.as_str()], "{count}");
        // A file that is shorter or longer than its header says ends at its quote.
        for wrong in
            [file.get(..file.len().saturating_sub(4)).unwrap().to_owned(), file.clone() + "AAAA"]
        {
            let body = format!("{{\"routed_experts\": \"{wrong}\", \"b\": \"{file}\"}}");
            assert_eq!(split(&body).1, [wrong.as_str()], "{count}");
            assert!(split_body(format!("{{\"routed_experts\": \"{wrong}").as_bytes()).is_err());
        }
    }
}

#[test]
fn model_text_is_never_mistaken_for_a_payload() {
    let words = [
        "\"routed_experts\":\"AAAA\"",
        "routed_experts",
        "\\\"routed_experts\": \"x\"",
        "\"routed_experts",
        "routed_experts\"",
    ];
    for text in words {
        let reply = json!({"text": text, text: [text, {text: text}], "routed_experts": "QUJD"});
        let body = reply.to_string();
        let split = split_body(body.as_bytes()).unwrap();
        let mut rest: Value = serde_json::from_slice(&split.json).unwrap();
        assert_eq!(split.payloads.len(), 1, "{body}");
        assert_eq!(&body[split.payloads[0].clone()], "QUJD");
        rest["routed_experts"] = json!("QUJD");
        assert_eq!(rest, reply);
    }
}

#[test]
fn invalid_json_stays_invalid_after_the_split() {
    for body in [
        r#"{"a":"x"routed_experts":"AAAA"}"#,
        r#"{"a":1 "routed_experts":"AAAA"}"#,
        r#"{"routed_experts":"AAAA""b":1}"#,
    ] {
        let split = split_body(body.as_bytes()).unwrap();
        assert!(serde_json::from_slice::<Value>(&split.json).is_err(), "{body}");
    }
}

#[test]
fn unterminated_or_escaped_payload_is_refused() {
    for body in [
        r#"{"routed_experts":"AAAA"#,
        r#"{"routed_experts":""#,
        r#"{"routed_experts":"AAAA\"BBBB"}"#,
        r#"{"routed_experts":"\""}"#,
    ] {
        let error = split_body(body.as_bytes()).unwrap_err();
        assert!(matches!(error, RoutingError::Body(_)), "{body}: {error}");
    }
}

#[test]
fn too_many_payloads_are_rejected() {
    let of = |count| format!("[{}]", vec![r#"{"routed_experts":"AAAA"}"#; count].join(","));
    assert_eq!(split(&of(1024)).1.len(), 1024);
    let error = split_body(of(1025).as_bytes()).unwrap_err();
    assert!(error.to_string().contains("more than 1024"));
}

fn json_value() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        Just("routed_experts".to_owned()),
        Just("\"routed_experts\":\"A\"".to_owned()),
        Just("\\\"routed_experts\\\":".to_owned()),
        Just("\"routed_experts".to_owned()),
        "[a-zA-Z0-9\"\\\\:, ]{0,12}",
    ];
    let payload = "[A-Za-z0-9+/]{0,8}={0,2}".prop_map(Value::from);
    let leaf = prop_oneof![
        word.clone().prop_map(Value::from),
        Just(Value::Null),
        any::<i32>().prop_map(Value::from)
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((word.clone(), inner.clone()), 0..4).prop_map(|entries| {
                Value::Object(
                    entries.into_iter().filter(|(key, _)| key != "routed_experts").collect(),
                )
            }),
            (payload.clone(), inner)
                .prop_map(|(payload, rest)| json!({"x": rest, "routed_experts": payload, "y": 1})),
        ]
    })
}

/// Moves every string under the key `routed_experts` to `payloads`, in document order.
fn take(value: &mut Value, payloads: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries.iter_mut() {
                match value {
                    Value::String(text) if key == "routed_experts" => {
                        payloads.push(std::mem::take(text));
                    }
                    _ => take(value, payloads),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| take(item, payloads)),
        _ => {}
    }
}

proptest! {
    #[test]
    fn prop_payloads_match_those_of_a_json_parser(mut value in json_value(), pretty in any::<bool>()) {
        let body = if pretty { format!("{value:#}") } else { value.to_string() };
        let (rest, found) = split(&body);
        let mut payloads = Vec::new();
        take(&mut value, &mut payloads);
        prop_assert_eq!(found, payloads);
        prop_assert_eq!(serde_json::from_str::<Value>(&rest).unwrap(), value);
    }

    #[test]
    fn prop_split_body_never_panics(mut body in "[{}\":, \\\\a]{0,20}", at in any::<prop::sample::Index>()) {
        body.insert_str(at.index(body.len() + 1), "\"routed_experts\":\"");
        let _ = split_body(body.as_bytes());
    }
}
