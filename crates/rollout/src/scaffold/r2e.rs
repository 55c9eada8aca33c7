//! The `r2e-xml` scaffold: R2E-Gym's functions, called in XML, one per turn.

use super::call::{Call, EditorCommand, Mistake, STDERR_MARKER, ToolLimits, ToolResult};
use super::truncate::truncate_middle;
use crate::api::Action;
use orchestrate_sandbox::{ExecResult, Exit};

pub(super) const SYSTEM: &str = include_str!("r2e_system.txt");
pub(super) const TASK: &str = include_str!("r2e_task.txt");

const FUNCTION: &str = "<function";
const CLOSE: &str = "</function>";
const PARAMETER: &str = "<parameter";
const CLOSE_PARAMETER: &str = "</parameter>";

/// Observation of a turn without a call.
const NO_CALL: &str = "No function call found. Each reply must hold exactly one function call, in \
                       the form <function=...> ... </function>.";

/// Observation of a call whose values may have ended elsewhere.
const STRAY_END: &str = "The function call may have ended too early: a </parameter> or </function> after \
                         it has no beginning. Write a text that contains these tags with another \
                         command, in parts.";

/// Parameters of `file_editor`.
const EDITOR_PARAMETERS: [&str; 8] =
    ["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range", "concise"];

/// Programs that a command must not start with.
const BLOCKED: [&str; 4] = ["git", "ipython", "jupyter", "nohup"];

/// Lines of a command's output that are shown from its start, and as many from its end.
const SHOWN_LINES: usize = 40;

/// The first call of a turn.
pub(super) fn parse(text: &str) -> Result<(Action, Call), Mistake> {
    let Some((name, rest)) = tag(text, FUNCTION) else {
        return Err(Mistake::new(NO_CALL.to_owned()));
    };
    let (parameters, after) = parameters(rest)?;
    if has_stray_end(after) {
        return Err(Mistake::unread(STRAY_END.to_owned()));
    }
    check_names(name, &parameters)?;
    let call = match name {
        "execute_bash" | "bash" => bash(&parameters)?,
        "file_editor" => editor(&parameters)?,
        "search" => search(&parameters)?,
        "finish" | "submit" => finish(&parameters)?,
        other => {
            return Err(Mistake::new(format!(
                "There is no function {other}: use file_editor, execute_bash, search or finish."
            )));
        }
    };
    Ok((call.action(), call))
}

/// The text between the `=` after `open` and the next `>`, and the rest after it.
fn tag<'a>(text: &'a str, open: &str) -> Option<(&'a str, &'a str)> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(open) {
        if let Some(value) = after.trim_start().strip_prefix('=') {
            // Without a `>` after this tag there is none after a later one.
            let (name, rest) = value.split_once('>')?;
            if !name.trim().is_empty() {
                return Some((name.trim(), rest));
            }
        }
        rest = after;
    }
    None
}

/// Names and values of parameters.
type Parameters<'a> = Vec<(&'a str, &'a str)>;

/// Names and values of a call's parameters, without surrounding white space, and the text after the call.
/// A value ends at the first tag after which the call goes on or ends, so it may contain the tag.
fn parameters(body: &str) -> Result<(Parameters<'_>, &str), Mistake> {
    let unclosed =
        || Mistake::unread(format!("The function call is not closed: {CLOSE} is missing."));
    let mut found = Vec::new();
    let mut rest = body;
    loop {
        let (before, after) = rest.split_once(CLOSE).ok_or_else(unclosed)?;
        let Some((name, value)) = tag(rest, PARAMETER).filter(|_| tag(before, PARAMETER).is_some())
        else {
            return Ok((found, after));
        };
        let mut ends = value.match_indices(CLOSE_PARAMETER).map(|(at, _)| at);
        let goes_on = |at: &usize| {
            let next = value.get(at + CLOSE_PARAMETER.len()..).unwrap_or_default().trim_start();
            next.starts_with(PARAMETER) || next.starts_with(CLOSE)
        };
        let Some(end) = ends.clone().find(goes_on).or_else(|| ends.next()) else {
            return Ok((found, after));
        };
        let (value, next) = value.split_at(end);
        found.push((name, value.trim()));
        rest = next.strip_prefix(CLOSE_PARAMETER).unwrap_or_default();
    }
}

/// Whether a tag ends something in the text that did not begin there.
fn has_stray_end(text: &str) -> bool {
    let (mut functions, mut parameters) = (0_usize, 0_usize);
    for (at, _) in text.match_indices('<') {
        let text = text.get(at..).unwrap_or_default();
        let (open, is_end) = match text {
            text if text.starts_with(CLOSE) => (&mut functions, true),
            text if text.starts_with(CLOSE_PARAMETER) => (&mut parameters, true),
            text if text.starts_with(FUNCTION) => (&mut functions, false),
            text if text.starts_with(PARAMETER) => (&mut parameters, false),
            _ => continue,
        };
        match (is_end, open.checked_sub(1)) {
            (false, _) => *open += 1,
            (true, Some(fewer)) => *open = fewer,
            (true, None) => return true,
        }
    }
    false
}

/// Refuses parameters that do not exist or occur twice: they may be a part of the value before them.
fn check_names(function: &str, parameters: &[(&str, &str)]) -> Result<(), Mistake> {
    let known: &[&str] = match function {
        "execute_bash" | "bash" => &["cmd", "command"],
        "file_editor" => &EDITOR_PARAMETERS,
        "search" => &["search_term", "path"],
        "finish" | "submit" => &["command", "result"],
        _ => return Ok(()),
    };
    for (index, (name, _)) in parameters.iter().enumerate() {
        if !known.contains(name) {
            return Err(Mistake::unread(format!("{function} has no parameter {name}.")));
        }
        if parameters.iter().skip(index + 1).any(|(other, _)| other == name) {
            let problem = format!("The call of {function} has the parameter {name} twice.");
            return Err(Mistake::unread(problem));
        }
    }
    Ok(())
}

/// The value of a parameter.
fn value<'a>(parameters: &[(&str, &'a str)], name: &str) -> Option<&'a str> {
    parameters.iter().find(|(found, _)| *found == name).map(|(_, value)| *value)
}

fn required(function: &str, parameters: &[(&str, &str)], name: &str) -> Result<String, Mistake> {
    value(parameters, name).map(ToOwned::to_owned).ok_or_else(|| missing(function, name))
}

fn missing(function: &str, name: &str) -> Mistake {
    Mistake::new(format!("The call of {function} lacks the required parameter {name}."))
}

fn number(parameters: &[(&str, &str)], name: &str) -> Result<Option<i64>, Mistake> {
    let parse = |text: &str| {
        text.parse().map_err(|_| Mistake::new(format!("{name} must be a whole number.")))
    };
    value(parameters, name).map(parse).transpose()
}

fn bash(parameters: &[(&str, &str)]) -> Result<Call, Mistake> {
    let command = match value(parameters, "command") {
        Some(command) if value(parameters, "cmd").is_none() => command.to_owned(),
        Some(_) | None => required("execute_bash", parameters, "cmd")?,
    };
    match command.split_whitespace().next() {
        None => Err(Mistake::new("The parameter cmd is empty.".to_owned())),
        Some(program) if BLOCKED.contains(&program) => Err(Mistake::new(bash_output(
            "Error: Exit code 1",
            &format!("Bash command '{program}' is not allowed. Use another command or function."),
        ))),
        Some(_) => Ok(Call::Bash { command }),
    }
}

fn search(parameters: &[(&str, &str)]) -> Result<Call, Mistake> {
    let term = required("search", parameters, "search_term")?;
    let path = value(parameters, "path").filter(|path| !path.is_empty()).unwrap_or(".");
    Ok(Call::Search { term, path: path.to_owned() })
}

fn finish(parameters: &[(&str, &str)]) -> Result<Call, Mistake> {
    match value(parameters, "command") {
        None | Some("submit") => Ok(Call::Submit),
        Some(other) => {
            Err(Mistake::new(format!("Unknown command {other} of finish: the only one is submit.")))
        }
    }
}

fn editor(parameters: &[(&str, &str)]) -> Result<Call, Mistake> {
    let required = |name| required("file_editor", parameters, name);
    let text = |name| value(parameters, name).unwrap_or_default().to_owned();
    let path = required("path")?;
    let command = match required("command")?.as_str() {
        "view" => EditorCommand::View {
            range: value(parameters, "view_range").map(range).transpose()?,
            concise: value(parameters, "concise").is_some_and(|v| v.eq_ignore_ascii_case("true")),
        },
        "create" => EditorCommand::Create { text: required("file_text")? },
        "str_replace" => EditorCommand::Replace { old: required("old_str")?, new: text("new_str") },
        "insert" => EditorCommand::Insert {
            line: number(parameters, "insert_line")?
                .ok_or_else(|| missing("file_editor", "insert_line"))?,
            text: required("new_str")?,
        },
        "undo_edit" => EditorCommand::Undo,
        other => {
            return Err(Mistake::new(format!(
                "Unknown command {other} of file_editor: use view, create, str_replace, insert or \
                 undo_edit."
            )));
        }
    };
    Ok(Call::Editor { path, command })
}

/// Two numbers, with or without brackets around them and a comma between them.
fn range(text: &str) -> Result<(i64, i64), Mistake> {
    let inside = text.trim_matches(|c: char| "[]()".contains(c) || c.is_whitespace());
    let numbers: Vec<Option<i64>> = inside
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|part| !part.is_empty())
        .map(|part| part.parse().ok())
        .collect();
    match numbers.as_slice() {
        &[Some(first), Some(last)] => Ok((first, last)),
        _ => Err(Mistake::new("view_range must be two line numbers, like [11, 12].".to_owned())),
    }
}

/// The observation of a performed call.
pub(super) fn observation(call: &Call, result: ToolResult, limits: ToolLimits) -> String {
    let name = match call {
        Call::Search { .. } => "search",
        Call::Bash { .. }
        | Call::Edit { .. }
        | Call::Editor { .. }
        | Call::Remote { .. }
        | Call::Submit => "file_editor",
    };
    match result {
        ToolResult::Command(result) => command_observation(&result, limits),
        ToolResult::Text(text) => {
            let text = truncate_middle(text, limits.observation_chars);
            format!("Execution output of [{name}]:\n{text}")
        }
        ToolResult::Submitted => String::new(),
    }
}

fn command_observation(result: &ExecResult, limits: ToolLimits) -> String {
    let code = match result.exit {
        Exit::Code(0) => 0,
        Exit::Code(code) => code,
        Exit::Signal(signal) => 128 + signal,
        Exit::Stopped => 137,
        Exit::NotStarted => 127,
        Exit::TimedOut => {
            let time = limits.command_timeout.as_secs();
            return bash_output("-1", &format!("The command took too long to execute (>{time}s)"));
        }
    };
    let text = result.text();
    let (out, errors) = text.split_once(STDERR_MARKER).unwrap_or((&text, ""));
    let streams = format!("[STDOUT]\n\n{} \n\n[STDERR]\n\n{}", out.trim(), errors.trim());
    let (code, output) = if code == 0 {
        ("0".to_owned(), without_colours(&streams))
    } else {
        (format!("Error: Exit code {code}"), format!("Error executing command:\n\n{streams}"))
    };
    bash_output(&code, &truncate_middle(without_middle_lines(output), limits.observation_chars))
}

fn bash_output(code: &str, output: &str) -> String {
    format!("Exit code: {code}\nExecution output of [execute_bash]:\n{output}")
}

/// Text without carriage returns and without escape sequences that set colours.
fn without_colours(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        clean.push_str(before);
        let end = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        if let Some(after) = end.strip_prefix('m') {
            rest = after;
        } else {
            clean.push_str("\u{1b}[");
            rest = after;
        }
    }
    clean.push_str(rest);
    clean.replace('\r', "")
}

/// Output without its middle lines, if it has many.
fn without_middle_lines(output: String) -> String {
    let lines: Vec<&str> = output.lines().collect();
    if lines.len() <= 2 * SHOWN_LINES {
        return output;
    }
    let head = lines.iter().take(SHOWN_LINES);
    let tail = lines.iter().skip(lines.len() - SHOWN_LINES);
    let rule = "-".repeat(50);
    let note = "<Observation truncated in middle for saving context>";
    let cut = [rule.as_str(), note, rule.as_str()];
    head.chain(&cut).chain(tail).copied().collect::<Vec<_>>().join("\n")
}

/// A message text with the number of turns that are left.
pub(super) fn with_turns_left(text: &str, turns_left: u32) -> String {
    format!("{text}\nSteps Remaining: {turns_left}")
}

#[cfg(test)]
mod tests {
    use super::super::tests::command_result;
    use super::*;
    use std::time::Duration;

    const LIMITS: ToolLimits =
        ToolLimits { command_timeout: Duration::from_secs(90), observation_chars: 1000 };

    fn call(body: &str) -> Result<Call, Mistake> {
        parse(&format!("why\n<function={body}</function> rest")).map(|(_, call)| call)
    }

    fn observed(exit: Exit, output: &str) -> String {
        let result = ToolResult::Command(command_result(exit, output));
        observation(&Call::Bash { command: "x".to_owned() }, result, LIMITS)
    }

    #[test]
    fn first_call_counts_and_its_values_are_trimmed() {
        let text = "<function = search >\n<parameter=search_term>\n a  b \n</parameter>\n\
                    <parameter = path>./x</parameter></function>\n<function=finish></function>";
        let expected = Call::Search { term: "a  b".to_owned(), path: "./x".to_owned() };
        assert_eq!(parse(text).unwrap().1, expected);
        assert_eq!(call("finish>").unwrap(), Call::Submit);
        let insert = "file_editor><parameter=command>insert</parameter><parameter=path>a.py\
                      </parameter><parameter=insert_line>3</parameter><parameter=new_str>\n    x\n\
                      </parameter>";
        let command = EditorCommand::Insert { line: 3, text: "x".to_owned() };
        assert_eq!(call(insert).unwrap(), Call::Editor { path: "a.py".to_owned(), command });
    }

    #[test]
    fn values_may_contain_the_tags_that_end_them() {
        let bash = |command: &str| format!("execute_bash>\n<parameter=cmd>{command}</parameter>\n");
        for command in [
            "grep '</parameter>' x",
            "a</parameter>",
            "a </parameter> b </parameter> c",
            "grep '<parameter=x>' y",
            "a </function> b",
        ] {
            let expected = Call::Bash { command: command.to_owned() };
            assert_eq!(call(&bash(command)), Ok(expected), "{command}");
        }
        // Where it is not certain which tag ends the call, nothing is performed.
        let quoted = "<function=search>\n<parameter=path>x</parameter>\n</function>";
        for text in [quoted, &format!("{quoted}{quoted}"), "a</parameter></function> b"] {
            let result = call(&bash(text));
            assert!(result.is_err(), "{text}: {result:?}");
        }
    }

    #[test]
    fn ranges_are_parsed_in_every_notation() {
        for text in ["[1, 20]", "1 20", "(1,20)", " [ 1 , 20 ] "] {
            assert_eq!(range(text), Ok((1, 20)), "{text}");
        }
        assert_eq!(range("[3, -1]"), Ok((3, -1)));
        for text in ["[1]", "a b", "1 2 3", ""] {
            assert!(range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mistakes_become_observations_with_the_reason() {
        let editor = |rest: &str| format!("file_editor><parameter=path>a</parameter>{rest}");
        let view = "<parameter=command>view</parameter>";
        let cases = [
            ("search>".to_owned(), "lacks the required parameter search_term"),
            ("rm>".to_owned(), "no function rm"),
            ("execute_bash><parameter=cmd> </parameter>".to_owned(), "cmd is empty"),
            ("execute_bash><parameter=cmd>git log</parameter>".to_owned(), "'git' is not allowed"),
            ("finish><parameter=command>stop</parameter>".to_owned(), "the only one is submit"),
            (editor(""), "parameter command"),
            (editor("<parameter=command>cut</parameter>"), "Unknown command cut"),
            (editor("<parameter=command>create</parameter>"), "parameter file_text"),
            (editor("<parameter=command>insert</parameter>"), "parameter insert_line"),
            (editor(&format!("{view}<parameter=view_range>x</parameter>")), "two line numbers"),
            (editor(&format!("{view}{view}")), "parameter command twice"),
            (editor("<parameter=line>3</parameter>"), "no parameter line"),
        ];
        for (body, part) in cases {
            let error = call(&body).unwrap_err().text;
            assert!(error.contains(part), "{body}: {error}");
        }
        assert!(parse("just words").unwrap_err().text.starts_with("No function call found"));
        assert!(parse("<function=>x</function>").unwrap_err().text.starts_with("No function call"));
        assert!(parse("<function=finish>").unwrap_err().text.contains("not closed"));
    }

    #[test]
    fn observations_are_formatted_as_by_r2e_gym() {
        let both = format!("\u{1b}[31ma\u{1b}[0m\r\n{STDERR_MARKER}oops\n");
        assert_eq!(
            observed(Exit::Code(0), &both),
            "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\n\na \n\n[STDERR]\n\noops"
        );
        assert_eq!(
            observed(Exit::Code(2), "x"),
            "Exit code: Error: Exit code 2\nExecution output of [execute_bash]:\nError executing \
             command:\n\n[STDOUT]\n\nx \n\n[STDERR]\n\n"
        );
        assert_eq!(
            observed(Exit::TimedOut, "x"),
            "Exit code: -1\nExecution output of [execute_bash]:\nThe command took too long to \
             execute (>90s)"
        );
        let many: Vec<String> = (0..100).map(|n| format!("{n}\n")).collect();
        let cut = observed(Exit::Code(0), &many.concat());
        assert!(cut.contains("\n37\n------") && cut.contains("------\n63\n"), "{cut}");
        assert!(observed(Exit::Code(0), &"x".repeat(9000)).chars().count() < 1200);
        let search = Call::Search { term: String::new(), path: String::new() };
        let found = observation(&search, ToolResult::Text("none".to_owned()), LIMITS);
        assert_eq!(found, "Execution output of [search]:\nnone");
        assert_eq!(without_colours("\u{1b}[1;3Kx\u{1b}["), "\u{1b}[1;3Kx\u{1b}[");
    }
}
