//! The command line. No setting of a run is a flag: settings live in config files and `--set`.

mod bench;
mod tasks;

pub(crate) use bench::{
    BenchArgs, BenchCommand, BenchRolloutArgs, BenchRoutingArgs, BenchSandboxArgs,
    SyntheticEngineArgs,
};

pub(crate) use tasks::{MakeArgs, SplitArg, TaskSelection, TasksArgs, TasksCommand};

use camino::Utf8PathBuf;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

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
  0 done   1 bug   2 usage   3 config   4 engine   5 sandbox   6 store   7 trainer   130 stopped")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Say more on standard error (-v: debug, -vv: trace).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log filter, like `orchestrate_sandbox=debug,info` (overrides -v).
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log_filter: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train: rollouts, updates, weight sync and evaluation, until `run.steps` are done.
    Run(RunArgs),
    /// Measure Pass@1 (and pass@k) of a checkpoint on held-out tasks.
    Eval(EvalArgs),
    /// Judge patches in real sandboxes, or a recorded test log without Docker.
    Grade(GradeArgs),
    /// List, show, import, make or verify tasks.
    Tasks(TasksArgs),
    /// Check config files, show the merged plan, or print the JSON schema.
    Config(ConfigArgs),
    /// Check that this machine can run: Docker, image, policy, engine.
    Doctor(DoctorArgs),
    /// Show a run, or one episode turn by turn.
    Show(ShowArgs),
    /// How training went: report.html with every chart, and whether it collapsed.
    Analyze(AnalyzeArgs),
    /// Run settings against each other over several seeds, and report; or report on given runs.
    Compare(CompareArgs),
    /// Remove containers that runs left behind.
    Gc(GcArgs),
    /// Train the starting policy on scripted expert episodes.
    WarmStart(WarmStartArgs),
    /// Serve a checkpoint by SGLang's HTTP interface, on the CPU.
    ServeEngine(ServeEngineArgs),
    /// Serve the trainer protocol, on the CPU.
    ServeTrainer(ServeTrainerArgs),
    /// Measure this machine: how close the program is to what the hardware needs.
    Bench(BenchArgs),
    /// Serve an engine that computes nothing, for `bench rollout`, until standard input closes.
    #[command(hide = true)]
    SyntheticEngine(SyntheticEngineArgs),
    /// Wait until standard input closes, then remove what a killed coordinator left unstarted.
    #[command(hide = true)]
    RemoveUnstarted(RemoveUnstartedArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
}

/// Where settings come from.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConfigSource {
    /// Config file (TOML); may be given more than once, later files win.
    #[arg(long = "config", value_name = "FILE")]
    pub(crate) files: Vec<Utf8PathBuf>,
    /// One setting, like `rollout.group_size=8`; wins over files.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) sets: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate run --config configs/quickstart.toml --run-dir runs/first
  orchestrate run --config configs/micro-learn.toml --set run.seed=2 --run-dir runs/seed2
  orchestrate run --run-dir runs/first --resume      # after a crash, a kill or Ctrl-C
  orchestrate run --config configs/r3-qwen3-30b-a3b-r2e.toml --dry-run

One Ctrl-C ends episodes at their next turn and leaves the run resumable; a second one ends at once.")]
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
    /// Go on with the run in this folder (its stored plan is used).
    #[arg(long, requires = "run_dir")]
    pub(crate) resume: bool,
    /// Only say what the run would need: episodes, tokens, bytes, images, containers.
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
  orchestrate eval --config configs/micro-learn.toml --checkpoint runs/first/checkpoints/v000040 \\
      --run-dir runs/eval-40 --set run.eval_tasks=400 --set run.eval_samples=4
  orchestrate eval --run-dir runs/eval-40 --resume
  API_KEY=... orchestrate eval --config configs/eval-chat-verified.toml --run-dir runs/baseline \\
      --set engine.url=https://chat.example/v1 --set engine.served_model=coder   # any chat server")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Checkpoint to measure (Hugging Face layout); default: the config's `engine.model`. Not for
    /// a chat server, which has weights of its own.
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoint: Option<Utf8PathBuf>,
    /// Folder for the journal and predictions.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Utf8PathBuf,
    /// Go on with the evaluation in this folder: what is scored is not run again.
    #[arg(long, conflicts_with = "checkpoint")]
    pub(crate) resume: bool,
    /// Give a headline number even if more than 1 % of the episodes are broken.
    #[arg(long)]
    pub(crate) allow_broken: bool,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
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

Without --log every patch of --predictions is graded in a fresh sandbox of its task's image. Below
--out lie then logs/run_evaluation/RUN/MODEL/INSTANCE and MODEL.RUN.json, as SWE-bench's own
harness leaves them; what has a report there is not graded again.")]
pub(crate) struct GradeArgs {
    /// What the tests printed, standard output and error together.
    #[arg(
        long,
        value_name = "FILE",
        requires = "instance",
        required_unless_present = "predictions"
    )]
    pub(crate) log: Option<Utf8PathBuf>,
    /// Id of the task; without --log only its patch is graded.
    #[arg(long, value_name = "ID")]
    pub(crate) instance: Option<String>,
    /// Task rows: JSON lines, JSON or parquet, also .gz.
    #[arg(long, value_name = "FILE")]
    pub(crate) tasks: Utf8PathBuf,
    /// SWE-bench: the version of the official harness whose rules hold.
    #[arg(long, value_enum, default_value = "4.1.0")]
    pub(crate) harness: HarnessArg,
    /// Predictions (JSON lines, or JSON); an instance whose patch is null is not graded.
    #[arg(long, value_name = "FILE")]
    pub(crate) predictions: Option<Utf8PathBuf>,
    /// SWE-bench, with --log: also write the harness' report.json here.
    #[arg(long, value_name = "FILE", requires = "log")]
    pub(crate) report: Option<Utf8PathBuf>,
    /// Without --log: name of this grading.
    #[arg(long, value_name = "NAME", default_value = "orchestrate", conflicts_with = "log")]
    pub(crate) run_id: String,
    /// Without --log: folder for logs and reports.
    #[arg(long, value_name = "DIR", default_value = ".", conflicts_with = "log")]
    pub(crate) out: Utf8PathBuf,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

impl From<HarnessArg> for orchestrate_tasks::swe::Harness {
    fn from(version: HarnessArg) -> Self {
        match version {
            HarnessArg::V4_1_0 => Self::V4_1_0,
            HarnessArg::V5_0_2 => Self::V5_0_2,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HarnessArg {
    /// The rules of published numbers up to 2026.
    #[value(name = "4.1.0")]
    V4_1_0,
    /// Skipped tests, forged results and truncated names no longer count as solved.
    #[value(name = "5.0.2")]
    V5_0_2,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Report every problem in the configuration: where it is, the value, and what it must be.
    Check(ConfigSource),
    /// Print the merged configuration with all defaults, and where each value was set (TOML).
    Show(ConfigSource),
    /// Print the JSON schema of config files.
    Schema,
    /// Print the documentation page of all settings (Markdown).
    Docs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Also probe this inference server (SGLang or vLLM): samples a few tokens from it.
    #[arg(long, value_name = "URL")]
    pub(crate) engine: Option<String>,
    /// Also run hostile commands in sandboxes and take their containers away, about a minute of it;
    /// with a glob only the cases whose name fits.
    #[arg(long, value_name = "GLOB", num_args = 0..=1, default_missing_value = "*")]
    pub(crate) battery: Option<String>,
    /// With --battery: write its results here as JSON.
    #[arg(long, value_name = "FILE", requires = "battery")]
    pub(crate) save: Option<Utf8PathBuf>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate show runs/first                 # steps, evaluations, episodes
  orchestrate show runs/first t000003.01      # one episode, turn by turn
  orchestrate show runs/first v00000-00012.00 # an evaluation episode")]
pub(crate) struct ShowArgs {
    /// Run folder.
    pub(crate) run_dir: Utf8PathBuf,
    /// Episode id.
    pub(crate) episode: Option<String>,
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

A run that is still going on may be looked at, too; it writes the same page at its end.")]
pub(crate) struct AnalyzeArgs {
    /// Run folder.
    pub(crate) run_dir: Utf8PathBuf,
    /// Where the page goes; default: report.html in the run folder.
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

Every config times every variant times every seed is a run of its own in DIR/NAME/seed-N, made like
those of `orchestrate run`, one after the other, seed by seed. The same command again goes on where
it was stopped: finished runs stay, an interrupted one is resumed. A run that
`diagnostics.on_collapse = \"stop\"` ended is finished.

After every run, report.html, report.json and report.md in DIR tell what there is so far;
runs.jsonl.zst has what they were made of, for `--runs` on another machine.")]
pub(crate) struct CompareArgs {
    /// Config files (TOML); each is a configuration of its own.
    #[arg(value_name = "CONFIG", required_unless_present = "runs", conflicts_with = "runs")]
    pub(crate) configs: Vec<Utf8PathBuf>,
    /// Settings that make a configuration of each config, like
    /// `gspo:algorithm.policy_loss=gspo,algorithm.mini_steps=4`; a name alone takes the config as
    /// it is.
    #[arg(long = "variant", value_name = "NAME[:KEY=VALUE,...]", conflicts_with = "runs")]
    pub(crate) variants: Vec<crate::commands::compare::Variant>,
    /// Values of `run.seed`.
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        required_unless_present = "runs",
        conflicts_with = "runs"
    )]
    pub(crate) seeds: Vec<u64>,
    /// One setting for all of them, like `run.steps=60`; variants win over it.
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "runs")]
    pub(crate) sets: Vec<String>,
    /// Only report on these run folders, or on the runs.jsonl.zst that comparisons on other machines
    /// wrote; runs that differ in nothing but the seed belong together.
    #[arg(long, value_name = "DIR|FILE", num_args = 1..)]
    pub(crate) runs: Vec<Utf8PathBuf>,
    /// Folder of the runs and of the report.
    #[arg(long, value_name = "DIR", required_unless_present = "runs")]
    pub(crate) out: Option<Utf8PathBuf>,
    /// Check all settings and list the runs there are to make, but make none.
    #[arg(long, conflicts_with_all = ["runs", "json"])]
    pub(crate) dry_run: bool,
    /// Print the report as JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Without --run-dir and settings, the Docker host is that of DOCKER_HOST, else this machine's.")]
pub(crate) struct GcArgs {
    /// Only containers of the run in this folder, on the Docker hosts of its plan.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<Utf8PathBuf>,
    /// Whose Docker hosts are looked at.
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// With --run-dir: also that run's containers whose deadline has not passed.
    #[arg(long, requires = "run_dir")]
    pub(crate) all: bool,
    /// Also the images that runs pulled, of any run, but for those that a container uses.
    #[arg(long)]
    pub(crate) images: bool,
    /// Only say what would be removed.
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
    /// Goes on from this checkpoint, with its tokenizer and without drills.
    #[arg(long, value_name = "DIR")]
    pub(crate) from: Option<Utf8PathBuf>,
    /// Tokens over which the learning rate falls.
    #[arg(long, default_value_t = 3_500_000)]
    pub(crate) tokens: usize,
    /// End after so many tokens, before the schedule does: success rises steeply from here on, and
    /// reinforcement learning is to have something left to find.
    #[arg(long, default_value_t = 2_040_000)]
    pub(crate) stop_after: usize,
    /// Copying drills of 72 tokens before the episodes.
    #[arg(long, default_value_t = 12_000)]
    pub(crate) drills: usize,
    /// Seed of weights, tasks and order.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Peak learning rate of `AdamW`.
    #[arg(long, default_value_t = 1.5e-3)]
    pub(crate) learning_rate: f64,
    /// Scripted expert tasks to draw episodes from.
    #[arg(long, default_value_t = 16_000)]
    pub(crate) tasks: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate serve-engine --model environments/micro/policy --listen 127.0.0.1:30000
  curl -s 127.0.0.1:30000/generate -H 'content-type: application/json' \\
      -d '{\"input_ids\":[1,2,3],\"sampling_params\":{\"max_new_tokens\":4},\"return_routed_experts\":true}'")]
pub(crate) struct ServeEngineArgs {
    /// Checkpoint folder (Hugging Face layout).
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Utf8PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:30000", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// `q8_0` (quantised), `q4_0` (coarse on purpose) or `f32`.
    #[arg(long, default_value = "q8_0")]
    pub(crate) weight_format: String,
    /// Requests decoded together.
    #[arg(long, default_value_t = 32)]
    pub(crate) max_running: usize,
    /// Tokens the prefix cache holds.
    #[arg(long, default_value_t = 65_536)]
    pub(crate) cache_tokens: usize,
    /// Version name of the weights at start.
    #[arg(long, default_value = "0")]
    pub(crate) weight_version: String,
    /// Environment variable with the API key clients must send; none = open.
    #[arg(long, value_name = "VAR")]
    pub(crate) api_key_env: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate serve-trainer --model environments/micro/policy --checkpoints /tmp/ckpt --listen 127.0.0.1:30100")]
pub(crate) struct ServeTrainerArgs {
    /// Starting checkpoint (Hugging Face layout); ignored once `--checkpoints` holds a newer one.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Utf8PathBuf,
    /// Folder for checkpoints: weights, optimizer state and position.
    #[arg(long, value_name = "DIR")]
    pub(crate) checkpoints: Utf8PathBuf,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:30100", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// Newest checkpoints to keep.
    #[arg(long, default_value_t = 3)]
    pub(crate) keep: usize,
    /// Environment variable with the bearer token clients must send; none = open.
    #[arg(long, value_name = "VAR")]
    pub(crate) token_env: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveUnstartedArgs {
    /// The run.
    #[arg(long, value_name = "ID")]
    pub(crate) run: orchestrate_types::RunId,
    /// Its coordinator's epoch.
    #[arg(long, value_name = "N")]
    pub(crate) epoch: i64,
    /// Its Docker hosts, as JSON; default: that of the environment.
    #[arg(long, value_name = "JSON")]
    pub(crate) hosts: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell.
    pub(crate) shell: clap_complete::Shell,
}

/// Writes a completion script to standard output.
pub(crate) fn write_completions(shell: clap_complete::Shell) {
    clap_complete::generate(shell, &mut Cli::command(), "orchestrate", &mut std::io::stdout());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
