//! Tasks of the training data sets SWE-smith and SWE-rebench, in images that resemble the published
//! ones.

use crate::{FIX, episode, folder, graded, image, scored, swe_task};
use orchestrate_rollout::{RewardSettings, RolloutSection};
use orchestrate_tasks::swe::{Commands, Harness, InstallConfig, SweRow};
use orchestrate_tasks::{Finding, Origin, Task};

const BUG: &str = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n\
    @@ -1,5 +1,5 @@\n def total(items):\n-    return sum(items)\n+    return sum(items[:-1])\n \n \n def largest(items):\n";

fn smith_row() -> Option<SweRow> {
    Some(SweRow {
        instance_id: "Suor__funcy.207a7810.func_pm_remove__x1".into(),
        repo: "swesmith/Suor__funcy.207a7810".into(),
        problem_statement: "total forgets the last item.".into(),
        patch: BUG.into(),
        fail_to_pass: vec!["tests/test_calc.py::test_total".into()],
        pass_to_pass: vec![
            "tests/test_calc.py::test_empty".into(),
            "tests/test_largest.py::test_largest".into(),
        ],
        docker_image: Some(image("smith")?),
        ..SweRow::default()
    })
}

fn smith_task() -> Option<Task> {
    let row = smith_row()?;
    assert_eq!(row.problem(), None);
    Some(row.to_task())
}

#[tokio::test]
async fn docker_smith_gold_patch_is_resolved_and_no_patch_is_not() {
    let Some(task) = smith_task() else { return };
    for harness in [Harness::V4_1_0, Harness::V5_0_2] {
        let gold = graded(&task, &task.gold_patch, Some(harness)).await.unwrap();
        let log = String::from_utf8_lossy(&gold.log).into_owned();
        assert!(gold.verdict.reward > 0.5, "{:?}\n{}\n{log}", gold.verdict, gold.apply_log);
        assert!(log.contains("tests/test_calc.py::test_total PASSED"), "{log}");
        assert!(log.contains("tests/test_largest.py::test_known_failure FAILED"), "{log}");
        let nothing = graded(&task, "", Some(harness)).await.unwrap();
        let status = nothing.verdict.report.unwrap().tests_status.unwrap();
        assert_eq!(status.fail_to_pass.failure.len(), 1);
        assert_eq!(status.pass_to_pass.success.len(), 2);
    }
    let mut broken = smith_row().unwrap();
    broken.patch = BUG.replace("sum(items)\n", "sum(things)\n");
    let refused = graded(&broken.to_task(), "", None).await.unwrap_err().to_string();
    assert!(refused.contains("the task's start"), "{refused}");
}

#[tokio::test]
async fn docker_smith_agent_finds_the_bug_without_its_tests_and_without_the_solution() {
    let Some(task) = smith_task() else { return };
    let (_kept, logs) = folder();
    let looks = [
        "cat calc.py | head -2; ls tests; git status --short; git log --all --format=%s; ls -A / .grading 2>&1 | grep -c grading; \
         git cat-file --batch-check --batch-all-objects | cut -d' ' -f1 | git cat-file --batch | grep -ac 'sum(items)$'; \
         grep -rlas 'sum(items)$' /tmp /root /testbed | wc -l",
        FIX,
    ];
    for hide_history in [true, false] {
        let config =
            RolloutSection { hide_history: Some(hide_history), ..RolloutSection::default() };
        let report = episode(&task, &looks, &config, RewardSettings::default(), &logs).await;
        let found =
            "    return sum(items[:-1])\ntest_largest.py\nThe repository as it is given\n1\n0\n0";
        assert!(report.turns[0].observation.contains(found), "{}", report.turns[0].observation);
        let verdict = report.verdict.clone().unwrap();
        assert!(scored(&report) > 0.5, "{verdict:?}");
        assert_eq!(verdict.suspicious, [], "the reporter ran these tests");
    }
}

#[tokio::test]
async fn docker_smith_tests_of_a_change_replace_no_test_of_the_task() {
    let Some(task) = smith_task() else { return };
    let (_kept, logs) = folder();
    let forged = [
        "printf 'def test_total():\\n    pass\\n\\n\\ndef test_empty():\\n    pass\\n' > tests/test_calc.py",
        "rm tests/test_largest.py",
    ];
    for strict in [true, false] {
        let reward = RewardSettings { strict, ..RewardSettings::default() };
        let report = episode(&task, &forged, &RolloutSection::default(), reward, &logs).await;
        assert!(scored(&report) < 0.5, "strict: {strict}, {:?}", report.verdict);
        let repaired = [forged[0], forged[1], FIX];
        let report = episode(&task, &repaired, &RolloutSection::default(), reward, &logs).await;
        assert!(scored(&report) > 0.5, "strict: {strict}, {:?}", report.verdict);
    }
}

#[tokio::test]
async fn docker_rebench_rows_run_their_own_commands() {
    let Some(task) = swe_task() else { return };
    let Origin::SweBench(row) = &task.origin else { panic!() };
    let mut row = row.as_ref().clone();
    row.repo = "adder/adder".into();
    row.install_config = Some(InstallConfig {
        install: Some(Commands::One("python -c 'import calc'".into())),
        test_cmd: Some(Commands::One("pytest -rA --color=no".into())),
        log_parser: Some("parse_log_pytest".into()),
        ..InstallConfig::default()
    });
    assert_eq!(row.problem(), None);
    let task = row.to_task();
    assert_eq!(task.environment, "swe-rebench");
    let gold = graded(&task, &task.gold_patch, None).await.unwrap();
    assert!(gold.verdict.reward > 0.5, "{:?}", String::from_utf8_lossy(&gold.log));
    assert!(gold.eval_script.unwrap().contains("\npytest -rA --color=no tests/test_calc.py\n"));
    assert!(graded(&task, "", None).await.unwrap().verdict.reward < 0.5);
    let (_kept, logs) = folder();
    let (config, reward) = (RolloutSection::default(), RewardSettings::default());
    let report = episode(&task, &[FIX], &config, reward, &logs).await;
    let verdict = report.verdict.clone().unwrap();
    assert!(scored(&report) > 0.5, "{verdict:?}");
    assert!(!verdict.suspicious.contains(&Finding::Unprotected), "{verdict:?}");
}
