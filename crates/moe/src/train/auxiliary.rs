//! Auxiliary weights with their own optimizers: the router predictor of PR2 and the value head of
//! PPO. They are not part of the model and are stored in separate files of a checkpoint. The files
//! are in safetensors format, but with another extension, because servers load every
//! `*.safetensors` file of a folder.

use super::optimizer::{AdamSettings, AdamW, clip_global_norm};
use crate::checkpoint::{StoredTensor, StoredType, read_tensors, write_tensors};
use crate::{CheckpointError, ModelConfig};
use camino::Utf8Path;

/// File of the router predictor.
pub const PREDICTOR_FILE: &str = "router_predictor.state";
/// Name of the predictor's weights in that file, `[layers, experts, hidden]`.
pub const PREDICTOR_WEIGHTS: &str = "router_predictor";
const VALUE_FILE: &str = "value_head.state";
const VALUE_WEIGHTS: &str = "value_head";

/// One auxiliary tensor and its optimizer state.
#[derive(Debug, Clone, PartialEq)]
pub struct AuxiliaryTensor {
    shape: Vec<usize>,
    weights: Vec<f32>,
    adam: AdamW,
}

impl AuxiliaryTensor {
    fn new(shape: Vec<usize>) -> Self {
        let count = shape.iter().product();
        Self { shape, weights: vec![0.0; count], adam: AdamW::new(count) }
    }

    /// Values of the tensor, row-major.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Applies one update, with the gradient clipped to the norm `limit`.
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
            let problem = || {
                CheckpointError::new(&path, format!("`{key}` is missing or has the wrong shape"))
            };
            tensor.map(|tensor| tensor.data).ok_or_else(problem)
        };
        let weights = take(name, &shape)?;
        let first = take(&format!("exp_avg.{name}"), &shape)?;
        let second = take(&format!("exp_avg_sq.{name}"), &shape)?;
        let steps = take("step", &[1])?.first().copied().unwrap_or(-1.0);
        let adam = AdamW::from_parts(first, second, steps)
            .ok_or_else(|| CheckpointError::new(&path, "`step` is not a whole number"))?;
        Ok(Some(Self { shape, weights, adam }))
    }
}

/// Auxiliary weights of a trainer; each is created when first needed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AuxiliaryWeights {
    /// Router predictor, `[layers, experts, hidden]`.
    pub predictor: Option<AuxiliaryTensor>,
    /// Value head, `[hidden + 1]` with the bias last.
    pub value_head: Option<AuxiliaryTensor>,
}

impl AuxiliaryWeights {
    /// The router predictor. It starts with zeros, which predict unchanged logits.
    pub(crate) fn predictor(&mut self, config: &ModelConfig) -> &mut AuxiliaryTensor {
        self.predictor.get_or_insert_with(|| AuxiliaryTensor::new(predictor_shape(config)))
    }

    /// The value head, which starts with zeros.
    pub(crate) fn value_head(&mut self, config: &ModelConfig) -> &mut AuxiliaryTensor {
        self.value_head.get_or_insert_with(|| AuxiliaryTensor::new(vec![config.hidden_size + 1]))
    }

    /// Writes the auxiliary weights that exist.
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

    /// Reads the files that [`AuxiliaryWeights::write`] wrote; a missing file means no such
    /// weights.
    ///
    /// # Errors
    /// If a file is damaged, or was written for another model.
    pub fn load(folder: &Utf8Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let shape = predictor_shape(config);
        Ok(Self {
            predictor: AuxiliaryTensor::load(folder, PREDICTOR_FILE, PREDICTOR_WEIGHTS, shape)?,
            value_head: AuxiliaryTensor::load(
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
