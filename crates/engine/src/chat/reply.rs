//! One reply of `/v1/chat/completions`.

use super::finish::FinishReason;
use crate::error::EngineErrorKind;
use crate::generation::Finish;
use crate::message::{AssistantMessage, FunctionCall, Thinking, ToolCall};
use crate::reply::{invalid_field, parse, truncated};
use orchestrate_types::{Attribution, mended_json, whole_zeros};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    message: ReplyMessage,
}

/// How a reply ended, which decides how the rest of it is read.
#[derive(Deserialize)]
struct Ending {
    choices: Vec<ChoiceEnding>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChoiceEnding {
    finish_reason: Option<String>,
    error: Option<Value>,
    message: Option<Value>,
}

#[derive(Deserialize)]
struct ReplyMessage {
    content: Option<String>,
    // Servers send the older name, the newer one or both.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<ReplyCall>>,
    // The only call, from servers that know no others.
    function_call: Option<FunctionCall>,
}

#[derive(Deserialize)]
struct ReplyCall {
    id: Option<String>,
    function: FunctionCall,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<usize>,
}

/// How many tokens a server counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TokenUsage {
    /// Tokens of the prompt; `None` if they are not reported.
    pub(crate) prompt: Option<usize>,
    /// Those that were cached.
    pub(crate) cached: usize,
}

/// The model that a reply is of, if the server names one.
pub(crate) fn model_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: String,
    }
    let named: Named = serde_json::from_slice(&mended_json(body)).ok()?;
    (!named.model.is_empty()).then_some(named.model)
}

/// Parses and checks a reply to a prompt of `messages` messages. Returns why it ended, the message, and how
/// many tokens the prompt has.
pub(crate) fn read(
    body: &[u8],
    messages: usize,
) -> Result<(Finish, AssistantMessage, TokenUsage), EngineErrorKind> {
    // A model may write one half of a surrogate pair in the arguments of a call.
    let body = mended_json(body);
    let body = whole_zeros(&body);
    let ending: Ending = parse(&body)?;
    let count = ending.choices.len();
    let Ok([choice]) = <[ChoiceEnding; 1]>::try_from(ending.choices) else {
        return Err(invalid_field("choices", format!("{count} choices, but 1 was requested")));
    };
    let Some(name) = &choice.finish_reason else {
        return Err(invalid_field("choices[0].finish_reason", "missing"));
    };
    let Some(reason) = FinishReason::of(name) else {
        let problem = format!("`{}` is unknown", truncated(name));
        return Err(invalid_field("choices[0].finish_reason", problem));
    };
    if reason.attribution() != Attribution::Policy {
        let error = choice.error.or(ending.error).unwrap_or_default();
        let message = error.as_str().or_else(|| error.get("message")?.as_str());
        let message = message.map(|text| format!(": {}", truncated(text))).unwrap_or_default();
        let name = truncated(name);
        return Err(EngineErrorKind::generation_failed(format!("`{name}`{message}")));
    }
    if reason == FinishReason::Declined {
        let content = match choice.message.as_ref().and_then(|message| message.get("content")) {
            None | Some(serde_json::Value::Null) => String::new(),
            Some(serde_json::Value::String(text)) => text.clone(),
            Some(_) => return Err(invalid_field("choices[0].message.content", "not text")),
        };
        let message = AssistantMessage { content, ..AssistantMessage::default() };
        return Ok((Finish::Stop, message, TokenUsage::default()));
    }
    let finish = if reason == FinishReason::Length { Finish::Length } else { Finish::Stop };
    let reply: Reply = parse(&body)?;
    let Ok([choice]) = <[Choice; 1]>::try_from(reply.choices) else {
        return Err(invalid_field("choices", "not one choice"));
    };
    let ReplyMessage { content, reasoning_content, reasoning, tool_calls, function_call } =
        choice.message;
    let only = || function_call.map(|function| ReplyCall { id: None, function });
    let calls = tool_calls.filter(|calls| !calls.is_empty());
    let calls = calls.unwrap_or_else(|| only().into_iter().collect());
    let tool_calls = calls.into_iter().enumerate().map(|(index, call)| ToolCall {
        // Some servers send no ids, but tool messages need one to refer to.
        id: call
            .id
            .filter(|id| !id.is_empty())
            .unwrap_or_else(|| format!("call-{messages}-{index}")),
        r#type: "function",
        function: call.function,
    });
    let message = AssistantMessage {
        content: content.unwrap_or_default(),
        thinking: Some(Thinking { reasoning, reasoning_content })
            .filter(|thinking| thinking.text().is_some()),
        tool_calls: tool_calls.collect(),
    };
    let usage = reply.usage.map_or_else(TokenUsage::default, |usage| TokenUsage {
        prompt: usage.prompt_tokens.filter(|tokens| *tokens > 0),
        cached: usage.prompt_tokens_details.and_then(|d| d.cached_tokens).unwrap_or(0),
    });
    Ok((finish, message, usage))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_call_in_the_form_of_older_servers_is_a_call() {
        let call = json!({"name": "bash", "arguments": "{}"});
        let listed = json!([{"id": "c", "function": {"name": "submit", "arguments": "{}"}}]);
        for (calls, name) in [(json!(null), "bash"), (json!([]), "bash"), (listed, "submit")] {
            let message = json!({"content": null, "function_call": call, "tool_calls": calls});
            let body = json!({"choices": [{"message": message, "finish_reason": "function_call"}]});
            let (_, message, _) = read(body.to_string().as_bytes(), 0).unwrap();
            let names: Vec<&str> =
                message.tool_calls.iter().map(|call| call.function.name.as_str()).collect();
            assert_eq!(names, [name]);
        }
    }

    #[test]
    fn a_message_is_read_with_its_thinking_and_its_tool_calls() {
        let body = json!({
            "id": "chatcmpl-1",
            "choices": [{
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": null,
                    "reasoning": "look first",
                    "tool_calls": [
                        {"id": "c-1", "type": "function",
                         "function": {"name": "bash", "arguments": "{\"command\": \"ls\"}"}},
                        {"type": "function", "function": {"name": "submit", "arguments": "{"}},
                    ],
                },
                "finish_reason": "tool_calls",
            }],
            "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
        });
        let text = body.to_string();
        let (finish, message, usage) = read(text.as_bytes(), 2).unwrap();
        assert_eq!(usage, TokenUsage { prompt: Some(9), cached: 4 });
        assert_eq!((finish, message.content.as_str()), (Finish::Stop, ""));
        assert_eq!(message.thinking.as_ref().and_then(Thinking::text), Some("look first"));
        let ids: Vec<&str> = message.tool_calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["c-1", "call-2-1"]);
        assert_eq!(message.tool_calls[1].function.arguments, "{");
        for cut in 0..text.len() {
            assert!(read(&text.as_bytes()[..cut], 2).is_err(), "cut at {cut}");
        }
        let both = text.replace("\"reasoning\"", "\"reasoning_content\": null, \"reasoning\"");
        assert_eq!(read(both.as_bytes(), 2).unwrap().1, message);
    }

    fn ended(message: &Value, finish: &str) -> Result<(Finish, AssistantMessage), EngineErrorKind> {
        let body = json!({"choices": [{"index": 0, "message": message, "finish_reason": finish}]});
        read(body.to_string().as_bytes(), 1).map(|(finish, message, _)| (finish, message))
    }

    #[test]
    fn the_text_of_a_declined_turn_is_text_or_absent() {
        for (message, text) in [
            (json!({"content": "I will not"}), "I will not"),
            (json!({"content": null}), ""),
            (json!({}), ""),
            (json!(null), ""),
        ] {
            assert_eq!(ended(&message, "content_filter").unwrap().1.content, text);
        }
        for content in [json!([{"type": "text", "text": "I will not"}]), json!(5), json!({})] {
            let error = ended(&json!({"content": content}), "content_filter").unwrap_err();
            assert!(error.to_string().contains("choices[0].message.content"), "{error}");
        }
    }

    #[test]
    fn a_turn_that_the_model_or_a_filter_spoiled_is_the_policys_without_calls() {
        let call =
            json!({"function": {"name": "bash", "arguments": "{\"command\": \"rm -rf x\"}"}});
        for (message, content) in [
            (json!({"role": "assistant"}), ""),
            (Value::Null, ""),
            (json!({"content": null}), ""),
            (json!({"content": "I will", "tool_calls": [call]}), "I will"),
            (json!({"content": "I will", "tool_calls": [{"function": {"name": null}}]}), "I will"),
        ] {
            for finish in ["MALFORMED_FUNCTION_CALL", "SAFETY", "content_filter", "refusal"] {
                let (finish, message) = ended(&message, finish).unwrap();
                assert_eq!((finish, message.content.as_str()), (Finish::Stop, content));
                assert!(message.tool_calls.is_empty(), "a call may be cut off");
            }
        }
        let class = "function_call_filter: MALFORMED_FUNCTION_CALL";
        assert_eq!(ended(&json!({"content": "x"}), class).unwrap().0, Finish::Stop);
        assert_eq!(ended(&json!({"content": "x"}), "STOP").unwrap().0, Finish::Stop);
        assert_eq!(ended(&json!({"content": "x"}), "max_tokens").unwrap().0, Finish::Length);
    }

    #[test]
    fn a_generation_that_failed_is_not_a_reply_and_shows_the_servers_message() {
        let failed = |choice: Value, top: Value| {
            let mut choice = choice;
            choice["finish_reason"] = json!("error");
            choice["message"] = json!({"content": "I wi"});
            let body = json!({"choices": [choice], "error": top}).to_string();
            read(body.as_bytes(), 1).unwrap_err()
        };
        let busy = json!({"message": "upstream is overloaded", "code": 502});
        for (error, text) in [
            (failed(json!({"error": busy}), Value::Null), "upstream is overloaded"),
            (failed(json!({}), busy), "upstream is overloaded"),
            (failed(json!({}), json!("busy")), "busy"),
            (failed(json!({}), Value::Null), "`error`"),
        ] {
            assert!(matches!(error, EngineErrorKind::GenerationFailed(_)), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_lone_surrogate_costs_no_reply() {
        let body = br#"{"choices": [{"finish_reason": "stop", "message": {"content": "a\ud83d", "tool_calls":
            [{"id": "c", "function": {"name": "bash", "arguments": "{\"command\": \"\udce9\"}"}}]}}]}"#;
        let (_, message, _) = read(body, 1).unwrap();
        assert_eq!(message.content, "a\u{fffd}");
        let arguments = "{\"command\": \"\u{fffd}\"}";
        assert_eq!(message.tool_calls[0].function.arguments, arguments);
    }

    #[test]
    fn an_invalid_reply_is_refused_by_its_field() {
        let choice = |message: Value, finish: Value| json!({"choices": [{"message": message, "finish_reason": finish}]});
        for (body, field) in [
            (json!({"choices": []}), "`choices`"),
            (json!({"choices": [{"finish_reason": "stop"}]}), "`choices[0]`"),
            (choice(json!({"content": 7}), json!("stop")), "`choices[0].message.content`"),
            (choice(json!({"content": "x"}), Value::Null), "`choices[0].finish_reason`"),
            (choice(json!({"content": "x"}), json!("new_reason")), "`choices[0].finish_reason`"),
            (
                choice(json!({"tool_calls": [{"function": {"name": "bash"}}]}), json!("stop")),
                "`choices[0].message.tool_calls[0].function`",
            ),
        ] {
            let Err(EngineErrorKind::InvalidReply(detail)) = read(body.to_string().as_bytes(), 1)
            else {
                panic!("{body} was accepted")
            };
            assert!(detail.to_string().starts_with(field), "{detail}");
        }
        for (body, message) in
            [("<html>", "not JSON"), (r#"{"error": "busy"}"#, "busy"), ("", "not JSON")]
        {
            let error = read(body.as_bytes(), 1).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
