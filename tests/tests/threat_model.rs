//! Every test and every attack that the threat model names exists.

#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::collections::BTreeSet;
use std::process::Command;

/// Names of all test functions, and of the attacks in `tests/attacks`.
fn known() -> BTreeSet<String> {
    let root = orchestrate_e2e::root();
    let listed = Command::new("git")
        .args([
            "ls-files",
            "-co",
            "--exclude-standard",
            "--",
            "*.rs",
            "*.py",
            "tests/attacks/*.toml",
        ])
        .current_dir(&root)
        .output()
        .unwrap();
    let mut names = BTreeSet::new();
    for path in String::from_utf8(listed.stdout).unwrap().lines() {
        let Ok(text) = std::fs::read_to_string(root.join(path)) else { continue };
        for line in text.lines().map(str::trim_start) {
            let line = line.strip_prefix("async ").unwrap_or(line);
            let line = line.strip_prefix("pub ").unwrap_or(line);
            let function = line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "));
            let attack =
                line.strip_prefix("name = \"").filter(|_| path.starts_with("tests/attacks/"));
            if let Some(name) = function.or(attack) {
                let end = |c: char| !c.is_alphanumeric() && c != '_';
                names.insert(name.split(end).next().unwrap_or_default().to_owned());
            }
        }
    }
    names
}

/// The words in code spans of the last column of every table.
fn named(page: &str) -> Vec<(usize, String)> {
    let mut names = Vec::new();
    for (number, line) in page.lines().enumerate().filter(|(_, line)| line.starts_with("| ")) {
        let last = line.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
        names.extend(last.split('`').skip(1).step_by(2).map(|name| (number + 1, name.to_owned())));
    }
    names
}

#[test]
fn every_test_that_the_threat_model_names_exists() {
    let page = std::fs::read_to_string(orchestrate_e2e::root().join("docs/src/threat-model.md"));
    let page = page.unwrap();
    let (known, named) = (known(), named(&page));
    assert!(named.len() > 40, "{} tests are named", named.len());
    let missing: Vec<_> = named.iter().filter(|(_, name)| !known.contains(name)).collect();
    assert!(missing.is_empty(), "tests and attacks that do not exist (line, name): {missing:?}");
}

#[test]
fn every_line_of_the_threat_model_has_a_test() {
    let page = std::fs::read_to_string(orchestrate_e2e::root().join("docs/src/threat-model.md"));
    let page = page.unwrap();
    let mut in_risks = false;
    for line in page.lines() {
        in_risks |= line.starts_with("## Residual risks");
        let is_row = line.starts_with("| ") && line.matches(" | ").count() == 2;
        if !in_risks && is_row && !line.starts_with("| Must never") {
            assert!(!named(line).is_empty(), "no test is named: {line}");
        }
    }
}
