//! From rollouts to the trainer: advantages, batch files, trainer protocol client.
//!
//! The invariant: a batch folder is complete or absent (manifest last), and its bytes never
//! change once published.

pub mod protocol;
