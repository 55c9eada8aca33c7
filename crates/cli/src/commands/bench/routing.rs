//! `orchestrate bench routing`: routing masks against the least work the machine needs for them.

mod conversation;
mod floors;
mod measure;
mod workload;

use super::machine::Machine;
use crate::args::BenchRoutingArgs;
use crate::{output, tables};
use anyhow::ensure;
use conversation::Kind;
use measure::Case;
use std::process::ExitCode;
use workload::Mode::{self, Delta, Full};
use workload::Size;
use workload::Wire::{self, SglangI32, VllmU8, VllmU16};

/// What a case does.
#[derive(Debug, Clone, Copy)]
enum Work {
    Conversation(Kind),
}

impl Work {
    fn name(&self) -> &'static str {
        match self {
            Self::Conversation(kind) => kind.name,
        }
    }

    fn measure(&self, args: &BenchRoutingArgs) -> anyhow::Result<Case> {
        match self {
            Self::Conversation(kind) => conversation::measure(kind, args.repeat, args.seed),
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
    ensure!(args.top_k <= args.experts, "--top-k is more than --experts");
    ensure!(args.turns <= args.tokens / 4, "--turns needs at least 4 of --tokens each");
    let chosen: Vec<Work> =
        works(args).into_iter().filter(|work| fits(&args.pattern, work.name())).collect();
    ensure!(
        !chosen.is_empty(),
        "no case fits `{}`; there are: {}",
        args.pattern,
        works(args).iter().map(Work::name).collect::<Vec<_>>().join(", ")
    );
    let machine = Machine::look();
    if cfg!(debug_assertions) {
        output::say("this is a debug build: its numbers say nothing about a release");
    }
    let mut cases = Vec::with_capacity(chosen.len());
    for work in chosen {
        tracing::info!(case = work.name(), "measuring");
        cases.push(work.measure(args)?);
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
    conversations
        .into_iter()
        .filter(|&(_, wire, ..)| wire == SglangI32)
        .map(|(name, wire, mode, size): (_, Wire, Mode, _)| {
            Work::Conversation(Kind { name, wire, mode, size })
        })
        .collect()
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
        let limit = case.seconds_limit.map_or_else(
            || format!("{:.2}", case.ratio_limit),
            |seconds| format!("{:.2}, {:.0} ms", case.ratio_limit, seconds * 1e3),
        );
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
            if case.ok { "ok" } else { "over" }.to_owned(),
        ]);
    }
    table
}

/// Whether `name` fits `pattern`, in which `*` stands for any text.
fn fits(pattern: &str, name: &str) -> bool {
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
