//! The trainer: model with backward pass, optimizer, supervised phase, step service and server.
//!
//! Read [`model`] first.

mod attention;
mod batch;
mod experts;
mod head;
mod layout;
mod linalg;
pub mod model;
#[cfg(test)]
mod model_tests;
mod norm;
pub mod optimizer;
pub mod real;
pub mod sft;

pub use batch::{BatchError, PackedBatch, Routes};
pub use layout::Layout;
pub use model::{LossGradient, Pass, SequenceOutput, TrainModel};
