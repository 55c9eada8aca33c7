//! The exact replies and event sequences of every dialect.

use crate::chat::Chat;
use crate::message::ToolCall;
use crate::messages::Messages;
use crate::problem::Problem;
use crate::responses::Responses;
use crate::sampler::{Finish, Receipt, SampleError, Sampled, SampledToken, Usage};
use crate::text::{SampledText, Sent};
use crate::wire::{Envelope, Purpose, Wire};
use serde_json::{Value, json};
use std::fmt::Write as _;

fn envelope() -> Envelope {
    Envelope { id: "1".into(), created: 1_700_000_000, model: "policy".into() }
}

/// A reply with everything; its text is two pieces long.
pub(crate) fn sampled() -> Sampled {
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    let token = |id, text: &str| SampledToken {
        id,
        text: text.into(),
        bytes: text.as_bytes().to_vec(),
        logprob: -0.25,
    };
    Sampled {
        number: 7,
        reasoning: Some("They want a listing.".into()),
        content: "I will list the files of the working directory; é.".into(),
        tool_calls: vec![
            call("call_1", "ls", r#"{"path": "."}"#),
            call("call_2", "patch", r#"{"input": "*** x"}"#),
        ],
        finish: Finish::ToolCalls,
        usage: Usage { prompt: 30, cached: 10, completion: 12, reasoning: 5 },
        tokens: vec![token(1, "They"), token(2, " want")],
        receipt: Receipt::ignored(),
    }
}

fn plain(finish: Finish) -> Sampled {
    let (reasoning, tool_calls) = (None, Vec::new());
    Sampled { reasoning, tool_calls, content: "Done.".into(), finish, ..sampled() }
}

/// A dialect's form for a request with these fields.
fn form<W: Wire>(fields: Value) -> W {
    let mut body =
        json!({"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 9});
    if let (Some(body), Value::Object(fields)) = (body.as_object_mut(), fields) {
        body.extend(fields);
    }
    W::parse(body.to_string().as_bytes(), Purpose::Sample).unwrap().1
}

/// The reply as a document and as events.
fn transcript<W: Wire>(form: &W, replies: &[Sampled]) -> String {
    let reply = serde_json::to_string_pretty(&form.reply(&envelope(), replies)).unwrap();
    let mut text = format!("{reply}\n\n");
    for event in form.events(&envelope(), &Sent::default(), replies) {
        text.push_str(std::str::from_utf8(&event).unwrap());
    }
    text
}

/// The events of a reply whose text is sent while it is sampled, with a keep-alive in the middle.
fn stream<W: Wire>(form: &W, reply: Sampled) -> String {
    let mut sent = Sent::default();
    let mut all = Vec::new();
    for (reasoning, content) in
        [("They", ""), ("They want a listing.", ""), ("They want a listing.", "I will")]
    {
        let (reasoning, content) = (reasoning.into(), content.into());
        let text = SampledText { prompt: 30, number: 7, reasoning, content };
        let events = form.text(&envelope(), &sent, &text);
        sent.add(events.len(), &text);
        all.extend(events);
        if text.content.is_empty() {
            all.push(form.keep_alive(&envelope(), sent.events));
            sent.events += 1;
        }
    }
    all.extend(form.events(&envelope(), &sent, &[reply]));
    all.iter().map(|event| std::str::from_utf8(event).unwrap()).collect()
}

#[test]
fn streamed_replies() {
    insta::assert_snapshot!("chat-stream", stream(&form::<Chat>(json!({})), sampled()));
    insta::assert_snapshot!("responses-stream", stream(&form::<Responses>(json!({})), sampled()));
    insta::assert_snapshot!("messages-stream", stream(&form::<Messages>(json!({})), sampled()));
}

#[test]
fn chat_replies() {
    let usage = json!({"include_usage": true});
    let fields = json!({"logprobs": true, "top_logprobs": 1, "stream_options": usage});
    insta::assert_snapshot!("chat-calls", transcript(&form::<Chat>(fields), &[sampled()]));
    let two = [plain(Finish::Length), plain(Finish::StopString("END".into()))];
    insta::assert_snapshot!("chat-two", transcript(&form::<Chat>(json!({"n": 2})), &two));
}

#[test]
fn responses_replies() {
    let form: Responses = form(json!({
        "include": ["reasoning.encrypted_content"], "instructions": "Be brief.",
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "ls"}]},
            {"type": "custom", "name": "patch"}],
    }));
    let mut reply = sampled();
    reply.tool_calls[0].name = "n__ls".into();
    insta::assert_snapshot!("responses-calls", transcript(&form, &[reply]));
    insta::assert_snapshot!("responses-length", transcript(&form, &[plain(Finish::Length)]));
}

#[test]
fn messages_replies() {
    let form: Messages = form(json!({}));
    insta::assert_snapshot!("messages-calls", transcript(&form, &[sampled()]));
    let stopped = plain(Finish::StopString("END".into()));
    insta::assert_snapshot!("messages-stop", transcript(&form, &[stopped]));
}

fn late_errors<W: Wire>(out: &mut String, form: &W) {
    for error in [
        SampleError::Refused("no such thing".into()),
        SampleError::TooLong { prompt: 20, context: 10 },
        SampleError::Ended("50 turns".into()),
        SampleError::Unavailable("no engine is up".into()),
        SampleError::Failed("broken".into()),
    ] {
        let problem = Problem::from(error);
        let body = problem.body(W::DIALECT);
        writeln!(out, "{:?} {} {body}", W::DIALECT, problem.response(W::DIALECT).status()).unwrap();
        let events = form.late_error(&envelope(), &Sent::default(), &problem);
        writeln!(out, "{}", std::str::from_utf8(events.last().unwrap()).unwrap()).unwrap();
    }
}

#[test]
fn errors() {
    let mut out = String::new();
    late_errors::<Chat>(&mut out, &form(json!({})));
    late_errors::<Responses>(&mut out, &form(json!({})));
    late_errors::<Messages>(&mut out, &form(json!({})));
    insta::assert_snapshot!("errors", out);
}
