//! Crates depend only on the crates that the table allows, files do not import each other in long
//! cycles, and all dependencies come from the registry.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic fails the test")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::process::Command;

/// Crate → the crates that it depends on. Tests may use others.
const CRATES: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("cpu", &[]),
    ("http-server", &[]),
    ("settings", &["types"]),
    ("supervisor", &[]),
    ("routing", &["cpu", "settings", "types"]),
    ("engine", &["routing", "settings", "types"]),
    ("sandbox", &["settings", "supervisor", "types"]),
    ("tasks", &["settings", "types"]),
    ("gateway", &["settings", "types"]),
    ("rollout", &["engine", "gateway", "routing", "sandbox", "settings", "tasks", "types"]),
    ("store", &["types"]),
    ("handoff", &["routing", "settings", "types"]),
    ("metrics", &["handoff", "types"]),
    ("report", &["handoff", "metrics", "store", "types"]),
    ("sinks", &["metrics", "settings", "store", "types"]),
    ("moe", &["cpu", "handoff", "http-server", "routing", "settings", "types"]),
    (
        "coordinator",
        &[
            "engine", "handoff", "metrics", "report", "rollout", "routing", "sandbox", "settings",
            "store", "tasks", "types",
        ],
    ),
    (
        "cli",
        &[
            "coordinator",
            "cpu",
            "engine",
            "gateway",
            "handoff",
            "http-server",
            "metrics",
            "moe",
            "report",
            "rollout",
            "routing",
            "sandbox",
            "settings",
            "sinks",
            "store",
            "tasks",
            "types",
        ],
    ),
    ("synthetic", &["routing", "sandbox", "tasks", "types"]),
    ("testkit", &["engine", "routing", "sandbox", "tasks", "types"]),
    ("e2e", &[]),
    (
        "bench",
        &[
            "cli",
            "coordinator",
            "cpu",
            "engine",
            "handoff",
            "rollout",
            "routing",
            "sandbox",
            "synthetic",
            "tasks",
            "types",
        ],
    ),
];

/// The workspace's packages, as Cargo describes them.
fn packages() -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(orchestrate_e2e::root())
        .output()
        .unwrap();
    let mut metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::from_value(metadata["packages"].take()).unwrap()
}

#[test]
fn crates_depend_on_the_crates_of_the_table() {
    let table: BTreeMap<String, BTreeSet<String>> = CRATES
        .iter()
        .map(|(name, below)| ((*name).to_owned(), below.iter().map(ToString::to_string).collect()))
        .collect();
    let of_workspace = |name: &serde_json::Value| {
        name.as_str().unwrap().strip_prefix("orchestrate-").map(str::to_owned)
    };
    let mut found = BTreeMap::new();
    for package in packages() {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let below: BTreeSet<String> = dependencies
            .filter(|dependency| dependency["kind"] != "dev")
            .filter_map(|dependency| of_workspace(&dependency["name"]))
            .collect();
        found.insert(of_workspace(&package["name"]).unwrap(), below);
    }
    assert_eq!(found, table, "left: Cargo.toml of each crate, right: the table");
    // Each crate stands below those that depend on it.
    let mut above = BTreeSet::new();
    for (name, below) in CRATES {
        assert!(below.iter().all(|dependency| above.contains(dependency)), "{name}");
        above.insert(name);
    }
}

/// Crates that must not become dependencies, each with the reason and what to use instead.
const BANNED: &[(&str, &str)] = &[
    ("tokio-tar", "unmaintained, with a path traversal vulnerability; use astral-tokio-tar"),
    ("bincode", "unmaintained; use serde_json or a custom format"),
    ("openssl", "rustls is already a dependency"),
    ("native-tls", "rustls is already a dependency"),
];

/// Lowest versions without a known vulnerability that affects this project.
const MINIMUM_VERSIONS: &[(&str, [u64; 3])] = &[
    ("astral-tokio-tar", [0, 6, 2]),
    ("h2", [0, 4, 16]),
    ("rustls", [0, 23, 18]),
    ("tar", [0, 4, 45]),
    ("tonic", [0, 12, 3]),
];

fn numbers(version: &str) -> Vec<u64> {
    version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect()
}

/// Problems of the packages in a lock file.
fn distrusted(lock: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name))?;
            line.strip_prefix(" = \"")?.strip_suffix('"')
        };
        let (name, version) = (field("name").unwrap_or(""), field("version").unwrap_or(""));
        let id = format!("{name} {version}");
        match field("source") {
            None if name.starts_with("orchestrate-") => {}
            Some("registry+https://github.com/rust-lang/crates.io-index") => {
                if field("checksum").is_none_or(|sum| sum.len() != 64) {
                    wrong.push(format!("{id} has no checksum"));
                }
            }
            other => wrong.push(format!("{id} comes from {other:?}, not from crates.io")),
        }
        if let Some((_, why)) = BANNED.iter().find(|(banned, _)| *banned == name) {
            wrong.push(format!("{id} is banned: {why}"));
        }
        if let Some((_, minimum)) = MINIMUM_VERSIONS.iter().find(|(known, _)| *known == name)
            && numbers(version).as_slice() < minimum.as_slice()
        {
            wrong.push(format!("{id} is below {minimum:?}"));
        }
    }
    wrong
}

#[test]
fn dependencies_come_from_crates_io_with_checksums_and_none_is_banned_or_vulnerable() {
    let lock = std::fs::read_to_string(orchestrate_e2e::root().join("Cargo.lock")).unwrap();
    assert!(lock.matches("[[package]]").count() > 100);
    assert_eq!(distrusted(&lock), Vec::<String>::new());
}

#[test]
fn untrusted_dependencies_are_reported() {
    let package = |name: &str, version: &str, source: &str| {
        let sum = "0".repeat(64);
        format!(
            "[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n{source}checksum = \"{sum}\"\n"
        )
    };
    let registry = "source = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
    let git = "source = \"git+https://example.org/a#0\"\n";
    assert!(distrusted(&package("tar", "0.4.45", registry)).is_empty());
    for (name, version, source, word) in [
        ("tar", "0.4.44", registry, "below"),
        ("bincode", "1.3.3", registry, "banned"),
        ("serde", "1.0.0", git, "crates.io"),
        ("serde", "1.0.0", "", "crates.io"),
    ] {
        let found = distrusted(&package(name, version, source));
        assert!(found.len() == 1 && found[0].contains(word), "{name}: {found:?}");
    }
    let unsummed = package("serde", "1.0.0", registry).replace("checksum", "other");
    assert!(distrusted(&unsummed)[0].contains("checksum"));
}

/// Crates that use `orchestrate-cpu` without choosing code by it.
const NOT_NUMERIC: &[(&str, &str)] = &[
    ("orchestrate-bench", "reports the instruction sets, and measures floors with them"),
    ("orchestrate-cli", "checks the variable of the environment"),
];

#[test]
fn every_crate_that_chooses_code_by_instruction_set_is_tested_without_it() {
    let mut choosing = BTreeSet::from(["orchestrate-cpu".to_owned()]);
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let uses = |dependency: &serde_json::Value| {
            dependency["name"] == "orchestrate-cpu" && dependency["kind"].is_null()
        };
        let numeric = NOT_NUMERIC.iter().all(|(other, _)| *other != name);
        if numeric && package["dependencies"].as_array().unwrap().iter().any(uses) {
            choosing.insert(name.to_owned());
        }
    }
    let script = std::fs::read_to_string(orchestrate_e2e::root().join("scripts/test")).unwrap();
    let line = script.lines().find_map(|line| line.strip_prefix("numeric_crates=")).unwrap();
    let tested: BTreeSet<String> =
        line.trim_matches('"').split_whitespace().map(str::to_owned).collect();
    assert_eq!(tested, choosing, "scripts/test runs these under ORCHESTRATE_CPU");
}

#[test]
fn instruction_sets_are_detected_in_one_crate_only() {
    let mut folders = vec![orchestrate_e2e::root().join("crates")];
    let mut wrong = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let in_cpu = path.ends_with("crates/cpu");
            if path.is_dir() && !in_cpu {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                // Macros of the standard library, and crates that choose code at run time.
                for word in ["feature_detected!", "multiversion", "pulp::", "cpufeatures"] {
                    if text.contains(word) {
                        wrong.push(format!("{}: {word}", path.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "ask orchestrate_cpu::Level instead: {wrong:?}");
}

#[test]
fn no_import_cycle_has_more_than_two_files() {
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(orchestrate_e2e::root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let (files, shortest) = Imports::of_crate(&folder.join("src")).long_cycles();
        if !files.is_empty() {
            let cycle = shortest.join(" -> ");
            wrong.push(format!("{name}: {cycle} in {files:?}"));
        }
    }
    assert!(wrong.is_empty(), "import cycles of more than two files:\n{}", wrong.join("\n"));
}

#[test]
fn import_cycles_through_reexports_and_nested_lists_are_found() {
    let imports = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(path, text)| (module_of(path), (*text).to_owned()));
        Imports::of_files(&files.collect()).long_cycles()
    };
    let two = [("a.rs", "use crate::b::B;"), ("b.rs", "fn f() -> super::a::A {}")];
    assert!(imports(&two).0.is_empty());
    let (files, shortest) = imports(&[
        ("lib.rs", "mod a; mod b; mod c;\npub use c::{C, other::D};"),
        ("a.rs", "use crate::{b::{self, B}, z};"),
        ("b.rs", "use crate::{C};"),
        ("c/mod.rs", "use super::a::A; // use crate::b::B;"),
    ]);
    assert_eq!(files.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(shortest.len(), 3);
    let in_tests = "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n";
    let found =
        imports(&[("a.rs", "use crate::b::B;"), ("b.rs", "use crate::c::C;"), ("c.rs", in_tests)]);
    assert!(found.0.is_empty(), "{found:?}");
}

/// A module's path inside its crate; empty for `lib.rs`.
type Module = Vec<String>;

fn module_of(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let mut segments: Module = path.split('/').map(str::to_owned).collect();
    if matches!(segments.last().map(String::as_str), Some("mod" | "lib")) {
        segments.pop();
    }
    segments
}

/// The imports between the files of one crate.
struct Imports {
    edges: BTreeMap<Module, BTreeSet<Module>>,
}

/// One `use`, or one path that starts at `crate` or `super`.
struct Import {
    is_reexport: bool,
    path: Vec<String>,
}

impl Imports {
    fn of_crate(source: &Path) -> Self {
        let mut files = BTreeMap::new();
        let mut folders = vec![source.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let relative = path.strip_prefix(source).unwrap().to_str().unwrap();
                    let mut module = module_of(relative);
                    if module == ["main"] && !source.join("lib.rs").exists() {
                        module.clear();
                    }
                    files.insert(module, std::fs::read_to_string(&path).unwrap());
                }
            }
        }
        Self::of_files(&files)
    }

    fn of_files(files: &BTreeMap<Module, String>) -> Self {
        let imports: BTreeMap<Module, Vec<Import>> =
            files.iter().map(|(module, text)| (module.clone(), imports_of(text))).collect();
        let edges = imports.iter().map(|(module, list)| {
            let imported = list.iter().filter(|import| !import.is_reexport);
            let targets = imported.filter_map(|import| {
                let path = absolute(&imports, module, &import.path)?;
                Some(defined_in(&imports, &path, 0)).filter(|target| target != module)
            });
            (module.clone(), targets.collect())
        });
        Self { edges: edges.collect() }
    }

    /// Files on cycles of more than two files, and the shortest such cycle.
    fn long_cycles(&self) -> (BTreeSet<String>, Vec<String>) {
        let (mut files, mut shortest) = (BTreeSet::new(), Vec::new());
        for (from, targets) in &self.edges {
            for to in targets {
                let Some(way_back) = self.way_back(to, from) else { continue };
                files.extend(way_back.iter().cloned());
                if shortest.is_empty() || way_back.len() < shortest.len() {
                    shortest = way_back;
                }
            }
        }
        (files, shortest)
    }

    /// The shortest path from `from` to `to` through at least one other file.
    fn way_back(&self, from: &Module, to: &Module) -> Option<Vec<String>> {
        let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
        let mut queue = VecDeque::from([from]);
        while let Some(here) = queue.pop_front() {
            for next in self.edges.get(here).into_iter().flatten() {
                let direct = here == from && next == to;
                if !direct && next != from && !before.contains_key(next) {
                    before.insert(next, here);
                    queue.push_back(next);
                }
            }
        }
        let mut way = vec![to];
        while let Some(last) = way.last().filter(|last| **last != from) {
            way.push(before.get(last)?);
        }
        let name = |module: &&Module| match module.as_slice() {
            [] => "lib".to_owned(),
            segments => segments.join("/"),
        };
        Some(way.iter().rev().map(name).collect())
    }
}

/// The imports in a file's text, without those of its unit tests.
fn imports_of(text: &str) -> Vec<Import> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let text = lines.collect::<Vec<_>>().join("\n");
    let mut imports = Vec::new();
    let mut rest = String::new();
    for statement in text.split_inclusive(';') {
        // Other code may precede the statement since the last semicolon.
        let start = statement.rfind("use ").filter(|at| {
            let line = statement[..*at].rsplit('\n').next().unwrap_or_default().trim();
            line.is_empty() || line.starts_with("pub")
        });
        let Some(start) = start else {
            rest.push_str(statement);
            continue;
        };
        let line = statement[..start].rsplit('\n').next().unwrap_or_default();
        let is_reexport = line.trim().starts_with("pub");
        rest.push_str(&statement[..start]);
        for path in expand(statement[start + 4..].trim_end_matches(';')) {
            imports.push(Import { is_reexport, path });
        }
    }
    let words = rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    for word in words.filter(|word| word.starts_with("crate::") || word.starts_with("super::")) {
        let path = word.trim_end_matches(':').split("::").map(str::to_owned).collect();
        imports.push(Import { is_reexport: false, path });
    }
    imports
}

/// The paths of a `use` with nested lists.
fn expand(tree: &str) -> Vec<Vec<String>> {
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in tree.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().unwrap().push(c);
        }
    }
    let segments = |path: &str| -> Vec<String> {
        path.split("::").map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()
    };
    let mut paths = Vec::new();
    for part in parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty()) {
        match part.split_once('{') {
            Some((prefix, list)) => {
                let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
                paths.extend(expand(list).into_iter().map(|tail| {
                    let mut path = segments(prefix);
                    path.extend(tail.into_iter().filter(|segment| segment != "self"));
                    path
                }));
            }
            None => paths.push(segments(part.split(" as ").next().unwrap_or_default())),
        }
    }
    paths
}

/// The path from the crate's root; `None` for a path into another crate.
fn absolute(
    imports: &BTreeMap<Module, Vec<Import>>,
    module: &Module,
    path: &[String],
) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let mut base = module.clone();
    match first.as_str() {
        "crate" => return Some(rest.to_vec()),
        "self" => {}
        "super" => {
            base.pop();
            let above = rest.iter().take_while(|segment| *segment == "super").count();
            base.truncate(base.len().saturating_sub(above));
            return Some([base, rest[above..].to_vec()].concat());
        }
        child => {
            base.push(child.to_owned());
            if !imports.contains_key(&base) {
                return None;
            }
        }
    }
    Some([base, rest.to_vec()].concat())
}

/// The file in which the last segment of an absolute path is defined, following re-exports.
fn defined_in(imports: &BTreeMap<Module, Vec<Import>>, path: &[String], depth: u32) -> Module {
    let known = (0..=path.len()).rev().find(|end| imports.contains_key(&path[..*end]));
    let end = known.unwrap_or(0);
    let (module, rest) = (path[..end].to_vec(), &path[end..]);
    let Some(name) = rest.first().filter(|_| depth < 8) else { return module };
    let reexports = imports.get(&module).into_iter().flatten().filter(|i| i.is_reexport);
    for import in reexports.filter(|import| import.path.last() == Some(name)) {
        if let Some(found) = absolute(imports, &module, &import.path)
            && found != path
        {
            return defined_in(imports, &[&found, &rest[1..]].concat(), depth + 1);
        }
    }
    module
}
