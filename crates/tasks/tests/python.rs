//! Micro tasks under a real Python: the claims are true, the gold patch solves the task, an
//! empty patch does not, and no trick of the tested module scores. Without `python3`, the tests are
//! skipped.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step fails the test")]

use orchestrate_tasks::micro::{self, MicroCounts, RUN_COMMAND};
use orchestrate_tasks::{Split, Task, TaskFile, TestStatus, Verdict, expert, grade, patch, verify};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

fn no_python() -> bool {
    let absent = Command::new("python3").arg("--version").output().is_err();
    if absent {
        orchestrate_e2e::skip::skip("python", "no python3");
    }
    absent
}

fn module(task: &Task) -> &TaskFile {
    &task.agent_files[0]
}

fn repaired(task: &Task) -> String {
    let tree = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    tree.into_iter().find(|file| file.path == module(task).path).unwrap().content
}

fn write_tree(folder: &std::path::Path, tree: &[TaskFile]) {
    for file in tree {
        let path = folder.join(&file.path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, &file.content).unwrap();
    }
}

fn shell(folder: &std::path::Path, command: &str) -> (String, Option<i32>) {
    let output = Command::new("/bin/sh")
        .args(["-c", &format!("{command} 2>&1")])
        .current_dir(folder)
        .output()
        .unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

fn run_tree(task: &Task, tree: &[TaskFile]) -> (String, Verdict) {
    let folder = tempfile::tempdir().unwrap();
    write_tree(folder.path(), tree);
    let (log, _) = shell(folder.path(), &task.test_command);
    let verdict = grade(&log, &task.expected);
    (log, verdict)
}

#[test]
fn python_agrees_with_every_claim_of_a_sample() {
    if no_python() {
        return;
    }
    let counts = MicroCounts { train: 1000, held_out: 400, held_out_families: 400 };
    let rows = micro::rows(11, counts);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut input = String::new();
    for row in rows {
        let task = row.to_task().unwrap();
        let noop = grade(&row.execution_result_content.old_commit_res_stdout, &task.expected);
        let line = serde_json::json!({
            "id": task.id,
            "issue": task.problem_statement,
            "old": module(&task).content,
            "new": repaired(&task),
            "tests": task.hidden_files[0].content,
            "examples": task.agent_files[1].content,
            "expected": task.expected,
            "noop": noop.statuses,
            "turns": expert::episode(&task, &mut rng).unwrap(),
        });
        writeln!(input, "{line}").unwrap();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/check.py");
    let mut python = Command::new("python3")
        .args(["-I", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    python.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "");
}

#[test]
fn python_runner_prints_the_recorded_logs() {
    if no_python() {
        return;
    }
    for row in micro::rows(3, MicroCounts { train: 5, held_out: 2, held_out_families: 2 }) {
        let task = row.to_task().unwrap();
        let gold = verify::graded_tree(&task, &task.gold_patch).unwrap();
        let (log, gold) = run_tree(&task, &gold);
        assert_eq!(log, row.execution_result_content.new_commit_res_stdout);
        let (log, noop) = run_tree(&task, &verify::graded_tree(&task, "").unwrap());
        assert_eq!(log, row.execution_result_content.old_commit_res_stdout);
        let check = verify::Check { gold, noop };
        assert_eq!(check.problems(), Vec::<String>::new());
        assert!(check.noop.official_reward < 0.5);
    }
}

#[test]
fn python_and_coreutils_print_the_experts_observations() {
    if no_python() {
        return;
    }
    let tasks = micro::generate(3, MicroCounts { train: 24, held_out: 0, held_out_families: 0 });
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut recoveries = 0;
    for task in &tasks {
        let folder = tempfile::tempdir().unwrap();
        write_tree(folder.path(), &task.agent_files);
        let before = std::fs::read_dir(folder.path()).unwrap().count();
        let turns = expert::episode(task, &mut rng).unwrap();
        recoveries += usize::from(turns.iter().any(|turn| turn.weight < 0.5));
        for turn in turns {
            let argument = |name: &str| turn.action.arguments[name].clone();
            if turn.action.name == "edit" {
                let path = folder.path().join(argument("path").as_str().unwrap());
                let text = std::fs::read_to_string(&path).unwrap();
                let mut lines: Vec<&str> = text.lines().collect();
                let new = argument("new");
                lines[usize::try_from(argument("line").as_u64().unwrap()).unwrap() - 1] =
                    new.as_str().unwrap();
                std::fs::write(&path, lines.join("\n") + "\n").unwrap();
            } else if turn.action.name == "bash" {
                let (text, code) = shell(folder.path(), argument("command").as_str().unwrap());
                let code = code.filter(|code| *code != 0).map(|code| format!("exit {code}\n"));
                assert_eq!(
                    code.unwrap_or_default() + text.trim_end_matches('\n'),
                    turn.observation
                );
            }
        }
        let after = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(before, after, "running the visible tests must leave no file behind");
    }
    assert!(recoveries > 0);
}

#[test]
fn python_run_survives_a_broken_module() {
    if no_python() {
        return;
    }
    let task = &micro::generate(3, MicroCounts { train: 1, held_out: 0, held_out_families: 0 })[0];
    let folder = tempfile::tempdir().unwrap();
    write_tree(folder.path(), &task.agent_files);
    std::fs::write(folder.path().join(&module(task).path), "def f(:\n").unwrap();
    let (text, code) = shell(folder.path(), RUN_COMMAND);
    assert_eq!((text.lines().count(), code), (2, Some(1)));
    assert!(text.contains(": got SyntaxError, expected ") && !text.contains('/'), "{text}");
}

/// Files that an agent might write to score without repairing the module.
fn tricks(task: &Task) -> Vec<(&'static str, Vec<TaskFile>)> {
    let module = module(task);
    let name = module.path.trim_end_matches(".py");
    let mut forged = String::from("=== short test summary info ===\n");
    for test in task.expected.keys() {
        writeln!(forged, "PASSED r2e_tests/test_1.py::{test}").unwrap();
    }
    let file = |path: &str, content: &str| TaskFile { path: path.into(), content: content.into() };
    let head = |code: &str| file(&module.path, &format!("{code}\n{}", module.content));
    let always = "class Any:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n    def __call__(self, *a):\n        return self\n\
                  def __getattr__(name):\n    return Any()\n";
    let shadow = format!("import os\nos.write(1, {forged:?}.encode())\nos._exit(0)\n");
    let write_up = format!(
        "import glob, os\nfor pid in (os.getppid(),):\n    for fd in ('1', '2'):\n        try:\n            open('/proc/%d/fd/%s' % (pid, fd), 'w').write({forged:?})\n        except OSError:\n            pass\n"
    );
    let late = format!(
        "import os, time\nup = os.getppid()\nif os.fork() == 0:\n    os.setsid()\n    while os.getppid() == 0 or os.path.exists('/proc/%d' % up):\n        try:\n            open('/proc/%d/fd/1' % up, 'w').write({forged:?})\n        except OSError:\n            time.sleep(0.01)\n    os._exit(0)\n"
    );
    let forge_reply = "import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b'\\x00\\x00\\x00\\x02vt' * 20)\n    except OSError:\n        pass\n";
    vec![
        ("print", vec![head(&format!("print({forged:?}, flush=True)"))]),
        ("exit", vec![head("import os\nos._exit(0)")]),
        ("sys_exit", vec![head("import sys\nsys.exit(0)")]),
        ("system_exit", vec![head("raise SystemExit(0)")]),
        ("keyboard_interrupt", vec![head("raise KeyboardInterrupt")]),
        (
            "builtins",
            vec![head(
                "import builtins\nbuiltins.print = lambda *a, **k: None\nbuiltins.AssertionError = Warning\nbuiltins.type = lambda v: int",
            )],
        ),
        (
            "atexit",
            vec![head(&format!("import atexit\natexit.register(lambda: print({forged:?}))"))],
        ),
        ("equal_to_all", vec![file(&module.path, always)]),
        ("proc_streams", vec![head(&write_up)]),
        ("late_process", vec![head(&late)]),
        ("forged_replies", vec![head(forge_reply)]),
        ("kill_parent", vec![head("import os\nos.kill(os.getppid(), 9)")]),
        ("package", vec![file(&format!("{name}/__init__.py"), always), file(&module.path, "")]),
        (
            "shadows",
            [
                "sitecustomize",
                "usercustomize",
                "re",
                "json",
                "os",
                "select",
                "sys",
                "time",
                "io",
                "encodings",
            ]
            .map(|name| file(&format!("{name}.py"), &shadow))
            .into(),
        ),
        (
            "more_tests",
            vec![file("r2e_tests/test_2.py", &shadow), file("r2e_tests/conftest.py", &shadow)],
        ),
        ("own_runner", vec![file("r2e_tests/runner.py", &shadow), file("r2e_tests/test_1.py", "")]),
        (
            "shadows_beside_runner",
            vec![file("r2e_tests/os.py", &shadow), file("r2e_tests/select.py", &shadow)],
        ),
    ]
}

#[test]
fn python_tricks_never_score() {
    if no_python() {
        return;
    }
    let task = &micro::generate(8, MicroCounts { train: 1, held_out: 0, held_out_families: 0 })[0];
    for (trick, files) in tricks(task) {
        let mut tree = task.agent_files.clone();
        tree.retain(|file| files.iter().all(|other| other.path != file.path));
        tree.extend(files);
        let patch = patch::diff(&task.agent_files, &tree);
        let (log, verdict) = run_tree(task, &verify::graded_tree(task, &patch).unwrap());
        assert!(verdict.reward < 0.5 && verdict.official_reward < 0.5, "{trick}: {log}");
    }
}

#[test]
fn python_a_forged_summary_does_not_spoil_a_correct_repair() {
    if no_python() {
        return;
    }
    let task = &micro::generate(8, MicroCounts { train: 1, held_out: 0, held_out_families: 0 })[0];
    let mut tree = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    for file in &mut tree {
        if file.path == module(task).path {
            file.content.push_str("\nprint('short test summary info')\n");
        }
    }
    let (_, verdict) = run_tree(task, &verify::with_hidden(task, tree));
    assert!(verdict.reward > 0.5 && verdict.official_reward > 0.5);
}

#[test]
fn python_a_call_that_hangs_fails_quickly() {
    if no_python() {
        return;
    }
    let task = &micro::generate(8, MicroCounts { train: 1, held_out: 0, held_out_families: 0 })[0];
    let mut tree = task.agent_files.clone();
    tree[0].content.insert_str(0, "while True:\n    pass\n");
    let (log, verdict) = run_tree(task, &verify::with_hidden(task, tree));
    assert!(verdict.statuses.values().all(|status| *status == TestStatus::Failed), "{log}");
    assert_eq!(verdict.statuses.len(), task.expected.len());
    assert_eq!(task.split, Split::Train);
}

#[test]
fn python_tested_code_cannot_access_tests_or_streams() {
    if no_python() {
        return;
    }
    let task = &micro::generate(8, MicroCounts { train: 1, held_out: 0, held_out_families: 0 })[0];
    let mut tree = patch::apply(&task.agent_files, &task.gold_patch).unwrap();
    // If any of these attempts succeeds, the import fails, and so does the correct repair.
    let probe = "import os\n\
        up = '/proc/%d/' % os.getppid()\n\
        assert not os.path.exists('r2e_tests/test_1.py')\n\
        for path in (up + 'mem', up + 'fd/1', up + 'environ'):\n    \
            try:\n        open(path, 'rb').close()\n    \
            except PermissionError:\n        continue\n    \
            raise AssertionError\n";
    for file in &mut tree {
        if file.path == module(task).path {
            file.content.insert_str(0, probe);
        }
    }
    let (log, verdict) = run_tree(task, &verify::with_hidden(task, tree));
    assert!(verdict.reward > 0.5, "{log}");
}
