//! The chat templates of model families render as `transformers` renders them, byte for byte.
//!
//! `ORCHESTRATE_TEMPLATES` names a folder of templates (`NAME.jinja`), which are not part of the repository,
//! and `ORCHESTRATE_TRANSFORMERS_PYTHON` a Python with `transformers`. The conversations are in
//! `data/conversations.json`. A conversation that a template refuses in Python must be refused here, too, except
//! for errors of Python's types.
//! The test prints a table of all templates.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use orchestrate_e2e::skip;
use orchestrate_rollout::ChatTemplate;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const CONVERSATIONS: &str = include_str!("data/conversations.json");
const RENDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/render.py");

/// How many conversations of a template had which result.
#[derive(Debug, Default)]
struct Counts {
    same: usize,
    refused: usize,
    /// Python refuses them.
    only_here: usize,
    different: Vec<String>,
}

/// What Python renders: by template, one document for each conversation.
type Expected = BTreeMap<String, Vec<Value>>;

/// The folder of templates and the Python; `None`, reported as a skip, where one is absent.
fn found() -> Option<(PathBuf, String)> {
    let need = "templates";
    let Some(folder) = std::env::var_os("ORCHESTRATE_TEMPLATES").map(PathBuf::from) else {
        skip::skip(need, "ORCHESTRATE_TEMPLATES does not name a folder of chat templates");
        return None;
    };
    let python = std::env::var("ORCHESTRATE_TRANSFORMERS_PYTHON").unwrap_or("python3".into());
    let able = Command::new(&python).args(["-c", "import transformers, jinja2"]).output();
    if able.is_ok_and(|output| output.status.success()) {
        return Some((folder, python));
    }
    skip::skip(
        need,
        "ORCHESTRATE_TRANSFORMERS_PYTHON is not a Python with transformers and jinja2",
    );
    None
}

fn special_tokens() -> BTreeMap<String, Option<String>> {
    let token = |name: &str| (format!("{name}_token"), Some(format!("<{}>", name.to_uppercase())));
    ["bos", "eos", "pad", "unk"].map(token).into()
}

fn by_python(folder: &std::path::Path, python: &str, conversations: &[Value]) -> Expected {
    let mut child = Command::new(python)
        .arg(RENDER)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let job = json!({
        "folder": folder, "conversations": conversations, "special_tokens": special_tokens(),
    });
    child.stdin.take().unwrap().write_all(job.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{RENDER} failed");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn by_us(template: &Result<ChatTemplate, String>, conversation: &Value) -> Result<String, String> {
    let template = template.as_ref().map_err(Clone::clone)?;
    let list = |name: &str| conversation[name].as_array().cloned().unwrap_or_default();
    let variables = conversation["variables"].as_object().cloned().unwrap_or_else(Map::new);
    let prompts = conversation["add_generation_prompt"].as_bool().unwrap_or(true);
    let rendered = template.render_values(&list("messages"), &list("tools"), &variables, prompts);
    rendered.map_err(|error| error.to_string())
}

/// The place where two texts begin to differ.
fn difference(ours: &str, theirs: &str) -> String {
    let at = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
    let start = ours.floor_char_boundary(at.saturating_sub(30));
    let end = |text: &str| text.ceil_char_boundary((at + 40).min(text.len()));
    format!("{:?} instead of {:?}", &ours[start..end(ours)], &theirs[start..end(theirs)])
}

#[test]
fn templates_of_model_families_render_as_in_transformers() {
    let Some((folder, python)) = found() else { return };
    let conversations: Vec<Value> = serde_json::from_str(CONVERSATIONS).unwrap();
    let expected = by_python(&folder, &python, &conversations);
    assert!(!expected.is_empty(), "{} has no *.jinja", folder.display());
    let mut table = BTreeMap::<String, Counts>::new();
    for (name, texts) in &expected {
        let source = fs_err::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template =
            ChatTemplate::with_variables(&source, &special_tokens(), jiff::Timestamp::now());
        let template = template.map_err(|error| error.to_string());
        let counts = table.entry(name.clone()).or_default();
        for (conversation, theirs) in conversations.iter().zip(texts) {
            let ours = by_us(&template, conversation);
            let case = conversation["name"].as_str().unwrap();
            match (ours, theirs["text"].as_str(), theirs["error"].as_str()) {
                (Ok(ours), Some(theirs), _) if ours == theirs => counts.same += 1,
                (Err(_), _, Some(_)) => counts.refused += 1,
                (Ok(ours), Some(theirs), _) => {
                    counts.different.push(format!("{case}: {}", difference(&ours, theirs)));
                }
                // Python does not iterate over `None`, and does not write what `map` gives as JSON.
                (Ok(_), _, Some(error)) if error.starts_with("TypeError") => counts.only_here += 1,
                (Ok(_), _, error) => {
                    counts.different.push(format!("{case}: refused in Python: {error:?}"));
                }
                // A template that is refused by name is never used.
                (Err(_), ..) if template.is_err() => counts.refused += 1,
                (Err(error), ..) => counts.different.push(format!("{case}: {error}")),
            }
        }
    }
    let mut report = String::from("same refused only-here different template\n");
    let mut differences = String::new();
    for (name, Counts { same, refused, only_here, different }) in &table {
        writeln!(report, "{same:4} {refused:7} {only_here:9} {:9} {name}", different.len())
            .unwrap();
        for line in different {
            writeln!(differences, "{name}: {line}").unwrap();
        }
    }
    orchestrate_e2e::say(&report);
    assert!(differences.is_empty(), "{differences}");
}
