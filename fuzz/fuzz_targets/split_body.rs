//! Cutting payloads out of a reply: the rest is the same JSON with empty strings in their place, and
//! each payload is the string that was there.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::heap::bounded;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_routing::split_body;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;

#[derive(Debug, Arbitrary)]
enum Node {
    Null,
    Number(i16),
    Text(Text),
    List(Vec<Node>),
    Object(Vec<(Key, Node)>),
}

#[derive(Debug, Arbitrary)]
enum Key {
    Routed,
    Spaced(u8),
    Escaped,
    Near(u8),
    Quoted,
}

#[derive(Debug, Arbitrary)]
enum Text {
    Base64(u8),
    Slash,
    Quote,
    Backslash,
    Inner,
    Key,
    Word(u8),
}

#[derive(Debug, Arbitrary)]
struct Input {
    root: Node,
    changes: Vec<Change>,
}

fn write_text(text: &Text, out: &mut Vec<u8>) {
    match text {
        Text::Base64(length) => out.extend(std::iter::repeat_n(b'A', usize::from(*length))),
        Text::Slash => out.extend(b"AB\\/CD"),
        Text::Quote => out.extend(b"AB\\\"CD"),
        Text::Backslash => out.extend(b"AB\\\\"),
        Text::Inner => out.extend(b"\\\"routed_experts\\\":\\\"AAAA\\\""),
        Text::Key => out.extend(b"routed_experts"),
        Text::Word(byte) => out.extend(format!("w{byte}").bytes()),
    }
}

fn write(node: &Node, depth: usize, out: &mut Vec<u8>) {
    match node {
        _ if depth > 20 => out.extend(b"0"),
        Node::Null => out.extend(b"null"),
        Node::Number(number) => out.extend(number.to_string().bytes()),
        Node::Text(text) => {
            out.push(b'"');
            write_text(text, out);
            out.push(b'"');
        }
        Node::List(nodes) => {
            out.push(b'[');
            for (index, node) in nodes.iter().enumerate() {
                out.extend(if index == 0 { "" } else { "," }.bytes());
                write(node, depth + 1, out);
            }
            out.push(b']');
        }
        Node::Object(entries) => {
            out.push(b'{');
            for (index, (key, node)) in entries.iter().enumerate() {
                out.extend(if index == 0 { "" } else { ", " }.bytes());
                match key {
                    Key::Routed => out.extend(b"\"routed_experts\":"),
                    Key::Spaced(kind) => {
                        let blank = [" ", "\n", "\t", "\r"][usize::from(kind % 4)];
                        out.extend(format!("\"routed_experts\"{blank}:{blank} ").bytes());
                    }
                    Key::Escaped => out.extend(b"\"routed\\u005fexperts\":"),
                    Key::Near(byte) => out.extend(format!("\"{byte}routed_experts\":").bytes()),
                    Key::Quoted => out.extend(b"\"\\\"routed_experts\\\"\":"),
                }
                write(node, depth + 1, out);
            }
            out.push(b'}');
        }
    }
}

/// JSON with every entry of every object, including repeated keys.
#[derive(Debug, PartialEq)]
enum Json {
    Scalar(String),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Scalar(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Scalar(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Scalar(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Scalar(value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Scalar("null".to_owned()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Json::Object(entries))
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyJson)
    }
}

/// Empties the strings under `routed_experts`, as `split_body` must, and collects them.
fn empty(json: &mut Json, taken: &mut Vec<String>) {
    match json {
        Json::Scalar(_) | Json::Text(_) => {}
        Json::List(list) => list.iter_mut().for_each(|json| empty(json, taken)),
        Json::Object(entries) => {
            for (key, value) in entries {
                match value {
                    Json::Text(text) if key == "routed_experts" => taken.push(std::mem::take(text)),
                    Json::Text(_) | Json::Scalar(_) | Json::List(_) | Json::Object(_) => {
                        empty(value, taken);
                    }
                }
            }
        }
    }
}

fuzz_target!(|input: Input| {
    let mut body = Vec::new();
    write(&input.root, 0, &mut body);
    input::change(&mut body, &input.changes);
    if body.len() > 1 << 16 {
        return;
    }

    let split = bounded(body.len(), || split_body(&body));
    let whole: Result<Json, _> = serde_json::from_slice(&body);
    let Ok(split) = split else { return };
    let rest: Result<Json, _> = serde_json::from_slice(&split.json);
    let mut end = 0;
    for payload in &split.payloads {
        assert!(end <= payload.start && payload.end <= body.len(), "payloads are in order");
        end = payload.end;
    }
    // A payload with an escape is refused when it is decoded; here its unescaped text differs.
    let escaped = split.payloads.iter().any(|payload| body[payload.clone()].contains(&b'\\'));
    // Control characters and invalid UTF-8 are cut out with the payload, whose decoder refuses them.
    let plain = split
        .payloads
        .iter()
        .all(|payload| body[payload.clone()].iter().all(|byte| (0x20..0x7f).contains(byte)));
    match (whole, rest) {
        (Ok(mut whole), Ok(rest)) => {
            let mut taken = Vec::new();
            let before = format!("{whole:?}");
            empty(&mut whole, &mut taken);
            // A key written with an escape is not cut out, so the parsed values differ there.
            if !body.windows(2).any(|two| two == b"\\u") {
                assert_eq!(whole, rest, "{before}");
                if !escaped {
                    let cut: Vec<&[u8]> =
                        split.payloads.iter().map(|payload| &body[payload.clone()]).collect();
                    let taken: Vec<&[u8]> = taken.iter().map(String::as_bytes).collect();
                    assert_eq!(cut, taken);
                }
            }
        }
        (Ok(_), Err(error)) => panic!("valid JSON became invalid: {error}"),
        (Err(error), Ok(_)) => assert!(!plain || escaped, "invalid JSON became valid: {error}"),
        (Err(_), Err(_)) => {}
    }
});
