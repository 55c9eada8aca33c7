//! Weights beside the model, with an optimizer of their own: PR2's router predictor and PPO's
//! value head. They lie in files of their own in a checkpoint and are no part of the model. The files
//! have the form of safetensors and not its ending: servers load every `*.safetensors` of a folder.

use super::optimizer::{AdamSettings, AdamW, clip_global_norm};
use crate::checkpoint::{StoredTensor, StoredType, read_tensors, write_tensors};
use crate::{CheckpointError, ModelConfig};
use camino::Utf8Path;

/// File of the router predictor.
pub const PREDICTOR_FILE: &str = "router_predictor.state";
/// Its weights in that file, `[layers, experts, hidden]`.
pub const PREDICTOR_WEIGHTS: &str = "router_predictor";
const VALUE_FILE: &str = "value_head.state";
const VALUE_WEIGHTS: &str = "value_head";

/// One flat tensor and its moments.
#[derive(Debug, Clone, PartialEq)]
pub struct SideWeights {
    shape: Vec<usize>,
    weights: Vec<f32>,
    adam: AdamW,
}

impl SideWeights {
    fn new(shape: Vec<usize>) -> Self {
        let count = shape.iter().product();
        Self { shape, weights: vec![0.0; count], adam: AdamW::new(count) }
    }

    /// The weights.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// One update, with the gradient clipped to `limit`.
    pub(crate) fn update(&mut self, settings: AdamSettings, grads: &mut [f32], limit: f64) {
        clip_global_norm(grads, limit);
        self.adam.update(settings, &mut self.weights, grads);
    }

    fn write(&self, folder: &Utf8Path, file: &str, name: &str) -> Result<(), CheckpointError> {
        let mut tensors = vec![(name.to_owned(), self.shape.clone(), self.weights.clone())];
        let [first, second] = self.adam.moments();
        tensors.push((format!("exp_avg.{name}"), self.shape.clone(), first.to_vec()));
        tensors.push((format!("exp_avg_sq.{name}"), self.shape.clone(), second.to_vec()));
        tensors.push(("step".to_owned(), vec![1], vec![self.adam.steps() as f32]));
        let views = tensors.iter().map(|(name, shape, data)| {
            (name.as_str(), StoredTensor { shape, data, stored: StoredType::F32 })
        });
        write_tensors(&folder.join(file), views)
    }

    fn load(
        folder: &Utf8Path,
        file: &str,
        name: &str,
        shape: Vec<usize>,
    ) -> Result<Option<Self>, CheckpointError> {
        let path = folder.join(file);
        if !path.exists() {
            return Ok(None);
        }
        let mut tensors = read_tensors(&path)?;
        let mut take = |key: &str, shape: &[usize]| {
            let tensor = tensors.remove(key).filter(|tensor| tensor.shape == shape);
            let problem =
                || CheckpointError::new(&path, format!("`{key}` is missing or misshapen"));
            tensor.map(|tensor| tensor.data).ok_or_else(problem)
        };
        let weights = take(name, &shape)?;
        let first = take(&format!("exp_avg.{name}"), &shape)?;
        let second = take(&format!("exp_avg_sq.{name}"), &shape)?;
        let steps = take("step", &[1])?.first().copied().unwrap_or(-1.0);
        let adam = AdamW::from_parts(first, second, steps)
            .ok_or_else(|| CheckpointError::new(&path, "`step` is no count"))?;
        Ok(Some(Self { shape, weights, adam }))
    }
}

/// What a trainer has of them; made when first needed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Side {
    /// The router predictor, `[layers, experts, hidden]`.
    pub predictor: Option<SideWeights>,
    /// The value head, `[hidden + 1]` with the bias last.
    pub value_head: Option<SideWeights>,
}

impl Side {
    /// The predictor, zeros at first: zeros predict that nothing moves.
    pub(crate) fn predictor(&mut self, config: &ModelConfig) -> &mut SideWeights {
        self.predictor.get_or_insert_with(|| SideWeights::new(predictor_shape(config)))
    }

    /// The value head, zeros at first.
    pub(crate) fn value_head(&mut self, config: &ModelConfig) -> &mut SideWeights {
        self.value_head.get_or_insert_with(|| SideWeights::new(vec![config.hidden_size + 1]))
    }

    /// Writes what there is.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: &Utf8Path) -> Result<(), CheckpointError> {
        if let Some(predictor) = &self.predictor {
            predictor.write(folder, PREDICTOR_FILE, PREDICTOR_WEIGHTS)?;
        }
        if let Some(head) = &self.value_head {
            head.write(folder, VALUE_FILE, VALUE_WEIGHTS)?;
        }
        Ok(())
    }

    /// Reads what [`Side::write`] wrote.
    ///
    /// # Errors
    /// If a file is damaged or was made for another model.
    pub fn load(folder: &Utf8Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let shape = predictor_shape(config);
        Ok(Self {
            predictor: SideWeights::load(folder, PREDICTOR_FILE, PREDICTOR_WEIGHTS, shape)?,
            value_head: SideWeights::load(
                folder,
                VALUE_FILE,
                VALUE_WEIGHTS,
                vec![config.hidden_size + 1],
            )?,
        })
    }
}

/// Shape of the predictor's weights.
pub(crate) fn predictor_shape(config: &ModelConfig) -> Vec<usize> {
    vec![config.num_hidden_layers, config.num_experts, config.hidden_size]
}
