//! Golden vectors of `tests/reference` for unit tests of this crate.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One file of `tests/reference/vectors`. It is part of the repository, so no test skips.
pub(crate) fn vectors(name: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/vectors");
    let text = fs_err::read(format!("{folder}/{name}.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The cases of a file of golden vectors.
pub(crate) fn cases(file: &Value) -> &[Value] {
    let cases = file["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    cases
}

/// Every value of an enum of the protocol, from its JSON schema: a new one is found by itself.
pub(crate) fn options<T: JsonSchema + DeserializeOwned>() -> Vec<T> {
    let schema = schemars::schema_for!(T).to_value();
    let listed = schema["oneOf"].as_array().into_iter().flatten();
    let values = listed.flat_map(|one| match &one["enum"] {
        Value::Array(several) => several.clone(),
        _ => vec![one["const"].clone()],
    });
    let found: Vec<T> = values.map(|value| serde_json::from_value(value).unwrap()).collect();
    assert!(!found.is_empty(), "{schema}");
    found
}

/// Folder of the small Qwen3-MoE checkpoint that `whole_model` of the golden vectors describes.
pub(crate) fn checkpoint() -> &'static camino::Utf8Path {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/vectors/whole_model").into()
}

/// A value of a case, typed.
pub(crate) fn typed<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// All numbers of nested lists, in order.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        Value::Number(number) => vec![number.as_f64().unwrap()],
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Object(_) => panic!("{value}"),
    }
}

/// Expert ids of nested lists, in order.
pub(crate) fn ids(value: &Value) -> Vec<u16> {
    match value {
        Value::Array(items) => items.iter().flat_map(ids).collect(),
        single => vec![typed(single)],
    }
}

/// Compares with absolute and relative tolerance together.
#[track_caller]
pub(crate) fn close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * (1.0 + e.abs()), "entry {i}: found {f}, expected {e}");
    }
}
