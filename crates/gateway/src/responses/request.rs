//! Requests.

use super::history::{self, Item};
use super::tools::{ChoiceParam, ToolParam, Tools};
use super::{Echo, Responses};
use crate::content::{self, Choice, TextOr, limit};
use crate::dialect::Dialect;
use crate::fields::{self, RESPONSES};
use crate::message::{History, Message, Role, answered};
use crate::problem::Problem;
use crate::sampler::{AskedSampling, SampleRequest};
use crate::wire::Purpose;
use serde::Deserialize;
use serde_json::{Number, Value, json};

#[derive(Debug, Deserialize)]
struct Body {
    input: Option<TextOr<Item>>,
    instructions: Option<String>,
    tools: Option<Vec<ToolParam>>,
    #[serde(default, deserialize_with = "content::unique")]
    tool_choice: Option<Value>,
    max_output_tokens: Option<u64>,
    stream: Option<bool>,
    include: Option<Vec<String>>,
    reasoning: Option<ReasoningParam>,
    temperature: Option<Number>,
    top_p: Option<Number>,
    parallel_tool_calls: Option<bool>,
    #[serde(default, deserialize_with = "content::unique")]
    metadata: Option<Value>,
    previous_response_id: Option<String>,
    store: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ReasoningParam {
    effort: Option<String>,
}

/// Parses a body.
pub(super) fn parse(bytes: &[u8], purpose: Purpose) -> Result<(SampleRequest, Responses), Problem> {
    let body: Body = content::parse(bytes)?;
    let overridden = fields::check(bytes, &RESPONSES)?;
    let max_tokens = limit(body.max_output_tokens, "max_output_tokens")?;
    let echo = Echo {
        instructions: body.instructions.clone(),
        max_output_tokens: max_tokens,
        temperature: body.temperature.clone(),
        top_p: body.top_p.clone(),
        parallel_tool_calls: body.parallel_tool_calls.unwrap_or(true),
        metadata: body.metadata.clone().unwrap_or_else(|| json!({})),
        tool_choice: body.tool_choice.clone().unwrap_or_else(|| json!("auto")),
    };
    let previous = body.previous_response_id.filter(|id| !id.is_empty());
    let is_empty = match &body.input {
        // Only a request that continues a response can do without an input.
        None => previous.is_none() && purpose == Purpose::Sample,
        Some(TextOr::Text(text)) => text.is_empty(),
        Some(TextOr::List(items)) => items.is_empty(),
    };
    if is_empty {
        return Err(Problem::field("input", "must not be empty"));
    }
    let asked = messages(body.input)?;
    // Results of calls of the response that is continued are put in order once that is known.
    let asked = if previous.is_some() { asked } else { answered(asked, "input")? };
    let stores = body.store.unwrap_or(true) && purpose == Purpose::Sample;
    let kept = if stores { asked.clone() } else { Vec::new() };
    let instructions = body.instructions.filter(|text| !text.is_empty());
    let instructions = instructions.map(|text| Message::new(Role::System, text));
    let messages: Vec<Message> = instructions.into_iter().chain(asked).collect();
    let mut tools = Tools::default();
    tools.add(body.tools.unwrap_or_default(), None, "tools", 0)?;
    let choice = Choice::read::<ChoiceParam>(body.tool_choice.as_ref())?;
    let effort = body.reasoning.and_then(|reasoning| reasoning.effort);
    let request = SampleRequest {
        dialect: Dialect::Responses,
        messages,
        tool_choice: choice.apply(&mut tools.tools)?,
        tools: tools.tools,
        max_tokens,
        stop: Vec::new(),
        sampling: AskedSampling {
            temperature: body.temperature.as_ref().map(single),
            top_p: body.top_p.as_ref().map(single),
        },
        thinking: effort.map(|effort| effort != "none"),
        logprobs: false,
        repeats: false,
        overridden,
    };
    let encrypted = "reasoning.encrypted_content";
    let form = Responses {
        stream: body.stream.unwrap_or(false),
        encrypted_reasoning: body
            .include
            .is_some_and(|fields| fields.iter().any(|it| it == encrypted)),
        previous,
        stores,
        asked: kept,
        echo,
        names: tools.names,
    };
    Ok((request, form))
}

/// The number as the sampler takes it, which the reply must not repeat: 0.7 would be 0.699999988.
#[expect(clippy::cast_possible_truncation, reason = "as where a number is read as f32")]
fn single(number: &Number) -> f32 {
    number.as_f64().unwrap_or(f64::NAN) as f32
}

fn messages(input: Option<TextOr<Item>>) -> Result<Vec<Message>, Problem> {
    let mut history = History::default();
    match input {
        None => {}
        Some(TextOr::Text(text)) => history.push(Message::new(Role::User, text)),
        Some(TextOr::List(items)) => {
            for (index, item) in items.into_iter().enumerate() {
                history::append(&mut history, item, &format!("input[{index}]"))?;
            }
        }
    }
    Ok(history.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::ToolChoice;
    use crate::wire::Envelope;

    fn request(body: &Value) -> Result<(SampleRequest, Responses), Problem> {
        parse(body.to_string().as_bytes(), Purpose::Sample)
    }

    #[test]
    fn text_and_items_give_the_same_history() {
        let (text, _) = request(&json!({"input": "a", "instructions": "b"})).unwrap();
        let items = json!([{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]);
        let (mut items, form) = request(&json!({
            "input": items, "stream": true, "store": true, "max_output_tokens": null,
            "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "auto",
        }))
        .unwrap();
        assert_eq!(
            items.overridden.header().as_deref(),
            Some("reasoning.summary, text.verbosity, truncation")
        );
        items.overridden = text.overridden.clone();
        assert_eq!(text, items);
        assert!(form.stream && form.encrypted_reasoning);
    }

    #[test]
    fn the_reply_repeats_the_numbers_of_the_request() {
        let body = r#"{"input": "a", "temperature": 0.7, "top_p": 0.95}"#;
        let (request, form) = parse(body.as_bytes(), Purpose::Sample).unwrap();
        let sampling = AskedSampling { temperature: Some(0.7), top_p: Some(0.95) };
        assert_eq!(request.sampling, sampling);
        let envelope = Envelope { id: "1".into(), created: 0, model: "policy".into() };
        let head = super::super::reply::head(&form, &envelope, "completed");
        assert_eq!((&head["temperature"], &head["top_p"]), (&json!(0.7), &json!(0.95)));
        assert_eq!(head["temperature"].to_string(), "0.7");
        let whole = parse(br#"{"input": "a", "temperature": 1}"#, Purpose::Sample).unwrap().1;
        assert_eq!(super::super::reply::head(&whole, &envelope, "completed")["temperature"], 1);
    }

    #[test]
    fn settings_are_understood() {
        let (request, _) = request(&json!({
            "input": "a", "max_output_tokens": 9, "reasoning": {"effort": "none"},
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
            "tool_choice": {"type": "function", "namespace": "n", "name": "f"},
        }))
        .unwrap();
        assert_eq!((request.max_tokens, request.thinking), (Some(9), Some(false)));
        assert_eq!(request.tool_choice, ToolChoice::Named("n__f".into()));
    }

    #[test]
    fn tools_of_the_vendors_servers_are_left_out_and_listed() {
        for kind in
            ["web_search", "web_search_2025_08_26", "web_search_preview", "mcp", "tool_search"]
        {
            let tools = json!([{"type": kind}, {"type": "function", "name": "f"}]);
            let (request, _) = request(&json!({"input": "a", "tools": tools})).unwrap();
            let names: Vec<&str> = request.tools.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!(names, ["f"], "{kind}");
            assert_eq!(request.overridden.header().as_deref(), Some("tools[].type"), "{kind}");
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_and_named() {
        for (field, value) in [
            ("conversation", json!({"id": "conv_1"})),
            ("background", json!(true)),
            ("prompt", json!({"id": "pmpt_1"})),
            ("input", json!([])),
            ("input", json!("")),
            ("input", Value::Null),
            ("input", json!(3)),
            ("max_output_tokens", json!(0)),
            ("tool_choice", json!({"type": "function", "name": "g"})),
        ] {
            let mut body = json!({"input": "a"});
            body[field] = value;
            assert_eq!(request(&body).unwrap_err().field.as_deref(), Some(field), "{body}");
        }
        for fields in [
            json!({"input": [], "instructions": "b"}),
            json!({"input": "", "instructions": "b"}),
            json!({"instructions": "b"}),
            json!({"input": "", "previous_response_id": "resp_1"}),
            json!({"input": [], "previous_response_id": "resp_1"}),
        ] {
            assert_eq!(request(&fields).unwrap_err().field.as_deref(), Some("input"), "{fields}");
        }
        assert!(request(&json!({"previous_response_id": "resp_1"})).is_ok());
        for kind in [
            "Function",
            "functon",
            "web_search_latest",
            "computer",
            "local_shell",
            "shell",
            "apply_patch",
            "",
        ] {
            let body = json!({"input": "a", "tools": [
                {"type": "function", "name": "f"}, {"type": kind, "name": "g"}]});
            let problem = request(&body).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some("tools[1].type"), "{kind}");
            assert!(problem.message.contains("not supported"), "{}", problem.message);
        }
        let effort = json!({"input": "a", "reasoning": {"effort": "off"}});
        assert_eq!(request(&effort).unwrap_err().field.as_deref(), Some("reasoning.effort"));
        let schema = json!({"input": "a", "text": {"format": {"type": "json_schema"}}});
        assert_eq!(request(&schema).unwrap_err().field.as_deref(), Some("text.format"));
    }
}
