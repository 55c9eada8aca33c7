//! The clients against scripted servers, and against recorded replies of SGLang and vLLM.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "test helpers")]

mod chat;
mod hostile;
mod kinds;
mod probing;
mod scripted;
mod server;
mod sglang_recorded;
mod streaming;
mod vllm_recorded;
mod vllm_scripted;
mod weights;
