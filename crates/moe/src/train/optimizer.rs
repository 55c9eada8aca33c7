//! AdamW with decoupled weight decay, and clipping of the gradient to a global norm.

use super::layout::Layout;
use crate::CheckpointError;
use crate::checkpoint::{StoredTensor, StoredType, read_tensors, write_tensors};
use camino::Utf8Path;
use rayon::prelude::*;

/// File of the optimizer state in a checkpoint folder. It is in safetensors format, but with
/// another extension, because servers load every `*.safetensors` file of a folder.
pub const OPTIMIZER_FILE: &str = "optimizer.state";

/// Number of parameters that a thread updates at a time.
const CHUNK: usize = 1 << 16;

/// Hyperparameters of one AdamW update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamSettings {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment (β₁, β₂).
    pub betas: (f64, f64),
    /// ε, added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, applied to every parameter.
    pub weight_decay: f64,
}

/// AdamW state: first and second moments of the gradient, laid out as the parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    first: Vec<f32>,
    second: Vec<f32>,
    steps: u32,
}

impl AdamW {
    /// Creates a zero state for a model of `parameters` values.
    pub fn new(parameters: usize) -> Self {
        Self { first: vec![0.0; parameters], second: vec![0.0; parameters], steps: 0 }
    }

    /// Number of updates so far.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// First and second moments, each laid out as the parameters.
    pub(crate) fn moments(&self) -> [&[f32]; 2] {
        [&self.first, &self.second]
    }

    /// Restores the state from stored moments; `None` if `steps` is not a whole number ≥ 0.
    pub(crate) fn from_parts(first: Vec<f32>, second: Vec<f32>, steps: f32) -> Option<Self> {
        Some(Self { first, second, steps: to_count(steps)? })
    }

    /// Applies one update. Parameters without a gradient have zeros in `grads`; they move by
    /// momentum and weight decay only.
    #[expect(clippy::cast_possible_truncation, reason = "parameters are f32")]
    pub fn update(&mut self, settings: AdamSettings, params: &mut [f32], grads: &[f32]) {
        self.steps += 1;
        let steps = f64::from(self.steps);
        let (first_rate, second_rate) = settings.betas;
        let (b1, b2) = (first_rate as f32, second_rate as f32);
        let first_correction = 1.0 - libm::pow(first_rate, steps);
        let second_correction = (1.0 / (1.0 - libm::pow(second_rate, steps)).sqrt()) as f32;
        let rate = (settings.learning_rate / first_correction) as f32;
        let keep = (1.0 - settings.learning_rate * settings.weight_decay) as f32;
        let eps = settings.eps as f32;
        params
            .par_chunks_mut(CHUNK)
            .zip(grads.par_chunks(CHUNK))
            .zip(self.first.par_chunks_mut(CHUNK).zip(self.second.par_chunks_mut(CHUNK)))
            .for_each(|((params, grads), (first, second))| {
                let moments = first.iter_mut().zip(second);
                for ((p, &g), (m, v)) in params.iter_mut().zip(grads).zip(moments) {
                    *m = b1 * *m + (1.0 - b1) * g;
                    *v = b2 * *v + (1.0 - b2) * g * g;
                    *p = *p * keep - rate * *m / (v.sqrt() * second_correction + eps);
                }
            });
    }

    /// Writes [`OPTIMIZER_FILE`] into a folder: `exp_avg.{name}`, `exp_avg_sq.{name}`, `step`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, layout: &Layout, folder: &Utf8Path) -> Result<(), CheckpointError> {
        let stored = StoredType::F32;
        let steps = [self.steps as f32];
        let mut named = Vec::new();
        for (name, shape, range) in layout.entries() {
            let parts = [("exp_avg", &self.first), ("exp_avg_sq", &self.second)];
            for (prefix, values) in parts {
                let data = values.get(range.clone()).unwrap_or_default();
                named.push((format!("{prefix}.{name}"), StoredTensor { shape, data, stored }));
            }
        }
        named.push(("step".to_owned(), StoredTensor { shape: &[1], data: &steps, stored }));
        let views = named.iter().map(|(name, t)| {
            (name.as_str(), StoredTensor { shape: t.shape, data: t.data, stored })
        });
        write_tensors(&folder.join(OPTIMIZER_FILE), views)
    }

    /// Reads the state that [`AdamW::write`] wrote.
    ///
    /// # Errors
    /// If the file is missing or damaged, or does not match the layout.
    pub fn load(layout: &Layout, folder: &Utf8Path) -> Result<Self, CheckpointError> {
        let path = folder.join(OPTIMIZER_FILE);
        let tensors = read_tensors(&path)?;
        let mut state = Self::new(layout.total());
        for (name, shape, range) in layout.entries() {
            let parts = [("exp_avg", &mut state.first), ("exp_avg_sq", &mut state.second)];
            for (prefix, values) in parts {
                let key = format!("{prefix}.{name}");
                let tensor = tensors.get(&key).filter(|t| t.shape == shape).ok_or_else(|| {
                    CheckpointError::new(
                        &path,
                        format!("`{key}` is missing or has the wrong shape"),
                    )
                })?;
                if let Some(slot) = values.get_mut(range.clone()) {
                    slot.copy_from_slice(&tensor.data);
                }
            }
        }
        let steps = tensors.get("step").and_then(|t| t.data.first().copied());
        state.steps = to_count(steps.unwrap_or(-1.0)).ok_or_else(|| {
            CheckpointError::new(&path, "`step` is missing or not a whole number")
        })?;
        Ok(state)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range is checked")]
fn to_count(value: f32) -> Option<u32> {
    (value.fract() == 0.0 && (0.0..16_777_216.0).contains(&value)).then_some(value as u32)
}

/// Scales `grads` down to a global L2 norm of at most `limit`. Returns the norm before scaling,
/// which is not finite if any gradient is not.
#[expect(clippy::cast_possible_truncation, reason = "gradients are f32")]
pub fn clip_global_norm(grads: &mut [f32], limit: f64) -> f64 {
    let squares: f64 = grads
        .chunks(CHUNK)
        .map(|chunk| chunk.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>())
        .sum();
    let norm = squares.sqrt();
    if norm > limit {
        let scale = (limit / (norm + 1e-6)) as f32;
        grads.par_chunks_mut(CHUNK).for_each(|chunk| {
            for g in chunk {
                *g *= scale;
            }
        });
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_update_moves_each_parameter_by_the_learning_rate() {
        let settings =
            AdamSettings { learning_rate: 0.1, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.5 };
        let mut adam = AdamW::new(3);
        let mut params = [1.0, 1.0, 0.0];
        adam.update(settings, &mut params, &[2.0, -0.01, 0.0]);
        // At the first step the bias-corrected moments equal the gradient: p(1 − lr·wd) − lr·sign.
        for (found, expected) in params.iter().zip([0.85_f32, 1.05, 0.0]) {
            assert!((found - expected).abs() < 1e-5, "{params:?}");
        }
        assert_eq!(adam.steps(), 1);
    }

    #[test]
    fn clipping_keeps_direction_and_returns_the_norm() {
        let mut grads = [3.0, 4.0];
        assert!((clip_global_norm(&mut grads, 1.0) - 5.0).abs() < 1e-9);
        assert!((grads[0] - 0.6).abs() < 1e-5 && (grads[1] - 0.8).abs() < 1e-5);
        assert!(clip_global_norm(&mut [f32::NAN, 1.0], 1.0).is_nan());
    }
}
