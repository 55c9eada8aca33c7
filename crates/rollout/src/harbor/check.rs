//! Checks a task: grades its solution, and grades doing nothing.

use super::container::{Prepared, entries, prepare, prepare_step, shell};
use super::verifier::{GradedStep, NoReward, grade_in_agents, grade_separately};
use crate::grading::{GradeError, GradedChange};
use crate::sandboxes::close;
use orchestrate_sandbox::{
    FileEntry, Purpose, Sandbox, SandboxError, SandboxProvider, SandboxSpec,
};
use orchestrate_tasks::harbor::{HarborRow, HarborStep, RewardProblem, RewardStrategy, seconds};
use orchestrate_tasks::{Origin, Task};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time limit of a solution whose task has none for the agent.
const SOLUTION_TIMEOUT_S: f64 = 3600.0;

/// The actor whose work is graded in a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HarborActor {
    /// Does nothing, as Harbor's agent `nop`.
    Nothing,
    /// Runs the task's own solution, as Harbor's agent `oracle`.
    Solution,
}

/// Runs all steps of a Harbor task with `actor` and grades them, in new containers with `spec`'s
/// limits and owner.
///
/// # Errors
/// [`GradeError::NotApplied`] if the task is of another family, or has no solution to run;
/// [`GradeError::NoReward`] if its tests give no reward, and the actor is not the reason;
/// [`GradeError::Sandbox`] if a sandbox fails.
pub async fn check_harbor(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    task: &Task,
    actor: HarborActor,
) -> Result<GradedChange, GradeError> {
    let Origin::Harbor(row) = &task.origin else {
        return Err(GradeError::NotApplied("it is not a Harbor task".to_owned()));
    };
    if actor == HarborActor::Solution && row.steps.iter().any(|step| step.solution.is_empty()) {
        return Err(GradeError::NotApplied("the task has no solution/solve.sh".to_owned()));
    }
    let opened = SandboxSpec { purpose: Purpose::Agent, reusable: false, ..spec.clone() };
    let mut sandbox = Some(provider.open(&opened).await?);
    let graded = run_steps(provider, spec, &mut sandbox, row, actor).await;
    if let Some(sandbox) = sandbox.take() {
        close(sandbox).await;
    }
    let steps = graded?;
    let rewards = joined(row, &steps);
    let is_separate = steps.iter().all(|step| step.is_separate);
    let all = GradedStep {
        rewards,
        is_separate,
        log: steps.iter().flat_map(|step| step.log.iter().copied()).collect(),
        elapsed: steps.iter().map(|step| step.elapsed).sum::<Duration>(),
    };
    all.graded()
}

async fn run_steps(
    provider: &dyn SandboxProvider,
    spec: &SandboxSpec,
    sandbox: &mut Option<Box<dyn Sandbox>>,
    row: &HarborRow,
    actor: HarborActor,
) -> Result<Vec<GradedStep>, SandboxError> {
    let mut graded: Vec<GradedStep> = Vec::new();
    let mut prepared = Prepared::default();
    for (at, step) in row.steps.iter().enumerate() {
        let Some(open) = sandbox.as_deref_mut() else { break };
        if at == 0 {
            prepared = prepare(open, row).await?;
        }
        if let Err(problem) = prepare_step(open, row, step).await? {
            graded.push(GradedStep::failed(problem));
            break;
        }
        if actor == HarborActor::Solution {
            solve(open, row, step).await?;
        }
        let is_last = at + 1 == row.steps.len();
        let result = if step.verifier.separate.is_some() {
            grade_separately(provider, spec, sandbox, row, step, !is_last).await
        } else {
            grade_in_agents(open, row, step, prepared).await
        };
        // As for an agent: a container that the commands damaged is rewarded 0.
        let result = match result {
            Err(error) if error.is_agents_doing() => GradedStep::failed(error.to_string()),
            result => result?,
        };
        let continues = continues(step, &result);
        graded.push(result);
        if !continues {
            break;
        }
    }
    Ok(graded)
}

/// Runs a step's solution as Harbor's oracle does. Its exit code does not matter.
async fn solve(
    sandbox: &mut dyn Sandbox,
    row: &HarborRow,
    step: &HarborStep,
) -> Result<(), SandboxError> {
    sandbox.set_root("/").await?;
    let mut files: Vec<FileEntry> = entries(&step.solution, "solution/").collect();
    for script in files.iter_mut().filter(|file| file.path == "solution/solve.sh") {
        script.mode |= 0o111;
    }
    sandbox.write_files(&files).await?;
    let limit = seconds(step.agent_timeout_s.unwrap_or(SOLUTION_TIMEOUT_S));
    let script = "(/solution/solve.sh) > /logs/agent/oracle.txt 2>&1";
    let mut command = shell(row, script, limit);
    command.env.push(("DEBIAN_FRONTEND".to_owned(), "noninteractive".to_owned()));
    command.env.extend(row.solution_env.iter().map(|(k, v)| (k.clone(), v.clone())));
    let ended = sandbox.exec(&command).await?;
    if !ended.success() {
        tracing::info!(task = row.name, exit = ?ended.exit, "the solution ended with an error");
    }
    Ok(())
}

/// Whether the task continues with the next step.
fn continues(step: &HarborStep, graded: &GradedStep) -> bool {
    let Ok(rewards) = &graded.rewards else { return false };
    let is_met = |(name, least): (&String, &f64)| {
        rewards.get(name).copied().unwrap_or(f64::NEG_INFINITY) >= *least
    };
    step.min_reward.iter().all(is_met)
}

/// The task's rewards, computed from those of its steps.
fn joined(row: &HarborRow, steps: &[GradedStep]) -> Result<BTreeMap<String, f64>, NoReward> {
    // A mean would hide it.
    let out_of_range = steps.iter().filter_map(|step| step.rewards.as_ref().err());
    let mut out_of_range = out_of_range
        .filter(|problem| matches!(problem, NoReward::Unusable(RewardProblem::OutOfRange(_))));
    if let Some(problem) = out_of_range.next() {
        return Err(problem.clone());
    }
    let last = || match steps.last() {
        Some(step) => step.rewards.clone(),
        None => Err(NoReward::NotRun("no step was run".to_owned())),
    };
    match row.strategy {
        None | Some(RewardStrategy::Final) => last(),
        Some(RewardStrategy::Mean) => {
            let graded: Vec<_> =
                steps.iter().filter_map(|step| step.rewards.as_ref().ok()).collect();
            if graded.is_empty() {
                return last();
            }
            let names: BTreeSet<&String> =
                graded.iter().flat_map(|rewards| rewards.keys()).collect();
            let mean = |name: &String| {
                let sum: f64 = graded.iter().filter_map(|rewards| rewards.get(name)).sum();
                sum / graded.len() as f64
            };
            Ok(names.into_iter().map(|name| (name.clone(), mean(name))).collect())
        }
    }
}
