//! SGLang's native routes, which the embedded engine serves, too.

mod fitness;
mod reply;

use crate::dialect::{Dialect, Limits, Survey};
use crate::http::{CALL_TIMEOUT, Wire};
use crate::reply::{Expected, Fault, Reading, parse_version};
use crate::{EngineError, EngineErrorKind, EngineInfo, GenerateRequest};
use camino::Utf8Path;
use fitness::ServerInfo;
use orchestrate_types::{ModelShape, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;

/// SGLang's `/generate`, 0.5.12 and later.
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

/// Explicit wherever the server would otherwise take the model's own defaults.
#[derive(Serialize)]
struct SamplingParams<'a> {
    max_new_tokens: usize,
    temperature: f32,
    top_p: f32,
    top_k: i32,
    min_p: f32,
    // `ignore_eos` is never sent: with it the server ignores these, too.
    #[serde(skip_serializing_if = "<[TokenId]>::is_empty")]
    stop_token_ids: &'a [TokenId],
    skip_special_tokens: bool,
    sampling_seed: u64,
}

#[derive(Deserialize)]
struct ModelInfo {
    model_path: Option<String>,
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    max_model_len: Option<usize>,
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

    fn body(request: &GenerateRequest, limits: &Limits) -> String {
        let sampling = &request.sampling;
        let body = GenerateBody {
            rid: request.request_id.as_str(),
            sampling_params: SamplingParams {
                max_new_tokens: limits.max_new_tokens,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: -1,
                min_p: 0.0,
                stop_token_ids: &sampling.stop_token_ids,
                skip_special_tokens: false,
                // The server takes a signed 64-bit number.
                sampling_seed: sampling.seed >> 1,
            },
            return_logprob: true,
            // Of output tokens only: from 0 on, nothing of the prefix cache would be used.
            logprob_start_len: -1,
            return_routed_experts: request.routed_experts_start.is_some(),
            routed_experts_start_len: request.routed_experts_start,
            session_id: &request.session,
            extra_key: format!("w{}", request.cache_namespace),
            priority: limits.priorities.then_some(request.priority),
            routed_dp_rank: limits.rank,
            stream: false,
        };
        crate::http::json("input_ids", &request.token_ids, &body)
    }

    fn read(body: &[u8], expected: &Expected) -> Result<Reading, Fault> {
        reply::read(body, expected)
    }

    async fn survey(wire: &Wire, shape: &ModelShape) -> Result<Survey, EngineError> {
        let server: ServerInfo = wire.ask("/server_info").await?;
        let model: ModelInfo = wire.ask("/model_info").await?;
        let mut context = server.context_length;
        if context.is_none() {
            let models: Option<Models> = wire.ask_if_known("/v1/models").await?;
            context = models.and_then(|models| models.data.first()?.max_model_len);
        }
        let mut findings = server.findings();
        findings.extend(crate::fitness::check_context(context, shape.context));
        Ok(Survey {
            info: EngineInfo {
                engine: server.name(),
                model_path: model.model_path.or(server.model_path.clone()).unwrap_or_default(),
                routed_experts: server.enable_return_routed_experts.unwrap_or(false),
                policy_version: model.weight_version.as_deref().and_then(parse_version),
                context,
                page_size: server.page_size.unwrap_or(1).max(1),
            },
            facts: server.facts(),
            priorities: server.takes_priorities(),
            ranks: server.ranks(),
            findings,
        })
    }

    async fn pause(wire: &Wire, timeout: Duration) -> Result<(), EngineError> {
        // Never `retract`: it computes rows of old tokens again, under the new weights.
        let call = "/pause_generation";
        wire.tell(call, call, &json!({"mode": "abort"}), timeout).await.map(|_| ())
    }

    async fn load(
        wire: &Wire,
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
        let body = wire.tell(update, update, &body, timeout).await?;
        let reply: UpdateReply = serde_json::from_slice(&body).map_err(|error| {
            wire.error(update, EngineErrorKind::InvalidReply(error.to_string()))
        })?;
        if !reply.success {
            let words = format!("the update failed: {}", reply.message);
            return Err(wire.error(update, EngineErrorKind::InvalidReply(words)));
        }
        let info: ModelInfo = wire.ask("/model_info").await?;
        if info.weight_version.as_deref() == Some(version) {
            return Ok(());
        }
        let found = info.weight_version.unwrap_or_default();
        let words = format!("it names its weights `{found}` after an update to `{version}`");
        Err(wire.error("/model_info", EngineErrorKind::InvalidReply(words)))
    }

    async fn resume(wire: &Wire) -> Result<(), EngineError> {
        let call = "/continue_generation";
        wire.tell(call, call, &json!({}), CALL_TIMEOUT).await.map(|_| ())
    }

    async fn abort(wire: &Wire, request_id: &RequestId) -> Result<(), EngineError> {
        // The server aborts every id that begins with this one; ours have a fixed width.
        let call = "/abort_request";
        let body = json!({"rid": request_id.as_str()});
        wire.tell(call, call, &body, CALL_TIMEOUT).await.map(|_| ())
    }
}
