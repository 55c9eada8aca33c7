//! Keys of foreign objects that are misspelt or have the name that another tool gives them.
//!
//! Rows and predictions have keys for other programs, which are ignored. A key that looks like one that
//! is read must not be: its value would silently count as absent.

use crate::text::printable;
use orchestrate_types::ImageName;
use serde_json::{Map, Value};

/// Number of characters of a key that a message repeats.
const KEY_CHARS: usize = 60;
/// Number of keys that a message lists.
const LISTED: usize = 12;
/// Shortest key in which one different character is taken for a mistake.
const LONG: usize = 5;
/// Depth of the objects in which a patch is searched.
const DEPTH: usize = 3;

/// Fails for a key that is not in `known` but looks like one of them, or is one of `other_names`
/// for it, if the object lacks that one. A key that differs only in case or punctuation is refused
/// even next to the right one, unless both have the same value.
///
/// # Errors
/// The reason, with the key that was probably meant.
pub(crate) fn check(
    fields: &Map<String, Value>,
    known: &[&str],
    other_names: &[(&str, &str)],
) -> Result<(), String> {
    for (key, value) in fields.iter().filter(|(key, _)| !known.contains(&key.as_str())) {
        let agrees = |name: &str| fields.get(name) == Some(value);
        let same = known.iter().find(|name| letters(key) == letters(name) && !agrees(name));
        let absent = known.iter().filter(|name| fields.get(**name).is_none_or(is_blank));
        let similar = absent.clone().find(|name| is_similar(key, name));
        let other = other_names.iter().find(|(other, _)| other == key).map(|(_, name)| name);
        let other = other.filter(|name| !fields.contains_key(**name));
        if let Some(name) = same.or(other).or(similar) {
            let key = printable(key, KEY_CHARS);
            return Err(format!("has the key `{key}`, which is not read; did you mean `{name}`?"));
        }
    }
    Ok(())
}

/// Fails for a key that is not in `known` and names a container image, which would be run instead of
/// the data set's own, if the object has none of the keys in `known_images`.
///
/// # Errors
/// The reason, with the keys that can name an image.
pub(crate) fn check_image(
    fields: &Map<String, Value>,
    known_images: &[&str],
) -> Result<(), String> {
    let is_named = |key: &&str| fields.get(*key).is_some_and(|value| !is_blank(value));
    if known_images.iter().any(is_named) {
        return Ok(());
    }
    let names_image = |key: &str, value: &Value| {
        let is_about = key.to_lowercase().split(['_', '-', '.', ' ']).any(|word| word == "image");
        let is_reference = |text: &str| text.contains(['/', ':']) && ImageName::new(text).is_ok();
        is_about && value.as_str().is_some_and(is_reference)
    };
    let unread = fields.iter().find(|(key, value)| {
        !known_images.contains(&key.as_str()) && names_image(key.as_str(), value)
    });
    match unread {
        None => Ok(()),
        Some((key, _)) => Err(format!(
            "has the key `{}`, which is not read; name the image in {}",
            printable(key, KEY_CHARS),
            known_images.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ")
        )),
    }
}

/// Whether a value is one that tools write for a missing text.
fn is_blank(value: &Value) -> bool {
    value.is_null() || value.as_str().is_some_and(|text| text.trim().is_empty())
}

/// The keys as a list for a message, in order, without their values.
pub(crate) fn listed<'a>(keys: impl Iterator<Item = &'a String>) -> String {
    let keys: Vec<String> = keys.map(|key| format!("`{}`", printable(key, KEY_CHARS))).collect();
    let more = match keys.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match keys.get(..LISTED).unwrap_or(&keys) {
        [] => "no keys".to_owned(),
        first => format!("the keys {}{more}", first.join(", ")),
    }
}

/// The path of the first unified diff, such as `test_result.git_patch`, that `counts` by its key and text.
pub(crate) fn path_of_patch(
    fields: &Map<String, Value>,
    counts: &dyn Fn(&str, &str) -> bool,
) -> Option<String> {
    find_patch(fields, counts, DEPTH)
}

fn find_patch(
    fields: &Map<String, Value>,
    counts: &dyn Fn(&str, &str) -> bool,
    depth: usize,
) -> Option<String> {
    fields.iter().find_map(|(key, value)| {
        let name = printable(key, KEY_CHARS);
        match value {
            Value::String(text) => (is_diff(text) && counts(key, text)).then_some(name),
            Value::Object(inner) if depth > 0 => {
                find_patch(inner, counts, depth - 1).map(|path| format!("{name}.{path}"))
            }
            _ => None,
        }
    })
}

fn is_diff(text: &str) -> bool {
    let text = text.trim_start();
    text.starts_with("diff --git ") || text.starts_with("--- ") && text.contains("\n+++ ")
}

/// The letters and digits of a key, in lower case.
fn letters(key: &str) -> String {
    key.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Whether a key is `name` with one character added, dropped, changed or exchanged with the next.
fn is_similar(key: &str, name: &str) -> bool {
    name.len() >= LONG && strsim::osa_distance(&letters(key), &letters(name)) == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check_keys(fields: &Value) -> Result<(), String> {
        let known = ["model_patch", "image", "eval_script"];
        check(fields.as_object().unwrap(), &known, &[("prediction", "model_patch")])
    }

    #[test]
    fn keys_that_look_like_one_that_is_read_are_refused_with_its_name() {
        for (fields, meant) in [
            (json!({"model-patch": "x"}), "model_patch"),
            (json!({"modelPatch": "x"}), "model_patch"),
            (json!({" Model Patch": "x"}), "model_patch"),
            (json!({"model_pach": "x"}), "model_patch"),
            (json!({"model_patchs": "x"}), "model_patch"),
            (json!({"prediction": "x"}), "model_patch"),
            (json!({"iamge": "x"}), "image"),
            (json!({"image": null, "images": "x"}), "image"),
            (json!({"model_patch": null, "model-patch": "x"}), "model_patch"),
            (json!({"EVAL_SCRIPT": "x", "model_patch": "x"}), "eval_script"),
        ] {
            let reason = check_keys(&fields).unwrap_err();
            assert!(reason.ends_with(&format!("did you mean `{meant}`?")), "{fields}: {reason}");
        }
        for fields in [
            json!({}),
            json!({"model_patch": "x", "prediction": "y", "full_output": "z"}),
            json!({"image": "x", "images": ["y"]}),
            json!({"image": "x", "Image": "x"}),
            json!({"test_result": {"model-patch": "x"}, "image_tag": "x", "im": 1}),
        ] {
            assert_eq!(check_keys(&fields), Ok(()), "{fields}");
        }
    }

    #[test]
    fn a_patch_is_found_by_its_form_at_any_place() {
        let of = |fields: Value| {
            path_of_patch(fields.as_object().unwrap(), &|key, _| key != "test_patch")
        };
        let diff = "diff --git a/a b/a\n";
        assert_eq!(of(json!({"a": 1, "answer": diff})).as_deref(), Some("answer"));
        let nested = json!({"test_result": {"git_patch": format!("\n{diff}")}});
        assert_eq!(of(nested).as_deref(), Some("test_result.git_patch"));
        assert_eq!(of(json!({"x": "--- a\n+++ b\n"})).as_deref(), Some("x"));
        assert_eq!(of(json!({"test_patch": diff, "z": diff})).as_deref(), Some("z"));
        assert_eq!(of(json!({"x": "--- a", "y": ["diff --git a b"]})), None);
        let deep = json!({"a": {"b": {"c": {"d": {"e": diff}}}}});
        assert_eq!(of(deep), None);
    }

    #[test]
    fn an_image_under_another_key_is_not_ignored() {
        let of = |fields: Value| check_image(fields.as_object().unwrap(), &["image", "image_name"]);
        for fields in [
            json!({"container_image": "registry.example/a:1"}),
            json!({"Image-URL": "a/b", "image": ""}),
            json!({"image_uri": "a:1", "image_name": null}),
        ] {
            let reason = of(fields.clone()).unwrap_err();
            assert!(reason.ends_with("`image` or `image_name`"), "{fields}: {reason}");
        }
        for fields in [
            json!({"image": "a", "container_image": "b/c"}),
            json!({"image_assets": "{\"patch\": []}", "image_count": 3, "images": "a/b"}),
            json!({"image_kind": "docker"}),
        ] {
            assert_eq!(of(fields.clone()), Ok(()), "{fields}");
        }
    }

    #[test]
    fn long_lists_of_keys_are_shortened() {
        let keys: Vec<String> = (0..14).map(|n| format!("k{n}")).collect();
        assert!(listed(keys.iter()).ends_with("`k11` and 2 more"));
        assert_eq!(listed(keys.iter().take(2)), "the keys `k0`, `k1`");
        assert_eq!(listed(std::iter::empty()), "no keys");
    }
}
