//! Code that runs at build time and `unsafe` code are exactly what the committed lists name.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The Rust files below `folder`, by path from the root of the repository.
fn rust_files(folder: &str) -> Vec<(String, String)> {
    let root = orchestrate_e2e::root();
    let mut found = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && path.file_name().unwrap() != "target" {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found
}

/// The line without its comment and the contents of its string literals.
fn code(line: &str) -> String {
    let line = line.split("//").next().unwrap_or_default();
    line.split('"').step_by(2).collect()
}

/// Lines, from 0, on which the keyword `unsafe` stands: blocks, functions, implementations, external
/// blocks and attributes.
fn unsafe_lines(text: &str) -> Vec<usize> {
    let is_keyword = |line: &str| {
        let line = code(line);
        line.match_indices("unsafe").any(|(at, word)| {
            let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
            let before = line[..at].chars().next_back();
            let after = line[at + word.len()..].chars().next();
            !before.is_some_and(part_of_name) && !after.is_some_and(part_of_name)
        })
    };
    text.lines().enumerate().filter(|(_, line)| is_keyword(line)).map(|(at, _)| at).collect()
}

/// The table of docs/src/unsafe.md: file → number of uses, reason and check.
fn listed() -> BTreeMap<String, (usize, String, String)> {
    let page = orchestrate_e2e::root().join("docs/src/unsafe.md");
    let text = std::fs::read_to_string(page).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 6, "{row}");
        let file = cells[1].trim_matches('`').to_owned();
        (file, (cells[2].parse().unwrap(), cells[3].to_owned(), cells[4].to_owned()))
    })
    .collect()
}

#[test]
fn unsafe_code_is_listed_with_its_reason() {
    let mut found = BTreeMap::new();
    for (file, text) in ["crates", "tests", "fuzz"].into_iter().flat_map(rust_files) {
        let uses = unsafe_lines(&text).len();
        if uses > 0 {
            found.insert(file, uses);
        }
    }
    let listed = listed();
    let counts: BTreeMap<String, usize> =
        listed.iter().map(|(file, (uses, ..))| (file.clone(), *uses)).collect();
    assert_eq!(
        found, counts,
        "left: the code, right: docs/src/unsafe.md; review and correct the list"
    );
    for (file, (_, reason, check)) in listed {
        assert!(reason.len() > 20 && !check.is_empty(), "{file}: no reason or check");
    }
}

/// Whether a `SAFETY` comment precedes the line, within the lines of its statement or item.
fn is_justified(lines: &[&str], at: usize) -> bool {
    let before = lines[at.saturating_sub(8)..=at].iter();
    before.clone().any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
}

#[test]
fn every_use_of_unsafe_says_why_it_is_sound() {
    let mut without = Vec::new();
    for (file, text) in ["crates", "tests", "fuzz"].into_iter().flat_map(rust_files) {
        let lines: Vec<&str> = text.lines().collect();
        for at in unsafe_lines(&text) {
            // The methods of an allocator are unsafe because the trait's are.
            let of_trait = lines[at].trim_start().starts_with("unsafe fn ")
                && text.contains("unsafe impl GlobalAlloc");
            if !of_trait && !is_justified(&lines, at) {
                without.push(format!("{file}:{}: {}", at + 1, lines[at].trim()));
            }
        }
    }
    assert!(without.is_empty(), "no SAFETY comment:\n{}", without.join("\n"));
}

#[test]
fn unsafe_is_found_only_in_code() {
    let text = "// unsafe {\nlet x = \"unsafe {\";\nunsafe { x() }\n#![expect(unsafe_code)]\n#[unsafe(a)]\n";
    assert_eq!(unsafe_lines(text), [2, 4]);
}

fn compare_build_code(list: &Path) -> Output {
    Command::new("python3")
        .arg(orchestrate_e2e::root().join("scripts/lib/build_code.py"))
        .arg("--list")
        .arg(list)
        .output()
        .unwrap()
}

fn has_python() -> bool {
    let script = "import sys, tomllib";
    Command::new("python3")
        .args(["-c", script])
        .output()
        .is_ok_and(|output| output.status.success())
}

#[test]
fn code_that_runs_at_build_time_is_listed() {
    if !has_python() {
        return orchestrate_e2e::skip::skip("python", "Python 3.11 to compare the list");
    }
    let list = orchestrate_e2e::root().join("supply-chain/build-code.toml");
    let output = compare_build_code(&list);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn new_and_changed_build_code_is_refused() {
    if !has_python() {
        return orchestrate_e2e::skip::skip("python", "Python 3.11 to compare the list");
    }
    let text =
        std::fs::read_to_string(orchestrate_e2e::root().join("supply-chain/build-code.toml"))
            .unwrap();
    let entries: Vec<&str> = text.split("[[crate]]").collect();
    let of = |name: &str| {
        let line = format!("name = \"{name}\"\n");
        entries.iter().position(|entry| entry.contains(&line)).unwrap()
    };
    let (ring, libc, cc) = (of("ring"), of("libc"), of("cc"));
    let with = |change: &dyn Fn(&mut Vec<String>)| {
        let mut entries: Vec<String> = entries.iter().map(ToString::to_string).collect();
        change(&mut entries);
        entries.join("[[crate]]")
    };
    let attacks: [(String, &str); 6] = [
        // A dependency gains a build script, or a new dependency has one.
        (with(&|entries| drop(entries.remove(ring))), "new: ring"),
        // A library that build scripts link is replaced.
        (with(&|entries| drop(entries.remove(cc))), "new: cc"),
        // The bytes of the same version change.
        (
            with(&|entries| {
                let (before, after) = entries[libc].split_once("checksum = \"").unwrap();
                entries[libc] = format!("{before}checksum = \"0{}", &after[1..]);
            }),
            "changed: libc",
        ),
        // Another version.
        (
            with(&|entries| {
                let (before, after) = entries[libc].split_once("version = \"").unwrap();
                entries[libc] = format!("{before}version = \"9{after}");
            }),
            "changed: libc",
        ),
        // A reviewed crate gains a macro or a build script.
        (
            with(&|entries| {
                entries[ring] =
                    entries[ring].replace("runs = [\"build script\"]", "runs = [\"proc macro\"]");
            }),
            "changed: ring",
        ),
        // A crate without the reason why it may run.
        (
            with(&|entries| {
                let (before, after) = entries[ring].split_once("reason = \"").unwrap();
                let rest = after.split_once('"').unwrap().1;
                entries[ring] = format!("{before}reason = \"not reviewed yet\"{rest}");
            }),
            "without a reason: ring",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (number, (list, message)) in attacks.into_iter().enumerate() {
        assert_ne!(list, text, "attack {number} changes nothing");
        let path: PathBuf = folder.path().join(format!("{number}.toml"));
        std::fs::write(&path, list).unwrap();
        let output = compare_build_code(&path);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(message), "attack {number}: {errors}");
    }
}
