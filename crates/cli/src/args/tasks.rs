//! Arguments of `orchestrate tasks`.

use super::ConfigSource;
use camino::Utf8PathBuf;
use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Args)]
pub(crate) struct TasksArgs {
    #[command(subcommand)]
    pub(crate) command: TasksCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TasksCommand {
    /// List tasks of an environment, or of a file of rows.
    List {
        #[command(flatten)]
        selection: TaskSelection,
        /// Rows of R2E-Gym or SWE-bench: JSON lines, JSON or parquet, also .gz; or `hf://datasets/OWNER/NAME`.
        #[arg(long, value_name = "FILE")]
        file: Option<Utf8PathBuf>,
    },
    /// Show one task: issue, files, hidden tests, gold patch.
    Show {
        /// Task id, as `tasks list` prints it.
        id: String,
        #[command(flatten)]
        selection: TaskSelection,
        /// Rows of R2E-Gym or SWE-bench: JSON lines, JSON or parquet, also .gz; or `hf://datasets/OWNER/NAME`.
        #[arg(long, value_name = "FILE")]
        file: Option<Utf8PathBuf>,
    },
    /// Read task rows of R2E-Gym or SWE-bench and report which can be used.
    Import {
        /// JSON lines, JSON or parquet, also .gz; or `hf://datasets/OWNER/NAME[@REVISION][/PATH]`.
        file: Utf8PathBuf,
        /// Print JSON on standard output.
        #[arg(long)]
        json: bool,
    },
    /// Make repair tasks from a Python repository: small faults that some of its tests see.
    Make(MakeArgs),
    /// Check in real sandboxes, twice, that the gold patch scores 1 and no patch scores 0. Instead of
    /// an environment a file of rows may be named.
    Verify {
        #[command(flatten)]
        selection: TaskSelection,
        /// Only these tasks.
        #[arg(long, value_name = "ID", value_delimiter = ',', num_args = 1..)]
        ids: Vec<String>,
        /// How many tasks to check, drawn by the seed; 0 = all.
        #[arg(long, default_value_t = 200)]
        sample: usize,
        /// Check all of them.
        #[arg(long, conflicts_with = "sample")]
        all: bool,
        /// Keep patch, test log and verdict of every check below this folder, as `grade` does: what
        /// went on in a task that is not sound.
        #[arg(long, value_name = "DIR")]
        out: Option<Utf8PathBuf>,
    },
}

/// Which tasks.
#[derive(Debug, Clone, Args)]
pub(crate) struct TaskSelection {
    /// Environment.
    #[arg(default_value = "micro")]
    pub(crate) environment: String,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Part of the environment.
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
    /// Unseen identifiers.
    HeldOut,
    /// Unseen bug families.
    HeldOutFamilies,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate tasks make toolz-1.0.0 --count 50 --held-out 0.2 --out toolz.jsonl
  orchestrate tasks make ../lib --image my/lib:latest --tests tests/unit --out lib.jsonl
  orchestrate run --set tasks.file=toolz.jsonl --set tasks.held_out_file=toolz.held_out.jsonl ...

The repository runs in sandboxes only, which have no network: whatever its tests import must be in the
image, pytest included. A command that was interrupted goes on where it was when it is repeated.")]
pub(crate) struct MakeArgs {
    /// Folder of a Python repository with tests that pytest runs.
    pub(crate) repo: Utf8PathBuf,
    /// File of rows to write, as `tasks.file` takes it; held-out ones get `.held_out` in the name.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Utf8PathBuf,
    /// Image in which the tests run; must have Python, pytest and what the tests import.
    #[arg(long, default_value = "orchestrate/repository:latest")]
    pub(crate) image: String,
    /// Tasks to make, held-out ones included.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// Seed of the order in which faults are tried.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Share of the repository's functions whose tasks are held out, from 0 to below 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) held_out: f64,
    /// Sandboxes at once [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) jobs: Option<u16>,
    /// File or folder of tests, from the repository's root; may be repeated [default: what pytest finds].
    #[arg(long, value_name = "PATH")]
    pub(crate) tests: Vec<String>,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}
