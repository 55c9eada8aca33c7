//! Calls in XML: `<function=NAME>` with a `<parameter=KEY>` for each argument.
//!
//! Values are written as they are, so a value may contain the tags that end it. Two readings are tried.
//! [`exact`] knows the form in which templates write calls, to the line break. It ends a value at the
//! first tag after which the rest of the reply is a sequence of calls again; so a call that is quoted in a
//! value belongs to the value. [`lenient`] allows other white space, text between calls and a missing
//! `<tool_call>`, but no tag inside a value.
//!
//! A reply whose values may have ended elsewhere is refused as a whole ([`Unread`]).

use super::schema::{Parameter, Parameters};
use super::{CLOSE, OPEN, Unread};
use crate::api::Action;
use serde_json::{Map, Value};

pub(super) const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";

/// The beginnings of all tags.
const TAGS: [&str; 6] = [OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER];

/// The end of a value in the form of templates, after the line break that belongs to it.
const VALUE_END: &str = "</parameter>\n";
/// The end of a call in the form of templates.
const CALL_END: &str = "</function>\n</tool_call>";

/// A call whose values are not typed yet.
#[derive(Debug, PartialEq)]
struct RawCall<'a> {
    name: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
}

/// Calls, with the texts between and after them.
struct Split<'a> {
    calls: Vec<RawCall<'a>>,
    texts: Vec<&'a str>,
}

/// Where the next call begins, if there is one: at `<tool_call>`, or at a `<function=` that begins its
/// line.
pub(super) fn start(text: &str, from: usize) -> Option<usize> {
    let rest = text.get(from..)?;
    let bare = rest.match_indices(FUNCTION).map(|(at, _)| from + at);
    let bare = bare.into_iter().find(|at| {
        let before = text.get(..*at).unwrap_or_default();
        before.trim_end_matches([' ', '\t']).is_empty()
            || before.trim_end_matches([' ', '\t']).ends_with('\n')
    });
    rest.find(OPEN).map(|at| from + at).into_iter().chain(bare).min()
}

/// Reads calls, the first of which begins where `text` does. Returns the texts between and after them,
/// too.
pub(super) fn read<'a>(
    text: &'a str,
    tools: &[Value],
) -> Result<(Vec<Action>, Vec<&'a str>), Unread> {
    let (split, may_quote) = match exact(text) {
        Some(calls) => (Split { calls, texts: Vec::new() }, true),
        None => (lenient(text, tools)?, false),
    };
    let mut actions = Vec::new();
    let mut after_value = false;
    for call in &split.calls {
        let declared = Parameters::of(tools, call.name);
        if after_value && declared.is_none() && !tools.is_empty() {
            let problem = "is called after another call, but there is no such tool, so it may be a part of that call";
            return Err(Unread::Invalid(format!("{} {problem}", call.name)));
        }
        actions.push(typed(call, declared, (tools, may_quote))?);
        after_value |= !call.parameters.is_empty();
    }
    Ok((actions, split.texts))
}

/// A call with values of the declared types. `may_quote` says whether its values may contain tags.
fn typed(
    call: &RawCall<'_>,
    declared: Option<Parameters<'_>>,
    (tools, may_quote): (&[Value], bool),
) -> Result<Action, Unread> {
    let schema = declared.unwrap_or(Parameters::ANY);
    let mut arguments = Map::new();
    for (key, text) in &call.parameters {
        let types = match schema.parameter(key) {
            Parameter::Declared(types) => types,
            Parameter::Undeclared if !arguments.is_empty() => {
                let problem = "is not declared, so it may be a part of the value before it";
                return Err(Unread::Invalid(format!("the parameter {key} {problem}")));
            }
            Parameter::Free | Parameter::Undeclared => Vec::new(),
        };
        if may_quote && has_part_of_call(text, schema, tools) {
            let problem = "contains a part of a call, so it may have ended there";
            return Err(Unread::Invalid(format!("the value of {key} {problem}")));
        }
        if arguments.insert((*key).to_owned(), schema.value(text, &types)).is_some() {
            return Err(Unread::Invalid(format!("the parameter {key} occurs twice")));
        }
    }
    Ok(Action { name: call.name.to_owned(), arguments: Value::Object(arguments) })
}

/// Whether a known call or a declared parameter begins in a value, or a call ends there, on lines of
/// their own, and the tags in the value do not pair: then it is more likely that the policy left out a
/// tag, or wrote one too many, than that the value quotes calls.
fn has_part_of_call(value: &str, schema: Parameters<'_>, tools: &[Value]) -> bool {
    let (mut open, mut has_stray, mut has_part) = (Vec::new(), false, false);
    let mut before = "";
    for line in value.split('\n') {
        let closed = match line {
            CLOSE => Some(OPEN),
            END_FUNCTION => Some(FUNCTION),
            END_PARAMETER => Some(PARAMETER),
            _ => None,
        };
        if let Some((name, "")) = tag(line, FUNCTION) {
            open.push(FUNCTION);
            has_part |= tools.is_empty() || Parameters::of(tools, name).is_some();
        } else if let Some((key, "")) = tag(line, PARAMETER) {
            open.push(PARAMETER);
            has_part |= schema.parameter(key) != Parameter::Undeclared;
        } else if line == OPEN {
            open.push(OPEN);
        } else if closed.is_some() && open.last().copied() == closed {
            open.pop();
        } else if closed.is_some() {
            has_stray = true;
            has_part |= line == END_FUNCTION && before == END_PARAMETER;
        }
        before = line;
    }
    has_part && (has_stray || !open.is_empty())
}

/// The name in a tag at the beginning of `text`, and what follows it.
fn tag<'a>(text: &'a str, open: &str) -> Option<(&'a str, &'a str)> {
    let (name, rest) = text.strip_prefix(open)?.split_once('>')?;
    (!name.is_empty() && !name.contains(['<', '\n'])).then_some((name, rest))
}

/// Like [`tag`], where a line break must follow.
fn tag_line<'a>(text: &'a str, open: &str) -> Option<(&'a str, &'a str)> {
    let (name, rest) = tag(text, open)?;
    Some((name, rest.strip_prefix('\n')?))
}

/// The name of a function at the beginning of a call in the form of templates.
fn call_line(text: &str) -> Option<(&str, &str)> {
    tag_line(text.strip_prefix(OPEN)?.strip_prefix('\n')?, FUNCTION)
}

/// Reads calls exactly in the form of templates. `None` if the whole text cannot be read so.
fn exact(text: &str) -> Option<Vec<RawCall<'_>>> {
    call_line(text)?;
    // Positions of the tags at which a value can end, such that the rest of the text can be read; from
    // the last to the first.
    let mut ends: Vec<usize> = Vec::new();
    for (at, _) in text.rmatch_indices(VALUE_END) {
        let Some((value, rest)) = text.split_at_checked(at) else { continue };
        let rest = rest.strip_prefix(VALUE_END).unwrap_or_default();
        if value.ends_with('\n') && first_end(text, rest, &ends).is_some() {
            ends.push(at);
        }
    }
    let (mut calls, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let (name, mut inside) = call_line(rest)?;
        let mut parameters = Vec::new();
        while let Some((key, after)) = tag_line(inside, PARAMETER) {
            let end = next_end(text, after, &ends)?;
            let value = text.get(text.len() - after.len()..end)?.strip_suffix('\n')?;
            parameters.push((key, value));
            inside = text.get(end + VALUE_END.len()..)?;
        }
        calls.push(RawCall { name, parameters });
        rest = inside.strip_prefix(CALL_END)?.trim_start();
    }
    Some(calls)
}

/// The first position in `ends` after a line break in `value`, which is the end of `text`.
fn next_end(text: &str, value: &str, ends: &[usize]) -> Option<usize> {
    let start = text.len() - value.len();
    let after = ends.partition_point(|end| *end > start);
    after.checked_sub(1).and_then(|last| ends.get(last)).copied()
}

/// Whether `rest`, which is the end of `text` after a value, can be read: `Some` with the end of the value
/// that is next, or with the end of the text.
fn first_end(text: &str, mut rest: &str, ends: &[usize]) -> Option<usize> {
    loop {
        if let Some((_, value)) = tag_line(rest, PARAMETER) {
            return next_end(text, value, ends);
        }
        rest = rest.strip_prefix(CALL_END)?.trim_start();
        if rest.is_empty() {
            return Some(text.len());
        }
        rest = call_line(rest)?.1;
    }
}

/// Reads calls with any white space, with text between them, and without `<tool_call>`; their values have
/// no tags.
fn lenient<'a>(text: &'a str, tools: &[Value]) -> Result<Split<'a>, Unread> {
    let mut split = Split { calls: Vec::new(), texts: Vec::new() };
    let mut rest = text;
    loop {
        let (call, after) = lenient_call(rest, tools)?;
        split.calls.push(call);
        let end = start(after, 0);
        let (between, next) = after.split_at(end.unwrap_or(after.len()));
        if TAGS.iter().any(|tag| between.contains(tag)) {
            return Err(Unread::Invalid("a tag of the call format follows a call".to_owned()));
        }
        split.texts.push(between);
        if end.is_none() {
            return Ok(split);
        }
        rest = next;
    }
}

fn lenient_call<'a>(text: &'a str, tools: &[Value]) -> Result<(RawCall<'a>, &'a str), Unread> {
    let inside = text.strip_prefix(OPEN);
    let is_open = match inside {
        Some(inside) => !inside.contains(CLOSE),
        None => !text.contains(END_FUNCTION),
    };
    let invalid = |problem: &str| {
        if is_open { Unread::Unclosed } else { Unread::Invalid(problem.to_owned()) }
    };
    let function = inside.unwrap_or(text).trim_start();
    if !function.starts_with(FUNCTION) {
        return Err(invalid("it does not begin with <function=NAME>"));
    }
    let (name, body) =
        tag(function, FUNCTION).ok_or_else(|| invalid("<function=NAME> is not closed"))?;
    if inside.is_none() && !tools.is_empty() && Parameters::of(tools, name).is_none() {
        return Err(invalid("it begins without <tool_call>, and there is no such tool"));
    }
    let (mut parameters, mut rest) = (Vec::new(), body.trim_start());
    let rest = loop {
        if let Some(rest) = rest.strip_prefix(END_FUNCTION) {
            break rest;
        }
        if rest.is_empty() || rest.starts_with(CLOSE) {
            return Err(invalid("it does not end with </function>"));
        }
        if !rest.starts_with(PARAMETER) {
            return Err(invalid("text outside a <parameter=KEY>"));
        }
        let (key, after) =
            tag(rest, PARAMETER).ok_or_else(|| invalid("<parameter=KEY> is not closed"))?;
        let (value, after) = after
            .split_once(END_PARAMETER)
            .ok_or_else(|| invalid("a parameter has no </parameter>"))?;
        if TAGS.iter().any(|tag| value.contains(tag)) {
            return Err(invalid(&format!("the value of {key} contains a tag of the call format")));
        }
        let value = value.strip_prefix('\n').unwrap_or(value);
        parameters.push((key, value.strip_suffix('\n').unwrap_or(value)));
        rest = after.trim_start();
    };
    let closed = rest.trim_start().strip_prefix(CLOSE);
    let rest = match (inside, closed) {
        (_, Some(rest)) => rest,
        (None, None) => rest,
        (Some(_), None) => return Err(invalid("</tool_call> does not follow </function>")),
    };
    Ok((RawCall { name, parameters }, rest))
}
