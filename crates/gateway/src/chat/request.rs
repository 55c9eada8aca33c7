//! Requests.

use super::{Chat, Logprobs};
use crate::content::{
    self, AllowedMode, Choice, Part, TextOr, limit, stop_strings, text_given, text_of,
};
use crate::dialect::Dialect;
use crate::fields::{self, CHAT};
use crate::message::{Message, Role, ToolCall, answered};
use crate::problem::Problem;
use crate::sampler::{AskedSampling, SampleRequest, Tool, ToolChoice};
use serde::Deserialize;
use serde_json::Value;

/// Maximum number of replies to one request, as in the vendor's API.
const MAX_REPLIES: u64 = 128;

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<ChatMessage>,
    tools: Option<Vec<ToolDeclaration>>,
    #[serde(default, deserialize_with = "content::unique")]
    tool_choice: Option<Value>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    stop: Option<TextOr<String>>,
    n: Option<u64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    reasoning_effort: Option<String>,
    enable_thinking: Option<bool>,
    chat_template_kwargs: Option<TemplateOptions>,
    thinking: Option<ThinkingParam>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct TemplateOptions {
    enable_thinking: Option<bool>,
    thinking: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ThinkingParam {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<TextOr<Part>>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallParam>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct CallParam {
    id: Option<String>,
    function: Option<FunctionParam>,
}

#[derive(Debug, Deserialize)]
struct FunctionParam {
    name: String,
    arguments: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ToolDeclaration {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<FunctionDeclaration>,
}

#[derive(Debug, Deserialize)]
struct FunctionDeclaration {
    name: Option<String>,
    description: Option<String>,
    #[serde(default, deserialize_with = "content::unique")]
    parameters: Option<Value>,
}

/// An object in `tool_choice`.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ChoiceParam {
    Function { function: NameParam },
    AllowedTools { allowed_tools: AllowedParam },
}

#[derive(Debug, Deserialize)]
struct AllowedParam {
    mode: AllowedMode,
    tools: Vec<AllowedTool>,
}

#[derive(Debug, Deserialize)]
struct AllowedTool {
    function: NameParam,
}

#[derive(Debug, Deserialize)]
struct NameParam {
    name: String,
}

/// Parses a body.
pub(super) fn parse(bytes: &[u8]) -> Result<(SampleRequest, Chat), Problem> {
    let body: Body = content::parse(bytes)?;
    let overridden = fields::check(bytes, &CHAT)?;
    let form = form(&body)?;
    let thinking = thinking(&body)?;
    let mut tools = tools(body.tools.unwrap_or_default())?;
    let choice = Choice::read::<ChoiceParam>(body.tool_choice.as_ref())?;
    let tool_choice = choice.apply(&mut tools)?;
    if body.messages.is_empty() {
        return Err(Problem::field("messages", "must not be empty"));
    }
    let messages = body.messages.into_iter().enumerate();
    let messages = messages.map(|(index, message)| convert(message, index));
    let messages = messages.collect::<Result<_, _>>()?;
    let limits = [
        limit(body.max_completion_tokens, "max_completion_tokens")?,
        limit(body.max_tokens, "max_tokens")?,
    ];
    let request = SampleRequest {
        dialect: Dialect::Chat,
        messages: answered(messages, "messages")?,
        tools,
        tool_choice,
        max_tokens: limits.into_iter().flatten().min(),
        stop: stop_strings(body.stop, "stop")?,
        sampling: AskedSampling { temperature: body.temperature, top_p: body.top_p },
        thinking,
        logprobs: form.logprobs != Logprobs::None,
        repeats: false,
        overridden,
    };
    Ok((request, form))
}

fn form(body: &Body) -> Result<Chat, Problem> {
    let replies = body.n.unwrap_or(1);
    if !(1..=MAX_REPLIES).contains(&replies) {
        return Err(Problem::field("n", format!("must be between 1 and {MAX_REPLIES}")));
    }
    let logprobs = body.logprobs.unwrap_or(false);
    let alternatives = body.top_logprobs.unwrap_or(0);
    if alternatives > 0 && !logprobs {
        return Err(Problem::field("top_logprobs", "needs `logprobs`: true"));
    }
    let options = body.stream_options.as_ref();
    Ok(Chat {
        stream: body.stream.unwrap_or(false),
        replies: usize::try_from(replies).unwrap_or(1),
        logprobs: match (logprobs, alternatives) {
            (false, _) => Logprobs::None,
            (true, 0) => Logprobs::Sampled,
            (true, _) => Logprobs::Listed,
        },
        usage_at_end: options.and_then(|options| options.include_usage).unwrap_or(false),
    })
}

/// What the fields that switch thinking say, which must be the same.
fn thinking(body: &Body) -> Result<Option<bool>, Problem> {
    let options = body.chat_template_kwargs.as_ref();
    let kind = body.thinking.as_ref().and_then(|thinking| thinking.kind.as_deref());
    let flag = |flag: Option<bool>| flag.map(|thinks| (thinks.to_string(), thinks));
    let word = |word: Option<&str>, off| word.map(|word| (format!("\"{word}\""), word != off));
    let switches = [
        ("enable_thinking", flag(body.enable_thinking)),
        (
            "chat_template_kwargs.enable_thinking",
            flag(options.and_then(|options| options.enable_thinking)),
        ),
        ("chat_template_kwargs.thinking", flag(options.and_then(|options| options.thinking))),
        ("thinking.type", word(kind, "disabled")),
        ("reasoning_effort", word(body.reasoning_effort.as_deref(), "none")),
    ];
    let mut given = switches.iter().filter_map(|(field, given)| Some((field, given.as_ref()?)));
    let Some((first, (value, thinks))) = given.next() else { return Ok(None) };
    match given.find(|(_, (_, other))| other != thinks) {
        None => Ok(Some(*thinks)),
        Some((field, (other, _))) => {
            let problem = format!("{other} contradicts `{first}`: {value}; send one of the two");
            Err(Problem::field(*field, problem))
        }
    }
}

fn tools(tools: Vec<ToolDeclaration>) -> Result<Vec<Tool>, Problem> {
    let convert = |(index, tool): (usize, ToolDeclaration)| {
        let at = format!("tools[{index}]");
        match (tool.kind.as_deref(), tool.function) {
            (Some("function") | None, Some(function)) => content::tool(
                function.name,
                function.description,
                function.parameters,
                &format!("{at}.function"),
            ),
            (Some("function") | None, None) => Err(Problem::field(at, "`function` is missing")),
            (Some(_), _) => {
                let why = "declare a tool of type `function`";
                Err(Problem::unsupported(format!("{at}.type"), "this type of tool", why))
            }
        }
    };
    tools.into_iter().enumerate().map(convert).collect()
}

impl From<ChoiceParam> for Choice {
    fn from(choice: ChoiceParam) -> Self {
        match choice {
            ChoiceParam::Function { function } => ToolChoice::Named(function.name).into(),
            ChoiceParam::AllowedTools { allowed_tools: AllowedParam { mode, tools } } => {
                Self::among(&mode, tools.into_iter().map(|tool| tool.function.name).collect())
            }
        }
    }
}

fn convert(message: ChatMessage, index: usize) -> Result<Message, Problem> {
    let at = format!("messages[{index}]");
    let role = match message.role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        _ => {
            let expected = "must be `system`, `developer`, `user`, `assistant` or `tool`";
            return Err(Problem::field(format!("{at}.role"), expected));
        }
    };
    let name = message.name.filter(|name| !name.is_empty());
    // An assistant's parts are pieces of one text; parts of other messages are texts.
    let separator = if role == Role::Assistant { "" } else { "\n" };
    let may_be_empty = matches!(role, Role::Assistant | Role::Tool);
    let text_of = if may_be_empty { text_of } else { text_given };
    let mut text = text_of(message.content, &format!("{at}.content"), separator)?;
    if role == Role::Assistant {
        if text.is_empty() {
            text = message.refusal.unwrap_or_default();
        }
        let calls = message.tool_calls.unwrap_or_default().into_iter().enumerate();
        let calls = calls.map(|(index, call)| call.convert(&format!("{at}.tool_calls[{index}]")));
        let reasoning = message.reasoning_content.or(message.reasoning);
        return Ok(Message {
            reasoning: reasoning.filter(|text| !text.is_empty()),
            tool_calls: calls.collect::<Result<_, _>>()?,
            name,
            ..Message::new(role, text)
        });
    }
    let misplaced = [
        ("tool_calls", message.tool_calls.is_some_and(|calls| !calls.is_empty())),
        ("reasoning_content", message.reasoning_content.is_some_and(|text| !text.is_empty())),
        ("reasoning", message.reasoning.is_some_and(|text| !text.is_empty())),
    ];
    if let Some((field, _)) = misplaced.into_iter().find(|(_, is_set)| *is_set) {
        let why = "only a message of the assistant has this field";
        return Err(Problem::field(format!("{at}.{field}"), why));
    }
    if role == Role::Tool {
        let id = message.tool_call_id.ok_or_else(|| {
            Problem::field(format!("{at}.tool_call_id"), "a tool message names the call it answers")
        })?;
        return Ok(Message { name, ..Message::tool(id, text) });
    }
    Ok(Message { name, ..Message::new(role, text) })
}

impl CallParam {
    fn convert(self, at: &str) -> Result<ToolCall, Problem> {
        let function = self
            .function
            .ok_or_else(|| Problem::field(format!("{at}.function"), "a call has a function"))?;
        let id = self.id.ok_or_else(|| Problem::field(format!("{at}.id"), "a call has an id"))?;
        let arguments = function.arguments.unwrap_or_default();
        Ok(ToolCall { id, name: function.name, arguments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(body: &Value) -> Result<(SampleRequest, Chat), Problem> {
        parse(body.to_string().as_bytes())
    }

    #[test]
    fn a_whole_history_is_understood() {
        let (request, form) = request(&json!({
            "model": "any", "stream": true, "n": 2, "stop": "END", "max_tokens": 9,
            "max_completion_tokens": 7, "temperature": 0.5, "seed": 3, "unknown": {},
            "logprobs": true, "top_logprobs": 5, "stream_options": {"include_usage": true},
            "tools": [{"type": "function", "function": {"name": "ls"}}],
            "tool_choice": {"type": "function", "function": {"name": "ls"}},
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{ }"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "x"},
            ],
        }))
        .unwrap();
        assert!(form.stream && form.replies == 2 && form.usage_at_end);
        assert_eq!(form.logprobs, Logprobs::Listed);
        assert_eq!((request.max_tokens, request.stop), (Some(7), vec!["END".to_owned()]));
        assert_eq!(request.tool_choice, ToolChoice::Named("ls".into()));
        assert_eq!(request.messages[0], Message::new(Role::System, "Be brief."));
        assert_eq!(request.messages[1], Message::new(Role::User, "a\nb"));
        assert_eq!(request.messages[2].reasoning.as_deref(), Some("hm"));
        assert_eq!(request.messages[2].tool_calls[0].arguments, "{ }");
        assert_eq!(request.messages[3], Message::tool("c1", "x"));
        assert_eq!(request.thinking, None);
    }

    #[test]
    fn the_smaller_of_two_token_limits_counts() {
        for (first, second) in [(1, 50), (50, 1)] {
            let body = json!({"messages": [{"role": "user", "content": "a"}],
                "max_tokens": first, "max_completion_tokens": second});
            assert_eq!(request(&body).unwrap().0.max_tokens, Some(1), "{body}");
        }
    }

    #[test]
    fn thinking_is_read_from_the_fields_that_clients_use() {
        for (field, value, thinking) in [
            ("enable_thinking", json!(false), false),
            ("chat_template_kwargs", json!({"enable_thinking": true}), true),
            ("chat_template_kwargs", json!({"thinking": false}), false),
            ("thinking", json!({"type": "disabled"}), false),
            ("thinking", json!({"type": "enabled"}), true),
            ("reasoning_effort", json!("none"), false),
            ("reasoning_effort", json!("low"), true),
        ] {
            let mut body = json!({"messages": [{"role": "user", "content": "a"}]});
            body[field] = value;
            assert_eq!(request(&body).unwrap().0.thinking, Some(thinking), "{body}");
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_and_named() {
        let user = json!([{"role": "user", "content": "a"}]);
        for (field, value) in [
            ("functions", json!([{"name": "f"}])),
            ("logit_bias", json!({"1": 2})),
            ("response_format", json!({"type": "json_object"})),
            ("best_of", json!(2)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("n", json!(-1)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!("7")),
            ("top_logprobs", json!(3)),
            ("stop", json!([""])),
            ("tool_choice", json!("sometimes")),
            ("tool_choice", json!({"type": "function", "function": {"name": "f"}})),
            ("tool_choice", json!("required")),
            ("messages", json!([])),
            ("messages", json!("a")),
        ] {
            let mut body = json!({"messages": user});
            body[field] = value;
            assert_eq!(request(&body).unwrap_err().field.as_deref(), Some(field), "{body}");
        }
        for (message, field) in [
            (json!({"role": "function", "content": "a"}), "messages[0].role"),
            (json!({"role": "tool", "content": "a"}), "messages[0].tool_call_id"),
            (
                json!({"role": "user", "content": "a", "reasoning_content": "b"}),
                "messages[0].reasoning_content",
            ),
            (json!({"role": "system", "content": "a", "reasoning": "b"}), "messages[0].reasoning"),
            (
                json!({"role": "user", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}),
                "messages[0].tool_calls",
            ),
            (json!({"role": "user", "content": []}), "messages[0].content"),
            (json!({"role": "user", "content": null}), "messages[0].content"),
            (json!({"role": "user"}), "messages[0].content"),
            (json!({"role": "system", "content": []}), "messages[0].content"),
            (json!({"role": "developer"}), "messages[0].content"),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
                "messages[0].content[0].type",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"id": "a"}]}),
                "messages[0].tool_calls[0].function",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": 1}}]}),
                "messages[0].tool_calls[0].function.name",
            ),
        ] {
            let problem = request(&json!({"messages": [message]})).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field), "{}", problem.message);
            assert!(problem.message.contains(field), "{}", problem.message);
        }
    }

    #[test]
    fn fields_that_switch_thinking_must_agree() {
        let thinking = |fields: &Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "a"}]});
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            request(&body).map(|(request, _)| request.thinking)
        };
        // Each way to say it, with the value as an error repeats it.
        let ways = |thinks: bool| {
            let (kind, effort) = if thinks { ("enabled", "low") } else { ("disabled", "none") };
            [
                ("enable_thinking", json!({"enable_thinking": thinks}), thinks.to_string()),
                (
                    "chat_template_kwargs.enable_thinking",
                    json!({"chat_template_kwargs": {"enable_thinking": thinks}}),
                    thinks.to_string(),
                ),
                (
                    "chat_template_kwargs.thinking",
                    json!({"chat_template_kwargs": {"thinking": thinks}}),
                    thinks.to_string(),
                ),
                ("thinking.type", json!({"thinking": {"type": kind}}), format!("\"{kind}\"")),
                ("reasoning_effort", json!({"reasoning_effort": effort}), format!("\"{effort}\"")),
            ]
        };
        let both = |one: &Value, other: &Value| {
            let mut fields = one.clone();
            for (field, value) in other.as_object().unwrap() {
                match (fields[field].as_object_mut(), value) {
                    (Some(inner), Value::Object(value)) => inner.extend(value.clone()),
                    _ => fields[field] = value.clone(),
                }
            }
            fields
        };
        for (index, (on, asks, on_value)) in ways(true).into_iter().enumerate() {
            assert_eq!(thinking(&asks).unwrap(), Some(true), "{asks}");
            for (other, (off, declines, off_value)) in ways(false).into_iter().enumerate() {
                let fields = both(&asks, &declines);
                if index == other {
                    assert_eq!(thinking(&declines).unwrap(), Some(false), "{declines}");
                    continue;
                }
                let message = thinking(&fields).unwrap_err().message;
                for part in [on, off, &on_value, &off_value] {
                    assert!(message.contains(part), "{fields}: {message}");
                }
            }
            for (_, agrees, _) in ways(true) {
                let fields = both(&asks, &agrees);
                assert_eq!(thinking(&fields).unwrap(), Some(true), "{fields}");
            }
        }
        assert_eq!(thinking(&json!({})).unwrap(), None);
        for (fields, field, words) in [
            (
                json!({"reasoning_effort": "off"}),
                "reasoning_effort",
                "must be `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`",
            ),
            (
                json!({"thinking": {"type": "off"}}),
                "thinking.type",
                "must be `enabled`, `adaptive` or `disabled`",
            ),
        ] {
            let problem = thinking(&fields).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field));
            assert!(problem.message.contains(words), "{}", problem.message);
        }
    }

    #[test]
    fn replies_and_results_may_be_empty() {
        for content in [json!([]), json!(""), Value::Null] {
            let call = json!([{"id": "c", "function": {"name": "f"}}]);
            let messages = json!([
                {"role": "user", "content": ""},
                {"role": "assistant", "content": content, "tool_calls": call},
                {"role": "tool", "tool_call_id": "c", "content": content},
                {"role": "assistant", "content": content},
            ]);
            let (request, _) = request(&json!({"messages": messages})).unwrap();
            assert!(request.messages.iter().all(|message| message.content.is_empty()));
            assert_eq!(request.messages.len(), 4, "{content}");
        }
    }

    #[test]
    fn fields_that_say_nothing_are_accepted() {
        let body = json!({
            "messages": [{"role": "user", "content": "a"}], "tools": null, "tool_choice": "auto",
            "functions": null, "logit_bias": {}, "response_format": {"type": "text"}, "stop": null,
            "n": null, "frequency_penalty": 0, "parallel_tool_calls": false, "store": true,
        });
        assert_eq!(request(&body).unwrap().1, Chat { replies: 1, ..Chat::default() });
    }
}
