//! The program on task files, with real Docker: verify, grade, evaluate.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed step fails the test"
)]

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

fn docker(args: &[&str]) -> Option<String> {
    let output = Command::new("docker").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn image(name: &str) -> Option<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout/tests/images");
    orchestrate_e2e::recipe_image(folder.as_ref(), name).unwrap()
}

const GOLD: &str = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n\
    @@ -4,2 +4,2 @@\n     # three\n-    return sum(items[:-1])\n+    return sum(items)\n";

/// One sound row of each family, and two that are not.
fn rows() -> Option<Vec<Value>> {
    let (r2e_image, swe_image) = (image("r2e")?, image("swe")?);
    let base =
        docker(&["run", "--rm", "--network=none", &swe_image, "git", "rev-parse", "HEAD~1"])?;
    let row = include_str!("../../rollout/tests/images/r2e_row.json");
    let mut r2e: Value = serde_json::from_str(row).unwrap();
    r2e["docker_image"] = json!(r2e_image);
    let swe = json!({
        "instance_id": "pytest-dev__pytest-1", "repo": "pytest-dev/pytest", "version": "7.0",
        "base_commit": base, "problem_statement": "total forgets the last item.", "patch": GOLD,
        "test_patch": "diff --git a/tests/test_calc.py b/tests/test_calc.py\n\
            --- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n@@ -3,3 +3,7 @@\n \n \
            def test_empty():\n     assert total([]) == 0\n+\n+\n+def test_total():\n\
            +    assert total([1, 2]) == 3\n",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_total"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_empty"],
        "docker_image": swe_image,
    });
    let mut unsound = swe.clone();
    unsound["instance_id"] = json!("pytest-dev__pytest-2");
    unsound["FAIL_TO_PASS"] = json!(["tests/test_calc.py::test_absent"]);
    let mut absent = swe.clone();
    absent["instance_id"] = json!("pytest-dev__pytest-3");
    absent["docker_image"] = json!("orchestrate/no-such-image:1");
    Some(vec![r2e, swe, unsound, absent])
}

fn write(path: &Path, lines: &[Value]) -> String {
    let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

fn orchestrate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orchestrate")).args(arguments).output().unwrap()
}

fn json_of(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
fn docker_verify_tells_sound_unsound_and_broken_tasks_apart() {
    let Some(rows) = rows() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = write(&folder.path().join("rows.jsonl"), &rows);
    let logs = folder.path().join("logs-of-checks");
    let output =
        orchestrate(&["tasks", "verify", &file, "--json", "--out", logs.to_str().unwrap()]);
    assert!(!output.status.success());
    let found = json_of(&output);
    assert_eq!(found["sound"], json!(["adder__c0ffee", "pytest-dev__pytest-1"]));
    assert!(found["unsound"]["pytest-dev__pytest-2"].as_str().unwrap().contains("test_absent"));
    assert!(found["broken"]["pytest-dev__pytest-3"].as_str().unwrap().contains("no-such-image"));
    assert_eq!(found["flaky"], json!({}));
    for (round, model) in [(1, "gold"), (1, "nothing"), (2, "gold"), (2, "nothing")] {
        let kept = format!("logs/run_evaluation/round-{round}/{model}/pytest-dev__pytest-2");
        let log = std::fs::read_to_string(logs.join(kept).join("test_output.txt")).unwrap();
        assert!(log.contains("test_total"), "{model}: {log}");
    }

    let ids = "adder__c0ffee,pytest-dev__pytest-1";
    let sound = orchestrate(&["tasks", "verify", &file, "--ids", ids, "--json"]);
    assert!(sound.status.success(), "{}", String::from_utf8_lossy(&sound.stderr));
    assert_eq!(json_of(&sound)["checked"], 2);
    let unknown = orchestrate(&["tasks", "verify", &file, "--ids", "unknown"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no task `unknown`"));
}

#[test]
fn docker_predictions_are_graded_once_and_leave_the_harness_files() {
    let Some(rows) = rows() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let file = write(&at("rows.jsonl"), &rows[..3]);
    let prediction = |id: &str, patch: Value| json!({"instance_id": id, "model_name_or_path": "org/model", "model_patch": patch});
    let predictions = write(
        &at("preds.jsonl"),
        &[
            prediction(
                "adder__c0ffee",
                json!(GOLD.replace(
                    "@@ -4,2 +4,2 @@\n     # three",
                    "@@ -1,2 +1,2 @@\n def total(items):"
                )),
            ),
            prediction("pytest-dev__pytest-1", json!(GOLD)),
            prediction("pytest-dev__pytest-2", Value::Null),
        ],
    );
    let out = folder.path().to_str().unwrap();
    let grade =
        ["grade", "--tasks", &file, "--predictions", &predictions, "--run-id", "r", "--out", out];
    let report = json_of(&orchestrate(&[&grade[..], &["--json"]].concat()));
    assert_eq!(report["resolved_ids"], json!(["adder__c0ffee", "pytest-dev__pytest-1"]));
    assert_eq!(report["empty_patch_ids"], json!(["pytest-dev__pytest-2"]));
    assert_eq!(report["error_instances"], 0);
    let written = std::fs::read_to_string(at("org__model.r.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&written).unwrap(), report);

    // A verdict is used again for the same inputs alone.
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let again = orchestrate(&[&grade[..], &["--json"]].concat());
    assert_eq!(json_of(&again), report);
    assert!(said(&again).contains("2 verdicts") && !said(&again).contains("graded again"));

    // A kill after the first write of another patch leaves that patch next to the first one's report.
    let folder = at("logs/run_evaluation/r/org__model/pytest-dev__pytest-1");
    let wrong = GOLD.replace("+    return sum(items)\n", "+    return 0\n");
    std::fs::write(folder.join("patch.diff"), &wrong).unwrap();
    write(&at("preds.jsonl"), &[prediction("pytest-dev__pytest-1", json!(wrong))]);
    let again = orchestrate(&[&grade[..], &["--json"]].concat());
    assert_eq!(json_of(&again)["unresolved_ids"], json!(["pytest-dev__pytest-1"]));
    assert!(said(&again).contains("graded again") && said(&again).contains("the patch"));

    let newer = [&grade[..], &["--json", "--harness", "5.0.2"]].concat();
    let again = orchestrate(&newer);
    assert!(said(&again).contains("harness 4.1.0 then, harness 5.0.2 now"), "{}", said(&again));
    assert_eq!(json_of(&again)["failure_reasons"], json!({}));

    // A report that another program wrote is not this program's verdict.
    let kept = folder.join("report.json");
    let known = std::fs::read_to_string(&kept).unwrap();
    assert!(known.contains("\"resolved\": false"));
    std::fs::write(&kept, known.replace("\"resolved\": false", "\"resolved\": true")).unwrap();
    let again = orchestrate(&newer);
    assert_eq!(json_of(&again)["unresolved_ids"], json!(["pytest-dev__pytest-1"]));
    assert!(said(&again).contains("report.json has changed"), "{}", said(&again));
    let table = orchestrate(&grade);
    assert!(String::from_utf8_lossy(&table.stdout).contains("pytest-dev/pytest"));
}

#[test]
fn docker_evaluation_counts_by_repository_and_fails_on_broken_episodes_unless_allowed() {
    let Some(rows) = rows() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let eval = |run: &str, rows: &[Value], more: &[&str]| {
        let file = write(&folder.path().join(format!("{run}.jsonl")), rows);
        let (held_out, run_dir) = (format!("tasks.held_out_file={file}"), folder.path().join(run));
        let run_dir = run_dir.to_str().unwrap().to_owned();
        let settings = [
            "eval",
            "--run-dir",
            &run_dir,
            "--json",
            "--set",
            &held_out,
            "--set",
            "rollout.max_turns=2",
            "--set",
            "rollout.show_tools=false",
            "--set",
            "run.max_broken_share=1.0",
            "--set",
            "rollout.max_attempts=1",
        ];
        let mut command = Command::new(env!("CARGO_BIN_EXE_orchestrate"));
        command.args(settings).args(more).current_dir(root).output().unwrap()
    };
    let whole = eval("whole", &rows[..2], &[]);
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let found = json_of(&whole);
    for repository in ["adder", "pytest-dev/pytest"] {
        assert_eq!(found["repositories"][repository]["tasks"], 1, "{found}");
        assert_eq!(found["repositories"][repository]["broken"], 0, "{found}");
    }
    let run = folder.path().join("whole");
    let predictions = std::fs::read_to_string(run.join("predictions.jsonl")).unwrap();
    assert_eq!(predictions.lines().count(), 2);
    let logs = run.join("logs/run_evaluation/v00000.00/policy@0");
    assert!(logs.join("pytest-dev__pytest-1/report.json").exists());
    assert!(logs.join("adder__c0ffee/test_output.txt").exists());

    let broken = [rows[1].clone(), rows[3].clone()];
    let refused = eval("broken", &broken, &[]);
    assert!(!refused.status.success());
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(words.contains("1 of 2 episodes broke"), "{words}");
    let told = eval("told", &broken, &["--allow-broken"]);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
}
