//! The trainer: a model with a backward pass, the optimizer, supervised training, training steps, and
//! the service and server around them.
//!
//! Read [`model`] first, then [`step`] and [`service`].

mod attention;
pub mod auxiliary;
mod batch;
mod experts;
mod head;
mod kernel;
mod layout;
pub mod learner;
mod linalg;
pub mod model;
#[cfg(test)]
mod model_tests;
mod norm;
pub mod optimizer;
mod part;
pub mod pass;
pub mod real;
pub mod server;
pub mod service;
pub mod sft;
pub mod step;
pub mod store;

pub use batch::{BatchError, PackedBatch, Routes};
pub use layout::Layout;
pub use model::TrainModel;
pub use pass::{LossGradient, Pass, SequenceOutput, TokenGradient};
pub use server::{ServeTrainerError, serve_trainer};
pub use service::TrainerOptions;
