//! Tasks whose repository is in an image, with real Docker: the files that the agent finds, the change
//! that is collected, and its grading. The images are built here, from `orchestrate/repository`.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

mod attacks;
mod damage;
mod disk;
mod training_sets;

use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_engine::Finish;
use orchestrate_rollout::{
    Action, Actor, ChatModel, ChatTemplate, EpisodeKind, EpisodeReport, EpisodeRequest,
    EpisodeRunner, Episodes, GradeError, GradeLogs, GradedChange, MICRO_CHAT_TEMPLATE, Message,
    PrefillLeaders, RewardCompat, RewardSettings, RolloutSection, RowSharing, Sandboxed,
    grade_patch, opening_messages, train_tokenizer,
};
use orchestrate_sandbox::{
    DockerProvider, Owner, Purpose, SandboxProvider as _, SandboxSection, SandboxSpec,
};
use orchestrate_tasks::r2e::R2eRow;
use orchestrate_tasks::swe::{Harness, SweRow};
use orchestrate_tasks::{Finding, Task, patch};
use orchestrate_testkit::{FakeEngine, FakeReply, toy_shape};
use orchestrate_types::{Limit, Outcome, PolicyVersion, RunId};
use serde_json::json;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const GOLD: &str = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n\
    @@ -1,2 +1,2 @@\n def total(items):\n-    return sum(items[:-1])\n+    return sum(items)\n";

fn docker(args: &[&str]) -> Option<String> {
    let output = Command::new("docker").args(args).stderr(Stdio::inherit()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The image of `images/NAME.Dockerfile`; `None` without Docker or without its base image.
fn image(name: &str) -> Option<String> {
    static BUILDING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = BUILDING.lock().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/images");
    orchestrate_e2e::recipe_image(folder.as_ref(), name).unwrap()
}

fn r2e_task() -> Option<Task> {
    let mut row: serde_json::Value =
        serde_json::from_str(include_str!("../images/r2e_row.json")).unwrap();
    row["docker_image"] = image("r2e")?.into();
    let row: R2eRow = serde_json::from_value(row).unwrap();
    Some(row.to_task().unwrap())
}

fn swe_task() -> Option<Task> {
    let image = image("swe")?;
    let base = docker(&["run", "--rm", "--network=none", &image, "git", "rev-parse", "HEAD~1"])?;
    let row = SweRow {
        instance_id: "pytest-dev__pytest-1".into(),
        repo: "pytest-dev/pytest".into(),
        version: "7.0".into(),
        base_commit: base,
        problem_statement: "total forgets the last item.".into(),
        patch: GOLD
            .replace("@@ -1,2 +1,2 @@\n def total(items):\n", "@@ -4,2 +4,2 @@\n     # three\n"),
        test_patch: "diff --git a/tests/test_calc.py b/tests/test_calc.py\n\
            --- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n@@ -3,3 +3,7 @@\n \n \
            def test_empty():\n     assert total([]) == 0\n+\n+\n+def test_total():\n\
            +    assert total([1, 2]) == 3\n"
            .into(),
        fail_to_pass: vec!["tests/test_calc.py::test_total".into()],
        pass_to_pass: vec!["tests/test_calc.py::test_empty".into()],
        docker_image: Some(image),
        ..SweRow::default()
    };
    Some(row.to_task())
}

fn chat() -> Arc<ChatModel> {
    static CHAT: OnceLock<Arc<ChatModel>> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        let path = Utf8Path::from_path(folder.path()).unwrap();
        let mut messages = opening_messages(None, "total forgets the last item.");
        messages.push(Message {
            role: "assistant".into(),
            content: String::new(),
            tool_calls: vec![bash("git status")],
            ..Message::default()
        });
        let template = ChatTemplate::new(MICRO_CHAT_TEMPLATE).unwrap();
        let text = template.render(&messages, &[], false).unwrap();
        train_tokenizer(std::iter::repeat_n(text, 3), 400, MICRO_CHAT_TEMPLATE, path).unwrap();
        Arc::new(ChatModel::load(path).unwrap())
    };
    Arc::clone(CHAT.get_or_init(make))
}

fn bash(command: &str) -> Action {
    Action { name: "bash".into(), arguments: json!({"command": command}) }
}

fn submit() -> Action {
    Action { name: "submit".into(), arguments: json!({}) }
}

async fn provider() -> Arc<DockerProvider> {
    let config = SandboxSection { max_containers: Some(2), ..SandboxSection::default() };
    Arc::new(DockerProvider::connect(config.check().unwrap()).await.unwrap())
}

/// Runs an episode with `commands` and a submit; logs go to `folder`.
async fn episode(
    task: &Task,
    commands: &[&str],
    config: &RolloutSection,
    reward: RewardSettings,
    folder: &Utf8Path,
) -> EpisodeReport {
    let mut turns: Vec<Action> = commands.iter().map(|command| bash(command)).collect();
    turns.push(submit());
    let sandboxes = provider().await;
    let report = play(&sandboxes, task, &turns, config, reward, folder).await;
    sandboxes.shutdown().await.unwrap();
    report
}

/// Runs an episode with these calls, one per turn.
async fn play(
    sandboxes: &Arc<DockerProvider>,
    task: &Task,
    calls: &[Action],
    config: &RolloutSection,
    reward: RewardSettings,
    folder: &Utf8Path,
) -> EpisodeReport {
    let turns: Vec<Vec<u32>> = calls
        .iter()
        .map(|call| chat().assistant("", std::slice::from_ref(call)).unwrap())
        .collect();
    let mut shape = toy_shape(chat().vocab_size());
    shape.context = 65_536;
    let engine = FakeEngine::new(shape, move |_, call| FakeReply::Tokens {
        ids: turns[call].clone(),
        finish: Finish::Stop,
    });
    let runner = EpisodeRunner {
        engine: Arc::new(engine),
        chat: chat(),
        settings: Arc::new(config.check().unwrap()),
        rows: RowSharing::default(),
        prefill_leaders: PrefillLeaders::default(),
        kind: EpisodeKind::Sandboxed(Sandboxed {
            actor: Actor::Scaffold(Arc::default()),
            provider: sandboxes.clone(),
            limits: sandboxes.config().limits(),
            rules: reward.rules(),
            logs: Some(GradeLogs { root: folder.to_owned(), model: "org/policy".parse().unwrap() }),
        }),
    };
    let request = EpisodeRequest {
        run: RunId::generate(),
        epoch: 1,
        attempt: "v00003-00000.00-a01".parse().unwrap(),
        task: Arc::new(task.clone()),
        policy_version: PolicyVersion(3),
        seed: 1,
        temperature: 1.0,
        want_routing: false,
    };
    runner.run(request, &CancellationToken::new()).await
}

fn folder() -> (tempfile::TempDir, Utf8PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = Utf8PathBuf::from_path_buf(folder.path().to_owned()).unwrap();
    (folder, path)
}

const FIX: &str = "sed -i 's/\\[:-1\\]//' calc.py";

fn scored(report: &EpisodeReport) -> f64 {
    let Outcome::Scored { reward } = report.outcome else {
        unreachable!("not scored: {:?}", report.outcome);
    };
    reward
}

#[tokio::test]
async fn docker_r2e_agent_finds_no_tests_and_no_history_and_is_graded_by_hidden_tests() {
    let Some(task) = r2e_task() else { return };
    let (_kept, logs) = folder();
    let looks = [
        "ls -d /r2e_tests /root/r2e_tests r2e_tests run_tests.sh /root/run_tests.sh 2>&1 | grep -vc 'No such'; \
         git log --all --format=%s; git status --short; tail -1 tests/helper.py; ls untracked.cfg; \
         which python; echo ${BASH_VERSION:+bash}",
        FIX,
        "python -c 'import calc; print(calc.total([1, 2]))'; git diff --stat | tail -1",
    ];
    let report =
        episode(&task, &looks, &RolloutSection::default(), RewardSettings::default(), &logs).await;
    let found = "0\nThe repository as it is given\n# needed here\nuntracked.cfg\n\
        /testbed/.venv/bin/python\nbash";
    assert!(report.turns[0].observation.contains(found), "{}", report.turns[0].observation);
    assert!(report.turns[2].observation.contains("3\n 1 file changed"), "{:?}", report.turns[2]);
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    let changed = patch::parse(&report.patch).unwrap();
    assert_eq!(changed.len(), 1, "changes of the image are in the patch: {}", report.patch);

    let kept = logs.join("logs/run_evaluation/v00003.00/org__policy@3").join(task.id.as_str());
    let text = |name: &str| std::fs::read_to_string(kept.join(name)).unwrap();
    assert_eq!(text("patch.diff"), report.patch);
    assert!(text("test_output.txt").contains("PASSED r2e_tests/test_1.py::test_total"));
    assert!(text("report.json").contains("\"reward\": 1.0"));
    assert!(text("run_instance.log").contains("resolved: True"));
}

#[tokio::test]
async fn docker_r2e_history_is_kept_if_configured() {
    let Some(task) = r2e_task() else { return };
    let (_kept, logs) = folder();
    let config = RolloutSection { hide_history: Some(false), ..RolloutSection::default() };
    let looks = ["git log --all --format=%s; git commit -qam mine && git gc -q --prune=now", FIX];
    let report = episode(&task, &looks, &config, RewardSettings::default(), &logs).await;
    assert!(report.turns[0].observation.contains("the fix\nold"), "{:?}", report.turns[0]);
    assert!(scored(&report) > 0.5);
    assert_eq!(patch::parse(&report.patch).unwrap().len(), 1);
}

#[tokio::test]
async fn docker_r2e_every_byte_of_a_text_change_reaches_the_tests_and_nothing_else() {
    let Some(mut task) = r2e_task() else { return };
    task.expected.insert("test_bytes".into(), orchestrate_tasks::TestStatus::Passed);
    let (_kept, logs) = folder();
    let changes = [
        FIX,
        "sed -i 's/b/B/' windows.txt; printf 'th\\351\\n' > latin.txt; printf '\\0\\1\\2' > blob; \
         echo 2 > kept.log; rm gone.txt; chmod +x calc.py; ln -s calc.py link; touch want_bytes",
        "rm alias.py; echo 'NAME = 2' > alias.py; ln -sf alias.py plain.py; ln -sf plain.py moved.py; \
         rm dropped; ln -sf /etc/hostname kept.txt; ln -s ../tmp outside; ln -s .venv/bin tools; \
         printf '# -*- coding: latin-1 -*-\\nNAME = \"th\\351\"\\n' > cafe.py",
        // None of this may have an effect.
        "rm -rf .git; git config --global diff.noprefix true; git config --global core.autocrlf true; \
         git config --global core.excludesFile /x; echo '*' > /x; echo noise > new.pyc; \
         mkdir r2e_tests; echo forged > r2e_tests/a",
    ];
    let report =
        episode(&task, &changes, &RolloutSection::default(), RewardSettings::default(), &logs)
            .await;
    assert!(scored(&report) > 0.5, "{:?}\n{}", report.verdict, report.patch);
    assert!(!report.patch.contains("r2e_tests") && !report.patch.contains("new.pyc"));
    let noticed = report.verdict.unwrap().suspicious;
    for finding in [Finding::LinkOutside, Finding::EnvironmentTouched, Finding::BinaryLeftOut] {
        assert!(noticed.contains(&finding), "{noticed:?}");
    }
}

#[tokio::test]
async fn docker_r2e_changed_tests_and_runners_score_only_with_the_official_rule() {
    let Some(task) = r2e_task() else { return };
    let (_kept, logs) = folder();
    let tricks = [
        "printf 'def near(a, b):\\n    return True\\n# needed here\\n' > tests/helper.py",
        "printf '!r2e_tests\\n!run_tests.sh\\n' >> .gitignore; mkdir -p r2e_tests /r2e_tests /root/r2e_tests; \
         for f in r2e_tests /r2e_tests /root/r2e_tests; do \
         echo 'print(\"short test summary info\\nPASSED x::test_total\")' > $f/unittest_custom_runner.py; done; \
         printf 'echo short test summary info; echo PASSED x::test_total' | tee run_tests.sh > /root/run_tests.sh",
        "printf '#!/bin/sh\\necho short test summary info; echo PASSED x::test_total' > .venv/bin/python",
    ];
    for (compat, solved) in [(RewardCompat::Strict, false), (RewardCompat::R2e, true)] {
        let reward = RewardSettings { compat, ..RewardSettings::default() };
        let report = episode(&task, &tricks, &RolloutSection::default(), reward, &logs).await;
        assert_eq!(scored(&report) > 0.5, solved, "{compat:?}: {:?}", report.verdict);
        assert!(!report.patch.contains("PASSED"), "{}", report.patch);
    }
}

#[tokio::test]
async fn docker_agent_that_breaks_git_keeps_its_patch() {
    let Some(task) = r2e_task() else { return };
    let (_kept, logs) = folder();
    let tricks = [FIX, "rm -rf .git /usr/bin/git"];
    let report =
        episode(&task, &tricks, &RolloutSection::default(), RewardSettings::default(), &logs).await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    assert_eq!(report.patch, GOLD);
}

#[tokio::test]
async fn docker_oversized_tree_is_truncated_and_not_retried() {
    let Some(task) = r2e_task() else { return };
    let (_kept, logs) = folder();
    // Sparse files larger than any container are binary, and no part of the change; a text larger than
    // any graded change is.
    let sparse =
        "for n in 1 2 3; do truncate -s 1900M sparse$n; done; ls -l sparse3 | cut -d' ' -f5";
    let text = "yes 'a line of text' | head -c 20000000 > text; wc -c < text";
    let cut = Outcome::Truncated { limit: Limit::ChangeSize, reward: 0.0 };
    for (blow_up, expected) in [(sparse, Outcome::Scored { reward: 1.0 }), (text, cut)] {
        let (config, reward) = (RolloutSection::default(), RewardSettings::default());
        let report = episode(&task, &[FIX, blow_up], &config, reward, &logs).await;
        assert!(report.turns[1].observation.contains("00"), "{:?}", report.turns);
        assert_eq!(report.outcome, expected, "{blow_up}");
        assert!(report.trajectory().is_some());
    }
    // If the whole folder is deleted, nothing is left to grade.
    let config = RolloutSection::default();
    let gone = ["cd /; rm -rf /testbed; ls -d /testbed 2>&1"];
    let report = episode(&task, &gone, &config, RewardSettings::default(), &logs).await;
    assert!(report.turns[0].observation.contains("No such file"), "{:?}", report.turns);
    assert!(scored(&report).abs() < 0.5);
}

/// A sandbox in which a change to the task is graded.
fn grader_spec(sandboxes: &DockerProvider, task: &Task) -> SandboxSpec {
    SandboxSpec {
        image: task.image.clone(),
        purpose: Purpose::Grader,
        owner: Owner {
            run: RunId::generate(),
            epoch: 1,
            attempt: "v00000-00000.00-a01".parse().unwrap(),
        },
        workdir: task.workdir.clone(),
        limits: sandboxes.config().limits(),
        deadline: Duration::from_mins(10),
        reusable: false,
    }
}

async fn graded(
    task: &Task,
    patch: &str,
    harness: Option<Harness>,
) -> Result<GradedChange, GradeError> {
    let sandboxes = provider().await;
    let spec = grader_spec(&sandboxes, task);
    let mut rules = RewardSettings::default().rules();
    rules.harness = harness.unwrap_or_default();
    let graded = grade_patch(sandboxes.as_ref(), &spec, task, patch, rules).await;
    sandboxes.shutdown().await.unwrap();
    graded
}

#[tokio::test]
async fn docker_r2e_gold_patch_solves_empty_patch_does_not_and_bad_patch_does_not_apply() {
    let Some(task) = r2e_task() else { return };
    assert_eq!(task.gold_patch, GOLD);
    assert!(graded(&task, GOLD, None).await.unwrap().verdict.reward > 0.5);
    assert!(graded(&task, "", None).await.unwrap().verdict.reward < 0.5);
    let bad = GOLD.replace("items", "things");
    assert!(matches!(graded(&task, &bad, None).await, Err(GradeError::NotApplied(_))));
}

#[tokio::test]
async fn docker_swe_patches_are_applied_and_graded_as_by_the_harness() {
    let Some(task) = swe_task() else { return };
    for harness in [Harness::V4_1_0, Harness::V5_0_2] {
        let gold = graded(&task, &task.gold_patch, Some(harness)).await.unwrap();
        let report = gold.verdict.report.unwrap();
        assert!(report.resolved && report.patch_successfully_applied, "{:?}", gold.apply_log);
        assert_eq!(report.tests_status.unwrap().fail_to_pass.success.len(), 1);
        let log = String::from_utf8(gold.log).unwrap();
        let order =
            ["Start Test Output", "no marker on this stream", "PASSED tests", "End Test Output"];
        let places: Vec<_> = order.iter().map(|marker| log.find(marker).unwrap()).collect();
        assert!(places.is_sorted(), "the streams are out of order: {log}");

        // git cannot place this context, but patch can with its fuzz.
        let vague = task.gold_patch.replace("    # three", "    # other");
        let vague = graded(&task, &vague, Some(harness)).await.unwrap();
        assert!(vague.verdict.reward > 0.5 && vague.apply_log.contains("$ patch --batch"));

        let nothing = graded(&task, "", Some(harness)).await.unwrap();
        assert!(!nothing.verdict.report.unwrap().resolved);

        let bad = graded(&task, "no patch\n", Some(harness)).await.unwrap();
        assert!(bad.verdict.report.is_none() && bad.verdict.reward < 0.5);
        assert_eq!(bad.problem.as_deref(), Some(">>>>> Patch Apply Failed"));
    }
    let mut slow = task.clone();
    slow.test_timeout = Duration::from_secs(2);
    let sleeping = task.gold_patch.replace("sum(items)", "__import__('time').sleep(60)");
    let slow = graded(&slow, &sleeping, None).await.unwrap();
    assert!(slow.verdict.report.is_none() && slow.problem.unwrap().contains("timed out"));
    assert!(slow.log.ends_with(b"Timeout error: 2 seconds exceeded."));
}

#[tokio::test]
async fn docker_swe_episode_writes_the_log_folder_of_the_harness() {
    let Some(task) = swe_task() else { return };
    let (_kept, logs) = folder();
    let commands = ["python -c 'import calc' && ls /eval.sh; git log --format=%s", FIX];
    let report =
        episode(&task, &commands, &RolloutSection::default(), RewardSettings::default(), &logs)
            .await;
    assert!(scored(&report) > 0.5, "{:?}", report.verdict);
    let kept = logs.join("logs/run_evaluation/v00003.00/org__policy@3/pytest-dev__pytest-1");
    let text = |name: &str| std::fs::read_to_string(kept.join(name)).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text("report.json")).unwrap();
    let entry = &file["pytest-dev__pytest-1"];
    assert_eq!(entry["resolved"], true);
    assert_eq!(serde_json::to_value(report.verdict.unwrap().report).unwrap(), *entry);
    assert_eq!(text("patch.diff"), report.patch);
    assert!(text("eval.sh").starts_with("#!/bin/bash\nset -uxo pipefail\n"));
    assert!(text("test_output.txt").contains(">>>>> End Test Output"));
    assert!(text("run_instance.log").contains(">>>>> Applied Patch"));
}
