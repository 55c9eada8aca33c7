//! What a trainer changes: model, optimizer, and the weights beside the model.

use super::model::TrainModel;
use super::optimizer::{AdamSettings, AdamW};
use super::side::Side;
use orchestrate_handoff::protocol::Hyperparameters;

/// A model in training.
#[derive(Debug)]
pub struct Learner {
    /// The model.
    pub model: TrainModel<f32>,
    /// Its optimizer.
    pub adam: AdamW,
    /// Weights beside it.
    pub side: Side,
}

/// A copy to go back to.
#[derive(Debug, Clone)]
pub struct Snapshot {
    params: Vec<f32>,
    adam: AdamW,
    side: Side,
}

impl Learner {
    /// A model that has not been trained here yet.
    pub fn new(model: TrainModel<f32>) -> Self {
        let adam = AdamW::new(model.params().len());
        Self { model, adam, side: Side::default() }
    }

    /// A copy of everything that training changes.
    pub fn snapshot(&self) -> Snapshot {
        let params = self.model.params().to_vec();
        Snapshot { params, adam: self.adam.clone(), side: self.side.clone() }
    }

    /// Goes back to a copy.
    pub fn restore(&mut self, snapshot: Snapshot) {
        self.model.params_mut().copy_from_slice(&snapshot.params);
        self.adam = snapshot.adam;
        self.side = snapshot.side;
    }

    /// Settings of the optimizer's next step. Its own count places it in the warm-up, so that a
    /// resumed run goes on where it was.
    pub(crate) fn next_update(&self, settings: &Hyperparameters) -> AdamSettings {
        let step = f64::from(self.adam.steps()) + 1.0;
        let share = (step / f64::from(settings.warmup_steps.max(1))).min(1.0);
        AdamSettings {
            learning_rate: settings.learning_rate * share,
            betas: settings.betas,
            eps: settings.adam_eps,
            weight_decay: settings.weight_decay,
        }
    }
}
