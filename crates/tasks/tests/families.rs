//! Rows of the data sets that have SWE-bench's columns: SWE-Gym, SWE-rebench, SWE-smith, and
//! NeMo-Gym's records of them.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use camino::Utf8PathBuf;
use orchestrate_tasks::load::{self, Refused, Row};
use orchestrate_tasks::swe::{
    Harness, LogParser, SweFamily, SweRow, eval_script, grade, strict_eval_script,
};
use orchestrate_tasks::{Split, TaskFile, patch};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BUG: &str = "diff --git a/funcy/seqs.py b/funcy/seqs.py\nindex 1..2 100644\n\
    --- a/funcy/seqs.py\n+++ b/funcy/seqs.py\n@@ -1,2 +1,3 @@\n def take(n, seq):\n\
    -    return list(islice(seq, n))\n+    result = list(islice(seq, n))\n+    return result[:-1]\n";
const TEST_PATCH: &str = "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n\
    +++ b/tests/test_a.py\n@@ -1 +1 @@\n-a\n+b\n";

fn smith(id: &str) -> Value {
    json!({
        "instance_id": id, "repo": "swesmith/Suor__funcy.207a7810", "patch": BUG,
        "FAIL_TO_PASS": ["tests/test_seqs.py::test_take"],
        "PASS_TO_PASS": ["tests/test_seqs.py::test_drop", "tests/test_colls.py::test_zip"],
        "created_at": "2025-03-21T08:23:31", "base_commit": "c0ffee",
        "image_name": "swesmith.x86_64.Suor__funcy.207a7810",
        "problem_statement": "take returns too little.",
    })
}

fn gym(id: &str) -> Value {
    json!({
        "instance_id": id, "repo": "getmoto/moto", "version": "5.0", "base_commit": "c0ffee",
        "hints_text": "", "created_at": "2024-02-19", "problem_statement": "It breaks.",
        "patch": "diff", "test_patch": TEST_PATCH, "FAIL_TO_PASS": ["tests/test_a.py::test_x"],
        "PASS_TO_PASS": [],
    })
}

fn rebench(id: &str) -> Value {
    json!({
        "instance_id": id, "repo": "o/r", "version": "0.3", "base_commit": "c0ffee",
        "problem_statement": "It breaks.", "patch": "diff", "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["tests/test_a.py::test_x"], "PASS_TO_PASS": [], "FAIL_TO_FAIL": [],
        "docker_image": "swerebench/sweb.eval.x86_64.o_1776_r-1", "meta": {"is_lite": false},
        "install_config": {
            "env_vars": null, "install": "pip install -e .[dev]", "log_parser": "parse_log_pytest",
            "packages": "requirements.txt", "pip_packages": ["pytest"], "pre_install": null,
            "python": "3.9", "reqs_path": ["requirements.txt"],
            "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider",
        },
    })
}

fn loaded(rows: &[Value]) -> (Vec<Row>, Vec<Refused>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for row in rows {
        writeln!(file, "{row}").unwrap();
    }
    let path = Utf8PathBuf::from_path_buf(file.path().to_owned()).unwrap();
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for row in load::rows(&path).unwrap() {
        match row {
            Ok(row) => good.push(row),
            Err(refused) => bad.push(refused),
        }
    }
    (good, bad)
}

#[test]
fn rows_of_each_data_set_become_tasks_with_its_image_and_parser() {
    let rows =
        [smith("Suor__funcy.207a7810.func_pm__x1"), gym("getmoto__moto-1"), rebench("o__r-1")];
    let (good, bad) = loaded(&rows);
    assert_eq!(bad, Vec::new());
    let found: Vec<_> = good
        .iter()
        .map(|row| {
            let task = row.to_task().unwrap();
            assert_eq!((task.environment.as_str(), task.split), (row.environment(), Split::Train));
            let Row::Swe(swe) = row else { panic!("{row:?}") };
            (row.environment(), row.image(), swe.log_parser(Harness::default()).unwrap())
        })
        .collect();
    let want = [
        (
            "swe-smith",
            "swebench/swesmith.x86_64.suor_1776_funcy.207a7810",
            LogParser::PytestVerbose,
        ),
        ("swe-gym", "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest", LogParser::Pytest),
        ("swe-rebench", "swerebench/sweb.eval.x86_64.o_1776_r-1", LogParser::Pytest),
    ];
    assert_eq!(found, want.map(|(name, image, parser)| (name, image.to_owned(), parser)));
    let mut text = rebench("o__r-2");
    text["install_config"] = text["install_config"].to_string().into();
    text.as_object_mut().unwrap().remove("docker_image");
    let (good, bad) = loaded(&[text]);
    assert_eq!(bad, Vec::new());
    assert_eq!(good[0].image(), "swerebench/sweb.eval.x86_64.o_1776_r-2:latest");
}

#[test]
fn the_image_that_a_row_names_is_used_or_the_row_is_refused() {
    let own = "registry.example/team/fixed:1";
    let with = |mut row: Value, columns: Value| {
        row.as_object_mut().unwrap().extend(columns.as_object().unwrap().clone());
        row
    };
    let published = gym("getmoto__moto-1");
    let bug = || smith("Suor__funcy.207a7810.func_pm__x1");
    let image_of = |row: Value| {
        let (good, bad) = loaded(&[row]);
        good.first().map(Row::image).ok_or_else(|| bad[0].reason.clone())
    };
    for column in ["image", "docker_image", "image_name"] {
        for row in [published.clone(), bug()] {
            assert_eq!(image_of(with(row, json!({column: own}))).unwrap(), own, "{column}");
        }
        let empty = with(published.clone(), json!({column: ""}));
        assert_eq!(image_of(empty).unwrap(), image_of(published.clone()).unwrap(), "{column}");
    }
    let null = json!({"image": null, "docker_image": " ", "image_name": own});
    assert_eq!(image_of(with(published.clone(), null)).unwrap(), own);
    // The same image under its short and its full name.
    let twice = json!({"docker_image": "a/b", "image_name": "docker.io/a/b:latest"});
    assert_eq!(image_of(with(published.clone(), twice)).unwrap(), "a/b");
    for name in [
        "jyangballin/swesmith.x86_64.suor_1776_funcy.207a7810",
        "swebench/swesmith.x86_64.Suor__funcy.207a7810:latest",
    ] {
        let found = image_of(with(bug(), json!({"image_name": name}))).unwrap();
        assert_eq!(found, "swebench/swesmith.x86_64.suor_1776_funcy.207a7810");
    }
    let rebuilt = "registry.example/swesmith.x86_64.suor_1776_funcy.207a7810";
    assert_eq!(image_of(with(bug(), json!({"image_name": rebuilt}))).unwrap(), rebuilt);

    for (columns, reason) in [
        (json!({"image_name": own, "docker_image": "registry.example/b:1"}), "column `image_name`"),
        (json!({"image": "a/b:1", "docker_image": "a/b:2"}), "column `docker_image`"),
        (json!({"image_name": "Not An Image"}), "column `image_name`"),
        (json!({"docker-image": own}), "did you mean `docker_image`?"),
        (json!({"imagename": own}), "did you mean `image_name`?"),
        (json!({"container_image": own}), "`container_image`, which is not read"),
        (json!({"image_name": 7}), "image_name"),
        (json!({"EvalScript": "true"}), "did you mean `eval_script`?"),
    ] {
        let found = image_of(with(published.clone(), columns.clone())).unwrap_err();
        assert!(found.contains(reason), "{columns}: {found}");
    }
}

#[test]
fn the_gold_patch_of_a_bug_undoes_it() {
    let (good, _) = loaded(&[smith("Suor__funcy.207a7810.func_pm__x1")]);
    let task = good[0].to_task().unwrap();
    let fixed = [TaskFile {
        path: "funcy/seqs.py".to_owned(),
        content: "def take(n, seq):\n    return list(islice(seq, n))\n".to_owned(),
    }];
    let start = task.start().unwrap();
    let given = patch::apply(&fixed, &start.patch).unwrap();
    assert!(given[0].content.contains("[:-1]"));
    assert_eq!(patch::apply(&given, &task.gold_patch).unwrap(), fixed);
    assert_eq!(start.withheld, ["tests/test_seqs.py"]);
    assert_eq!(start.restored, ["tests/test_colls.py", "tests/test_seqs.py"]);
    let (other, _) = loaded(&[gym("getmoto__moto-1")]);
    assert_eq!(other[0].to_task().unwrap().start(), None);
}

#[test]
fn rows_that_cannot_be_run_exactly_are_refused_with_the_reason() {
    let changed = |mut row: Value, column: &str, value: Value| {
        row[column] = value;
        row
    };
    let config = |name: &str, value: Value| {
        let mut row = rebench("o__r-1");
        row["install_config"][name] = value;
        row
    };
    let id = "Suor__funcy.207a7810.x";
    let nemo = |data_set: &str| {
        json!({"responses_create_params": {"input": [], "metadata": {"instance_id": "o__r-1",
            "dataset_name": data_set, "instance_dict": "{}"}}})
    };
    let cases = [
        (changed(smith(id), "repo", json!("swesmith/gin-gonic__gin.3c12d2a8")), "`repo`"),
        (changed(smith(id), "instance_id", json!("Suor__funcy.1.x")), "`instance_id`"),
        (changed(smith(id), "patch", json!("")), "no bug"),
        (changed(smith(id), "FAIL_TO_PASS", json!(["funcy/seqs.py::take"])), "a test file"),
        (changed(gym("m-1"), "version", json!("9.9")), "known: 0.4 1.0"),
        (changed(gym("m-1"), "repo", json!("prefecthq/prefect")), "no log parser for"),
        (config("test_cmd", json!(["make check"])), "SWE-rebench-V2"),
        (config("base_image_name", json!("c:latest")), "SWE-rebench-V2"),
        (config("test_cmd", Value::Null), "no `test_cmd`"),
        (config("log_parser", json!("parse_log_cargo")), "no log parser for `parse_log_cargo`"),
        (changed(gym("m-1"), "test_cmds", json!(["pytest"])), "SWE-bench-Live"),
        (nemo("nv-internal-1"), "nv-internal-1"),
        (nemo("deepswe"), "Harbor"),
        (nemo("SWE-Gym/SWE-Gym"), "`FAIL_TO_PASS` (SWE-bench"),
        (
            json!({"responses_create_params": {"input": []}, "expected_action": {"name": "edit"}}),
            "a single step",
        ),
    ];
    for (row, part) in cases {
        let (good, bad) = loaded(std::slice::from_ref(&row));
        assert!(good.is_empty() && bad.len() == 1, "{row}");
        assert!(bad[0].reason.contains(part), "{} lacks {part}", bad[0].reason);
    }
}

/// A row of version 5 with its own script and parser.
fn of_version_5(repo: &str, script: Option<&str>, parser: Option<&str>) -> Value {
    let mut row = gym("o__r-1");
    row["repo"] = json!(repo);
    row["version"] = json!("8.0");
    row["eval_script"] = json!(script);
    row["log_parser"] = json!(parser);
    row
}

#[test]
fn each_version_of_the_harness_reads_its_own_columns() {
    let log = ": '>>>>> Start Test Output'\nok tests/test_a.py::test_x\nPASSED tests/test_a.py::test_x\n\
        : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n";
    let script =
        "#!/bin/bash\n: '>>>>> Start Test Output'\nmake check\n: '>>>>> End Test Output'\n";
    let rows = [
        of_version_5("pytest-dev/pytest", Some(script), Some("parse_log_django")),
        of_version_5("pytest-dev/pytest", None, Some("parse_log_django")),
    ];
    for value in rows {
        let (good, bad) = loaded(std::slice::from_ref(&value));
        assert_eq!(bad, Vec::new());
        assert_eq!(good[0].only_harness(), None);
        let Row::Swe(row) = &good[0] else { panic!() };
        let parsers = [Harness::V4_1_0, Harness::V5_0_2].map(|harness| row.log_parser(harness));
        assert_eq!(parsers, [Some(LogParser::Pytest), Some(LogParser::Django)]);
        let resolved = |harness| grade(row, harness, log.as_bytes()).unwrap().resolved;
        assert!(resolved(Harness::V4_1_0), "the table's parser reads this log");
        assert!(!resolved(Harness::V5_0_2), "the row's parser does not");
        for write in [eval_script, strict_eval_script] {
            let of_4 = write(row, Harness::V4_1_0).unwrap();
            assert!(of_4.contains("\npytest -rA tests/test_a.py\n"), "{of_4}");
            let of_5 = write(row, Harness::V5_0_2).unwrap();
            assert_eq!(of_5.contains("make check"), value["eval_script"].is_string(), "{of_5}");
        }
        let strict = strict_eval_script(row, Harness::V4_1_0).unwrap();
        assert!(strict.ends_with("\nexit \"$SWEBENCH_TEST_EXIT_CODE\"\n"), "{strict}");
    }
}

#[test]
fn a_row_that_only_another_version_can_grade_is_refused_with_that_version() {
    let own = Some("true");
    for (row, harness, part) in [
        (
            of_version_5("a/b", own, Some("parse_log_pytest")),
            Harness::V4_1_0,
            "`a/b` is not in the table",
        ),
        // SWE-Gym's table is not that of SWE-bench's harness, and the script is not SWE-Gym's.
        (
            of_version_5("getmoto/moto", own, Some("parse_log_pytest")),
            Harness::V4_1_0,
            "eval_script",
        ),
        (
            {
                let mut row = of_version_5("pytest-dev/pytest", own, Some("parse_log_pytest"));
                row["version"] = json!("99");
                row
            },
            Harness::V4_1_0,
            "column `version`",
        ),
        (
            of_version_5("pytest-dev/pytest", own, Some("parse_log_unknown")),
            Harness::V5_0_2,
            "no log parser for `parse_log_unknown`",
        ),
    ] {
        let other = Harness::ALL.into_iter().find(|&other| other != harness).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "{}\n{row}", gym("getmoto__moto-1")).unwrap();
        let path = Utf8PathBuf::from_path_buf(file.path().to_owned()).unwrap();
        let rows: Vec<_> = load::rows(&path).unwrap().map(Result::unwrap).collect();
        assert_eq!(rows[1].only_harness(), Some(other), "{row}");
        let read = |harness| load::rows_for(&path, harness).unwrap().collect::<Vec<_>>();
        assert!(read(other).iter().all(Result::is_ok), "{row}");
        let refused = read(harness)[1].clone().unwrap_err();
        assert_eq!((refused.row, refused.id.as_deref()), (2, Some("o__r-1")));
        let remedy =
            format!("needs reward.harness = \"{0}\" (grade: --harness {0})", other.version());
        assert!(refused.reason.contains(part) && refused.reason.contains(&remedy), "{refused}");
    }
    let (good, bad) = loaded(&[of_version_5("a/b", own, None)]);
    assert!(good.is_empty() && bad[0].reason.contains("no log parser for `a/b`"), "{bad:?}");
}

#[test]
fn a_row_may_have_its_own_time_limit_which_must_be_valid() {
    let with = |limit: Value| {
        let mut row = gym("getmoto__moto-1");
        row["test_timeout_s"] = limit;
        row
    };
    for (limit, seconds) in [(json!(60), 60), (json!(60.0), 60), (Value::Null, 1800)] {
        let (good, bad) = loaded(&[with(limit)]);
        assert_eq!(bad, Vec::new());
        assert_eq!(good[0].to_task().unwrap().test_timeout.as_secs(), seconds);
    }
    for limit in
        [json!(0), json!("60"), json!(-1), json!(86_401), json!(60.5), json!(0.0), json!([60])]
    {
        let (good, bad) = loaded(&[with(limit.clone())]);
        assert!(good.is_empty() && bad[0].reason.contains("test_timeout_s"), "{limit}: {bad:?}");
        assert_eq!((bad[0].row, bad[0].id.as_deref()), (1, Some("getmoto__moto-1")));
        let is_fraction =
            bad[0].reason.contains("60.5 is not a valid time limit: it must be a whole");
        assert_eq!(is_fraction, limit == json!(60.5), "{bad:?}");
    }
}

#[test]
fn an_empty_column_of_version_5_counts_as_missing() {
    for harness in Harness::ALL {
        let read = |blank: Option<&str>| {
            let mut row = gym("getmoto__moto-1");
            for column in ["eval_script", "log_parser", "eval_type"] {
                row[column] = json!(blank);
            }
            let (good, bad) = loaded(&[row]);
            assert_eq!(bad, Vec::new(), "{blank:?}");
            let Row::Swe(row) = &good[0] else { panic!("{good:?}") };
            assert_eq!(row.problem_with(harness), None, "{blank:?}");
            (row.family(), row.log_parser(harness), eval_script(row, harness).unwrap())
        };
        let missing = read(None);
        assert_eq!(missing.0, SweFamily::SweGym);
        for blank in ["", " \n"] {
            assert_eq!(read(Some(blank)), missing, "{harness:?}");
        }
    }
}

#[test]
fn records_of_nemo_gym_are_read_in_each_of_their_forms() {
    let flat = |mut row: Value| {
        row["responses_create_params"] = json!({"input": []});
        row["subset"] = json!("gym");
        row
    };
    let (good, bad) = loaded(&[
        json!({"responses_create_params": {"metadata": {"dataset_name": "SWE-Gym/SWE-Gym",
            "instance_dict": gym("getmoto__moto-1").to_string()}}}),
        json!({"instance": gym("getmoto__moto-2"), "dataset_name": "SWE-Gym/SWE-Gym",
            "metadata": {"image": "/images/x.sif"}}),
        flat(gym("getmoto__moto-3")),
        json!({"responses_create_params": {"metadata": {"dataset_name": "nebius/SWE-rebench",
            "instance_dict": rebench("o__r-1")}}}),
    ]);
    assert_eq!(bad, Vec::new());
    let ids: Vec<_> = good.iter().map(|row| (row.id(), row.environment())).collect();
    let moto = |n: u8| (format!("getmoto__moto-{n}"), "swe-gym");
    assert_eq!(ids, [moto(1), moto(2), moto(3), ("o__r-1".to_owned(), "swe-rebench")]);
}

#[test]
fn a_log_of_verbose_lines_is_graded_by_its_lines_between_the_markers() {
    let (good, _) = loaded(&[smith("Suor__funcy.207a7810.func_pm__x1")]);
    let Row::Swe(row) = &good[0] else { panic!() };
    let log = |before: &str, take: &str| {
        format!(
            "{before}\n+ : '>>>>> Start Test Output'\ntests/test_seqs.py::test_take {take} [ 33%]\n\
             tests/test_seqs.py::test_drop PASSED [ 66%]\ntests/test_colls.py::test_zip PASSED [100%]\n\
             + : '>>>>> End Test Output'\n"
        )
    };
    let resolved = |log: &str| grade(row, Harness::V4_1_0, log.as_bytes()).unwrap().resolved;
    assert!(resolved(&log("", "PASSED")));
    assert!(!resolved(&log("", "FAILED")));
    assert!(!resolved(&log("tests/test_seqs.py::test_take PASSED", "GONE")));
    // SWE-bench's harness falls back to the whole log here; those of the other data sets do not.
    let empty = "tests/test_seqs.py::test_take PASSED\ntests/test_seqs.py::test_drop PASSED\n\
        tests/test_colls.py::test_zip PASSED\n+ : '>>>>> Start Test Output'\n\
        + : '>>>>> End Test Output'\n";
    assert!(!resolved(empty));
}

/// The folder of real rows and logs; `None`, reported as a skip, if none is named.
fn real() -> Option<PathBuf> {
    let named = std::env::var_os("ORCHESTRATE_SWE_ROWS").map(PathBuf::from);
    if named.is_none() {
        orchestrate_e2e::skip::skip("swe-rows", "ORCHESTRATE_SWE_ROWS names no folder");
    }
    named
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_real_row_loads() {
    let Some(folder) = real() else { return };
    let mut families: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files(&folder.join("rows")) {
        for row in load::rows(&Utf8PathBuf::from_path_buf(file.clone()).unwrap()).unwrap() {
            let row = row.unwrap_or_else(|refused| panic!("{}: {refused}", file.display()));
            let task = row.to_task().unwrap();
            let Row::Swe(swe) = &row else { panic!("{}", row.id()) };
            eval_script(swe, Harness::V4_1_0).unwrap();
            assert!(swe.family() == SweFamily::SweSmith || !task.gold_patch.is_empty());
            *families.entry(row.environment()).or_default() += 1;
        }
    }
    assert!(!families.is_empty());
}

#[test]
fn every_real_run_of_swe_smith_is_graded_as_recorded() {
    let Some(folder) = real() else { return };
    let mut graded = 0;
    for run in files(&folder.join("swesmith")) {
        let name = run.file_name().unwrap().to_str().unwrap();
        let read = |file: &str| std::fs::read_to_string(run.join(file)).unwrap();
        let report: Value = serde_json::from_str(&read("report.json")).unwrap();
        let list = |list: &str, outcome: &str| -> Vec<String> {
            serde_json::from_value(report["tests_status"][list][outcome].clone()).unwrap()
        };
        let tests = |name: &str| [list(name, "success"), list(name, "failure")].concat();
        let row = SweRow {
            instance_id: name.to_owned(),
            repo: format!("swesmith/{}", name.rsplit_once('.').unwrap().0),
            fail_to_pass: tests("FAIL_TO_PASS"),
            pass_to_pass: tests("PASS_TO_PASS"),
            ..SweRow::default()
        };
        let found = grade(&row, Harness::V4_1_0, read("test_output.txt").as_bytes()).unwrap();
        assert_eq!(found.resolved, report["resolved"], "{name}");
        let status = found.tests_status.unwrap();
        for (of, outcomes) in
            [("FAIL_TO_PASS", &status.fail_to_pass), ("PASS_TO_PASS", &status.pass_to_pass)]
        {
            assert_eq!(outcomes.success, list(of, "success"), "{name}");
            assert_eq!(outcomes.failure, list(of, "failure"), "{name}");
        }
        graded += 1;
    }
    assert!(graded > 0);
}

/// Prints, for every profile, what SWE-smith's own package says about a row and a log.
const ORACLE: &str = r#"
import json, sys
from swesmith.profiles import registry
row, log = json.load(sys.stdin)
for name in sorted(k for k in registry.keys() if k.startswith("swesmith/")):
    profile = registry.get(name)
    if profile.exts != [".py"]:
        continue
    row["instance_id"] = name.split("/")[1] + ".x"
    try:
        failing, passing = profile.get_test_files(row)
        command = profile.get_test_cmd(dict(row))[0]
    except Exception as error:
        failing, passing, command = [], [], str(error)
    print(json.dumps([name, profile.image_name, command, sorted(failing),
        sorted(set(failing) | set(passing)), profile.log_parser(log)]))
"#;

#[test]
fn smith_profiles_equal_those_of_the_package() {
    let Some(python) = std::env::var_os("ORCHESTRATE_SWESMITH_PYTHON") else {
        let why = "ORCHESTRATE_SWESMITH_PYTHON names no Python with the package swesmith";
        orchestrate_e2e::skip::skip("swesmith", why);
        return;
    };
    let words = [
        "PASSED",
        "FAILED",
        "ERROR",
        "SKIPPED",
        "XFAIL",
        "ok",
        "FAIL",
        "a.py::t",
        "[gw0]",
        "[gw12]",
        "t[x y]",
        "...",
        "test_a (m.A)",
        "ERROR:",
        "FAIL:",
        "...skipped",
        "... skipped 'x'",
        "[ 10%]",
        "-",
        "é",
        "PASSEDx",
    ];
    let gaps = [" ", "  ", "\t", "\u{1c}", "\u{a0}", ""];
    let mut log = String::new();
    let mut seed = 1_u64;
    let mut next = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    };
    for _ in 0..20_000 {
        for _ in 0..=next(4) {
            log.push_str(words[next(words.len())]);
            log.push_str(gaps[next(gaps.len())]);
        }
        log.push('\n');
    }
    let tests = ["tests/b.py::t (m.n.A)", "tests/a.py::C::t[x]"];
    let row = json!({"FAIL_TO_PASS": tests, "PASS_TO_PASS": ["tests/a.py::u"], "patch": ""});
    let mut child = Command::new(python)
        .args(["-c", ORACLE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(json!([row, log]).to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let mut compared = 0;
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let said: Value = serde_json::from_str(line).unwrap();
        let name = said[0].as_str().unwrap();
        let row = SweRow {
            repo: name.to_owned(),
            fail_to_pass: tests.map(str::to_owned).to_vec(),
            pass_to_pass: vec!["tests/a.py::u".to_owned()],
            ..SweRow::default()
        };
        let Some(parser) = row.log_parser(Harness::V4_1_0) else {
            assert!(name.contains("__mypy.") || name.contains("__mido."), "{name} is refused");
            continue;
        };
        assert_eq!(row.image(), said[1], "{name}");
        let script = eval_script(&row, Harness::V4_1_0).unwrap();
        let command = said[2].as_str().unwrap();
        assert!(script.contains(&format!("\n{command}\n")), "{name}: {command}\n{script}");
        let (hidden, all) = row.smith_test_files();
        assert_eq!((json!(hidden), json!(all)), (said[3].clone(), said[4].clone()), "{name}");
        let map = parser.parse(Harness::V4_1_0, log.as_bytes()).unwrap();
        let found: BTreeMap<&str, &str> = map.iter().map(|(name, s)| (name, s.as_str())).collect();
        let want: BTreeMap<&str, &str> = said[5]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, status)| (name.as_str(), status.as_str().unwrap()))
            .collect();
        assert_eq!(found, want, "{name}");
        compared += 1;
    }
    assert!(compared >= 131, "{compared}");
}
