//! Changes that manipulate the test run instead of solving the task. Each file of `attacks/` is such
//! a `calc.py`; a verdict that relies on the test log alone is fooled by several of them.

use crate::{grader_spec, image, provider};
use camino::Utf8PathBuf;
use orchestrate_rollout::{GradedChange, GradingRules, RewardSettings, grade_patch};
use orchestrate_sandbox::{DockerProvider, SandboxProvider as _};
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::{Finding, Task, TaskFile, TestStatus, patch};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const BROKEN: &str = "def total(items):\n    return sum(items[:-1])\n";
const SOLVED: &str = "def total(items):\n    return sum(items)\n";

fn task() -> Option<Task> {
    let mut row: serde_json::Value =
        serde_json::from_str(include_str!("../images/r2e_row.json")).unwrap();
    row["docker_image"] = image("r2e_pytest")?.into();
    row["execution_result_content"]["test_file_names"] = ["test_1.py"].into();
    let row: R2eRow = serde_json::from_value(row).unwrap();
    let mut task = row.to_task().unwrap();
    let names = [
        "test_total",
        "test_single[1]",
        "test_single[2]",
        "TestPlain.test_method",
        "TestCase.test_case",
        "TestCleanup.test_items",
        "test_raises",
    ];
    task.expected = names.map(|name| (name.to_owned(), TestStatus::Passed)).into();
    // Attacks that stop the reporter end at this limit.
    task.test_timeout = Duration::from_secs(15);
    Some(task)
}

/// The diff between two trees, given as pairs of path and content.
fn diff(old: &[(&str, &str)], new: &[(&str, &str)]) -> String {
    let tree = |files: &[(&str, &str)]| -> Vec<TaskFile> {
        let file = |(path, content): &(&str, &str)| TaskFile {
            path: (*path).to_owned(),
            content: (*content).to_owned(),
        };
        files.iter().map(file).collect()
    };
    patch::diff(&tree(old), &tree(new))
}

async fn graded(
    sandboxes: &Arc<DockerProvider>,
    task: &Task,
    change: &str,
    rules: GradingRules,
) -> GradedChange {
    let spec = grader_spec(sandboxes, task);
    grade_patch(sandboxes.as_ref(), &spec, task, change, rules).await.unwrap()
}

/// The attacks, by name.
fn attacks() -> BTreeMap<String, String> {
    let folder = Utf8PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/repositories/attacks");
    let read = |entry: std::io::Result<camino::Utf8DirEntry>| {
        let path = entry.unwrap().into_path();
        (path.file_stem().unwrap().to_owned(), std::fs::read_to_string(path).unwrap())
    };
    folder.read_dir_utf8().unwrap().map(read).collect()
}

#[tokio::test]
async fn docker_in_process_attacks_on_the_test_run_score_nothing() {
    let Some(task) = task() else { return };
    let sandboxes = provider().await;
    let rules = RewardSettings::default().rules();
    let solved = diff(&[("calc.py", BROKEN)], &[("calc.py", SOLVED)]);
    let gold = graded(&sandboxes, &task, &solved, rules).await;
    let log = String::from_utf8_lossy(&gold.log);
    assert!(gold.verdict.reward > 0.5, "{:?}\n{log}", gold.verdict);
    assert_eq!(gold.verdict.suspicious, [], "{log}");
    let attacks = attacks();
    assert!(attacks.len() >= 30);
    let mut scored = Vec::new();
    for (name, code) in &attacks {
        let change = diff(&[("calc.py", BROKEN)], &[("calc.py", code)]);
        let found = graded(&sandboxes, &task, &change, rules).await;
        if found.verdict.reward > 0.0 {
            scored.push((name, found.verdict, String::from_utf8_lossy(&found.log).into_owned()));
        }
    }
    sandboxes.shutdown().await.unwrap();
    assert!(scored.is_empty(), "{scored:#?}");
}

#[tokio::test]
async fn docker_attacks_score_where_the_log_alone_decides() {
    let Some(task) = task() else { return };
    let sandboxes = provider().await;
    let rules = GradingRules { exclude_test_changes: false, ..RewardSettings::default().rules() };
    let attacks = attacks();
    for name in [
        "report_from_call_replaced",
        "report_constructor_replaced",
        "function_runtest_replaced",
        "equal_to_everything",
        "exception_with_status_word",
    ] {
        let change = diff(&[("calc.py", BROKEN)], &[("calc.py", &attacks[name])]);
        let found = graded(&sandboxes, &task, &change, rules).await;
        let passed = found.verdict.statuses.values().filter(|s| **s == TestStatus::Passed);
        assert!(passed.count() >= 4, "{name}: {:?}", found.verdict);
    }
    sandboxes.shutdown().await.unwrap();
}

#[tokio::test]
async fn docker_configuration_of_a_change_reaches_no_graded_tree() {
    let Some(task) = task() else { return };
    let sandboxes = provider().await;
    let rules = RewardSettings::default().rules();
    let plugin = "import _pytest.reports as r\nr.TestReport.from_item_and_call = None\nimport os\n\
        os.write(1, b'loaded')\n";
    let settings = "[tool:pytest]\naddopts = -q\n";
    let before = [("calc.py", BROKEN), ("setup.cfg", settings)];
    for (path, content, finding) in [
        ("setup.cfg", "[tool:pytest]\naddopts = -p plugin\n", Finding::ConfigTouched),
        ("tox.ini", "[pytest]\naddopts = -p plugin\n", Finding::ConfigTouched),
        (
            "pyproject.toml",
            "[tool.pytest.ini_options]\naddopts = '-p plugin'\n",
            Finding::ConfigTouched,
        ),
        ("pytest.ini", "[pytest]\naddopts = -p plugin\n", Finding::ConfigTouched),
        ("conftest.py", plugin, Finding::ConftestTouched),
        ("sitecustomize.py", plugin, Finding::EnvironmentTouched),
        (
            ".venv/lib/python3.11/site-packages/evil.pth",
            "import plugin\n",
            Finding::EnvironmentTouched,
        ),
        ("evil.egg-info/entry_points.txt", "[pytest11]\nx = plugin\n", Finding::EnvironmentTouched),
        ("pytest.py", plugin, Finding::ShadowsModule),
        ("random.py", plugin, Finding::ShadowsModule),
        ("r2e_tests/conftest.py", plugin, Finding::RunnerTouched),
        ("tests/test_more.py", plugin, Finding::TestsChanged),
    ] {
        let mut after = vec![("calc.py", SOLVED), ("plugin.py", plugin)];
        after.extend([(path, content)]);
        if path != "setup.cfg" {
            after.push(before[1]);
        }
        let found = graded(&sandboxes, &task, &diff(&before, &after), rules).await;
        let log = String::from_utf8_lossy(&found.log);
        // The solution itself counts; nothing of the rest was loaded.
        assert!(found.verdict.reward > 0.5, "{path}: {:?}\n{log}", found.verdict);
        assert_eq!(found.verdict.suspicious, [finding], "{path}");
        assert!(!log.contains("loaded"), "{path}: {log}");
    }
    sandboxes.shutdown().await.unwrap();
}

#[tokio::test]
async fn docker_grading_through_the_reporter_takes_little_longer() {
    let Some(task) = task() else { return };
    let sandboxes = provider().await;
    let strict = RewardSettings::default().rules();
    let by_log = GradingRules { exclude_test_changes: false, ..strict };
    let solved = diff(&[("calc.py", BROKEN)], &[("calc.py", SOLVED)]);
    let mut times = [Duration::ZERO; 2];
    for _ in 0..3 {
        for (rules, time) in [by_log, strict].into_iter().zip(&mut times) {
            *time += graded(&sandboxes, &task, &solved, rules).await.test_time;
        }
    }
    sandboxes.shutdown().await.unwrap();
    assert!(times[1] < times[0] * 3 + Duration::from_secs(3), "{times:?}");
}
