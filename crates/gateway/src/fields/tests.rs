use super::tables::{CHAT, MESSAGES, RESPONSES, TOKENS};
use super::*;
use crate::chat::Chat;
use crate::messages::Messages;
use crate::responses::Responses;
use crate::sampler::ToolChoice;
use crate::wire::{Purpose, Wire};
use serde_json::json;

/// A request with every field of Chat Completions that is honoured.
fn chat() -> Value {
    json!({
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "refusal": "no", "content": [{"type": "refusal", "refusal": "b"}]},
            {"role": "assistant", "content": "c", "reasoning_content": "d"},
            {"role": "assistant", "content": "", "refusal": "i"},
            {"role": "assistant", "content": null, "reasoning": "e", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{\"f\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "g"}],
        "tools": [
            {"type": "function", "function": {
                "name": "ls", "description": "h", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "cat"}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "ls"}}]}},
        "max_completion_tokens": 7, "max_tokens": 9, "stop": ["END"], "n": 2, "stream": true,
        "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 5,
        "temperature": 1, "top_p": 1,
    })
}

fn responses() -> Value {
    json!({
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "c"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": crate::opaque::encoded(7, "d")},
            {"type": "function_call", "call_id": "c1", "namespace": "n", "name": "ls", "arguments": "{\"f\": 1}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "e"},
            {"type": "function_call_output", "call_id": "c1", "output": "g"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "h"}],
        "tools": [
            {"type": "function", "name": "ls", "description": "i", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "j"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "ls"}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "ls"}, {"type": "custom", "name": "patch"},
            {"type": "function", "namespace": "n", "name": "ls"}]},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 7, "stream": true, "include": ["reasoning.encrypted_content"],
        "metadata": {"k": "v"}, "previous_response_id": "resp_1", "store": true, "temperature": 1, "top_p": 1,
    })
}

fn messages() -> Value {
    json!({
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "b", "signature": crate::opaque::signature(7)},
                {"type": "tool_use", "id": "c1", "name": "ls", "input": {"f": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "text", "text": "d"}, {"type": "tool_reference", "tool_name": "e"}]}]}],
        "tools": [
            {"type": "custom", "name": "ls", "description": "f", "input_schema": {"type": "object"}},
            {"name": "later", "input_schema": {}, "defer_loading": true}],
        "tool_choice": {"type": "any"},
        "max_tokens": 7, "stop_sequences": ["END"], "stream": true,
        "thinking": {"type": "disabled"}, "temperature": 1, "top_p": 1,
    })
}

fn tokens() -> Value {
    let parameters = json!({"max_tokens": 7, "routed_experts_prompt_start": 3, "n": 1,
        "temperature": 1, "top_p": 1});
    json!({"token_ids": [1, 2], "sampling_params": parameters, "stream": false})
}

/// What a request means, without what was overridden.
fn meaning<W: Wire + std::fmt::Debug>(body: &Value) -> String {
    match W::parse(body.to_string().as_bytes(), Purpose::Sample) {
        Ok((mut request, form)) => {
            request.overridden = Overridden::default();
            format!("{request:?} {form:?}")
        }
        Err(problem) => problem.message,
    }
}

fn meaning_of_tokens(body: &Value) -> String {
    match crate::tokens::parse(body.to_string().as_bytes()) {
        Ok(request) => format!("{request:?}"),
        Err(problem) => problem.message,
    }
}

/// The bodies with another value, or none, at one place of this path.
fn changed(body: &Value, path: &str) -> Vec<Value> {
    let name = path.split('.').next().unwrap();
    let rest = path.strip_prefix(name).unwrap().strip_prefix('.');
    let (field, items) = match name.strip_suffix("[]") {
        Some(field) => (field, true),
        None => (name, false),
    };
    let Some(inside) = body.get(field) else { return Vec::new() };
    let with = |value: Value| {
        let mut body = body.clone();
        body[field] = value;
        body
    };
    if items {
        let Some(list) = inside.as_array() else { return Vec::new() };
        let each = list.iter().enumerate().flat_map(|(index, item)| {
            let changed = match rest {
                Some(rest) => changed(item, rest),
                None => other(item),
            };
            changed.into_iter().map(move |item| (index, item))
        });
        return each
            .map(|(index, item)| {
                let mut list = list.clone();
                list[index] = item;
                with(Value::from(list))
            })
            .collect();
    }
    if let Some(rest) = rest {
        return changed(inside, rest).into_iter().map(with).collect();
    }
    let mut without = body.clone();
    without.as_object_mut().unwrap().remove(field);
    let mut all: Vec<Value> = other(inside).into_iter().map(with).collect();
    all.push(without);
    all
}

/// Other values of the same type.
fn other(value: &Value) -> Vec<Value> {
    vec![match value {
        Value::String(text) => json!(format!("{text}zzz")),
        Value::Number(number) => json!(number.as_u64().unwrap() + 1),
        Value::Bool(value) => json!(!value),
        Value::Array(_) => json!([]),
        Value::Object(_) => json!({}),
        Value::Null => json!("zzz"),
    }]
}

/// A body that has nothing but this field.
fn alone(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |value, name| {
        let field = name.trim_end_matches("[]");
        let value = if name.ends_with("[]") { json!([value]) } else { value };
        json!({ field: value })
    })
}

fn treated(table: &Table, path: &str, value: Value) -> Result<Vec<String>, Option<String>> {
    let found = check(alone(path, value).to_string().as_bytes(), table);
    let field = |problem: Problem| problem.field.map(|field| field.replace("[0]", "[]"));
    found.map(|found| found.paths().map(str::to_owned).collect()).map_err(field)
}

/// Honoured fields that the request of the test cannot have together with the others.
fn others() -> Vec<(&'static str, Value)> {
    let user = json!([{"role": "user", "content": "a"}]);
    vec![
        ("enable_thinking", json!({"messages": user, "enable_thinking": true})),
        ("thinking.type", json!({"messages": user, "thinking": {"type": "disabled"}})),
        (
            "chat_template_kwargs.enable_thinking",
            json!({"messages": user, "chat_template_kwargs": {"enable_thinking": true}}),
        ),
        (
            "chat_template_kwargs.thinking",
            json!({"messages": user, "chat_template_kwargs": {"thinking": true}}),
        ),
        ("max_tokens", json!({"messages": user, "max_tokens": 9})),
        ("logprobs", json!({"messages": user, "logprobs": true})),
        ("reasoning_effort", json!({"messages": user, "reasoning_effort": "none"})),
    ]
}

#[test]
fn every_field_of_every_table_is_treated_as_the_table_says() {
    for table in [CHAT, RESPONSES, MESSAGES, TOKENS] {
        for Field(path, treatment) in table.fields {
            let at = format!("{}: {path}", table.name);
            let alone = |value: Value| treated(&table, path, value);
            let (listed, refused) = (Ok(vec![(*path).to_owned()]), Err(Some((*path).to_owned())));
            let unlisted = Ok(Vec::new());
            match treatment {
                Treatment::Honoured | Treatment::HonouredAs(_) => {
                    assert_eq!(alone(json!("zzz")), unlisted, "{at}");
                }
                Treatment::Overridden(_) => assert_eq!(alone(json!("zzz")), listed, "{at}"),
                Treatment::InEvaluations(_) => {
                    assert_eq!(alone(json!(0.5)), listed, "{at}");
                    let body = super::tests::alone(path, json!(0.5)).to_string();
                    let mut found = check(body.as_bytes(), &table).unwrap();
                    found.honour_sampling();
                    assert_eq!(found, Overridden::default(), "{at}");
                }
                Treatment::Refused(_) => assert_eq!(alone(json!("zzz")), refused, "{at}"),
                Treatment::TextFormat(_) => {
                    assert_eq!(alone(json!("zzz")), refused, "{at}");
                    assert_eq!(alone(json!({"type": "json_object"})), refused, "{at}");
                    assert_eq!(alone(json!({"type": "text"})), unlisted, "{at}");
                }
                Treatment::Types(own, others, _) | Treatment::Words(own, others, _) => {
                    assert_eq!(alone(json!("zzz")), refused, "{at}");
                    assert_eq!(alone(json!(true)), refused, "{at}");
                    for word in *own {
                        assert_eq!(alone(json!(word)), unlisted, "{at}");
                        assert_eq!(alone(json!(word.to_uppercase())), refused, "{at}");
                    }
                    for word in *others {
                        let ending = |ending| json!(word.replace('…', ending));
                        assert_eq!(alone(ending("20260101")), listed, "{at}");
                        if word.ends_with('…') {
                            assert_eq!(alone(ending("")), refused, "{at}");
                            assert_eq!(alone(ending("latest")), refused, "{at}");
                        }
                    }
                }
                Treatment::Partly(values, _) | Treatment::Only(values, _) => {
                    let other =
                        if matches!(treatment, Treatment::Only(..)) { refused } else { listed };
                    assert_eq!(alone(json!("zzz")), other, "{at}");
                    for value in *values {
                        let value = serde_json::from_str(value).unwrap_or(json!(value));
                        assert_eq!(alone(value), unlisted, "{at}");
                    }
                }
            }
            assert_eq!(alone(Value::Null), unlisted, "{at}: null is unset");
        }
        let field = "a_field_of_tomorrow";
        assert_eq!(treated(&table, field, json!(1)), Ok(vec![field.to_owned()]));
        for value in [json!(false), json!(0)] {
            assert_eq!(treated(&table, field, value), Ok(vec![field.to_owned()]));
        }
        assert_eq!(treated(&table, field, json!([])), Ok(Vec::new()));
    }
}

#[test]
fn every_honoured_field_changes_what_a_request_means() {
    type Meaning = fn(&Value) -> String;
    let dialects: [(Table, Value, Meaning); 4] = [
        (CHAT, chat(), meaning::<Chat>),
        (RESPONSES, responses(), meaning::<Responses>),
        (MESSAGES, messages(), meaning::<Messages>),
        (TOKENS, tokens(), meaning_of_tokens),
    ];
    for (table, body, meaning) in dialects {
        let whole = meaning(&body);
        assert!(whole.contains("Request {"), "{}: {whole}", table.name);
        for Field(path, treatment) in table.fields {
            let is_honoured = matches!(
                treatment,
                Treatment::Honoured
                    | Treatment::HonouredAs(_)
                    | Treatment::InEvaluations(_)
                    | Treatment::Types(..)
                    | Treatment::Words(..)
            );
            if !is_honoured {
                continue;
            }
            let matters = |body: &Value| {
                let whole = meaning(body);
                changed(body, path).iter().any(|changed| meaning(changed) != whole)
            };
            let elsewhere = || {
                let others = others().into_iter().filter(|(other, _)| other == path);
                others.filter(|_| table.name == CHAT.name).any(|(_, body)| matters(&body))
            };
            assert!(matters(&body) || elsewhere(), "{}: {path} changes nothing", table.name);
        }
    }
}

/// What comes of a choice.
#[derive(Debug, PartialEq)]
enum Chosen {
    /// It, the tools that are shown, and the overridden fields.
    Taken(ToolChoice, String, String),
    /// The field that is refused.
    Refused(String),
}

fn chosen<W: Wire>(mut body: Value, choice: Value) -> Chosen {
    body["tool_choice"] = choice;
    let parsed = W::parse(body.to_string().as_bytes(), Purpose::Sample);
    let request = match parsed {
        Ok((request, _)) => request,
        Err(problem) => return Chosen::Refused(problem.field.unwrap_or_default()),
    };
    let names: Vec<&str> = request.tools.iter().map(|tool| tool.name.as_str()).collect();
    let header = request.overridden.header().unwrap_or_default();
    Chosen::Taken(request.tool_choice, names.join(" "), header)
}

fn took(choice: ToolChoice, shown: &str, listed: &str) -> Chosen {
    Chosen::Taken(choice, shown.to_owned(), listed.to_owned())
}

fn refused(field: &str) -> Chosen {
    Chosen::Refused(field.to_owned())
}

#[test]
fn every_form_of_tool_choice_of_chat_is_treated_as_its_table_says() {
    use ToolChoice::{Auto, Named, None, Required};
    let user = json!([{"role": "user", "content": "a"}]);
    let chat = json!({"messages": user, "tools": [
        {"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]});
    let allowed = |mode: &str, names: &[&str]| {
        let tools =
            names.iter().map(|name| json!({"type": "function", "function": {"name": name}}));
        let tools: Vec<Value> = tools.collect();
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    };
    for (choice, expected) in [
        (Value::Null, took(Auto, "f g", "")),
        (json!("auto"), took(Auto, "f g", "")),
        (json!("none"), took(None, "f g", "")),
        (json!("required"), took(Required, "f g", "tool_choice")),
        (json!("any"), refused("tool_choice")),
        (json!(["auto"]), refused("tool_choice")),
        (
            json!({"type": "function", "function": {"name": "f"}}),
            took(Named("f".to_owned()), "f g", "tool_choice.function.name, tool_choice.type"),
        ),
        (json!({"type": "function", "function": {"name": "h"}}), refused("tool_choice")),
        (json!({"function": {"name": "f"}}), refused("tool_choice")),
        (json!({"type": "custom", "custom": {"name": "f"}}), refused("tool_choice.type")),
        (allowed("auto", &["g"]), took(Auto, "g", "")),
        (allowed("required", &["g", "f"]), took(Required, "f g", "tool_choice.allowed_tools.mode")),
        (allowed("auto", &["g", "h"]), refused("tool_choice")),
        (allowed("auto", &[]), refused("tool_choice")),
        (allowed("none", &["g"]), refused("tool_choice.allowed_tools.mode")),
        (json!({"type": "allowed_tools", "mode": "auto", "tools": []}), refused("tool_choice")),
    ] {
        assert_eq!(chosen::<Chat>(chat.clone(), choice.clone()), expected, "Chat: {choice}");
    }
}

#[test]
fn every_form_of_tool_choice_of_responses_is_treated_as_its_table_says() {
    use ToolChoice::{Auto, Named, None, Required};
    let responses = json!({"input": "a", "tools": [
        {"type": "function", "name": "f"}, {"type": "custom", "name": "g"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]});
    let allowed =
        |mode: &str, tools: Value| json!({"type": "allowed_tools", "mode": mode, "tools": tools});
    for (choice, expected) in [
        (Value::Null, took(Auto, "f g n__f", "")),
        (json!("auto"), took(Auto, "f g n__f", "")),
        (json!("none"), took(None, "f g n__f", "")),
        (json!("required"), took(Required, "f g n__f", "tool_choice")),
        (json!("any"), refused("tool_choice")),
        (
            json!({"type": "function", "name": "f"}),
            took(Named("f".to_owned()), "f g n__f", "tool_choice.name, tool_choice.type"),
        ),
        (
            json!({"type": "custom", "name": "g"}),
            took(Named("g".to_owned()), "f g n__f", "tool_choice.name, tool_choice.type"),
        ),
        (json!({"type": "function", "name": "h"}), refused("tool_choice")),
        (json!({"type": "web_search_preview"}), refused("tool_choice.type")),
        (json!({"type": "mcp", "server_label": "f"}), refused("tool_choice.type")),
        (json!({"type": "shell"}), refused("tool_choice.type")),
        (
            allowed(
                "auto",
                json!([
                {"type": "function", "namespace": "n", "name": "f"}, {"type": "custom", "name": "g"}]),
            ),
            took(Auto, "g n__f", ""),
        ),
        (
            allowed(
                "required",
                json!([{"type": "function", "name": "f"}, {"type": "image_generation"}]),
            ),
            took(Required, "f", "tool_choice.mode, tool_choice.tools[].type"),
        ),
        (allowed("auto", json!([{"type": "image_generation"}])), refused("tool_choice")),
        (allowed("auto", json!([{"type": "function", "name": "h"}])), refused("tool_choice")),
        (allowed("auto", json!([{"type": "shell"}])), refused("tool_choice.tools[0].type")),
        (allowed("none", json!([])), refused("tool_choice.mode")),
    ] {
        let found = chosen::<Responses>(responses.clone(), choice.clone());
        assert_eq!(found, expected, "Responses: {choice}");
    }
}

#[test]
fn every_form_of_tool_choice_of_messages_is_treated_as_its_table_says() {
    use ToolChoice::{Auto, Named, None, Required};
    let user = json!([{"role": "user", "content": "a"}]);
    let messages = json!({"messages": user, "max_tokens": 9, "tools": [
        {"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]});
    for (choice, expected) in [
        (Value::Null, took(Auto, "f g", "")),
        (json!({"type": "auto"}), took(Auto, "f g", "")),
        (json!({"type": "none"}), took(None, "f g", "")),
        (json!({"type": "any"}), took(Required, "f g", "tool_choice.type")),
        (
            json!({"type": "tool", "name": "f"}),
            took(Named("f".to_owned()), "f g", "tool_choice.name, tool_choice.type"),
        ),
        (json!({"type": "tool", "name": "h"}), refused("tool_choice")),
        (json!({"type": "tool"}), refused("tool_choice.name")),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": []}),
            refused("tool_choice.type"),
        ),
        (json!("auto"), refused("tool_choice")),
    ] {
        let found = chosen::<Messages>(messages.clone(), choice.clone());
        assert_eq!(found, expected, "Messages: {choice}");
    }
}

#[test]
fn a_name_is_of_one_tool() {
    let chat = |tools: Value| {
        let tools = tools.as_array().unwrap().iter();
        let tools: Vec<Value> =
            tools.map(|tool| json!({"type": "function", "function": tool})).collect();
        meaning::<Chat>(&json!({"messages": [{"role": "user", "content": "a"}], "tools": tools}))
    };
    let responses = |tools: Value| meaning::<Responses>(&json!({"input": "a", "tools": tools}));
    let messages = |tools: Value| {
        let user = json!([{"role": "user", "content": "a"}]);
        meaning::<Messages>(&json!({"max_tokens": 1, "messages": user, "tools": tools}))
    };
    let function = |name: &str| json!({"type": "function", "name": name});
    let namespace = |tools: Value| json!({"type": "namespace", "name": "a", "tools": tools});
    for (found, name) in [
        (chat(json!([{"name": "f"}, {"name": "g"}, {"name": "f"}])), "f"),
        (chat(json!([{"name": "f"}, {"name": "f", "description": "d"}])), "f"),
        (
            messages(json!([{"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}])),
            "f",
        ),
        (responses(json!([function("f"), {"type": "custom", "name": "f"}])), "f"),
        (responses(json!([function("a__b"), namespace(json!([function("b")]))])), "a__b"),
        (responses(json!([namespace(json!([function("b"), function("b")]))])), "a__b"),
    ] {
        assert!(found.starts_with("tools: ") && found.contains(&format!("`{name}`")), "{found}");
    }
    let apart = responses(json!([function("b"), namespace(json!([function("b")]))]));
    assert!(apart.contains("Request {"), "{apart}");
}

#[test]
fn lists_in_place_of_objects_are_refused() {
    let user = json!([{"role": "user", "content": "a"}]);
    let chat = |field: &str, value: Value| {
        let mut body = json!({"messages": user});
        body[field] = value;
        Chat::parse(body.to_string().as_bytes(), Purpose::Sample).map(drop)
    };
    let responses = |field: &str, value: Value| {
        let mut body = json!({"input": "a"});
        body[field] = value;
        Responses::parse(body.to_string().as_bytes(), Purpose::Sample).map(drop)
    };
    let messages = |field: &str, value: Value| {
        let mut body = json!({"max_tokens": 1, "messages": user});
        body[field] = value;
        Messages::parse(body.to_string().as_bytes(), Purpose::Sample).map(drop)
    };
    let call = json!([{"role": "assistant", "tool_calls": [["c", {"name": "f"}]]}]);
    let item = json!([["message", "user", "a", null, null, null, null, null, null, null, null]]);
    let custom = json!([{"type": "custom", "name": "f", "format": ["text", null, null]}]);
    let inner = json!([{"type": "namespace", "name": "n", "tools": [
        ["function", "f", null, null, null, null]]}]);
    for (found, field) in [
        (chat("thinking", json!(["off"])), "thinking"),
        (chat("chat_template_kwargs", json!([false, null])), "chat_template_kwargs"),
        (chat("messages", call), "messages[0].tool_calls[0]"),
        (responses("reasoning", json!(["off"])), "reasoning"),
        (responses("input", item), "input[0]"),
        (responses("tools", json!([["shell", "q", "d", {}, null, null]])), "tools[0]"),
        (responses("tools", custom), "tools[0].format"),
        (responses("tools", inner), "tools[0].tools[0]"),
        (messages("thinking", json!(["off"])), "thinking"),
        (messages("tool_choice", json!(["none", "x"])), "tool_choice"),
        (check(br#"{"sampling_params": [7]}"#, &TOKENS).map(drop), "sampling_params"),
    ] {
        let problem = found.expect_err(field);
        assert_eq!(problem.field.as_deref(), Some(field), "{}", problem.message);
        assert!(problem.message.contains("an object"), "{}", problem.message);
    }
}

#[test]
fn fields_without_an_entry_are_named_and_names_fit_into_a_header() {
    let body = json!({
        "messages": [{"role": "user", "content": "a", "näme,\n": 1}, {"role": "user", "weight": 0.5}],
        "chat_template_kwargs": {"enable_thinking": false}, "temperature": 0.5, "seed": 0,
    });
    let found = check(body.to_string().as_bytes(), &CHAT).unwrap();
    let expected = "messages[].n?me??, messages[].weight, seed, temperature";
    assert_eq!(found.header().as_deref(), Some(expected));
    assert_eq!(check(b"{}", &CHAT).unwrap().header(), None);
    let many = |count: usize| {
        let fields: serde_json::Map<_, _> =
            (0..count).map(|n| (format!("f{n:03}"), json!(1))).collect();
        check(Value::from(fields).to_string().as_bytes(), &CHAT)
    };
    let mut found = many(MAX_LISTED).unwrap();
    found.add_tools();
    let header = found.header().unwrap();
    assert!(header.starts_with("f000, ") && header.ends_with("f063, tools"), "{header}");
    let problem = many(MAX_LISTED + 1).unwrap_err();
    assert_eq!(problem.field.as_deref(), Some("f064"));
    assert!(problem.message.contains("more than 64 fields"), "{}", problem.message);
    let other = json!({"chat_template_kwargs": {"enable_thinking": false, "tone": "kind"}});
    let problem = check(other.to_string().as_bytes(), &CHAT).unwrap_err();
    assert_eq!(problem.field.as_deref(), Some("chat_template_kwargs.tone"));
}

#[test]
fn false_and_zero_are_wishes_like_others() {
    let listed = |body: Value| check(body.to_string().as_bytes(), &CHAT).unwrap().header();
    let cold = json!({"temperature": 0, "seed": 0, "parallel_tool_calls": false});
    assert_eq!(listed(cold).as_deref(), Some("parallel_tool_calls, seed, temperature"));
    assert_eq!(listed(json!({"store": false, "presence_penalty": 0, "logit_bias": {}})), None);
    assert_eq!(listed(json!({"stream_options": 5})).as_deref(), Some("stream_options"));
}

#[test]
fn nothing_hides_a_later_field() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for first in ["1e999", deep.as_str(), "\"\\ud83d\""] {
        let body = format!(r#"{{"user": {first}, "response_format": {{"type": "json_object"}}}}"#);
        let problem = check(body.as_bytes(), &CHAT).unwrap_err();
        assert_eq!(problem.kind, Kind::Invalid, "{first}");
        if first.starts_with('"') {
            assert!(problem.message.contains("response_format"), "{}", problem.message);
        }
    }
}

#[test]
fn the_page_of_fields_is_up_to_date() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/fields.md");
    let page = super::page::page();
    if std::env::var_os("ORCHESTRATE_REGENERATE").is_some() {
        fs_err::write(file, &page).unwrap();
    }
    let written = fs_err::read_to_string(file).unwrap_or_default();
    let remedy = "docs/src/fields.md is out of date: run `just regenerate`";
    assert!(written == page, "{remedy}");
}
