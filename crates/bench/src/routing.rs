//! `orchestrate-bench routing`: routing masks, compared with the least work that the machine needs.

mod batch;
mod conversation;
mod floors;
mod group;
mod measure;
mod rest;
mod workload;

use crate::args::BenchRoutingArgs;
use crate::machine::Machine;
use anyhow::ensure;
use camino::{Utf8Path, Utf8PathBuf};
use conversation::Kind;
use group::Groups;
use measure::Case;
use orchestrate_cli::{UsageError, matches_glob, output, tables};
use std::process::ExitCode;
use workload::Mode::{Delta, Full};
use workload::Size;
use workload::Wire::{SglangI32, VllmU8, VllmU16};

/// Cases that are measured together.
#[derive(Debug, Clone, Copy)]
enum Work {
    Conversation(Kind),
    Groups(Groups),
    /// Eviction to files, and reloading.
    Spill(Size),
    /// Conversion of a whole mask to its stored form, and back.
    Store(Size),
    Batch(Size),
}

impl Work {
    fn names(&self) -> Vec<&'static str> {
        match self {
            Self::Conversation(kind) => vec![kind.name],
            Self::Groups(groups) => vec![groups.name],
            Self::Spill(_) => vec!["spill", "reload"],
            Self::Store(_) => vec!["store", "load"],
            Self::Batch(_) => vec!["batch_write", "batch_read"],
        }
    }

    fn measure(&self, args: &BenchRoutingArgs, dir: &Utf8Path) -> anyhow::Result<Vec<Case>> {
        let (rounds, seed) = (args.repeat, args.seed);
        let pair = |(a, b)| vec![a, b];
        match self {
            Self::Conversation(kind) => Ok(vec![conversation::measure(kind, rounds, seed)?]),
            Self::Groups(groups) => Ok(vec![group::measure(groups, rounds, seed)?]),
            Self::Spill(size) => rest::spill(size, dir, rounds, seed).map(pair),
            Self::Store(size) => rest::store(size, rounds, seed).map(pair),
            Self::Batch(size) => batch::measure(size, dir, rounds, seed).map(pair),
        }
    }
}

#[derive(serde::Serialize)]
struct Report {
    cases: Vec<Case>,
    machine: Machine,
}

/// Runs the command. Blocking.
pub(super) fn run(args: &BenchRoutingArgs) -> anyhow::Result<ExitCode> {
    ensure!(args.top_k <= args.experts, "--top-k must be at most --experts");
    ensure!(args.turns <= args.tokens / 4, "--turns must be at most a quarter of --tokens");
    let fit = |name: &&str| matches_glob(&args.pattern, name);
    let works = works(args);
    let chosen: Vec<&Work> = works.iter().filter(|work| work.names().iter().any(fit)).collect();
    ensure!(
        !chosen.is_empty(),
        UsageError::NoCase {
            pattern: args.pattern.clone(),
            known: works.iter().flat_map(Work::names).collect::<Vec<_>>().join(", "),
        }
    );
    let machine = Machine::inspect();
    if cfg!(debug_assertions) {
        output::say("this is a debug build: its numbers say nothing about a release");
    }
    let dir = folder(args)?;
    let mut cases = Vec::with_capacity(chosen.len());
    for work in chosen {
        output::say(format!("measuring {}", work.names().join(" and ")));
        let measured = work.measure(args, &dir)?;
        cases.extend(measured.into_iter().filter(|case| fit(&case.name.as_str())));
    }
    if args.json {
        output::json(&Report { cases, machine })?;
    } else {
        output::data(machine.line());
        output::data(table(&cases));
        for case in &cases {
            let note = if case.note.is_empty() { "" } else { "; " };
            output::data(format!("{}: floor is {}{note}{}", case.name, case.floor, case.note));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Folder for files: in memory if possible, so that the disk is not measured.
fn folder(args: &BenchRoutingArgs) -> anyhow::Result<Utf8PathBuf> {
    let memory = Utf8Path::new("/dev/shm");
    match &args.dir {
        Some(dir) => Ok(dir.clone()),
        None if memory.is_dir() => Ok(memory.to_owned()),
        None => Ok(Utf8PathBuf::try_from(std::env::temp_dir())?),
    }
}

fn works(args: &BenchRoutingArgs) -> Vec<Work> {
    let wide = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
    let size = Size {
        tokens: wide(args.tokens),
        turns: wide(args.turns),
        layers: wide(args.layers),
        experts: wide(args.experts),
        top_k: wide(args.top_k),
    };
    let narrow = Size { experts: size.experts.min(256), ..size };
    let wider = Size { experts: size.experts.max(512), ..size };
    let grown = |tokens, turns| Size { tokens, turns, ..size };
    let conversations = [
        ("sglang_i32_delta", SglangI32, Delta, size),
        ("sglang_i32_full", SglangI32, Full, size),
        ("vllm_u8_delta", VllmU8, Delta, narrow),
        ("vllm_u8_full", VllmU8, Full, narrow),
        ("vllm_u16_delta", VllmU16, Delta, wider),
        ("growth_65k_50", SglangI32, Delta, grown(65_536, 50)),
        ("growth_65k_50_full", SglangI32, Full, grown(65_536, 50)),
        ("growth_131k_200", SglangI32, Delta, grown(131_072, 200)),
    ];
    let conversations = conversations
        .into_iter()
        .map(|(name, wire, mode, size)| Work::Conversation(Kind { name, wire, mode, size }));
    let step =
        Groups { name: "step_64x16", count: 64, members: 16, prompt: 256, size: grown(512, 4) };
    let group = Groups {
        name: "group_prompt_8k",
        count: 1,
        members: 8,
        prompt: 8192,
        size: grown(8192 + 512, 4),
    };
    let others = [
        Work::Groups(step),
        Work::Groups(group),
        Work::Spill(size),
        Work::Store(size),
        Work::Batch(size),
    ];
    conversations.chain(others).collect()
}

fn table(cases: &[Case]) -> comfy_table::Table {
    let mut table = tables::table(&[
        "case",
        "in MB",
        "ms",
        "median",
        "floor ms",
        "median",
        "ratio",
        "limit",
        "kept MB",
        "peak extra MB",
        "limit",
        "verdict",
    ]);
    for case in cases {
        let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
        let megabytes = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6);
        let ratio = case.ratio_limit.map(|limit| format!("{limit:.2}"));
        let time = case.seconds_limit.map(|limit| format!("{:.0} ms", limit * 1e3));
        let limit = ratio.into_iter().chain(time).collect::<Vec<_>>().join(", ");
        let limited = !limit.is_empty() || case.peak_extra_limit_bytes.is_some();
        table.add_row([
            case.name.clone(),
            megabytes(case.bytes_in),
            milliseconds(case.seconds),
            milliseconds(case.seconds_median),
            milliseconds(case.floor_seconds),
            milliseconds(case.floor_seconds_median),
            format!("{:.2}", case.ratio),
            limit,
            megabytes(case.kept_bytes),
            megabytes(case.peak_extra_bytes),
            case.peak_extra_limit_bytes.map_or_else(String::new, megabytes),
            match (limited, case.ok) {
                (false, _) => "",
                (true, true) => "ok",
                (true, false) => "over",
            }
            .to_owned(),
        ]);
    }
    table
}
