//! The tools that a server lists, checked and in the form that the policy sees.

use super::ToolServerErrorKind;
use super::config::ToolServerSettings;
use rmcp::model::Tool;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Separates a server's name from a tool's. Names of servers have no `_`, so no two pairs are alike.
const SEPARATOR: &str = "__";

/// Longest name by which the policy can call a tool: servers of chat models refuse longer ones.
const MAX_NAME_CHARS: usize = 64;

/// A tool of a server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ServerTool {
    /// As the server names it.
    pub(super) name: String,
    /// Its JSON schema, as chat templates read it, with the name by which the policy calls it.
    pub(super) schema: Value,
}

impl ServerTool {
    /// The name by which the policy calls it.
    pub(super) fn called(&self) -> &str {
        called(&self.schema).unwrap_or_default()
    }
}

/// The name in a JSON schema of a tool.
pub(crate) fn called(schema: &Value) -> Option<&str> {
    schema.pointer("/function/name")?.as_str()
}

/// Checks the tools that a server lists. Those that the settings leave out may have any form. The
/// order in which servers list their tools has no meaning, so the result is sorted.
pub(super) fn checked(
    settings: &ToolServerSettings,
    mut listed: Vec<Tool>,
) -> Result<Vec<ServerTool>, ToolServerErrorKind> {
    if let Some(chosen) = &settings.tools {
        if let Some(missing) = chosen.iter().find(|name| listed.iter().all(|t| t.name != **name)) {
            let names = listed.iter().map(|tool| tool.name.as_ref()).collect::<Vec<_>>();
            let (missing, listed) = (missing.clone(), names.join(", "));
            return Err(ToolServerErrorKind::MissingTool { missing, listed });
        }
        listed.retain(|tool| chosen.iter().any(|name| tool.name == *name));
    }
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    let mut tools: Vec<ServerTool> = Vec::new();
    for tool in listed {
        let name = tool.name.to_string();
        let invalid = |problem| ToolServerErrorKind::InvalidTool { tool: name.clone(), problem };
        let tool = checked_tool(&settings.name, &tool).map_err(invalid)?;
        if tools.iter().any(|earlier| earlier.called() == tool.called()) {
            return Err(invalid("has the name of another tool"));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn checked_tool(server: &str, tool: &Tool) -> Result<ServerTool, &'static str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    if tool.name.is_empty() || !tool.name.chars().all(is_plain) {
        return Err("has a name with characters other than letters, digits, `_`, `-`, `.` and `/`");
    }
    // Models and their servers know neither dots nor slashes in names.
    let called = format!("{server}{SEPARATOR}{}", tool.name.replace(['.', '/'], "_"));
    if called.chars().count() > MAX_NAME_CHARS {
        return Err("has a name that is too long: with the server's it must have 64 characters");
    }
    let mut parameters = tool.input_schema.as_ref().clone();
    if parameters.get("type").and_then(Value::as_str) != Some("object") {
        return Err("has an input schema whose type is not \"object\"");
    }
    if parameters.values().any(may_be_rounded) {
        return Err(
            "has an input schema with a number of more than 64 bits, which would be rounded",
        );
    }
    // Some templates read it without asking whether it exists.
    if !parameters.entry("properties").or_insert_with(|| json!({})).is_object() {
        return Err("has an input schema whose properties are not an object");
    }
    let description = tool.description.as_deref().unwrap_or_default();
    let schema = json!({
        "type": "function",
        "function": {"name": called, "description": description, "parameters": parameters},
    });
    Ok(ServerTool { name: tool.name.to_string(), schema })
}

/// Whether a value has a whole number that may have been written with more than 64 bits.
fn may_be_rounded(value: &Value) -> bool {
    const LARGEST_EXACT: f64 = 9_223_372_036_854_775_808.0;
    match value {
        Value::Number(number) => {
            number.is_f64() && number.as_f64().is_some_and(|number| number.abs() >= LARGEST_EXACT)
        }
        Value::Array(list) => list.iter().any(may_be_rounded),
        Value::Object(object) => object.values().any(may_be_rounded),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// What differs between the earlier tools of a server and those it lists now; `None` if nothing does.
pub(super) fn difference(earlier: &[ServerTool], now: &[ServerTool]) -> Option<String> {
    let missing_in =
        |tools: &[ServerTool], tool: &ServerTool| tools.iter().all(|other| other.name != tool.name);
    let removed = earlier.iter().filter(|tool| missing_in(now, tool)).map(|t| ("removed", t));
    let added = now.iter().filter(|tool| missing_in(earlier, tool)).map(|t| ("added", t));
    let changed = now.iter().filter(|tool| !missing_in(earlier, tool) && !earlier.contains(tool));
    let all = removed.chain(added).chain(changed.map(|t| ("changed", t)));
    let all: Vec<String> = all.map(|(how, tool)| format!("{how} {}", tool.name)).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn settings(tools: Option<&[&str]>) -> ToolServerSettings {
        ToolServerSettings {
            name: "s".to_owned(),
            tools: tools.map(|names| names.iter().map(|&name| name.to_owned()).collect()),
            ..ToolServerSettings::default()
        }
    }

    fn tool(name: &str, schema: Value) -> Tool {
        let Value::Object(schema) = schema else { panic!("not an object") };
        Tool::new(name.to_owned(), "does it", Arc::new(schema))
    }

    fn object() -> Value {
        json!({"type": "object"})
    }

    #[test]
    fn tools_are_sorted_and_get_the_name_of_their_server() {
        let listed = vec![tool("b.c/d", object()), tool("a", object())];
        let tools = checked(&settings(None), listed.clone()).unwrap();
        let names: Vec<&str> = tools.iter().map(ServerTool::called).collect();
        assert_eq!(names, ["s__a", "s__b_c_d"]);
        assert_eq!(tools[1].name, "b.c/d");
        let function = json!({"name": "s__a", "description": "does it",
            "parameters": {"type": "object", "properties": {}}});
        assert_eq!(tools[0].schema, json!({"type": "function", "function": function}));
        let reversed = listed.into_iter().rev().collect();
        assert_eq!(difference(&tools, &checked(&settings(None), reversed).unwrap()), None);
    }

    #[test]
    fn numbers_of_a_schema_are_those_that_the_server_sent() {
        let listed = |schema: &str| {
            // As the client library reads the reply to `tools/list`.
            let text = format!(
                "{{\"jsonrpc\": \"2.0\", \"id\": 1, \"result\": {{\"tools\": [{{\"name\": \"a\", \
                 \"inputSchema\": {schema}}}]}}}}"
            );
            let message: rmcp::model::ServerJsonRpcMessage = serde_json::from_str(&text).unwrap();
            let value = serde_json::to_value(message).unwrap();
            let tool: Tool = serde_json::from_value(value["result"]["tools"][0].clone()).unwrap();
            checked(&settings(None), vec![tool])
        };
        let schema = |number: &str| {
            format!(
                "{{\"type\":\"object\",\"properties\":{{\"n\":{{\"enum\":[{number}],\"default\":{number}}}}}}}"
            )
        };
        for number in
            ["9007199254740993", "-9223372036854775808", "18446744073709551615", "0.5", "1e3"]
        {
            let tools = listed(&schema(number)).unwrap();
            let found = &tools[0].schema["function"]["parameters"];
            let expected: Value = serde_json::from_str(&schema(number)).unwrap();
            assert_eq!(found.to_string(), expected.to_string());
        }
        for number in ["18446744073709551616", "-9223372036854775809"] {
            let error = listed(&schema(number)).unwrap_err().to_string();
            assert!(error.contains("more than 64 bits") && error.contains('a'), "{error}");
        }
    }

    #[test]
    fn invalid_tools_are_refused_unless_they_are_left_out() {
        for (listed, problem) in [
            (vec![tool("a b", object())], "characters"),
            (vec![tool("a<|im_end|>", object())], "characters"),
            (vec![tool("", object())], "characters"),
            (vec![tool(&"a".repeat(62), object())], "too long"),
            (vec![tool("a", json!({"type": "string"}))], "not \"object\""),
            (vec![tool("a", json!({}))], "not \"object\""),
            (vec![tool("a", json!({"type": "object", "properties": []}))], "properties"),
            (vec![tool("a.b", object()), tool("a/b", object())], "another tool"),
            (vec![tool("a", object()), tool("a", object())], "another tool"),
        ] {
            let error = checked(&settings(None), listed.clone()).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
            let more = [listed, vec![tool("valid", object())]].concat();
            assert_eq!(checked(&settings(Some(&["valid"])), more).unwrap().len(), 1);
        }
        let error = checked(&settings(Some(&["x"])), vec![tool("y", object())]).unwrap_err();
        assert!(error.to_string().contains("no tool `x`"), "{error}");
    }

    #[test]
    fn a_difference_names_each_tool() {
        let list = |listed| checked(&settings(None), listed).unwrap();
        let earlier = list(vec![tool("a", object()), tool("b", object()), tool("c", object())]);
        let other = json!({"type": "object", "required": ["x"]});
        let now = list(vec![tool("b", object()), tool("c", other), tool("d", object())]);
        assert_eq!(difference(&earlier, &now).unwrap(), "removed a, added d, changed c");
        assert_eq!(difference(&now, &now), None);
    }
}
