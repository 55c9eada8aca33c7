//! Tokenizers and templates: those of the shipped policy, similar ones to Qwen3's, and Qwen3's own
//! if they are available.

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_rollout::{
    ChatModel, ChatOptions, ChatTemplate, History, Scaffold, train_tokenizer,
};
use serde_json::{Value, json};

const QWEN3: &str = include_str!("../data/qwen3_like.jinja");

/// The regular expression by which Qwen's tokenizers split text.
const QWEN_PIECES: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A model's folder, its template and how its messages are marked.
pub(crate) struct Model {
    _temp_dir: Option<tempfile::TempDir>,
    folder: Utf8PathBuf,
    pub(crate) template: ChatTemplate,
    /// The end of a prompt that opens the thinking, or empty; `None` for a model that does not
    /// think.
    pub(crate) thinks: Option<&'static str>,
    /// The text before and after a tool message.
    pub(crate) tool: (&'static str, &'static str),
}

impl Model {
    pub(crate) fn chat(&self, scaffold: Scaffold, history: History) -> ChatModel {
        let options = ChatOptions { scaffold, history, ..ChatOptions::default() };
        ChatModel::load_for(&self.folder, options).unwrap()
    }
}

/// The shipped policy for the micro tasks.
pub(crate) fn micro() -> Model {
    let root = Utf8Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("../../environments/micro/policy");
    let template = root.join("../../environments/micro/chat_template.jinja");
    let template = ChatTemplate::new(&std::fs::read_to_string(template).unwrap()).unwrap();
    Model {
        _temp_dir: None,
        folder,
        template,
        thinks: None,
        tool: ("<|im_start|>tool\n", "<|im_end|>"),
    }
}

/// A tokenizer with few merges, but with Qwen3's normalizer, splitting and added tokens.
pub(crate) fn qwen3_like(thinks_first: bool) -> Model {
    let kept = tempfile::tempdir().unwrap();
    let folder = Utf8PathBuf::from_path_buf(kept.path().to_owned()).unwrap();
    let header = if thinks_first { "<think>\n" } else { "" };
    let end = "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}";
    assert!(QWEN3.trim_end().ends_with(end));
    let open =
        format!("{{{{- '<|im_start|>assistant\\n{}' }}}}\n{{%- endif %}}", header.escape_default());
    let source = QWEN3.trim_end().replace(end, &open);
    let corpus = "def total(items):\n\n    return sum(items)\n\n\nthe issue, the file; what\n\n";
    let corpus = std::iter::repeat_n(corpus.to_owned(), 4);
    train_tokenizer(corpus, 320, &source, &folder).unwrap();

    let file = folder.join("tokenizer.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let mut next = json["model"]["vocab"].as_object().unwrap().len();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for token in added.iter_mut().filter(|t| t["content"].as_str().unwrap().contains("tool")) {
        token["special"] = false.into();
    }
    let tags = ["<tool_response>", "</tool_response>", "<think>", "</think>", "<|fim_prefix|>"];
    for tag in tags {
        added.push(json!({
            "id": next, "content": tag, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        }));
        next += 1;
    }
    json["normalizer"] = json!({"type": "NFC"});
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN_PIECES}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
    ]});
    std::fs::write(&file, json.to_string()).unwrap();
    Model {
        _temp_dir: Some(kept),
        folder,
        template: ChatTemplate::new(&source).unwrap(),
        thinks: Some(header),
        tool: ("<tool_response>\n", "\n</tool_response>"),
    }
}

/// Qwen3's own files, from the folder named by `ORCHESTRATE_QWEN3`.
pub(crate) fn qwen3() -> Option<Model> {
    let Ok(folder) = std::env::var("ORCHESTRATE_QWEN3") else {
        let why = "ORCHESTRATE_QWEN3 is not set to a folder with Qwen3's tokenizer";
        orchestrate_e2e::skip::skip("qwen3", why);
        return None;
    };
    let folder = Utf8PathBuf::from(folder);
    let source = std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap_or_else(|_| {
        let config = std::fs::read_to_string(folder.join("tokenizer_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        config["chat_template"].as_str().unwrap().to_owned()
    });
    let thinks_first = source.contains("<|im_start|>assistant\\n<think>\\n");
    Some(Model {
        _temp_dir: None,
        folder,
        template: ChatTemplate::new(&source).unwrap(),
        thinks: Some(if thinks_first { "<think>\n" } else { "" }),
        tool: ("<tool_response>\n", "\n</tool_response>"),
    })
}
