//! Golden numbers of the algorithm reference, for unit tests of this crate.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Folder of the golden files; `None`, with a note on stderr, where the test data is absent.
pub(crate) fn folder() -> Option<camino::Utf8PathBuf> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/golden");
    let path = camino::Utf8PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    skipped();
    None
}

#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn skipped() {
    eprintln!("skipped: test data absent");
}

/// The cases of one file.
pub(crate) fn cases(name: &str) -> Vec<Value> {
    let Some(folder) = folder() else { return Vec::new() };
    let text = fs_err::read(folder.join(format!("{name}.json"))).unwrap();
    let file: Value = serde_json::from_slice(&text).unwrap();
    file["cases"].as_array().unwrap().clone()
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
