//! `orchestrate eval`: one evaluation of one checkpoint, with no training around it.

use super::run;
use crate::args::EvalArgs;
use crate::config::{self, ConfigError, Sections, Settings};
use crate::exit::STOPPED;
use crate::wiring::{self, Training};
use crate::{live, output, tables, task_source};
use camino::{Utf8Path, Utf8PathBuf};
use comfy_table::Table;
use orchestrate_coordinator::{RunEnd, RunReport, StepProgress, Stop, TrainerSink};
use orchestrate_engine::EngineKind;
use orchestrate_handoff::protocol::{PROTOCOL_VERSION, StepRequest, StepResult, TrainerInfo};
use orchestrate_handoff::{TrainerError, TrainerErrorKind};
use orchestrate_store::{Reader, Store};
use orchestrate_types::{ModelShape, Outcome, PolicyVersion};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;
use std::sync::Arc;

/// Share of episodes that may be broken before a number means nothing.
const MOST_BROKEN: f64 = 0.01;

/// Runs the command.
pub(crate) async fn run(args: EvalArgs) -> anyhow::Result<ExitCode> {
    let folder = wiring::absolute(&args.run_dir)?;
    let (mut settings, store) = if args.resume {
        run::resume(&folder, &args.source).await?
    } else {
        create(&args, &folder).await?
    };
    // Only the evaluation before the first step, and no step.
    settings.run.steps = 0;
    let plan = &settings.engine;
    let checkpoint = match &plan.served_model {
        Some(name) => name.into(),
        None => wiring::absolute(&plan.model)?,
    };
    let policy = FixedPolicy { model: wiring::shape(plan, &checkpoint)?, checkpoint };
    let stop = Stop::default();
    let training = Training::Fixed(Arc::new(policy));
    let driven = Box::pin(run::drive(&settings, &folder, store, training, stop.clone()));
    let report = match live::until_stopped(stop, driven).await? {
        RunEnd::Finished(report) => report,
        RunEnd::Stopped(_) => {
            output::say(format!(
                "stopped; go on with: orchestrate eval --run-dir {folder} --resume"
            ));
            return Ok(ExitCode::from(STOPPED));
        }
    };
    let sums = sums(&settings, &folder).await?;
    if args.json {
        output::json(&Evaluation { report: &report, repositories: &sums })?;
    } else {
        output::data(table(&sums));
    }
    let (broken, episodes) =
        sums.values().fold((0, 0), |(broken, all), sum| (broken + sum.broken, all + sum.episodes));
    anyhow::ensure!(
        args.allow_broken || broken as f64 <= MOST_BROKEN * episodes as f64,
        "{broken} of {episodes} episodes are broken for reasons of ours: what is left is no \
         measurement of the policy; `orchestrate show {folder}` says why, --allow-broken takes it \
         as it is"
    );
    if !args.json {
        output::data(tables::final_table(&report));
    }
    output::say(format!("report: {folder}/report.html"));
    Ok(ExitCode::SUCCESS)
}

/// Records the plan of a new evaluation.
async fn create(args: &EvalArgs, folder: &Utf8Path) -> anyhow::Result<(Settings, Store)> {
    let mut raw: Sections = config::load(&args.source)?;
    if let Some(checkpoint) = &args.checkpoint {
        if raw.check()?.engine.kind == EngineKind::Openai {
            let error = "a chat server has its own weights; leave it out".to_owned();
            anyhow::bail!(ConfigError::Layer { name: "--checkpoint".into(), error });
        }
        raw.engine.model = Some(wiring::absolute(checkpoint)?.into_string());
    }
    raw.run.steps = Some(1);
    raw.run.eval_every = Some(1);
    run::create_from(folder, &raw).await
}

/// What is printed as JSON.
#[derive(Debug, Serialize)]
struct Evaluation<'a> {
    #[serde(flatten)]
    report: &'a RunReport,
    repositories: &'a BTreeMap<String, Sum>,
}

/// What an evaluation says about one repository or family.
#[derive(Debug, Default, Serialize)]
struct Sum {
    tasks: usize,
    episodes: usize,
    solved: usize,
    broken: usize,
}

/// Sums by repository (of generated tasks: family), over the newest evaluation.
async fn sums(settings: &Settings, folder: &Utf8Path) -> anyhow::Result<BTreeMap<String, Sum>> {
    let tasks = task_source::task_set(settings)?;
    let held_out = tasks.held_out.iter().chain(&tasks.held_out_families);
    let family: HashMap<&str, &str> =
        held_out.map(|task| (task.id.as_str(), task.family.as_str())).collect();
    let reader = Reader::open(folder).await?;
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    let round = reader.evals().await?.last().map_or(0, |eval| eval.round);
    for group in reader.groups_of_eval(round).await? {
        let name = family.get(group.task_id.as_str()).copied().unwrap_or("unknown");
        let sum = sums.entry(name.to_owned()).or_default();
        let (mut trusted, mut solved) = (0, 0);
        for attempt in reader.sealed_of_group(group.id).await? {
            if let Some(Outcome::Scored { reward } | Outcome::Truncated { reward, .. }) =
                attempt.outcome
            {
                trusted += 1;
                solved += usize::from(reward > 0.5);
            }
        }
        sum.tasks += 1;
        sum.episodes += usize::from(group.size);
        sum.solved += solved;
        sum.broken += usize::from(group.size) - trusted;
    }
    Ok(sums)
}

fn table(sums: &BTreeMap<String, Sum>) -> Table {
    let mut table = tables::table(&["repository", "tasks", "solved", "of episodes", "broken"]);
    for (name, sum) in sums {
        let counts = [sum.tasks, sum.solved, sum.episodes, sum.broken].map(|n| n.to_string());
        table.add_row([&[name.clone()][..], &counts].concat());
    }
    table
}

/// A policy that nobody trains.
#[derive(Debug)]
struct FixedPolicy {
    /// Its folder, or its name where nothing but that is known.
    checkpoint: Utf8PathBuf,
    model: ModelShape,
}

#[async_trait::async_trait]
impl TrainerSink for FixedPolicy {
    async fn info(&self) -> Result<TrainerInfo, TrainerError> {
        Ok(TrainerInfo {
            protocol_version: PROTOCOL_VERSION,
            trainer: "none (evaluation only)".into(),
            model: self.model.clone(),
            algorithms: vec!["grpo".into()],
            policy_version: PolicyVersion(0),
            lineage: 0,
            last_step_id: None,
            checkpoint: self.checkpoint.clone(),
            world_size: 0,
            devices: vec![],
        })
    }

    async fn apply(
        &self,
        request: &StepRequest,
        _progress: &StepProgress,
    ) -> Result<StepResult, TrainerError> {
        let kind = TrainerErrorKind::StepFailed {
            step_id: request.step_id.clone(),
            error: "an evaluation has no trainer".into(),
        };
        Err(TrainerError { trainer: self.checkpoint.to_string(), call: "apply", kind })
    }
}
