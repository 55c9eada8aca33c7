//! SGLang's native routes, which the embedded engine also serves.

mod capability;
mod reply;

use crate::api::EngineInfo;
use crate::capability::check_context;
use crate::dialect::{Capabilities, Dialect, GenerateOptions};
use crate::error::{EngineError, EngineErrorKind, ErrorDetail};
use crate::http::{CALL_TIMEOUT, ModelList, Server, body_with_ids};
use crate::reply::{CheckedReply, ExpectedReply, parse_version};
use crate::request::{GenerateRequest, TokenPrompt};
use camino::Utf8Path;
use capability::ServerInfo;
use orchestrate_types::{ModelShape, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;

/// SGLang's `/generate`, version 0.5.12 and later.
#[derive(Debug)]
pub struct Sglang;

#[derive(Serialize)]
struct GenerateBody<'a> {
    rid: &'a str,
    sampling_params: SamplingParams<'a>,
    return_logprob: bool,
    logprob_start_len: i32,
    return_routed_experts: bool,
    // The server refuses an explicit null here.
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts_start_len: Option<usize>,
    session_id: &'a str,
    extra_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_dp_rank: Option<usize>,
    stream: bool,
}

/// Values are explicit where the server would otherwise use the model's own defaults.
#[derive(Serialize)]
struct SamplingParams<'a> {
    max_new_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: i32,
    min_p: f32,
    // `ignore_eos` is never sent, because with it the server also ignores these.
    #[serde(skip_serializing_if = "<[TokenId]>::is_empty")]
    stop_token_ids: &'a [TokenId],
    skip_special_tokens: bool,
    sampling_seed: u64,
    /// Tokens between two frames of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_interval: Option<usize>,
}

/// Tokens between two frames of a stream of up to `max_new_tokens`. Each frame repeats the whole reply, so
/// their number is limited; the first one comes with the first token in any case.
fn frame_tokens(max_new_tokens: usize) -> usize {
    (max_new_tokens / 256).max(8)
}

#[derive(Deserialize)]
struct ModelInfo {
    model_path: Option<String>,
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct UpdateReply {
    success: bool,
    #[serde(default)]
    message: String,
}

impl Dialect for Sglang {
    const GENERATE: &'static str = "/generate";
    const RANK_HEADER: Option<&'static str> = None;
    const STREAMS: bool = true;

    fn body(request: &GenerateRequest, prompt: &TokenPrompt, options: &GenerateOptions) -> String {
        let sampling = &request.sampling;
        let body = GenerateBody {
            rid: request.request_id.as_str(),
            sampling_params: SamplingParams {
                max_new_tokens: options.max_new_tokens,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: -1,
                min_p: 0.0,
                stop_token_ids: &sampling.stop_token_ids,
                skip_special_tokens: false,
                // The server takes a signed 64-bit number.
                sampling_seed: sampling.seed >> 1,
                stream_interval: options.stream.then(|| frame_tokens(options.max_new_tokens)),
            },
            return_logprob: true,
            // For output tokens only: with 0 the server would not use its prefix cache.
            logprob_start_len: -1,
            return_routed_experts: prompt.routed_experts_start.is_some(),
            routed_experts_start_len: prompt.routed_experts_start,
            session_id: &request.session,
            extra_key: format!("w{}", prompt.cache_namespace),
            priority: options.send_priority.then_some(request.priority),
            routed_dp_rank: options.rank,
            stream: options.stream,
        };
        body_with_ids("input_ids", &prompt.ids, &body)
    }

    fn read(body: &[u8], expected: &ExpectedReply) -> Result<CheckedReply, EngineErrorKind> {
        reply::read(body, expected)
    }

    async fn capabilities(
        server: &Server,
        shape: &ModelShape,
    ) -> Result<Capabilities, EngineError> {
        let info: ServerInfo = server.get_json("/server_info").await?;
        let model: ModelInfo = server.get_json("/model_info").await?;
        let mut context = info.context_length;
        if context.is_none() {
            let models: Option<ModelList> = server.get_json_if_supported("/v1/models").await?;
            context = models.and_then(|models| models.data.first()?.max_model_len);
        }
        let mut findings = info.findings();
        findings.extend(check_context(context, shape.context));
        Ok(Capabilities {
            info: EngineInfo {
                engine: info.name(),
                model_path: model.model_path.or(info.model_path.clone()).unwrap_or_default(),
                routed_experts: info.enable_return_routed_experts.unwrap_or(false),
                policy_version: model.weight_version.as_deref().and_then(parse_version),
                context,
                page_size: info.page_size.unwrap_or(1).max(1),
            },
            facts: info.facts(),
            priorities: info.supports_priorities(),
            streams_increments: info.incremental_streaming_output.unwrap_or(false),
            ranks: info.ranks(),
            findings,
        })
    }

    async fn pause(server: &Server, timeout: Duration) -> Result<(), EngineError> {
        // Never `retract`: it recomputes the rows of old tokens under the new weights.
        let call = "/pause_generation";
        server.post_json(call, call, &json!({"mode": "abort"}), timeout).await.map(|_| ())
    }

    async fn load(
        server: &Server,
        checkpoint: &Utf8Path,
        version: &str,
        timeout: Duration,
    ) -> Result<(), EngineError> {
        let update = "/update_weights_from_disk";
        let body = json!({
            "model_path": checkpoint.as_str(),
            "weight_version": version,
            "flush_cache": true,
        });
        let body = server.post_json(update, update, &body, timeout).await?;
        let reply: UpdateReply = serde_json::from_slice(&body).map_err(|error| {
            let detail = ErrorDetail::caused_by("cannot parse the reply", error);
            server.error(update, EngineErrorKind::InvalidReply(detail))
        })?;
        if !reply.success {
            let message = format!("the update failed: {}", reply.message);
            return Err(server.error(update, EngineErrorKind::invalid_reply(message)));
        }
        let info: ModelInfo = server.get_json("/model_info").await?;
        if info.weight_version.as_deref() == Some(version) {
            return Ok(());
        }
        let found = info.weight_version.unwrap_or_default();
        let message = format!("its weights are named `{found}` after an update to `{version}`");
        Err(server.error("/model_info", EngineErrorKind::invalid_reply(message)))
    }

    async fn resume(server: &Server) -> Result<(), EngineError> {
        let call = "/continue_generation";
        server.post_json(call, call, &json!({}), CALL_TIMEOUT).await.map(|_| ())
    }

    async fn abort(server: &Server, request_id: &RequestId) -> Result<(), EngineError> {
        // The server aborts every id that starts with this one; ours have a fixed width.
        let call = "/abort_request";
        let body = json!({"rid": request_id.as_str()});
        server.post_json(call, call, &body, CALL_TIMEOUT).await.map(|_| ())
    }
}
