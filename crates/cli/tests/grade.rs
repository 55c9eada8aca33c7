//! The program on task files and recorded logs, without Docker.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use serde_json::{Value, json};
use std::process::{Command, Output};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

fn orchestrate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orchestrate")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that must succeed and parses its output as JSON.
fn printed(arguments: &[&str]) -> Value {
    let output = orchestrate(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows() -> String {
    let swe = json!({
        "instance_id": "pallets__flask-1", "repo": "pallets/flask", "version": "2.0",
        "base_commit": "c0", "problem_statement": "It breaks.\nBadly.", "patch": "the solution",
        "test_patch": "the tests", "FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": "[\"t::b\"]",
    });
    let mut unknown = swe.clone();
    unknown["instance_id"] = json!("bad-1");
    unknown["version"] = json!("0.1");
    let r2e = json!({
        "repo_name": "aiohttp", "docker_image": "i", "commit_hash": "abc",
        "parsed_commit_content": "{\"file_diffs\": []}",
        "execution_result_content": {"test_file_names": ["test_1.py"], "test_file_codes": ["x"]},
        "problem_statement": "[ISSUE] It breaks. [/ISSUE]",
        "expected_output_json": {"a": "PASSED"},
    });
    format!("{swe}\n{unknown}\n{r2e}\n")
}

#[test]
fn task_file_is_imported_listed_and_shown() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let report = printed(&["tasks", "import", &file, "--json"]);
    assert_eq!(report["usable"], json!({"r2e": 1, "swe-bench": 1}));
    assert_eq!(report["refused"][0]["id"], "bad-1");
    assert!(report["refused"][0]["reason"].as_str().unwrap().contains("known: 2.0"));

    let list = orchestrate(&["tasks", "list", "--file", &file, "--json"]);
    let ids: Vec<_> = text(&list.stdout)
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, ["pallets__flask-1", "aiohttp__abc"]);
    assert!(text(&list.stderr).contains("refused: row 2 (bad-1)"));

    let shown = text(&orchestrate(&["tasks", "show", "pallets__flask-1", "--file", &file]).stdout);
    for part in
        ["sweb.eval.x86_64.pallets_1776_flask-1", "Badly.", "t::b", "the tests", "the solution"]
    {
        assert!(shown.contains(part), "{part}");
    }
    let missing = orchestrate(&["tasks", "show", "unknown", "--file", &file]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stderr).contains("no task `unknown`"));
    let refused = orchestrate(&["tasks", "show", "bad-1", "--file", &file]);
    assert_eq!(refused.status.code(), Some(3));
    assert!(text(&refused.stderr).contains("known: 2.0"));
    assert_eq!(orchestrate(&["tasks", "import", "no/such.jsonl"]).status.code(), Some(3));
}

#[test]
fn recorded_log_is_graded_by_the_selected_rules() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let grade = |id: &str, log: &str, more: &[&str]| {
        let log = folder.file("log", log);
        let arguments = ["grade", "--tasks", &file, "--instance", id, "--log", &log, "--json"];
        printed(&[&arguments, more].concat())
    };
    let skipped = ">>>>> Start Test Output\nSKIPPED t::a\nPASSED t::b\n>>>>> End Test Output\n";
    let old = grade("pallets__flask-1", skipped, &[]);
    assert_eq!(old["resolved"], true);
    assert_eq!(old["harness"], "swebench-4.1.0");
    assert_eq!(old["tests_status"]["FAIL_TO_PASS"], json!({"success": [], "failure": []}));
    let path = folder.file("report.json", "");
    let new = grade("pallets__flask-1", skipped, &["--harness", "5.0.2", "--report", &path]);
    assert_eq!(new["resolved"], false);
    assert_eq!(new["tests_status"]["FAIL_TO_PASS"]["failure"], json!(["t::a"]));
    assert_eq!(new["tests_status"]["PASS_TO_PASS"]["success"], json!(["t::b"]));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(report, json!({"pallets__flask-1": new}));
    let predictions = json!({"pallets__flask-1": {"model_name_or_path": "m", "model_patch": null}});
    let predictions = folder.file("preds.json", predictions.to_string());
    let none = grade("pallets__flask-1", skipped, &["--predictions", &predictions]);
    assert_eq!((&none["patch_is_None"], &none["resolved"]), (&json!(true), &json!(false)));

    let forged = "short test summary info\nPASSED t::a\nshort test summary info\nFAILED t::a";
    assert_eq!(grade("aiohttp__abc", forged, &[])["resolved"], false);
    let official = grade("aiohttp__abc", forged, &["--set", "reward.compat=r2e"]);
    assert_eq!(official["resolved"], true);
    assert_eq!(official["tests_status"], json!({"a": "PASSED"}));
    assert_eq!(official["differing"], json!([]));
}

#[test]
fn eval_script_is_printed_without_docker() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let show = |id: &str, more: &[&str]| {
        orchestrate(&[&["tasks", "show", id, "--file", &file, "--eval-script"], more].concat())
    };
    let script = text(&show("pallets__flask-1", &[]).stdout);
    assert!(script.starts_with("#!/bin/bash\n") && script.contains(">>>>> Start Test Output"));
    assert!(!script.contains("Test Exit Code"));
    let new = text(&show("pallets__flask-1", &["--harness", "5.0.2"]).stdout);
    assert!(new.contains("Test Exit Code"), "{new}");
    assert_eq!(show("aiohttp__abc", &[]).status.code(), Some(2));
}

#[test]
fn a_row_for_another_version_of_the_harness_is_refused_before_anything_runs() {
    let folder = Folder::new();
    let row = json!({
        "instance_id": "a__b-1", "repo": "a/b", "version": "1", "base_commit": "c0",
        "problem_statement": "It breaks.", "patch": "p", "test_patch": "diff",
        "FAIL_TO_PASS": ["t::a"], "PASS_TO_PASS": [], "log_parser": "parse_log_pytest",
        "eval_script": "#!/bin/bash\n: '>>>>> Start Test Output'\nmake\n: '>>>>> End Test Output'",
    });
    let file = folder.file("rows.jsonl", format!("{row}\n{}", rows()));
    let log = ">>>>> Start Test Output\nPASSED t::a\n>>>>> End Test Output\n";
    let log = folder.file("log", log);
    let remedy = "needs reward.harness = \"5.0.2\" (grade: --harness 5.0.2)";
    let grade = ["grade", "--tasks", &file, "--instance", "a__b-1", "--log", &log];
    let show = ["tasks", "show", "a__b-1", "--file", &file, "--eval-script"];
    for arguments in [&grade[..], &show] {
        let refused = orchestrate(arguments);
        assert_eq!(refused.status.code(), Some(3), "{arguments:?}");
        let reason = text(&refused.stderr);
        assert!(reason.contains("row 1 (a__b-1)") && reason.contains(remedy), "{reason}");
        let fine = orchestrate(&[arguments, &["--harness", "5.0.2"]].concat());
        assert!(fine.status.success(), "{}", text(&fine.stderr));
    }
    let list = |more: &[&str]| orchestrate(&[&["tasks", "list", "--file", &file], more].concat());
    let reason = text(&list(&[]).stderr);
    assert!(reason.contains("refused: row 1 (a__b-1)") && reason.contains(remedy), "{reason}");
    let listed = list(&["--set", "reward.harness=5.0.2"]);
    assert!(text(&listed.stdout).contains("a__b-1"), "{}", text(&listed.stderr));
    assert!(orchestrate(&["tasks", "show", "a__b-1", "--file", &file]).status.success());
    let import = orchestrate(&["tasks", "import", &file]);
    let note = "1 row can only be graded with reward.harness = \"5.0.2\"";
    assert!(text(&import.stderr).contains(note), "{}", text(&import.stderr));

    let preds = json!({"instance_id": "a__b-1", "model_name_or_path": "m", "model_patch": "diff"});
    let preds = folder.file("preds.jsonl", preds.to_string());
    let out = folder.0.path().join("out");
    let out = out.to_str().unwrap();
    let refused = orchestrate(&[
        "grade",
        "--tasks",
        &file,
        "--predictions",
        &preds,
        "--run-id",
        "r",
        "--out",
        out,
    ]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains(remedy), "{}", text(&refused.stderr));
}

#[test]
fn skipped_tasks_are_not_listed() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let skip = "tasks.skip=[\"pallets__flask-1\", \"bad-1\", \"aiohttp__abd\"]";
    let list = orchestrate(&["tasks", "list", "--file", &file, "--set", skip]);
    let (rows, notes) = (text(&list.stdout), text(&list.stderr));
    assert!(!rows.contains("pallets__flask-1") && rows.contains("aiohttp__abc"), "{rows}");
    assert!(
        notes.contains("tasks.skip leaves out 2 rows") && !notes.contains("refused"),
        "{notes}"
    );
    assert!(notes.contains("no row has the id `aiohttp__abd`"), "{notes}");
    let all = "tasks.skip=[\"pallets__flask-1\", \"aiohttp__abc\"]";
    let none = orchestrate(&["tasks", "list", "--file", &file, "--set", all]);
    assert_eq!(none.status.code(), Some(3));
    let reason = "no usable row: 1 refused, 2 listed in tasks.skip";
    assert!(text(&none.stderr).contains(reason), "{}", text(&none.stderr));
    let skip = "tasks.skip=[\"micro__train_000001\"]";
    let few = ["--split", "train", "--set", "tasks.train=3", "--set", skip];
    let list = orchestrate(&[&["tasks", "list", "micro"][..], &few].concat());
    let (tasks, notes) = (text(&list.stdout), text(&list.stderr));
    assert!(!tasks.contains("micro__train_000001") && tasks.contains("micro__train_000002"));
    assert!(notes.contains("tasks.skip leaves out 1 task"), "{notes}");
    let shown = orchestrate(&[&["tasks", "show", "micro__train_000001"][..], &few].concat());
    assert!(shown.status.success(), "{}", text(&shown.stderr));
}

#[test]
fn hostile_rows_and_logs_are_reported_safely() {
    let folder = Folder::new();
    let hostile =
        rows().replace("pallets__flask-1", "a\\u001b[31m\\nb").replace("bad-1", "c\\u0007");
    let file = folder.file("rows.jsonl", hostile);
    let output = orchestrate(&["tasks", "list", "--file", &file]);
    assert!(output.status.success());
    for bytes in [&output.stdout, &output.stderr] {
        assert!(!text(bytes).contains(['\x1b', '\x07']), "{}", text(bytes));
    }

    let file = folder.file("rows.jsonl", rows());
    let grade = |log: &str| {
        let id = "pallets__flask-1";
        orchestrate(&["grade", "--tasks", &file, "--instance", id, "--log", log])
    };
    let zipped = grade(&folder.file("x.log.gz", b"\x1f\x8bxx"));
    assert_eq!(zipped.status.code(), Some(3));
    assert!(text(&zipped.stderr).contains("x.log.gz is compressed"));
    let long = grade(&folder.file("long", "x".repeat(3 << 20)));
    assert!(text(&long.stderr).contains("bytes: 1; of each"), "{}", text(&long.stderr));
    let cut = folder.file("rows.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x01");
    for command in ["import", "list"] {
        let flag = if command == "list" { &["--file"][..] } else { &[] };
        let output = orchestrate(&[&["tasks", command], flag, &[cut.as_str()]].concat());
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    }
}

#[test]
fn unknown_instance_exits_with_2_and_unusable_log_with_3() {
    let folder = Folder::new();
    let rows = folder.file("rows.jsonl", rows());
    let predictions = folder.file("preds.jsonl", "");
    let log = folder.file("log", "");
    let binary = folder.file("binary", b">>>>> Start Test Output\nPASSED t::\xff\n");
    let missing = folder.0.path().join("missing");
    let missing = missing.to_str().unwrap();
    let flask = "pallets__flask-1";
    for (code, tasks, more) in [
        (2, rows.as_str(), &["--instance", "unknown", "--log", &log][..]),
        (2, &rows, &["--instance", flask, "--log", &log, "--predictions", &predictions]),
        (3, &rows, &["--instance", flask, "--log", missing]),
        (3, &rows, &["--instance", flask, "--log", &binary]),
        (3, missing, &["--instance", flask, "--log", &log]),
        (3, &rows, &["--predictions", missing]),
        (3, &rows, &["--instance", flask, "--log", &log, "--predictions", missing]),
    ] {
        let output = orchestrate(&[&["grade", "--tasks", tasks], more].concat());
        assert_eq!(output.status.code(), Some(code), "{more:?}: {}", text(&output.stderr));
    }
    let report = folder.0.path().join("no/such/report.json");
    let write = ["--instance", flask, "--log", &log, "--report", report.to_str().unwrap()];
    let output = orchestrate(&[&["grade", "--tasks", &rows], &write[..]].concat());
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
}

#[test]
fn every_way_of_grading_reads_the_settings() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let log = ">>>>> Start Test Output\nSKIPPED t::a\nPASSED t::b\n>>>>> End Test Output\n";
    let log = folder.file("log", log);
    let id = "pallets__flask-1";
    let logged = ["grade", "--tasks", &file, "--instance", id, "--log", &log, "--json"];
    let shown = ["tasks", "show", id, "--file", &file, "--eval-script"];
    let new = "reward.harness=\"5.0.2\"";
    assert_eq!(printed(&[&logged, &["--set", new][..]].concat())["harness"], "swebench-5.0.2");
    let script = text(&orchestrate(&[&shown, &["--set", new][..]].concat()).stdout);
    assert!(script.contains("Test Exit Code"), "{script}");
    let preds = json!({"instance_id": id, "model_name_or_path": "m", "model_patch": "diff"});
    let preds = folder.file("preds.jsonl", preds.to_string());
    let out = folder.0.path().join("out");
    let patches =
        ["grade", "--tasks", &file, "--predictions", &preds, "--out", out.to_str().unwrap()];
    for arguments in [&logged[..], &shown, &patches] {
        for (code, more, reason) in [
            (3, &["--set", "reward.nope=1"][..], "reward.nope"),
            (3, &["--config", "/nope.toml"], "/nope.toml"),
            (2, &["--harness", "4.1.0", "--set", new], "--harness 4.1.0 and reward.harness"),
        ] {
            let refused = orchestrate(&[arguments, more].concat());
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(code), "{arguments:?}: {said}");
            assert!(said.contains(reason), "{arguments:?}: {said}");
        }
    }
    let same = printed(&[&logged, &["--harness", "5.0.2", "--set", new][..]].concat());
    assert_eq!(same["harness"], "swebench-5.0.2");
    let skipped = "tasks.skip=[\"pallets__flask-1\"]";
    let said = text(&orchestrate(&[&logged, &["--set", skipped][..]].concat()).stderr);
    assert!(said.contains("`pallets__flask-1` is in tasks.skip"), "{said}");
}

#[test]
fn options_that_cannot_apply_to_a_log_are_refused() {
    let folder = Folder::new();
    let file = folder.file("rows.jsonl", rows());
    let log = ">>>>> Start Test Output\nPASSED t::a\nPASSED t::b\n>>>>> End Test Output\n";
    let log = folder.file("log", log);
    let config = folder.file("config.toml", "");
    let grade = |id: &str, more: &[&str]| {
        let arguments = ["grade", "--tasks", &file, "--instance", id, "--log", &log, "--json"];
        orchestrate(&[&arguments, more].concat())
    };
    let flask = "pallets__flask-1";
    let of = |model: &str, patch: &str| {
        json!({"instance_id": flask, "model_name_or_path": model, "model_patch": patch}).to_string()
    };
    let empty = folder.file("empty.jsonl", of("m", ""));
    let graded = grade(flask, &["--predictions", &empty]);
    let report: Value = serde_json::from_slice(&graded.stdout).unwrap();
    assert_eq!((&report["patch_is_None"], &report["resolved"]), (&json!(true), &json!(false)));

    let both = folder.file("both.jsonl", format!("{}\n{}", of("first", "x"), of("second", "")));
    let report = folder.0.path().join("report.json");
    let report = report.to_str().unwrap();
    for (id, more, reason) in [
        (flask, &["--predictions", both.as_str()][..], "first, second"),
        (flask, &["--config", &config, "--report", &config], "config.toml is an input"),
        ("aiohttp__abc", &["--report", report], "--report does not apply to rows of R2E-Gym"),
        ("aiohttp__abc", &["--predictions", &empty], "--predictions does not apply to rows"),
    ] {
        let refused = grade(id, more);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {said}");
        assert!(said.contains(reason), "{more:?}: {said}");
    }
}

#[test]
fn converted_task_folders_are_not_written_to() {
    let folder = Folder::new();
    let toml = folder.file("task.toml", "version = \"1.0\"\n");
    let path = folder.0.path().to_str().unwrap();
    let new = folder.0.path().join("rows.jsonl");
    for out in [toml.as_str(), new.to_str().unwrap()] {
        let refused = orchestrate(&["tasks", "import", "harbor", path, "--out", out]);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains("a task folder that this command reads"), "{said}");
    }
    assert_eq!(std::fs::read_to_string(&toml).unwrap(), "version = \"1.0\"\n");
}

#[test]
fn unknown_episode_exits_with_2() {
    let folder = Folder::new();
    let run_dir = folder.0.path().join("run");
    let run_dir = camino::Utf8Path::from_path(&run_dir).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let new = orchestrate_store::NewRun {
        run: orchestrate_types::RunId::generate(),
        plan_digest: "d".into(),
        kind: orchestrate_store::RunKind::Training,
    };
    let _store = runtime.block_on(orchestrate_store::Store::create(run_dir, &new)).unwrap();
    for id in ["nosuch", "t000012.03"] {
        let output = orchestrate(&["show", run_dir.as_str(), id]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(id) && said.contains("orchestrate show"), "{said}");
    }
}
