//! Inference engines: the [`Engine`] seam, and the SGLang client behind it.
//!
//! The invariant: nothing of a reply is handed on before it was checked in full (token ids,
//! log-probabilities, routing rows); a bad reply is an [`EngineError`], never padded.

mod api;

pub use api::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
    Sampling, VersionSpan,
};
