//! What a person sees while a run goes on, and how they stop it.

use crate::output;
use crate::progress::Progress;
use orchestrate_coordinator::{Event, Reporter, Stop};
use orchestrate_handoff::protocol::StepState;
use orchestrate_sandbox::ImageListener;
use orchestrate_types::Outcome;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};

/// Counters of the stage under way.
#[derive(Debug, Default)]
struct Stage {
    title: String,
    in_flight: u64,
    ended: u64,
    planned: u64,
    solved: u64,
    broken: u64,
    kept: u64,
    dropped: u64,
    last_kl: Option<f64>,
    /// An evaluation without training.
    standalone: bool,
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

    /// The end that the coordinator talks to.
    pub(crate) fn reporter(&self) -> Arc<dyn Reporter> {
        let view = self.clone();
        Arc::new(move |event: &Event| view.show(event))
    }

    /// The end that hears of images.
    pub(crate) fn image_listener(&self) -> ImageListener {
        let progress = self.progress.clone();
        ImageListener::new(move |news| progress.line(&news.to_string()))
    }

    /// Removes the moving line.
    pub(crate) fn finish(&self) {
        self.progress.finish();
    }

    fn show(&self, event: &Event) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let stage = &mut *stage;
        match event {
            Event::Started { run, epoch, next_step, steps } => {
                let how = if *epoch > 1 { "continues" } else { "begins" };
                self.progress.line(&format!("run {run} {how} at step {next_step} of {steps}"));
            }
            Event::EvaluationStarted { run, epoch } => {
                stage.standalone = true;
                let how = if *epoch > 1 { "resumes" } else { "starts" };
                self.progress.line(&format!("evaluation {run} {how}"));
            }
            Event::Swept { removed } => {
                self.progress.line(&format!("removed {removed} containers of an earlier start"));
            }
            Event::WeightsLive { version } => {
                tracing::debug!(policy_version = version.0, "weights are live");
            }
            Event::StepSampling { step, groups, group_size } => {
                let kl = stage.last_kl;
                *stage = Stage {
                    title: format!("step {step}/{} rollout", self.steps),
                    planned: u64::from(*groups) * u64::from(*group_size),
                    last_kl: kl,
                    ..Stage::default()
                };
            }
            Event::EvalStarted { round, episodes } => {
                let kl = stage.last_kl;
                let title = if stage.standalone {
                    "evaluation".to_owned()
                } else {
                    format!("evaluation after step {round}")
                };
                *stage = Stage {
                    title,
                    planned: *episodes as u64,
                    last_kl: kl,
                    standalone: stage.standalone,
                    ..Stage::default()
                };
            }
            Event::GroupOpened { group, task_id } => {
                tracing::debug!(group_id = %group, task_id, "group opened");
            }
            Event::AttemptStarted { attempt } => {
                stage.in_flight += 1;
                tracing::debug!(%attempt, "attempt started");
            }
            Event::AttemptEnded { attempt, outcome, turns } => {
                stage.ended(attempt, outcome, *turns);
            }
            Event::EpisodeGivenUp { episode, error } => {
                self.progress
                    .line(&format!("warning: episode {episode} failed in every attempt: {error}"));
            }
            Event::GroupDecided { dropped, .. } => {
                if dropped.is_some() {
                    stage.dropped += 1;
                } else {
                    stage.kept += 1;
                }
            }
            Event::Training { step, state } => stage.training(*step, self.steps, state),
            Event::StepFinished { line } => {
                stage.last_kl = line.get("kl_train_infer").and_then(Value::as_f64);
                self.progress.line(&step_line(line, self.steps));
            }
            Event::StepSkipped { step, reason } => {
                self.progress.line(&format!("step {step}: nothing to train on: {reason}"));
            }
            Event::EvalFinished { line } => self.progress.line(&eval_line(line, stage.standalone)),
            Event::Warning { message } => self.progress.line(&format!("warning: {message}")),
            Event::Draining => {
                self.progress
                    .line("stopping: episodes end at their next turn (Ctrl-C again: at once)");
            }
        }
        self.progress.update(stage.ended, stage.planned.max(stage.ended).max(1), stage.message());
    }
}

impl Stage {
    fn ended(&mut self, attempt: &orchestrate_types::AttemptId, outcome: &Outcome, turns: usize) {
        self.in_flight = self.in_flight.saturating_sub(1);
        match outcome {
            Outcome::Scored { reward } | Outcome::Truncated { reward, .. } => {
                self.ended += 1;
                self.solved += u64::from(*reward > 0.5);
            }
            Outcome::Aborted { .. } => {}
            Outcome::Broken { stage, error } => {
                self.broken += 1;
                tracing::warn!(%attempt, %stage, error, "attempt broken");
            }
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
        self.title = format!("step {step}/{steps} training: {phase}");
    }

    fn message(&self) -> String {
        let mut text = format!("{}  in flight {}", self.title, self.in_flight);
        if self.ended > 0 {
            let rate = 100.0 * self.solved as f64 / self.ended as f64;
            text = format!("{text}  pass {rate:.0}%");
        }
        if self.kept + self.dropped > 0 {
            text = format!("{text}  groups {}+{} dropped", self.kept, self.dropped);
        }
        if self.broken > 0 {
            text = format!("{text}  broken {}", self.broken);
        }
        if let Some(kl) = self.last_kl {
            text = format!("{text}  KL {kl:.1e}");
        }
        text
    }
}

fn number(line: &Value, key: &str) -> f64 {
    line.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

fn step_line(line: &Value, steps: u32) -> String {
    format!(
        "step {:>3}/{steps}  reward {:.3}  solve {:.3}  groups {:.0}+{:.0} dropped  KL {:.2e}  grad {:.3}  \
         rollout {:.1}s  train {:.1}s  sync {:.1}s",
        number(line, "global_step"),
        number(line, "reward_mean"),
        number(line, "solve_rate"),
        number(line, "groups_kept"),
        number(line, "groups_dropped"),
        number(line, "kl_train_infer"),
        number(line, "grad_norm"),
        number(line, "time_rollout_s"),
        number(line, "time_train_s"),
        number(line, "time_sync_s"),
    )
}

fn eval_line(line: &Value, standalone: bool) -> String {
    let title = if standalone {
        "evaluation".to_owned()
    } else {
        format!("evaluation after step {:.0}", number(line, "global_step"))
    };
    format!(
        "{title}: Pass@1 {:.4} ± {:.4} on {:.0} held-out tasks",
        number(line, "eval_pass_at_1"),
        number(line, "eval_pass_at_1_se"),
        number(line, "eval_tasks"),
    )
}

/// Does `work`, which looks at `stop`, while signals are heard.
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

/// Turns the first Ctrl-C (or SIGTERM) into a drain, the second into an end at once.
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
