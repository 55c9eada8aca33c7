//! The trainer's checkpoint folders `v000000`, `v000001`, …, and the trainer state in them.
//!
//! The newest complete folder is the whole state of the trainer: weights, optimizer, and the
//! results of the last steps ([`TrainerState`]). A restart continues from it alone.

use super::auxiliary::AuxiliaryWeights;
use super::learner::Learner;
use super::model::TrainModel;
use super::optimizer::AdamW;
use crate::CheckpointError;
use crate::checkpoint::{PendingFolder, StoredType, copy_companions, write_json};
use camino::{Utf8Path, Utf8PathBuf};
use orchestrate_handoff::protocol::StepResult;
use orchestrate_types::PolicyVersion;
use serde::{Deserialize, Serialize};

/// File with the [`TrainerState`] of a checkpoint; written last.
pub const STATE_FILE: &str = "trainer.json";
/// File with the highest version ever published here and its lineage, used to detect that an older
/// checkpoint was restored.
const HISTORY_FILE: &str = "lineage.json";
/// Number of applied steps whose results are kept.
const REMEMBERED_STEPS: usize = 64;

/// An applied step and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppliedStep {
    /// Idempotency key of the step.
    pub step_id: String,
    /// BLAKE3 of the batch's manifest, hexadecimal.
    pub batch_digest: String,
    /// Result of the step.
    pub result: StepResult,
}

/// Contents of a checkpoint's `trainer.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Number of times that an older checkpoint was restored.
    pub lineage: u64,
    /// Version of the weights in this checkpoint.
    pub policy_version: PolicyVersion,
    /// The last applied steps, oldest first.
    pub steps: Vec<AppliedStep>,
}

impl TrainerState {
    /// Finds an applied step by its id, among those remembered.
    pub fn applied(&self, step_id: &str) -> Option<&AppliedStep> {
        self.steps.iter().find(|step| step.step_id == step_id)
    }

    /// Returns the state after one more step.
    #[must_use]
    pub fn with_step(&self, step: AppliedStep) -> Self {
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

/// The folder that holds the trainer's checkpoints.
#[derive(Debug)]
pub struct CheckpointStore {
    root: Utf8PathBuf,
    keep: usize,
}

/// State from which a trainer starts.
#[derive(Debug)]
pub struct Restored {
    /// Weights and optimizer state.
    pub learner: Learner,
    /// Version, lineage and last steps.
    pub state: TrainerState,
}

impl CheckpointStore {
    /// Opens the folder, or creates it from a starting policy, which becomes `v000000`. Besides
    /// that one, the newest `keep` (at least 1) checkpoints are kept.
    ///
    /// # Errors
    /// If the newest checkpoint or the starting policy cannot be read, or a checkpoint cannot be
    /// written.
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
            None => store.initialize(policy)?,
        };
        Ok((store, restored))
    }

    /// Path of the checkpoint folder of a version.
    pub fn folder(&self, version: PolicyVersion) -> Utf8PathBuf {
        self.root.join(format!("v{:06}", version.0))
    }

    /// Writes a checkpoint atomically, then deletes the oldest beyond those kept. `state` is called
    /// last, when everything else is on disk.
    ///
    /// # Errors
    /// If a file cannot be written; the checkpoint is then not published.
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
        learner.auxiliary.write(pending.path())?;
        copy_companions(companions, pending.path())?;
        let state = state();
        write_json(&pending.path().join(STATE_FILE), &state)?;
        pending.publish()?;
        // From here on the step counts as applied: later errors must not make it fail.
        if let Err(error) = self.record_history(&state).and_then(|()| self.prune()) {
            tracing::warn!(%error, "checkpoint written, but older checkpoints could not be deleted");
        }
        Ok(state)
    }

    fn initialize(&self, policy: &Utf8Path) -> Result<Restored, CheckpointError> {
        let learner = Learner::new(TrainModel::load(policy)?);
        let version = PolicyVersion(0);
        // All checkpoints were deleted: starting again also counts as a restoration.
        let lineage = self.history()?.map_or(0, |history| history.lineage + 1);
        let state = TrainerState { lineage, policy_version: version, steps: Vec::new() };
        let state = self.save(&learner, version, policy, || state)?;
        Ok(Restored { learner, state })
    }

    fn restore(&self, version: PolicyVersion) -> Result<Restored, CheckpointError> {
        let folder = self.folder(version);
        let mut state: TrainerState = read_json(&folder.join(STATE_FILE))?;
        if state.policy_version != version {
            let problem =
                format!("contains version {}; it may have been renamed", state.policy_version);
            return Err(CheckpointError::new(&folder.join(STATE_FILE), problem));
        }
        if let Some(history) = self.history()? {
            let abandoned = u64::from(history.highest_version > version);
            state.lineage = state.lineage.max(history.lineage + abandoned);
        }
        self.record_history(&state)?;
        let model = TrainModel::load(&folder)?;
        let adam = AdamW::load(model.layout(), &folder)?;
        let auxiliary = AuxiliaryWeights::load(&folder, model.config())?;
        Ok(Restored { learner: Learner { model, adam, auxiliary }, state })
    }

    fn history(&self) -> Result<Option<History>, CheckpointError> {
        let path = self.root.join(HISTORY_FILE);
        if path.exists() { read_json(&path).map(Some) } else { Ok(None) }
    }

    fn record_history(&self, state: &TrainerState) -> Result<(), CheckpointError> {
        let history = History { lineage: state.lineage, highest_version: state.policy_version };
        let temporary = self.root.join(format!(".{HISTORY_FILE}.partial"));
        write_json(&temporary, &history)?;
        let target = self.root.join(HISTORY_FILE);
        fs_err::File::open(&temporary)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs_err::rename(&temporary, &target))
            .map_err(|e| CheckpointError::io(&target, e))
    }

    /// Versions of all complete checkpoints, in ascending order.
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
