//! Helpers of the end-to-end tests: the built program, run folders, containers.

pub mod certificates;
mod daemon;
mod images;
mod namespaces;
pub mod skip;

pub use daemon::{Daemon, SMALL_DISK_FILES, containers, docker, pause};
pub use images::recipe_image;

use rustix::time::ClockId;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// Processor time that this thread has used. Unlike the clock, the machine's other work does not move
/// it.
///
/// # Errors
/// Fails if the system returns an impossible time.
pub fn thread_cpu_time() -> anyhow::Result<Duration> {
    cpu_time(ClockId::ThreadCPUTime)
}

/// Processor time that all threads of this process have used.
///
/// # Errors
/// Fails if the system returns an impossible time.
pub fn process_cpu_time() -> anyhow::Result<Duration> {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> anyhow::Result<Duration> {
    let time = rustix::time::clock_gettime(clock);
    Ok(Duration::new(time.tv_sec.try_into()?, time.tv_nsec.try_into()?))
}

/// Absolute path of the repository's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The built `orchestrate`, in the folder of this test's own executable.
///
/// # Errors
/// Fails if it was not built.
pub fn program() -> anyhow::Result<PathBuf> {
    built_program("orchestrate")
}

/// A built program of the workspace by its name, in the folder of this test's own executable.
///
/// # Errors
/// Fails if it was not built.
pub fn built_program(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.ancestors().nth(2).unwrap_or(Path::new("."));
    let program = folder.join(name);
    anyhow::ensure!(
        program.exists(),
        "{} is missing; hint: cargo build --workspace",
        program.display()
    );
    Ok(program)
}

/// A command line of the built program, run from the project's root.
///
/// # Errors
/// Fails if the program was not built.
pub fn orchestrate(args: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(program()?);
    command.args(args).current_dir(root());
    Ok(command)
}

/// Runs the program to its end.
///
/// # Errors
/// Fails if it was not built or cannot be started.
pub fn run(args: &[&str]) -> anyhow::Result<Output> {
    Ok(orchestrate(args)?.output()?)
}

/// Standard error of a process as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Whether tests that need Docker can run; reported as a skip where no daemon answers.
///
/// # Errors
/// Fails if `ORCHESTRATE_REQUIRE` lists `docker` and no daemon answers.
pub fn docker_or_skip(test: &str) -> anyhow::Result<bool> {
    let answers = Command::new("docker").arg("info").output().is_ok_and(|o| o.status.success());
    if !answers {
        let why = "no Docker daemon answers";
        anyhow::ensure!(
            !skip::is_required("docker"),
            "{why}, and ORCHESTRATE_REQUIRE lists docker"
        );
        skip::skip_test(test, "docker", why);
    }
    Ok(answers)
}

/// Prints a line to standard error, where test runners show it.
#[expect(clippy::print_stderr, reason = "a skip must be visible in the test's output")]
pub fn say(line: &str) {
    eprintln!("{line}");
}

/// Names of containers that belong to the run in `run_dir`.
///
/// # Errors
/// Fails if Docker cannot be queried.
pub fn containers_of(run_id: &str) -> anyhow::Result<Vec<String>> {
    containers(None, Some(&format!("orchestrate.run={run_id}")))
}

/// All lines of a run's `metrics.jsonl`.
///
/// # Errors
/// Fails if the file is missing or a line is not JSON.
pub fn metrics(run_dir: &Path) -> anyhow::Result<Vec<serde_json::Value>> {
    let text = std::fs::read_to_string(run_dir.join("metrics.jsonl"))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
