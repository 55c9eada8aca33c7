//! The embedded inference engine: Qwen3-MoE on CPU with SGLang's HTTP API.
//!
//! [`serve_engine`] runs it in-process or stand-alone. HTTP handlers (`server`, `control`,
//! `generate`) share an `engine`, check bodies (`body`, `fields`) and pass sequences (`request`) to one
//! engine thread (`scheduler`). The thread batches them through the model (`model`, `kernels`,
//! `quantized`) over the prefix cache (`cache`), samples (`sampling`) and replies (`reply`).
//! Invariant: every routing row in a reply is the choice made when that token was processed; it is
//! stored with the token's key and value and never recomputed.

mod body;
mod cache;
mod control;
#[cfg(test)]
mod digest_tests;
mod engine;
mod fields;
mod generate;
mod kernels;
mod loaded;
mod matrix;
mod model;
mod quantized;
mod reply;
mod request;
mod sampling;
mod scheduler;
mod server;

pub use engine::{EngineOptions, EngineServeError};
pub use matrix::WeightFormat;
pub use server::serve_engine;

/// Parsers of requests, for the fuzz targets; in tests, so that what no longer compiles is noticed.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    use super::body::{Bounds, GenerateBody};

    /// The sequences that a body of `/generate` asks for, each as its prompt and the most tokens that it
    /// may sample; `None` if the body is refused.
    pub fn check_body(body: &[u8], vocab: usize, context: usize) -> Option<Vec<(Vec<u32>, usize)>> {
        let body: GenerateBody = super::engine::parse(body).ok()?;
        let (sequences, tokens) = (100, 4 * context);
        let bounds = Bounds { vocab, context, sequences, tokens, tokenizer: None };
        let checked = body.check(bounds, || "new".into()).ok()?;
        let sequence =
            |prompt: super::body::Prompt| (prompt.input_ids, prompt.sampling.max_new_tokens);
        Some(checked.prompts.into_iter().map(sequence).collect())
    }
}
