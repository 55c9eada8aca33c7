//! What a model's folder says about its chat template: its text, and the special tokens that it reads.

use crate::chat::ChatErrorKind;
use camino::Utf8Path;
use orchestrate_types::TokenId;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io;

pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// The special tokens that templates read by name.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

pub(crate) fn malformed(
    file: &'static str,
    source: impl std::error::Error + Send + Sync + 'static,
) -> ChatErrorKind {
    ChatErrorKind::Malformed { file, source: Box::new(source) }
}

pub(crate) fn json_file(folder: &Utf8Path, name: &'static str) -> Result<Value, ChatErrorKind> {
    let text = fs_err::read_to_string(folder.join(name))?;
    serde_json::from_str(&text).map_err(|e| malformed(name, e))
}

/// The source of the chat template: `chat_template.jinja`, else the field of the tokenizer's settings.
pub(crate) fn template_source(folder: &Utf8Path, config: &Value) -> Result<String, ChatErrorKind> {
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        return Ok(fs_err::read_to_string(file)?);
    }
    let template = config.get("chat_template");
    let named = || {
        let list = template?.as_array()?;
        let default = |entry: &&Value| entry.get("name").is_some_and(|name| name == "default");
        list.iter().find(default)?.get("template")?.as_str()
    };
    let source = template.and_then(|t| t.as_str()).or_else(named);
    source.map(ToOwned::to_owned).ok_or(ChatErrorKind::Incomplete {
        file: TOKENIZER_CONFIG,
        problem: "has no chat_template, and the folder has no chat_template.jinja",
    })
}

/// The special tokens of a tokenizer by name; `None` for those that it declares not to have. Its settings
/// come before the older `special_tokens_map.json`.
pub(crate) fn special_tokens(
    folder: &Utf8Path,
    config: &Value,
) -> Result<BTreeMap<String, Option<String>>, ChatErrorKind> {
    let has_older = folder.join(SPECIAL_TOKENS_MAP).is_file();
    let older = if has_older { json_file(folder, SPECIAL_TOKENS_MAP)? } else { Value::Null };
    let mut tokens = BTreeMap::new();
    for name in SPECIAL_TOKENS {
        if let Some(value) = config.get(name).or_else(|| older.get(name)) {
            tokens.insert(name.to_owned(), token_text(name, value)?);
        }
    }
    let extra = config.get("extra_special_tokens").and_then(Value::as_object);
    for (name, value) in extra.unwrap_or(&Map::new()) {
        tokens.insert(name.clone(), token_text(name, value)?);
    }
    Ok(tokens)
}

/// A token's text, which may be in an object with its options; `None` for `null`.
///
/// # Errors
/// For any other value: prompts would silently lack the token.
fn token_text(name: &str, value: &Value) -> Result<Option<String>, ChatErrorKind> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    if text.is_none() && !value.is_null() {
        let problem = format!("{name} is neither a text nor an object with a text as `content`");
        return Err(malformed(TOKENIZER_CONFIG, io::Error::other(problem)));
    }
    Ok(text.map(ToOwned::to_owned))
}

/// The ids of the tokens that end a turn by `generation_config.json`; none if there is no such file.
///
/// # Errors
/// If an id is not one: turns would not end where the model ends them.
pub(crate) fn end_token_ids(folder: &Utf8Path) -> Result<Vec<TokenId>, ChatErrorKind> {
    if !folder.join(GENERATION_CONFIG).is_file() {
        return Ok(Vec::new());
    }
    let generation = json_file(folder, GENERATION_CONFIG)?;
    let ids = match generation.get("eos_token_id") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(ids)) => ids.iter().collect(),
        Some(id) => vec![id],
    };
    let id_of = |id: &Value| {
        let number = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
        let problem = || io::Error::other(format!("eos_token_id: {id} is not the id of a token"));
        number.ok_or_else(|| malformed(GENERATION_CONFIG, problem()))
    };
    ids.into_iter().map(id_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn special_tokens_are_texts_or_objects_of_either_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(folder.path()).unwrap();
        let older = json!({"bos_token": "<old>", "unk_token": {"content": "<unk>"}});
        fs_err::write(path.join(SPECIAL_TOKENS_MAP), older.to_string()).unwrap();
        let config = json!({
            "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
            "extra_special_tokens": {"image_token": "<image>"},
        });
        let found = special_tokens(path, &config).unwrap();
        let text = |text: &str| Some(text.to_owned());
        let expected = [
            ("bos_token", text("<s>")),
            ("eos_token", text("</s>")),
            ("image_token", text("<image>")),
            ("pad_token", None),
            ("unk_token", text("<unk>")),
        ];
        assert_eq!(found, expected.map(|(name, text)| (name.to_owned(), text)).into());
    }

    #[test]
    fn values_that_are_not_tokens_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(folder.path()).unwrap();
        for value in [
            json!(5),
            json!(true),
            json!(["<s>"]),
            json!({"text": "<s>"}),
            json!({"content": null}),
        ] {
            for config in
                [json!({"bos_token": value}), json!({"extra_special_tokens": {"bos_token": value}})]
            {
                let error = special_tokens(path, &config).unwrap_err().to_string();
                assert!(error.contains("bos_token is neither a text"), "{value}: {error}");
            }
        }
        assert!(end_token_ids(path).unwrap().is_empty());
        let with = |ids: Value| {
            let text = json!({"eos_token_id": ids}).to_string();
            fs_err::write(path.join(GENERATION_CONFIG), text).unwrap();
            end_token_ids(path).map_err(|error| error.to_string())
        };
        for (ids, expected) in [
            (json!(7), vec![7]),
            (json!([7, 0]), vec![7, 0]),
            (json!([]), vec![]),
            (Value::Null, vec![]),
        ] {
            assert_eq!(with(ids), Ok(expected));
        }
        for id in
            [json!("7"), json!(-1), json!(7.0), json!(1_u64 << 32), json!({"id": 7}), Value::Null]
        {
            let error = with(json!([7, id])).unwrap_err();
            assert!(error.contains(&format!("eos_token_id: {id} is not")), "{error}");
        }
    }
}
