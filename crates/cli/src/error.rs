//! Errors of commands, apart from those of settings ([`crate::config::ConfigError`]). The rule for exit
//! codes: an argument that names something that does not exist is [`UsageError`] (2), a file given
//! as input that cannot be used is [`InputError`] (3), a file that cannot be written is
//! [`OutputError`] (6).

use crate::output::counted;
use camino::Utf8PathBuf;
use orchestrate_tasks::swe::LogError;
use std::io;
use std::net::SocketAddr;

/// An argument that is well-formed, but names something that does not exist or is already in use.
/// Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The environment names an instruction set that does not exist.
    #[error(transparent)]
    Cpu(#[from] orchestrate_cpu::UnknownLimit),
    /// No such task in the environment.
    #[error("no task `{id}` among {} (orchestrate tasks list)", counted(*known, "task"))]
    UnknownTask {
        /// As given.
        id: String,
        /// Number of tasks.
        known: usize,
    },
    /// No such row in a file.
    #[error(
        "no task `{id}` among the {usable} usable rows of {file}; {refused} more are refused \
         (orchestrate tasks list --file {file})"
    )]
    UnknownRow {
        /// As given.
        id: String,
        /// The task file.
        file: Utf8PathBuf,
        /// Number of usable rows.
        usable: usize,
        /// Number of refused rows.
        refused: usize,
    },
    /// Not the id of an episode or an attempt, or not one of this run.
    #[error(
        "`{id}` is not an episode or attempt of {run_dir} (ids look like t000012.03 and \
         t000012.03-a01; `orchestrate show {run_dir}` lists the newest)"
    )]
    UnknownEpisode {
        /// As given.
        id: String,
        /// The run folder.
        run_dir: Utf8PathBuf,
    },
    /// An evaluation script was requested for a row of another family.
    #[error("task `{id}` has no evaluation script: only rows of SWE-bench's family have one")]
    NoEvalScript {
        /// As given.
        id: String,
    },
    /// Grading a log was requested for a plain row.
    #[error("task `{id}` has no tests: an external worker returns its reward")]
    GradedExternally {
        /// As given.
        id: String,
    },
    /// The gateway cannot bind its address.
    #[error("the gateway cannot listen on {address}; choose another gateway.listen")]
    ListenForWorkers {
        /// As set.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// `tasks import` without a file.
    #[error("name a file of rows, or `harbor FOLDER --out FILE`")]
    NothingToImport,
    /// Grading a log was requested for a Harbor task.
    #[error("task `{id}` cannot be graded by a log: a Harbor task is graded by its reward file")]
    NotByLog {
        /// As given.
        id: String,
    },
    /// An option and a setting name different versions of SWE-bench's harness.
    #[error("--harness {option} and reward.harness = \"{setting}\" differ; remove one of them")]
    TwoHarnesses {
        /// Version of the option.
        option: &'static str,
        /// Version of the setting.
        setting: &'static str,
    },
    /// An option of SWE-bench's harness was given for a row of R2E-Gym.
    #[error("{option} does not apply to rows of R2E-Gym, such as `{id}`")]
    NotForR2e {
        /// The option.
        option: &'static str,
        /// Id of the row.
        id: String,
    },
    /// Predictions of several models are for the instance whose log is graded.
    #[error(
        "{predictions} has predictions of several models for `{id}`: {models}; keep only the one whose \
         log is graded"
    )]
    SeveralModels {
        /// The predictions.
        predictions: Utf8PathBuf,
        /// Id of the instance.
        id: String,
        /// Names of the models, separated by commas.
        models: String,
    },
    /// The output would be a file of a task folder that is read.
    #[error(
        "{path} is inside {folder}, a task folder that this command reads; choose an --out elsewhere"
    )]
    OutputInTask {
        /// The output.
        path: Utf8PathBuf,
        /// The task folder.
        folder: Utf8PathBuf,
    },
    /// None of the predictions is for a task of the file.
    #[error("no prediction in {predictions} is for a usable row of {tasks}")]
    NoPrediction {
        /// The predictions.
        predictions: Utf8PathBuf,
        /// The task file.
        tasks: Utf8PathBuf,
    },
    /// A pattern that matches no case.
    #[error("no case matches `{pattern}`; cases: {known}")]
    NoCase {
        /// As given.
        pattern: String,
        /// Names of all cases, separated by commas.
        known: String,
    },
    /// The same run was given twice.
    #[error("{path}: seed {seed} of {name} was given twice")]
    RepeatedRun {
        /// The second folder or file.
        path: Utf8PathBuf,
        /// Seed of the run.
        seed: u64,
        /// Its configuration.
        name: String,
    },
    /// Not a share of held-out tasks.
    #[error("--held-out {share} is not a share; it must be at least 0 and below 1")]
    HeldOutShare {
        /// As given.
        share: f64,
    },
    /// No tests at this path of a repository.
    #[error("--tests {path}: no such file or folder in {repo}")]
    NoTestFile {
        /// As given.
        path: String,
        /// Folder of the repository.
        repo: Utf8PathBuf,
    },
    /// The output would replace a file of the run.
    #[error("{path} is inside the run folder and not a page; choose an --out that ends in .html")]
    RunFile {
        /// The output.
        path: Utf8PathBuf,
    },
    /// A resumed run was given a config file.
    #[error(
        "a resumed run keeps the plan in {plan}; remove --config (--set changes addresses, limits and \
         run.steps)"
    )]
    ConfigOfResumedRun {
        /// The recorded plan.
        plan: Utf8PathBuf,
    },
    /// A setting that cannot change in a run that has started.
    #[error(
        "{key} is fixed once a run has started; addresses, concurrency, time limits, run.steps, names and \
         diagnostics may change (docs/src/operations.md lists them); for anything else start a new run"
    )]
    Fixed {
        /// The setting.
        key: String,
    },
    /// The output is one of the inputs.
    #[error("{path} is an input of this command and would be overwritten; choose another file")]
    OutputIsInput {
        /// The file.
        path: Utf8PathBuf,
    },
    /// Not a path.
    #[error("`{path}` is not a path of a file or folder in UTF-8")]
    NotAPath {
        /// As given.
        path: String,
    },
    /// The output exists, and is not overwritten.
    #[error("{path} already exists; remove it, or choose another --out")]
    OutputExists {
        /// The file or folder.
        path: Utf8PathBuf,
    },
    /// Other hosts reach the address, and would be answered without a secret.
    #[error(
        "{address} is reachable from other hosts, and anybody there could load weights and use the \
         server; require a secret (--token-env) or client certificates (--tls-client-ca), or insist \
         with --insecure"
    )]
    OpenAddress {
        /// As given.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}; choose another --listen")]
    Listen {
        /// As given.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
}

/// A file given as input that is missing, unreadable, or not what it should be. Exit code 3.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// Reading failed.
    #[error("cannot read {file}")]
    Unreadable {
        /// The file.
        file: Utf8PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A task file without a usable row.
    #[error("{file} has no usable row: {refused} refused{}", listed(*skipped))]
    NoUsableRow {
        /// The task file.
        file: Utf8PathBuf,
        /// Rows that cannot be used.
        refused: usize,
        /// Ids in `tasks.skip`.
        skipped: usize,
    },
    /// A repository of which no tasks can be made.
    #[error("{repo}: {why}")]
    Repository {
        /// Its folder.
        repo: Utf8PathBuf,
        /// What is missing, and the remedy.
        why: String,
    },
    /// The journal of an interrupted `tasks make`.
    #[error("cannot continue from {file}: {why}")]
    Journal {
        /// The journal.
        file: Utf8PathBuf,
        /// The problem, and the remedy.
        why: String,
    },
    /// Tasks that must not be trained on.
    #[error(
        "{unsound} of {checked} tasks are unsound, {flaky} flaky, {broken} could not be checked; list \
         the ids in tasks.skip"
    )]
    UnsoundTasks {
        /// All tasks.
        checked: usize,
        /// Tasks whose gold patch is not rewarded 1, or no patch not 0.
        unsound: usize,
        /// Tasks with another verdict the second time.
        flaky: usize,
        /// Tasks without a verdict because their sandboxes failed.
        broken: usize,
    },
    /// A test log that the harness would not grade either.
    #[error("cannot grade {log}")]
    Log {
        /// The log.
        log: Utf8PathBuf,
        /// Why.
        source: LogError,
    },
    /// A compressed test log.
    #[error("{log} is compressed with gzip; decompress it first (gunzip)")]
    CompressedLog {
        /// The log.
        log: Utf8PathBuf,
    },
    /// Not a test log: a device or a pipe, or too large.
    #[error("{log} is not a regular file of at most {limit} bytes, which a test log must be")]
    NotALog {
        /// The log.
        log: Utf8PathBuf,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// Not the file of a comparison.
    #[error("{file} is not a runs.jsonl.zst of orchestrate compare")]
    NotRuns {
        /// The file.
        file: Utf8PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn listed(skipped: usize) -> String {
    if skipped == 0 { String::new() } else { format!(", {skipped} listed in tasks.skip") }
}

/// A signal ended the command while it waited for servers. Exit code 130.
#[derive(Debug, thiserror::Error)]
#[error("stopped while the run was starting; nothing was sampled")]
pub(crate) struct StoppedAtStart;

/// A file that cannot be written. Exit code 6.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {file}")]
pub(crate) struct OutputError {
    /// The file.
    pub(crate) file: Utf8PathBuf,
    /// The system's reason.
    pub(crate) source: io::Error,
}

impl OutputError {
    /// Data did not reach standard output.
    pub(crate) fn stdout(error: &io::Error) -> Self {
        let source =
            error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
        Self { file: "standard output".into(), source }
    }
}

/// Too much of a measurement is broken by the infrastructure to be one. Exit code 5.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BrokenMeasurement {
    /// Of an evaluation.
    #[error(
        "{broken} of {} broke, so the rest does not measure the policy; \
         `orchestrate show {folder}` lists the reasons, --allow-broken reports the rest anyway",
        counted(*episodes, "episode")
    )]
    Evaluation {
        /// Broken episodes.
        broken: usize,
        /// All episodes.
        episodes: usize,
        /// The run folder.
        folder: Utf8PathBuf,
    },
    /// Of a check of tasks.
    #[error(
        "{broken} of {checked} tasks could not be checked because their sandboxes failed; repeat the \
         command with --ids to check only those"
    )]
    Verification {
        /// Tasks without a verdict.
        broken: usize,
        /// All tasks.
        checked: usize,
    },
    /// Of a grading.
    #[error(
        "{} could not be graded because their sandboxes failed; the same command again grades only \
         those",
        if *broken == 1 { "1 patch".to_owned() } else { format!("{broken} patches") }
    )]
    Grading {
        /// Patches without a verdict.
        broken: usize,
    },
}
