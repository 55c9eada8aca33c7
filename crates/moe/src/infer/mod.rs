//! The embedded inference engine: Qwen3-MoE on CPU behind SGLang's HTTP form.
//!
//! [`serve_engine`] runs it in-process or stand-alone. HTTP handlers (`server`, `control`, `generate`) check
//! bodies (`body`) and pass sequences (`request`) to one engine thread (`scheduler`), which batches
//! them through the model (`model`, `kernels`, `quantized`) over the prefix cache (`cache`), samples
//! (`sampling`) and answers (`reply`). The one invariant: every routing row returned is the choice
//! made when that token was processed; it is stored beside its key and value and never recomputed.

mod body;
mod cache;
mod control;
mod generate;
mod kernels;
mod loaded;
mod matrix;
mod model;
mod quantized;
mod reply;
mod request;
mod sampling;
mod scheduler;
mod server;

pub use matrix::WeightFormat;
pub use server::{EngineOptions, EngineServeError, serve_engine};
