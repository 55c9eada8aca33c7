//! Inference engines: the [`Engine`] seam, and the SGLang client behind it.
//!
//! The invariant: nothing of a reply is handed on before it was checked in full (token ids,
//! log-probabilities, routing rows); a bad reply is an [`EngineError`], never padded.

mod api;
mod config;
mod http;
mod reply;
mod sglang;

pub use api::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
    Sampling, VersionSpan,
};
pub use config::{EnginePlan, EngineSection};
pub use sglang::{SglangClient, SglangOptions};
