//! Inference engines: the [`Engine`] trait, clients for SGLang, vLLM and chat servers, and a
//! [`Fleet`] of them.
//!
//! A [`Client`] contains everything that SGLang and vLLM have in common; a [`Dialect`] contains the
//! rest. [`ChatClient`] is for servers with the OpenAI-compatible chat API, which can be evaluated
//! but not trained with. [`EngineKind`] chooses the client by settings, and [`Worker::probe`] finds
//! out whether a server can be trained with.
//!
//! The invariant: nothing of a reply is used before all of it was checked (token ids,
//! log-probabilities, routing rows). A bad reply is an [`EngineError`]; it is never padded or
//! shortened. [`Generation::new`] is the only way to make sampled tokens.

mod api;
mod capability;
mod chat;
mod client;
mod config;
mod dialect;
mod error;
mod fleet;
mod frames;
mod generation;
mod http;
mod kind;
mod message;
mod probe;
mod reply;
mod request;
mod sglang;
mod vllm;

pub use api::{Engine, EngineInfo};
pub use capability::{CapabilityFinding, ProbeReport, Severity, Worker};
pub use chat::{ChatClient, ChatServerOptions, TokenLimitField, unknown_shape};
pub use client::{Client, ClientOptions};
pub use config::{EngineSection, EngineSettings};
pub use dialect::Dialect;
pub use error::{EngineError, EngineErrorKind, ErrorDetail, Refusal};
pub use fleet::{Fleet, FleetOptions, FleetWorker, WorkerStatus, discover};
pub use generation::{Finish, Generation, MessageReply, Reply, SampledTokens, VersionSpan};
pub use kind::EngineKind;
pub use message::{AssistantMessage, ChatMessage, FunctionCall, Thinking, ToolCall};
pub use request::{
    CountedPrompt, GenerateRequest, MessagePrompt, Prompt, Sampling, SessionOpening, TokenListener,
    TokenPrompt,
};
pub use sglang::Sglang;
pub use vllm::Vllm;

pub use orchestrate_settings::TlsClientPem;

/// The client of an SGLang server.
pub type SglangClient = Client<Sglang>;
/// The client of a vLLM server.
pub type VllmClient = Client<Vllm>;
/// How to reach one SGLang server.
pub type SglangOptions = ClientOptions;

/// Parsers of replies, for the fuzz targets.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    pub use crate::reply::{CheckedReply, ExpectedReply};
    use crate::{AssistantMessage, EngineErrorKind, Finish};

    /// Parses a reply of `/v1/chat/completions` to a prompt of `messages` messages.
    ///
    /// # Errors
    /// The first field that is wrong, and why.
    pub fn chat_reply(
        body: &[u8],
        messages: usize,
    ) -> Result<(Finish, AssistantMessage), EngineErrorKind> {
        crate::chat::reply::read(body, messages).map(|(finish, message, _)| (finish, message))
    }
}
