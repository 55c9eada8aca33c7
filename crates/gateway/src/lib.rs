//! The gateway: an HTTP server through which agents sample, whatever their client library.
//!
//! It translates three wire formats, OpenAI Chat Completions, OpenAI Responses and Anthropic
//! Messages, to one [`SampleRequest`] and back, streaming or not. It knows nothing of tokens,
//! engines or sandboxes: a [`Sampler`] answers each request. [`router`] has the routes of one
//! episode, a [`Registry`] those of many, each below a secret path. [`Offers`] are episodes that
//! external workers take, run and return. Read `answer.rs` next.
//!
//! Invariants: a reply is sent as it was sampled, never shortened or rewritten; equal histories give
//! equal [`Message`]s in every dialect; a reply that comes back in the next request gives the
//! message that was sampled; and a [`Receipt`] is handed out only when the connection has taken the
//! last byte.
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
//! * Arguments of calls keep the client's text and are compared as JSON. Messages carries objects:
//!   arguments that are not an object are sent as `{"arguments": TEXT}`.
//! * `encrypted_content` of Responses holds the thinking itself, and wins over `summary`. The
//!   `signature` of Messages is constant and ignored; `redacted_thinking` is left out.
//!
//! # Fields
//!
//! Fields that are not listed are ignored. A field of a wrong type is an error that names it.
//!
//! | Field | Chat | Responses | Messages |
//! |---|---|---|---|
//! | `stream`, tools, `tool_choice` | honoured | honoured | honoured |
//! | token limit | `max_completion_tokens`, else `max_tokens` | `max_output_tokens` | `max_tokens` (required) |
//! | stop strings | `stop` | | `stop_sequences` |
//! | `temperature`, `top_p` | recorded; the run decides | recorded; the run decides | recorded; the run decides |
//! | thinking | `enable_thinking`, `chat_template_kwargs.enable_thinking`, `reasoning_effort` | `reasoning.effort` | `thinking.type` |
//! | number of replies | `n` up to 128; `best_of` refused | | |
//! | `logprobs` | of every sampled token, thinking and markers included; `top_logprobs` lists the sampled token alone | ignored | |
//! | `stream_options.include_usage` | honoured | | |
//! | `include` | | `reasoning.encrypted_content`; others ignored | |
//! | `seed`, penalties, `top_k`, `service_tier`, `parallel_tool_calls`, `disable_parallel_tool_use`, `truncation`, caching, `metadata`, `store` | ignored | ignored | ignored |
//! | format other than text | `response_format` refused | `text.format` refused | `output_format`, `output_config.format` refused |
//! | state on the server | | `previous_response_id`, `conversation`, `prompt`, `background`, `item_reference` refused: a request holds its whole history | `thread` (the client then sends whole histories), `container`, `compaction` refused |
//! | images, audio, files | refused | refused | refused |
//! | older forms | `functions`, `function_call`, role `function` refused | | |
//! | `logit_bias`, `web_search_options`, `audio` | refused | | |
//! | tools of the vendor's servers | refused | left out | left out; `mcp_servers` refused |
//! | tools that the vendor defines and the client runs | refused | `local_shell`, `shell`, `apply_patch` refused | `bash_…`, `text_editor_…`, `computer_…`, `memory_…`, `browser_…` refused |
//! | tools with free text (`custom`) | refused | a function with one string, `input`, whose description has the grammar | |
//! | `namespace` of tools | | `NAMESPACE__NAME` for the model | |
//! | tools with `defer_loading` | | | left out |
//! | thinking in the history | `reasoning_content`, else `reasoning` | items | blocks |
//!
//! Thinking is sent back to the client whenever the model wrote some. A client's key is ignored
//! unless [`GatewayOptions::require_key`] is set. Compressed bodies are refused.
//!
//! # Errors and streams
//!
//! Each [`SampleError`] has a status, type and words by which the dialect's clients recognise it; an
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
mod config;
mod connection;
mod content;
mod episode;
mod message;
mod messages;
mod offers;
mod options;
mod problem;
mod registry;
mod responses;
mod router;
mod sampler;
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

pub use config::{GatewaySection, GatewaySettings};
pub use connection::serve_stream;
#[cfg(fuzzing)]
pub use foreign_text::{check_body, check_request};
pub use message::{Message, Role, ToolCall};
pub use offers::{FailureKind, Offer, OfferEnd, Offers, Terms};
pub use options::GatewayOptions;
pub use registry::{Registration, Registry};
pub use router::router;
pub use sampler::{
    Delivery, Dialect, Finish, Receipt, RoutedExperts, SampleError, SampleRequest, Sampled,
    SampledToken, SampledTokens, Sampler, TokenRequest, Tool, ToolChoice, Usage,
};
pub use text::{SampledText, ShownText, TextSink};
