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
mod linalg;
pub mod model;
#[cfg(test)]
mod model_tests;
mod norm;
pub mod optimizer;
mod part;
pub mod real;
pub mod server;
pub mod service;
pub mod sft;
pub mod step;
#[cfg(test)]
mod step_tests;
pub mod store;

pub use batch::{BatchError, PackedBatch, Routes};
pub use layout::Layout;
pub use model::{LossGradient, Pass, SequenceOutput, TrainModel};
pub use server::{ServeTrainerError, serve_trainer};
pub use service::TrainerOptions;
