//! The trainer: model with backward pass, optimizer, supervised phase, step service and server.
//!
//! Read [`model`] first, then [`step`] and [`service`].

mod attention;
mod batch;
mod experts;
mod head;
#[cfg(target_arch = "x86_64")]
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
pub mod side;
pub mod step;
pub mod store;

pub use batch::{BatchError, PackedBatch, Routes};
pub use layout::Layout;
pub use model::TrainModel;
pub use pass::{LossGradient, Pass, SequenceOutput, TokenGradient};
pub use server::{ServeTrainerError, serve_trainer};
pub use service::TrainerOptions;
