//! The training part of a step: from kept groups to new weights that engines serve.

use crate::config::OnCollapse;
use crate::error::RunError;
use crate::events::Event;
use crate::files::batch_folder;
use crate::groups::SealedGroup;
use crate::metrics::{StepTimes, step_line};
use crate::record::{result_of, stored_line, to_samples, to_stored_result};
use crate::run_loop::RunLoop;
use orchestrate_handoff::batch::{BatchMeta, MANIFEST_FILE, Planned, stream_batch};
use orchestrate_handoff::protocol::{StepRequest, StepState, TrainerInfo};
use orchestrate_metrics::{Collapse, Finding, MetricsLine, StepLine};
use orchestrate_store::{BatchMember, BatchState, GroupState, StepRow};
use orchestrate_types::{PolicyVersion, counted};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Tensor data per shard: large enough that a batch has few files, small enough that most of it is
/// synced and digested while the next shard is written.
const SHARD_BYTES: u64 = 256 << 20;
/// Maximum number of loaded samples that wait for the batch writer: loading and writing overlap, but
/// each sample holds its whole routing mask.
const LOADED_AHEAD: usize = 1;

impl RunLoop {
    /// Checks that trainer and journal are at the same policy version and has engines serve its weights.
    /// Returns the version that the next step starts from.
    pub(crate) async fn agree_with_trainer(&self) -> Result<PolicyVersion, RunError> {
        let info = self.trainer.info().await?;
        self.check_trainer(&info)?;
        let steps = self.store().reader().steps().await?;
        let versions = self.store().reader().versions().await?;
        let under_way = steps.iter().find(|row| row.state.is_in_training());
        // Later steps may already be sampling, but only trained steps have new weights.
        let journal = match (steps.iter().rev().find(|row| row.result.is_some()), steps.first()) {
            (Some(trained), _) => result_of(trained)?.policy_version,
            (None, Some(first)) => first.base_version,
            (None, None) => versions.last().map_or(info.policy_version, |v| v.version),
        };
        // The trainer may have applied a step whose result never arrived; the result is requested again.
        let applied_unrecorded =
            under_way.is_some_and(|row| info.last_step_id.as_deref() == Some(row.step_id.as_str()));
        if info.policy_version != journal && !applied_unrecorded {
            let known = versions.iter().find(|v| v.version == journal);
            return Err(RunError::TrainerElsewhere {
                trainer: info.policy_version,
                journal,
                checkpoint: known.map_or("unknown", |v| v.checkpoint.as_str()).to_owned(),
            });
        }
        if let Some(row) = under_way {
            // Engines get the weights when that step is closed; nothing is sampled before that.
            return Ok(row.base_version);
        }
        self.serve(&info, journal).await?;
        Ok(journal)
    }

    async fn serve(&self, info: &TrainerInfo, version: PolicyVersion) -> Result<(), RunError> {
        let engine = self.engine.as_ref();
        self.context.serve(engine, version, info.lineage, &info.checkpoint).await
    }

    fn check_trainer(&self, info: &TrainerInfo) -> Result<(), RunError> {
        let (engine, trainer) = (self.engine.shape(), &info.model);
        let pairs = [
            ("MoE layers", format!("{:?}", engine.moe_layers), format!("{:?}", trainer.moe_layers)),
            ("experts", engine.experts.to_string(), trainer.experts.to_string()),
            ("experts per token", engine.top_k.to_string(), trainer.top_k.to_string()),
        ];
        for (name, engine, trainer) in pairs {
            if engine != trainer {
                let what = format!("{name} are {engine} in the engine, {trainer} in the trainer");
                return Err(RunError::ModelMismatch { what });
            }
        }
        let loss = self.plan().algorithm.policy_loss().name().to_owned();
        if !info.algorithms.contains(&loss) {
            return Err(RunError::UnknownLoss { loss, known: info.algorithms.join(", ") });
        }
        Ok(())
    }

    /// Writes the batch of a sampled step, or closes the step as skipped if no group has a gradient.
    pub(crate) async fn publish_or_skip(
        &self,
        row: &StepRow,
        times: &StepTimes,
    ) -> Result<(), RunError> {
        let step = row.step;
        let reader = self.store().reader();
        let groups = reader.groups_of_step(step).await?;
        let (mut attempts, mut planned) = (Vec::new(), Vec::new());
        for group in groups.iter().filter(|g| g.state == GroupState::Kept) {
            let sealed = SealedGroup::load(reader, group.id, group.size).await?;
            for (member, advantage) in sealed.trained(self.plan()) {
                for tokens in member.summary.tokens_by_branch() {
                    let tokens = usize::try_from(tokens)
                        .map_err(|e| RunError::stored(format!("attempt {}", member.row.id), e))?;
                    planned.push(Planned { episode_id: member.row.id.episode, tokens });
                }
                attempts.push((member.row.clone(), advantage));
            }
        }
        if attempts.is_empty() {
            let reason = format!("no gradient in {}", counted(groups.len(), "group"));
            let times = StepTimes { lag: self.lag.take(), ..*times };
            let line = step_line(reader, row, None, &times, &self.hosts()).await?;
            self.store().skip_step(step, &reason, &stored_line(&line)?).await?;
            self.context.report(&Event::StepSkipped { step, reason });
            return self.step_closed(line).await;
        }
        let members: Vec<BatchMember> = attempts
            .iter()
            .map(|(attempt, advantage)| BatchMember {
                episode: attempt.id.episode,
                advantage: *advantage,
            })
            .collect();
        let relative = batch_folder(step);
        self.store().assemble_batch(step, row.base_version, &relative, &members).await?;

        let shape = Arc::new(self.engine.shape().clone());
        let meta = BatchMeta {
            run: self.context.run.to_string(),
            step_id: row.step_id.clone(),
            global_step: u64::from(step),
            base_version: row.base_version,
            shape: shape.as_ref().clone(),
            max_shard_bytes: SHARD_BYTES,
            share_prefix_rows: self.plan().handoff.share_prefix_rows,
        };
        let folder = self.folder.path(&relative);
        let (loaded, mut samples) = mpsc::channel(LOADED_AHEAD);
        let written = tokio::task::spawn_blocking(move || {
            let samples = std::iter::from_fn(|| samples.blocking_recv());
            stream_batch(&folder, &meta, &planned, samples)?;
            let manifest = folder.join(MANIFEST_FILE);
            let bytes = fs_err::read(&manifest)
                .map_err(|source| RunError::File { path: manifest, source })?;
            Ok::<_, RunError>(blake3::hash(&bytes).to_hex().to_string())
        });
        let (overlong, weight) =
            (self.plan().algorithm.overlong, self.plan().algorithm.branch_weight);
        let loading = async move {
            for (attempt, advantage) in &attempts {
                let record = reader.load_record(attempt).await?;
                for sample in to_samples(record, *advantage, weight, overlong, &shape)? {
                    if loaded.send(sample).await.is_err() {
                        // The writer failed and returns the reason itself.
                        return Ok(());
                    }
                }
            }
            Ok::<_, RunError>(())
        };
        let loaded = loading.await;
        let written = written
            .await
            .map_err(|e| RunError::Panicked { task: "batch writer", detail: e.to_string() })?;
        // A sample that cannot be loaded makes the writer fail as well: report the cause first.
        loaded?;
        let digest = written?;
        self.store().publish_batch(step, &digest).await?;
        Ok(())
    }

    /// Has the trainer apply the published batch. Submitting it again is harmless.
    #[tracing::instrument(name = "train", skip_all, fields(policy_version = row.base_version.0))]
    pub(crate) async fn train(&self, row: &StepRow, times: &mut StepTimes) -> Result<(), RunError> {
        let step = row.step;
        let begun = Instant::now();
        let plan = self.plan();
        let temperature = f64::from(plan.sampling.temperature);
        let request = StepRequest {
            step_id: row.step_id.clone(),
            base_version: row.base_version,
            manifest: self.folder.absolute(&batch_folder(step))?.join(MANIFEST_FILE),
            hyperparameters: plan
                .algorithm
                .hyperparameters(temperature, plan.measures_no_replay(step)),
        };
        let context = self.context.clone();
        let progress = move |state: &StepState| {
            context.report(&Event::Training { step, state: state.clone() });
        };
        let result = tokio::select! {
            biased;
            // The trainer continues on its own; the next start requests the result.
            () = self.context.stop.drain.cancelled() => return Err(RunError::Stopped),
            result = self.trainer.apply(&request, &progress) => result?,
        };
        if result.policy_version <= row.base_version {
            let (base, found) = (row.base_version, result.policy_version);
            return Err(RunError::BadResult { step, base, found });
        }
        times.train += begun.elapsed();
        self.store().record_result(step, &to_stored_result(result)?).await?;
        Ok(())
    }

    /// Has engines serve the new weights and closes the step.
    pub(crate) async fn sync_and_close(
        &self,
        row: &StepRow,
        times: &StepTimes,
    ) -> Result<(), RunError> {
        let begun = Instant::now();
        let result = result_of(row)?;
        let mut info = self.trainer.info().await?;
        info.checkpoint = result.checkpoint.clone();
        self.serve(&info, result.policy_version).await?;
        let times = StepTimes { sync: begun.elapsed(), lag: self.lag.take(), ..*times };
        let (reader, hosts) = (self.store().reader(), self.hosts());
        let line = step_line(reader, row, Some(&result), &times, &hosts).await?;
        self.store().finish_step(row.step, &stored_line(&line)?).await?;
        self.step_closed(line).await
    }

    /// Updates the files after a closed step, deletes old batches and checks for a collapse.
    async fn step_closed(&self, line: StepLine) -> Result<(), RunError> {
        self.folder.write_metrics(&self.store().reader().metrics().await?)?;
        self.context.report(&Event::StepFinished { line: Box::new(line.clone()) });
        self.retire_folders().await?;
        let findings = self.detector().observe(&MetricsLine::from(line));
        for finding in findings {
            match finding {
                Finding::Warning(text) => self.context.warn(text),
                Finding::Collapse(collapse) => self.collapsed(&collapse).await?,
            }
        }
        Ok(())
    }

    /// Warns of a collapse or ends the run, depending on `diagnostics.on_collapse`. The step is already
    /// closed, so a resumed run continues with the next one.
    async fn collapsed(&self, collapse: &Collapse) -> Result<(), RunError> {
        let versions = self.store().reader().versions().await?;
        let good = versions.iter().find(|v| Some(v.version.0) == collapse.last_good);
        let good = match good {
            Some(version) if version.checkpoint.exists() => {
                format!("policy version {} in {}", version.version, version.checkpoint)
            }
            Some(version) => format!(
                "policy version {}, whose checkpoint was deleted (raise run.keep_checkpoints)",
                version.version
            ),
            None => "the starting policy".to_owned(),
        };
        let error = RunError::Collapsed { step: collapse.step, symptom: collapse.symptom, good };
        match self.plan().diagnostics.on_collapse {
            OnCollapse::Warn => {
                self.context.warn(error.to_string());
                Ok(())
            }
            OnCollapse::Stop => Err(error),
        }
    }

    /// Deletes the oldest batch folders, keeping `run.keep_batches`. The journal records a deletion
    /// first, so a missing folder is never still needed. The trainer deletes checkpoints.
    pub(crate) async fn retire_folders(&self) -> Result<(), RunError> {
        let batches = self.store().reader().batches().await?;
        let keep = self.plan().run.keep_batches as usize;
        let applied: Vec<_> = batches.iter().filter(|b| b.state == BatchState::Applied).collect();
        for batch in applied.iter().rev().skip(keep) {
            self.store().retire_batch(batch.step).await?;
            self.folder.remove_folder(&batch.folder)?;
        }
        for batch in batches.iter().filter(|b| b.state == BatchState::Retired) {
            self.folder.remove_folder(&batch.folder)?;
        }
        Ok(())
    }
}
