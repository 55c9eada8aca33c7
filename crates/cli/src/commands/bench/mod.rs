//! `orchestrate bench`: what this machine measures. Every number is measured in the same run.

mod machine;
mod routing;

use crate::args::BenchCommand;
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(command: BenchCommand) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Routing(args) => {
            tokio::task::spawn_blocking(move || routing::run(&args)).await?
        }
    }
}
