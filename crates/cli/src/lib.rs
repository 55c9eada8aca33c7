//! `orchestrate`: arguments, config loading, wiring, progress and exit codes. No decisions here.
//!
//! The main loop is four hops away: [`main`] → `commands/run.rs` → the coordinator's `lib.rs` → its
//! `run_loop.rs`.
//!
//! This is a library only so that `orchestrate-bench` reads settings, prints and exits the way
//! `orchestrate` does; its public items are what the two programs share.

mod amend;
mod args;
mod commands;
mod config;
mod error;
mod exit;
mod files;
mod gateway;
mod glob;
mod grader;
mod images;
mod live;
mod model_files;
pub mod output;
mod paths;
pub mod process;
mod progress;
mod run_folder;
mod sinks;
mod spans;
mod status;
pub mod tables;
mod task_source;
mod tool_servers;
mod wiring;

pub use args::{ConfigSource, LogArgs};
pub use error::UsageError;
pub use exit::usage;
pub use glob::matches_glob;
pub use progress::Progress;
pub use wiring::{SandboxUnderTest, sandbox_under_test};

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

/// Runs `orchestrate` on the arguments of this process and returns its exit code.
pub fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => {
            output::init_logging(&cli.log, cli.command.has_status());
            process::block_on(dispatch(cli.command))
        }
        Err(error) => exit::usage(&error),
    }
}

/// Checks variables of the environment that no setting repeats.
///
/// # Errors
/// A [`UsageError`] if one has an invalid value.
pub fn check_environment() -> anyhow::Result<()> {
    Ok(orchestrate_cpu::check().map_err(UsageError::from)?)
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    check_environment()?;
    match command {
        Command::Run(args) => commands::run::run(args).await,
        Command::Eval(args) => commands::eval::run(args, "eval").await,
        Command::Gateway(args) => commands::gateway::run(args).await,
        Command::Grade(args) => commands::grade::run(args).await,
        Command::Tasks(args) => commands::tasks::run(args).await,
        Command::Config(args) => commands::config::run(args),
        Command::Doctor(args) => commands::doctor::run(args).await,
        Command::Runs(args) => commands::runs::run(args).await,
        Command::Status(args) => commands::status::run(args).await,
        Command::Show(args) => commands::show::run(args).await,
        Command::Analyze(args) => commands::analyze::run(args).await,
        Command::Compare(args) => commands::compare::run(args).await,
        Command::Gc(args) => commands::gc::run(args).await,
        Command::WarmStart(args) => commands::warm_start::run(args).await,
        Command::ServeEngine(args) => commands::serve::engine(args).await,
        Command::ServeTrainer(args) => commands::serve::trainer(args).await,
        Command::RemoveUnstarted(args) => commands::remove_unstarted::run(args).await,
        Command::Completions(args) => Ok(args::write_completions(args.shell)),
    }
}
