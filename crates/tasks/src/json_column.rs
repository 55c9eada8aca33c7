//! Serde functions for a column that contains JSON: it is read as JSON text or as a decoded value,
//! and written as JSON text.

use orchestrate_types::UniqueKeys;
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize as _, Deserializer, Serialize, Serializer};

pub(crate) fn serialize<T: Serialize, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&serde_json::to_string(value).map_err(S::Error::custom)?)
}

pub(crate) fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    match serde_json::Value::deserialize(from)? {
        serde_json::Value::String(text) => of_text(&text).map_err(|error| {
            if is_python_literal(&text) {
                D::Error::custom(
                    "is written in Python's syntax, not JSON; write it with json.dumps",
                )
            } else {
                D::Error::custom(error)
            }
        }),
        value => serde_json::from_value(value).map_err(D::Error::custom),
    }
}

fn of_text<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    let UniqueKeys(value) = serde_json::from_str(text)?;
    serde_json::from_value(value)
}

/// Whether `text` looks like the `str` of a Python list or dict of strings.
fn is_python_literal(text: &str) -> bool {
    let inside = text.trim_start().strip_prefix(['[', '{']).map(str::trim_start);
    inside.is_some_and(|inside| inside.starts_with('\''))
}
