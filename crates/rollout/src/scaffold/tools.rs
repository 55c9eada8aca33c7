//! The `tools` scaffold: tool calls in the model's own format, and their observations.

use super::call::{Call, Change, Mistake};
use crate::api::Action;
use crate::tool_format::{ToolFormat, read_arguments};
use crate::tool_server::called;
use orchestrate_engine::ToolCall;
use orchestrate_sandbox::{ExecResult, Exit};
use serde::Deserialize;
use serde_json::Value;
use std::sync::LazyLock;
use std::time::Duration;

/// Names of the built-in tools.
const BUILT_IN: [&str; 3] = ["bash", "edit", "submit"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BashArguments {
    command: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EditArguments {
    path: String,
    old_str: Option<String>,
    new_str: Option<String>,
    line: Option<usize>,
    new: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubmitArguments {}

/// Observation of a call in a turn with another call that cannot be read: all are performed, or none.
const NOT_PERFORMED: &str = "not performed: another tool call of this turn cannot be read";

/// The text of a call as a policy writes it and [`parse`] reads it in [`ToolFormat::Json`].
/// `arguments` may be invalid JSON.
pub(crate) fn call_text(name: &str, arguments: &str) -> String {
    let name = serde_json::Value::from(name);
    let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
    // Means the same in JSON, and cannot close a tag.
    let arguments = arguments.replace("</", "<\\/");
    format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
}

/// The calls of a text without thinking, and then the `separate` ones, in order; never empty.
/// `server_tools` are the schemas of the tools that are not built in.
pub(super) fn parse(
    format: ToolFormat,
    text: &str,
    separate: &[ToolCall],
    server_tools: &[Value],
) -> Vec<Result<(Action, Call), Mistake>> {
    static SCHEMAS: LazyLock<Vec<Value>> = LazyLock::new(schemas);
    let all = (!server_tools.is_empty()).then(|| [&SCHEMAS[..], server_tools].concat());
    let in_text = format.read(text, all.as_ref().unwrap_or(&SCHEMAS)).map(|read| read.calls);
    let apart = separate.iter().map(|ToolCall { function, .. }| {
        let name = function.name.clone();
        match read_arguments(&function.arguments) {
            Ok(arguments) => Ok(Action { name, arguments }),
            Err(problem) => Err(format!("{name} call is not valid: {problem}")),
        }
    });
    let apart: Vec<_> = apart.collect();
    if in_text.is_err() || apart.iter().any(Result::is_err) {
        let not_performed = || NOT_PERFORMED.to_owned();
        let of_text = match in_text {
            Ok(calls) => calls.iter().map(|_| not_performed()).collect(),
            Err(unread) => vec![unread.to_string()],
        };
        let of_others = apart.into_iter().map(|call| call.err().unwrap_or_else(not_performed));
        return of_text.into_iter().chain(of_others).map(|why| Err(Mistake::unread(why))).collect();
    }
    let all = in_text.into_iter().flatten().chain(apart.into_iter().flatten());
    let mut calls: Vec<_> = all.map(|action| checked(action, server_tools)).collect();
    if calls.is_empty() {
        let names = names(server_tools);
        calls
            .push(Err(Mistake::new(format!("no tool call found: each turn needs a {names} call"))));
    }
    calls
}

/// The names of all tools, as a list in words.
fn names(server_tools: &[Value]) -> String {
    let all: Vec<&str> =
        BUILT_IN.into_iter().chain(server_tools.iter().filter_map(called)).collect();
    match all.split_last() {
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

fn checked(action: Action, server_tools: &[Value]) -> Result<(Action, Call), Mistake> {
    let arguments = action.arguments.clone();
    let invalid =
        |e: serde_json::Error| Mistake::new(format!("{} call is not valid: {e}", action.name));
    let call = match action.name.as_str() {
        "bash" => {
            let BashArguments { command } = serde_json::from_value(arguments).map_err(invalid)?;
            Call::Bash { command }
        }
        "edit" => edit(serde_json::from_value(arguments).map_err(invalid)?)?,
        "submit" => {
            let SubmitArguments {} = serde_json::from_value(arguments).map_err(invalid)?;
            Call::Submit
        }
        other if server_tools.iter().any(|tool| called(tool) == Some(other)) => {
            let Value::Object(arguments) = arguments else {
                return Err(Mistake::new(format!(
                    "{other} call is not valid: arguments must be an object"
                )));
            };
            Call::Remote { tool: other.to_owned(), arguments }
        }
        other => {
            let names = names(server_tools);
            return Err(Mistake::new(format!("no tool `{other}`: use {names}")));
        }
    };
    Ok((action, call))
}

fn edit(arguments: EditArguments) -> Result<Call, Mistake> {
    let EditArguments { path, old_str, new_str, line, new } = arguments;
    let change = match (old_str, new_str, line, new) {
        (Some(old), Some(new), None, None) => Change::Replace { old, new },
        (None, None, Some(line), Some(new)) => Change::Line { line, new },
        _ => {
            let message = "edit call is not valid: give old_str and new_str, or line and new";
            return Err(Mistake::new(message.to_owned()));
        }
    };
    Ok(Call::Edit { path, change })
}

/// JSON schemas of the tools, for chat templates that show them.
pub(super) fn schemas() -> Vec<Value> {
    let tool = |name: &str, description: &str, parameters: Value| {
        serde_json::json!({
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        })
    };
    let text =
        |description: &str| serde_json::json!({"type": "string", "description": description});
    vec![
        tool(
            "bash",
            "Run a shell command in the repository and see its output.",
            serde_json::json!({
                "type": "object",
                "properties": {"command": text("The command line.")},
                "required": ["command"],
            }),
        ),
        tool(
            "edit",
            "Change a file: replace the only occurrence of old_str by new_str (an empty old_str \
             creates the file), or replace one line by its number.",
            serde_json::json!({
                "type": "object",
                "properties": {
                    "path": text("Path inside the repository."),
                    "old_str": text("Text that occurs exactly once; empty to create the file."),
                    "new_str": text("Text in its place."),
                    "line": {"type": "integer", "description": "Line number, from 1."},
                    "new": text("The line's new text."),
                },
                "required": ["path"],
            }),
        ),
        tool(
            "submit",
            "Hand in the repository as it is now and end the task.",
            serde_json::json!({"type": "object", "properties": {}}),
        ),
    ]
}

/// The observation of a command.
pub(super) fn bash_observation(result: &ExecResult, timeout: Duration) -> String {
    let status = match result.exit {
        Exit::Code(0) => None,
        Exit::Code(code) => Some(format!("exit {code}")),
        Exit::Signal(signal) => Some(format!("killed by signal {signal}")),
        Exit::TimedOut => Some(format!("timed out after {}s", timeout.as_secs_f64())),
        Exit::NotStarted => Some("the shell could not be started".to_owned()),
        Exit::Stopped => Some("stopped".to_owned()),
    };
    let output = result.text();
    let output = output.trim_end();
    let output = if output.is_empty() { "(no output)" } else { output };
    status.map_or_else(|| output.to_owned(), |status| format!("{status}\n{output}"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::command_result;
    use super::*;

    fn parse_one(text: &str) -> Result<Call, Mistake> {
        let mut calls = parse(ToolFormat::Json, text, &[], &[]);
        assert_eq!(calls.len(), 1, "{text}");
        calls.remove(0).map(|(_, call)| call)
    }

    #[test]
    fn calls_are_parsed_in_the_models_own_format() {
        let text = "I look.\n<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>\
                    <tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call>";
        let calls: Vec<Call> =
            parse(ToolFormat::Json, text, &[], &[]).into_iter().map(|c| c.unwrap().1).collect();
        assert_eq!(calls, [Call::Bash { command: "ls".to_owned() }, Call::Submit]);
        let edit = r#"<tool_call>{"name": "edit", "arguments": {"path": "a.py", "line": 3, "new": "x"}}</tool_call>"#;
        let change = Change::Line { line: 3, new: "x".to_owned() };
        assert_eq!(parse_one(edit), Ok(Call::Edit { path: "a.py".to_owned(), change }));
    }

    #[test]
    fn invalid_calls_become_observations_with_the_reason() {
        let wrapped = |body: &str| format!("<tool_call>{body}</tool_call>");
        let cases = [
            ("just words".to_owned(), "no tool call found: "),
            ("<tool_call>{\"name\": \"bash\"".to_owned(), "tool call is not closed"),
            (wrapped("{'name': 1}"), "tool call is not valid: "),
            (wrapped(r#"{"name": "rm", "arguments": {}}"#), "no tool `rm`"),
            (wrapped(r#"{"name": "bash", "arguments": {}}"#), "bash call is not valid: "),
            (wrapped(r#"{"name": "bash", "arguments": "{\"command\": 1}"}"#), "bash call is not"),
            (wrapped(r#"{"name": "submit", "arguments": {"x": 1}}"#), "submit call is not valid: "),
            (
                wrapped(r#"{"name": "edit", "arguments": {"path": "a"}}"#),
                "edit call is not valid: ",
            ),
            (
                wrapped(r#"{"name": "edit", "arguments": {"path": "a", "line": -1, "new": ""}}"#),
                "edit call",
            ),
        ];
        for (text, start) in cases {
            let error = parse_one(&text).unwrap_err().text;
            assert!(error.starts_with(start), "{text}: {error}");
        }
    }

    #[test]
    fn tools_of_servers_are_called_by_name_with_any_object() {
        let tool = serde_json::json!({"type": "function", "function": {"name": "s__find"}});
        let read = |body: &str| {
            let text = format!("<tool_call>{body}</tool_call>");
            parse(ToolFormat::Json, &text, &[], std::slice::from_ref(&tool)).remove(0)
        };
        let (action, call) = read(r#"{"name": "s__find", "arguments": {"n": [1, null]}}"#).unwrap();
        assert_eq!(call.action(), action);
        assert!(matches!(call, Call::Remote { tool, .. } if tool == "s__find"));
        let error = read(r#"{"name": "s__find", "arguments": "n"}"#).unwrap_err().text;
        assert_eq!(error, "s__find call is not valid: arguments must be an object");
        let error = read(r#"{"name": "find", "arguments": {}}"#).unwrap_err().text;
        assert_eq!(error, "no tool `find`: use bash, edit, submit or s__find");
        let error = parse(ToolFormat::Json, "", &[], &[]).remove(0).unwrap_err().text;
        assert_eq!(error, "no tool call found: each turn needs a bash, edit or submit call");
    }

    #[test]
    fn command_observations_have_status_and_output() {
        let text =
            |exit, output| bash_observation(&command_result(exit, output), Duration::from_secs(5));
        assert_eq!(text(Exit::Code(0), "  a \n\n"), "  a");
        assert_eq!(text(Exit::Code(0), "\n"), "(no output)");
        assert_eq!(text(Exit::Code(2), "bad\n"), "exit 2\nbad");
        assert_eq!(text(Exit::TimedOut, "x"), "timed out after 5s\nx");
        assert_eq!(text(Exit::Signal(9), ""), "killed by signal 9\n(no output)");
    }
}
