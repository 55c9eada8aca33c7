//! `orchestrate bench`: what this machine measures. Every number is measured in the same run.

mod machine;
mod rollout;
mod routing;
mod sandbox;

use crate::args::BenchCommand;
pub(crate) use rollout::{Listening, keep_to};
use std::process::ExitCode;

/// Runs the command.
pub(crate) async fn run(command: BenchCommand) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Routing(args) => {
            tokio::task::spawn_blocking(move || routing::run(&args)).await?
        }
        BenchCommand::Rollout(args) => rollout::run(&args).await,
        BenchCommand::Sandbox(args) => Box::pin(sandbox::run(&args)).await,
    }
}

/// Whether `name` fits `pattern`, in which `*` stands for any text.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => name.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices()
                .map(|(at, _)| rest.split_at(at).1)
                .chain([""])
                .any(|rest| fits(after, rest))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_choose_cases() {
        assert!(fits("*", "sglang_i32_delta") && fits("", ""));
        assert!(fits("sglang_*", "sglang_i32_delta") && fits("*_full", "vllm_u8_full"));
        assert!(fits("*u8*", "vllm_u8_full") && !fits("*u8", "vllm_u8_full"));
        assert!(!fits("spill", "spill_2"));
    }
}
