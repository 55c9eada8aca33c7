//! A Qwen3-MoE model: inference server with routing capture, and trainer with routing replay.

mod config;

pub use config::{CheckpointError, ModelConfig, RopeParameters};
