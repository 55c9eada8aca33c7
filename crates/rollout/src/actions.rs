//! The `tools` scaffold: native tool calls out of sampled text, and what each one answers.
//!
//! The invariant: a mistake of the policy is an observation, never an error of ours. Parsing is
//! pure; [`crate::toolbox`] performs the calls in a sandbox.

use crate::api::Action;
use orchestrate_sandbox::{ExecResult, Exit};
use serde::Deserialize;
use std::time::Duration;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Answer to a turn without a call.
const NO_CALL: &str = "no tool call found: each turn needs a bash, edit or submit call";

/// A tool call the policy made, with its arguments checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Runs a shell command.
    Bash {
        /// The command line.
        command: String,
    },
    /// Changes or creates a file.
    Edit {
        /// Path as written by the policy.
        path: String,
        /// What to change.
        change: Change,
    },
    /// Ends the episode.
    Submit,
}

/// What an `edit` call changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The only occurrence of `old` becomes `new`; with an empty `old` the file is created.
    Replace {
        /// Text to find.
        old: String,
        /// Text in its place.
        new: String,
    },
    /// Line number `line` (from 1) becomes `new`.
    Line {
        /// Line number, from 1.
        line: usize,
        /// The line's new text, without its line end.
        new: String,
    },
}

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

/// The calls of one assistant text, in order: each a parsed action, or the observation that tells
/// the policy why its text is not one. Never empty. Calls inside a `<think>` part do not count.
pub fn parse_calls(text: &str) -> Vec<Result<(Action, Call), String>> {
    let mut rest = text.rsplit_once("</think>").map_or(text, |(_, after)| after);
    let mut calls = Vec::new();
    while let Some((_, after)) = rest.split_once(OPEN) {
        if let Some((body, after)) = after.split_once(CLOSE) {
            calls.push(parse_call(body));
            rest = after;
        } else {
            calls.push(Err("tool call is not closed".to_owned()));
            rest = "";
        }
    }
    if calls.is_empty() {
        calls.push(Err(NO_CALL.to_owned()));
    }
    calls
}

fn parse_call(body: &str) -> Result<(Action, Call), String> {
    let action: Action =
        serde_json::from_str(body.trim()).map_err(|e| format!("tool call is not valid: {e}"))?;
    let arguments = action.arguments.clone();
    let wrong = |e: serde_json::Error| format!("{} call is not valid: {e}", action.name);
    let call = match action.name.as_str() {
        "bash" => {
            let BashArguments { command } = serde_json::from_value(arguments).map_err(wrong)?;
            Call::Bash { command }
        }
        "edit" => edit(serde_json::from_value(arguments).map_err(wrong)?)?,
        "submit" => {
            let SubmitArguments {} = serde_json::from_value(arguments).map_err(wrong)?;
            Call::Submit
        }
        other => return Err(format!("no tool `{other}`: use bash, edit or submit")),
    };
    Ok((action, call))
}

fn edit(arguments: EditArguments) -> Result<Call, String> {
    let EditArguments { path, old_str, new_str, line, new } = arguments;
    let change = match (old_str, new_str, line, new) {
        (Some(old), Some(new), None, None) => Change::Replace { old, new },
        (None, None, Some(line), Some(new)) => Change::Line { line, new },
        _ => {
            return Err(
                "edit call is not valid: give old_str and new_str, or line and new".to_owned()
            );
        }
    };
    Ok(Call::Edit { path, change })
}

/// JSON schemas of the tools, for chat templates that show them.
pub fn tool_schemas() -> Vec<serde_json::Value> {
    let tool = |name: &str, description: &str, parameters: serde_json::Value| {
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

/// The file's text after a change, or the observation that tells why there is none. `content` is
/// `None` if there is no such file.
pub(crate) fn changed(
    content: Option<&str>,
    path: &str,
    change: &Change,
) -> Result<String, String> {
    match (content, change) {
        (None, Change::Replace { old, new }) if old.is_empty() => Ok(new.clone()),
        (Some(_), Change::Replace { old, .. }) if old.is_empty() => {
            Err(format!("file {path} exists"))
        }
        (None, Change::Replace { .. } | Change::Line { .. }) => Err(format!("no file {path}")),
        (Some(content), Change::Replace { old, new }) => match content.matches(old).count() {
            0 => Err("old_str not found".to_owned()),
            1 => Ok(content.replacen(old, new, 1)),
            count => Err(format!("old_str found {count} times")),
        },
        (Some(content), Change::Line { line, new }) => {
            let mut lines: Vec<&str> = content.split_inclusive('\n').collect();
            let slot = line.checked_sub(1).and_then(|index| lines.get_mut(index));
            let Some(slot) = slot else { return Err(format!("no line {line}")) };
            let replaced = if slot.ends_with('\n') { format!("{new}\n") } else { new.clone() };
            *slot = &replaced;
            Ok(lines.concat())
        }
    }
}

/// A command's result as the policy reads it.
pub(crate) fn bash_observation(result: &ExecResult, timeout: Duration) -> String {
    let how = match result.exit {
        Exit::Code(0) => None,
        Exit::Code(code) => Some(format!("exit {code}")),
        Exit::Signal(signal) => Some(format!("killed by signal {signal}")),
        Exit::TimedOut => Some(format!("timed out after {}s", timeout.as_secs_f64())),
        Exit::NotStarted => Some("the shell could not be started".to_owned()),
    };
    let output = result.text();
    let output = output.trim_end();
    let output = if output.is_empty() { "(no output)" } else { output };
    how.map_or_else(|| output.to_owned(), |how| format!("{how}\n{output}"))
}

/// `text`, with its middle cut out if it has more than `cap` characters.
pub(crate) fn capped(text: String, cap: usize) -> String {
    let count = text.chars().count();
    if count <= cap {
        return text;
    }
    let (head, tail) = (cap.div_ceil(2), cap / 2);
    let head: String = text.chars().take(head).collect();
    let tail: String = text.chars().skip(count - tail).collect();
    format!("{head}\n[{} characters cut]\n{tail}", count - cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(exit: Exit, output: &str) -> ExecResult {
        ExecResult {
            exit,
            head: output.as_bytes().to_vec(),
            tail: Vec::new(),
            total_bytes: output.len() as u64,
            oom_kills: 0,
            elapsed: Duration::ZERO,
        }
    }

    fn one(text: &str) -> Result<Call, String> {
        let mut calls = parse_calls(text);
        assert_eq!(calls.len(), 1, "{text}");
        calls.remove(0).map(|(_, call)| call)
    }

    #[test]
    fn calls_are_parsed_in_the_model_families_native_form() {
        let text = "I look.\n<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>\
                    <tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call>";
        let calls: Vec<Call> = parse_calls(text).into_iter().map(|c| c.unwrap().1).collect();
        assert_eq!(calls, [Call::Bash { command: "ls".to_owned() }, Call::Submit]);
        let edit = r#"<tool_call>{"name": "edit", "arguments": {"path": "a.py", "line": 3, "new": "x"}}</tool_call>"#;
        let change = Change::Line { line: 3, new: "x".to_owned() };
        assert_eq!(one(edit), Ok(Call::Edit { path: "a.py".to_owned(), change }));
    }

    #[test]
    fn what_is_no_call_becomes_an_observation_that_says_why() {
        let wrapped = |body: &str| format!("<tool_call>{body}</tool_call>");
        let cases = [
            ("just words".to_owned(), "no tool call found: "),
            ("<think><tool_call>{}</tool_call></think>done".to_owned(), "no tool call found: "),
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
            let error = one(&text).unwrap_err();
            assert!(error.starts_with(start), "{text}: {error}");
        }
    }

    #[test]
    fn edits_answer_with_the_agreed_words() {
        let replace = |old: &str| Change::Replace { old: old.to_owned(), new: "Z".to_owned() };
        let line = |line| Change::Line { line, new: "Z".to_owned() };
        let file = Some("a\nb\nb");
        assert_eq!(changed(file, "f", &replace("a")).unwrap(), "Z\nb\nb");
        assert_eq!(changed(file, "f", &replace("b")).unwrap_err(), "old_str found 2 times");
        assert_eq!(changed(file, "f", &replace("c")).unwrap_err(), "old_str not found");
        assert_eq!(changed(None, "f", &replace("c")).unwrap_err(), "no file f");
        assert_eq!(changed(None, "f", &replace("")).unwrap(), "Z");
        assert_eq!(changed(file, "f", &replace("")).unwrap_err(), "file f exists");
        assert_eq!(changed(file, "f", &line(2)).unwrap(), "a\nZ\nb");
        assert_eq!(changed(file, "f", &line(3)).unwrap(), "a\nb\nZ");
        assert_eq!(changed(file, "f", &line(4)).unwrap_err(), "no line 4");
        assert_eq!(changed(file, "f", &line(0)).unwrap_err(), "no line 0");
        assert_eq!(changed(None, "f", &line(1)).unwrap_err(), "no file f");
    }

    #[test]
    fn command_results_read_as_agreed() {
        let text = |exit, output| bash_observation(&result(exit, output), Duration::from_secs(5));
        assert_eq!(text(Exit::Code(0), "  a \n\n"), "  a");
        assert_eq!(text(Exit::Code(0), "\n"), "(no output)");
        assert_eq!(text(Exit::Code(2), "bad\n"), "exit 2\nbad");
        assert_eq!(text(Exit::TimedOut, "x"), "timed out after 5s\nx");
        assert_eq!(text(Exit::Signal(9), ""), "killed by signal 9\n(no output)");
    }

    #[test]
    fn long_observations_keep_head_and_tail() {
        let text = format!("{}{}", "é".repeat(10), "z".repeat(10));
        assert_eq!(capped(text, 8), "éééé\n[12 characters cut]\nzzzz");
        assert_eq!(capped("short".to_owned(), 8), "short");
    }
}
