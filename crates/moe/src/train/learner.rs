//! The state that training changes: model, optimizer and auxiliary weights.

use super::auxiliary::AuxiliaryWeights;
use super::model::TrainModel;
use super::optimizer::{AdamSettings, AdamW};
use orchestrate_handoff::protocol::Hyperparameters;

/// A model with its optimizer and auxiliary weights.
#[derive(Debug)]
pub struct Learner {
    /// The model being trained.
    pub model: TrainModel<f32>,
    /// Optimizer state of the model.
    pub adam: AdamW,
    /// Router predictor and value head, each with its own optimizer state.
    pub auxiliary: AuxiliaryWeights,
}

/// A copy of a [`Learner`]'s state, to undo a failed step.
#[derive(Debug, Clone)]
pub struct Snapshot {
    params: Vec<f32>,
    adam: AdamW,
    auxiliary: AuxiliaryWeights,
}

impl Learner {
    /// Wraps a model with a fresh optimizer state and no auxiliary weights.
    pub fn new(model: TrainModel<f32>) -> Self {
        let adam = AdamW::new(model.params().len());
        Self { model, adam, auxiliary: AuxiliaryWeights::default() }
    }

    /// Copies everything that training changes.
    pub fn snapshot(&self) -> Snapshot {
        let params = self.model.params().to_vec();
        Snapshot { params, adam: self.adam.clone(), auxiliary: self.auxiliary.clone() }
    }

    /// Restores the state of a snapshot.
    pub fn restore(&mut self, snapshot: Snapshot) {
        self.model.params_mut().copy_from_slice(&snapshot.params);
        self.adam = snapshot.adam;
        self.auxiliary = snapshot.auxiliary;
    }

    /// Settings of the next optimizer update. The position in the warm-up follows from the
    /// optimizer's step count, so that a resumed run continues where it stopped.
    pub(crate) fn next_update(&self, settings: &Hyperparameters) -> AdamSettings {
        let step = f64::from(self.adam.steps()) + 1.0;
        let warmed_up = (step / f64::from(settings.warmup_steps.max(1))).min(1.0);
        AdamSettings {
            learning_rate: settings.learning_rate * warmed_up,
            betas: settings.betas,
            eps: settings.adam_eps,
            weight_decay: settings.weight_decay,
        }
    }
}
