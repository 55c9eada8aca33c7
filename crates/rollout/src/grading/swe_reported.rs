//! Training runs of SWE-bench tests through the reporter.
//!
//! The harness's script is run in parts: what installs the tree, what writes the hidden tests, and then
//! the tests, whose results the reporter collects. The invariant: the nonce exists only after the first
//! two have ended.

use super::tests_run::{TestRun, run_reported};
use crate::sandboxes::{file_entry, refused};
use orchestrate_sandbox::{FileEntry, Sandbox, SandboxError};
use orchestrate_tasks::reporter::{self, TestCommand, TestPlan};
use orchestrate_tasks::swe::{Harness, LogParser, SweFamily, SweRow};
use orchestrate_tasks::{Task, TestStatus};
use std::fmt::Write as _;

/// The interpreter of SWE-bench's images, and the path that activating its environment gives.
pub(super) const PYTHON: &str = "/opt/miniconda3/envs/testbed/bin/python";
const PATH: &str = "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/sbin:/usr/local/bin:\
    /usr/sbin:/usr/bin:/sbin:/bin";
/// The image's own programs, without those that an installation may write.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
const HEAD: &str = "#!/bin/bash\nset -uxo pipefail\n";
const ACTIVATE: &str = "source /opt/miniconda3/bin/activate\nconda activate testbed\n";
/// Set before the set-up already, for every folder.
const SAFE_DIRECTORY: &str = "git config --global --add safe.directory /testbed";
/// Starts of the lines before the installation that need no run of their own: they are part of each
/// part, or only show the tree.
const KNOWN: &[&str] = &[
    "#!",
    "set -",
    "source /opt/miniconda3/bin/activate",
    "conda activate testbed",
    "cd /testbed",
    "export ",
    SAFE_DIRECTORY,
    "git status",
    "git show",
    "git -c core.fileMode=false diff",
];
const START: &str = ": '>>>>> Start Test Output'\n";

/// A script of the harness in parts.
#[derive(Debug)]
pub(super) struct SplitScript {
    /// What the environment needs besides the installation; mostly empty.
    pub(super) prelude: String,
    /// Installs the changed tree. Only this runs code of the tree.
    pub(super) install: String,
    /// Writes the hidden tests.
    pub(super) patch: String,
    /// Runs the tests without the reporter: if it cannot start, or does not know their command.
    pub(super) tests: String,
    /// `None` if one pytest command does not run all tests.
    command: Option<TestCommand>,
    /// Files of the tests, relative to the tree.
    hidden: Vec<String>,
    /// Whether [`SplitScript::install`] runs anything.
    pub(super) installs: bool,
}

impl SplitScript {
    /// Splits the script of `row` in this version of the harness; `None` if it has another form than the
    /// harness's.
    pub(super) fn of(script: &str, row: &SweRow, harness: Harness) -> Option<Self> {
        let mut split = match row.family() {
            SweFamily::SweSmith => Self::without_set_up(script, row),
            _ => Self::from(script, &row.base_commit),
        }?;
        // Only for these parsers can a line be written that they read as the result.
        split.command.take_if(|_| {
            let parser = row.log_parser(harness);
            parser.is_none_or(|parser| parser.line("", "").is_none())
                || parser == Some(LogParser::PytestWorkers)
        });
        Some(split)
    }

    /// The parts of a script that installs nothing, for a tree that already has its tests.
    fn without_set_up(script: &str, row: &SweRow) -> Option<Self> {
        let (_, tests) = script.split_once(START)?;
        let activates = "source /opt/miniconda3/bin/activate; conda activate testbed; ";
        let start = format!("{HEAD}{ACTIVATE}cd /testbed\n");
        Some(Self {
            prelude: String::new(),
            install: start.clone(),
            patch: format!("{HEAD}cd /testbed\n"),
            tests: format!("{start}{START}{tests}"),
            command: tests.strip_prefix(activates).and_then(test_command),
            hidden: row.smith_test_files().1,
            installs: false,
        })
    }

    /// Splits the script of a task that starts from `base`.
    fn from(script: &str, base: &str) -> Option<Self> {
        let (setup, tests) = script.split_once(START)?;
        let at = setup.find(&format!("\ngit checkout {base} "))? + 1;
        let (before, patch) = setup.split_at_checked(at)?;
        let (prelude, install) = before.rsplit_once("\nconda activate testbed\n")?;
        let is_kept = |line: &&str| *line != SAFE_DIRECTORY;
        let install: String =
            install.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect();
        let exports: String = prelude
            .lines()
            .filter(|line| line.starts_with("export "))
            .flat_map(|line| [line, "\n"])
            .collect();
        let others: String = prelude
            .lines()
            .filter(|line| !KNOWN.iter().any(|known| line.starts_with(known)))
            .flat_map(|line| [line, "\n"])
            .collect();
        let start = format!("{HEAD}{ACTIVATE}{exports}cd /testbed\n");
        let mut command = test_command(tests);
        for export in exports.lines() {
            let set = export.strip_prefix("export ").and_then(|set| set.split_once('='));
            // A value that a shell computes is unknown here.
            match set.filter(|(_, value)| !value.contains(['$', '`', '\\', '"', '\''])) {
                Some((name, value)) => {
                    command.as_mut().map(|c| c.env.insert(name.to_owned(), value.to_owned()));
                }
                None => command = None,
            }
        }
        let is_path = |argument: &&String| !argument.starts_with('-');
        let hidden = command.iter().flat_map(|command| command.arguments.iter().filter(is_path));
        let hidden =
            hidden.map(|path| path.split("::").next().unwrap_or(path).to_owned()).collect();
        let prelude =
            if others.is_empty() { others } else { format!("{exports}cd /testbed\n{others}") };
        Some(Self {
            prelude,
            install: format!("{start}{install}"),
            patch: format!("{HEAD}export PATH={SYSTEM_PATH}\ncd /testbed\n{patch}"),
            tests: format!("{start}{START}{tests}"),
            command,
            hidden,
            installs: true,
        })
    }

    /// Runs the tests in the prepared tree; `None` if the reporter does not know their command or
    /// cannot start in this image.
    pub(super) async fn run(
        &self,
        sandbox: &mut dyn Sandbox,
        task: &Task,
        touched: &[String],
        tracing: &[String],
        folder: &str,
    ) -> Result<Option<TestRun>, SandboxError> {
        let Some(command) = &self.command else { return Ok(None) };
        let plan = TestPlan {
            touched: touched.to_vec(),
            tracing: tracing.to_vec(),
            hidden: self.hidden.clone(),
            unset: ["PAGER", "GIT_PAGER", "LANG"].map(ToOwned::to_owned).to_vec(),
        };
        let files = reporter::files(task, command, &plan, folder)
            .map_err(|error| refused(sandbox, "plan", error.to_string()))?;
        let files: Vec<FileEntry> = files.iter().map(file_entry).collect();
        sandbox.write_files(&files).await?;
        run_reported(sandbox, task, command, folder).await
    }
}

/// The one pytest command in the part of the script that runs the tests. One that selects tests by
/// an expression, or runs them in processes of their own, is not run by the reporter.
fn test_command(tests: &str) -> Option<TestCommand> {
    let (line, rest) = tests.split_once('\n')?;
    let arguments = line.strip_prefix("pytest ")?;
    if !rest.starts_with("SWEBENCH_TEST_EXIT_CODE=") {
        return None;
    }
    let mut command = TestCommand::parse(&format!("python -m pytest {arguments}"))?;
    let is_other = |argument: &String| {
        argument == "-k"
            || argument.starts_with("--numprocesses")
            || argument.strip_prefix("-n").is_some_and(|n| !matches!(n, "0" | "=0"))
    };
    if command.arguments.iter().any(is_other) {
        return None;
    }
    PYTHON.clone_into(&mut command.python);
    command.env.insert("PATH".to_owned(), PATH.to_owned());
    command.env.insert("PIP_RETRIES".to_owned(), "0".to_owned());
    Some(command)
}

/// The log that this version of the harness would read for these results of `row`'s tests.
pub(super) fn log_of(results: &[(String, TestStatus)], row: &SweRow, harness: Harness) -> String {
    let parser = row.log_parser(harness).unwrap_or(LogParser::Pytest);
    let mut log = format!("+ {START}");
    for (test, status) in results {
        let word = match status {
            TestStatus::Passed => "PASSED",
            TestStatus::Failed => "FAILED",
            TestStatus::Error => "ERROR",
        };
        if let Some(line) = parser.line(test, word) {
            let _ = writeln!(log, "{line}");
        }
    }
    log.push_str("+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n");
    log
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_tasks::swe::eval_script;

    const SCRIPT: &str = "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\n\
        conda activate testbed\ncd /testbed\nsed -i x /etc/locale.gen\nexport LANG=en_US.UTF-8\n\
        git config --global --add safe.directory /testbed\ncd /testbed\ngit status\ngit show\n\
        git -c core.fileMode=false diff c0ffee\nsource /opt/miniconda3/bin/activate\n\
        conda activate testbed\npython -m pip install -e .\ngit checkout c0ffee tests/test_a.py\n\
        git apply -v - <<'EOF_1'\n+git checkout c0ffee x\nEOF_1\n\
        : '>>>>> Start Test Output'\npytest -rA tests/test_a.py\n\
        SWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n";

    fn row(base: &str) -> SweRow {
        let (repo, base_commit) = ("pytest-dev/pytest".into(), base.into());
        SweRow { repo, base_commit, ..SweRow::default() }
    }

    #[test]
    fn scripts_are_split_into_what_runs_code_of_the_tree_and_what_does_not() {
        let split = SplitScript::of(SCRIPT, &row("c0ffee"), Harness::V4_1_0).unwrap();
        assert_eq!(
            split.prelude,
            "export LANG=en_US.UTF-8\ncd /testbed\nsed -i x /etc/locale.gen\n"
        );
        assert!(split.install.ends_with("cd /testbed\npython -m pip install -e .\n"));
        assert!(split.install.contains("\nexport LANG=en_US.UTF-8\n"));
        assert!(!split.install.contains("git"));
        assert!(split.patch.ends_with(
            "cd /testbed\ngit checkout c0ffee tests/test_a.py\n\
             git apply -v - <<'EOF_1'\n+git checkout c0ffee x\nEOF_1\n"
        ));
        assert!(!split.patch.contains("conda"));
        let plain = SCRIPT.replace("sed -i x /etc/locale.gen\n", "");
        assert_eq!(SplitScript::of(&plain, &row("c0ffee"), Harness::V4_1_0).unwrap().prelude, "");
        assert!(SplitScript::of(SCRIPT, &row("decade"), Harness::V4_1_0).is_none());
    }

    #[test]
    fn one_pytest_command_is_run_by_the_reporter() {
        let split = SplitScript::of(SCRIPT, &row("c0ffee"), Harness::V4_1_0).unwrap();
        assert_eq!(split.command.unwrap().arguments, ["-rA", "tests/test_a.py"]);
        assert!(split.tests.contains("pytest -rA tests/test_a.py\nSWEBENCH_TEST_EXIT_CODE=$?"));
        for other in [
            "./tests/runtests.py x",
            "pytest -rA a; pytest b",
            "tox -epy39",
            "pytest -rA -k \"a or b\"",
            "pytest -n auto a",
            "pytest -n4 a",
        ] {
            let script = SCRIPT.replace("pytest -rA tests/test_a.py", other);
            assert_eq!(
                SplitScript::of(&script, &row("c0ffee"), Harness::V4_1_0).unwrap().command,
                None,
                "{other}"
            );
        }
    }

    #[test]
    fn the_parser_of_the_harness_decides_whether_the_reporter_runs_the_tests() {
        let own = SweRow { log_parser: Some("parse_log_django".into()), ..row("c0ffee") };
        let command = |harness| SplitScript::of(SCRIPT, &own, harness).unwrap().command;
        assert!(command(Harness::V4_1_0).is_some(), "version 4 does not read the column");
        assert_eq!(command(Harness::V5_0_2), None);
        let results = [("t::a".to_owned(), TestStatus::Passed)];
        let read = |harness| log_of(&results, &own, harness).contains("\nPASSED t::a\n");
        assert_eq!(Harness::ALL.map(read), [true, false]);
    }

    #[test]
    fn results_are_written_as_a_log_with_one_line_each() {
        let results = [
            ("tests/test_a.py::test_x".to_owned(), TestStatus::Passed),
            ("a\nPASSED b".to_owned(), TestStatus::Failed),
        ];
        let log = log_of(&results, &row("c0"), Harness::V4_1_0);
        assert!(log.contains("\nPASSED tests/test_a.py::test_x\nFAILED a PASSED b\n"), "{log}");
        let funcy = SweRow { repo: "swesmith/Suor__funcy.207a7810".into(), ..SweRow::default() };
        let log = log_of(&results, &funcy, Harness::V4_1_0);
        assert!(log.contains("\ntests/test_a.py::test_x PASSED\na PASSED b FAILED\n"), "{log}");
    }

    #[test]
    fn a_tree_with_its_tests_needs_no_set_up() {
        let smith = |repo: &str| {
            let repo = format!("swesmith/{repo}");
            let tests = vec!["tests/a.py::t".into()];
            let row = SweRow { repo, fail_to_pass: tests, ..SweRow::default() };
            let script = eval_script(&row, Harness::V5_0_2).unwrap();
            SplitScript::of(&script, &row, Harness::V4_1_0).unwrap()
        };
        let funcy = smith("Suor__funcy.207a7810");
        assert!(
            !funcy.installs && funcy.install.ends_with("conda activate testbed\ncd /testbed\n")
        );
        assert_eq!(funcy.command.unwrap().arguments.last().unwrap(), "--verbose");
        assert_eq!(funcy.hidden, ["tests/a.py"]);
        let log_only = [
            "tornadoweb__tornado.d5ac65c1",
            "pydantic__pydantic.acb0f10f",
            "un33k__python-slugify.872b3750",
            "HIPS__autograd.ac044f0d",
        ];
        assert!(log_only.iter().all(|repo| smith(repo).command.is_none()));
    }

    #[test]
    fn exported_values_reach_the_reporter_unless_a_shell_computes_them() {
        let command = |export: &str| {
            let script = SCRIPT.replace("export LANG=en_US.UTF-8", export);
            SplitScript::of(&script, &row("c0ffee"), Harness::V4_1_0).unwrap().command
        };
        assert_eq!(command("export LANG=en_US.UTF-8").unwrap().env["LANG"], "en_US.UTF-8");
        assert_eq!(command("export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"), None);
    }
}
