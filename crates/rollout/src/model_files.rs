//! What a model's folder says about its chat template: its text, and the special tokens that it reads.

use crate::chat::ChatErrorKind;
use camino::Utf8Path;
use orchestrate_types::{TokenId, UniqueKeys};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// A folder of templates with names.
const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";

/// An entry of a list of templates.
#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

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
    let UniqueKeys(value) = serde_json::from_str(&text).map_err(|e| malformed(name, e))?;
    Ok(value)
}

/// The value of a file that a folder may lack; `null` without one.
fn optional_json_file(folder: &Utf8Path, name: &'static str) -> Result<Value, ChatErrorKind> {
    match json_file(folder, name) {
        Err(ChatErrorKind::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        result => result,
    }
}

/// The sources of a model's chat templates, as `transformers` finds them: the files
/// `chat_template.jinja` (`default`) and `additional_chat_templates/NAME.jinja`; without any of them, the
/// field `chat_template` of the tokenizer's settings, which is one template or a list with names.
#[derive(Debug)]
pub(crate) struct TemplateSources {
    default: Option<String>,
    /// The template for prompts with tools.
    pub(crate) tool_use: Option<String>,
}

impl TemplateSources {
    pub(crate) fn read(folder: &Utf8Path, config: &Value) -> Result<Self, ChatErrorKind> {
        let read = |name: &str| match fs_err::read_to_string(folder.join(name)) {
            Ok(source) => Ok(Some(source)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let default = read("chat_template.jinja")?;
        let of_folder = |name: &str| read(&format!("{ADDITIONAL_TEMPLATES}/{name}.jinja"));
        let default = of_folder("default")?.or(default);
        let tool_use = of_folder("tool_use")?;
        if default.is_some() || tool_use.is_some() {
            return Ok(Self { default, tool_use });
        }
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(Self { default, tool_use }),
            Some(Value::String(source)) => Ok(Self { default: Some(source.clone()), tool_use }),
            Some(list) => {
                let entries: Vec<NamedTemplate> = Deserialize::deserialize(list)
                    .map_err(|e| malformed(TOKENIZER_CONFIG, in_field("chat_template", &e)))?;
                let named = |name: &str| {
                    let found = entries.iter().rev().find(|entry| entry.name == name);
                    found.map(|entry| entry.template.clone())
                };
                Ok(Self { default: named("default"), tool_use: named("tool_use") })
            }
        }
    }

    /// The source for prompts that have tools, or have none.
    pub(crate) fn for_prompts(&self, have_tools: bool) -> Result<&str, ChatErrorKind> {
        let tool_use = self.tool_use.as_deref().filter(|_| have_tools);
        tool_use.or(self.default.as_deref()).ok_or(ChatErrorKind::Incomplete {
            file: TOKENIZER_CONFIG,
            problem: "has no chat_template (of a list: none with the name default), and the folder has \
                      no chat_template.jinja",
        })
    }
}

fn in_field(field: &str, error: &serde_json::Error) -> io::Error {
    io::Error::other(format!("{field}: {error}"))
}

/// The special tokens of a tokenizer by name; `None` for those that it declares not to have. Its settings
/// come before the older `special_tokens_map.json`.
pub(crate) fn special_tokens(
    folder: &Utf8Path,
    config: &Value,
) -> Result<BTreeMap<String, Option<String>>, ChatErrorKind> {
    let older = optional_json_file(folder, SPECIAL_TOKENS_MAP)?;
    let mut tokens = BTreeMap::new();
    for name in SPECIAL_TOKENS {
        if let Some(value) = config.get(name).or_else(|| older.get(name)) {
            tokens.insert(name.to_owned(), token_text(name, value)?);
        }
    }
    match config.get("extra_special_tokens") {
        // A list has tokens without names, which no template can read.
        None | Some(Value::Null | Value::Array(_)) => {}
        Some(Value::Object(extra)) => {
            for (name, value) in extra {
                tokens.insert(name.clone(), token_text(name, value)?);
            }
        }
        Some(_) => {
            let problem = "extra_special_tokens is neither a list nor an object";
            return Err(malformed(TOKENIZER_CONFIG, io::Error::other(problem)));
        }
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
    let generation = optional_json_file(folder, GENERATION_CONFIG)?;
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
        for extra in [json!("<image>"), json!(7), json!(false)] {
            let config = json!({"extra_special_tokens": extra});
            let error = special_tokens(path, &config).unwrap_err().to_string();
            assert!(error.contains("extra_special_tokens is neither"), "{error}");
        }
        assert!(
            special_tokens(path, &json!({"extra_special_tokens": ["<image>"]})).unwrap().is_empty()
        );
        assert!(end_token_ids(path).unwrap().is_empty());
        fs_err::write(path.join(GENERATION_CONFIG), r#"{"eos_token_id": 1, "eos_token_id": 2}"#)
            .unwrap();
        let error = end_token_ids(path).unwrap_err().to_string();
        assert!(error.contains("\"eos_token_id\" occurs twice"), "{error}");
        fs_err::remove_file(path.join(GENERATION_CONFIG)).unwrap();
        fs_err::create_dir(path.join(GENERATION_CONFIG)).unwrap();
        let error = end_token_ids(path).unwrap_err().to_string();
        assert!(error.contains(GENERATION_CONFIG), "a folder in its place: {error}");
        fs_err::remove_dir(path.join(GENERATION_CONFIG)).unwrap();
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
