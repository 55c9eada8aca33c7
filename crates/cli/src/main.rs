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
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
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
