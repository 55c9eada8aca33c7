//! `orchestrate tasks`: list, show, import, verify.

mod rows;

use crate::args::{SplitArg, TaskSelection, TasksArgs, TasksCommand};
use crate::config::{self, RawConfig, Settings};
use crate::progress::Progress;
use crate::{output, tables, wiring};
use anyhow::Context;
use futures::stream::{self, StreamExt};
use orchestrate_rollout::{GradeError, grade_patch};
use orchestrate_sandbox::{DockerProvider, Owner, Purpose, SandboxProvider, SandboxSpec};
use orchestrate_tasks::{Split, Task, verify::Check};
use orchestrate_types::{AttemptId, EpisodeId, GroupId, RunId};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::process::ExitCode;
use std::time::Duration;

/// Longest life of a sandbox that checks one task.
const SANDBOX_DEADLINE: Duration = Duration::from_mins(10);

/// Runs the command.
pub(crate) async fn run(args: TasksArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        TasksCommand::List { selection, file: None } => list(&selection),
        TasksCommand::List { selection, file: Some(file) } => rows::list(&file, selection.json),
        TasksCommand::Show { id, selection, file: None } => show(&id, &selection),
        TasksCommand::Show { id, selection, file: Some(file) } => {
            rows::show(&file, &id, selection.json)
        }
        TasksCommand::Import { file, json } => rows::import(&file, json),
        TasksCommand::Verify { selection, sample, all } => {
            let (settings, mut tasks) = select(&selection)?;
            if !all && sample > 0 {
                tasks.shuffle(&mut ChaCha8Rng::seed_from_u64(settings.tasks.seed));
                tasks.truncate(sample);
            }
            Box::pin(verify(&settings, tasks, selection.json)).await
        }
    }
}

fn select(selection: &TaskSelection) -> anyhow::Result<(Settings, Vec<Task>)> {
    let mut raw: RawConfig = config::load(&selection.source)?;
    raw.tasks.environment = Some(selection.environment.clone());
    if raw.tasks.held_out.is_none() {
        raw.tasks.held_out = Some(400);
    }
    let settings = raw.check()?;
    let wanted = selection.split.map(|split| match split {
        SplitArg::Train => Split::Train,
        SplitArg::HeldOut => Split::HeldOut,
        SplitArg::HeldOutFamilies => Split::HeldOutFamilies,
    });
    let mut tasks = wiring::all_tasks(&settings);
    tasks.retain(|task| wanted.is_none_or(|split| task.split == split));
    Ok((settings, tasks))
}

fn list(selection: &TaskSelection) -> anyhow::Result<ExitCode> {
    let (_, tasks) = select(selection)?;
    if selection.json {
        for task in &tasks {
            let line =
                serde_json::json!({"id": task.id, "family": task.family, "split": task.split});
            output::data(line);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = tables::table(&["id", "family", "issue"]);
    for task in &tasks {
        let issue = task.problem_statement.lines().next().unwrap_or_default();
        table.add_row([task.id.as_str(), task.family.as_str(), issue]);
    }
    output::data(table);
    Ok(ExitCode::SUCCESS)
}

fn show(id: &str, selection: &TaskSelection) -> anyhow::Result<ExitCode> {
    let (_, tasks) = select(selection)?;
    let task = tasks.iter().find(|task| task.id == id).with_context(|| {
        format!("no task `{id}` among {} tasks (orchestrate tasks list)", tasks.len())
    })?;
    if selection.json {
        output::json(task)?;
        return Ok(ExitCode::SUCCESS);
    }
    print(task);
    Ok(ExitCode::SUCCESS)
}

/// A task for people, with what is hidden from the agent.
fn print(task: &Task) {
    output::data(format!(
        "{} ({}, image {})\n\n{}",
        task.id, task.family, task.image, task.problem_statement
    ));
    for (title, files) in [("given", &task.agent_files), ("hidden", &task.hidden_files)] {
        for file in files {
            output::data(format!("\n--- {title}: {}\n{}", file.path, file.content.trim_end()));
        }
    }
    output::data(format!("\n--- gold patch\n{}", task.gold_patch.trim_end()));
}

async fn verify(settings: &Settings, tasks: Vec<Task>, json: bool) -> anyhow::Result<ExitCode> {
    let provider = DockerProvider::connect(settings.sandbox.clone()).await?;
    let owner = RunId::generate();
    let progress = Progress::new(tasks.len() as u64);
    let total = tasks.len() as u64;
    let checks = stream::iter(tasks.iter().enumerate())
        .map(|(index, task)| check(&provider, settings, owner, index, task))
        .buffer_unordered(settings.sandbox.max_containers);
    let mut checks = std::pin::pin!(checks);
    let (mut done, mut bad) = (0_usize, Vec::new());
    let mut failure = None;
    while let Some((task, result)) = checks.next().await {
        done += 1;
        progress.update(done as u64, total, format!("{} unhealthy", bad.len()));
        match result {
            Ok(check) => {
                let problems = check.problems();
                if !problems.is_empty() {
                    progress.line(&format!("{}: {}", task.id, problems.join("; ")));
                    bad.push(task.id.clone());
                }
            }
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    progress.finish();
    provider.shutdown().await?;
    if let Some(error) = failure {
        return Err(error.into());
    }
    if json {
        output::json(&serde_json::json!({"checked": done, "unhealthy": bad}))?;
    } else {
        output::data(format!(
            "{done} tasks checked in real sandboxes: gold patch = 1.0 and no patch = 0.0 for {}",
            done - bad.len()
        ));
    }
    anyhow::ensure!(bad.is_empty(), "{} of {done} tasks are unhealthy", bad.len());
    Ok(ExitCode::SUCCESS)
}

async fn check<'a>(
    provider: &DockerProvider,
    settings: &Settings,
    run: RunId,
    index: usize,
    task: &'a Task,
) -> (&'a Task, Result<Check, GradeError>) {
    let group = GroupId::Eval { round: 0, index: u32::try_from(index).unwrap_or(u32::MAX) };
    let spec = |member| SandboxSpec {
        image: task.image.clone(),
        purpose: Purpose::Grader,
        owner: Owner {
            run,
            epoch: 0,
            attempt: AttemptId { episode: EpisodeId { group, member }, attempt: 1 },
        },
        workdir: task.workdir.clone(),
        limits: wiring::limits(settings),
        deadline: SANDBOX_DEADLINE,
        reusable: true,
    };
    let judge = settings.reward.compat.judge();
    let both = async {
        Ok(Check {
            gold: grade_patch(provider, &spec(0), task, &task.gold_patch, judge).await?,
            noop: grade_patch(provider, &spec(1), task, "", judge).await?,
        })
    };
    (task, both.await)
}
