//! Writes the script that a grading container runs, byte for byte as the harness does.

use super::parsers::pattern;
use super::spec::SpecError;
use super::{Harness, SweFamily, SweRow};
use regex::Regex;
use std::sync::LazyLock;

/// Delimiter of the here-document that contains the test patch.
const HEREDOC: &str = "EOF_114329324912";
const END_MARKER: &str = ">>>>> End Test Output";
/// Name endings of files that are not passed to the test runner. As in the harness, `csv` lacks its
/// dot and so matches other endings too.
const NOT_TESTS: [&str; 11] =
    [".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml"];

/// The content of `eval.sh` for `row`.
///
/// For version 5, it is the row's `eval_script` column with commands that log the test command's
/// exit code. A row without that column gets the script of version 4 with the same commands added.
/// Version 4 does not read that column.
/// For a row of SWE-Gym or SWE-rebench it is that of version 4 with the commands of the data set,
/// and for one of SWE-smith the script of its own harness.
///
/// # Errors
/// If the row's repository or version is unknown.
pub fn eval_script(row: &SweRow, harness: Harness) -> Result<String, SpecError> {
    script(row, harness, harness == Harness::V5_0_2)
}

/// The script of `harness` for strict grading: it logs the exit code of the tests, as that of version
/// 5 does, and exits with it.
///
/// # Errors
/// As [`eval_script`].
pub fn strict_eval_script(row: &SweRow, harness: Harness) -> Result<String, SpecError> {
    Ok(format!("{}exit \"$SWEBENCH_TEST_EXIT_CODE\"\n", script(row, harness, true)?))
}

/// The script of `harness`, with commands that log the test command's exit code if
/// `logs_exit_code` is true.
fn script(row: &SweRow, harness: Harness, logs_exit_code: bool) -> Result<String, SpecError> {
    let lines = match row.own_script(harness) {
        Some(script) => {
            let is_line = |line: &&str| !matches!(*line, "#!/bin/bash" | "set -uxo pipefail");
            crate::text::strip(script).split('\n').filter(is_line).map(ToOwned::to_owned).collect()
        }
        None if row.family() == SweFamily::SweSmith => smith_lines(row)?,
        None => version_4_lines(row)?,
    };
    let mut script = "#!/bin/bash\nset -uxo pipefail\n".to_owned();
    let mut needs_exit_code = logs_exit_code;
    for line in lines {
        let is_end_of_tests = needs_exit_code && line.contains(END_MARKER);
        needs_exit_code &= !is_end_of_tests;
        if is_end_of_tests {
            script.push_str("SWEBENCH_TEST_EXIT_CODE=$?\n");
        }
        script.push_str(&line);
        script.push('\n');
        if is_end_of_tests {
            script.push_str("echo \">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE\"\n");
        }
    }
    Ok(script)
}

/// The commands of version 4's script for `row`.
fn version_4_lines(row: &SweRow) -> Result<Vec<String>, SpecError> {
    let RowCommands { setup, install, test } = RowCommands::of(row)?;
    let base = &row.base_commit;
    let restore = format!("git checkout {base} {}", test_files(&row.test_patch).join(" "));

    let activate = ["source /opt/miniconda3/bin/activate", "conda activate testbed"];
    let mut lines: Vec<String> = activate.map(Into::into).into();
    lines.push("cd /testbed".into());
    lines.extend(setup);
    lines.push("git config --global --add safe.directory /testbed".into());
    lines.push("cd /testbed".into());
    lines.extend(["git status", "git show"].map(Into::into));
    lines.push(format!("git -c core.fileMode=false diff {base}"));
    lines.extend(activate.map(Into::into));
    lines.extend(install);
    lines.push(restore.clone());
    lines.push(format!("git apply -v - <<'{HEREDOC}'\n{}\n{HEREDOC}", row.test_patch));
    lines.push(": '>>>>> Start Test Output'".into());
    lines.push(test);
    lines.push(format!(": '{END_MARKER}'"));
    lines.push(restore);
    Ok(lines)
}

/// The commands in the script that differ between rows.
struct RowCommands {
    setup: Vec<String>,
    install: Option<String>,
    /// Runs the tests of the row's test patch.
    test: String,
}

impl RowCommands {
    fn of(row: &SweRow) -> Result<Self, SpecError> {
        let mut directives = test_directives(&row.repo, &row.test_patch);
        let Some(config) = &row.install_config else {
            let spec = row.spec()?;
            if row.repo == MYPY {
                directives = vec![mypy_cases(&row.test_patch)];
            }
            return Ok(Self {
                setup: spec.setup.iter().map(|&line| line.into()).collect(),
                install: Some(spec.install.into()),
                test: with_arguments(spec.test_command, &directives),
            });
        };
        let deleted = deleted_files(&row.test_patch);
        directives.retain(|file| !deleted.contains(file));
        let command = config.test_command().ok_or_else(|| SpecError::Repo(row.repo.clone()))?;
        Ok(Self {
            setup: config.eval_commands.clone().unwrap_or_default(),
            install: config.install_command().map(ToOwned::to_owned),
            test: with_arguments(command, &directives),
        })
    }
}

fn with_arguments(command: &str, arguments: &[String]) -> String {
    std::iter::once(command)
        .chain(arguments.iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The repository whose tests SWE-Gym selects by the names of cases in data files.
const MYPY: &str = "python/mypy";

/// The expression that selects the cases in mypy's test data that `test_patch` names.
fn mypy_cases(test_patch: &str) -> String {
    static CASE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[case ([^\]]+)\]"));
    let names = CASE.captures_iter(test_patch).filter_map(|found| found.get(1));
    format!("\"{}\"", names.map(|name| name.as_str()).collect::<Vec<_>>().join(" or "))
}

/// Files that `test_patch` deletes, which SWE-rebench does not pass to the test runner.
fn deleted_files(test_patch: &str) -> Vec<String> {
    static DELETED: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"(?m)^diff --git a/.* b/(.*)\ndeleted file mode "));
    let paths = DELETED.captures_iter(test_patch).filter_map(|found| found.get(1));
    paths.map(|path| path.as_str().to_owned()).collect()
}

/// The commands of SWE-smith's script.
fn smith_lines(row: &SweRow) -> Result<Vec<String>, SpecError> {
    let test = row.smith_test_command().ok_or_else(|| SpecError::Repo(row.repo.clone()))?;
    Ok(vec![
        "cd /testbed".to_owned(),
        ": '>>>>> Start Test Output'".to_owned(),
        test,
        format!(": '{END_MARKER}'"),
    ])
}

/// Arguments of the test command: the new paths of the files in `test_patch`, without data files.
/// For Django, they are module names.
pub fn test_directives(repo: &str, test_patch: &str) -> Vec<String> {
    static HEADER: LazyLock<Regex> = LazyLock::new(|| pattern("diff --git a/.* b/(.*)"));
    let headers = HEADER.captures_iter(test_patch);
    let paths = headers.filter_map(|found| found.get(1)).map(|path| path.as_str());
    let paths = paths.filter(|path| !NOT_TESTS.iter().any(|end| path.ends_with(end)));
    let directive = |path: &str| {
        if repo != "django/django" {
            return path.to_owned();
        }
        let path = path.strip_suffix(".py").unwrap_or(path);
        path.strip_prefix("tests/").unwrap_or(path).replace('/', ".")
    };
    paths.map(directive).collect()
}

/// Old paths of the files in `test_patch`, in order. Files that it creates are left out.
pub fn test_files(test_patch: &str) -> Vec<String> {
    static HEADER: LazyLock<Regex> =
        LazyLock::new(|| pattern(r#"^diff --git ("?a/[^\t\n]+"?) "?b/[^\t\n]+"?"#));
    static HUNK: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@"));
    let mut files: Vec<&str> = Vec::new();
    // After a `diff --git` line, the lines `---` and `+++` only repeat the paths.
    let (mut in_header, mut old_name) = (false, None);
    let (mut old_left, mut new_left) = (0_u64, 0_u64);
    for line in test_patch.split('\n') {
        if old_left + new_left > 0 {
            let (old, new) = match line.as_bytes().first() {
                Some(b'-') => (1, 0),
                Some(b'+') => (0, 1),
                Some(b'\\') => (0, 0),
                _ => (1, 1),
            };
            old_left = old_left.saturating_sub(old);
            new_left = new_left.saturating_sub(new);
        } else if let Some(source) = HEADER.captures(line).and_then(|found| found.get(1)) {
            files.push(source.as_str());
            in_header = true;
        } else if line.starts_with("new file mode ") {
            files.pop();
        } else if let Some(name) = line.strip_prefix("--- ") {
            old_name = (!in_header).then(|| name.split('\t').next().unwrap_or(name));
        } else if line.starts_with("+++ ") {
            files.extend(old_name.take());
        } else if let Some(found) = HUNK.captures(line) {
            let length = |group| {
                found.get(group).map_or(1, |text| text.as_str().parse().unwrap_or_default())
            };
            (old_left, new_left, in_header) = (length(1), length(2), false);
        }
    }
    files.iter().filter_map(|file| file.strip_prefix("a/")).map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swe::{Commands, InstallConfig};

    const PATCH: &str = "diff --git a/tests/a/test_b.py b/tests/a/test_b.py\n\
        index 1..2 100644\n--- a/tests/a/test_b.py\n+++ b/tests/a/test_b.py\n\
        @@ -1,2 +1,2 @@\n-- a/not/a/header.py\n+++ b/not/a/header.py\n context\n\
        diff --git a/tests/data.csv b/tests/data.csv\nnew file mode 100644\n--- /dev/null\n\
        +++ b/tests/data.csv\n@@ -0,0 +1 @@\n+x\n\
        diff --git a/tests/old.py b/tests/new.py\nsimilarity index 100%\n\
        rename from tests/old.py\nrename to tests/new.py\n\
        diff --git a/x.png b/x.png\nindex 3..4 100644\nBinary files a/x.png and b/x.png differ\n";

    #[test]
    fn files_that_the_test_patch_creates_are_left_out() {
        assert_eq!(test_files(PATCH), ["tests/a/test_b.py", "tests/old.py", "x.png"]);
        let plain =
            "--- a/one.py\t2020\n+++ b/one.py\n@@ -1 +1 @@\n-a\n+b\n--- a/two.py\n+++ b/two.py\n";
        assert_eq!(test_files(plain), ["one.py", "two.py"]);
    }

    #[test]
    fn directives_contain_only_tests() {
        assert_eq!(test_directives("a/b", PATCH), ["tests/a/test_b.py", "tests/new.py"]);
        assert_eq!(test_directives("django/django", PATCH), ["a.test_b", "new"]);
    }

    #[test]
    fn each_data_set_has_its_own_commands() {
        let row = |repo: &str, version: &str, test_patch: &str| SweRow {
            repo: repo.into(),
            version: version.into(),
            base_commit: "c0".into(),
            test_patch: test_patch.into(),
            ..SweRow::default()
        };
        let script = |row: &SweRow| eval_script(row, Harness::V4_1_0).unwrap();
        let mypy = "diff --git a/test-data/x.test b/test-data/x.test\n--- a/test-data/x.test\n\
            +++ b/test-data/x.test\n@@ -1,0 +1,2 @@\n+[case testOne]\n+[case testTwo-xfail]\n";
        let mypy = script(&row("python/mypy", "1.4", mypy));
        assert!(mypy.contains("\npytest -n0 -rA -k \"testOne or testTwo-xfail\"\n"), "{mypy}");
        let monai = script(&row("Project-MONAI/MONAI", "1.1", PATCH));
        assert!(monai.contains("python setup.py develop;\ngit checkout c0 "), "{monai}");
        assert!(monai.contains("\npytest -rA  tests/a/test_b.py tests/new.py\n"), "{monai}");

        let gone = "diff --git a/tests/gone.py b/tests/gone.py\ndeleted file mode 100644\n\
            --- a/tests/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n";
        let mut rebench = row("o/r", "1.0", &format!("{PATCH}{gone}"));
        rebench.install_config = Some(InstallConfig {
            test_cmd: Some(Commands::One("pytest -rA -p no:cacheprovider".into())),
            log_parser: Some("parse_log_pytest".into()),
            ..InstallConfig::default()
        });
        let text = script(&rebench);
        assert!(text.contains("\npytest -rA -p no:cacheprovider tests/a/test_b.py tests/new.py\n"));
        assert!(
            text.contains("conda activate testbed\ngit checkout c0 tests/a/test_b.py"),
            "{text}"
        );

        let smith =
            SweRow { repo: "swesmith/tkrajina__gpxpy.09fc46b3".into(), ..SweRow::default() };
        let want = "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '>>>>> Start Test Output'\n\
            source /opt/miniconda3/bin/activate; conda activate testbed; \
            pytest test.py --verbose --color=no --tb=no --disable-warnings\n\
            : '>>>>> End Test Output'\n";
        assert_eq!(script(&smith), want);
    }

    #[test]
    fn version_five_records_the_exit_code_outside_the_results() {
        let script =
            "#!/bin/bash\nset -uxo pipefail\npytest\n: '>>>>> End Test Output'\ngit checkout x";
        let row = SweRow { eval_script: Some(script.into()), ..SweRow::default() };
        let want = "#!/bin/bash\nset -uxo pipefail\npytest\nSWEBENCH_TEST_EXIT_CODE=$?\n\
            : '>>>>> End Test Output'\necho \">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE\"\n\
            git checkout x\n";
        assert_eq!(eval_script(&row, Harness::V5_0_2).unwrap(), want);
    }
}
