//! A Qwen3-MoE model: inference server with routing capture, and trainer with routing replay.

pub mod checkpoint;
mod config;
pub mod weights;

pub use checkpoint::{StoredType, save_checkpoint};
pub use config::{CheckpointError, ModelConfig, RopeParameters};
pub use weights::{Tensor, Weights};
