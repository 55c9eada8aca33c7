//! Configuration files and assignments: any text gives values or problems that name their place, and
//! what was merged fits the schema's form again.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use orchestrate_fuzz::input::{self, Change};
use orchestrate_settings::{Layers, schemars};
use std::collections::BTreeMap;

/// Settings with every form that the program's own have.
#[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct Settings {
    steps: u32,
    rate: f64,
    on: bool,
    name: Option<String>,
    kind: Kind,
    hosts: Vec<Host>,
    env: BTreeMap<String, String>,
}

#[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Small,
    Large,
}

#[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct Host {
    url: String,
    slots: Option<u32>,
}

const FILE: &str = "steps = 3\nrate = 1e-4\non = true\nname = \"é\"\nkind = \"small\"\n\
                    hosts = [{ url = \"tcp://a:1\", slots = 2 }]\n[env]\nA = '''x\ny'''\n";
const PIECES: [&str; 24] = [
    "steps",
    "rate",
    "on",
    "name",
    "kind",
    "hosts",
    "env.A",
    "env",
    "=",
    " = ",
    "\n",
    "[",
    "]",
    "[[",
    "{",
    "}",
    "\"",
    "'''",
    "1979-05-27T07:32:00Z",
    "0xFFFFFFFFFFFFFFFFF",
    "nan",
    "\u{feff}",
    "\\u12",
    ".",
];

#[derive(Debug, Arbitrary)]
struct Input {
    changes: Vec<Change>,
    pieces: Vec<u8>,
    assignments: Vec<Vec<u8>>,
}

fn text(pieces: &[u8]) -> String {
    pieces.iter().map(|&piece| PIECES[usize::from(piece) % PIECES.len()]).collect()
}

fuzz_target!(|input: Input| {
    let mut file = FILE.as_bytes().to_vec();
    file.extend(text(&input.pieces).bytes());
    input::change(&mut file, &input.changes);
    let mut layers = Layers::of::<Settings>();
    layers.add_file("run.toml", &String::from_utf8_lossy(&file));
    for assignment in input.assignments.iter().take(3) {
        layers.add_assignment(&text(assignment));
    }
    let (table, origins, mut problems) = layers.finish();
    origins.locate(&mut problems);
    for problem in &problems {
        assert!(!problem.to_string().is_empty());
    }
    if problems.is_empty() {
        let fits: Result<Settings, _> = table.try_into();
        if let Err(error) = fits {
            let message = error.to_string();
            assert!(!message.is_empty());
        }
    }
});
