//! Tests that cannot run because the machine lacks something.
//!
//! A skip is always printed as `skipped: TEST: needs NEED (WHY)`, and appended as one line to the
//! file that `ORCHESTRATE_SKIPS` names, so that `scripts/test` can count and list all of them.
//! `ORCHESTRATE_REQUIRE` is a comma-separated list of needs whose absence fails the test instead.
//!
//! | Need | Missing |
//! |---|---|
//! | `data` | test data that is not part of the repository: the folder in `ORCHESTRATE_TEST_DATA` |
//! | `docker` | a Docker daemon, or an image that `scripts/test` builds |
//! | `daemons` | a second Docker daemon, started by the test |
//! | `ssh` | an SSH server, started by the test |
//! | `mount` | the right to mount a tmpfs |
//! | `python` | a Python with the packages that the test names |
//! | `agents` | an agent that `scripts/agents` installs, in the folder `ORCHESTRATE_AGENTS` |
//! | `agents-python` | a Python with `openai`, `anthropic` and `openai-agents`, in `ORCHESTRATE_AGENTS_PYTHON` |
//! | `mcp-python` | a Python with `mcp`, in `ORCHESTRATE_MCP_PYTHON` |
//! | `harbor` | the virtual environment of the package `harbor`, in `ORCHESTRATE_HARBOR` |
//! | `sglang`, `vllm` | a real server, see `crates/engine/tests/conformance` |
//! | `advisories`, `pip-audit`, `miri`, `asan` | of scripts: see `scripts/deny`, `audit-python`, `miri`, `asan` |
//! | `swe-rows` | real rows and runs of SWE-bench's family, in the folder `ORCHESTRATE_SWE_ROWS` |
//! | `swesmith` | a Python with the package `swesmith`, in `ORCHESTRATE_SWESMITH_PYTHON` |
//! | `sinks` | a Python with `tensorboard`, `pandas` and `pyarrow` in `ORCHESTRATE_SINKS_PYTHON`, or `prometheus` and `promtool`, in the folder `ORCHESTRATE_PROMETHEUS` or on the search path; `scripts/test` provides both |
//! | `templates` | a folder of chat templates (`*.jinja`) in `ORCHESTRATE_TEMPLATES`, or a Python with `transformers` and `jinja2` in `ORCHESTRATE_TRANSFORMERS_PYTHON` |
//! | `qwen3` | the folder of Qwen3's tokenizer in `ORCHESTRATE_QWEN3` |

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Reports that the current test cannot run; the caller returns.
///
/// # Panics
/// Panics if `ORCHESTRATE_REQUIRE` lists `need`, or the file of skips cannot be written.
#[track_caller]
pub fn skip(need: &str, why: &str) {
    skip_test(&current_test(), need, why);
}

/// [`skip`] for a test named by the caller.
///
/// # Panics
/// The panics of [`skip`].
#[track_caller]
pub fn skip_test(test: &str, need: &str, why: &str) {
    assert!(!is_required(need), "{test} needs {need}, which ORCHESTRATE_REQUIRE lists: {why}");
    let line = format!("{test}: needs {need} ({why})\n");
    crate::say(&format!("skipped: {}", line.trim_end()));
    if let Some(path) = std::env::var_os("ORCHESTRATE_SKIPS") {
        // One write per line: tests of several processes append to the same file.
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        assert!(written.is_ok(), "cannot append to {}: {written:?}", path.display());
    }
}

/// Whether `ORCHESTRATE_REQUIRE` lists `need`.
pub fn is_required(need: &str) -> bool {
    let required = std::env::var("ORCHESTRATE_REQUIRE").unwrap_or_default();
    required.split(',').any(|word| word.trim() == need)
}

/// A file or folder of the test data that is not part of the repository; `None`, reported as a
/// skip, where it is absent.
#[track_caller]
pub fn data(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("ORCHESTRATE_TEST_DATA");
    let root = root.map_or_else(|| crate::root().join("../shared"), PathBuf::from);
    let found = root.join(path);
    if found.exists() {
        return Some(found);
    }
    skip("data", &format!("no {path} below ORCHESTRATE_TEST_DATA"));
    None
}

/// The package and the name of the current test, after which test runners name the thread.
fn current_test() -> String {
    let thread = std::thread::current();
    let program = std::env::args().next().unwrap_or_default();
    let program = Path::new(&program).file_stem().unwrap_or_default().to_string_lossy();
    let name = thread.name().filter(|name| *name != "main").unwrap_or(&program);
    match std::env::var("CARGO_PKG_NAME") {
        Ok(package) => format!("{package} {name}"),
        Err(_) => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Runs the ignored test `skips_for_a_made_up_need` with the given environment.
    fn run(environment: &[(&str, &str)]) -> std::process::Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "skip::tests::skips_a_made_up_need"]);
        command.env_remove("ORCHESTRATE_REQUIRE").env_remove("ORCHESTRATE_SKIPS");
        command.envs(environment.iter().copied()).output().unwrap()
    }

    #[test]
    #[ignore = "run by the tests below"]
    fn skips_a_made_up_need() {
        skip("unobtainium", "there is none");
        assert!(data("no-such-folder").is_none());
    }

    #[test]
    fn a_skip_is_printed_and_counted_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("skips");
        let output = run(&[("ORCHESTRATE_SKIPS", file.to_str().unwrap())]);
        assert!(output.status.success(), "{output:?}");
        let test = "orchestrate-e2e skip::tests::skips_a_made_up_need";
        let line = format!("{test}: needs unobtainium (there is none)\n");
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(printed.contains(&format!("skipped: {line}")), "{printed}");
        let listed = std::fs::read_to_string(file).unwrap();
        assert!(listed.starts_with(&line), "{listed}");
        assert!(listed.contains(&format!("{test}: needs data (")), "{listed}");
    }

    #[test]
    fn a_required_need_fails_the_test_and_only_its_own_name_counts() {
        for required in ["unobtainium", "docker, unobtainium", "data"] {
            let output = run(&[("ORCHESTRATE_REQUIRE", required)]);
            assert!(!output.status.success(), "{required}");
        }
        let output = run(&[("ORCHESTRATE_REQUIRE", "unobtainiums,dat")]);
        assert!(output.status.success(), "{output:?}");
    }
}
