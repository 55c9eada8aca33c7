//! The documentation is correct: links have targets, commands parse, settings pass the check.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Every Markdown file that users read.
fn pages() -> Vec<(PathBuf, String)> {
    let root = orchestrate_e2e::root();
    let listed = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard", "--", "*.md"])
        .current_dir(&root)
        .output()
        .unwrap();
    let names = String::from_utf8(listed.stdout).unwrap();
    let mut pages = Vec::new();
    for name in names.lines() {
        let path = root.join(name);
        if let Ok(text) = std::fs::read_to_string(&path) {
            pages.push((path, text));
        }
    }
    assert!(pages.len() > 10, "{} pages found", pages.len());
    pages
}

/// A fenced block: its language and its lines.
struct Block {
    language: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in page.lines() {
        match (&mut open, line.trim_start().strip_prefix("```")) {
            (None, Some(language)) => {
                open = Some(Block { language: language.trim().to_owned(), text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Targets of `[text](target)` outside code.
fn links(page: &str) -> Vec<String> {
    let mut fenced = false;
    let mut targets = Vec::new();
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        // Code spans may hold brackets.
        let prose: String = line.split('`').step_by(2).collect();
        for part in prose.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            targets.push(target.split(' ').next().unwrap_or_default().to_owned());
        }
    }
    targets
}

/// The anchor that a heading gets from Markdown renderers.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

fn has_anchor(page: &str, wanted: &str) -> bool {
    let headings = page.lines().filter_map(|line| line.strip_prefix('#'));
    let explicit = format!("id=\"{wanted}\"");
    headings.map(|h| anchor(h.trim_start_matches('#'))).any(|a| a == wanted)
        || page.contains(&explicit)
}

#[test]
fn every_relative_link_points_to_an_existing_file_and_anchor() {
    let mut broken = Vec::new();
    for (path, text) in pages() {
        for target in links(&text) {
            if target.starts_with("http://") || target.starts_with("https://") {
                continue;
            }
            let (file, fragment) = target.split_once('#').unwrap_or((&target, ""));
            let wanted = if file.is_empty() {
                path.clone()
            } else {
                path.parent().unwrap_or(Path::new("/")).join(file)
            };
            let found = wanted.exists()
                && (fragment.is_empty()
                    || std::fs::read_to_string(&wanted).is_ok_and(|t| has_anchor(&t, fragment)));
            if !found {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// Words of a shell line, quotes removed; the line ends at a pipe, a redirection or a comment.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let (mut word, mut quote, mut started) = (String::new(), None, false);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, started) = (Some(c), true),
            (None, '|' | '>' | '<' | '&' | ';' | '#') if !started => break,
            (None, ' ') => {
                if started {
                    words.push(std::mem::take(&mut word));
                }
                started = false;
            }
            (None, c) => {
                word.push(c);
                started = true;
            }
        }
    }
    if started {
        words.push(word);
    }
    words
}

/// Commands of our programs in the shell blocks of a page.
fn commands(page: &str) -> Vec<Vec<String>> {
    let shell = blocks(page).into_iter().filter(|b| ["sh", "bash"].contains(&b.language.as_str()));
    let mut found = Vec::new();
    for block in shell {
        for line in block.text.replace("\\\n", " ").lines() {
            let words = words(line.trim());
            let program = words.iter().position(|word| !word.contains('='));
            let Some(program) = program else { continue };
            if ["orchestrate", "orchestrate-bench"].contains(&words[program].as_str()) {
                found.push(words[program..].to_vec());
            }
        }
    }
    found
}

#[test]
fn every_command_in_the_docs_parses() {
    let mut wrong = Vec::new();
    let mut checked = 0;
    for (path, text) in pages() {
        for command in commands(&text) {
            let program = orchestrate_e2e::built_program(&command[0]).unwrap();
            // With --help at the end the arguments before it are parsed, and nothing is run.
            let output = Command::new(program).args(&command[1..]).arg("--help").output().unwrap();
            checked += 1;
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                let line = error.lines().next().unwrap_or_default().to_owned();
                wrong.push(format!("{}: {}\n  {line}", path.display(), command.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "commands that do not parse:\n{}", wrong.join("\n"));
    assert!(checked > 20, "{checked} commands found");
}

/// The settings of a command that starts a run or an evaluation.
fn settings(command: &[String]) -> Vec<&str> {
    let starts = ["run", "eval"].contains(&command.get(1).map_or("", String::as_str));
    if !starts || command.iter().any(|word| word == "--resume") {
        return Vec::new();
    }
    let pairs = command.windows(2).filter(|pair| ["--config", "--set"].contains(&pair[0].as_str()));
    // A folder with an agent is the reader's own.
    let pairs = pairs.filter(|pair| !pair[1].starts_with("agent.folder="));
    pairs.flatten().map(String::as_str).collect()
}

#[test]
fn the_settings_of_every_command_in_the_docs_are_valid() {
    let program = orchestrate_e2e::built_program("orchestrate").unwrap();
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for (path, text) in pages() {
        for command in commands(&text) {
            let settings = settings(&command);
            if settings.is_empty() {
                continue;
            }
            let mut check = Command::new(&program);
            check.args(["config", "check"]).args(&settings);
            let output = check.current_dir(orchestrate_e2e::root()).output().unwrap();
            checked += 1;
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                wrong.push(format!("{}: {}\n{error}", path.display(), command.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "settings that do not pass:\n{}", wrong.join("\n"));
    assert!(checked > 8, "{checked} commands found");
}

#[test]
fn every_toml_snippet_in_the_docs_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let program = orchestrate_e2e::built_program("orchestrate").unwrap();
    let mut wrong = Vec::new();
    for (path, text) in pages() {
        for block in blocks(&text).into_iter().filter(|block| block.language == "toml") {
            let file = folder.path().join("snippet.toml");
            std::fs::write(&file, &block.text).unwrap();
            let mut check = Command::new(&program);
            check.args(["config", "check", "--config"]).arg(&file);
            let output = check.current_dir(orchestrate_e2e::root()).output().unwrap();
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                wrong.push(format!("{}:\n{}\n{error}", path.display(), block.text));
            }
        }
    }
    assert!(wrong.is_empty(), "snippets that do not pass:\n{}", wrong.join("\n"));
}

#[test]
fn commands_links_and_anchors_of_a_page_are_parsed() {
    let page = "# A b-c (d)\n```sh\nA=1 orchestrate run --set 'x=\"y z\"' \\\n  --json  # why\n\
                cat a | orchestrate show\n```\n[x](y.md#z) `[not](a)`\n";
    assert_eq!(commands(page), vec![vec!["orchestrate", "run", "--set", "x=\"y z\"", "--json"]]);
    assert_eq!(links(page), ["y.md#z"]);
    assert!(has_anchor(page, "a-b-c-d"));
    assert!(!has_anchor(page, "z"));
}

/// The pages that name places in the sources.
const SOURCE_PAGES: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

/// Code spans of a page, outside fenced blocks.
fn code_spans(page: &str) -> Vec<String> {
    let fences = page.split("\n```").step_by(2);
    fences.flat_map(|text| text.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Every tracked or new file of the project, from its root.
fn files() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "-co", "--exclude-standard"])
        .current_dir(orchestrate_e2e::root())
        .output()
        .unwrap();
    String::from_utf8(listed.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn is_rust(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "rs")
}

/// `Type::function` of every function in a block `impl` of this source, whose ends are at the start of a line.
fn methods(source: &str) -> Vec<String> {
    let mut methods = Vec::new();
    let mut current = "";
    for line in source.lines() {
        if line.starts_with("impl") {
            let head = line.split(" where").next().unwrap().trim_end_matches([' ', '{']);
            let subject = head.rsplit(" for ").next().unwrap().rsplit(' ').next().unwrap();
            current = subject.split('<').next().unwrap();
        } else if let Some((before, after)) = line.split_once("fn ")
            && before.chars().all(|c| c.is_ascii_lowercase() || " ()".contains(c))
        {
            let name: String =
                after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            methods.push(format!("{current}::{name}"));
        }
    }
    methods
}

/// Whether a path of the docs, such as `rollout/line.rs` or `fleet/`, names a file or folder of the project: paths of a
/// crate are shortened there.
fn names_a_place(wanted: &str, files: &[String]) -> bool {
    let wanted = wanted.trim_end_matches('/');
    files.iter().any(|file| {
        let short = file.trim_start_matches("crates/").replacen("/src/", "/", 1);
        [file.as_str(), &short].iter().any(|path| {
            let path = format!("/{path}/");
            path.contains(&format!("/{wanted}/"))
        })
    })
}

#[test]
fn every_function_and_path_in_the_pages_about_the_sources_exists() {
    let root = orchestrate_e2e::root();
    let files = files();
    let methods: std::collections::HashSet<String> = files
        .iter()
        .filter(|file| is_rust(file))
        .flat_map(|file| methods(&std::fs::read_to_string(root.join(file)).unwrap_or_default()))
        .collect();
    let mut wrong = Vec::new();
    for page in SOURCE_PAGES {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        let mut seen = (0, 0);
        for span in code_spans(&text) {
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            if let Some((_, function)) = span.split_once("::")
                && function.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            {
                seen.0 += 1;
                if !methods.contains(&span) {
                    wrong.push(format!("{page}: no function `{span}`"));
                }
            } else if !span.starts_with(['/', '.', '-'])
                && span.chars().all(is_path)
                && (is_rust(&span) || span.contains('/'))
            {
                seen.1 += 1;
                if !names_a_place(&span, &files) {
                    wrong.push(format!("{page}: no file or folder `{span}`"));
                }
            }
        }
        assert!(seen.0 > 0 && seen.1 > 5, "{page}: {seen:?}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_and_paths_of_sources_are_found() {
    let source = "impl<'a> Display for Line<'a> {\n    pub(crate) async fn open(&self) {}\n}\nimpl Store {\n    fn a() {}\n}\n";
    assert_eq!(methods(source), ["Line::open", "Store::a"]);
    let files = ["crates/rollout/src/agent/run.rs".to_owned(), "fuzz/Cargo.lock".to_owned()];
    for place in
        ["rollout/agent/run.rs", "agent/", "run.rs", "rollout", "fuzz/", "crates/rollout/src"]
    {
        assert!(names_a_place(place, &files), "{place}");
    }
    assert!(!names_a_place("un.rs", &files) && !names_a_place("rollout/run.rs", &files));
    let page = "a `x::y` b\n```\n`no`\n```\n`z`";
    assert_eq!(code_spans(page), ["x::y", "z"]);
}
