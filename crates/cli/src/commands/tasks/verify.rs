//! `orchestrate tasks verify`: checks twice in sandboxes that the gold patch scores 1 and no patch
//! scores 0.

use super::NAME_CHARS;
use crate::config::Settings;
use crate::error::{BrokenMeasurement, InputError};
use crate::grader::Grader;
use crate::output;
use crate::progress::Progress;
use camino::Utf8Path;
use futures::stream::{self, StreamExt};
use orchestrate_rollout::{GradeError, GradeLogs, HarborActor, write_log_folder};
use orchestrate_sandbox::SandboxError;
use orchestrate_tasks::verify::{Check, Health};
use orchestrate_tasks::{Origin, Task, printable};
use orchestrate_types::{GradingRun, ModelName};
use serde_json::json;
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Characters of a reason that are printed.
pub(super) const WHY_CHARS: usize = 2000;
/// Number of checks of each task. Two detect most flaky tasks.
const ROUNDS: usize = 2;

/// Names in logs of the solution, and of no change at all.
const GOLD: &str = "gold";
const NOTHING: &str = "nothing";

/// Result of checking one task.
pub(super) enum Finding {
    Known(Health),
    /// The check failed because of the infrastructure, so nothing is known about the task.
    Broken(SandboxError),
}

/// Checks `tasks` and lists those that should not be used. Patches, logs and verdicts are kept in
/// `out`.
pub(super) async fn verify(
    settings: &Settings,
    tasks: &[Task],
    out: Option<&Utf8Path>,
    as_json: bool,
) -> anyhow::Result<ExitCode> {
    let grader = Grader::connect(settings, settings.reward.rules()).await?;
    let total = tasks.len() as u64;
    let progress = Progress::new(total);
    let checks = stream::iter(tasks)
        .map(|task| {
            let checked = check(&grader, task, out);
            async move { (task, checked.await) }
        })
        .buffer_unordered(grader.width());
    let mut checks = Box::pin(checks);
    let mut lists: BTreeMap<&str, BTreeMap<&str, String>> =
        ["unsound", "flaky", "broken"].map(|kind| (kind, BTreeMap::new())).into();
    let mut sound = Vec::new();
    let mut done = 0;
    while let Some((task, finding)) = checks.next().await {
        done += 1;
        let (kind, why) = match finding {
            Finding::Known(Health::Sound) => {
                sound.push(task.id.as_str());
                progress.update(done, total, &format!("{} sound", sound.len()));
                continue;
            }
            Finding::Known(Health::Unsound(problems)) => ("unsound", problems.join("; ")),
            Finding::Known(Health::Flaky(problems)) => ("flaky", problems.join("; ")),
            Finding::Broken(error) => ("broken", error.to_string()),
        };
        let (id, message) = (printable(&task.id, NAME_CHARS), printable(&why, WHY_CHARS));
        progress.line(&format!("{id}: {kind}: {message}"));
        lists.entry(kind).or_default().insert(&task.id, why);
        progress.update(done, total, &format!("{} sound", sound.len()));
    }
    drop(checks);
    progress.finish();
    grader.shutdown().await?;
    sound.sort_unstable();
    if as_json {
        let list = |kind: &str| lists.get(kind);
        output::json(&json!({
            "checked": done,
            "sound": sound,
            "unsound": list("unsound"),
            "flaky": list("flaky"),
            "broken": list("broken"),
        }))?;
    } else {
        output::data(format!(
            "{} checked in real sandboxes, twice each: gold patch = 1.0 and no patch = \
             0.0 for {}",
            output::counted(done, "task"),
            sound.len()
        ));
    }
    let count = |kind: &str| lists.get(kind).map_or(0, BTreeMap::len);
    let (unsound, flaky, broken) = (count("unsound"), count("flaky"), count("broken"));
    if unsound + flaky > 0 {
        return Err(
            InputError::UnsoundTasks { checked: tasks.len(), unsound, flaky, broken }.into()
        );
    }
    if broken > 0 {
        return Err(BrokenMeasurement::Verification { broken, checked: tasks.len() }.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks one task twice. In `out` each round is a run (`round-1`, `round-2`) with two models, `gold`
/// and `nothing`.
pub(super) async fn check(grader: &Grader<'_>, task: &Task, out: Option<&Utf8Path>) -> Finding {
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        let grade = async |model: &str, patch: &str| {
            let graded = match &task.origin {
                Origin::Harbor(_) if model == GOLD => {
                    grader.check_harbor(task, HarborActor::Solution).await?
                }
                Origin::Harbor(_) => grader.check_harbor(task, HarborActor::Nothing).await?,
                _ => grader.grade(task, patch).await?,
            };
            if let Some(root) = out {
                let run = GradingRun::made_of(&format!("round-{round}"));
                let logs = GradeLogs { root: root.to_owned(), model: ModelName::made_of(model) };
                // The result is valid without its log.
                if let Err(error) = write_log_folder(&logs, &run, task, &graded) {
                    let id = printable(&task.id, NAME_CHARS);
                    output::say(format!("{id}: cannot write the test log: {error}"));
                }
            }
            Ok::<_, GradeError>(graded.verdict)
        };
        let both = async {
            let gold = grade(GOLD, &task.gold_patch).await.map_err(|error| (GOLD, error))?;
            let noop = grade(NOTHING, "").await.map_err(|error| (NOTHING, error))?;
            Ok::<_, (&str, GradeError)>(Check { gold, noop })
        };
        match both.await {
            Ok(check) => rounds.push(check),
            Err((_, GradeError::Sandbox(error))) => return Finding::Broken(error),
            Err((actor, GradeError::NoReward(reason))) => {
                return Finding::Known(Health::Unsound(vec![format!("{actor}: {reason}")]));
            }
            Err((actor, error)) => {
                return Finding::Known(Health::Unsound(vec![format!("{actor}: {error}")]));
            }
        }
    }
    Finding::Known(Health::of(&rounds))
}
