//! A Qwen3-MoE model on CPU: an inference server with routing capture ([`infer`]) and a trainer
//! with routing replay ([`train`]).

pub mod checkpoint;
mod config;
pub mod diagnostics;
mod fused;
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
