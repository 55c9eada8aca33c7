//! An external agent: a worker on any machine takes the episode from the gateway, runs it, and
//! returns the reward.
//!
//! Its turns are recorded ([`crate::turn_journal`]), so that the attempt is continued after a kill.
//!
//! The outcome depends on the cause of the end. A dead worker, a failure of the environment, a refused
//! request after which it sent no better one, and a failure of the engine break the attempt, which is
//! retried. Once the policy has replied, a
//! failure that the worker attributes to the policy, and an episode that takes too long, are the
//! policy's result with reward 0, so that neither earns another attempt. Before its first reply the
//! policy cannot be the cause, so every failure breaks the attempt.

use super::config::ExternalWorkers;
use super::sampler::{ConversationSampler, MODEL, PLACES};
use crate::api::EpisodeRequest;
use crate::attempt::{Attempt, Rewarded};
use crate::conversation::{Conversation, EndOnDrop, FinishedConversation};
use crate::failure::{failed, stopped};
use crate::machine::EpisodeLimits;
use crate::offload;
use crate::sequence::EpisodeContext;
use crate::turn_journal::{ResumedJournal, TakenRecord, TurnJournalError};
use orchestrate_gateway::{
    FailureKind, LeaseRecord, Offer, OfferEnd, OfferedAttempt, Offers, RestoredLease, Sampler,
};
use orchestrate_tasks::{Origin, Task};
use orchestrate_types::{Limit, Outcome, Stage};
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

impl Attempt {
    /// Offers the episode, and waits until a worker has returned it.
    ///
    /// # Errors
    /// The outcome of an episode without a reward.
    #[tracing::instrument(name = "external", skip_all)]
    pub(crate) async fn run_external(
        &mut self,
        external: &ExternalWorkers,
        limits: EpisodeLimits,
    ) -> Result<Rewarded, Outcome> {
        let mut unfinished = external.journals.take_unfinished(self.context.request.attempt);
        loop {
            let offered = Instant::now();
            let (mut offer, conversation) = match unfinished.take() {
                Some(lease) => self.restored(external, limits, lease).await?,
                None => self.taken(external, limits).await?,
            };
            let _end = EndOnDrop(Arc::clone(&conversation));
            self.timings.setup_s += offered.elapsed().as_secs_f64();
            let started = Instant::now();
            let stop = self.context.stop.clone();
            let end = tokio::select! {
                biased;
                end = offer.ended() => Some(end),
                () = stop.cancelled() => None,
                () = engine_failure(&conversation) => None,
            };
            drop(offer);
            let finished = conversation.finish();
            self.timings.exec_s += started.elapsed().as_secs_f64();
            self.timings.generate_s += finished.generate_s;
            let is_untouched = finished.branches.is_empty() && finished.failure.is_none();
            if is_untouched && matches!(end, Some(OfferEnd::Abandoned { .. })) {
                continue;
            }
            let end = self.end_of(end, &finished);
            self.finished = finished;
            return end;
        }
    }

    /// Offers the episode until a worker takes it.
    async fn taken(
        &self,
        external: &ExternalWorkers,
        limits: EpisodeLimits,
    ) -> Result<(Offer, Arc<Conversation>), Outcome> {
        let (began, conversation) = oneshot::channel();
        let offer = external.offers.offer(self.offered_attempt(external, limits, began));
        let stop = self.context.stop.clone();
        let conversation = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(stopped()),
            begun = conversation => begun,
        };
        match conversation {
            Ok(Ok(conversation)) => Ok((offer, conversation)),
            Ok(Err(error)) => Err(failed(Stage::Setup, error)),
            Err(_) => Err(failed(Stage::Setup, "the offer was lost")),
        }
    }

    /// Continues the episode that a worker took from an earlier process.
    async fn restored(
        &self,
        external: &ExternalWorkers,
        limits: EpisodeLimits,
        lease: LeaseRecord,
    ) -> Result<(Offer, Arc<Conversation>), Outcome> {
        // Requests wait until it is restored, or until it is known that it never will be.
        let _settled = ForgetOnDrop { offers: &external.offers, lease: lease.clone() };
        let mut context = self.context.clone();
        let EpisodeRequest { attempt, .. } = context.request;
        let problem = |error: &dyn std::fmt::Display| failed(Stage::Setup, error);
        let (journals, shape) =
            (Arc::clone(&external.journals), self.context.engine.shape().clone());
        let read = offload::run(move || journals.resume(attempt, &shape)).await;
        let resumed = read.map_err(|error| problem(&error))?.map_err(|error| problem(&error))?;
        let ResumedJournal { journal, taken, used, restarts, records } = resumed;
        if taken.settings != settings_of(&context, limits) {
            let what = "the episode began with other settings, so it cannot be continued";
            return Err(failed(Stage::Setup, what));
        }
        context.request.policy_version = taken.policy_version;
        context.restarts = restarts;
        let time = context.settings.episode_timeout.0;
        context.start_clock(time.saturating_sub(used));
        let conversation = Arc::new(Conversation::new(context, limits));
        if let Err(error) = conversation.replay(records).await {
            conversation.finish();
            return Err(failed(Stage::Setup, format!("the turns of {attempt}: {error}")));
        }
        conversation.record_in(journal);
        let time = time.saturating_add(external.grace);
        let offer = external.offers.restore(RestoredLease {
            attempt,
            record: lease,
            time,
            left: time.saturating_sub(used),
            sampler: sampler(Arc::clone(&conversation), self.context.settings.show_tools),
        });
        Ok((offer, conversation))
    }

    fn offered_attempt(
        &self,
        external: &ExternalWorkers,
        limits: EpisodeLimits,
        began: oneshot::Sender<Result<Arc<Conversation>, TurnJournalError>>,
    ) -> OfferedAttempt {
        let mut context = self.context.clone();
        let time = context.settings.episode_timeout.0;
        let task = shown(&context.request.task, &self.prompt());
        let journals = Arc::clone(&external.journals);
        let begin = move |lease: &LeaseRecord| -> Option<Arc<dyn Sampler>> {
            context.start_clock(time);
            let EpisodeRequest { attempt, policy_version, .. } = context.request;
            let settings = settings_of(&context, limits);
            let taken = TakenRecord::new(attempt, lease.clone(), policy_version, settings);
            let journal = match journals.create(taken) {
                Ok(journal) => journal,
                Err(error) => {
                    let _ = began.send(Err(error));
                    return None;
                }
            };
            let show_tools = context.settings.show_tools;
            let conversation = Arc::new(Conversation::new(context, limits));
            conversation.record_in(journal);
            // Fails only if the attempt is over; then the lease ends at once.
            let _ = began.send(Ok(Arc::clone(&conversation)));
            Some(sampler(conversation, show_tools))
        };
        OfferedAttempt {
            attempt: self.context.request.attempt,
            task,
            time: time.saturating_add(external.grace),
            begin: Box::new(begin),
        }
    }

    fn prompt(&self) -> String {
        let opening = self.context.settings.opening(&self.context.request.task);
        opening.last().map_or_else(String::new, |message| message.content.clone())
    }

    fn end_of(
        &mut self,
        end: Option<OfferEnd>,
        finished: &FinishedConversation,
    ) -> Result<Rewarded, Outcome> {
        if let Some(error) = &finished.failure {
            return Err(failed(Stage::Generate, error));
        }
        let Some(end) = end.filter(|_| !finished.stopped) else {
            return Err(stopped());
        };
        let asked = !finished.branches.is_empty();
        let counts = matches!(
            end,
            OfferEnd::Returned { .. }
                | OfferEnd::Failed { kind: FailureKind::Agent | FailureKind::TimeOut, .. }
                | OfferEnd::TimeUp { .. }
        );
        // Not the policy's doing, whatever the worker made of it.
        if let Some(refusal) = finished.refusal.as_ref().filter(|_| counts) {
            let what = "the environment's last request was refused, and no better one followed";
            return Err(failed(Stage::Exec, format!("{what}: {refusal}")));
        }
        let unrewarded = |limit| Ok(Rewarded { reward: 0.0, truncated_by: Some(limit) });
        let (stage, error) = match end {
            OfferEnd::Returned { reward, metrics } if asked => {
                self.metrics = metrics;
                return Ok(Rewarded { reward, truncated_by: finished.limit });
            }
            OfferEnd::Returned { .. } if finished.limit == Some(Limit::SequenceTokens) => {
                let what = "the first prompt leaves no room for a reply; shorten it, or raise \
                            rollout.max_sequence_tokens";
                (Stage::Setup, what.to_owned())
            }
            OfferEnd::Returned { .. } => {
                let what = "the worker returned a reward without asking the policy";
                (Stage::Setup, what.to_owned())
            }
            OfferEnd::Failed { kind: FailureKind::Agent, message } if asked => {
                tracing::warn!(message, "the worker reported that the agent failed");
                return unrewarded(Limit::AgentFailure);
            }
            OfferEnd::Failed { kind: FailureKind::TimeOut, message } if asked => {
                tracing::warn!(message, "the worker reported a timeout");
                return unrewarded(Limit::EpisodeTime);
            }
            OfferEnd::TimeUp { worker } if asked => {
                tracing::warn!(worker, "the worker did not return the episode in time");
                return unrewarded(Limit::EpisodeTime);
            }
            OfferEnd::Failed { kind: FailureKind::Environment, message } => {
                (Stage::Exec, format!("the environment failed: {message}"))
            }
            OfferEnd::Failed { kind: FailureKind::Agent | FailureKind::TimeOut, message } => {
                (Stage::Exec, format!("it failed before the policy was asked: {message}"))
            }
            OfferEnd::TimeUp { worker } => {
                let what = "did not ask the policy, and did not return the episode in time";
                (Stage::Exec, format!("worker {worker} {what}"))
            }
            OfferEnd::Abandoned { worker } => {
                (Stage::Exec, format!("worker {worker} abandoned the episode"))
            }
            OfferEnd::Lost { worker, silent } => {
                let what = format!("sent no heartbeat for {silent:?} (gateway.lease)");
                (Stage::Exec, format!("worker {worker} {what}"))
            }
        };
        Err(failed(stage, error))
    }
}

/// The sampler of an external agent's conversation.
fn sampler(conversation: Arc<Conversation>, show_tools: bool) -> Arc<dyn Sampler> {
    Arc::new(ConversationSampler {
        conversation,
        model: MODEL.to_owned(),
        show_tools,
        // An external worker is trusted, unlike commands of the policy.
        takes_tokens: true,
        schemas: Mutex::default(),
        places: Semaphore::new(PLACES),
    })
}

/// Digest of what the tokens of an attempt depend on, besides its requests and the policy.
fn settings_of(context: &EpisodeContext, limits: EpisodeLimits) -> [u8; 32] {
    let EpisodeRequest { task, seed, temperature, want_routing, .. } = &context.request;
    let parts = (task.id.as_str(), seed, temperature, want_routing, context.settings.top_p, limits);
    *blake3::hash(format!("{parts:?}").as_bytes()).as_bytes()
}

/// Lets a lease be unknown when this is dropped, unless it was restored before.
struct ForgetOnDrop<'a> {
    offers: &'a Offers,
    lease: LeaseRecord,
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        self.offers.forget(&self.lease);
    }
}

/// Waits until the engine fails. After that, the agent's actions no longer count.
async fn engine_failure(conversation: &Conversation) {
    if !conversation.ended().await {
        std::future::pending::<()>().await;
    }
}

/// The part of a task that a worker sees: never the hidden tests or a solution.
fn shown(task: &Task, prompt: &str) -> Value {
    let files: Map<String, Value> = task
        .agent_files
        .iter()
        .map(|file| (file.path.clone(), Value::from(file.content.as_str())))
        .collect();
    let row = match &task.origin {
        Origin::External(columns) => Value::Object(columns.as_ref().clone()),
        Origin::Files | Origin::R2e | Origin::SweBench(_) | Origin::Harbor(_) => json!({}),
    };
    json!({
        "id": task.id.as_str(),
        "environment": task.environment,
        "family": task.family,
        "prompt": prompt,
        "image": task.image,
        "workdir": task.workdir,
        "files": files,
        "row": row,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use orchestrate_tasks::micro;

    #[test]
    fn a_worker_sees_neither_hidden_tests_nor_the_solution() {
        let counts = micro::MicroCounts { train: 20, held_out: 0, held_out_families: 0 };
        for task in micro::generate(1, counts) {
            let shown = shown(&task, &task.problem_statement).to_string();
            for file in &task.hidden_files {
                let hidden = serde_json::to_string(&file.content).unwrap();
                assert!(!shown.contains(hidden.trim_matches('"')), "{}", file.path);
            }
            let patch = serde_json::to_string(&task.gold_patch).unwrap();
            assert!(!shown.contains(patch.trim_matches('"')), "{}", task.id.as_str());
            for test in task.expected.keys() {
                assert!(!shown.contains(test.as_str()), "{test}");
            }
        }
    }
}
