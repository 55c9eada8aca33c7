//! Requests.

use super::Messages;
use super::history::{self, Block, MessageParam};
use crate::content::{self, Choice, TextOr, limit, stop_strings};
use crate::dialect::Dialect;
use crate::fields::{self, MESSAGES};
use crate::message::{History, Message, Role, answered};
use crate::problem::{Kind, Problem};
use crate::sampler::{AskedSampling, SampleRequest, Tool, ToolChoice};
use crate::wire::Purpose;
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<MessageParam>,
    system: Option<TextOr<Block>>,
    max_tokens: Option<u64>,
    tools: Option<Vec<ToolParam>>,
    tool_choice: Option<ChoiceParam>,
    thinking: Option<ThinkingParam>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
}

#[derive(Debug, Deserialize)]
struct ThinkingParam {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct ChoiceParam {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ToolParam {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    #[serde(default, deserialize_with = "content::unique")]
    input_schema: Option<Value>,
    defer_loading: Option<bool>,
}

/// Parses a body.
pub(super) fn parse(bytes: &[u8], purpose: Purpose) -> Result<(SampleRequest, Messages), Problem> {
    let body: Body = content::parse(bytes)?;
    let overridden = fields::check(bytes, &MESSAGES).map_err(of_thread)?;
    let max_tokens = limit(body.max_tokens, "max_tokens")?;
    if max_tokens.is_none() && purpose == Purpose::Sample {
        return Err(Problem::field("max_tokens", "this field is required"));
    }
    if body.messages.is_empty() {
        return Err(Problem::field("messages", "must not be empty"));
    }
    let mut messages = History::default();
    let system = history::system(body.system, "system")?;
    if !system.is_empty() {
        messages.push(Message::new(Role::System, system));
    }
    for (index, message) in body.messages.into_iter().enumerate() {
        history::append(&mut messages, message, &format!("messages[{index}]"))?;
    }
    if purpose == Purpose::Sample && messages.last_of(Role::Assistant).is_some() {
        let why = "the conversation must end with a user message: a reply begins where the chat \
                   template begins it, so it cannot continue a message of the assistant";
        return Err(Problem::field("messages", why));
    }
    let mut tools = tools(body.tools.unwrap_or_default())?;
    let request = SampleRequest {
        dialect: Dialect::Messages,
        messages: answered(messages.finish(), "messages")?,
        tool_choice: Choice::from(choice(body.tool_choice)?).apply(&mut tools)?,
        tools,
        max_tokens,
        stop: stop_strings(body.stop_sequences.map(TextOr::List), "stop_sequences")?,
        sampling: AskedSampling { temperature: body.temperature, top_p: body.top_p },
        thinking: body.thinking.map(|thinking| thinking.kind != "disabled"),
        logprobs: false,
        repeats: false,
        overridden,
    };
    Ok((request, Messages { stream: body.stream.unwrap_or(false) }))
}

/// A client that wants to leave its history with the server is told so in a way of its own.
fn of_thread(problem: Problem) -> Problem {
    match problem.field.as_deref() {
        Some("thread") => Problem { kind: Kind::Thread, ..problem },
        Some(_) | None => problem,
    }
}

/// The client's own tools. Tools that the vendor's servers would run are left out, as are those
/// that the client has not loaded yet. The table of fields refuses other types.
fn tools(tools: Vec<ToolParam>) -> Result<Vec<Tool>, Problem> {
    let mut found = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        if tool.defer_loading == Some(true) {
            continue;
        }
        match tool.kind.as_deref() {
            None | Some("custom") => {
                if tool.input_schema.is_none() {
                    return Err(Problem::field(
                        format!("{at}.input_schema"),
                        "a tool has a schema",
                    ));
                }
                found.push(content::tool(tool.name, tool.description, tool.input_schema, &at)?);
            }
            Some(_) => {}
        }
    }
    Ok(found)
}

fn choice(choice: Option<ChoiceParam>) -> Result<ToolChoice, Problem> {
    let Some(choice) = choice else { return Ok(ToolChoice::Auto) };
    match (choice.kind.as_str(), choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("none", _) => Ok(ToolChoice::None),
        ("any", _) => Ok(ToolChoice::Required),
        ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
        ("tool", None) => Err(Problem::field("tool_choice.name", "this field is required")),
        _ => {
            let expected = "must be `auto`, `any`, `tool` or `none`";
            Err(Problem::field("tool_choice.type", expected))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(fields: &Value) -> Result<SampleRequest, Problem> {
        let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        parse(body.to_string().as_bytes(), Purpose::Sample).map(|(request, _)| request)
    }

    #[test]
    fn settings_are_understood() {
        let request = request(&json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
                {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."}],
            "thinking": {"type": "adaptive"}, "stop_sequences": ["END"], "top_k": 4,
            "context_management": {"edits": []}, "output_config": {"effort": "high"},
            "tools": [
                {"name": "f", "description": "d", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
                {"name": "later", "input_schema": {}, "defer_loading": true}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        }));
        let request = request.unwrap();
        assert_eq!(request.messages[0], Message::new(Role::System, "You are\nbrief."));
        assert_eq!(request.messages[1], Message::new(Role::User, "a"));
        assert_eq!(request.tools.len(), 1);
        assert!(request.overridden.paths().any(|path| path == "tools[].type"));
        assert_eq!(request.tool_choice, ToolChoice::Required);
        assert_eq!((request.thinking, request.max_tokens), (Some(true), Some(5)));
        assert_eq!(request.stop, ["END"]);
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_and_named() {
        let schema = json!([{"name": "f", "input_schema": {}}]);
        for (fields, field) in [
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"messages": []}), "messages"),
            (json!({"thread": {"type": "create"}}), "thread"),
            (json!({"compaction": {"type": "enabled"}}), "compaction"),
            (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
            (json!({"output_format": {"type": "json_schema"}}), "output_format"),
            (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format"),
            (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function", "name": "f"}]}), "tools[0].type"),
            (
                json!({"tools": [{"type": "Custom", "name": "f", "input_schema": {}}]}),
                "tools[0].type",
            ),
            (json!({"tools": [{"type": "web_search", "name": "f"}]}), "tools[0].type"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
            (json!({"tools": [{"input_schema": {}}]}), "tools[0].name"),
            (json!({"tools": schema, "tool_choice": {"type": "tool", "name": "g"}}), "tool_choice"),
            (json!({"tool_choice": {"type": "most"}}), "tool_choice.type"),
            (json!({"thinking": 3}), "thinking"),
            (json!({"thinking": {"type": "Disabled"}}), "thinking.type"),
            (json!({"tools": [{"type": "web_search_latest", "name": "f"}]}), "tools[0].type"),
            (json!({"system": 3}), "system"),
        ] {
            let problem = request(&fields).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field), "{fields}: {}", problem.message);
        }
    }

    #[test]
    fn only_sampling_needs_a_token_limit() {
        let body = br#"{"messages": [{"role": "user", "content": "a"}]}"#;
        assert!(parse(body, Purpose::Sample).is_err());
        assert_eq!(parse(body, Purpose::Count).unwrap().0.max_tokens, None);
    }
}
