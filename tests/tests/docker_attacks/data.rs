//! Reads `tests/attacks`: attacks written by hand, and payloads combined with places.

use crate::families::{Family, Target};
use orchestrate_e2e::root;
use serde::Deserialize;
use std::collections::BTreeMap;

/// An attack on one family: what the agent runs, one command per turn.
#[derive(Debug, Clone)]
pub(crate) struct Attack {
    pub(crate) name: String,
    pub(crate) tries: String,
    /// What the last command prints, which shows that the trap was set.
    pub(crate) says: String,
    /// Whether it may take minutes, because something must time out.
    pub(crate) slow: bool,
    pub(crate) commands: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    #[serde(default)]
    attack: Vec<Entry>,
    #[serde(default)]
    payload: Vec<Payload>,
    #[serde(default)]
    place: Vec<Entry>,
}

/// An attack, or with `@CODE@` in place of a payload's code a place.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    tries: String,
    families: Option<Vec<Family>>,
    #[serde(default = "armed")]
    says: String,
    #[serde(default)]
    slow: bool,
    /// Shell commands.
    #[serde(default)]
    commands: Vec<String>,
    /// Files to write, by path.
    #[serde(default)]
    files: BTreeMap<String, String>,
    head: Option<Head>,
    /// Replaces the tested module.
    whole: Option<String>,
}

/// Code in front of the tested module; `true` in a place stands for the payload.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Head {
    Payload(bool),
    Code(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Payload {
    name: String,
    tries: String,
    code: String,
}

fn armed() -> String {
    "armed".to_owned()
}

/// A command that writes a file.
pub(crate) fn file(path: &str, content: &str) -> String {
    let content = content.trim_end_matches('\n');
    format!(
        "mkdir -p \"$(dirname '{path}')\"; cat > '{path}' <<'END_OF_FILE'\n{content}\nEND_OF_FILE"
    )
}

impl Entry {
    fn attack(&self, name: String, tries: &str, code: &str, target: &Target) -> Attack {
        let fill = |text: &str| target.fill(&text.replace("@CODE@", code));
        let mut commands: Vec<String> = Vec::new();
        let mut written: Vec<String> =
            self.files.iter().map(|(path, text)| file(&fill(path), &fill(text))).collect();
        match &self.head {
            Some(Head::Code(head)) => {
                written.push(file(&target.module, &fill(&format!("{head}\n@SOURCE@"))));
            }
            Some(Head::Payload(true)) => {
                written.push(file(&target.module, &fill("@CODE@\n@SOURCE@")));
            }
            Some(Head::Payload(false)) | None => {}
        }
        written.extend(self.whole.iter().map(|whole| file(&target.module, &fill(whole))));
        if !written.is_empty() {
            written.push("git add -Af . 2> /dev/null; echo armed".to_owned());
            commands.push(written.join("\n"));
        }
        commands.extend(self.commands.iter().map(|command| fill(command)));
        let (says, slow) = (self.says.clone(), self.slow);
        Attack { name, tries: tries.to_owned(), says, slow, commands }
    }

    fn is_for(&self, family: Family) -> bool {
        self.families.as_ref().is_none_or(|families| families.contains(&family))
    }
}

fn pages() -> Vec<Page> {
    let mut paths: Vec<_> = std::fs::read_dir(root().join("tests/attacks"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "toml"))
        .collect();
    paths.sort_unstable();
    let read = |path| toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    paths.iter().map(read).collect()
}

/// All attacks on a family, in a fixed order.
pub(crate) fn attacks(family: Family, target: &Target) -> Vec<Attack> {
    let pages = pages();
    let mut found = Vec::new();
    for entry in pages.iter().flat_map(|page| &page.attack).filter(|entry| entry.is_for(family)) {
        found.push(entry.attack(entry.name.clone(), &entry.tries, "", target));
    }
    for place in pages.iter().flat_map(|page| &page.place).filter(|place| place.is_for(family)) {
        for payload in pages.iter().flat_map(|page| &page.payload) {
            let name = format!("{}@{}", payload.name, place.name);
            found.push(place.attack(name, &payload.tries, &payload.code, target));
        }
    }
    found
}
