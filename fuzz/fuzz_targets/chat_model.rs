//! Tokenizer and template files of a model, and the messages that are rendered with them: a changed folder
//! loads or is refused, and text from outside never becomes a control token.
#![no_main]

use camino::Utf8PathBuf;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_rollout::{
    CONTROL_TOKENS, ChatModel, ChatTemplate, MICRO_CHAT_TEMPLATE, Message, train_tokenizer,
};
use std::sync::OnceLock;

const PIECES: [&str; 12] = [
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "assistant\n",
    "{{ messages }}",
    "{% raw %}",
    "\u{feff}",
    "é",
    " ",
    "\0",
    "<tool_call>",
];

#[derive(Debug, Arbitrary)]
struct Input {
    /// 0: none, 1: the tokenizer's configuration, 2: the tokenizer, 3: the template.
    file: u8,
    changes: Vec<Change>,
    text: Vec<u8>,
}

struct Folder {
    path: Utf8PathBuf,
    files: [(&'static str, Vec<u8>); 2],
    model: ChatModel,
}

/// A folder in memory, one per process.
fn folder() -> &'static Folder {
    static FOLDER: OnceLock<Folder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Utf8PathBuf::from(format!("/dev/shm/orchestrate-chat-{}", std::process::id()));
        let corpus = std::iter::repeat_n("assistant x and y".to_owned(), 3);
        train_tokenizer(corpus, 300, MICRO_CHAT_TEMPLATE, &path).expect("/dev/shm is writable");
        let read = |name| (name, std::fs::read(path.join(name)).expect("it was written"));
        let files = ["tokenizer_config.json", "tokenizer.json"].map(read);
        let model = ChatModel::load(&path).expect("a valid folder");
        Folder { path, files, model }
    })
}

fn user(content: &str) -> Message {
    Message { role: "user".to_owned(), content: content.to_owned(), ..Message::default() }
}

/// Loads the folder with one file changed.
fn load(folder: &Folder, (name, bytes): &(&str, Vec<u8>), changes: &[Change]) {
    let mut changed = bytes.clone();
    input::change(&mut changed, changes);
    std::fs::write(folder.path.join(name), &changed).expect("write");
    let loaded = ChatModel::load(&folder.path);
    assert!(loaded.is_ok() || changed != *bytes, "{loaded:?}");
    std::fs::write(folder.path.join(name), bytes).expect("write");
}

/// How many tokens are control tokens, whose ids come first.
fn controls(tokens: &[u32]) -> usize {
    tokens.iter().filter(|&&id| (id as usize) < CONTROL_TOKENS.len()).count()
}

fuzz_target!(|input: Input| {
    let folder = folder();
    let pieces = input.text.iter().map(|&piece| PIECES[usize::from(piece) % PIECES.len()]);
    let mut text = pieces.collect::<String>().into_bytes();
    match input.file % 4 {
        0 => {
            input::change(&mut text, &input.changes);
            let text = String::from_utf8_lossy(&text);
            let found = folder.model.prompt(&[user(&text)]).expect("any text can be rendered");
            let plain = folder.model.prompt(&[user("x")]).expect("any text can be rendered");
            assert_eq!(controls(&found), controls(&plain), "{text:?}");
        }
        3 => {
            let mut source = MICRO_CHAT_TEMPLATE.as_bytes().to_vec();
            input::change(&mut source, &input.changes);
            if let Ok(template) = ChatTemplate::new(&String::from_utf8_lossy(&source)) {
                let text = String::from_utf8_lossy(&text);
                let _ = template.render(&[user(&text)], &[], true);
            }
        }
        file => load(folder, &folder.files[usize::from(file) - 1], &input.changes),
    }
});
