//! Weight matrices in the in-memory format of the engine.

use super::kernels::Dense;
use super::quantized::{BLOCK, Bits, Quantized};
use orchestrate_cpu::Level;
use std::sync::Arc;

/// Format in which weight matrices are stored in memory and multiplied.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// 32-bit floats.
    F32,
    /// GGML block quantisation: blocks of 32 signed bytes with one f16 scale, for projections,
    /// experts, embedding and output head; activations are quantised per block as well. The router,
    /// norms, RoPE, attention and softmax stay f32, as does any matrix whose inner dimension is not
    /// a multiple of 32.
    #[default]
    Q8_0,
    /// As `Q8_0`, but weights have only the 16 values of GGML's `Q4_0`: a coarse sampler for
    /// studying the effect of a large mismatch with the trainer. It saves neither memory nor time.
    Q4_0,
}

orchestrate_settings::setting_types!(WeightFormat);

/// A weight matrix `[n, k]`, packed for multiplication.
#[derive(Debug)]
pub(super) enum Matrix {
    Dense(Dense),
    /// Shared between embedding and output head if they are tied.
    Quantized(Arc<Quantized>),
}

impl Matrix {
    pub(super) fn pack(format: WeightFormat, rows: &[f32], n: usize, k: usize) -> Self {
        match format {
            WeightFormat::Q8_0 if k.is_multiple_of(BLOCK) => {
                Self::Quantized(Arc::new(Quantized::pack(Bits::Eight, rows, n, k)))
            }
            WeightFormat::Q4_0 if k.is_multiple_of(BLOCK) => {
                Self::Quantized(Arc::new(Quantized::pack(Bits::Four, rows, n, k)))
            }
            WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::F32 => {
                Self::Dense(Dense::pack(rows, n, k))
            }
        }
    }

    pub(super) fn apply(&self, level: Level, x: &[f32], out: &mut [f32]) {
        match self {
            Self::Dense(matrix) => matrix.apply(level, x, out),
            Self::Quantized(matrix) => matrix.apply(level, x, out),
        }
    }
}
