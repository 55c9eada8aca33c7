//! `orchestrate`: arguments, config loading, wiring, progress and exit codes. No decisions here.
//!
//! The main loop is four hops away: this file → [`commands::run`] → the coordinator's `lib.rs` →
//! its `run_loop.rs`.

mod args;
mod commands;
mod config;
mod exit;
mod grader;
mod heap;
mod images;
mod limits;
mod live;
mod output;
mod progress;
mod tables;
mod task_source;
mod wiring;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::usage(&error),
    };
    output::init_logging(cli.verbose, cli.log_filter.as_deref());
    limits::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(async_threads())
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return exit::report(&anyhow::Error::from(error).context("start the runtime"));
        }
    };
    let result = runtime.block_on(Box::pin(dispatch(cli.command)));
    // Engine and trainer threads may still hold a blocking task; nobody waits for them.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match result {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// Threads for what waits: a quarter of the processors. A turn is some hundred small steps, and with
/// a thread per processor the steps wander: each is begun where nothing of its episode is in the
/// cache, after a thread was woken for it. With 4,096 open episodes on two processors one thread
/// took 390 and 470 µs of processor time per turn, two took 540 and 610. What computes has threads of
/// its own.
fn async_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| processors.get().div_ceil(4))
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => commands::run::run(args).await,
        Command::Eval(args) => commands::eval::run(args).await,
        Command::Grade(args) => commands::grade::run(args).await,
        Command::Tasks(args) => commands::tasks::run(args).await,
        Command::Config(args) => commands::config::run(args),
        Command::Doctor(args) => commands::doctor::run(args).await,
        Command::Show(args) => commands::show::run(args).await,
        Command::Analyze(args) => commands::analyze::run(args).await,
        Command::Compare(args) => commands::compare::run(args).await,
        Command::Gc(args) => commands::gc::run(args).await,
        Command::Bench(args) => commands::bench::run(args.command).await,
        Command::WarmStart(args) => commands::warm_start::run(args).await,
        Command::ServeEngine(args) => commands::serve::engine(args).await,
        Command::ServeTrainer(args) => commands::serve::trainer(args).await,
        Command::SyntheticEngine(args) => commands::synthetic::run(args).await,
        Command::RemoveUnstarted(args) => commands::remove_unstarted::run(args).await,
        Command::Completions(args) => {
            args::write_completions(args.shell);
            Ok(ExitCode::SUCCESS)
        }
    }
}
