//! What was sampled comes back: a reply, sent again by a client in its next request, gives the
//! message that was sampled, whether the client read the document or the events.

use crate::chat::Chat;
use crate::message::{Message, Role, ToolCall};
use crate::messages::Messages;
use crate::responses::Responses;
use crate::sampler::{Finish, Receipt, Sampled, Usage};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, Purpose, Wire};
use proptest::prelude::*;
use serde_json::{Value, json};

const TOOLS: [&str; 3] = ["ls", "patch", "n__f"];

/// Arguments as models write them: JSON objects with any spacing.
fn arguments() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,80}".prop_map(Value::from),
        Just(json!([null, {"a": []}])),
    ];
    (prop::collection::hash_map("[a-z]{1,3}", value, 0..4), any::<bool>()).prop_map(
        |(fields, is_pretty)| {
            let object = Value::Object(fields.into_iter().collect());
            if is_pretty {
                serde_json::to_string_pretty(&object).unwrap()
            } else {
                object.to_string()
            }
        },
    )
}

fn reply() -> impl Strategy<Value = Sampled> {
    let text = || "[\\PC\n]{0,120}";
    let call = (prop::sample::select(TOOLS.as_slice()), arguments(), "\\PC{0,60}");
    let calls = prop::collection::vec(call, 0..4);
    (prop::option::of("[\\PC\n]{1,120}"), text(), calls).prop_map(|(reasoning, content, calls)| {
        let call = |(index, (name, arguments, text)): (usize, (&str, String, String))| ToolCall {
            id: format!("call_{index}"),
            name: name.to_owned(),
            arguments: if name == "patch" { json!({"input": text}).to_string() } else { arguments },
        };
        Sampled {
            number: 7,
            reasoning,
            content,
            tool_calls: calls.into_iter().enumerate().map(call).collect(),
            finish: Finish::Stop,
            usage: Usage::default(),
            tokens: Vec::new(),
            receipt: Receipt::ignored(),
        }
    })
}

/// Where the pieces of a streamed text end; none if it is sent at once.
fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0_usize..=1000, 0..6).prop_map(|mut cuts| {
        cuts.sort_unstable();
        cuts
    })
}

/// The message of a reply whose thinking comes back with its signature, or without.
fn message(reply: &Sampled, is_signed: bool) -> Message {
    Message {
        reasoning: reply.reasoning.clone(),
        reply: (is_signed && reply.reasoning.is_some()).then_some(reply.number),
        tool_calls: reply.tool_calls.clone(),
        ..Message::new(Role::Assistant, reply.content.clone())
    }
}

/// The data of the events of a reply whose thinking and text are sampled in pieces; `cuts` are their
/// ends, in thousandths.
fn data<W: Wire>(form: &W, reply: &[Sampled], cuts: &[usize]) -> Vec<Value> {
    let mut sent = Sent::default();
    let mut events = Vec::new();
    let [Sampled { reasoning, content, .. }] = reply else { panic!("one reply") };
    let reasoning = reasoning.as_deref().unwrap_or_default();
    let all = reasoning.len() + content.len();
    for cut in cuts {
        let end = all * cut / 1000;
        let part = |text: &str, end: usize| text[..text.floor_char_boundary(end)].to_owned();
        let content = part(content, end.saturating_sub(reasoning.len()));
        // All of the thinking comes before the text.
        let thought = if content.is_empty() { end } else { reasoning.len() };
        let text =
            SampledText { prompt: 0, number: 7, reasoning: part(reasoning, thought), content };
        if (text.reasoning.len(), text.content.len()) > (sent.reasoning.len(), sent.content.len()) {
            let new = form.text(&envelope(), &sent, &text);
            sent.add(new.len(), &text);
            events.extend(new);
        }
    }
    assert!(sent.is_continued_by_reply(&reply[0]));
    events.extend(form.events(&envelope(), &sent, reply));
    let data = events.iter().filter_map(|event| {
        let text = std::str::from_utf8(event).unwrap();
        assert!(text.ends_with("\n\n"), "{text}");
        serde_json::from_str(text.lines().find_map(|line| line.strip_prefix("data: "))?).ok()
    });
    data.collect()
}

fn envelope() -> Envelope {
    Envelope { id: "1".into(), created: 0, model: "policy".into() }
}

/// The last message of a request. It is one of the assistant, so there is nothing to sample.
fn last<W: Wire>(body: &Value) -> Message {
    let (request, _) = W::parse(body.to_string().as_bytes(), Purpose::Count).unwrap();
    request.messages.into_iter().next_back().unwrap()
}

fn parse<W: Wire>(body: &Value) -> W {
    W::parse(body.to_string().as_bytes(), Purpose::Sample).unwrap().1
}

fn append(field: &mut Value, text: &Value) {
    let old = field.as_str().unwrap_or_default().to_owned();
    *field = json!(old + text.as_str().unwrap());
}

/// The message that OpenAI's libraries put together of chunks.
fn of_chunks(chunks: &[Value]) -> Value {
    let mut message = json!({"role": "assistant", "content": ""});
    for chunk in chunks {
        let delta = &chunk["choices"][0]["delta"];
        for field in ["content", "reasoning_content"] {
            if delta[field].is_string() {
                append(&mut message[field], &delta[field]);
            }
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if call["id"].is_string() {
                if index == 0 {
                    message["tool_calls"] = json!([]);
                }
                message["tool_calls"].as_array_mut().unwrap().push(call.clone());
            } else {
                let arguments = &mut message["tool_calls"][index]["function"]["arguments"];
                append(arguments, &call["function"]["arguments"]);
            }
        }
    }
    message
}

/// The blocks that Anthropic's libraries put together of events.
fn of_events(events: &[Value]) -> Value {
    let mut blocks: Vec<Value> = Vec::new();
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => blocks.push(event["content_block"].clone()),
            "content_block_delta" => {
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append(&mut block["text"], &delta["text"]),
                    "thinking_delta" => append(&mut block["thinking"], &delta["thinking"]),
                    "input_json_delta" => append(&mut block["json"], &delta["partial_json"]),
                    _ => block["signature"] = delta["signature"].clone(),
                }
            }
            "content_block_stop" => {
                let block = blocks.last_mut().unwrap();
                if let Some(json) = block["json"].as_str() {
                    block["input"] = serde_json::from_str(json).unwrap();
                }
            }
            _ => {}
        }
    }
    json!(blocks)
}

proptest! {
    #[test]
    fn of_chat(reply in reply(), cuts in cuts()) {
        let ask = json!({"role": "user", "content": "a"});
        let form: Chat = parse(&json!({"messages": [ask]}));
        let expected = message(&reply, false);
        let replies = [reply];
        let whole = form.reply(&envelope(), &replies)["choices"][0]["message"].clone();
        prop_assert_eq!(&last::<Chat>(&json!({"messages": [ask, whole]})), &expected);
        let streamed = of_chunks(&data(&form, &replies, &cuts));
        prop_assert_eq!(&last::<Chat>(&json!({"messages": [ask, streamed]})), &expected);
    }

    #[test]
    fn of_responses(reply in reply(), include in any::<bool>(), cuts in cuts()) {
        let ask = json!({"role": "user", "content": "a"});
        let tools = json!([
            {"type": "function", "name": "ls"}, {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        ]);
        let included = if include { json!(["reasoning.encrypted_content"]) } else { Value::Null };
        let form: Responses = parse(&json!({"input": [ask], "tools": tools, "include": included}));
        let expected = message(&reply, include);
        let replies = [reply];
        let again = |items: &Value| {
            let mut input = vec![ask.clone()];
            input.extend(items.as_array().unwrap().iter().cloned());
            last::<Responses>(&json!({"input": input}))
        };
        prop_assert_eq!(&again(&form.reply(&envelope(), &replies)["output"]), &expected);
        let events = data(&form, &replies, &cuts);
        let numbers = events.iter().map(|event| event["sequence_number"].as_u64());
        prop_assert!(numbers.eq((0..events.len() as u64).map(Some)));
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let items: Vec<Value> = done.map(|event| event["item"].clone()).collect();
        prop_assert_eq!(&again(&json!(items)), &expected);
        prop_assert_eq!(&again(&events.last().unwrap()["response"]["output"]), &expected);
    }

    #[test]
    fn of_messages(reply in reply(), cuts in cuts()) {
        let ask = json!({"role": "user", "content": "a"});
        let form: Messages = parse(&json!({"messages": [ask], "max_tokens": 9}));
        let expected = message(&reply, true);
        let replies = [reply];
        let again = |content: &Value| {
            let message = json!({"role": "assistant", "content": content});
            last::<Messages>(&json!({"messages": [ask, message], "max_tokens": 9}))
        };
        prop_assert_eq!(&again(&form.reply(&envelope(), &replies)["content"]), &expected);
        prop_assert_eq!(&again(&of_events(&data(&form, &replies, &cuts))), &expected);
    }
}
