//! Arguments of `orchestrate tasks`.

use super::ConfigSource;
use camino::Utf8PathBuf;
use clap::{Args, Subcommand, ValueEnum};
use orchestrate_tasks::swe::Harness;

#[derive(Debug, Args)]
pub(crate) struct TasksArgs {
    #[command(subcommand)]
    pub(crate) command: TasksCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TasksCommand {
    /// List the tasks of an environment, or of a task file (`--file`).
    #[command(after_help = "\
Examples:
  orchestrate tasks list micro --split held-out
  orchestrate tasks list --file toolz.jsonl")]
    List {
        #[command(flatten)]
        selection: TaskSelection,
        /// File of rows (R2E-Gym, SWE-bench, SWE-Gym, SWE-rebench, SWE-smith): JSON lines, JSON or
        /// parquet, also .gz; or `hf://datasets/OWNER/NAME`.
        #[arg(long, value_name = "FILE")]
        file: Option<Utf8PathBuf>,
    },
    /// Show one task: issue, files, hidden tests, gold patch.
    #[command(after_help = "\
Examples:
  orchestrate tasks show micro__train_000007
  orchestrate tasks show django__django-11099 --file verified.parquet --eval-script")]
    Show {
        /// Task id, as `tasks list` prints it.
        id: String,
        #[command(flatten)]
        selection: TaskSelection,
        /// File of rows (R2E-Gym, SWE-bench, SWE-Gym, SWE-rebench, SWE-smith): JSON lines, JSON or
        /// parquet, also .gz; or `hf://datasets/OWNER/NAME`.
        #[arg(long, value_name = "FILE")]
        file: Option<Utf8PathBuf>,
        /// Print only the script that a grading container runs, for a row of SWE-bench's family in
        /// --file.
        #[arg(long, requires = "file", conflicts_with = "json")]
        eval_script: bool,
        /// Version of SWE-bench's harness that the script is for [default: `reward.harness`].
        #[arg(long, requires = "eval_script", value_parser = super::harness_parser())]
        harness: Option<Harness>,
    },
    /// Read task rows (R2E-Gym, SWE-bench, SWE-Gym, SWE-rebench, SWE-smith) and report which can be
    /// used, or convert Harbor task folders to rows.
    #[command(after_help = "\
Examples:
  orchestrate tasks import hf://datasets/SWE-bench/SWE-bench_Verified
  orchestrate tasks import r2e-rows.jsonl --json
  orchestrate tasks import harbor terminal-bench-2 --out terminal-bench-2.jsonl")]
    Import(ImportArgs),
    /// Write tasks in another program's format.
    Export(ExportArgs),
    /// Make repair tasks from a Python repository: small faults that some of its tests detect.
    Make(MakeArgs),
    /// Check in sandboxes, twice, that the gold patch is rewarded 1 and no patch 0. Takes an
    /// environment or a task file.
    #[command(after_help = "\
Examples:
  orchestrate tasks verify micro --sample 20
  orchestrate tasks verify toolz.jsonl --all --out checked")]
    Verify {
        #[command(flatten)]
        selection: TaskSelection,
        /// Only these tasks.
        #[arg(long, value_name = "ID", value_delimiter = ',', num_args = 1..)]
        ids: Vec<String>,
        /// Number of tasks to check, drawn by the seed; 0 = all.
        #[arg(long, default_value_t = 200)]
        sample: usize,
        /// Check all tasks.
        #[arg(long, conflicts_with = "sample")]
        all: bool,
        /// Keep the patch, test log and verdict of every check below this folder, as `grade` does, to
        /// see why a task is not sound.
        #[arg(long, value_name = "DIR")]
        out: Option<Utf8PathBuf>,
    },
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    pub(crate) from: Option<ImportFrom>,
    /// JSON lines, JSON or parquet, also .gz; or `hf://datasets/OWNER/NAME[@REVISION][/PATH]`.
    #[arg(required = true)]
    pub(crate) file: Option<Utf8PathBuf>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImportFrom {
    /// Convert Harbor task folders to task rows, and build or inspect their images.
    Harbor(HarborImportArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate tasks import harbor terminal-bench-2 --out terminal-bench-2.jsonl
  orchestrate tasks import harbor tasks/hello-world --out hello.jsonl --build-network")]
pub(crate) struct HarborImportArgs {
    /// A task folder (with a `task.toml`), or a folder of task folders.
    pub(crate) folder: Utf8PathBuf,
    /// Task file to write, for `tasks.file`.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Utf8PathBuf,
    /// Let the steps of a Dockerfile use the network. Without it, an image whose build needs the
    /// network is refused.
    #[arg(long)]
    pub(crate) build_network: bool,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    #[command(subcommand)]
    pub(crate) to: ExportTo,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ExportTo {
    /// Write micro or repair tasks as Harbor task folders.
    Harbor(HarborExportArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate tasks export harbor micro --sample 20 --out harbor-micro
  orchestrate tasks export harbor sqlparse.jsonl --out harbor-sqlparse
  harbor run --path harbor-micro --agent oracle")]
pub(crate) struct HarborExportArgs {
    #[command(flatten)]
    pub(crate) selection: TaskSelection,
    /// Output folder; each task becomes a folder in it.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Utf8PathBuf,
    /// Number of tasks, drawn by the seed; 0 = all.
    #[arg(long, default_value_t = 0)]
    pub(crate) sample: usize,
}

/// Selects tasks.
#[derive(Debug, Clone, Args)]
pub(crate) struct TaskSelection {
    /// Environment; `verify` and `export` also take a task file.
    #[arg(default_value = "micro")]
    pub(crate) environment: String,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Only this part of the environment.
    #[arg(long, value_enum)]
    pub(crate) split: Option<SplitArg>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SplitArg {
    /// Training tasks.
    Train,
    /// Held-out tasks: unseen identifiers.
    HeldOut,
    /// Held-out tasks: unseen families of bugs.
    HeldOutFamilies,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate tasks make toolz-1.0.0 --count 50 --held-out 0.2 --out toolz.jsonl
  orchestrate tasks make ../lib --image my/lib:latest --tests tests/unit --out lib.jsonl
  orchestrate run --set tasks.file=toolz.jsonl --set tasks.held_out_file=toolz.held_out.jsonl ...

The repository's code runs only in sandboxes, which have no network: everything its tests import,
including pytest, must be in the image. Repeating an interrupted command resumes it.")]
pub(crate) struct MakeArgs {
    /// Folder of a Python repository with tests that pytest runs.
    pub(crate) repo: Utf8PathBuf,
    /// Task file to write, for `tasks.file`; held-out tasks go to a second file with `.held_out` in
    /// its name.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Utf8PathBuf,
    /// Image in which the tests run; it must have Python, pytest and everything the tests import.
    #[arg(long, default_value = "orchestrate/repository:latest")]
    pub(crate) image: String,
    /// Number of tasks to make, including held-out ones.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// Seed of the order in which faults are tried.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Share of the repository's functions whose tasks are held out (at least 0, below 1).
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) held_out: f64,
    /// Number of concurrent sandboxes [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) jobs: Option<u16>,
    /// File or folder of tests, relative to the repository; may be repeated [default: what pytest
    /// finds].
    #[arg(long, value_name = "PATH")]
    pub(crate) tests: Vec<String>,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}
