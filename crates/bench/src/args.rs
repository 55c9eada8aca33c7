//! The command line of `orchestrate-bench`.

use camino::Utf8PathBuf;
use clap::{Args, Parser, Subcommand};
use orchestrate_cli::ConfigSource;

/// Measure this machine: how close orchestrate is to what the hardware needs.
#[derive(Debug, Parser)]
#[command(name = "orchestrate-bench", version, about, propagate_version = true)]
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
    /// Routing masks: from reply bodies to checked rows, the prefix cache, at rest, the batch.
    Routing(BenchRoutingArgs),
    /// Rollouts: many conversations on fleets of engines that compute nothing, some of which die.
    Rollout(BenchRolloutArgs),
    /// Sandboxes: starting, commands, reuse and memory, compared with Docker by itself.
    Sandbox(BenchSandboxArgs),
    /// Serve an engine that computes nothing, for `rollout`, until standard input closes.
    #[command(hide = true)]
    SyntheticEngine(SyntheticEngineArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SyntheticEngineArgs {
    /// What it serves (JSON, as `rollout` writes it).
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Utf8PathBuf,
    /// Address to listen on; port 0 = any, printed as JSON.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub(crate) listen: std::net::SocketAddr,
    /// Processors to keep to; without it, any.
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
  Episodes as `run` makes them, through the same runner, fleet, client and routing masks. Engines
  are processes of their own, reached by HTTP, that only keep a prefix cache's book and sleep;
  sandboxes answer at once. Both sides have half of the processors each, as engines do not run where
  the coordinator does. Every routing row is a function of the tokens before it, and every row
  of every finished episode is compared with what it must be.

  workers_N has all conversations on N engines at once; in workers_N_kill the first engine is killed
  when half of the turns are done (a single one is started again a second later). open_4096 has
  4,096 conversations open on 4 engines at a pace of 500 turns per second, busy_4096 at 1,500: a turn
  that comes to a processor at rest, with nothing in its caches, costs it more.

  CPU is this process's processor time by turn, over the second half of the turns; threads that only
  check rows or watch the machine are left out. A finished episode is let go at once, as a run hands
  it on, to a thread that checks its rows where the engines run. KiB/episode is heap per open
  episode, without its tokens (17 bytes each) and rows, when half of the turns are done. added is the time from an engine's handing out a reply to its having read that
  conversation's next request, both ends of HTTP included. hits is the share of prompt tokens
  answered by the engines' prefix caches, of those that could have been: all earlier tokens of the
  conversation, and the prompt of a group for all but its first member on an engine, in whole
  pages; unmoved leaves out conversations that went on at another engine.

  lag is how late a timer of the event loop fires. Where a hypervisor shares its processors out, a
  machine stands still now and then, and every timer on it is late: stall is the longest delay of a
  thread that only sleeps, with real-time priority, on each of the coordinator's processors, and
  held the longest lag without such times. Without the right to that priority (CAP_SYS_NICE) they
  are not told apart, and held is lag. poll is the processor time of the longest poll of an episode.

Limits (the column `verdict`, and `ok` in JSON):
  all cases: no episode lost, no row wrong; and unless the only engine is killed, 0.99 of possible
  hits for unmoved conversations
  open_4096, busy_4096: 250 µs CPU per turn
  open_4096: 64 KiB per open episode, 5 ms added (p99), event loop held for 10 ms (max)")]
pub(crate) struct BenchRolloutArgs {
    /// Only cases whose name fits; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    /// Conversations of the cases `workers_N`.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) conversations: u32,
    /// Their turns.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub(crate) turns: u32,
    /// Conversations with a common prompt.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) group_size: u32,
    /// Turns of each conversation of `open_4096` and `busy_4096`.
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
  experts are drawn uniformly and distinct from --seed. Each turn's reply is a whole JSON body, as
  the engine sends it. seconds is the time from body bytes to checked blocks in the mask, by the
  functions that a run uses, summed over the turns; making bodies and comparing the finished mask
  with what was drawn is not in it. Floor and case alternate on the same bodies, and each is the
  least of --repeat rounds; medians are given beside them. floor says in words what the floor does.

  kept_bytes is the finished mask (or what the case keeps): rows x bytes of a row, each block once.
  peak_extra_bytes is the most the heap held at any moment of the case, above what it held before,
  with the reply body that is being read, less kept_bytes. Counted are bytes asked of the
  allocator; memory that the benchmark itself needs is outside.

Limits (the column `verdict`, and `ok` in JSON):
  delta and groups: 1.5 x floor; the conversations of up to 32768 tokens also 30 ms
  full: 1.3 x the scan of the bytes
  batch_write: floor / 0.7
  peak_extra_bytes of conversations, groups and load: one body + 5 % of kept_bytes")]
pub(crate) struct BenchRoutingArgs {
    /// Only cases whose name fits; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    /// Tokens of the conversation.
    #[arg(long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) tokens: u32,
    /// Turns of the conversation.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) turns: u32,
    /// `MoE` layers; all hidden layers are.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) layers: u32,
    /// Experts per layer.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub(crate) experts: u32,
    /// Experts per token and layer.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) top_k: u32,
    /// Rounds per case.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Seed of the experts.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Folder for files that cases write and remove again; default: /dev/shm where there is one,
    /// so that the disk is not measured, else the system's for temporary files.
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
  Real containers of the tasks' image, opened as `run` opens them. All times are seen from here.

  start          from the request to a sandbox whose supervisor has greeted; clean ones are not used
                 again. start_writable is that of tasks whose repository is in the image.
  start_floor    create and start of a bare container of the same image, without network
  remove         from giving it back until the daemon has removed it
  command        `true` in an open sandbox
  exec_floor     `true` by an exec of Docker's own in a bare container
  commands_parallel  the same as command, in 4 sandboxes at once
  parallel_start_16  16 starts at once, sandbox.start_parallelism of them under way
  reuse          from the end of one attempt's work to a sandbox proved clean for the next one
  held_N         N sandboxes open at once: a command in each, and memory by sandbox (its control
                 group, Docker's process beside it, and this process)

  A floor and what is compared with it are measured in turn, in the same minutes.

Limits (the column `verdict`, and `ok` in JSON):
  start: 1.15 x start_floor   command: p50 5 ms, p99 20 ms   commands_parallel: 200 per s")]
pub(crate) struct BenchSandboxArgs {
    /// Only cases whose name fits; `*` stands for any text.
    #[arg(long = "case", value_name = "GLOB", default_value = "*")]
    pub(crate) pattern: String,
    #[command(flatten)]
    pub(crate) source: ConfigSource,
    /// Starts of each kind.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) starts: u32,
    /// Commands; a tenth as many execs of Docker's own, a fifth as many reuses.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) commands: u32,
    /// Sandboxes held open at once.
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
