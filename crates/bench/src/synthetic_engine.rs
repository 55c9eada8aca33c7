//! `orchestrate-bench synthetic-engine`: an engine process of `orchestrate-bench rollout`.

use crate::args::SyntheticEngineArgs;
use crate::rollout::{Listening, keep_to};
use anyhow::Context;
use orchestrate_cli::output;
use std::process::ExitCode;
use tokio::net::TcpListener;

/// Prints the address, and serves until standard input closes.
pub(crate) async fn run(args: SyntheticEngineArgs) -> anyhow::Result<ExitCode> {
    if !args.processors.is_empty() {
        keep_to(&args.processors)?;
    }
    let plan = fs_err::read(&args.plan)?;
    let plan =
        serde_json::from_slice(&plan).with_context(|| format!("failed to read {}", args.plan))?;
    let listener = TcpListener::bind(args.listen).await.context("failed to listen")?;
    output::json_line(&Listening { address: listener.local_addr()? })?;
    let closed =
        tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    tokio::select! {
        ended = orchestrate_synthetic::serve(plan, listener) => ended.context("failed to serve")?,
        closed = closed => { closed?.context("failed to read standard input")?; }
    }
    Ok(ExitCode::SUCCESS)
}
