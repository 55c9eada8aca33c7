//! The live view of a run in progress, and the signals that stop it.

use crate::output;
use crate::progress::Progress;
use orchestrate_coordinator::{Event, Reporter, StageBefore, Stop};
use orchestrate_handoff::protocol::StepState;
use orchestrate_metrics::{EvalLine, StepLine, is_solved};
use orchestrate_sandbox::ImageListener;
use orchestrate_store::GroupState;
use orchestrate_types::{AttemptId, GroupId, Outcome, RunId};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Counters of the current stage, as the status of the run has them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageCounts {
    /// The stage in words.
    pub(crate) title: String,
    /// Attempts under way, including those of other stages.
    pub(crate) in_flight: u64,
    /// Episodes with an outcome, and those that the stage will have, as far as known.
    pub(crate) ended: u64,
    pub(crate) planned: u64,
    pub(crate) solved: u64,
    /// Attempts that the infrastructure broke.
    pub(crate) broken: u64,
    /// Groups that are trained on, and those without a gradient.
    pub(crate) kept: u64,
    pub(crate) dropped: u64,
}

/// The current stage.
#[derive(Debug, Default)]
struct Stage {
    counts: StageCounts,
    /// The groups that `counts` is about.
    scope: Option<Scope>,
    last_kl: Option<f64>,
    /// An evaluation without training.
    standalone: bool,
}

/// The groups of a stage. Stages overlap, so events of other groups arrive, too.
#[derive(Debug)]
enum Scope {
    Step { step: u32, wanted: u32, group_size: u16, opened: HashSet<GroupId> },
    Evaluation { round: u32 },
}

/// The live view of one run.
#[derive(Clone)]
pub(crate) struct View {
    progress: Progress,
    stage: Arc<Mutex<Stage>>,
    steps: u32,
}

impl View {
    /// A view of a run of `steps` global steps.
    pub(crate) fn new(steps: u32) -> Self {
        Self { progress: Progress::new(1), stage: Arc::default(), steps }
    }

    /// Receives the events of the run.
    pub(crate) fn reporter(&self) -> Arc<dyn Reporter> {
        let view = self.clone();
        Arc::new(move |event: &Event| view.show(event))
    }

    /// The counters of the current stage.
    pub(crate) fn counts(&self) -> StageCounts {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner).counts.clone()
    }

    /// Receives the progress of image pulls and builds.
    pub(crate) fn image_listener(&self) -> ImageListener {
        let progress = self.progress.clone();
        ImageListener::new(move |event| progress.line(&event.to_string()))
    }

    /// Removes the progress line.
    pub(crate) fn finish(&self) {
        self.progress.finish();
    }

    fn show(&self, event: &Event) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let stage = &mut *stage;
        match event {
            Event::Started { run, epoch, next_step, steps } => {
                self.progress.line(&start_text(run, *epoch, *next_step, *steps));
            }
            Event::EvaluationStarted { run, epoch } => {
                stage.standalone = true;
                let how = if *epoch > 1 { "resumes" } else { "starts" };
                self.progress.line(&format!("evaluation {run} {how}"));
            }
            Event::Swept { removed: 0 } => {}
            Event::Swept { removed } => {
                let containers = output::counted(*removed, "leftover container");
                self.progress.line(&format!("removed {containers}"));
            }
            Event::WeightsLive { version } => {
                tracing::debug!(policy_version = version.0, "weights are live");
            }
            Event::StepSampling { step, groups, group_size, before } => {
                let scope = Scope::Step {
                    step: *step,
                    wanted: *groups,
                    group_size: *group_size,
                    opened: before.groups.iter().map(|(group, _)| *group).collect(),
                };
                stage.begin(format!("step {step}/{} rollout", self.steps), 0, scope, before);
            }
            Event::EvalStarted { round, episodes, before } => {
                let title = if stage.standalone {
                    "evaluation".to_owned()
                } else {
                    format!("evaluation after step {round}")
                };
                let scope = Scope::Evaluation { round: *round };
                stage.begin(title, *episodes as u64, scope, before);
            }
            Event::GroupOpened { step, group, task_id } => {
                stage.opened(*step, *group);
                tracing::debug!(group_id = %group, task_id, "group opened");
            }
            Event::AttemptStarted { attempt } => {
                stage.counts.in_flight += 1;
                tracing::debug!(%attempt, "attempt started");
            }
            Event::AttemptEnded { attempt, outcome, turns } => {
                stage.ended(attempt, outcome, *turns);
            }
            Event::EpisodeGivenUp { episode, error } => {
                self.progress
                    .line(&format!("warning: episode {episode} failed in every attempt: {error}"));
            }
            Event::GroupDecided { group, dropped } => {
                if stage.includes(*group) {
                    let state =
                        if dropped.is_some() { GroupState::Dropped } else { GroupState::Kept };
                    stage.counts.decided(state);
                }
            }
            Event::Training { step, state } => stage.training(*step, self.steps, state),
            Event::StepFinished { line } => {
                stage.last_kl = line.kl_train_infer;
                self.progress.line(&step_text(line, self.steps));
            }
            Event::StepSkipped { step, reason } => {
                self.progress.line(&format!("step {step}: nothing to train on: {reason}"));
            }
            Event::EvalFinished { line } => self.progress.line(&eval_text(line, stage.standalone)),
            Event::Warning { message } => self.progress.line(&format!("warning: {message}")),
            Event::Draining => {
                self.progress
                    .line("stopping: episodes end after their current turn (Ctrl-C again: now)");
            }
        }
        let StageCounts { ended, planned, .. } = stage.counts;
        self.progress.update(ended, planned.max(ended).max(1), &stage.message());
    }
}

impl StageCounts {
    fn ended(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Scored { reward } | Outcome::Truncated { reward, .. } => {
                self.ended += 1;
                self.solved += u64::from(is_solved(*reward));
            }
            Outcome::Aborted { .. } => {}
            // The pool warns of it.
            Outcome::Broken { .. } => self.broken += 1,
        }
    }

    fn decided(&mut self, state: GroupState) {
        match state {
            GroupState::Kept => self.kept += 1,
            GroupState::Dropped => self.dropped += 1,
            GroupState::Filling => {}
        }
    }
}

impl Stage {
    /// Begins to count a stage, with what was there before.
    fn begin(&mut self, title: String, planned: u64, scope: Scope, before: &StageBefore) {
        let in_flight = self.counts.in_flight;
        self.counts = StageCounts { title, in_flight, planned, ..StageCounts::default() };
        before.outcomes.iter().for_each(|outcome| self.counts.ended(outcome));
        before.groups.iter().for_each(|(_, state)| self.counts.decided(*state));
        self.scope = Some(scope);
        self.plan();
    }

    /// Counts the episodes of a step: a dropped group is replaced, so there may be more than it wants.
    fn plan(&mut self) {
        if let Some(Scope::Step { wanted, group_size, opened, .. }) = &self.scope {
            let groups = u64::from(*wanted).max(opened.len() as u64);
            self.counts.planned = groups * u64::from(*group_size);
        }
    }

    fn opened(&mut self, of: u32, group: GroupId) {
        if let Some(Scope::Step { step, opened, .. }) = &mut self.scope
            && *step == of
        {
            opened.insert(group);
            self.plan();
        }
    }

    fn includes(&self, group: GroupId) -> bool {
        match (&self.scope, group) {
            (Some(Scope::Step { opened, .. }), group) => opened.contains(&group),
            (Some(Scope::Evaluation { round }), GroupId::Eval { round: of, .. }) => *round == of,
            (Some(Scope::Evaluation { .. }), GroupId::Train { .. }) | (None, _) => false,
        }
    }

    fn ended(&mut self, attempt: &AttemptId, outcome: &Outcome, turns: usize) {
        self.counts.in_flight = self.counts.in_flight.saturating_sub(1);
        if self.includes(attempt.episode.group) {
            self.counts.ended(outcome);
        }
        tracing::debug!(%attempt, outcome = outcome.name(), turns, "attempt ended");
    }

    fn training(&mut self, step: u32, steps: u32, state: &StepState) {
        let phase = match state {
            StepState::Queued => "queued".to_owned(),
            StepState::Running { phase, progress } => format!("{phase} {:.0}%", progress * 100.0),
            StepState::Done { .. } => "done".to_owned(),
            StepState::Failed { error } => format!("failed: {error}"),
        };
        self.counts.title = format!("step {step}/{steps} training: {phase}");
    }

    fn message(&self) -> String {
        let counts = &self.counts;
        let mut text = format!("{}  in flight {}", counts.title, counts.in_flight);
        if counts.ended > 0 {
            let rate = 100.0 * counts.solved as f64 / counts.ended as f64;
            text = format!("{text}  pass {rate:.0}%");
        }
        if counts.kept + counts.dropped > 0 {
            text = format!("{text}  groups {}+{} dropped", counts.kept, counts.dropped);
        }
        if counts.broken > 0 {
            text = format!("{text}  broken {}", counts.broken);
        }
        if let Some(kl) = self.last_kl {
            text = format!("{text}  KL {kl:.1e}");
        }
        text
    }
}

fn start_text(run: &RunId, epoch: i64, next_step: u32, steps: u32) -> String {
    if epoch <= 1 {
        format!("run {run} starts: {}", output::counted(steps, "step"))
    } else if next_step <= steps {
        format!("run {run} resumes at step {next_step} of {steps}")
    } else {
        format!("run {run} resumes after step {steps} of {steps}")
    }
}

/// A number as `write` formats it; a dash if there is no number.
fn cell(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), write)
}

fn step_text(line: &StepLine, steps: u32) -> String {
    let three = |value| cell(value, |v| format!("{v:.3}"));
    let seconds = |value| cell(value, |v| format!("{v:.1}s"));
    format!(
        "step {:>3}/{steps}  reward {}  solve {}  groups {}+{} dropped  KL {}  grad {}  rollout {}  \
         train {}  sync {}",
        line.global_step,
        three(line.reward_mean),
        three(line.solve_rate),
        line.groups_kept.unwrap_or(0),
        line.groups_dropped.unwrap_or(0),
        cell(line.kl_train_infer, |v| format!("{v:.2e}")),
        three(line.grad_norm),
        seconds(line.time_rollout_s),
        seconds(line.time_train_s),
        seconds(line.time_sync_s),
    )
}

fn eval_text(line: &EvalLine, standalone: bool) -> String {
    let title = if standalone {
        "evaluation".to_owned()
    } else {
        format!("evaluation after step {}", line.global_step)
    };
    let four = |value| cell(value, |v| format!("{v:.4}"));
    let left_out = match (line.eval_tasks, line.counted_tasks()) {
        (Some(all), Some(counted)) if all > counted => {
            format!(" ({} more without a trusted outcome)", all - counted)
        }
        _ => String::new(),
    };
    format!(
        "{title}: Pass@1 {} ± {} on {}{left_out}",
        four(line.eval_pass_at_1),
        four(line.eval_pass_at_1_se),
        output::counted(line.counted_tasks().unwrap_or(0), "held-out task"),
    )
}

/// Does `work`, which observes `stop`, and turns signals into stop requests meanwhile.
pub(crate) async fn until_stopped<T>(
    stop: Stop,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::select! {
        biased;
        done = work => done,
        () = watch_signals(stop) => anyhow::bail!("the signal handler ended"),
    }
}

/// The first Ctrl-C or SIGTERM requests a drain, the second an immediate end.
async fn watch_signals(stop: Stop) {
    let mut terminate =
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(signal) => signal,
            Err(error) => {
                output::say(format!("warning: cannot listen for SIGTERM: {error}"));
                return std::future::pending().await;
            }
        };
    loop {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        if stop.drain.is_cancelled() {
            stop.now.cancel();
        }
        stop.drain.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_types::EpisodeId;

    #[test]
    fn resumed_run_names_a_step_that_exists() {
        let run = RunId::generate();
        let text = |epoch, next_step| {
            start_text(&run, epoch, next_step, 12).replace(&run.to_string(), "ID")
        };
        assert_eq!(text(1, 1), "run ID starts: 12 steps");
        assert_eq!(text(2, 4), "run ID resumes at step 4 of 12");
        assert_eq!(text(2, 13), "run ID resumes after step 12 of 12");
    }

    /// Counts as the status has them: ended, planned, in flight, solved, broken, kept, dropped.
    fn counts(view: &View) -> [u64; 7] {
        let c = view.counts();
        [c.ended, c.planned, c.in_flight, c.solved, c.broken, c.kept, c.dropped]
    }

    fn attempt(group: u32, member: u16) -> AttemptId {
        let episode = EpisodeId { group: GroupId::Train { seq: group }, member };
        AttemptId { episode, attempt: 1 }
    }

    fn broken() -> Outcome {
        Outcome::Broken { stage: orchestrate_types::Stage::Exec, error: "gone".to_owned() }
    }

    fn sampling(step: u32, before: StageBefore) -> Event {
        Event::StepSampling { step, groups: 2, group_size: 2, before }
    }

    fn opened(step: u32, seq: u32) -> Event {
        let group = GroupId::Train { seq };
        Event::GroupOpened { step, group, task_id: "task".to_owned() }
    }

    fn ended(attempt: AttemptId, reward: f64) -> Event {
        Event::AttemptEnded { attempt, outcome: Outcome::Scored { reward }, turns: 1 }
    }

    #[test]
    fn a_resumed_stage_counts_what_had_ended_before_and_nothing_twice() {
        let view = View::new(3);
        let group = |seq| GroupId::Train { seq };
        let before = StageBefore {
            groups: vec![(group(0), GroupState::Dropped), (group(1), GroupState::Filling)],
            outcomes: vec![
                Outcome::Scored { reward: 1.0 },
                Outcome::Scored { reward: 1.0 },
                broken(),
                Outcome::Scored { reward: 0.0 },
            ],
        };
        view.show(&sampling(1, before));
        assert_eq!(counts(&view), [3, 4, 0, 2, 1, 0, 1]);
        view.show(&opened(1, 2));
        assert_eq!(counts(&view), [3, 6, 0, 2, 1, 0, 1]);
        view.show(&Event::AttemptStarted { attempt: attempt(1, 1) });
        assert_eq!(counts(&view), [3, 6, 1, 2, 1, 0, 1]);
        view.show(&ended(attempt(1, 1), 1.0));
        view.show(&Event::GroupDecided { group: group(1), dropped: None });
        assert_eq!(counts(&view), [4, 6, 0, 3, 1, 1, 1]);
    }

    #[test]
    fn stages_that_overlap_are_not_mixed() {
        let view = View::new(3);
        view.show(&sampling(1, StageBefore::default()));
        view.show(&opened(1, 0));
        view.show(&Event::AttemptStarted { attempt: attempt(0, 0) });
        view.show(&sampling(2, StageBefore::default()));
        view.show(&opened(2, 1));
        view.show(&opened(1, 2));
        view.show(&Event::AttemptStarted { attempt: attempt(1, 0) });
        assert_eq!(counts(&view), [0, 4, 2, 0, 0, 0, 0]);
        view.show(&ended(attempt(0, 0), 1.0));
        view.show(&Event::GroupDecided { group: GroupId::Train { seq: 0 }, dropped: None });
        assert_eq!(counts(&view), [0, 4, 1, 0, 0, 0, 0]);
        view.show(&ended(attempt(1, 0), 1.0));
        assert_eq!(counts(&view), [1, 4, 0, 1, 0, 0, 0]);
        let before = StageBefore {
            groups: vec![(GroupId::Eval { round: 1, index: 0 }, GroupState::Kept)],
            outcomes: vec![Outcome::Scored { reward: 0.5 }],
        };
        view.show(&Event::EvalStarted { round: 1, episodes: 9, before });
        view.show(&ended(attempt(1, 1), 1.0));
        assert_eq!(counts(&view), [1, 9, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn skipped_step_has_dashes_for_what_was_not_measured() {
        let line = StepLine { global_step: 3, reward_mean: Some(1.0), ..StepLine::default() };
        let text = step_text(&line, 12);
        assert!(text.contains("reward 1.000") && text.contains("KL –"), "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }

    #[test]
    fn tasks_without_a_trusted_outcome_are_not_counted() {
        let line = EvalLine {
            eval_pass_at_1: Some(0.5),
            eval_pass_at_1_se: Some(0.1),
            eval_tasks: Some(10),
            eval_tasks_trusted: Some(8),
            ..EvalLine::default()
        };
        let text = eval_text(&line, true);
        let expected = "evaluation: Pass@1 0.5000 ± 0.1000 on 8 held-out tasks (2 more without a \
                        trusted outcome)";
        assert_eq!(text, expected);
    }
}
