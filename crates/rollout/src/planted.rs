//! Replies whose structure is known by construction, with tags in every place, for tests and fuzzing.
//!
//! A reply is written as templates and models write it. It must be read as what it was made of, be
//! refused, or (in XML, where texts are not quoted) be read as calls that are written in the same way.

use crate::api::Action;
use crate::reply::{PartialReply, ReplyParts};
use crate::scaffold::{Call, Scaffold, WrittenTurn};
use crate::tool_format::ToolFormat;
use serde_json::{Map, Value, json};

/// Pieces of texts: tags of all formats, whole, in lines and in parts.
const PIECES: [&str; 36] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<function=run>",
    "<function=other>",
    "</function>",
    "<parameter=text>",
    "<parameter=count>",
    "<parameter=other>",
    "</parameter>",
    "\n<tool_call>\n",
    "\n</tool_call>\n",
    "\n<function=run>\n",
    "\n</function>\n",
    "\n<parameter=text>\n",
    "\n<parameter=other>\n",
    "\n</parameter>\n",
    "\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=run>\n<parameter=text>\n",
    "{\"name\": \"run\", \"arguments\": {}}",
    "```bash\n",
    "\n```\n",
    "```python\n",
    "\"",
    "\\",
    "<",
    "</",
    "\n",
    "\n\n",
    " ",
    "null",
    "12",
    "é\u{2028}",
    "\0",
    "word",
];

/// How a reply was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reading {
    /// As what it was made of.
    Exact,
    /// As other calls, which are written in the same way.
    Same,
    /// Not at all: nothing is performed.
    Refused,
}

/// Draws a number below its argument.
pub type Draw<'a> = &'a mut dyn FnMut(usize) -> usize;

fn text(draw: Draw<'_>, most: usize) -> String {
    (0..draw(most + 1)).filter_map(|_| PIECES.get(draw(PIECES.len()))).copied().collect()
}

fn tools() -> Vec<Value> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "label": {"anyOf": [{"$ref": "#/$defs/Label"}, {"type": "null"}]},
            "count": {"type": ["integer", "null"]},
            "list": {"type": "array"},
        },
        "$defs": {"Label": {"type": "string"}},
    });
    ["run", "stop"]
        .map(|name| json!({"function": {"name": name, "parameters": parameters}}))
        .to_vec()
}

fn call(draw: Draw<'_>) -> Action {
    let mut arguments = Map::new();
    for key in ["text", "label", "count", "list"] {
        let value = match (key, draw(3)) {
            (_, 0) => continue,
            ("count", 1) => Value::Null,
            ("count", _) => draw(1000).into(),
            ("list", _) => json!([text(draw, 2), null, {"k": draw(9)}]),
            // The schema reads the word as the absence of a label.
            ("label", _) => match text(draw, 4) {
                text if text == "null" => Value::Null,
                text => text.into(),
            },
            (_, _) => text(draw, 8).into(),
        };
        arguments.insert(key.to_owned(), value);
    }
    let name = if draw(4) == 0 { "stop" } else { "run" };
    Action { name: name.to_owned(), arguments: arguments.into() }
}

/// Calls as the templates of the formats write them.
fn written(format: ToolFormat, calls: &[Action]) -> String {
    let one = |call: &Action| match format {
        ToolFormat::Json => {
            format!("{{\"name\": \"{}\", \"arguments\": {}}}", call.name, call.arguments)
        }
        ToolFormat::Xml => {
            let parameters = call.arguments.as_object().into_iter().flatten();
            let parameters = parameters.map(|(key, value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("<parameter={key}>\n{text}\n</parameter>\n")
            });
            format!("<function={}>\n{}</function>", call.name, parameters.collect::<String>())
        }
    };
    let calls = calls.iter().map(|call| format!("<tool_call>\n{}\n</tool_call>", one(call)));
    calls.collect::<Vec<_>>().join("\n")
}

/// The text without white space between calls, which each template writes in another way.
fn like_templates(text: &str) -> String {
    text.split("</tool_call>").map(str::trim_start).collect::<Vec<_>>().join("</tool_call>")
}

/// Writes a reply of an agent's model, and reads it, whole and in pieces.
///
/// # Panics
/// If it is read as anything but what it was made of.
pub fn check_reply(draw: Draw<'_>) -> Reading {
    let tools = tools();
    let format = if draw(2) == 0 { ToolFormat::Json } else { ToolFormat::Xml };
    let opened = draw(3) == 0;
    let thinking = (opened || draw(2) == 0).then(|| text(draw, 6).replace("</think>", ""));
    let is_closed = thinking.is_none() || draw(6) > 0;
    // Text with the beginning of a call is a call.
    let content =
        Some(text(draw, 4)).filter(|text| format.start(text, 0).is_none()).unwrap_or_default();
    let calls: Vec<Action> = (0..draw(4)).map(|_| call(draw)).collect();
    let body = match calls.as_slice() {
        [] => content.clone(),
        calls => format!("{content}\n{}", written(format, calls)),
    };
    let is_thinking = body.trim_start().starts_with("<think>");
    let reply = match (&thinking, is_closed) {
        (None, _) if is_thinking => format!("x{body}"),
        (None, _) => body.clone(),
        (Some(thinking), false) => {
            format!("{}{thinking}{}", opening(opened), body.replace("</think>", ""))
        }
        (Some(thinking), true) => format!("{}{thinking}</think>\n\n{body}", opening(opened)),
    };
    let parts = ReplyParts::parse(format, &tools, opened, &reply);
    check_pieces(format, opened, &reply, &parts, draw);
    if !is_closed {
        assert!(
            parts.calls.is_empty() && parts.content.is_empty(),
            "open thinking: {reply:?} {parts:?}"
        );
        return Reading::Exact;
    }
    let begins = thinking.as_deref().unwrap_or_default().trim();
    // A prompt that opened the thinking may be followed by another tag.
    let begins =
        if opened { begins.strip_prefix("<think>").unwrap_or(begins).trim() } else { begins };
    assert_eq!(parts.reasoning.as_deref().unwrap_or_default(), begins, "{reply:?}");
    if parts.unread.is_some() {
        assert!(format == ToolFormat::Xml && !calls.is_empty(), "refused: {reply:?} {parts:?}");
        assert!(parts.calls.is_empty());
        return Reading::Refused;
    }
    let kept = if calls.is_empty() { content.as_str() } else { content.trim_end() };
    let kept = if thinking.is_some() { kept.trim_start_matches('\n') } else { kept };
    let found = parts.content.strip_prefix('x').filter(|_| is_thinking).unwrap_or(&parts.content);
    assert_eq!(found, kept, "{reply:?}");
    if parts.calls == calls {
        return Reading::Exact;
    }
    let same =
        like_templates(&written(format, &parts.calls)) == like_templates(&written(format, &calls));
    assert!(same && format == ToolFormat::Xml, "{reply:?} was read as {:?}", parts.calls);
    Reading::Same
}

fn opening(opened: bool) -> &'static str {
    if opened { "" } else { "<think>" }
}

/// Text that is released early is the beginning of the whole reply.
fn check_pieces(format: ToolFormat, opened: bool, reply: &str, parts: &ReplyParts, draw: Draw<'_>) {
    let mut partial = PartialReply::new(opened, format);
    let mut rest = reply;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.ceil_char_boundary(1 + draw(24)));
        partial.push(piece);
        let reasoning = parts.reasoning.as_deref().unwrap_or_default();
        assert!(reasoning.starts_with(partial.reasoning()), "{reply:?} {partial:?}");
        assert!(parts.content.starts_with(partial.content()), "{reply:?} {partial:?}");
        rest = after;
    }
}

/// Writes a turn of a built-in scaffold with one call, and reads it.
///
/// # Panics
/// If another command is performed.
pub fn check_turn(draw: Draw<'_>) -> Reading {
    let command = format!("x{}", text(draw, 8));
    let command = command.trim();
    let calls = [Call::Bash { command: command.to_owned() }.action()];
    let (scaffold, format, call) = match draw(4) {
        0 => (Scaffold::Tools, ToolFormat::Json, written(ToolFormat::Json, &calls)),
        1 => (Scaffold::Tools, ToolFormat::Xml, written(ToolFormat::Xml, &calls)),
        2 => {
            let call = format!(
                "<function=execute_bash>\n<parameter=cmd>{command}</parameter>\n</function>"
            );
            (Scaffold::R2eXml, ToolFormat::Json, call)
        }
        _ => {
            let fence = if draw(2) == 0 { "```bash" } else { "```mswea_bash_command" };
            (Scaffold::Mini, ToolFormat::Json, format!("{fence}\n{command}\n```"))
        }
    };
    let thinking = if draw(2) == 0 { "<think>hm</think>\n" } else { "I look.\n" };
    let reply = format!("{thinking}{call}");
    let found = scaffold.parse(WrittenTurn::new(format, &reply), &[]);
    match found.as_slice() {
        [Err(mistake)] => {
            assert!(mistake.is_unread, "{reply:?}: {mistake}");
            assert!(
                format == ToolFormat::Xml || scaffold != Scaffold::Tools,
                "{reply:?}: {mistake}"
            );
            Reading::Refused
        }
        [Ok((_, Call::Bash { command: found }))] if found == command => Reading::Exact,
        // A text that ends the call and begins another one: as in R2E-Gym, the first call is performed.
        [Ok((_, Call::Bash { command: found }))] if scaffold == Scaffold::R2eXml => {
            let rest = command
                .strip_prefix(found.as_str())
                .and_then(|rest| rest.split_once("</function>"));
            let is_next = rest.is_some_and(|(_, next)| next.contains("<function"));
            assert!(is_next, "{reply:?} was read as {found:?}");
            Reading::Same
        }
        others => {
            let actions: Vec<Action> =
                others.iter().flatten().map(|(action, _)| action.clone()).collect();
            let same = scaffold == Scaffold::Tools
                && actions.len() == others.len()
                && like_templates(&written(format, &actions)) == like_templates(&call);
            assert!(same, "{reply:?} was read as {others:?}");
            Reading::Same
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
    use std::collections::BTreeMap;

    /// Replies that are drawn by default; `ORCHESTRATE_REPLIES` sets another number.
    const REPLIES: u64 = 20_000;

    #[test]
    fn planted_tags_split_no_reply_in_another_way() {
        let number = std::env::var("ORCHESTRATE_REPLIES").ok().and_then(|text| text.parse().ok());
        let mut counts: BTreeMap<(&str, Reading), u64> = BTreeMap::new();
        for seed in 0..number.unwrap_or(REPLIES) {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut draw =
                |below: usize| usize::try_from(random.next_u64() % below.max(1) as u64).unwrap();
            *counts.entry(("agents", check_reply(&mut draw))).or_default() += 1;
            *counts.entry(("scaffolds", check_turn(&mut draw))).or_default() += 1;
        }
        for of in ["agents", "scaffolds"] {
            assert!(counts.contains_key(&(of, Reading::Refused)), "nothing ambiguous: {counts:?}");
            assert!(counts[&(of, Reading::Exact)] > counts[&(of, Reading::Refused)], "{counts:?}");
        }
    }
}
