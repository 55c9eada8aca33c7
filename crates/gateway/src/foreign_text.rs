//! Text of the environment that is not Unicode stays in a history for as long as it lasts: it is replaced,
//! in every place of all dialects.

use crate::chat::Chat;
use crate::message::Message;
use crate::messages::Messages;
use crate::responses::Responses;
use crate::sampler::SampleRequest;
use crate::wire::{Purpose, Wire};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Stands for the foreign text.
const PLACE: &str = "FOREIGN";

/// What [`PLACE`] is in JSON, and what it must be read as.
const TEXTS: [(&[u8], &str); 8] = [
    (br"\ud83d", "\u{fffd}"),
    (br"\udce9 \udcff", "\u{fffd} \u{fffd}"),
    (br"\ud83d\ud83d\ude00", "\u{fffd}😀"),
    (br"\\ud83d", "\\ud83d"),
    (br"\ud83d\\", "\u{fffd}\\"),
    (b"\xff\xc3", "\u{fffd}\u{fffd}"),
    (br"\u0000\ufeff", "\0\u{feff}"),
    ("\u{2028}\u{feff}".as_bytes(), "\u{2028}\u{feff}"),
];

fn bodies() -> [Value; 3] {
    let parameters = json!({"type": "object", "properties": {"a": {"description": PLACE}}});
    let chat = json!({
        "messages": [
            {"role": "system", "content": PLACE},
            {"role": "user", "content": [{"type": "text", "text": PLACE}]},
            {"role": "assistant", "content": PLACE, "reasoning_content": PLACE, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"b\": \"x\"}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": PLACE},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": PLACE, "parameters": parameters}}],
        "stop": [PLACE],
    });
    let messages = json!({
        "max_tokens": 9,
        "system": PLACE,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": PLACE}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": PLACE, "signature": PLACE},
                {"type": "text", "text": PLACE},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": PLACE}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": PLACE}]},
        ],
        "tools": [{"name": "f", "description": PLACE, "input_schema": parameters}],
        "stop_sequences": [PLACE],
    });
    let responses = json!({
        "instructions": PLACE,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PLACE}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": PLACE}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": PLACE}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"b\": \"x\"}"},
            {"type": "function_call_output", "call_id": "c", "output": PLACE},
        ],
        "tools": [{"type": "function", "name": "f", "description": PLACE, "parameters": parameters}],
    });
    [chat, messages, responses]
}

fn parse(dialect: usize, body: &[u8]) -> SampleRequest {
    let parsed = match dialect {
        0 => Chat::parse(body, Purpose::Sample).map(|(request, _)| request),
        1 => Messages::parse(body, Purpose::Sample).map(|(request, _)| request),
        _ => Responses::parse(body, Purpose::Sample).map(|(request, _)| request),
    };
    parsed
        .unwrap_or_else(|problem| panic!("{}: {}", problem.message, String::from_utf8_lossy(body)))
}

/// The body with `text` at the places `which`, and `x` at the others.
fn filled(body: &Value, text: &[u8], which: impl Fn(usize) -> bool) -> Vec<u8> {
    let body = body.to_string();
    let mut filled = Vec::new();
    for (index, part) in body.split(PLACE).enumerate() {
        if index > 0 {
            filled.extend_from_slice(if which(index - 1) { text } else { b"x" });
        }
        filled.extend_from_slice(part.as_bytes());
    }
    filled
}

/// Every text of a request.
fn texts(request: &SampleRequest) -> Vec<String> {
    let of_message = |message: &Message| {
        let arguments = message.tool_calls.iter();
        let arguments =
            arguments.filter_map(|call| Some(call.parsed()?.get("a")?.as_str()?.to_owned()));
        let texts = std::iter::once(message.content.clone()).chain(message.reasoning.clone());
        texts.chain(arguments).collect::<Vec<_>>()
    };
    let tools = request.tools.iter().flat_map(|tool| {
        let schema = tool.parameters.pointer("/properties/a/description").and_then(Value::as_str);
        tool.description.clone().into_iter().chain(schema.map(str::to_owned))
    });
    let messages = request.messages.iter().flat_map(of_message);
    messages.chain(tools).chain(request.stop.clone()).collect()
}

#[test]
fn half_a_character_in_any_place_of_a_request_is_replaced() {
    for (dialect, body) in bodies().iter().enumerate() {
        let plain = texts(&parse(dialect, &filled(body, b"x", |_| false)));
        assert!(plain.len() >= 7 && plain.iter().all(|text| text == "x"), "{plain:?}");
        for (text, expected) in TEXTS {
            let found = texts(&parse(dialect, &filled(body, text, |_| true)));
            assert_eq!(found, vec![expected; plain.len()], "{}", text.escape_ascii());
        }
        let marked = [b"\xef\xbb\xbf", filled(body, b"x", |_| false).as_slice()].concat();
        assert_eq!(texts(&parse(dialect, &marked)), plain);
    }
}

#[test]
fn half_a_character_in_the_arguments_of_a_call_leaves_them_an_object() {
    for (dialect, body) in bodies().iter().enumerate().filter(|(dialect, _)| *dialect != 1) {
        let body = String::from_utf8(filled(body, b"x", |_| false)).unwrap();
        let body = body.replace(r#"{\"b\":"#, r#"{\"half\": \"\\ud83d\", \"b\":"#);
        let request = parse(dialect, body.as_bytes());
        let call = request.messages.iter().find_map(|message| message.tool_calls.first()).unwrap();
        assert_eq!(call.parsed(), Some(json!({"half": "\u{fffd}", "b": "x"})));
    }
}

proptest! {
    #[test]
    fn prop_any_foreign_text_changes_no_other_text(
        dialect in 0_usize..3,
        pieces in prop::collection::vec(0..TEXTS.len(), 1..6),
        place in 0_usize..8,
    ) {
        let body = &bodies()[dialect];
        // A space between them: two halves would be a whole.
        let texts_of = |which: &dyn Fn(usize) -> Vec<u8>| pieces.iter().flat_map(|piece| which(*piece)).collect::<Vec<u8>>();
        let text = texts_of(&|piece| [TEXTS[piece].0, b" "].concat());
        let expected = String::from_utf8(texts_of(&|piece| [TEXTS[piece].1, " "].concat().into_bytes())).unwrap();
        let found = texts(&parse(dialect, &filled(body, &text, |index| index == place)));
        let changed: Vec<_> = found.iter().filter(|text| *text != "x").collect();
        // The signature of thinking is not kept.
        prop_assert!(changed.len() <= 1 && changed.iter().all(|text| **text == expected), "{changed:?}");
    }
}
