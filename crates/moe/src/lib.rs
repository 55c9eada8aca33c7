//! A Qwen3-MoE model: inference server with routing capture, and trainer with routing replay.

pub mod checkpoint;
mod config;
pub mod diagnostics;
#[cfg(test)]
mod golden;
pub mod infer;
pub mod loss;
pub mod router;
pub mod train;
pub mod weights;

pub use checkpoint::{StoredType, save_checkpoint};
pub use config::{CheckpointError, ModelConfig, RopeParameters};
pub use weights::{Tensor, Weights};
