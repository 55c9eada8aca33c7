//! Names of types, modules, settings and metrics do not use the words that the glossary replaces.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// The words of a name in any spelling, `ExternalWorker` or `external-worker`, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in name.chars() {
        if !c.is_alphanumeric() || c.is_uppercase() {
            words.push(String::new());
        }
        if c.is_alphanumeric() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// What is not to be written, each with the term to write: the last column of the glossary without italics.
fn replaced(glossary: &str) -> Vec<(Vec<String>, String)> {
    let rows =
        glossary.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| Term"));
    rows.flat_map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let not = cells[2].split(',').map(str::trim);
        not.filter(|word| !word.is_empty() && !word.starts_with('*'))
            .map(|word| (words(word), cells[0].to_owned()))
            .collect::<Vec<_>>()
    })
    .collect()
}

/// The names that a source file gives to types and modules.
fn declared(text: &str) -> Vec<String> {
    let kinds = ["struct", "enum", "trait", "mod", "type", "union", "class"];
    let lines = text.lines().map(str::trim_start);
    lines
        .filter_map(|line| {
            let mut parts = line.split_whitespace();
            let mut word = parts.next()?;
            if word.starts_with("pub") {
                word = parts.next()?;
            }
            let name = kinds.contains(&word).then(|| parts.next())??;
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            Some(name[..end].to_owned())
        })
        .collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && !["target", "data", "build"].contains(&name) && !name.starts_with('.') {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs" || end == "py") {
            found.push(path);
        }
    }
}

/// Keys of the settings and names of the metrics, as their pages list them.
fn listed(page: &str) -> Vec<String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once('`').map(|(name, _)| name.to_owned())).collect()
}

/// Every name, and where it is.
fn names() -> BTreeMap<String, String> {
    let root = root();
    let mut files = Vec::new();
    for folder in ["crates", "tests", "trainer", "clients"] {
        sources(&root.join(folder), &mut files);
    }
    let mut names = BTreeMap::new();
    for path in files {
        let place = path.strip_prefix(&root).unwrap().display().to_string();
        names.extend(declared(&read(&path)).into_iter().map(|name| (name, place.clone())));
    }
    for page in ["settings", "metrics"] {
        let path = format!("docs/src/{page}.md");
        let listed = listed(&read(&root.join(&path)));
        assert!(listed.len() > 50, "{path} lists {} names", listed.len());
        names.extend(listed.into_iter().map(|name| (name, path.clone())));
    }
    names
}

fn violations(names: &BTreeMap<String, String>, replaced: &[(Vec<String>, String)]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, place) in names {
        let parts = words(name);
        for (not, term) in replaced {
            if parts.windows(not.len()).any(|part| part == not.as_slice()) {
                let not = not.join(" ");
                found.push(format!("{name} ({place}) says {not:?}; the glossary says {term:?}"));
            }
        }
    }
    found
}

#[test]
fn names_use_the_words_of_the_glossary() {
    let replaced = replaced(&read(&root().join("docs/src/glossary.md")));
    assert!(replaced.len() > 15, "{replaced:?}");
    assert_eq!(violations(&names(), &replaced), [] as [&str; 0]);
}

#[test]
fn other_words_are_found_in_any_spelling() {
    let glossary = "| Term | Meaning | Not |\n|---|---|---|\n\
                    | out of service | not given requests | away, taken out |\n\
                    | journal | the database | *book* |\n";
    let replaced = replaced(glossary);
    let names =
        ["AwayTimeout", "pub(crate) enum", "engine.away_timeout", "times_taken_out", "Book"];
    let names = names.into_iter().map(|name| (name.to_owned(), "x.rs".to_owned())).collect();
    let found = violations(&names, &replaced);
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(
        declared("pub(crate) struct Away<T> {\n    mod ledger;\nclass Book(Base):"),
        ["Away", "ledger", "Book"]
    );
}
