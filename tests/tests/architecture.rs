//! Rooms depend only on the rooms they may depend on, and the whole on crates that can be trusted.

use std::collections::BTreeMap;
use std::process::Command;

/// Crate → crates it may depend on (tests may also use the test kit).
const ALLOWED: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("settings", &["types"]),
    ("supervisor", &[]),
    ("routing", &["settings", "types"]),
    ("engine", &["routing", "settings", "types"]),
    ("sandbox", &["settings", "supervisor", "types"]),
    ("tasks", &["types"]),
    ("rollout", &["engine", "routing", "sandbox", "settings", "tasks", "types"]),
    ("store", &["types"]),
    ("handoff", &["routing", "settings", "types"]),
    ("moe", &["handoff", "routing", "settings", "types"]),
    ("synthetic", &["routing", "sandbox", "tasks", "types"]),
    (
        "coordinator",
        &[
            "engine", "handoff", "rollout", "routing", "sandbox", "settings", "store", "tasks",
            "types",
        ],
    ),
];

#[test]
fn rooms_depend_only_on_the_rooms_below_them() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(orchestrate_e2e::root())
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap().trim_start_matches("orchestrate-");
        let Some(allowed) = allowed.get(name) else { continue };
        for dependency in package["dependencies"].as_array().unwrap() {
            let target = dependency["name"].as_str().unwrap();
            let Some(target) = target.strip_prefix("orchestrate-") else { continue };
            let in_tests = dependency["kind"] == "dev";
            if !allowed.contains(&target) && !in_tests {
                wrong.push(format!("{name} -> {target}"));
            }
        }
    }
    assert!(wrong.is_empty(), "edges that the table does not allow: {wrong:?}");
}

/// Crates that must not come in, and why.
const BANNED: &[(&str, &str)] = &[
    ("tokio-tar", "unmaintained, with a known way out of its folder; astral-tokio-tar"),
    ("bincode", "unmaintained; serde_json or a format of our own"),
    ("openssl", "rustls is here already"),
    ("native-tls", "rustls is here already"),
];

/// Least versions without a known hole that concerns us.
const FLOORS: &[(&str, [u64; 3])] = &[
    ("astral-tokio-tar", [0, 6, 2]),
    ("h2", [0, 4, 16]),
    ("rustls", [0, 23, 18]),
    ("tar", [0, 4, 45]),
    ("tonic", [0, 12, 3]),
];

fn numbers(version: &str) -> Vec<u64> {
    version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect()
}

/// What is wrong with the packages of a lock file.
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
        if let Some((_, floor)) = FLOORS.iter().find(|(known, _)| *known == name)
            && numbers(version).as_slice() < floor.as_slice()
        {
            wrong.push(format!("{id} is below {floor:?}"));
        }
    }
    wrong
}

#[test]
fn every_crate_is_of_the_one_registry_with_its_checksum_none_is_banned_or_known_to_be_unsafe() {
    let lock = std::fs::read_to_string(orchestrate_e2e::root().join("Cargo.lock")).unwrap();
    assert!(lock.matches("[[package]]").count() > 100);
    assert_eq!(distrusted(&lock), Vec::<String>::new());
}

#[test]
fn crates_that_cannot_be_trusted_are_found() {
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
