//! What agents, tasks and servers wrote is shown without acting on the terminal, and files are private.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_store::{Claim, EpisodeRecord, NewRun, RunKind, Store};
use orchestrate_types::{EpisodeId, GroupId, Outcome, PolicyVersion, RunId, is_unprintable};
use serde_json::json;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

/// A window title, a cleared screen, a hyperlink, a carriage return, C1 controls, text that runs
/// backwards, and characters without width.
const HOSTILE: &str = "start\u{1b}]0;title\u{7}\u{1b}[2J\u{1b}]8;;http://x\u{1b}\\\rover\u{9b}31m\u{90}q\
                       \u{202e}gnp.exe\u{2066}\u{200b}\u{feff}\u{e0041}\u{8}\u{7f}end";

fn orchestrate(args: &[&str]) -> Output {
    // A mask that lets everyone read and write everything.
    Command::new("sh")
        .args(["-c", "umask 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_orchestrate")])
        .args(args)
        .output()
        .unwrap()
}

/// A run whose task id, and whose only episode, an attacker wrote.
async fn run_folder(folder: &Utf8Path) {
    let new = NewRun { run: RunId::generate(), plan_digest: "d".into(), kind: RunKind::Evaluation };
    let store = Store::create(folder, &new).await.unwrap();
    store.open_eval(0, PolicyVersion(0)).await.unwrap();
    let group = GroupId::Eval { round: 0, index: 0 };
    store.open_group(group, 0, HOSTILE, 1).await.unwrap();
    let episode = EpisodeId { group, member: 0 };
    let Claim::Attempt(attempt) = store.claim_attempt(episode).await.unwrap() else {
        unreachable!()
    };
    let long = format!("{HOSTILE}{}", "x".repeat(100_000));
    let turn = json!({
        "text": long, "observation": format!("{HOSTILE}\nnext line"), "generate_ms": 1, "exec_ms": 1,
        "actions": [
            { "name": "bash", "arguments": { "command": HOSTILE } },
            { "name": HOSTILE, "arguments": { "path": HOSTILE } },
        ],
    });
    let detail = json!({
        "task_id": HOSTILE, "turns": [turn], "patch": format!("+{HOSTILE}"),
        "verdict": {
            "reward": 1.0, "official_reward": 1.0, "statuses": { HOSTILE: "PASSED" },
            "differing": [HOSTILE],
        },
        "routing_problem": HOSTILE,
    });
    let record = EpisodeRecord {
        attempt,
        outcome: Outcome::Scored { reward: 1.0 },
        branches: Vec::new(),
        detail,
        summary: serde_json::Value::Null,
    };
    store.seal_attempt(&record).await.unwrap();
}

#[tokio::test]
async fn shown_runs_and_episodes_do_not_act_on_the_terminal() {
    let temp = tempfile::tempdir().unwrap();
    let folder = Utf8PathBuf::from_path_buf(temp.path().join("run")).unwrap();
    run_folder(&folder).await;
    let (run, page) = (folder.as_str(), temp.path().join("page.html"));
    let (episode, page) = ("v00000-00000.00", page.to_str().unwrap());
    for args in [
        &["show", run][..],
        &["show", run, "--json"],
        &["show", run, episode],
        &["show", run, episode, "--json"],
        &["show", run, HOSTILE],
        &["show", HOSTILE],
        &["analyze", run, "--out", page],
        &["analyze", run, "--out", page, "-vv"],
        &["tasks", "show", HOSTILE],
        &["grade", "--tasks", HOSTILE, "--instance", HOSTILE, "--log", HOSTILE],
        &["config", "check", "--config", HOSTILE],
    ] {
        let output = orchestrate(args);
        for stream in [&output.stdout, &output.stderr] {
            let text = String::from_utf8(stream.clone()).unwrap();
            let acts = text.chars().find(|&c| !matches!(c, '\n' | '\t') && is_unprintable(c));
            assert_eq!(acts, None, "{args:?}: {text}");
        }
    }
    let shown = orchestrate(&["show", run, episode]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success() && text.contains("start\\u{1b}]0;title\\u{7}"), "{text}");
    assert!(text.contains("\nnext line"), "{text}");
    let json = orchestrate(&["show", run, episode, "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["detail"]["task_id"], HOSTILE);

    let html = std::fs::read_to_string(page).unwrap();
    assert_eq!(html.chars().find(|&c| !matches!(c, '\n' | '\t') && is_unprintable(c)), None);
    assert_eq!(mode(page), 0o600);
}

fn mode(path: &str) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn files_are_private_whatever_the_mask_was() {
    let temp = tempfile::tempdir().unwrap();
    let path = |name: &str| temp.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("log"), "none").unwrap();
    let row = json!({
        "instance_id": "pallets__flask-1", "repo": "pallets/flask", "version": "2.0",
        "base_commit": "c0", "problem_statement": "It breaks.", "patch": "p", "test_patch": "t",
        "FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": [],
    });
    std::fs::write(path("rows"), row.to_string()).unwrap();
    let (rows, log, report) = (path("rows"), path("log"), path("report"));
    let instance = "pallets__flask-1";
    let graded = orchestrate(&[
        "grade",
        "--tasks",
        &rows,
        "--instance",
        instance,
        "--log",
        &log,
        "--report",
        &report,
    ]);
    assert!(graded.status.success(), "{graded:?}");
    assert_eq!(mode(&report), 0o600);
}
