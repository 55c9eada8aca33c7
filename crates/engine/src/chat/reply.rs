//! One reply of `/v1/chat/completions`.

use super::{CalledFunction, ChatTurn, ToolCall};
use crate::reply::{parse, short, wrong};
use crate::{EngineErrorKind, Finish};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    message: Answer,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    content: Option<String>,
    // Some servers send the older name, some the newer one, some both.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<Called>>,
}

#[derive(Deserialize)]
struct Called {
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<usize>,
}

/// Checks a reply to so many messages in full.
pub(super) fn read(
    body: &[u8],
    messages: usize,
) -> Result<(Finish, ChatTurn, usize), EngineErrorKind> {
    let reply: Reply = parse(body)?;
    let count = reply.choices.len();
    let Ok([choice]) = <[Choice; 1]>::try_from(reply.choices) else {
        return Err(wrong("choices", format!("it has {count}, asked was for one")));
    };
    let finish = match choice.finish_reason.as_deref() {
        Some("stop" | "tool_calls" | "function_call" | "content_filter") => Finish::Stop,
        Some("length") => Finish::Length,
        Some(other) => {
            let words = format!("`{}` is unknown", short(other));
            return Err(wrong("choices[0].finish_reason", words));
        }
        None => return Err(wrong("choices[0].finish_reason", "it is missing")),
    };
    let Answer { content, reasoning_content, reasoning, tool_calls } = choice.message;
    let calls = tool_calls.unwrap_or_default().into_iter().enumerate();
    let tool_calls = calls.map(|(index, called)| ToolCall {
        // Some servers give no names; the conversation needs one for each call.
        id: called
            .id
            .filter(|id| !id.is_empty())
            .unwrap_or_else(|| format!("call-{messages}-{index}")),
        r#type: "function",
        function: called.function,
    });
    let turn = ChatTurn {
        content: content.unwrap_or_default(),
        reasoning: reasoning.or(reasoning_content).filter(|words| !words.is_empty()),
        tool_calls: tool_calls.collect(),
    };
    let details = reply.usage.and_then(|usage| usage.prompt_tokens_details);
    let cached = details.and_then(|details| details.cached_tokens).unwrap_or(0);
    Ok((finish, turn, cached))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_turn_is_read_with_its_thinking_and_its_calls() {
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
        let (finish, turn, cached) = read(text.as_bytes(), 2).unwrap();
        assert_eq!((finish, cached, turn.content.as_str()), (Finish::Stop, 4, ""));
        assert_eq!(turn.reasoning.as_deref(), Some("look first"));
        let ids: Vec<&str> = turn.tool_calls.iter().map(|call| call.id.as_str()).collect();
        assert_eq!(ids, ["c-1", "call-2-1"]);
        assert_eq!(turn.tool_calls[1].function.arguments, "{");
        for cut in 0..text.len() {
            assert!(read(&text.as_bytes()[..cut], 2).is_err(), "cut at {cut}");
        }
        let both = text.replace("\"reasoning\"", "\"reasoning_content\": null, \"reasoning\"");
        assert_eq!(read(both.as_bytes(), 2).unwrap().1, turn);
    }

    #[test]
    fn a_reply_that_is_none_is_refused_by_its_field() {
        let choice = |message: Value, finish: Value| json!({"choices": [{"message": message, "finish_reason": finish}]});
        for (body, field) in [
            (json!({"choices": []}), "`choices`"),
            (json!({"choices": [{"finish_reason": "stop"}]}), "`choices[0]`"),
            (choice(json!({"content": 7}), json!("stop")), "`choices[0].message.content`"),
            (choice(json!({"content": "x"}), Value::Null), "`choices[0].finish_reason`"),
            (choice(json!({"content": "x"}), json!("error")), "`choices[0].finish_reason`"),
            (
                choice(json!({"tool_calls": [{"function": {"name": "bash"}}]}), json!("stop")),
                "`choices[0].message.tool_calls[0].function`",
            ),
        ] {
            let Err(EngineErrorKind::InvalidReply(words)) = read(body.to_string().as_bytes(), 1)
            else {
                panic!("{body} was taken")
            };
            assert!(words.starts_with(field), "{words}");
        }
        for (body, said) in
            [("<html>", "no JSON"), (r#"{"error": "busy"}"#, "busy"), ("", "no JSON")]
        {
            let error = read(body.as_bytes(), 1).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
