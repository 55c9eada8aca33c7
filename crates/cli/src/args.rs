//! The command line. Settings of a run are never flags: they live in config files and `--set`.

mod network;
mod tasks;
mod variant;

pub(crate) use network::NetworkArgs;
pub(crate) use tasks::{
    ExportArgs, ExportTo, HarborExportArgs, HarborImportArgs, ImportArgs, ImportFrom, MakeArgs,
    SplitArg, TaskSelection, TasksArgs, TasksCommand,
};
pub(crate) use variant::Variant;

use crate::output;
use camino::Utf8PathBuf;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, Subcommand};
use orchestrate_settings::is_assignment;
use orchestrate_tasks::swe::Harness;
use orchestrate_types::GradingRun;
use std::num::{NonZeroU16, NonZeroU32};
use std::process::ExitCode;

/// Reinforcement learning of Mixture-of-Experts coding agents with Rollout Routing Replay.
#[derive(Debug, Parser)]
#[command(name = "orchestrate", version, about, propagate_version = true)]
#[command(after_help = "\
Examples:
  orchestrate run --config configs/quickstart.toml --run-dir runs/first
  orchestrate run --run-dir runs/first --resume
  orchestrate show runs/first t000003.01
  orchestrate analyze runs/first
  orchestrate config check --config configs/micro-learn.toml --set rollout.group_size=16

Exit codes:
  0    done
  1    a bug, or an unforeseen failure
  2    usage: a malformed command line, an unknown id, an address in use
  3    config: settings, checkpoint, or an input file that cannot be used
  4    engine
  5    sandbox: Docker, a sandbox, a tool server, or broken episodes
  6    store: run folder or another output file, a full disk
  7    trainer
  130  stopped, can be resumed")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// How much is logged, for every command of both programs.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// Log more on standard error (-v: debug, -vv: trace).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log filter, like `orchestrate_sandbox=debug,info` (overrides -v).
    #[arg(long, global = true, value_name = "FILTER", value_parser = log_filter)]
    pub(crate) log_filter: Option<String>,
}

/// The text of a filter that `tracing_subscriber` accepts.
fn log_filter(text: &str) -> Result<String, tracing_subscriber::filter::ParseError> {
    tracing_subscriber::EnvFilter::try_new(text)?;
    Ok(text.to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train: rollouts, updates, weight sync and evaluation, until `run.steps` are done.
    Run(RunArgs),
    /// Measure Pass@1 (and pass@k) of a checkpoint on held-out tasks.
    Eval(EvalArgs),
    /// Serve episodes of held-out tasks to external workers, and record what they return.
    Gateway(GatewayArgs),
    /// Grade patches in sandboxes, or a recorded test log without Docker.
    Grade(GradeArgs),
    /// List, show, import, make or verify tasks.
    Tasks(TasksArgs),
    /// Check config files, show the merged plan, or print the JSON schema.
    Config(ConfigArgs),
    /// Check that this machine is ready for a run: Docker, image, policy, engine.
    Doctor(DoctorArgs),
    /// List the runs and evaluations below a folder, with their state and result.
    Runs(RunsArgs),
    /// Say what a run is doing and what it waits for.
    Status(StatusArgs),
    /// Show a run, or one episode turn by turn.
    Show(ShowArgs),
    /// Write report.html with all charts of a run, and report whether training collapsed.
    Analyze(AnalyzeArgs),
    /// Run several configurations with several seeds and compare them, or compare existing runs.
    Compare(CompareArgs),
    /// Remove containers that runs left behind.
    Gc(GcArgs),
    /// Train a starting policy on scripted expert episodes.
    WarmStart(WarmStartArgs),
    /// Serve a checkpoint on the CPU, with SGLang's HTTP interface.
    ServeEngine(ServeEngineArgs),
    /// Serve a trainer on the CPU, with the trainer protocol.
    ServeTrainer(ServeTrainerArgs),
    /// Wait until standard input closes, then remove containers that a killed coordinator created
    /// and never started.
    #[command(hide = true)]
    RemoveUnstarted(RemoveUnstartedArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
}

impl Command {
    /// Whether the command drives a run, whose status others can read.
    pub(crate) fn has_status(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Eval(_) | Self::Gateway(_))
    }
}

/// An assignment of a setting, which is checked further with all others.
fn assignment(text: &str) -> Result<String, &'static str> {
    if is_assignment(text) {
        return Ok(text.to_owned());
    }
    Err("must be KEY=VALUE, like rollout.group_size=8")
}

/// Where settings come from; later sources win.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfigSource {
    /// Config file (TOML); may be repeated, later files win.
    #[arg(long = "config", value_name = "FILE")]
    pub files: Vec<Utf8PathBuf>,
    /// One setting, e.g. `rollout.group_size=8`; wins over files.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = assignment)]
    pub sets: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate run --config configs/quickstart.toml --run-dir runs/first
  orchestrate run --config configs/micro-learn.toml --set run.seed=2 --run-dir runs/seed2
  orchestrate run --run-dir runs/first --resume      # after a crash, a kill or Ctrl-C
  orchestrate run --run-dir runs/first --resume --set run.steps=200
  orchestrate run --config configs/r3-qwen3-30b-a3b-r2e.toml --dry-run

The first Ctrl-C ends episodes at their next turn, the second one ends at once; both leave a run
that can be resumed.")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Folder of the run: plan, journal, metrics, batches, checkpoints, report.
    #[arg(
        long,
        value_name = "DIR",
        overrides_with = "run_dir",
        required_unless_present = "dry_run"
    )]
    pub(crate) run_dir: Option<Utf8PathBuf>,
    /// Resume the run in this folder, by its stored plan. --set may change addresses, concurrency,
    /// time limits, names, diagnostics and run.steps (docs/src/operations.md).
    #[arg(long, requires = "run_dir")]
    pub(crate) resume: bool,
    /// Only print what the run would need: episodes, tokens, bytes, images, containers.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) dry_run: bool,
    /// Print the final summary as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate eval --config configs/quickstart.toml --run-dir runs/eval-start
  orchestrate eval --config configs/micro-learn.toml --checkpoint runs/first/checkpoints/v000044 \\
      --run-dir runs/eval-40 --set run.eval_tasks=400 --set run.eval_samples=4
  orchestrate eval --run-dir runs/eval-40 --resume
  API_KEY=... orchestrate eval --config configs/eval-chat-verified.toml --run-dir runs/baseline \\
      --set engine.url=https://chat.example/v1 --set engine.served_model=coder   # any chat server")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Checkpoint to evaluate (Hugging Face layout) [default: `engine.model`]. Not for a chat
    /// server, which has its own weights.
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<Utf8PathBuf>,
    /// Folder of the evaluation: plan, journal, predictions, report.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Utf8PathBuf,
    /// Resume the evaluation in this folder; scored episodes are not run again.
    #[arg(long, conflicts_with = "checkpoint")]
    pub(crate) resume: bool,
    /// Report a result even if more than 1 % of the episodes are broken.
    #[arg(long)]
    pub(crate) allow_broken: bool,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate gateway --tasks rows.jsonl --run-dir runs/external --set engine.model=policies/start
  SECRET=... orchestrate gateway --config eval.toml --run-dir runs/fleet --listen 0.0.0.0:4170 \\
      --set gateway.secret_env=SECRET
  orchestrate gateway --run-dir runs/fleet --resume

The same as `orchestrate eval` with rollout.scaffold = \"external\": nothing is trained, and Docker is
not needed. Rows of --tasks may be of any family; a plain row has `id`, `prompt` and the columns
that its environment reads. Workers use the Python package in clients/python, or the protocol in
docs/src/agents-external.md.")]
pub(crate) struct GatewayArgs {
    #[command(flatten)]
    pub(crate) eval: EvalArgs,
    /// Task rows to serve [default: `tasks.held_out_file`, or the held-out tasks of the
    /// environment].
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) tasks: Option<Utf8PathBuf>,
    /// Address and port to listen on [default: `gateway.listen`].
    #[arg(long, value_name = "ADDRESS", conflicts_with = "resume")]
    pub(crate) listen: Option<std::net::SocketAddr>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate grade --tasks verified.parquet --predictions preds.jsonl --run-id first --out graded
  orchestrate grade --tasks verified.parquet --instance sympy__sympy-13877 --log test_output.txt
  orchestrate grade --tasks verified.jsonl --instance django__django-11099 --log test_output.txt \\
      --harness 5.0.2 --report report.json --json
  orchestrate grade --tasks r2e.jsonl --instance aiohttp__006fbe03fede4eaa1eeba7b8393cbf4d63cb44b6 \\
      --log test.log --set reward.compat=r2e

Without --log, every patch of --predictions is graded in a fresh sandbox of its task's image.
The results are written below --out as SWE-bench's own harness writes them:
logs/run_evaluation/RUN/MODEL/INSTANCE and MODEL.RUN.json. A verdict there is used again if patch,
row, image, rules and limits are the same; otherwise the patch is graded again.")]
pub(crate) struct GradeArgs {
    /// Recorded output of the tests, standard output and error combined.
    #[arg(
        long,
        value_name = "FILE",
        requires = "instance",
        required_unless_present = "predictions"
    )]
    pub(crate) log: Option<Utf8PathBuf>,
    /// Id of the task; without --log, only its patch is graded.
    #[arg(long, value_name = "ID")]
    pub(crate) instance: Option<String>,
    /// Task rows: JSON lines, JSON or parquet, also .gz.
    #[arg(long, value_name = "FILE")]
    pub(crate) tasks: Utf8PathBuf,
    /// SWE-bench: version of the harness whose rules apply [default: `reward.harness`].
    #[arg(long, value_parser = harness_parser())]
    pub(crate) harness: Option<Harness>,
    /// Predictions (JSON lines or JSON); an instance whose patch is null is not graded.
    #[arg(long, value_name = "FILE")]
    pub(crate) predictions: Option<Utf8PathBuf>,
    /// SWE-bench, with --log: also write the harness's report.json to this file.
    #[arg(long, value_name = "FILE", requires = "log")]
    pub(crate) report: Option<Utf8PathBuf>,
    /// Without --log: name of this grading, the RUN of the paths.
    #[arg(long, value_name = "NAME", default_value = "orchestrate", conflicts_with = "log")]
    pub(crate) run_id: GradingRun,
    /// Without --log: folder for logs and reports.
    #[arg(long, value_name = "DIR", default_value = ".", conflicts_with = "log")]
    pub(crate) out: Utf8PathBuf,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses a version of SWE-bench's harness; `--help` lists them.
pub(in crate::args) fn harness_parser() -> impl TypedValueParser<Value = Harness> {
    let versions = Harness::ALL.map(|h| PossibleValue::new(h.version()).help(h.summary()));
    PossibleValuesParser::new(versions).try_map(|version| version.parse::<Harness>())
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate config check --config configs/micro-learn.toml --set rollout.group_size=16
  orchestrate config show --config configs/quickstart.toml
  orchestrate config schema > orchestrate.schema.json     # for an editor's completion")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Report every problem of the config, with key, value and remedy.
    Check(CheckArgs),
    /// Print the merged configuration with all defaults, and where each value was set (TOML).
    Show(ConfigSource),
    /// Print the JSON schema of config files.
    Schema,
    /// Print the documentation page of all settings (Markdown).
    Docs,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print the problems as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate doctor
  orchestrate doctor --engine http://127.0.0.1:30000
  orchestrate doctor --self-test              # hostile commands in real sandboxes")]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Also probe this inference server (SGLang or vLLM) by sampling a few tokens.
    #[arg(long, value_name = "URL")]
    pub(crate) engine: Option<String>,
    /// Also run the self-test: hostile commands in sandboxes, and containers that disappear. Takes
    /// about a minute. With GLOB, only the cases whose name matches it.
    #[arg(long, alias = "battery", value_name = "GLOB", num_args = 0..=1, default_missing_value = "*")]
    pub(crate) self_test: Option<String>,
    /// With --self-test: write the results to this file as JSON.
    #[arg(long, value_name = "FILE", requires = "self_test")]
    pub(crate) save: Option<Utf8PathBuf>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate runs                  # runs in ./runs
  orchestrate runs /data --tag r3   # runs below /data that have the tag
  orchestrate runs --json

A run is `running` while a process of this machine has its folder open, `finished` when nothing is left to
do, and else `stopped`. The result is the newest Pass@1, or the mean reward of the last step.")]
pub(crate) struct RunsArgs {
    /// Folder that is searched, three levels deep.
    #[arg(default_value = "runs")]
    pub(crate) folder: Utf8PathBuf,
    /// List only runs with this tag (`run.tags`).
    #[arg(long, value_name = "TAG")]
    pub(crate) tag: Option<String>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate status runs/first
  watch -n 2 orchestrate status runs/first
  orchestrate status runs/first --json | jq .status.waits[0]

What a running command does is read from status.json in its folder, which it writes once a second. A stopped or
finished run is described from its journal. Nothing in the folder is changed.")]
pub(crate) struct StatusArgs {
    /// Run folder.
    pub(crate) run_dir: Utf8PathBuf,
    /// Number of waits that are listed.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) waits: usize,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate show runs/first                 # steps, evaluations, episodes
  orchestrate show runs/first --step 3 --last 50
  orchestrate show runs/first t000003.01      # one episode: prompt, turns, patch, verdict
  orchestrate show runs/first t000003.01-a02  # one attempt of it
  orchestrate show runs/first v00000-00012.00 # an evaluation episode")]
pub(crate) struct ShowArgs {
    /// Run folder.
    pub(crate) run_dir: Utf8PathBuf,
    /// Id of an episode, e.g. t000012.03, or of an attempt, e.g. t000012.03-a01.
    pub(crate) episode: Option<String>,
    /// Number of newest attempts that are listed.
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub(crate) last: u32,
    /// List only training attempts of this step.
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u32>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate analyze runs/first                      # writes runs/first/report.html
  orchestrate analyze runs/first --out first.html
  orchestrate analyze runs/first --json | jq .collapse

Works on a live run, too; the run itself writes the same page at its end.")]
pub(crate) struct AnalyzeArgs {
    /// Run folder.
    pub(crate) run_dir: Utf8PathBuf,
    /// File for the page [default: report.html in the run folder].
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<Utf8PathBuf>,
    /// Print the numbers as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate compare a.toml b.toml --seeds 1,2,3 --out compare/a-b
  orchestrate compare configs/compare/mild.toml --seeds 1,2,3 --out compare/mild \\
      --variant 'none:algorithm.routing_replay=none' \\
      --variant 'gspo+r3:algorithm.policy_loss=gspo,algorithm.routing_replay=rollout'
  orchestrate compare --runs runs/first runs/seed2 --out compare/two

Each combination of config, variant and seed is a run in DIR/NAME/seed-N. Runs are executed as by
`orchestrate run`, one after the other, seed by seed. Repeating the command resumes: finished
runs are kept, an interrupted one is resumed. A run that was ended by
`diagnostics.on_collapse = \"stop\"` is finished.

After every run, report.html, report.json and report.md in DIR are updated. DIR/runs.jsonl.zst
holds their data, for `--runs` on another machine.")]
pub(crate) struct CompareArgs {
    /// Config files (TOML); each is a separate configuration.
    #[arg(value_name = "CONFIG", required_unless_present = "runs", conflicts_with = "runs")]
    pub(crate) configs: Vec<Utf8PathBuf>,
    /// A name and settings on top of each config, e.g.
    /// `gspo:algorithm.policy_loss=gspo,algorithm.mini_steps=4`; a name alone is the config
    /// unchanged.
    #[arg(long = "variant", value_name = "NAME[:KEY=VALUE,...]", conflicts_with = "runs")]
    pub(crate) variants: Vec<Variant>,
    /// Values of `run.seed`.
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        required_unless_present = "runs",
        conflicts_with = "runs"
    )]
    pub(crate) seeds: Vec<u64>,
    /// One setting for all runs, e.g. `run.steps=60`; variants win over it.
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "runs")]
    pub(crate) sets: Vec<String>,
    /// Only compare these existing runs: run folders, or runs.jsonl.zst files of comparisons on
    /// other machines. Runs that differ only in their seed are one configuration.
    #[arg(long, value_name = "DIR|FILE", num_args = 1..)]
    pub(crate) runs: Vec<Utf8PathBuf>,
    /// Folder of the runs and of the report.
    #[arg(long, value_name = "DIR", required_unless_present = "runs")]
    pub(crate) out: Option<Utf8PathBuf>,
    /// Check all settings and list the runs, but execute none.
    #[arg(long, conflicts_with_all = ["runs", "json"])]
    pub(crate) dry_run: bool,
    /// Print the report as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Without --run-dir and settings, cleans the Docker host of DOCKER_HOST, else of this machine.")]
pub(crate) struct GcArgs {
    /// Only remove containers of the run in this folder, on the Docker hosts of its plan.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<Utf8PathBuf>,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// With --run-dir: also remove containers whose deadline has not passed.
    #[arg(long, requires = "run_dir")]
    pub(crate) all: bool,
    /// Also remove images that any run pulled, except those in use by a container.
    #[arg(long)]
    pub(crate) images: bool,
    /// Only print what would be removed.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate warm-start --out environments/micro/policy
  orchestrate warm-start --out /tmp/policy --stop-after 1950000 --seed 2
  orchestrate warm-start --from /tmp/policy --out /tmp/longer --stop-after 200000 --seed 3")]
pub(crate) struct WarmStartArgs {
    /// Folder for the checkpoint (Hugging Face layout, bf16).
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Utf8PathBuf,
    /// Continue training from this checkpoint, with its tokenizer and without drills.
    #[arg(long, value_name = "DIR")]
    pub(crate) from: Option<Utf8PathBuf>,
    /// Tokens over which the learning rate decays.
    #[arg(long, default_value_t = 3_500_000)]
    pub(crate) tokens: usize,
    /// Stop after this many tokens, before the end of the schedule. Success rises steeply from here
    /// on, and reinforcement learning must have something left to improve.
    #[arg(long, default_value_t = 2_040_000)]
    pub(crate) stop_after: usize,
    /// Number of copying drills (72 tokens each) before the episodes.
    #[arg(long, default_value_t = 12_000)]
    pub(crate) drills: usize,
    /// Seed of the weights, the tasks and their order.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Peak learning rate (AdamW).
    #[arg(long, default_value_t = 1.5e-3)]
    pub(crate) learning_rate: f64,
    /// Number of tasks with scripted expert episodes.
    #[arg(long, default_value_t = 16_000)]
    pub(crate) tasks: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate serve-engine --model environments/micro/policy --listen 127.0.0.1:30000 \\
      --checkpoint-root runs
  KEY=... orchestrate serve-engine --model policy --listen 0.0.0.0:30000 --api-key-env KEY \\
      --tls-cert cert.pem --tls-key key.pem
  curl -s 127.0.0.1:30000/generate -H 'content-type: application/json' \\
      -d '{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":4},\"return_routed_experts\":true}'")]
pub(crate) struct ServeEngineArgs {
    /// Checkpoint folder (Hugging Face layout).
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Utf8PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:30000", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// Format of the weights: `q8_0` (quantised), `q4_0` (coarse on purpose) or `f32`.
    #[arg(long, default_value = "q8_0")]
    pub(crate) weight_format: String,
    /// Maximum number of requests decoded in one batch.
    #[arg(long, default_value = "32")]
    pub(crate) max_running: NonZeroU16,
    /// Capacity of the prefix cache, in tokens.
    #[arg(long, default_value = "65536")]
    pub(crate) cache_tokens: NonZeroU32,
    /// Version name of the initial weights.
    #[arg(long, default_value = "0")]
    pub(crate) weight_version: String,
    /// Folder that weight updates may load checkpoints from; may be repeated [default: the folder
    /// that contains --model].
    #[arg(long = "checkpoint-root", value_name = "DIR")]
    pub(crate) checkpoint_roots: Vec<Utf8PathBuf>,
    /// Environment variable with the API key that clients must send [default: no key needed].
    #[arg(long, value_name = "VAR", alias = "token-env")]
    pub(crate) api_key_env: Option<String>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate serve-trainer --model environments/micro/policy --checkpoints checkpoints \\
      --batch-root runs
  orchestrate serve-trainer --model policy --checkpoints checkpoints --listen 0.0.0.0:30100 \\
      --tls-cert cert.pem --tls-key key.pem --tls-client-ca ca.pem")]
pub(crate) struct ServeTrainerArgs {
    /// Starting checkpoint (Hugging Face layout); ignored once `--checkpoints` holds a newer one.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Utf8PathBuf,
    /// Folder for checkpoints: weights, optimizer state, and the position in training.
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoints: Utf8PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:30100", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// Number of newest checkpoints to keep.
    #[arg(long, default_value_t = 3)]
    pub(crate) keep: usize,
    /// Folder that batches may lie in; may be repeated [default: the current folder].
    #[arg(long = "batch-root", value_name = "DIR")]
    pub(crate) batch_roots: Vec<Utf8PathBuf>,
    /// Environment variable with the bearer token that clients must send [default: no token needed].
    #[arg(long, value_name = "VAR")]
    pub(crate) token_env: Option<String>,
    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveUnstartedArgs {
    /// Id of the run.
    #[arg(long, value_name = "ID")]
    pub(crate) run: orchestrate_types::RunId,
    /// Epoch of its coordinator.
    #[arg(long, value_name = "N")]
    pub(crate) epoch: i64,
    /// Its Docker hosts, as JSON [default: the Docker host of the environment].
    #[arg(long, value_name = "JSON")]
    pub(crate) hosts: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate completions bash > /etc/bash_completion.d/orchestrate
  orchestrate completions zsh > ~/.zfunc/_orchestrate")]
pub(crate) struct CompletionsArgs {
    /// Shell to generate the script for.
    pub(crate) shell: clap_complete::Shell,
}

/// Writes a completion script to standard output.
pub(crate) fn write_completions(shell: clap_complete::Shell) -> ExitCode {
    output::raw(completion_script(shell).trim_end());
    ExitCode::SUCCESS
}

fn completion_script(shell: clap_complete::Shell) -> String {
    let whole = Cli::command();
    // Completion would offer the commands that help hides.
    let shown = whole.get_subcommands().filter(|command| !command.is_hide_set());
    let mut command = clap::Command::new("orchestrate")
        .args(whole.get_arguments().cloned())
        .subcommands(shown.cloned());
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "orchestrate", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_offer_no_hidden_command() {
        let script = completion_script(clap_complete::Shell::Bash);
        assert!(script.contains("serve-trainer") && !script.contains("remove-unstarted"));
    }

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
