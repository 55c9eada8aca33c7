//! The trainer's folder of checkpoints: `v000000`, `v000001`, …, and where it stands.
//!
//! The newest complete folder is the trainer's whole state: weights, optimizer, and the results of
//! the steps that led there ([`TrainerState`]). Losing everything after it loses nothing else.

use super::learner::Learner;
use super::model::TrainModel;
use super::optimizer::AdamW;
use super::side::Side;
use crate::CheckpointError;
use crate::checkpoint::{PendingFolder, StoredType, copy_companions, write_json};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::protocol::StepResult;
use orchestrate_types::PolicyVersion;
use serde::{Deserialize, Serialize};

/// File that tells what a checkpoint is; written last.
pub const STATE_FILE: &str = "trainer.json";
/// Highest version ever published here and its lineage: how a restored older state is noticed.
const HISTORY_FILE: &str = "lineage.json";
/// Applied steps whose results are remembered.
const REMEMBERED_STEPS: usize = 64;

/// An applied step and what it did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppliedStep {
    /// Its idempotency key.
    pub step_id: String,
    /// BLAKE3 of the batch's manifest, hexadecimal.
    pub batch_digest: String,
    /// Its result.
    pub result: StepResult,
}

/// `trainer.json` of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Counts restorations of older checkpoints.
    pub lineage: u64,
    /// Version of the weights beside it.
    pub policy_version: PolicyVersion,
    /// The last applied steps, oldest first.
    pub steps: Vec<AppliedStep>,
}

impl TrainerState {
    /// Result of a step that led to this state.
    pub fn applied(&self, step_id: &str) -> Option<&AppliedStep> {
        self.steps.iter().find(|step| step.step_id == step_id)
    }

    /// The state after one more step.
    #[must_use]
    pub fn after(&self, step: AppliedStep) -> Self {
        let mut steps = self.steps.clone();
        let surplus = (steps.len() + 1).saturating_sub(REMEMBERED_STEPS);
        steps.drain(..surplus);
        let policy_version = step.result.policy_version;
        steps.push(step);
        Self { lineage: self.lineage, policy_version, steps }
    }
}

#[derive(Serialize, Deserialize)]
struct History {
    lineage: u64,
    highest_version: PolicyVersion,
}

/// The folder.
#[derive(Debug)]
pub struct CheckpointStore {
    root: Utf8PathBuf,
    keep: usize,
}

/// What a trainer starts from.
#[derive(Debug)]
pub struct Restored {
    /// Weights and optimizer.
    pub learner: Learner,
    /// Where it stands.
    pub state: TrainerState,
}

impl CheckpointStore {
    /// Opens the folder, or makes it from a starting policy, which becomes `v000000`. Beside that
    /// one, the newest `keep` (at least 1) checkpoints are kept.
    ///
    /// # Errors
    /// If the newest checkpoint, or the starting policy, cannot be read or written.
    pub fn open(
        root: &Utf8Path,
        policy: &Utf8Path,
        keep: usize,
    ) -> Result<(Self, Restored), CheckpointError> {
        fs_err::create_dir_all(root).map_err(|e| CheckpointError::io(root, e))?;
        let root = root.canonicalize_utf8().map_err(|e| CheckpointError::new(root, e))?;
        let store = Self { root, keep: keep.max(1) };
        let restored = match store.versions()?.last() {
            Some(&version) => store.restore(version)?,
            None => store.begin(policy)?,
        };
        Ok((store, restored))
    }

    /// Folder of a version.
    pub fn folder(&self, version: PolicyVersion) -> Utf8PathBuf {
        self.root.join(format!("v{:06}", version.0))
    }

    /// Writes a checkpoint whole, then drops the oldest beyond those kept. `state` is asked for
    /// last, when everything else is on disk.
    ///
    /// # Errors
    /// If anything cannot be written; nothing is published then.
    pub fn save(
        &self,
        learner: &Learner,
        version: PolicyVersion,
        companions: &Utf8Path,
        state: impl FnOnce() -> TrainerState,
    ) -> Result<TrainerState, CheckpointError> {
        let pending = PendingFolder::create(&self.folder(version))?;
        learner.model.weights()?.write(pending.path(), StoredType::F32)?;
        learner.adam.write(learner.model.layout(), pending.path())?;
        learner.side.write(pending.path())?;
        copy_companions(companions, pending.path())?;
        let state = state();
        write_json(&pending.path().join(STATE_FILE), &state)?;
        pending.publish()?;
        // The step is applied from here on: what follows must not turn it into a failure.
        if let Err(error) = self.note(&state).and_then(|()| self.prune()) {
            tracing::warn!(%error, "checkpoint is written, but older ones could not be tidied up");
        }
        Ok(state)
    }

    fn begin(&self, policy: &Utf8Path) -> Result<Restored, CheckpointError> {
        let learner = Learner::new(TrainModel::load(policy)?);
        let version = PolicyVersion(0);
        // All checkpoints were taken away: that is a restoration too.
        let lineage = self.history()?.map_or(0, |history| history.lineage + 1);
        let state = TrainerState { lineage, policy_version: version, steps: Vec::new() };
        let state = self.save(&learner, version, policy, || state)?;
        Ok(Restored { learner, state })
    }

    fn restore(&self, version: PolicyVersion) -> Result<Restored, CheckpointError> {
        let folder = self.folder(version);
        let mut state: TrainerState = read_json(&folder.join(STATE_FILE))?;
        if state.policy_version != version {
            let problem = format!("it says version {}: was it renamed?", state.policy_version);
            return Err(CheckpointError::new(&folder.join(STATE_FILE), problem));
        }
        if let Some(history) = self.history()? {
            let abandoned = u64::from(history.highest_version > version);
            state.lineage = state.lineage.max(history.lineage + abandoned);
        }
        self.note(&state)?;
        let model = TrainModel::load(&folder)?;
        let adam = AdamW::load(model.layout(), &folder)?;
        let side = Side::load(&folder, model.config())?;
        Ok(Restored { learner: Learner { model, adam, side }, state })
    }

    fn history(&self) -> Result<Option<History>, CheckpointError> {
        let path = self.root.join(HISTORY_FILE);
        if path.exists() { read_json(&path).map(Some) } else { Ok(None) }
    }

    fn note(&self, state: &TrainerState) -> Result<(), CheckpointError> {
        let history = History { lineage: state.lineage, highest_version: state.policy_version };
        let temporary = self.root.join(format!(".{HISTORY_FILE}.partial"));
        write_json(&temporary, &history)?;
        let target = self.root.join(HISTORY_FILE);
        fs_err::File::open(&temporary)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs_err::rename(&temporary, &target))
            .map_err(|e| CheckpointError::io(&target, e))
    }

    /// Versions of the complete checkpoints, ascending.
    fn versions(&self) -> Result<Vec<PolicyVersion>, CheckpointError> {
        let entries = self.root.read_dir_utf8().map_err(|e| CheckpointError::new(&self.root, e))?;
        let mut versions = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| CheckpointError::new(&self.root, e))?;
            let number = entry.file_name().strip_prefix('v').and_then(|n| n.parse().ok());
            let version = number.map(PolicyVersion);
            let complete = |v: &PolicyVersion| self.folder(*v).join(STATE_FILE).exists();
            versions.extend(version.filter(complete));
        }
        versions.sort_unstable();
        Ok(versions)
    }

    fn prune(&self) -> Result<(), CheckpointError> {
        let versions = self.versions()?;
        let surplus = versions.len().saturating_sub(self.keep);
        for version in versions.into_iter().take(surplus).filter(|v| v.0 != 0) {
            let folder = self.folder(version);
            fs_err::remove_dir_all(&folder).map_err(|e| CheckpointError::new(&folder, e))?;
        }
        Ok(())
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Utf8Path) -> Result<T, CheckpointError> {
    let text = fs_err::read(path).map_err(|e| CheckpointError::new(path, e))?;
    serde_json::from_slice(&text).map_err(|e| CheckpointError::new(path, e))
}
