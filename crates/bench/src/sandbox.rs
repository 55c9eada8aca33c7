//! `orchestrate-bench sandbox`: what a sandbox costs, compared with the Docker daemon by itself.

mod case;
mod work;

use crate::args::BenchSandboxArgs;
use crate::machine::Machine;
use anyhow::ensure;
use case::Case;
use orchestrate_cli::{Progress, UsageError, matches_glob, output, sandbox_under_test, tables};
use orchestrate_sandbox::{DaemonReport, DockerProvider, SandboxProvider};
use orchestrate_types::RunId;
use std::process::ExitCode;
use work::World;

/// Cases that are measured together.
#[derive(Debug, Clone, Copy)]
enum Work {
    Starts,
    Commands,
    CommandsParallel,
    ParallelStart,
    Reuse,
    Held,
}

const WORKS: [Work; 6] = [
    Work::Starts,
    Work::Commands,
    Work::CommandsParallel,
    Work::ParallelStart,
    Work::Reuse,
    Work::Held,
];

impl Work {
    fn names(self, args: &BenchSandboxArgs) -> Vec<String> {
        let names: &[&str] = match self {
            Self::Starts => &["start", "start_writable", "start_floor", "remove"],
            Self::Commands => &["command", "exec_floor"],
            Self::CommandsParallel => &["commands_parallel"],
            Self::ParallelStart => &["parallel_start_16"],
            Self::Reuse => &["reuse"],
            Self::Held => return vec![format!("held_{}", args.held)],
        };
        names.iter().map(ToString::to_string).collect()
    }

    async fn measure(self, world: &World, args: &BenchSandboxArgs) -> anyhow::Result<Vec<Case>> {
        match self {
            Self::Starts => work::starts(world, args.starts).await,
            Self::Commands => work::commands(world, args.commands).await,
            Self::CommandsParallel => work::commands_parallel(world, args.commands).await,
            Self::ParallelStart => work::parallel_start(world).await,
            Self::Reuse => work::reuse(world, args.commands.div_ceil(5)).await,
            Self::Held => work::held(world, args.held).await,
        }
    }
}

#[derive(serde::Serialize)]
struct Report {
    cases: Vec<Case>,
    docker: DaemonReport,
    machine: Machine,
}

/// Runs the command.
pub(super) async fn run(args: &BenchSandboxArgs) -> anyhow::Result<ExitCode> {
    let fit = |name: &String| matches_glob(&args.pattern, name);
    let chosen: Vec<Work> =
        WORKS.into_iter().filter(|work| work.names(args).iter().any(fit)).collect();
    ensure!(
        !chosen.is_empty(),
        UsageError::NoCase {
            pattern: args.pattern.clone(),
            known: WORKS
                .into_iter()
                .flat_map(|work| work.names(args))
                .collect::<Vec<_>>()
                .join(", "),
        }
    );
    let world = World { sandbox: sandbox_under_test(&args.source)?, run: RunId::generate() };
    let provider = DockerProvider::connect(world.sandbox.config.clone()).await?;
    let docker = provider.doctor().await?;
    provider.shutdown().await?;
    let machine = Machine::inspect();
    let progress = Progress::new(chosen.len() as u64);
    let mut cases = Vec::new();
    for (done, work) in chosen.iter().enumerate() {
        let names = work.names(args).join(", ");
        progress.line(&format!("measuring {names}"));
        progress.update(done as u64, chosen.len() as u64, &names);
        let measured = work.measure(&world, args).await?;
        cases.extend(measured.into_iter().filter(|case| fit(&case.name)));
    }
    progress.finish();
    if args.json {
        output::json(&Report { cases, docker, machine })?;
    } else {
        output::data(machine.line());
        output::data(format!(
            "Docker {} (API {}), {}, cgroup v{} ({}), {}, kernel {}",
            docker.version,
            docker.api,
            docker.runtime,
            docker.cgroup_version,
            docker.cgroup_driver,
            docker.storage_driver,
            docker.kernel
        ));
        output::data(table(&cases));
    }
    Ok(ExitCode::SUCCESS)
}

fn table(cases: &[Case]) -> comfy_table::Table {
    let mut table = tables::table(&[
        "case", "samples", "p50 ms", "p99 ms", "per s", "by floor", "MiB each", "limit", "verdict",
    ]);
    for case in cases {
        let limits = [
            case.limits.p50_ms.map(|limit| format!("p50 {limit} ms")),
            case.limits.p99_ms.map(|limit| format!("p99 {limit} ms")),
            case.limits.per_s.map(|limit| format!("{limit} per s")),
            case.limits.by_floor.map(|limit| format!("{limit} x floor")),
        ];
        let by_floor = case.floor_p50_ms.map(|floor| format!("{:.2}", case.p50_ms / floor));
        let mebibytes =
            case.memory.as_ref().map(|m| format!("{:.1}", m.total as f64 / f64::from(1 << 20)));
        table.add_row([
            case.name.clone(),
            case.samples.to_string(),
            format!("{:.2}", case.p50_ms),
            format!("{:.2}", case.p99_ms),
            format!("{:.1}", case.per_s),
            by_floor.unwrap_or_default(),
            mebibytes.unwrap_or_default(),
            limits.into_iter().flatten().collect::<Vec<_>>().join(", "),
            match (case.is_limited(), case.ok) {
                (false, _) => "",
                (true, true) => "ok",
                (true, false) => "over",
            }
            .to_owned(),
        ]);
    }
    table
}
