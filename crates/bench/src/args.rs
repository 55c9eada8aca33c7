//! The command line of `orchestrate-bench`.

use camino::Utf8PathBuf;
use clap::{Args, Parser, Subcommand};
use orchestrate_cli::{ConfigSource, LogArgs};

/// Measure this machine: how close orchestrate is to what the hardware needs.
#[derive(Debug, Parser)]
#[command(name = "orchestrate-bench", version, about, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Routing masks: reply bodies to checked rows, the prefix cache, storage, batch files.
    Routing(BenchRoutingArgs),
    /// Rollouts: many conversations on fleets of engines that compute nothing, some of them killed.
    Rollout(BenchRolloutArgs),
    /// Sandboxes: starting, commands, reuse and memory, compared with Docker by itself.
    Sandbox(BenchSandboxArgs),
    /// Serve an engine that computes nothing, for `rollout`, until standard input closes.
    #[command(hide = true)]
    SyntheticEngine(SyntheticEngineArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SyntheticEngineArgs {
    /// File with the engine's plan (JSON, as `rollout` writes it).
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Utf8PathBuf,
    /// Address to listen on; port 0 = any, printed as JSON.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// Processors to run on [default: any].
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) processors: Vec<usize>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate-bench rollout
  orchestrate-bench rollout --case 'workers_4*' --json
  orchestrate-bench rollout --case open_4096

What is measured:
  Episodes as `run` executes them, with the same runner, fleet, client and routing masks.
  Engines are separate processes, reached over HTTP, that only track a prefix cache and sleep;
  sandboxes answer immediately. The coordinator and the engines get half of the processors each,
  because in a run they are on different machines. Every routing row is a function of the tokens
  before it, and every row of every finished episode is compared with its expected value.

  workers_N runs all conversations on N engines at once. In workers_N_kill, the first engine is
  killed after half of the turns (a single engine is restarted a second later). open_4096 keeps
  4,096 conversations open on 4 engines at 500 turns per second, busy_4096 at 1,500: a turn that
  arrives at an idle processor with cold caches costs more. In gateway_4 and gateway_1024, each
  conversation is that of an agent with its own loop, on a thread of the engines' processors,
  which streams chat completions and sends its whole history with every request; in
  gateway_4_whole it does not stream them: compare both with workers_4.

  CPU    CPU time of this process per turn, over the second half of the turns, without the
         threads that only check rows or observe the machine. Finished episodes are passed
         immediately to a thread that checks their rows on the engines' processors.
  KiB/episode  heap per open episode after half of the turns, without its tokens (17 bytes each)
         and rows
  added  time from an engine's sending a reply to its having read the conversation's next request,
         including both ends of HTTP
  text   time from the first token of a streamed reply at an engine to its first text at the agent
  hits   prompt tokens answered by the engines' prefix caches, as a share of those that could be:
         all earlier tokens of the conversation, and a group's prompt for all but the first member
         on an engine, in whole pages
  unmoved  the same, without conversations that were moved to another engine
  lag    how late a timer of the event loop fires
  stall  longest delay of a sleeping thread with real-time priority on one of the coordinator's
         processors: the hypervisor paused the machine
  held   longest lag without such pauses. Without the right to real-time priority (CAP_SYS_NICE),
         pauses are not detected, and held equals lag
  poll   CPU time of the longest poll of an episode

Limits (the column `verdict`, and `ok` in JSON):
  all cases: no episode lost, no row wrong; unless the only engine is killed, 0.99 of the
  possible hits of unmoved conversations
  open_4096, busy_4096: 250 µs CPU per turn
  open_4096: 64 KiB per open episode, 5 ms added (p99), event loop held for 10 ms (max)")]
pub(crate) struct BenchRolloutArgs {
    /// Only cases whose name matches; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    /// Number of conversations of the cases `workers_N`.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) conversations: u32,
    /// Turns of each of these conversations.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) turns: u32,
    /// Number of conversations with a common prompt.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) group_size: u32,
    /// Turns of each conversation of `open_4096`, `busy_4096` and `gateway_1024`.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) open_turns: u32,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate-bench routing
  orchestrate-bench routing --case 'sglang_*' --repeat 9
  orchestrate-bench routing --tokens 4096 --turns 8 --experts 512 --json

What is measured:
  A conversation is one trajectory of equal turns, half observation and half generation, whose
  experts are drawn uniformly and without repetition from --seed. Each turn's reply is a whole
  JSON body, as the engine sends it. seconds is the time from body bytes to checked blocks in
  the mask, with the functions that a run uses, summed over the turns; creating bodies and
  comparing the finished mask are not included. The floor is the least work that this machine
  needs for the case; the field floor describes it. Floor and case alternate on the same bodies.
  Each time is the minimum of --repeat rounds; medians are reported, too.

  kept_bytes is the size of the finished mask (or of what the case keeps): rows x bytes per row,
  each block counted once. peak_extra_bytes is the peak heap usage of the case beyond its start,
  plus the reply body being read, minus kept_bytes. It counts bytes requested from the
  allocator, without the benchmark's own memory.

Limits (the column `verdict`, and `ok` in JSON):
  delta and groups: 1.5 x floor; conversations of up to 32768 tokens also 30 ms
  full: 1.3 x the scan of the bytes
  batch_write: floor / 0.7
  peak_extra_bytes of conversations, groups and load: one body + 5 % of kept_bytes")]
pub(crate) struct BenchRoutingArgs {
    /// Only cases whose name matches; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    /// Number of tokens of the conversation.
    #[arg(long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) tokens: u32,
    /// Number of turns of the conversation.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) turns: u32,
    /// Number of `MoE` layers; every hidden layer is one.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) layers: u32,
    /// Number of experts per layer.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub(crate) experts: u32,
    /// Number of experts per token and layer.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) top_k: u32,
    /// Number of rounds per case.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Seed of the experts.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Folder for temporary files [default: /dev/shm if it exists, so that the disk is not measured,
    /// else the system's temporary folder].
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<Utf8PathBuf>,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  orchestrate-bench sandbox
  orchestrate-bench sandbox --case 'command*' --json
  orchestrate-bench sandbox --case 'held_*' --held 200

What is measured:
  Containers of the tasks' image, opened as `run` opens them. All times are measured by this
  process.

  start          from the request to a sandbox whose supervisor answers, without reuse;
                 start_writable is the same for tasks whose repository is in the image
  start_floor    create and start of a bare container of the same image, without network
  remove         from closing a sandbox until the daemon has removed its container
  command        `true` in an open sandbox
  exec_floor     `true` through a Docker exec in a bare container
  commands_parallel  like command, in 4 sandboxes at once
  parallel_start_16  16 starts at once, of which sandbox.start_parallelism run concurrently
  reuse          from the end of one attempt's work to a reset, verified sandbox for the next one
  held_N         N sandboxes open at once: a command in each, and memory per sandbox (its control
                 group, its Docker shim, and this process)

  A floor and the case compared with it alternate, within the same minutes.

Limits (the column `verdict`, and `ok` in JSON):
  start: 1.15 x start_floor   command: p50 5 ms, p99 20 ms   commands_parallel: 200 per s")]
pub(crate) struct BenchSandboxArgs {
    /// Only cases whose name matches; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Number of starts of each kind.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) starts: u32,
    /// Number of commands; there are a tenth as many Docker execs, and a fifth as many reuses.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) commands: u32,
    /// Number of sandboxes held open at once.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=3000))]
    pub(crate) held: u32,
    /// Print JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
