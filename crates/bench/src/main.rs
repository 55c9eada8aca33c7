//! `orchestrate-bench`: what orchestrate costs on this machine. Every number is measured in the same
//! run as the baseline it is compared with.

mod args;
mod heap;
mod machine;
mod rollout;
mod routing;
mod sandbox;
mod synthetic_engine;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => {
            orchestrate_cli::output::init_logging(&cli.log, false);
            orchestrate_cli::process::block_on(dispatch(cli.command))
        }
        Err(error) => orchestrate_cli::usage(&error),
    }
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    orchestrate_cli::check_environment()?;
    match command {
        Command::Routing(args) => tokio::task::spawn_blocking(move || routing::run(&args)).await?,
        Command::Rollout(args) => rollout::run(&args).await,
        Command::Sandbox(args) => Box::pin(sandbox::run(&args)).await,
        Command::SyntheticEngine(args) => synthetic_engine::run(args).await,
    }
}
