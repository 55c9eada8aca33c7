//! Rooms depend only on the rooms they may depend on.

use std::collections::BTreeMap;
use std::process::Command;

/// Crate → crates it may depend on (tests may also use the test kit).
const ALLOWED: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("supervisor", &[]),
    ("routing", &["types"]),
    ("engine", &["routing", "types"]),
    ("sandbox", &["supervisor", "types"]),
    ("tasks", &["types"]),
    ("rollout", &["engine", "routing", "sandbox", "tasks", "types"]),
    ("store", &["types"]),
    ("handoff", &["routing", "types"]),
    ("moe", &["handoff", "routing", "types"]),
    ("synthetic", &["routing", "sandbox", "tasks", "types"]),
    (
        "coordinator",
        &["engine", "handoff", "rollout", "routing", "sandbox", "store", "tasks", "types"],
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
