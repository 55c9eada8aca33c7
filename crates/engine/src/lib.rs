//! Inference engines: the [`Engine`] seam, the SGLang client behind it, and a [`Fleet`] of them.
//!
//! The invariant: nothing of a reply is handed on before it was checked in full (token ids,
//! log-probabilities, routing rows); a bad reply is an [`EngineError`], never padded.

mod api;
mod config;
mod fleet;
mod http;
mod reply;
mod sglang;

pub use api::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
    Sampling, SessionOpening, VersionSpan,
};
pub use config::{EnginePlan, EngineSection};
pub use fleet::{Fleet, FleetMember, FleetOptions, WorkerStatus, discover};
pub use sglang::{SglangClient, SglangOptions};
