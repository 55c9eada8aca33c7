//! Episodes on a fleet of engine processes, one of which is killed.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use serde_json::Value;
use std::process::Command;

/// Runs one small case and returns its results.
fn case(name: &str) -> Value {
    let small = ["--conversations", "16", "--turns", "6", "--group-size", "4"];
    let output = Command::new(env!("CARGO_BIN_EXE_orchestrate-bench"))
        .args(["rollout", "--json", "--case", name])
        .args(small)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report.pointer_mut("/cases/0").unwrap().take()
}

#[test]
fn a_killed_engine_loses_no_episodes_or_rows_and_other_caches_still_hit() {
    let found = case("workers_4_kill");
    assert_eq!(found["lost_episodes"], 0, "{found}");
    assert_eq!(found["wrong_rows"], 0, "{found}");
    assert!(found["rows_checked"].as_u64().unwrap() > 16 * 1000, "{found}");
    assert!(found["hit_share_unmoved"].as_f64().unwrap() >= 0.99, "{found}");
    assert!(found["moved_episodes"].as_u64().unwrap() >= 1, "{found}");
    assert!(
        found["moved_episodes"].as_u64().unwrap() <= 8,
        "conversations of other engines must stay: {found}"
    );
}

#[test]
fn episodes_survive_a_restart_of_the_only_engine() {
    let found = case("workers_1_kill");
    assert_eq!((&found["lost_episodes"], &found["wrong_rows"]), (&0.into(), &0.into()), "{found}");
    assert_eq!(found["turns"], 96, "each turn must be answered once: {found}");
}

#[test]
fn prompt_rows_of_a_group_are_fetched_by_its_first_member_only() {
    let found = case("workers_4");
    assert_eq!((&found["lost_episodes"], &found["wrong_rows"]), (&0.into(), &0.into()), "{found}");
    assert!(found["hit_share"].as_f64().unwrap() >= 0.99, "{found}");
    // Prompts have hundreds of tokens in whole blocks; 12 of 16 members follow.
    assert!(found["shared_rows"].as_u64().unwrap() >= 12 * 256, "{found}");
}
