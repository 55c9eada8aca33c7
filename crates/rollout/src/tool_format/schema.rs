//! What the JSON schema of a tool says about an argument that is written as plain text.

use orchestrate_types::exact_json;
use serde_json::Value;
use std::cell::Cell;
use std::collections::HashSet;

/// Depth to which references and alternatives are followed; a schema may refer to itself.
const MAX_DEPTH: usize = 16;

/// Number of schemas that are looked at for one parameter: references that branch would be too many to
/// follow. A schema beyond that restricts nothing.
const MAX_SCHEMAS: usize = 1000;

/// The keywords that combine schemas by "or".
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];

/// The schema of a tool's parameters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parameters<'a>(&'a Value);

/// Where a schema is looked at: how many references and alternatives lead to it, and how many more schemas may be.
#[derive(Clone, Copy)]
struct Reach<'a> {
    depth: usize,
    left: &'a Cell<usize>,
}

impl<'a> Reach<'a> {
    fn of(left: &'a Cell<usize>) -> Self {
        Self { depth: 0, left }
    }

    /// The reach of the schemas inside of one; `None` if they are too deep or too many.
    fn inner(self) -> Option<Self> {
        self.left.set(self.left.get().checked_sub(1)?);
        (self.depth < MAX_DEPTH).then_some(Self { depth: self.depth + 1, ..self })
    }
}

/// What a schema says about a parameter.
#[derive(Debug, PartialEq)]
pub(super) enum Parameter<'a> {
    /// It is declared, by one of these.
    Declared(Vec<&'a Value>),
    /// It is not declared, but further parameters are allowed.
    Free,
    /// The declared parameters do not include it.
    Undeclared,
}

impl Parameters<'static> {
    /// Any parameters of any type.
    pub(super) const ANY: Self = Self(&Value::Null);
}

impl<'a> Parameters<'a> {
    /// The parameters of the tool `name`; `None` if there is no such tool.
    pub(super) fn of(tools: &'a [Value], name: &str) -> Option<Self> {
        let mut tools = tools.iter().map(|tool| tool.get("function").unwrap_or(tool));
        let tool = tools.find(|tool| tool.get("name").and_then(Value::as_str) == Some(name))?;
        Some(Self(tool.get("parameters").unwrap_or(&Value::Null)))
    }

    /// What is declared about the parameter `key`.
    pub(super) fn parameter(self, key: &str) -> Parameter<'a> {
        let (mut found, mut lists_any, mut is_open) = (Vec::new(), false, false);
        for schema in self.parts(self.0) {
            let properties = schema.get("properties").and_then(Value::as_object);
            lists_any |= properties.is_some_and(|properties| !properties.is_empty());
            found.extend(properties.and_then(|properties| properties.get(key)));
            is_open |= schema.get("patternProperties").is_some()
                || schema
                    .get("additionalProperties")
                    .is_some_and(|more| *more != Value::Bool(false));
        }
        if !found.is_empty() {
            return Parameter::Declared(found);
        }
        let others = self.parts(self.0).into_iter();
        found.extend(
            others
                .filter_map(|schema| schema.get("additionalProperties"))
                .filter(|schema| schema.is_object()),
        );
        match (found.is_empty(), is_open || !lists_any) {
            (false, _) => Parameter::Declared(found),
            (true, true) => Parameter::Free,
            (true, false) => Parameter::Undeclared,
        }
    }

    /// A schema with everything that it is combined of.
    fn parts(self, schema: &'a Value) -> Vec<&'a Value> {
        let (mut parts, mut level) = (Vec::new(), vec![schema]);
        let mut seen = HashSet::from([std::ptr::from_ref(schema)]);
        for _ in 0..MAX_DEPTH {
            let lists = |schema: &'a Value| {
                let keys = ALTERNATIVES.into_iter().chain(["allOf"]);
                keys.filter_map(|key| schema.get(key)?.as_array()).flatten()
            };
            let next = level.iter().flat_map(|schema| lists(schema).chain(self.referred(schema)));
            let next: Vec<_> = next.collect();
            parts.append(&mut level);
            // A schema may refer to itself, and to another one more than once.
            level = next
                .into_iter()
                .filter(|new| seen.insert(std::ptr::from_ref(*new)))
                .take(MAX_SCHEMAS.saturating_sub(parts.len()))
                .collect();
        }
        parts
    }

    /// The schema to which `schema` refers.
    fn referred(self, schema: &Value) -> Option<&'a Value> {
        let reference = schema.get("$ref")?.as_str()?;
        self.0.pointer(reference.strip_prefix('#')?)
    }

    /// Reads the text of a value that `declared` describes.
    pub(super) fn value(self, text: &str, declared: &[&'a Value]) -> Value {
        let left = Cell::new(MAX_SCHEMAS);
        let kinds = union(declared.iter().map(|schema| self.kinds(schema, Reach::of(&left))));
        let kinds = kinds.filter(|kinds| *kinds != Kinds::NONE);
        let may_be = |kind| kinds.is_some_and(|kinds| kinds.has(kind));
        // Python's spelling, which some templates write.
        let json = match text {
            "True" if may_be(Kinds::BOOLEAN) => Some(Value::Bool(true)),
            "False" if may_be(Kinds::BOOLEAN) => Some(Value::Bool(false)),
            "None" if may_be(Kinds::NULL) && !may_be(Kinds::STRING) => Some(Value::Null),
            text => exact_json(text.as_bytes()).ok(),
        };
        let left = Cell::new(MAX_SCHEMAS);
        let literals: Option<Vec<&Value>> = declared
            .iter()
            .map(|schema| self.literals(schema, Reach::of(&left)))
            .collect::<Option<Vec<_>>>()
            .map(|lists| lists.concat());
        if let Some(literals) = literals {
            if literals.iter().any(|literal| literal.as_str() == Some(text)) {
                return text.into();
            }
            if let Some(json) = &json
                && literals.contains(&json)
            {
                return json.clone();
            }
        }
        let is_null = text == "null" && may_be(Kinds::NULL);
        match json {
            Some(json) if is_null || !may_be(Kinds::STRING) => json,
            Some(_) | None => text.into(),
        }
    }

    /// The types that a schema allows; `None` if it does not restrict them.
    fn kinds(self, schema: &'a Value, reach: Reach<'_>) -> Option<Kinds> {
        let reach = reach.inner()?;
        let list = |key: &str| schema.get(key).and_then(Value::as_array);
        let of_type = match schema.get("type") {
            Some(Value::Array(names)) => union(names.iter().map(Kinds::named)),
            Some(name) => Kinds::named(name),
            None => None,
        };
        let of_enum =
            list("enum").map(|values| values.iter().map(Kinds::of).fold(Kinds::NONE, Kinds::or));
        let mut all = vec![of_type, of_enum, schema.get("const").map(Kinds::of)];
        for key in ALTERNATIVES {
            all.push(
                list(key)
                    .and_then(|list| union(list.iter().map(|schema| self.kinds(schema, reach)))),
            );
        }
        all.extend(
            list("allOf")
                .into_iter()
                .flatten()
                .chain(self.referred(schema))
                .map(|schema| self.kinds(schema, reach)),
        );
        let kinds = all.into_iter().flatten().reduce(Kinds::and)?;
        let is_nullable = schema.get("nullable") == Some(&Value::Bool(true));
        Some(if is_nullable { kinds.or(Kinds::NULL) } else { kinds })
    }

    /// All values that a schema allows, if it lists them.
    fn literals(self, schema: &'a Value, reach: Reach<'_>) -> Option<Vec<&'a Value>> {
        let reach = reach.inner()?;
        let list = |key: &str| schema.get(key).and_then(Value::as_array);
        if let Some(value) = schema.get("const") {
            return Some(vec![value]);
        }
        if let Some(values) = list("enum") {
            return Some(values.iter().collect());
        }
        if schema.get("type").is_some_and(|kind| kind == "null") {
            return Some(vec![&Value::Null]);
        }
        for key in ALTERNATIVES {
            let all = list(key).map(|list| list.iter().map(|schema| self.literals(schema, reach)));
            if let Some(Some(all)) = all.map(Iterator::collect::<Option<Vec<_>>>) {
                return Some(all.concat());
            }
        }
        let mut parts = list("allOf").into_iter().flatten().chain(self.referred(schema));
        parts.find_map(|schema| self.literals(schema, reach))
    }
}

/// A set of JSON types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kinds(u8);

impl Kinds {
    const NONE: Self = Self(0);
    const NULL: Self = Self(1);
    const BOOLEAN: Self = Self(2);
    const NUMBER: Self = Self(4);
    const STRING: Self = Self(8);
    const ARRAY: Self = Self(16);
    const OBJECT: Self = Self(32);

    /// The type of this name; `None` if there is none.
    fn named(name: &Value) -> Option<Self> {
        match name.as_str()? {
            "null" => Some(Self::NULL),
            "boolean" => Some(Self::BOOLEAN),
            "integer" | "number" => Some(Self::NUMBER),
            "string" => Some(Self::STRING),
            "array" => Some(Self::ARRAY),
            "object" => Some(Self::OBJECT),
            _ => None,
        }
    }

    /// The type of a value.
    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn has(self, kind: Self) -> bool {
        self.0 & kind.0 != 0
    }
}

/// The types of alternatives; `None` if one of them, or no alternative, restricts them.
fn union(kinds: impl IntoIterator<Item = Option<Kinds>>) -> Option<Kinds> {
    kinds.into_iter().reduce(|a, b| Some(a?.or(b?)))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The value of `text` by the schema of a parameter, with the definitions that the tests refer to.
    fn typed(schema: &Value, text: &str) -> Value {
        let parameters = json!({
            "properties": {"key": schema},
            "$defs": {
                "Kind": {"type": "string", "enum": ["1", "2"]},
                "Count": {"$ref": "#/$defs/Whole"},
                "Whole": {"type": "integer"},
                "Loop": {"$ref": "#/$defs/Loop"},
                "Tree": {"anyOf": vec![json!({"$ref": "#/$defs/Tree"}); 10]},
            },
        });
        let tools = [json!({"function": {"name": "f", "parameters": parameters}})];
        let parameters = Parameters::of(&tools, "f").unwrap();
        match parameters.parameter("key") {
            Parameter::Declared(schemas) => parameters.value(text, &schemas),
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn declared_types_decide() {
        for (kind, value, expected) in [
            (json!("string"), "12", json!("12")),
            (json!("integer"), "12", json!(12)),
            (json!("boolean"), "True", json!(true)),
            (json!(["string", "null"]), "null", Value::Null),
            (json!(["string", "null"]), "None", json!("None")),
            (json!(["integer", "null"]), "None", Value::Null),
            (json!("number"), "many", json!("many")),
            (json!("object"), "{\"a\": 1}", json!({"a": 1})),
            (json!("object"), "{\"a\": 1, \"a\": 2}", json!("{\"a\": 1, \"a\": 2}")),
            (json!("integer"), "12345678901234567890123", json!("12345678901234567890123")),
        ] {
            assert_eq!(typed(&json!({"type": kind}), value), expected, "{kind} {value}");
        }
    }

    #[test]
    fn a_schema_that_refers_to_itself_many_times_is_followed_only_so_far() {
        let tree = json!({"$ref": "#/$defs/Tree"});
        assert_eq!(typed(&tree, "12"), json!(12));
        let properties: Vec<Value> = (0..10).map(|_| tree.clone()).collect();
        let tools = [json!({"function": {"name": "f", "parameters": {
            "allOf": properties, "$defs": {"Tree": {"allOf": vec![tree; 10]}}}}})];
        let parameters = Parameters::of(&tools, "f").unwrap();
        assert_eq!(parameters.parameter("key"), Parameter::Free);
    }

    #[test]
    fn a_text_stays_text_wherever_the_schema_allows_one() {
        let text = json!({"type": "string"});
        let optional = json!({"anyOf": [text, {"type": "null"}], "default": null});
        for schema in [
            text.clone(),
            optional.clone(),
            json!({"oneOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}),
            json!({"allOf": [text]}),
            json!({"allOf": [{"anyOf": [{"type": "object"}, text]}, {"type": ["string", "array"]}]}),
            json!({"anyOf": [{"type": "integer"}, text]}),
            json!({"type": "string", "nullable": true}),
            json!({"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}]}),
            json!({"$ref": "#/$defs/Kind", "description": "which one"}),
        ] {
            for value in ["{\"name\": \"x\"}\n", "12", "1", "true", "[1, 2]", "None", ""] {
                assert_eq!(typed(&schema, value), json!(value), "{schema}");
            }
        }
        assert_eq!(typed(&optional, "null"), Value::Null);
        assert_eq!(typed(&json!({"type": "string", "nullable": true}), "null"), Value::Null);
    }

    #[test]
    fn references_constants_and_listed_values_are_followed() {
        for (schema, value, expected) in [
            (json!({"const": "5"}), "5", json!("5")),
            (json!({"const": 5}), "5", json!(5)),
            (json!({"enum": ["yes", "1"]}), "yes", json!("yes")),
            (json!({"enum": ["yes", "1"]}), "1", json!("1")),
            (json!({"enum": ["1", 2, null]}), "1", json!("1")),
            (json!({"enum": ["1", 2, null]}), "2", json!(2)),
            (json!({"enum": ["1", 2, null]}), "null", Value::Null),
            (json!({"enum": ["null", "x"]}), "null", json!("null")),
            (json!({"anyOf": [{"const": "null"}, {"type": "null"}]}), "null", json!("null")),
            (json!({"$ref": "#/$defs/Count"}), "12", json!(12)),
            (json!({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}), "null", Value::Null),
            // A schema that says nothing about types.
            (json!({"$ref": "#/$defs/Loop"}), "1.5", json!(1.5)),
            (json!({"$ref": "#/$defs/Missing"}), "x", json!("x")),
            (json!({}), "1.5", json!(1.5)),
        ] {
            assert_eq!(typed(&schema, value), expected, "{schema} {value}");
        }
    }

    #[test]
    fn parameters_are_found_where_they_are_declared() {
        let declared = |parameters: Value, key: &str| {
            let tools = [json!({"name": "f", "parameters": parameters})];
            match Parameters::of(&tools, "f").unwrap().parameter(key) {
                Parameter::Declared(schemas) => schemas.first().map(|schema| (*schema).clone()),
                Parameter::Free => Some(json!("free")),
                Parameter::Undeclared => None,
            }
        };
        let a = json!({"properties": {"a": {"type": "string"}}});
        let text = Some(json!({"type": "string"}));
        for parameters in [
            a.clone(),
            json!({"allOf": [{"properties": {"b": {}}}, a]}),
            json!({"anyOf": [a, {"properties": {"b": {}}}]}),
            json!({"$ref": "#/$defs/A", "$defs": {"A": a}}),
        ] {
            assert_eq!(declared(parameters.clone(), "a"), text, "{parameters}");
            assert_eq!(declared(parameters, "x"), None);
        }
        for parameters in [
            json!({}),
            json!({"properties": {}}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
        ] {
            assert_eq!(declared(parameters, "x"), Some(json!("free")));
        }
        let typed = json!({"properties": {"a": {}}, "additionalProperties": {"type": "string"}});
        assert_eq!(declared(typed, "x"), text);
    }
}
