//! Requests whose content is known by construction, with text that is not Unicode in every place, for tests
//! and fuzzing. Such text stays in a history for as long as that lasts; it is replaced in all dialects.

use crate::chat::Chat;
use crate::message::{Message, Role, ToolCall};
use crate::messages::Messages;
use crate::problem::Problem;
use crate::responses::Responses;
use crate::sampler::SampleRequest;
use crate::wire::{Purpose, Wire};
use serde_json::{Value, json};

/// Texts as they are inside of JSON strings, and what they must be read as.
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

/// Draws a number below its argument.
pub type Draw<'a> = &'a mut dyn FnMut(usize) -> usize;

/// A JSON string, and what it must be read as.
fn text(draw: Draw<'_>) -> (Vec<u8>, String) {
    let (mut json, mut read) = (b"\"".to_vec(), String::new());
    for _ in 0..draw(4) {
        let (piece, expected) =
            TEXTS.get(draw(2 * TEXTS.len())).copied().unwrap_or((b"word", "word"));
        // A space after each: two halves would be a whole.
        json.extend([piece, b" "].concat());
        read.extend([expected, " "]);
    }
    json.push(b'"');
    (json, read)
}

/// A JSON text as a JSON string.
fn quoted(json: &[u8]) -> Vec<u8> {
    let escaped = json.iter().flat_map(|byte| match byte {
        b'"' | b'\\' => vec![b'\\', *byte],
        byte => vec![*byte],
    });
    [b"\"".to_vec(), escaped.collect(), b"\"".to_vec()].concat()
}

/// The template with the texts in place of its `@`s.
fn with(template: &str, texts: &[&[u8]]) -> Vec<u8> {
    let mut texts = texts.iter();
    let parts = template
        .split('@')
        .map(|part| [part.as_bytes(), texts.next().copied().unwrap_or_default()].concat());
    parts.collect::<Vec<_>>().concat()
}

/// A history as the list of messages or items of a dialect, and what it must be read as.
fn history(dialect: usize, draw: Draw<'_>) -> (Vec<Vec<u8>>, Vec<Message>) {
    let (mut json, mut messages) = (Vec::new(), Vec::new());
    for _ in 0..=draw(3) {
        let (said, read) = match text(draw) {
            // Refused in this dialect.
            (_, read) if dialect == 1 && read.is_empty() => (b"\"hm\"".to_vec(), "hm".to_owned()),
            said => said,
        };
        json.push(with(r#"{"role": "user", "content": @}"#, &[&said]));
        messages.push(Message::new(Role::User, read));
        for replies_left in (0..=draw(3)).rev() {
            let (thinking, thought) = text(draw);
            let (said, read) = text(draw);
            let mut reply = Message {
                reasoning: Some(thought).filter(|text| !text.is_empty()),
                ..Message::new(Role::Assistant, read)
            };
            let (mut calls, mut results, mut answers) = (Vec::new(), Vec::new(), Vec::new());
            for call in 0..if replies_left > 0 { 1 + draw(2) } else { 0 } {
                let id = format!("c{}-{call}", messages.len());
                let ((argument, read), (result, answer)) = (text(draw), text(draw));
                let arguments = with(r#"{"a": @}"#, &[&argument]);
                let quoted_id = quoted(id.as_bytes());
                calls.push(match dialect {
                    0 => with(r#"{"id": @, "type": "function", "function": {"name": "f", "arguments": @}}"#, &[&quoted_id, &quoted(&arguments)]),
                    1 => with(r#"{"type": "tool_use", "id": @, "name": "f", "input": @}"#, &[&quoted_id, &arguments]),
                    _ => with(r#"{"type": "function_call", "call_id": @, "name": "f", "arguments": @}"#, &[&quoted_id, &quoted(&arguments)]),
                });
                results.push(match dialect {
                    0 => with(r#"{"role": "tool", "tool_call_id": @, "content": @}"#, &[&quoted_id, &result]),
                    1 => with(r#"{"type": "tool_result", "tool_use_id": @, "content": [{"type": "text", "text": @}]}"#, &[&quoted_id, &result]),
                    _ => with(r#"{"type": "function_call_output", "call_id": @, "output": @}"#, &[&quoted_id, &result]),
                });
                reply.tool_calls.push(ToolCall {
                    id: id.clone(),
                    name: "f".to_owned(),
                    arguments: json!({"a": read}).to_string(),
                });
                answers.push(Message::tool(id, answer));
            }
            messages.push(reply);
            messages.extend(answers);
            match dialect {
                0 => {
                    let calls = if calls.is_empty() { b"null".to_vec() } else { list(&calls) };
                    json.push(with(r#"{"role": "assistant", "reasoning_content": @, "content": @, "tool_calls": @}"#, &[&thinking, &said, &calls]));
                    json.extend(results);
                }
                1 => {
                    let mut blocks = vec![with(
                        r#"{"type": "thinking", "thinking": @, "signature": "s"}"#,
                        &[&thinking],
                    )];
                    blocks.push(with(r#"{"type": "text", "text": @}"#, &[&said]));
                    blocks.extend(calls);
                    json.push(with(r#"{"role": "assistant", "content": @}"#, &[&list(&blocks)]));
                    if !results.is_empty() {
                        json.push(with(r#"{"role": "user", "content": @}"#, &[&list(&results)]));
                    }
                }
                _ => {
                    json.push(with(r#"{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": @}]}"#, &[&thinking]));
                    json.push(with(
                        r#"{"role": "assistant", "content": [{"type": "output_text", "text": @}]}"#,
                        &[&said],
                    ));
                    json.extend(calls);
                    json.extend(results);
                }
            }
        }
    }
    (json, messages)
}

fn list(parts: &[Vec<u8>]) -> Vec<u8> {
    [b"[", parts.join(&b", "[..]).as_slice(), b"]"].concat()
}

/// Writes a request of one of the dialects, and reads it. Returns its body.
///
/// # Panics
/// If it is read as anything but what it was made of.
pub fn check_request(draw: Draw<'_>) -> Vec<u8> {
    let dialect = draw(3);
    let (system, instructions) = text(draw);
    let (json, mut messages) = history(dialect, draw);
    let mark: &[u8] = if draw(8) == 0 { b"\xef\xbb\xbf" } else { b"" };
    if !instructions.is_empty() {
        messages.insert(0, Message::new(Role::System, instructions.clone()));
    }
    let body = match dialect {
        0 if instructions.is_empty() => with(r#"@{"messages": @}"#, &[mark, &list(&json)]),
        0 => {
            let system = with(r#"{"role": "system", "content": @}"#, &[&system]);
            with(r#"@{"messages": @}"#, &[mark, &list(&[vec![system], json].concat())])
        }
        1 => with(
            r#"@{"max_tokens": 9, "system": @, "messages": @}"#,
            &[mark, &system, &list(&json)],
        ),
        _ => with(r#"@{"instructions": @, "input": @}"#, &[mark, &system, &list(&json)]),
    };
    let read = parse(dialect, &body).map(|request| request.messages);
    let read = read.map_err(|problem| problem.message);
    assert_eq!(read, Ok(messages), "{}", String::from_utf8_lossy(&body));
    body
}

/// Reads a body that may be anything.
///
/// # Panics
/// If it is refused without a reason.
pub fn check_body(dialect: usize, body: &[u8]) {
    if let Err(problem) = parse(dialect % 3, body) {
        assert!(!problem.message.is_empty());
    }
}

fn parse(dialect: usize, body: &[u8]) -> Result<SampleRequest, Problem> {
    match dialect {
        0 => Chat::parse(body, Purpose::Sample).map(|(request, _)| request),
        // The history may end with a message of the assistant, which is not answered.
        1 => Messages::parse(body, Purpose::Count).map(|(request, _)| request),
        _ => Responses::parse(body, Purpose::Sample).map(|(request, _)| request),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

    /// Requests that are drawn by default; `ORCHESTRATE_REQUESTS` sets another number.
    const REQUESTS: u64 = 5000;

    /// Stands for the foreign text.
    const PLACE: &str = "FOREIGN";

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

    fn read(dialect: usize, body: &[u8]) -> SampleRequest {
        parse(dialect, body).unwrap_or_else(|problem| {
            panic!("{}: {}", problem.message, String::from_utf8_lossy(body))
        })
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
            let schema =
                tool.parameters.pointer("/properties/a/description").and_then(Value::as_str);
            tool.description.clone().into_iter().chain(schema.map(str::to_owned))
        });
        let messages = request.messages.iter().flat_map(of_message);
        messages.chain(tools).chain(request.stop.clone()).collect()
    }

    #[test]
    fn a_lone_surrogate_in_any_place_of_a_request_is_replaced() {
        for (dialect, body) in bodies().iter().enumerate() {
            let plain = texts(&read(dialect, &filled(body, b"x", |_| false)));
            assert!(plain.len() >= 7 && plain.iter().all(|text| text == "x"), "{plain:?}");
            for (text, expected) in TEXTS {
                let found = texts(&read(dialect, &filled(body, text, |_| true)));
                assert_eq!(found, vec![expected; plain.len()], "{}", text.escape_ascii());
            }
            let marked = [b"\xef\xbb\xbf", filled(body, b"x", |_| false).as_slice()].concat();
            assert_eq!(texts(&read(dialect, &marked)), plain);
        }
    }

    #[test]
    fn a_lone_surrogate_in_the_arguments_of_a_call_leaves_them_an_object() {
        for (dialect, body) in bodies().iter().enumerate().filter(|(dialect, _)| *dialect != 1) {
            let body = String::from_utf8(filled(body, b"x", |_| false)).unwrap();
            let body = body.replace(r#"{\"b\":"#, r#"{\"half\": \"\\ud83d\", \"b\":"#);
            let request = read(dialect, body.as_bytes());
            let call =
                request.messages.iter().find_map(|message| message.tool_calls.first()).unwrap();
            assert_eq!(call.parsed(), Some(json!({"half": "\u{fffd}", "b": "x"})));
        }
    }

    #[test]
    fn a_repeated_key_in_the_arguments_of_a_call_is_not_dropped() {
        let [chat, messages, responses] = bodies().map(|body| filled(&body, b"x", |_| false));
        for (dialect, body) in [(0, chat), (2, responses)] {
            let body = String::from_utf8(body).unwrap();
            let body = body.replace(r#"{\"b\":"#, r#"{\"b\": \"y\", \"b\":"#);
            let request = read(dialect, body.as_bytes());
            let call =
                request.messages.iter().find_map(|message| message.tool_calls.first()).unwrap();
            assert_eq!((call.arguments.as_str(), call.parsed()), (r#"{"b": "y", "b": "x"}"#, None));
        }
        let body = String::from_utf8(messages).unwrap();
        let body = body.replace(r#""input":{"#, r#""input":{"a":"y","#);
        let problem = parse(1, body.as_bytes()).unwrap_err();
        assert_eq!(problem.field.as_deref(), Some("messages[1].content[2].input"));
        assert!(problem.message.contains("\"a\" occurs twice"), "{}", problem.message);
    }

    #[test]
    fn a_repeated_key_in_the_schema_of_a_tool_is_refused_and_named() {
        let fields =
            ["tools[0].function.parameters", "tools[0].input_schema", "tools[0].parameters"];
        for ((dialect, body), field) in bodies().iter().enumerate().zip(fields) {
            let body = String::from_utf8(filled(body, b"x", |_| false)).unwrap();
            let body = body.replace(r#""type":"object""#, r#""type":"object","type":"object""#);
            let problem = parse(dialect, body.as_bytes()).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field));
        }
    }

    #[test]
    fn foreign_text_changes_nothing_else_in_a_history() {
        let number = std::env::var("ORCHESTRATE_REQUESTS").ok().and_then(|text| text.parse().ok());
        for seed in 0..number.unwrap_or(REQUESTS) {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut draw =
                |below: usize| usize::try_from(random.next_u64() % below.max(1) as u64).unwrap();
            let mut body = check_request(&mut draw);
            // With a few bytes changed, it may be anything.
            for _ in 0..=draw(3) {
                let at = draw(body.len());
                body[at] = u8::try_from(draw(256)).unwrap();
            }
            check_body(draw(3), &body);
        }
    }
}
