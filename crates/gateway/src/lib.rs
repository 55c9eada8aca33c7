//! The gateway: an HTTP server through which agents sample, whatever their client library.
//!
//! It translates three wire formats, OpenAI Chat Completions, OpenAI Responses and Anthropic
//! Messages, to one [`SampleRequest`] and back, streaming or not. It knows nothing of tokens,
//! engines or sandboxes: a [`Sampler`] answers each request. [`router`] has the routes of one
//! episode, a [`Registry`] those of many, each below a secret path. [`Offers`] are episodes that
//! external workers take, run and return. Read `answer.rs` next.
//!
//! Invariants: a reply is sent as it was sampled, never shortened or rewritten; equal histories give
//! equal [`Message`]s in every dialect, but for [`Message::reply`]; a reply that comes back in the next request gives the
//! message that was sampled; and a [`Receipt`] is handed out only when the client has read the last byte
//! ([`Unconfirmed`]).
//!
//! # Routes
//!
//! `POST chat/completions`, `responses`, `responses/input_tokens`, `messages` and
//! `messages/count_tokens`, `GET models` and `models/{id}`, each with and without `v1/` before it.
//!
//! `POST inference/v1/generate` is vLLM's token-level API, for clients that render prompts
//! themselves; an episode may refuse it. `token_ids`, `sampling_params.max_tokens` and
//! `sampling_params.routed_experts_prompt_start` are honoured. The reply has `choices[0]` with
//! `token_ids`, `finish_reason`, `logprobs.content` (`token` is `token_id:ID`) and
//! `routed_experts`: `data` (base64), `shape` `[rows, MoE layers, top_k]`, `dtype` and `start`, up
//! to the row of the second-to-last token. Errors have OpenAI's form.
//!
//! # Histories
//!
//! * `developer` is `system`. Text parts of one message that are not empty are joined: with a line
//!   break, or with nothing in messages of the assistant, where parts are pieces of one text.
//! * Responses: the items of one reply (reasoning, message, calls) are one message. Reasoning after
//!   content or calls begins the next reply.
//! * Messages: consecutive messages of one role are one turn; results of tools come before the text
//!   of the same turn. `system` messages in the middle stay there. The system block that states
//!   Claude Code's version (`x-anthropic-billing-header`) is left out.
//! * Results follow the reply whose calls they answer, in the order of the calls. A call without a result,
//!   a second result, and a result of a call that the reply before it does not have are refused.
//! * Arguments of calls keep the client's text and are compared as JSON. Messages carries objects:
//!   arguments that are not an object are sent as `{"arguments": TEXT}`.
//! * `encrypted_content` of Responses holds the thinking itself, and wins over `summary`. It names the reply
//!   that the thinking is of, and so does the `signature` of Messages; either may be missing.
//!   `redacted_thinking` is left out.
//! * Responses: `previous_response_id` stands for the messages of an earlier response of the episode, and for
//!   those that this one continued, without their `instructions`. Responses are kept unless `store` is false.
//! * A last message of the assistant is refused in Messages, where it would be the beginning of the reply.
//!
//! # Fields
//!
//! The tables of `fields` say for each field of each dialect whether it is honoured, overridden or refused;
//! `docs/src/fields.md` is generated from them. A field of a wrong type is an error that names it.
//!
//! * Chat: `max_completion_tokens` comes before `max_tokens`, and there are up to 128 replies (`n`). `logprobs`
//!   are of every sampled token, thinking and markers included; `top_logprobs` lists the sampled token alone.
//! * Thinking: `enable_thinking`, `chat_template_kwargs`, `thinking.type` and `reasoning_effort` of Chat, which
//!   must agree; `reasoning.effort` of Responses; `thinking.type` of Messages.
//! * `tool_choice`: `none` hides the tools, and `allowed_tools` all others. `required` or a name is not enforced.
//! * Images, audio and files are refused. Tools of the vendor's servers are left out and listed as
//!   `tools[].type`, and refused in Chat. Tools of all other types are refused, those that the vendor defines
//!   and the client runs among them: `local_shell`, `shell`, `apply_patch`, `computer`; `bash_…`, `text_editor_…`,
//!   `computer_…`, `memory_…`. Tools with `defer_loading` are left out.
//! * Responses: a tool with free text (`custom`) is a function with one string, `input`, whose description has
//!   the grammar; one of a `namespace` is `NAMESPACE__NAME` for the model.
//!
//! Thinking is sent back to the client whenever the model wrote some. A client's key is ignored
//! unless [`GatewayOptions::require_key`] is set. Compressed bodies are refused.
//!
//! # Errors and streams
//!
//! Each error has an [`ErrorCode`], which is attributed to the policy, the environment or the infrastructure, and each [`SampleError`] a status, type
//! and words by which the dialect's clients recognise it. [`Sampler::unanswered`] is told of each; an
//! episode that is over is status 400 with `x-should-retry: false`, which no known client repeats.
//! A stream begins with the first text that its sampler shows ([`TextSink`]), with the whole reply, or
//! with keep-alives after [`GatewayOptions::keep_alive`]; errors after that are events. Text that was
//! sent is the beginning of the reply: if the reply turns out to be another one, the stream ends with an
//! error, and the reply counts as not delivered. Calls are sent when the reply is complete, as are
//! several replies to one request, and replies with `logprobs`. Usage in a stream of Messages is complete
//! in its `message_delta`; a stream that begins early does not know yet how much of the prompt was
//! cached.
//!
//! Keep-alives are comments in Chat, `ping` in Messages, and the stream's first events in Responses, as
//! Codex does not count comments. If the client goes away, the future of its sample is dropped.

mod answer;
mod chat;
mod code;
mod config;
mod connection;
mod content;
mod dialect;
mod episode;
mod fields;
mod message;
mod messages;
mod offers;
mod opaque;
mod options;
mod problem;
mod registry;
mod responses;
mod router;
mod sampler;
mod secret;
mod text;
mod tokens;
mod wire;

#[cfg(any(test, fuzzing))]
#[cfg_attr(
    not(fuzzing),
    expect(unreachable_pub, reason = "the fuzz targets are outside this crate")
)]
mod foreign_text;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod round_trip;

pub use code::ErrorCode;
pub use config::{GatewaySection, GatewaySettings};
pub use connection::{Unconfirmed, serve_stream};
pub use dialect::Dialect;
pub use fields::Overridden;
#[cfg(any(test, fuzzing))]
pub use foreign_text::{check_body, check_request};
pub use message::{Message, Role, ToolCall};
pub use offers::{
    FailureKind, LeaseRecord, Offer, OfferEnd, OfferedAttempt, Offers, RestoredLease,
};
pub use options::GatewayOptions;
pub use registry::{Registration, Registry};
pub use router::router;
pub use sampler::{
    AskedSampling, Delivery, Finish, Receipt, RoutedExperts, SampleError, SampleRequest, Sampled,
    SampledToken, SampledTokens, Sampler, TokenRequest, Tool, ToolChoice, Usage,
};
pub use text::{SampledText, ShownText, TextSink};
