//! Harbor tasks: their containers are prepared, used and graded by Harbor's rules.
//!
//! With a shared verifier the tests run in the agent's own container, as such a task requires. With
//! a separate one they run in a fresh container that receives the task's artifacts and nothing
//! else. The supervisor writes and reads files; programs of the container do not take part.

mod artifacts;
mod check;
mod container;
mod verifier;

pub use check::{HarborActor, check_harbor};
pub(crate) use container::{Prepared, prepare};
pub(crate) use verifier::{GradedStep, grade_in_agents, grade_separately};
