//! Tools: functions, functions in namespaces, and tools with free text as their input.

use crate::content::{self, AllowedMode, Choice, Object};
use crate::message::json_of;
use crate::problem::Problem;
use crate::sampler::{Tool, ToolChoice};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Between a namespace and a name in the name that the model reads.
const SEPARATOR: &str = "__";

/// Deepest namespaces.
const MAX_DEPTH: usize = 4;

#[derive(Debug, Deserialize)]
pub(super) struct ToolParam {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    #[serde(default, deserialize_with = "content::unique")]
    parameters: Option<Value>,
    format: Option<Object<FormatParam>>,
    tools: Option<Vec<Object<ToolParam>>>,
}

#[derive(Debug, Deserialize)]
struct FormatParam {
    #[serde(rename = "type")]
    kind: Option<String>,
    syntax: Option<String>,
    definition: Option<String>,
}

/// The client's names of the tools that the model knows by one flat name.
#[derive(Clone, Debug, Default)]
pub(super) struct ToolNames(HashMap<String, ToolName>);

/// How the client names a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolName {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// Its input is text, not JSON.
    pub(super) is_custom: bool,
}

impl ToolNames {
    /// The client's name of a tool that the model called, which may not exist.
    pub(super) fn of(&self, flat: &str) -> ToolName {
        let unknown = || ToolName { namespace: None, name: flat.to_owned(), is_custom: false };
        self.0.get(flat).cloned().unwrap_or_else(unknown)
    }
}

/// The name that the model reads.
pub(super) fn flat_name(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        Some(namespace) => format!("{namespace}{SEPARATOR}{name}"),
        None => name.to_owned(),
    }
}

/// The arguments of a call with free text.
pub(super) fn custom_arguments(input: &str) -> String {
    json!({"input": input}).to_string()
}

/// The free text of such arguments; other arguments as they are.
pub(super) fn custom_input(arguments: &str) -> String {
    let parsed = json_of(arguments);
    let input = parsed.as_ref().and_then(|arguments| arguments.get("input")?.as_str());
    input.unwrap_or(arguments).to_owned()
}

/// Tools in the internal form.
#[derive(Debug, Default)]
pub(super) struct Tools {
    pub(super) tools: Vec<Tool>,
    pub(super) names: ToolNames,
}

impl Tools {
    /// Adds tools. Those that the vendor's servers would run are left out; the table of fields refuses
    /// other types, but for those in namespaces, which have only the client's own tools.
    pub(super) fn add(
        &mut self,
        params: Vec<ToolParam>,
        namespace: Option<&str>,
        at: &str,
        depth: usize,
    ) -> Result<(), Problem> {
        for (index, mut param) in params.into_iter().enumerate() {
            let at = format!("{at}[{index}]");
            match param.kind.as_deref() {
                Some("function") | None => self.add_one(param, namespace, false, &at)?,
                Some("custom") => self.add_one(param, namespace, true, &at)?,
                Some("namespace") if depth < MAX_DEPTH => {
                    let inner = flat_name(namespace, param.name.as_deref().unwrap_or_default());
                    let tools = param.tools.take().unwrap_or_default().into_iter();
                    let tools = tools.map(|Object(tool)| tool).collect();
                    self.add(tools, Some(&inner), &format!("{at}.tools"), depth + 1)?;
                }
                Some("namespace") => {
                    let why = format!("namespaces may be {MAX_DEPTH} deep");
                    return Err(Problem::field(format!("{at}.type"), why));
                }
                Some(_) if namespace.is_some() => {
                    let why = "a namespace has functions, custom tools and namespaces";
                    return Err(Problem::unsupported(
                        format!("{at}.type"),
                        "this type of tool",
                        why,
                    ));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn add_one(
        &mut self,
        param: ToolParam,
        namespace: Option<&str>,
        is_custom: bool,
        at: &str,
    ) -> Result<(), Problem> {
        let misplaced = if is_custom {
            [("parameters", param.parameters.is_some()), ("tools", param.tools.is_some())]
        } else {
            [("format", param.format.is_some()), ("tools", param.tools.is_some())]
        };
        if let Some((field, _)) = misplaced.into_iter().find(|(_, is_set)| *is_set) {
            let kind = if is_custom { "custom" } else { "function" };
            let problem = format!("a tool of type `{kind}` has no such field");
            return Err(Problem::field(format!("{at}.{field}"), problem));
        }
        let (description, schema) = if is_custom {
            (Some(param.custom_description(at)?), Some(custom_schema()))
        } else {
            (param.description, param.parameters)
        };
        let mut tool = content::tool(param.name, description, schema, at)?;
        let flat = flat_name(namespace, &tool.name);
        let name = std::mem::replace(&mut tool.name, flat.clone());
        self.tools.push(tool);
        let namespace = namespace.map(str::to_owned);
        self.names.0.insert(flat, ToolName { namespace, name, is_custom });
        Ok(())
    }
}

impl ToolParam {
    /// The description with the grammar of the input.
    fn custom_description(&self, at: &str) -> Result<String, Problem> {
        let description = self.description.clone().unwrap_or_default();
        let Some(Object(FormatParam { kind, syntax, definition })) = &self.format else {
            return Ok(description);
        };
        match (kind.as_deref(), syntax.as_deref(), definition) {
            (Some("text"), ..) | (None, None, None) => Ok(description),
            (Some("grammar") | None, Some(syntax @ ("lark" | "regex")), Some(definition)) => {
                Ok(format!("{description}\n\nGrammar of the input ({syntax}):\n{definition}"))
            }
            _ => Err(Problem::field(
                format!("{at}.format"),
                "must be of the type `text`, or of the type `grammar` with a `definition` and the `syntax` \
                 `lark` or `regex`",
            )),
        }
    }
}

fn custom_schema() -> Value {
    json!({
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The input of the tool."}},
        "required": ["input"],
    })
}

/// An object in `tool_choice`.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ChoiceParam {
    Function(NameParam),
    Custom(NameParam),
    AllowedTools { mode: AllowedMode, tools: Vec<AllowedTool> },
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum AllowedTool {
    Function(NameParam),
    Custom(NameParam),
    /// One that the vendor's servers would run: the model is not shown it.
    #[serde(other)]
    OfServer,
}

#[derive(Debug, Deserialize)]
pub(super) struct NameParam {
    namespace: Option<String>,
    name: String,
}

impl NameParam {
    fn flat(&self) -> String {
        flat_name(self.namespace.as_deref(), &self.name)
    }
}

impl From<ChoiceParam> for Choice {
    fn from(choice: ChoiceParam) -> Self {
        match choice {
            ChoiceParam::Function(name) | ChoiceParam::Custom(name) => {
                ToolChoice::Named(name.flat()).into()
            }
            ChoiceParam::AllowedTools { mode, tools } => {
                let names = tools.iter().filter_map(|tool| match tool {
                    AllowedTool::Function(name) | AllowedTool::Custom(name) => Some(name.flat()),
                    AllowedTool::OfServer => None,
                });
                Self::among(&mode, names.collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(params: Value) -> Result<Tools, Problem> {
        let mut tools = Tools::default();
        tools.add(serde_json::from_value(params).unwrap(), None, "tools", 0)?;
        Ok(tools)
    }

    #[test]
    fn namespaces_and_free_text_are_functions_for_the_model() {
        let found = tools(json!([
            {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true},
            {"type": "custom", "name": "apply_patch", "description": "Edits.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "web_search"},
        ]))
        .unwrap();
        let names: Vec<&str> = found.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["f", "apply_patch", "agents__spawn"]);
        let description = found.tools[1].description.as_deref().unwrap();
        assert!(description.contains("(lark):\nstart: x"), "{description}");
        let spawn = found.names.of("agents__spawn");
        assert_eq!((spawn.namespace.as_deref(), spawn.name.as_str()), (Some("agents"), "spawn"));
        assert!(found.names.of("apply_patch").is_custom && !found.names.of("unknown").is_custom);
        assert_eq!(custom_input(&custom_arguments("a\"b")), "a\"b");
        assert_eq!(custom_input("raw"), "raw");
    }

    #[test]
    fn tools_without_a_schema_of_their_own_are_refused() {
        for (param, field) in [
            (json!({"type": "function"}), "tools[0].name"),
            (json!({"type": "function", "name": "f", "parameters": 3}), "tools[0]"),
            (json!({"type": "custom", "name": "f", "format": {"type": "xml"}}), "tools[0].format"),
            (json!({"name": "f", "format": {"type": "text"}}), "tools[0].format"),
            (json!({"type": "function", "name": "f", "tools": []}), "tools[0].tools"),
            (json!({"type": "custom", "name": "f", "parameters": {}}), "tools[0].parameters"),
            (
                json!({"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}),
                "tools[0].format",
            ),
            (
                json!({"type": "custom", "name": "f", "format": {
                    "type": "grammar", "syntax": "ebnf", "definition": "x"}}),
                "tools[0].format",
            ),
            (
                json!({"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}),
                "tools[0].tools[0].type",
            ),
            (
                json!({"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}),
                "tools[0].tools[0].type",
            ),
        ] {
            let problem = tools(json!([param])).unwrap_err();
            assert_eq!(problem.field.as_deref(), Some(field), "{}", problem.message);
        }
        let mut deep = json!([]);
        for _ in 0..20 {
            deep = json!([{"type": "namespace", "name": "n", "tools": deep}]);
        }
        assert!(tools(deep).is_err());
    }
}
