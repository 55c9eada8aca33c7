//! `orchestrate status`: what a run is doing, and what it waits for.

use super::runs::{Entry, State, entry};
use crate::args::StatusArgs;
use crate::spans::Wait;
use crate::status::{self, Status};
use crate::{output, paths, tables};
use orchestrate_metrics::{MetricsLine, StepLine};
use orchestrate_types::{unix_micros, utc};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Age of a status above which its process is called stuck. It is written every second.
const STALE: Duration = Duration::from_secs(15);
/// Number of last steps from which the remaining time is estimated.
const RECENT_STEPS: usize = 5;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    run: &'a Entry,
    /// Estimated seconds until the last planned step is closed.
    remaining_s: Option<f64>,
    /// Of a running process.
    status: Option<&'a Status>,
}

/// Runs the command.
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<ExitCode> {
    let folder = paths::absolute(&args.run_dir)?;
    let (run, lines) = entry(&folder, args.run_dir.clone()).await?;
    let holder = run.holder.as_deref();
    let status = holder.and_then(|holder| status::read(&folder, holder));
    let remaining_s = remaining(&run, &lines);
    if args.json {
        output::json(&Printed { run: &run, remaining_s, status: status.as_ref() })?;
        return Ok(ExitCode::SUCCESS);
    }
    output::data(headline(&run, remaining_s));
    match (&status, holder) {
        (Some(status), _) => output::data(text(status, args.waits)),
        (None, Some(holder)) => {
            output::data(format!("{holder} has the folder open, and reports no status"));
        }
        (None, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Estimated seconds until the last planned step is closed.
fn remaining(run: &Entry, lines: &[MetricsLine]) -> Option<f64> {
    let seconds = |line: &StepLine| {
        let parts = [line.time_rollout_s, line.time_train_s, line.time_sync_s];
        parts.into_iter().sum::<Option<f64>>()
    };
    let recent: Vec<f64> = lines
        .iter()
        .rev()
        .filter_map(MetricsLine::step)
        .filter_map(seconds)
        .take(RECENT_STEPS)
        .collect();
    let left = run.steps?.checked_sub(run.step?).filter(|&left| left > 0)?;
    let mean = recent.iter().sum::<f64>() / recent.len() as f64;
    (run.state == State::Running && !recent.is_empty()).then_some(mean * f64::from(left))
}

fn headline(run: &Entry, remaining_s: Option<f64>) -> String {
    let name = run.name.as_deref().map(|name| format!(" ({name})")).unwrap_or_default();
    let step = run.step_text();
    let left = remaining_s.map(|s| format!(", about {} left", duration(s))).unwrap_or_default();
    format!("{}{name}: {}, {step}{left}", run.folder, run.state.name())
}

fn text(status: &Status, waits: usize) -> String {
    let mut lines = Vec::new();
    let age = unix_micros().saturating_sub(status.time_us).max(0);
    let age = Duration::from_micros(u64::try_from(age).unwrap_or(0));
    if age > STALE {
        lines.push(format!(
            "warning: process {} wrote its status {} ago, at {}; it is stopped, or its machine is \
             overloaded, or the disk is full",
            status.pid,
            duration(age.as_secs_f64()),
            utc(status.time_us)
        ));
    }
    for stage in &status.stages {
        lines.push(format!("{} for {}", stage_text(stage), duration(stage.for_s)));
    }
    let counts = &status.counts;
    if !counts.title.is_empty() {
        lines.push(format!(
            "{}: {} of {} ended, {} in flight, {} solved, {}; groups: {} kept, {} dropped",
            counts.title,
            counts.ended,
            output::counted(counts.planned, "episode"),
            counts.in_flight,
            counts.solved,
            output::counted(counts.broken, "broken attempt"),
            counts.kept,
            counts.dropped
        ));
    }
    if !status.open.is_empty() {
        let open: Vec<String> =
            status.open.iter().map(|(what, count)| format!("{what} {count}")).collect();
        lines.push(format!("waits: {}", open.join(", ")));
    }
    let mut text = lines.join("\n");
    if !status.waits.is_empty() && waits > 0 {
        let mut table = tables::table(&["longest waits", "for", "episode", "turn", "where"]);
        for wait in status.waits.iter().take(waits) {
            let field = |name: &str| wait.fields.get(name).map(|v| tables::cell(v));
            let place = field("engine").or_else(|| field("image")).unwrap_or_default();
            table.add_row([
                tables::cell(&wait.what),
                duration(wait.for_s),
                field("episode_id").unwrap_or_default(),
                field("turn").unwrap_or_default(),
                place,
            ]);
        }
        text = format!("{text}\n{table}");
    }
    text
}

/// A stage in words, with the fields that tell it apart.
fn stage_text(stage: &Wait) -> String {
    let field = |name: &str| stage.fields.get(name).map(String::as_str).unwrap_or_default();
    match stage.what.as_str() {
        "start" => "starting: waits for servers and images".to_owned(),
        "step" => format!("step {}", field("step")),
        "train" => format!("training step {}: waits for the trainer", field("step")),
        "weight_sync" => format!("weight sync to policy version {}", field("policy_version")),
        "worker" => format!("weight sync: waits for {}", field("engine")),
        "evaluation" => format!("evaluation after step {}", field("step")),
        other => other.to_owned(),
    }
}

/// Seconds as a person reads them.
fn duration(seconds: f64) -> String {
    let minutes = seconds / 60.0;
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        _ if minutes < 120.0 => format!("{minutes:.0} min"),
        _ => format!("{:.1} h", minutes / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::StageCounts;
    use std::collections::BTreeMap;

    fn wait(what: &str, for_s: f64, fields: &[(&str, &str)]) -> Wait {
        let fields = fields.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect();
        Wait { what: what.to_owned(), for_s, fields }
    }

    #[test]
    fn what_a_run_waits_for_is_named_with_its_time() {
        let status = Status {
            pid: 7,
            time_us: unix_micros(),
            stages: vec![
                wait("step", 200.0, &[("step", "3")]),
                wait("train", 90.0, &[("step", "3")]),
            ],
            counts: StageCounts::default(),
            open: BTreeMap::from([("generate".to_owned(), 2)]),
            waits: vec![wait("generate", 7000.0, &[("engine", "http://a"), ("turn", "4")])],
        };
        let shown = text(&status, 8);
        let expected = "step 3 for 3 min\ntraining step 3: waits for the trainer for 90 s\nwaits: generate 2\n";
        assert!(shown.starts_with(expected), "{shown}");
        assert!(shown.contains("generate") && shown.contains("117 min"), "{shown}");
        assert!(!shown.contains("warning"));
        let frozen = Status { time_us: unix_micros() - 60_000_000, ..status };
        assert!(text(&frozen, 0).starts_with("warning: process 7 wrote its status 60 s ago"));
    }
}
