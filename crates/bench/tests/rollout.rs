//! Episodes over a fleet of engine processes, one of which is killed.

#![expect(clippy::unwrap_used, reason = "a failure is the verdict of a test")]

use serde_json::Value;
use std::process::Command;

/// Runs one case small, and gives what was measured.
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
fn a_killed_engine_process_costs_no_episode_no_row_and_no_hit_of_the_others() {
    let found = case("workers_4_kill");
    assert_eq!(found["lost_episodes"], 0, "{found}");
    assert_eq!(found["wrong_rows"], 0, "{found}");
    assert!(found["rows_checked"].as_u64().unwrap() > 16 * 1000, "{found}");
    assert!(found["hit_share_unmoved"].as_f64().unwrap() >= 0.99, "{found}");
    assert!(found["moved_episodes"].as_u64().unwrap() >= 1, "{found}");
    assert!(found["moved_episodes"].as_u64().unwrap() <= 8, "the others stay: {found}");
}

#[test]
fn episodes_outlive_the_only_engine_process_when_it_is_started_again() {
    let found = case("workers_1_kill");
    assert_eq!((&found["lost_episodes"], &found["wrong_rows"]), (&0.into(), &0.into()), "{found}");
    assert_eq!(found["turns"], 96, "each turn was answered once: {found}");
}

#[test]
fn a_groups_prompt_is_fetched_by_its_first_member_alone() {
    let found = case("workers_4");
    assert_eq!((&found["lost_episodes"], &found["wrong_rows"]), (&0.into(), &0.into()), "{found}");
    assert!(found["hit_share"].as_f64().unwrap() >= 0.99, "{found}");
    // Prompts have hundreds of tokens in whole blocks; 12 of 16 members follow.
    assert!(found["shared_rows"].as_u64().unwrap() >= 12 * 256, "{found}");
}
