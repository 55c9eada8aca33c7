//! Hostile task rows and predictions: 500 mutations of real shapes. Nothing panics, nothing is written
//! outside the named folder, and a refusal names the row and the column.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use camino::{Utf8Path, Utf8PathBuf};
use flate2::read::MultiGzDecoder;
use orchestrate_rollout::{GradeLogs, GradedChange, write_log_folder};
use orchestrate_tasks::load::{self, Refused, Row};
use orchestrate_tasks::predictions::{self, Prediction};
use orchestrate_tasks::{Verdict, micro};
use orchestrate_types::{GradingRun, TestTimeout, is_unprintable};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::Read as _;
use std::process::{Command, Output};
use std::time::Duration;

/// Number of mutated rows, and of mutated predictions.
const MUTATIONS: usize = 500;
/// Columns whose values become parts of paths, images, time limits or scripts. Half of the mutations
/// change one of them.
const SENSITIVE: &[&str] = &[
    "instance_id",
    "repo",
    "version",
    "base_commit",
    "image",
    "docker_image",
    "repo_name",
    "commit_hash",
    "micro",
    "repair",
    "execution_result_content",
    "model_name_or_path",
];

/// A row of each family: those of the public data sets, if they are here, and small ones.
fn shapes() -> Vec<Value> {
    let swe = json!({
        "instance_id": "pallets__flask-1", "repo": "pallets/flask", "version": "2.0",
        "base_commit": "c0", "problem_statement": "It breaks.", "patch": "", "test_patch": "diff",
        "FAIL_TO_PASS": "[\"t::a\"]", "PASS_TO_PASS": "[]", "image": "swebench/x:1",
    });
    let r2e = json!({
        "repo_name": "aiohttp", "docker_image": "namanjain12/aiohttp_final:abc",
        "commit_hash": "abc", "parsed_commit_content": "{\"file_diffs\": []}",
        "execution_result_content": {"test_file_names": ["test_1.py"], "test_file_codes": ["x"]},
        "problem_statement": "[ISSUE] It breaks. [/ISSUE]",
        "expected_output_json": {"a": "PASSED"},
    });
    let mut repair = r2e.clone();
    repair["execution_result_content"]["test_file_names"] = json!(["tests/test_1.py"]);
    repair["repair"] = json!({
        "family": "wrong_comparison", "agent_files": [{"path": "src/a.py", "content": "x"}],
        "test_command": "pytest", "test_timeout_s": 30,
    });
    let counts = micro::MicroCounts { train: 2, held_out: 0, held_out_families: 0 };
    let micro = micro::rows(7, counts);
    let micro = micro.into_iter().map(|row| serde_json::to_value(row).unwrap());
    let mut shapes = vec![swe, r2e, repair];
    shapes.extend(micro);
    for (file, count) in [("swe/rows/verified_100_full.jsonl.gz", 4), ("swe/r2e/rows.jsonl.gz", 2)]
    {
        let Some(path) = orchestrate_e2e::skip::data(&format!("data/{file}")) else { continue };
        let mut text = String::new();
        MultiGzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
        let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        shapes.extend(rows.take(count).map(|mut row| match row.get_mut("row") {
            Some(inner) => inner.take(),
            None => row,
        }));
    }
    shapes
}

/// A value that no author of a sound row would write.
fn hostile(rng: &mut ChaCha8Rng) -> Value {
    let text = [
        "",
        ".",
        "..",
        "../x",
        "../../../../tmp/escaped",
        "/etc/cron.d/x",
        "a/../../b",
        "a//b",
        "-rf",
        ".ssh",
        "x\0y",
        "x\ny",
        "x\r",
        "\u{1b}]0;pwned\u{7}\u{1b}[2J",
        "\u{202e}txt.exe",
        "\u{200b}",
        "\u{feff}x",
        "%2e%2e%2f",
        "..\\..\\x",
        "$(touch x)",
        "x; touch y",
        "é",
        "http://u:p@h/../x",
        "a@sha256:00",
        "a:b:c:d",
        "A/B:C",
    ];
    match rng.random_range(0..12) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(u64::MAX),
        3 => json!(i64::MAX),
        4 => json!(i64::MIN),
        5 => json!(1e308),
        6 => json!([]),
        7 => (0..60).fold(json!({}), |inner, _| json!({ "a": [inner] })),
        8 => json!("a".repeat(100_000)),
        _ => json!(text[rng.random_range(0..text.len())]),
    }
}

/// Changes one value somewhere inside `value`: replaces or removes it. JSON in a text is changed as
/// JSON.
fn change(value: &mut Value, rng: &mut ChaCha8Rng) {
    if rng.random_bool(0.25) {
        *value = hostile(rng);
        return;
    }
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let key = fields.keys().nth(rng.random_range(0..fields.len())).unwrap().clone();
            match rng.random_range(0..10) {
                0 => drop(fields.shift_remove(&key)),
                1 => drop(fields.insert(format!("{key}\u{1b}[2J"), hostile(rng))),
                _ => change(&mut fields[&key], rng),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let index = rng.random_range(0..items.len());
            change(&mut items[index], rng);
        }
        Value::String(text) if text.starts_with(['{', '[']) => {
            match serde_json::from_str::<Value>(text) {
                Ok(mut inner) => {
                    change(&mut inner, rng);
                    *text = inner.to_string();
                }
                Err(_) => *value = hostile(rng),
            }
        }
        other => *other = hostile(rng),
    }
}

/// Changes one column of a row or prediction, and returns its name.
fn mutate(row: &mut Value, rng: &mut ChaCha8Rng) -> String {
    let fields: &mut Map<String, Value> = row.as_object_mut().unwrap();
    let sensitive: Vec<String> =
        fields.keys().filter(|key| SENSITIVE.contains(&key.as_str())).cloned().collect();
    let any: Vec<String> = fields.keys().cloned().collect();
    let keys = if rng.random_bool(0.5) && !sensitive.is_empty() { sensitive } else { any };
    let key = keys[rng.random_range(0..keys.len())].clone();
    match rng.random_range(0..12) {
        0 => drop(fields.shift_remove(&key)),
        1..=5 => fields[&key] = hostile(rng),
        _ => change(&mut fields[&key], rng),
    }
    key
}

/// A folder with a file next to it, to see whether anything is written outside.
struct World {
    _guard: tempfile::TempDir,
    root: Utf8PathBuf,
}

impl World {
    fn new() -> Self {
        let guard = tempfile::tempdir().unwrap();
        let root = Utf8PathBuf::from_path_buf(guard.path().to_owned()).unwrap();
        std::fs::create_dir_all(root.join("a/b/c/out")).unwrap();
        Self { _guard: guard, root }
    }

    /// Where commands run.
    fn work(&self) -> Utf8PathBuf {
        self.root.join("a/b/c")
    }

    /// All paths that are not inside the output folder.
    fn outside(&self) -> BTreeSet<Utf8PathBuf> {
        let (mut found, mut folders) = (BTreeSet::new(), vec![self.root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir_utf8().unwrap() {
                let path = entry.unwrap().into_path();
                if path == self.work().join("out") {
                    continue;
                }
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path.clone());
                }
                found.insert(path);
            }
        }
        found
    }

    /// Runs the program, which must neither panic nor write outside, nor act on the terminal.
    fn run(&self, arguments: &[&str]) -> Output {
        let before = self.outside();
        let output = Command::new(env!("CARGO_BIN_EXE_orchestrate"))
            .args(arguments)
            .current_dir(self.work())
            .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
            .output()
            .unwrap();
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 2 | 3 | 5)), "{arguments:?}: {code:?} {output:?}");
        for stream in [&output.stdout, &output.stderr] {
            let text = String::from_utf8(stream.clone()).unwrap();
            let acts = text.chars().find(|&c| c != '\n' && c != '\t' && is_unprintable(c));
            assert_eq!(acts, None, "{arguments:?}");
        }
        assert_eq!(self.outside(), before, "{arguments:?}");
        output
    }
}

/// Rows of a file, usable and refused, with the columns that were changed.
fn check_rows(path: &Utf8Path, changed: &[String]) -> Vec<Row> {
    let mut usable = Vec::new();
    for (place, row) in load::rows(path).unwrap().enumerate() {
        match row {
            Ok(row) => usable.push(row),
            Err(Refused { row, reason, .. }) => {
                assert_eq!(row, place + 1);
                let column = &changed[place];
                let names_it = reason.contains(column.as_str());
                let is_repeated = reason.contains("has the id of row");
                // Without these columns, the rules of R2E-Gym's own rows apply to the others.
                let is_other_family =
                    ["micro", "repair"].contains(&column.as_str()) && reason.contains("column `");
                assert!(
                    names_it || is_repeated || is_other_family,
                    "row {row}, column {column}: {reason}"
                );
            }
        }
    }
    usable
}

/// A graded change, as if its tests had passed.
fn graded() -> GradedChange {
    GradedChange {
        verdict: Verdict {
            reward: 1.0,
            official_reward: 1.0,
            statuses: std::collections::BTreeMap::new(),
            differing: Vec::new(),
            report: None,
            suspicious: Vec::new(),
        },
        patch: "diff".to_owned(),
        log: b"log".to_vec(),
        apply_log: String::new(),
        eval_script: Some("true".to_owned()),
        problem: None,
        test_time: Duration::from_secs(1),
    }
}

#[test]
fn mutated_rows_never_panic_nor_leave_the_folder_and_refusals_name_row_and_column() {
    let world = World::new();
    let mut rng = ChaCha8Rng::seed_from_u64(20);
    let shapes = shapes();
    let (mut text, mut changed) = (String::new(), Vec::new());
    for n in 0..MUTATIONS {
        let mut row = shapes[n % shapes.len()].clone();
        // Ids differ, so that a repeated id hides nothing.
        for key in ["instance_id", "commit_hash"] {
            if let Some(Value::String(id)) = row.get_mut(key) {
                *id = format!("{id}-{n}");
            }
        }
        if let Some(Value::String(id)) = row.pointer_mut("/micro/id") {
            *id = format!("{id}-{n}");
        }
        changed.push(mutate(&mut row, &mut rng));
        text.push_str(&row.to_string());
        text.push('\n');
    }
    let file = world.work().join("rows.jsonl");
    std::fs::write(&file, text).unwrap();
    let usable = check_rows(&file, &changed);
    assert!((50..450).contains(&usable.len()), "{}", usable.len());

    let before = world.outside();
    let logs = GradeLogs { root: world.work().join("out"), model: "org/model".parse().unwrap() };
    for row in &usable {
        let task = row.to_task().unwrap();
        assert!(task.test_timeout <= TestTimeout::LONGEST && !task.test_timeout.is_zero());
        assert_eq!(task.id, row.id());
        write_log_folder(&logs, &GradingRun::made_of("run"), &task, &graded()).unwrap();
    }
    assert_eq!(world.outside(), before);

    world.run(&["tasks", "import", "rows.jsonl"]);
    let imported = world.run(&["tasks", "import", "rows.jsonl", "--json"]);
    let report: Value = serde_json::from_slice(&imported.stdout).unwrap();
    assert_eq!(report["refused"].as_array().unwrap().len(), MUTATIONS - usable.len());
    world.run(&["tasks", "list", "--file", "rows.jsonl"]);
    world.run(&["tasks", "list", "--file", "rows.jsonl", "--json"]);
    for row in usable.iter().step_by(40) {
        world.run(&["tasks", "show", &row.id(), "--file", "rows.jsonl"]);
        world.run(&["tasks", "show", &row.id(), "--file", "rows.jsonl", "--json"]);
    }
    for id in ["../x", "", "\u{1b}[2J", "/etc/passwd"] {
        world.run(&["tasks", "show", id, "--file", "rows.jsonl"]);
    }
}

#[test]
fn mutated_predictions_never_panic_nor_leave_the_folder_and_refusals_name_entry_and_field() {
    let world = World::new();
    let mut rng = ChaCha8Rng::seed_from_u64(21);
    let shape = json!({
        "instance_id": "pallets__flask-1", "model_name_or_path": "org/model", "model_patch": "diff",
    });
    let (tasks, out) = (world.work().join("rows.jsonl"), world.work().join("out"));
    std::fs::write(&tasks, format!("{}\n", shapes()[0])).unwrap();
    let Row::Swe(row) = load::rows(&tasks).unwrap().next().unwrap().unwrap() else {
        unreachable!()
    };
    let (mut task, run) = (row.to_task(), GradingRun::made_of("run"));
    let file = world.work().join("predictions.json");
    let (mut read, mut refused) = (0, 0);
    for n in 0..MUTATIONS {
        let mut prediction = shape.clone();
        let field = mutate(&mut prediction, &mut rng);
        let text = match n % 3 {
            0 => prediction.to_string(),
            1 => json!([shape, prediction]).to_string(),
            _ => {
                let fields = prediction.as_object_mut().unwrap();
                let id = fields.shift_remove("instance_id");
                let id = id.as_ref().and_then(Value::as_str).unwrap_or("..").to_owned();
                json!({ id: prediction }).to_string()
            }
        };
        std::fs::write(&file, text).unwrap();
        let before = world.outside();
        match predictions::read(&file) {
            Ok(predictions) => {
                read += 1;
                for Prediction { instance_id, model_name_or_path, .. } in predictions {
                    task.id = instance_id;
                    let logs = GradeLogs { root: out.clone(), model: model_name_or_path };
                    write_log_folder(&logs, &run, &task, &graded()).unwrap();
                }
            }
            Err(error) => {
                refused += 1;
                let error = error.to_string();
                let names_entry = error.contains(", entry ");
                let names_field = error.contains(&field) || error.contains("instance_id");
                assert!(names_entry && names_field, "{field}: {error}");
            }
        }
        assert_eq!(world.outside(), before);
        if n % 50 == 0 {
            world.run(&[
                "grade",
                "--tasks",
                "rows.jsonl",
                "--predictions",
                "predictions.json",
                "--out",
                "out",
            ]);
        }
    }
    assert!(read > 50 && refused > 50, "{read} read, {refused} refused");
    let run = world.run(&[
        "grade",
        "--tasks",
        "rows.jsonl",
        "--predictions",
        "predictions.json",
        "--out",
        "out",
        "--run-id",
        "../../x",
    ]);
    assert_eq!(run.status.code(), Some(2));
}
