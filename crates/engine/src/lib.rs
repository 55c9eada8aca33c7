//! Inference engines: the [`Engine`] seam, the clients of SGLang and vLLM behind it, and a
//! [`Fleet`] of them.
//!
//! One [`Client`] has everything that two servers have in common; a [`Dialect`] has the rest.
//! [`EngineKind`] chooses one by settings, and [`Worker::probe`] finds out whether a server is fit.
//! [`ChatClient`] is for servers of words alone, which can only be evaluated.
//!
//! The invariant: nothing of a reply is handed on before it was checked in full (token ids,
//! log-probabilities, routing rows); a bad reply is an [`EngineError`], never padded.

mod api;
mod chat;
mod client;
mod config;
mod dialect;
mod fitness;
mod fleet;
mod http;
mod kind;
mod probe;
mod reply;
mod sglang;
mod vllm;

pub use api::{
    Engine, EngineError, EngineErrorKind, EngineInfo, Finish, GenerateRequest, Generation,
    Sampling, SessionOpening, VersionSpan,
};
pub use chat::{
    CalledFunction, ChatClient, ChatMessage, ChatTurn, Conversation, ToolCall, unknown_shape,
};
pub use client::{Client, ClientOptions};
pub use config::{EngineSection, EngineSettings};
pub use dialect::Dialect;
pub use fitness::{Finding, Severity};
pub use fleet::{Fleet, FleetMember, FleetOptions, WorkerStatus, discover};
pub use kind::{EngineKind, Worker};
pub use probe::ProbeReport;
pub use sglang::Sglang;
pub use vllm::Vllm;

/// The client of an SGLang server.
pub type SglangClient = Client<Sglang>;
/// The client of a vLLM server.
pub type VllmClient = Client<Vllm>;
/// How to reach one SGLang server.
pub type SglangOptions = ClientOptions;
