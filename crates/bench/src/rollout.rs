//! `orchestrate-bench rollout`: many conversations through the episode machinery and the fleet,
//! against engine processes that compute nothing.

mod agents;
mod case;
mod checker;
mod engines;
mod observed;
mod observers;
mod polls;
mod processors;
mod stalls;
mod world;

use crate::args::BenchRolloutArgs;
use crate::machine::Machine;
use agents::Reading;
use anyhow::{Context, ensure};
use camino::Utf8Path;
use case::{Case, Fate, Kind, Limits};
pub(crate) use engines::Listening;
use orchestrate_cli::{UsageError, matches_glob, output, tables};
use orchestrate_synthetic::Latency;
use processors::Processors;
pub(crate) use processors::keep_to;
use std::process::ExitCode;
use std::time::Duration;
use world::World;

/// Number of open conversations in the large cases, and their paces.
const OPEN: usize = 4096;
const OPEN_TURNS_PER_S: f64 = 500.0;
const BUSY_TURNS_PER_S: f64 = 1500.0;

/// Sampled tokens of most turns, about.
const TOKENS_PER_TURN: f64 = 100.0;

/// Number of agents with an open stream in `gateway_1024`, and their pace.
const STREAMS: usize = 1024;
const STREAMS_TURNS_PER_S: f64 = 500.0;

#[derive(serde::Serialize)]
struct Report {
    cases: Vec<Case>,
    machine: Machine,
    processors: Processors,
}

/// Runs the command.
pub(super) async fn run(args: &BenchRolloutArgs) -> anyhow::Result<ExitCode> {
    let kinds = kinds(args);
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    let chosen: Vec<Kind> =
        kinds.into_iter().filter(|kind| matches_glob(&args.pattern, kind.name)).collect();
    ensure!(
        !chosen.is_empty(),
        UsageError::NoCase { pattern: args.pattern.clone(), known: names.join(", ") }
    );
    let machine = Machine::inspect();
    if cfg!(debug_assertions) {
        output::say("this is a debug build: its numbers say nothing about a release");
    }
    let folder = tempfile::tempdir().context("failed to create a temporary folder")?;
    let folder = Utf8Path::from_path(folder.path())
        .context("the path of the temporary folder is not valid UTF-8")?;
    let world = World::make(folder)?;
    let processors = Processors::share()?;
    keep_to(&processors.coordinator)?;
    let mut cases = Vec::with_capacity(chosen.len());
    for kind in &chosen {
        output::say(format!("measuring {}", kind.name));
        cases.push(Box::pin(case::measure(kind, &world, &processors, folder)).await?);
    }
    if args.json {
        output::json(&Report { cases, machine, processors })?;
    } else {
        output::data(machine.line());
        output::data(processors.line());
        output::data(table(&cases));
        output::say(
            "--json prints every measurement: delays of text, loop and polls, memory, moves",
        );
        for case in cases.iter().filter(|case| !case.note.is_empty()) {
            output::data(format!("{}: {}", case.name, case.note));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn kinds(args: &BenchRolloutArgs) -> Vec<Kind> {
    let wide = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
    // About a tenth of a second per turn: much shorter than that of a real engine, so that the
    // coordinator is under load.
    let latency = Latency { base_ms: 20.0, prefill_ms_per_1k: 40.0, decode_ms: 1.0, jitter: 0.2 };
    let kind = |name, workers, fate| Kind {
        name,
        conversations: wide(args.conversations),
        group_size: wide(args.group_size),
        turns: wide(args.turns),
        workers,
        fate,
        agents: None,
        latency,
        ramp: Duration::ZERO,
        limits: Limits { hit_share: Some(0.99), ..Limits::default() },
    };
    let open = |name, turns_per_s, limits| {
        let turn = OPEN as f64 / turns_per_s;
        let base_ms = turn * 1e3;
        Kind {
            conversations: OPEN,
            turns: wide(args.open_turns),
            latency: Latency { base_ms, prefill_ms_per_1k: 0.0, decode_ms: 0.0, jitter: 0.5 },
            ramp: Duration::from_secs_f64(turn),
            limits: Limits { hit_share: Some(0.99), cpu_us_per_turn: Some(250.0), ..limits },
            ..kind(name, 4, Fate::Lives)
        }
    };
    let mut streams = open("gateway_1024", STREAMS_TURNS_PER_S, Limits::default());
    streams.agents = Some(Reading::Stream);
    streams.conversations = STREAMS;
    // A quarter of the time is over before the first token, so most streams have sent text and are open.
    let turn_ms = STREAMS as f64 / STREAMS_TURNS_PER_S * 1e3;
    streams.latency.base_ms = turn_ms / 4.0;
    streams.latency.decode_ms = turn_ms * 0.75 / TOKENS_PER_TURN;
    let waiting = Limits {
        bytes_per_open_episode: Some(65_536.0),
        added_p99_ms: Some(5.0),
        loop_held_max_ms: Some(10.0),
        ..Limits::default()
    };
    vec![
        kind("workers_1", 1, Fate::Lives),
        // The cache of all conversations is lost with it.
        Kind {
            limits: Limits::default(),
            ..kind("workers_1_kill", 1, Fate::DiesAndReturns(Duration::from_secs(1)))
        },
        kind("workers_4", 4, Fate::Lives),
        kind("workers_4_kill", 4, Fate::Dies),
        Kind { agents: Some(Reading::Whole), ..kind("gateway_4_whole", 4, Fate::Lives) },
        Kind { agents: Some(Reading::Stream), ..kind("gateway_4", 4, Fate::Lives) },
        streams,
        open("open_4096", OPEN_TURNS_PER_S, waiting),
        open("busy_4096", BUSY_TURNS_PER_S, Limits::default()),
    ]
}

/// The measurements that limits are about, on lines of a hundred characters.
fn table(cases: &[Case]) -> comfy_table::Table {
    let mut table = tables::table(&[
        "case",
        "turns/s",
        "CPU µs/turn",
        "added p99 ms",
        "held ms",
        "hits",
        "lost",
        "wrong rows",
        "verdict",
    ]);
    for case in cases {
        table.add_row([
            case.name.clone(),
            format!("{:.0}", case.turns_per_s),
            format!("{:.0}", case.cpu_us_per_turn),
            format!("{:.2}", case.added_p99_ms),
            format!("{:.2}", case.loop_held_max_ms),
            format!("{:.4}", case.hit_share),
            case.lost_episodes.to_string(),
            case.wrong_rows.to_string(),
            if case.ok { "ok" } else { "over" }.to_owned(),
        ]);
    }
    table
}
