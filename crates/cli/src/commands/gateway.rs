//! `orchestrate gateway`: an evaluation whose episodes are run by external workers.

use super::eval;
use crate::args::GatewayArgs;
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(args: GatewayArgs) -> anyhow::Result<ExitCode> {
    let GatewayArgs { mut eval, tasks, listen } = args;
    if !eval.resume {
        let mut set = |assignment: String| eval.source.sets.push(assignment);
        set("rollout.scaffold=external".to_owned());
        if let Some(file) = tasks {
            set(format!("tasks.held_out_file={:?}", file.as_str()));
        }
        if let Some(address) = listen {
            set(format!("gateway.listen={:?}", address.to_string()));
        }
    }
    eval::run(eval, "gateway").await
}
